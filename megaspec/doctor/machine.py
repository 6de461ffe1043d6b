"""What of a machine matters to ranks beside its GPUs: shared memory, disk, limits, variables, networks. Torch-free."""

import errno
import os
import re
import resource
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaspec.core.errors import RecipeError, WriteError
from megaspec.core.units import GIB, MIB, bytes_in_words
from megaspec.doctor.finding import Finding, error, ok, warn

SHM = Path("/dev/shm")
SYSTEM = Path("/sys")
# What a container has of /dev/shm when nobody says so.
CONTAINER_SHM = 64 * MIB
SHM_OF_A_RANK = GIB
LEAST_FREE = 50 * GIB
# What is written to see how fast a disk is.
WRITTEN = 256 * MIB
BLOCK = 4 * MIB
SLOW_DISK = 200e6
LEAST_FILES = 4096
GOOD_FILES = 65536
# Bits per second: what a network card of a cluster has at least.
SLOW_NETWORK = 10_000


# ---- shared memory


def shm_finding(size: int | None, free: int | None, *, ranks: int) -> Finding:
    """`size`, `free`: bytes of /dev/shm; None: there is none."""
    wanted = max(1, ranks) * SHM_OF_A_RANK
    do = "docker run --shm-size=64g (or --ipc=host); in Kubernetes mount an emptyDir with medium: Memory, as "
    do += "launcher=kubernetes does"
    why = "ranks of one machine, NCCL and data loaders' workers hand each other what they have through it"
    if size is None or free is None:
        return error("shm", f"{SHM} is missing", why=why, do=do, code=RecipeError.exit_code)
    what = f"{SHM} has {bytes_in_words(size)}, {bytes_in_words(free)} of them free"
    if free <= CONTAINER_SHM and ranks > 1:
        why += "; NCCL fails with a bus error or `unhandled system error` where it runs out"
        return error("shm", what, why=why, do=do, code=RecipeError.exit_code)
    if free < wanted:
        return warn("shm", what, why=why, do=f"{do}; {bytes_in_words(wanted)} are enough for {max(1, ranks)} ranks")
    return ok("shm", what)


def look_at_shm(*, ranks: int) -> Finding:
    """That of this machine."""
    try:
        usage = shutil.disk_usage(SHM)
    except OSError:
        return shm_finding(None, None, ranks=ranks)
    return shm_finding(usage.total, usage.free, ranks=ranks)


# ---- disk


def look_at_disk(folder: Path) -> Iterator[Finding]:
    """Free space of the disk that runs are on, and the rate at which it writes. Leaves nothing behind."""
    there = folder.absolute()
    # a folder that is not there yet will be made in the nearest that is
    while not there.exists() and there.parent != there:
        there = there.parent
    try:
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{there} is no folder")
        free = shutil.disk_usage(there).free
        yield space_finding(folder, free)
        if free < 4 * WRITTEN:
            # too full to be measured, but it has to be writable
            write_rate(there, BLOCK)
        else:
            yield rate_finding(folder, write_rate(there))
    except OSError as failed:
        yield cant_write(folder, failed)


def space_finding(folder: Path, free: int) -> Finding:
    """`free`: bytes."""
    what = f"{bytes_in_words(free)} are free for {folder}"
    if free >= LEAST_FREE:
        return ok("disk", what)
    why = "a checkpoint has 12 to 16 bytes a parameter, and two of them are there while one is saved"
    do = "delete old runs, set run_dir to a larger disk, or lower checkpoint.keep"
    return warn("disk", what, why=why, do=do)


def rate_finding(folder: Path, rate: float) -> Finding:
    """`rate`: bytes per second."""
    what = f"{folder}: {rate / 1e6:,.0f} MB/s written, and brought to the disk"
    if rate >= SLOW_DISK:
        return ok("disk", what)
    why = f"a checkpoint of 8B parameters has 112 GB: {112e9 / rate / 60:,.0f} minutes at this rate"
    return warn("disk", what, why=why, do="set run_dir to a faster disk, or save less often (checkpoint.every)")


def cant_write(folder: Path, failed: OSError) -> Finding:
    """Why nothing can be written there."""
    why = "a run writes its checkpoints there"
    do = "set run_dir to a folder that you may write to"
    if failed.errno in (errno.ENOSPC, errno.EDQUOT):
        do = "delete old runs, or set run_dir to another disk"
    return error("disk", f"{folder}: {failed.strerror}", why=why, do=do, code=WriteError.exit_code)


def write_rate(folder: Path, size: int | None = None) -> float:
    """Bytes per second of `size` bytes (WRITTEN), fsync included. OSError: nothing can be written there."""
    if size is None:
        size = WRITTEN
    block = os.urandom(BLOCK)
    path = folder / f".megaspec-doctor-{os.getpid()}"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        began = time.perf_counter()
        for _ in range(size // len(block)):
            os.write(fd, block)
        os.fsync(fd)
        return size / (time.perf_counter() - began)
    finally:
        os.close(fd)
        path.unlink()


# ---- limits


def limit_findings(files: int, locked: int, *, has_network_cards: bool) -> Iterator[Finding]:
    """`files`, `locked`: what this process may have, -1 for no bound; `locked` in bytes of memory."""
    what = "no bound on open files" if files < 0 else f"{files:,} open files"
    if 0 <= files < LEAST_FILES:
        why = "each pair of ranks, each worker and each shard of data takes some: `Too many open files` ends the run"
        do = "ulimit -n 65536, or LimitNOFILE=infinity of the service that starts jobs"
        yield error("limits", what, why=why, do=do, code=RecipeError.exit_code)
    elif 0 <= files < GOOD_FILES:
        why = "runs of hundreds of ranks, or data in thousands of files, need more"
        yield warn("limits", what, why=why, do="ulimit -n 65536")
    else:
        yield ok("limits", what)
    if locked < 0:
        yield ok("limits", "no bound on locked memory")
    elif has_network_cards:
        what = f"{bytes_in_words(locked)} of locked memory"
        why = "InfiniBand and RoCE lock what they send: NCCL falls back to sockets, or fails with ibv_reg_mr"
        do = "ulimit -l unlimited; SLURM: PropagateResourceLimitsExcept=MEMLOCK; docker run --ulimit memlock=-1"
        yield error("limits", what, why=why, do=do, code=RecipeError.exit_code)
    else:
        yield ok("limits", f"{bytes_in_words(locked)} of locked memory, which no network card here needs")


def look_at_limits(*, has_network_cards: bool) -> Iterator[Finding]:
    """Those of this process, which ranks take over."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield from limit_findings(files, locked, has_network_cards=has_network_cards)


# ---- variables


@dataclass(frozen=True)
class Harmful:
    """A value of a variable that costs speed or safety."""

    name: str
    pattern: str
    """Of the values."""
    why: str
    do: str


HARMFUL = (
    Harmful("CUDA_LAUNCH_BLOCKING", "1", "the host waits for every kernel: steps are several times slower", "unset it"),
    Harmful(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "1",
        "one queue for all streams: sharded weights, offload and exchanges of experts no longer run beside arithmetic; "
        "Megatron-LM asks for it, megaspec orders its streams itself",
        "unset it, or set it to 8 or 32",
    ),
    Harmful("NCCL_P2P_DISABLE", "1", "GPUs of one machine talk through its memory instead of NVLink", "unset it"),
    Harmful("NCCL_SHM_DISABLE", "1", "GPUs of one machine talk over the network where they have no NVLink", "unset it"),
    Harmful("NCCL_IB_DISABLE", "1", "machines talk over sockets instead of InfiniBand or RoCE", "unset it"),
    Harmful("NCCL_DEBUG", "(?i)TRACE", "every call of NCCL is written down", "NCCL_DEBUG=INFO, or WARN"),
    Harmful(
        "NCCL_ALGO",
        ".+",
        "NCCL's own choice by size and machine is switched off",
        "unset it once what it was for is done",
    ),
    Harmful("NCCL_PROTO", ".+", "NCCL's own choice by size is switched off", "unset it once what it was for is done"),
    Harmful("TORCH_DISTRIBUTED_DEBUG", "(?i)DETAIL", "every collective is checked by another one", "unset it"),
    Harmful(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "0",
        "a rank that misses another one waits for ever instead of ending the run",
        "unset it",
    ),
    Harmful("TORCH_NCCL_BLOCKING_WAIT", "1", "the host waits for every collective", "unset it"),
    Harmful(
        "NVIDIA_TF32_OVERRIDE", "0|1", "products of fp32 are not what precision says", "unset it; precision decides"
    ),
    Harmful("TORCHDYNAMO_DISABLE", "1", "torch.compile does nothing", "unset it; parallelism and kernels decide"),
    Harmful("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "every tensor asks the driver for memory", "unset it"),
    Harmful(
        "OMP_NUM_THREADS", "1", "what a CPU rank computes runs on one core", "unset it: the launcher shares cores out"
    ),
)
# Of these a value is told although nothing is wrong with it: it decides how ranks talk.
TOLD = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF")
_ON_CPU_ALONE = ("OMP_NUM_THREADS",)


def variable_findings(environ: Mapping[str, str], *, gpus: int) -> Iterator[Finding]:
    """Variables that change how ranks run."""
    found = []
    for one in HARMFUL:
        value = environ.get(one.name)
        if value is None or not re.fullmatch(one.pattern, value.strip()):
            continue
        if one.name in _ON_CPU_ALONE and gpus:
            continue
        found.append(warn("environment", f"{one.name}={value}", why=one.why, do=one.do))
    for name in TOLD:
        if name in environ:
            found.append(ok("environment", f"{name}={environ[name]}"))
    if not found:
        found.append(ok("environment", "no variable that slows ranks down"))
    yield from found


# ---- networks


@dataclass(frozen=True)
class Card:
    """A network card."""

    name: str
    is_up: bool
    megabits: int | None = None
    """Per second; None: it does not say."""
    is_rdma: bool = False
    """InfiniBand or RoCE."""


def read_cards(system: Path = SYSTEM) -> list[Card]:
    """Network cards of this machine, virtual ones left out."""
    cards = []
    for folder in sorted((system / "class" / "net").glob("*")):
        if (folder / "device").exists():
            speed = _read(folder / "speed")
            megabits = int(speed) if speed.isdigit() else None
            cards.append(Card(folder.name, _read(folder / "operstate") == "up", megabits))
    for port in sorted((system / "class" / "infiniband").glob("*/ports/*")):
        # 4: ACTIVE; 400 Gb/sec (4X NDR)
        is_up = _read(port / "state").startswith("4:")
        rate = re.match(r"([0-9.]+) Gb/sec", _read(port / "rate"))
        megabits = None if rate is None else round(float(rate[1]) * 1000)
        cards.append(Card(f"{port.parents[1].name}:{port.name}", is_up, megabits, is_rdma=True))
    return cards


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def card_findings(cards: list[Card], *, nodes: int) -> Iterator[Finding]:
    """Cards between machines; they matter where a run has several."""
    for card in cards:
        speed = "" if card.megabits is None else f", {card.megabits / 1000:g} Gb/s"
        if card.is_rdma and not card.is_up:
            why = "NCCL uses every port of InfiniBand or RoCE: ranks behind this one are slower, or don't start"
            do = (
                "ibstat; have the cable or switch looked at, or leave it out: NCCL_IB_HCA=^"
                + card.name.partition(":")[0]
            )
            yield warn("links", f"{card.name} is down{speed}", why=why, do=do)
        elif card.is_up and nodes > 1 and not card.is_rdma and card.megabits and card.megabits < SLOW_NETWORK:
            why = "between machines gradients go over it where there is no InfiniBand or RoCE"
            do = "name the fast one: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
            yield warn("links", f"{card.name}{speed}", why=why, do=do)
        elif card.is_up:
            yield ok("links", f"{card.name}{speed}")
    if not any(card.is_up for card in cards):
        yield ok("links", "no network card that is up: ranks of this machine alone")


def read_interfaces() -> list[str]:
    """Names of all network interfaces, virtual ones too."""
    return sorted(name for _, name in socket.if_nameindex())


def chosen(said: str, names: Sequence[str], *, by_beginning: bool) -> list[str]:
    """Those that a variable of NCCL's or gloo's names: a list with commas, of beginnings of names or of whole ones.
    NCCL takes `=` before it for whole names, `^` for all others, and a port behind a colon."""
    is_left_out = said.startswith("^")
    said = said.removeprefix("^")
    if said.startswith("="):
        by_beginning = False
    words = [word.partition(":")[0] for word in said.removeprefix("=").split(",") if word]
    named = []
    for name in names:
        if by_beginning:
            is_named = any(name.startswith(word) for word in words)
        else:
            is_named = name in words
        if is_named != is_left_out:
            named.append(name)
    return named


def interface_findings(
    environ: Mapping[str, str], interfaces: Sequence[str], cards: Sequence[Card], *, nodes: int
) -> Iterator[Finding]:
    """Variables that name network cards which this host does not have. Ranks of one machine alone don't read them."""
    there = ", ".join(interfaces) or "none"
    for variable, by_beginning in (("NCCL_SOCKET_IFNAME", True), ("GLOO_SOCKET_IFNAME", False)):
        said = environ.get(variable)
        if not said or chosen(said, interfaces, by_beginning=by_beginning):
            continue
        what = f"{variable}={said} names no network card of this host: {there}"
        why = "ranks of several hosts meet over it, and end where it is not there"
        do = f"set {variable} to one of them, or unset it"
        if nodes > 1:
            yield error("links", what, why=why, do=do, code=RecipeError.exit_code)
        else:
            yield warn("links", what, why=why, do=do)
    said = environ.get("NCCL_IB_HCA")
    adapters = list(dict.fromkeys(card.name.partition(":")[0] for card in cards if card.is_rdma))
    if said and not chosen(said, adapters, by_beginning=True):
        what = f"NCCL_IB_HCA={said} names no InfiniBand or RoCE card of this host: {', '.join(adapters) or 'none'}"
        why = "NCCL says nothing and goes over sockets, which are many times slower"
        yield warn("links", what, why=why, do="set NCCL_IB_HCA to some of them, or unset it")


def name_finding(name: str, address: str | None, *, nodes: int) -> Finding:
    """`address`: what this host's own name means; None: nothing."""
    if address is None:
        why = "gloo asks for the address of this host's own name"
        do = f"put `127.0.0.1 {name}` into /etc/hosts, or set GLOO_SOCKET_IFNAME"
        return error("links", f"{name} has no address", why=why, do=do, code=RecipeError.exit_code)
    if address.startswith("127.") and nodes > 1:
        why = "gloo of this host tells the others that address, which is their own"
        do = "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the card that others reach, or mend /etc/hosts"
        return error("links", f"{name} is {address} here", why=why, do=do, code=RecipeError.exit_code)
    return ok("links", f"this host, {name}, is {address}")


def look_at_name(environ: Mapping[str, str], *, nodes: int) -> Finding:
    """This host's."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = None
    said = environ.get("GLOO_SOCKET_IFNAME")
    if said:
        taken = chosen(said, read_interfaces(), by_beginning=False)
        if not taken:
            # told as an error of the variable
            return ok("links", f"this host is {name}")
        return ok("links", f"this host is {name}; gloo takes the address of {taken[0]}")
    return name_finding(name, address, nodes=nodes)
