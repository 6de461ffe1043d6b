"""The options of launchers: which of them take values, and which say how many ranks are started.

Read in torch.distributed.run, deepspeed.launcher.runner, and the manuals of srun, Open MPI and MPICH.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

TORCHRUN = ("torchrun", "ft_launcher")
TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_MPI = ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun")
# They start several ranks, or one agent on each of several nodes, and are not counted here.
_UNCOUNTED = ("accelerate", "horovodrun", "flux", "aprun", "jsrun", "lsrun", "ibrun", "yhrun", "pdsh", "clush")
STARTS_PYTHON = ("torchrun", "deepspeed")
"""Kinds whose first word without a dash is a Python file, or with --module a module."""

# What an option says -> its names.
_COUNTED = {
    "torchrun": {"nodes": "nnodes", "nproc": "nproc-per-node"},
    "deepspeed": {
        "nodes": "num-nodes",
        "nproc": "num-gpus num-accelerators",
        "include": "i include",
        "exclude": "e exclude",
    },
    "srun": {
        "ranks": "n ntasks",
        "nodes": "N nodes",
        "nproc": "ntasks-per-node",
        "per_gpu": "ntasks-per-gpu",
        "components": "het-group pack-group",
        "gpus": "gres gpus-per-node G gpus gpus-per-task",
    },
    "mpirun": {
        "ranks": "np n c",
        "per_node": "map-by npernode N ppn perhost npersocket",
        "hosts": "H host hosts hostfile machinefile machine f default-hostfile",
        "programs": "app configfile",
    },
}  # fmt: skip
_VALUED = {
    "torchrun": """
        rdzv-backend rdzv-endpoint rdzv-id rdzv-conf max-restarts monitor-interval start-method event-log-handler role
        log-dir logdir r redirects t tee local-ranks-filter duplicate-stdout-filters duplicate-stderr-filters node-rank
        master-addr master-port local-addr logs-specs numa-binding signals-to-handle shutdown-timeout
        fault-tol-cfg-path""",
    "deepspeed": """
        H hostfile min-elastic-nodes max-elastic-nodes master-port master-addr node-rank launcher launcher-args
        enable-each-rank-log autotuning comment account bind-core-list ssh-port venv-script""",
    "srun": """
        A account acctg-freq b begin bb bbf c cpus-per-task C constraint cluster-constraint clusters M comment container
        container-id container-image container-mounts container-name container-save container-workdir container-env
        core-spec S cores-per-socket cpu-bind cpu-freq cpus-per-gpu d dependency D chdir deadline delay-boot e error
        epilog exclude x export export-file extra-node-info B gid gpu-bind gpu-freq gres-flags hint i input J job-name
        jobid L licenses m distribution mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus
        mpi network nodefile F nodelist w ntasks-per-core ntasks-per-socket ntasks-per-tres o output open-mode p
        partition power prefer priority profile prolog q qos r relative reservation segment signal slurmd-debug
        sockets-per-node switches t time task-epilog task-prolog T threads thread-spec threads-per-core time-min tmp
        treewidth tres-bind tres-per-task uid W wait wait-all-nodes wckey""",
    "mpirun": """
        x bind-to rank-by output-filename report-uri wdir wd path prefix timeout tune am stdin cpu-set cpu-list
        report-state-on-timeout mca-base-param-file bootstrap launcher iface envlist genvlist envfile usize pnp rmk
        l-file cpus-per-proc cpus-per-rank max-restarts pmca-file""",
}
_TWO_VALUES = {"mpirun": "mca gmca pmixmca prtemca env genv"}
_WITHOUT_VALUE = {
    "torchrun": "h help standalone m module no-python run-path virtual-local-rank use-env ignore-missing-fault-tol-cfg",
    "deepspeed": """
        h help module no-python no-local-rank no-ssh no-ssh-check force-multi save-pid elastic-training
        bind-cores-to-rank""",
    # a value of these stands behind =, or in the same word
    "srun": """
        bcast compress contiguous disable-status X E preserve-env exact exclusive external-launcher get-user-env H hold
        h help I immediate interactive k no-kill K kill-on-bad-exit l label multi-prog nice no-allocate Z
        O overcommit oom-kill-step overlap s oversubscribe propagate pty Q quiet quit-on-interrupt reboot resv-ports
        send-libs spread-job stepmgr test-only u unbuffered usage use-min-nodes v verbose V version x11
        container-mount-home no-container-mount-home container-remap-root no-container-remap-root container-entrypoint
        no-container-entrypoint container-writable container-readonly""",
    "mpirun": """
        h help v q quiet V version l prepend-rank allow-run-as-root oversubscribe nooversubscribe tag-output
        timestamp-output verbose display-map display-allocation report-bindings bynode byslot bycore bysocket
        bind-to-core bind-to-socket bind-to-none pernode nolocal do-not-launch merge-stderr-to-stdout disable-recovery
        enable-recovery get-stack-traces genvall genvnone envall envnone""",
}
_DASHES_DIFFER = ("srun", "torchrun", "deepspeed")


@dataclass(frozen=True)
class _Option:
    says: str
    """What it says about the number of ranks. "": nothing."""
    n_values: int


def _table(kind: str) -> dict[str, _Option]:
    table: dict[str, _Option] = {}
    for names, n_values in ((_WITHOUT_VALUE, 0), (_VALUED, 1), (_TWO_VALUES, 2)):
        for name in names.get(kind, "").split():
            table[name] = _Option("", n_values)
    for says, counted in _COUNTED.get(kind, {}).items():
        for name in counted.split():
            table[name] = _Option(says, 1)
    return table


OPTIONS = {kind: _table(kind) for kind in _COUNTED}
"""Kind of a launcher -> name of an option without dashes -> what it is."""


@dataclass
class Options:
    """The options of one launcher in a command."""

    values: dict[str, str] = field(default_factory=dict)
    """What is said -> its last value."""
    written: dict[str, str] = field(default_factory=dict)
    """What is said -> option and value as they were written."""
    flags: set[str] = field(default_factory=set)
    """Options without a value that were given."""
    variables: list[str] = field(default_factory=list)
    """Words that can't be known, and may hold options."""
    unclear: list[str] = field(default_factory=list)
    """Why it can't be known what an option says about the number of ranks."""
    refused: list[str] = field(default_factory=list)
    """Why it can't be known which word is the program."""
    end: int = 0
    """Where the words begin that it starts."""


def launcher_kind(word: str) -> str:
    """Whose options a word takes: torchrun, deepspeed, srun, mpirun, or a launcher that is not counted. "": none."""
    base = word.rpartition("/")[2]
    if base in TORCHRUN:
        return "torchrun"
    if base in _MPI:
        return "mpirun"
    if base in ("srun", "deepspeed", *_UNCOUNTED):
        return base
    return ""


def read_options(kind: str, words: Sequence[str], begin: int) -> Options:
    """The options from `begin` up to the first word that is none, which is what the launcher starts."""
    read = Options(end=begin)
    if kind not in OPTIONS:
        return read
    while read.end < len(words):
        word = words[read.end]
        if word == "--":
            read.end += 1
            break
        if word.startswith("-") and word != "-":
            _read_option(kind, words, read)
        elif word.startswith("$") and not word.endswith(".py"):
            read.variables.append(word)
            read.end += 1
        else:
            break
    return read


def _read_option(kind: str, words: Sequence[str], read: Options) -> None:
    word = words[read.end]
    behind = words[read.end + 1 : read.end + 3]
    read.end += 1
    written, equals, attached = word.partition("=")
    names = _names(kind, written)
    if len(names) != 1 and not _is_long(kind, written):
        _read_short(kind, word, behind, read)
        return
    if len(names) != 1:
        _read_unknown(kind, written, names, behind, read, is_closed=bool(equals))
        return
    [name] = names
    option = OPTIONS[kind][name]
    if option.n_values == 0:
        read.flags.add(name)
        return
    if equals:
        _keep(option, attached, word, read)
        return
    read.end += option.n_values
    value = behind[0] if behind else ""
    _keep(option, value, f"{word} {value}".strip(), read)


def _read_short(kind: str, word: str, behind: Sequence[str], read: Options) -> None:
    """`-n8`, and several letters in one word: `-ln8`. The first that takes a value takes the rest of the word."""
    table = OPTIONS[kind]
    for place, letter in enumerate(word[1:], start=1):
        if letter not in table:
            _read_unknown(kind, word, [], behind, read, is_closed=False)
            return
        option = table[letter]
        if option.n_values == 0:
            read.flags.add(letter)
            if kind == "srun" and letter in "IkK":
                # their value stands in the same word: -K0
                return
            continue
        value = word[place + 1 :]
        if value:
            _keep(option, value.removeprefix("="), word, read)
        else:
            read.end += 1
            value = behind[0] if behind else ""
            _keep(option, value, f"{word} {value}".strip(), read)
        return


def _read_unknown(
    kind: str, written: str, names: Sequence[str], behind: Sequence[str], read: Options, *, is_closed: bool
) -> None:
    """An option that is not known, or of which several are meant (`names`)."""
    counted = any(OPTIONS[kind][name].says for name in names)
    if counted:
        meant = ", ".join(f"--{name}" for name in names)
        read.unclear.append(f"{written} can mean {meant}; write it out")
    is_value = bool(behind) and not behind[0].startswith("-")
    if is_closed or not is_value:
        return
    way_out = "leave it out"
    if written.startswith("--"):
        way_out = f"write {written}={behind[0]}, or leave it out"
    if kind == "torchrun" and written.startswith(("--ft-", "--ft_")):
        # options of ft_launcher, each with a value
        read.end += 1
    elif kind in STARTS_PYTHON:
        if not counted:
            what = f"{written} is no option of it that is known here, and {behind[0]} could be its value or the program"
            read.refused.append(f"{what}; {way_out}")
        read.end += 1
    elif launcher_kind(behind[0]):
        what = f"{written} is no option of it that is known here, and {behind[0]} could be its value"
        read.refused.append(f"{what}; {way_out}")
    elif not starts_program(behind[0]):
        read.end += 1


def starts_program(word: str) -> bool:
    """True for what is hardly the value of an option: an interpreter, or a Python file."""
    base = word.rpartition("/")[2]
    return word.endswith(".py") or base.startswith("python") or base in ("bash", "sh", "env", "numactl", "nsys", "ncu")


def _keep(option: _Option, value: str, written: str, read: Options) -> None:
    if option.says:
        read.values[option.says] = value
        read.written[option.says] = written


def _is_long(kind: str, written: str) -> bool:
    """Open MPI and MPICH take long names behind one dash, too; -n8 is a letter with its value."""
    if written.startswith("--"):
        return True
    return kind not in _DASHES_DIFFER and len(written) > 2 and not written[2:].isdecimal()


def _names(kind: str, written: str) -> list[str]:
    """Names of the options that a word can mean: itself, or those that it is the beginning of."""
    table = OPTIONS[kind]
    if not _is_long(kind, written):
        letter = written[1:]
        if len(letter) == 1 and letter in table:
            return [letter]
        return []
    name = written.lstrip("-").replace("_", "-")
    if name in table and (len(name) > 1 or kind == "mpirun"):
        return [name]
    if kind == "mpirun":
        # it takes no abbreviations
        return []
    return [one for one in table if len(one) > 1 and name and one.startswith(name)]
