"""How many ranks the words in front of a program start: torchrun's, srun's, mpirun's or deepspeed's count."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megaspec.core.units import plural
from megaspec.megatron.launch_options import read_options
from megaspec.megatron.program import CommandLine, Launch

_WAY_OUT = "give --gpus N"
# Variables that launchers take for options which are not given: torch.distributed.run and srun.
_VARIABLES = {
    "torchrun": {"PET_NNODES": "nodes", "PET_NPROC_PER_NODE": "nproc"},
    "srun": {
        "SLURM_NNODES": "nodes",
        "SLURM_JOB_NUM_NODES": "nodes",
        "SLURM_NPROCS": "ranks",
        "SLURM_NTASKS": "ranks",
        "SLURM_NTASKS_PER_NODE": "nproc",
    },
}
VARIABLES = tuple(name for names in _VARIABLES.values() for name in names)
"""That say how many ranks are started."""
_SET = re.compile(rf"(?<![A-Za-z0-9_])({'|'.join(VARIABLES)})=([^,]*)")
_SHOWN = {
    "torchrun": {"nodes": "--nnodes", "nproc": "--nproc-per-node"},
    "deepspeed": {"nodes": "--num_nodes", "nproc": "--num_gpus"},
    "srun": {"nodes": "--nodes", "nproc": "--ntasks-per-node", "ranks": "--ntasks"},
    "mpirun": {"ranks": "-np"},
}
# Words in front of a program that start it once.
_STARTS_ONE = re.compile(
    r"python[\d.]*|ipython|pypy[\d.]*|(?:ba|z|da|k)?sh|env|exec|command|time|nice|ionice|nohup|setsid|sudo|stdbuf|timeout"
    r"|unbuffer|script|chroot|taskset|numactl|nsys|ncu|nvprof|dlprof|rocprof\w*|rocprof-\w+|compute-sanitizer|perf|gdb"
    r"|cuda-gdb|strace|ltrace|valgrind|catchsegv|py-spy|memray|scalene|viztracer|kernprof|coverage|uv|uvx|poetry|pipenv"
    r"|pdm|hatch|pixi|conda|mamba|micromamba|singularity|apptainer|docker|nvidia-docker|podman|enroot|shifter|sarus|ssh"
)
_MACHINE_KNOWS = ("auto", "cpu", "gpu", "xpu")


@dataclass(frozen=True)
class Ranks:
    """What a command says about its world size."""

    count: int | None
    """None: it says nothing, or what it says can't be known."""
    launcher: str
    """Who starts them. "": nobody."""
    why: str
    """Why the count can't be known, with the way out. "": it is known, or nothing starts ranks."""


def count_ranks(
    words: Sequence[str], line: CommandLine, *, settings: Sequence[str] = (), directives: Sequence[str] = ()
) -> Ranks:
    """The ranks that the words in front of a program start.

    `line`: what the words are. `settings`: NAME=VALUE in front of them. `directives`: srun's defaults, from `#SBATCH`
    lines.
    """
    if line.program is None:
        return Ranks(None, "", "")
    front = words[: line.program.begin]
    counts: list[_RankCount] = []
    for launch in line.launches:
        variables = _variables(launch.kind, [*settings, *words[: launch.begin]])
        defaults: dict[str, str] = {}
        if launch.kind == "srun":
            defaults = read_options("srun", directives, 0).values
        counts.append(_RankCount(launch, variables, defaults))
    if not counts:
        return Ranks(None, "", _who_starts(front))
    innermost = counts[-1]
    ranks = innermost.ranks()
    if ranks.count is None:
        return ranks
    why = _several_times(counts[:-1], innermost, ranks.count)
    if not why and front and front[0].startswith("$") and not innermost.says_nodes:
        why = f"{front[0]} is not set, and may start {innermost.name} several times; {_WAY_OUT}"
    if why:
        return Ranks(None, innermost.name, why)
    return ranks


def what_is_refused(words: Sequence[str], line: CommandLine) -> str:
    """Why it can't be known which program a launcher starts with which flags; "" where it can."""
    for launch in line.launches:
        if launch.options.refused:
            return f"{launch.name}: {launch.options.refused[0]}"
        if launch.kind in ("mpirun", "srun") and ":" in words[launch.begin :]:
            return f"{launch.name}: `:` begins another program in the same world; give a command with one program"
    return ""


def _several_times(outer: Sequence["_RankCount"], innermost: "_RankCount", count: int) -> str:
    """What is wrong with launchers that start the innermost one; "" where it is started once on each of its nodes."""
    if not outer:
        return ""
    who = " and ".join(one.name for one in outer)
    started = 1
    unknown = ""  # why it can't be known how often, of the first of which it can't
    for one in outer:
        times, why = one.times()
        if times is not None:
            started *= times
        elif not unknown:
            unknown = why
    nodes = innermost.number("nodes") or 1
    # by which the innermost one is told for how many nodes it is
    option = _SHOWN[innermost.kind].get("nodes", "")
    if unknown:
        if innermost.says_nodes:
            return ""
        way_out = _WAY_OUT
        if option:
            way_out = f"give {option} to {innermost.name}, or {_WAY_OUT}"
        why = f"how often {who} starts {innermost.name} can't be known: {unknown}"
        return f"{why}; each would train alone; {way_out}"
    if started == nodes:
        return ""
    if nodes == 1:
        what = f"{started} separate trainings of {count:,} {plural('rank', count)}"
        way_out = f"for one of them {_WAY_OUT}"
        if option:
            way_out = f"give {option} {started}, or {way_out}"
        return f"{who} starts {started} times {innermost.name}, each for 1 node: {what}; {way_out}"
    return f"{who} starts {started} times {innermost.name}, which is for {nodes} nodes; {_WAY_OUT}"


def _who_starts(front: Sequence[str]) -> str:
    """Why it can't be known how many ranks are started by what is no launcher; "" where it starts one."""
    if not front:
        return ""
    first = front[0]
    if first.startswith("$"):
        return f"{first} is not set, and may start several ranks; {_WAY_OUT}"
    scripts = [word for word in front if word.endswith((".sh", ".bash"))]
    if scripts:
        return f"{scripts[0]}: how many ranks it starts can't be known; {_WAY_OUT}"
    base = first.rpartition("/")[2]
    if first.startswith("-") or "=" in first or _STARTS_ONE.fullmatch(base):
        return ""
    return f"{first}: how many ranks it starts can't be known; {_WAY_OUT}"


def _variables(kind: str, words: Sequence[str]) -> dict[str, tuple[str, str]]:
    """What is said -> variable and value, of what is set in front: `NAME=1`, `env NAME=1`, `--export=ALL,NAME=1`."""
    says = _VARIABLES.get(kind, {})
    found: dict[str, tuple[str, str]] = {}
    for before, word in pairwise(["", *words]):
        for name, value in _SET.findall(word):
            if name in says:
                found[says[name]] = (name, value)
        # `env -u NAME`, `env --unset=NAME`
        unset = word.removeprefix("--unset=")
        if unset in says and (before in ("-u", "--unset") or unset != word):
            found.pop(says[unset], None)
    return found


class _RankCount:
    """What one launcher says about the number of ranks: in its words, else in variables, else in its defaults."""

    def __init__(self, launch: Launch, variables: Mapping[str, tuple[str, str]], defaults: Mapping[str, str]):
        self.launch = launch
        self.kind = launch.kind
        self.name = launch.name
        said = launch.options.values
        self.values = dict(defaults)
        """What is said -> its value."""
        self.written = {what: f"#SBATCH {_SHOWN['srun'].get(what, what)} {text}" for what, text in defaults.items()}
        """What is said -> as it is written."""
        for what, (name, text) in variables.items():
            self.values[what] = text
            self.written[what] = f"{name}={text}"
        # its own words win over variables, and these over its defaults;
        # -N 2 among its own words asks for other ranks than the -n 32 of the job
        if "ranks" not in said and ("nodes" in said or "nproc" in said):
            self.values.pop("ranks", None)
        self.values.update(said)
        self.written.update(launch.options.written)

    @property
    def says_nodes(self) -> bool:
        """True when it says for how many nodes it is, so that its world is the same however often it is started."""
        return "nodes" in self.values or "standalone" in self.launch.options.flags

    def number(self, what: str) -> int | None:
        """A plain number above 0, or a range that holds one; None for every other value, or none."""
        text = self.values.get(what, "")
        lowest, _, highest = text.replace("-", ":").partition(":")
        if highest == lowest:
            text = lowest
        if not re.fullmatch(r"0*[1-9][0-9]{0,8}", text):
            return None
        return int(text)

    def ranks(self) -> Ranks:
        """The ranks of the program that it starts."""
        if self.kind not in _SHOWN:
            return self.unknown("its ranks are not counted here")
        why = self._unreadable()
        if why:
            return self.unknown(why)
        if self.kind == "torchrun":
            # torchrun's own defaults: one node, one process
            nodes = self.number("nodes") if "nodes" in self.values else 1
            nproc = self.number("nproc") if "nproc" in self.values else 1
            return self._product(nodes, nproc)
        if self.kind == "deepspeed" and ("include" in self.values or "exclude" in self.values):
            return self._of_slots()
        if self.kind == "srun" and "components" in self.values:
            return self.unknown(f"{self.written['components']} starts ranks in several parts of the job")
        if "programs" in self.values:
            return self.unknown(f"{self.written['programs']} names programs that are not read")
        if "ranks" in self.values:
            return Ranks(self.number("ranks"), self.name, "")
        if self.kind == "mpirun":
            return self.unknown(f"it does not say -np{self._instead()}")
        if self.kind == "srun" and "per_gpu" in self.values:
            return self.unknown(f"{self.written['per_gpu']} depends on its GPUs{self._instead()}")
        return self._product(self.number("nodes"), self.number("nproc"))

    def times(self) -> tuple[int | None, str]:
        """How often it starts another launcher, or why that can't be known."""
        nodes = self.number("nodes")
        only_nodes = not {"ranks", "nproc", "per_gpu", "components"} & set(self.values)
        if self.kind == "srun" and nodes and only_nodes and not self._unreadable():
            # srun's own default: one task on each node
            return nodes, ""
        ranks = self.ranks()
        before = f"{self.name}: how many ranks it starts can't be known: "
        return ranks.count, ranks.why.removeprefix(before).removesuffix(f"; {_WAY_OUT}")

    def unknown(self, why: str) -> Ranks:
        return Ranks(None, self.name, f"{self.name}: how many ranks it starts can't be known: {why}; {_WAY_OUT}")

    def _unreadable(self) -> str:
        """Why its numbers can't be known; "" where they can be, or it says none."""
        options = self.launch.options
        for what in _SHOWN.get(self.kind, {}):
            if what in self.values and self.number(what) is None:
                return f"{self.written[what]} is not a number that can be known{self._because(what)}"
        if options.unclear:
            return options.unclear[0]
        if options.variables:
            return f"{options.variables[0]} is not set, and may hold options"
        return ""

    def _because(self, what: str) -> str:
        text = self.values[what]
        if text in _MACHINE_KNOWS:
            return " (as many as the machine has)"
        if re.fullmatch(r"\d+[:-]\d+", text):
            return " (nodes may come and go)"
        return ""

    def _product(self, nodes: int | None, nproc: int | None) -> Ranks:
        if nodes is None or nproc is None:
            shown = _SHOWN[self.kind]
            return self.unknown(f"it does not say {shown['nodes']} and {shown['nproc']}{self._instead()}")
        return Ranks(nodes * nproc, self.name, "")

    def _of_slots(self) -> Ranks:
        """deepspeed's `--include a:0,1@b:0`."""
        for what in ("nodes", "nproc"):
            if what in self.values:
                with_what = self.written.get("include") or self.written["exclude"]
                return self.unknown(f"{self.written[what]} excludes {with_what}")
        if "exclude" in self.values:
            return self.unknown(f"{self.written['exclude']} depends on its hosts")
        slots: set[tuple[str, str]] = set()
        for host in self.values["include"].split("@"):
            name, _, numbers = host.partition(":")
            for number in numbers.split(","):
                if not re.fullmatch(r"[0-9]{1,4}", number):
                    return self.unknown(f"{self.written['include']} does not list the GPUs of each host")
                slots.add((name, str(int(number))))
        return Ranks(len(slots), self.name, "")

    def _instead(self) -> str:
        """What it says in place of a count."""
        said = self.written
        if "gpus" in said and self.kind == "srun":
            return f" (its GPUs, {self.values['gpus']}, are no ranks)"
        if "per_node" in said:
            return f" ({said['per_node']} is a number for each node or socket, and how many there are can't be known)"
        if "hosts" in said:
            return f" ({said['hosts']} names hosts, and MPIs differ in how many ranks they start there)"
        return ""
