"""How many ranks the words in front of a program start: torchrun's, srun's, mpirun's or deepspeed's count."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megaspec.megatron.program import TORCHRUN, TORCHRUN_MODULES

_MPI = ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun")
_UNCOUNTED = ("accelerate", "horovodrun", "flux", "aprun", "jsrun", "lsrun", "ibrun", "yhrun")
# With these a launcher's own words end, so that an option of a profiler is not taken for one of its own.
_STARTED = re.compile(r"python[\d.]*|(?:ba|z|da)?sh|nsys|ncu|numactl|env|singularity|apptainer|docker|enroot|uv|time")
# Options that count, under every name that they have.
_OPTIONS = {
    "torchrun": {"nproc": ("--nproc-per-node",), "nodes": ("--nnodes",)},
    "srun": {
        "ranks": ("-n", "--ntasks"),
        "nodes": ("-N", "--nodes"),
        "nproc": ("--ntasks-per-node",),
        "gpus": ("--gres", "--gpus-per-node", "-G", "--gpus"),
    },
    "mpirun": {"ranks": ("-n", "-np", "--n", "--np", "-c")},
    "deepspeed": {"nproc": ("--num-gpus",), "nodes": ("--num-nodes",)},
}
# Options without a value: a variable behind one is no value of it.
_WITHOUT_VALUE = ("--standalone", "--no-python", "--run-path", "--label", "--exclusive", "--overlap", "--unbuffered")
_WITHOUT_VALUE += ("--verbose", "--allow-run-as-root", "--oversubscribe", "--tag-output")
_WITHOUT_VALUE += ("-l", "-u", "-v", "-q", "-Q", "-k", "-K", "-O", "-s", "-X")
_WAY_OUT = "give --gpus N"


@dataclass(frozen=True)
class Ranks:
    """What a command says about its world size."""

    count: int | None
    """None: it says nothing, or what it says can't be known."""
    launcher: str
    """Who starts them. "": nobody."""
    why: str
    """Why the count can't be known, with the way out. "": it is known, or nothing starts ranks."""


def count_ranks(words: Sequence[str], directives: Sequence[str] = ()) -> Ranks:
    """The ranks that the words in front of a program start. `directives`: srun's defaults, from `#SBATCH` lines."""
    found = _launchers(words)
    if not found:
        return Ranks(None, "", "")
    innermost = found[-1]
    if innermost.kind == "srun":
        innermost.take_defaults(directives)
    ranks = innermost.ranks()
    for outer in found[:-1]:
        if outer.kind == "srun":
            outer.take_defaults(directives)
        started = outer.ranks().count
        nodes = innermost.number("nodes") or 1
        # one agent of torchrun on each node; anything else starts several jobs
        if ranks.count is not None and started is not None and started != nodes:
            why = f"{outer.name} starts {started} times {innermost.name}, which is for {nodes} nodes; {_WAY_OUT}"
            return Ranks(None, innermost.name, why)
    return ranks


@dataclass
class _Launcher:
    kind: str
    name: str
    """As it is written, without its path."""
    words: list[str]
    """Its own options."""

    def __post_init__(self) -> None:
        self.values: dict[str, str] = {}
        """What is counted -> the last value that was given for it."""
        if self.kind in _OPTIONS:
            self.values = _values(self.words, _OPTIONS[self.kind])

    def take_defaults(self, directives: Sequence[str]) -> None:
        """Options of `#SBATCH` lines, where its own words don't have them."""
        own = self.values
        self.values = {**_values(directives, _OPTIONS["srun"]), **own}
        # -N 2 on its own line asks for other ranks than the -n 32 of the job
        if "ranks" not in own and ("nodes" in own or "nproc" in own):
            self.values.pop("ranks", None)

    def number(self, what: str) -> int | None:
        """A plain number above 0; None for every other value, or none."""
        text = self.values.get(what, "")
        return int(text) if re.fullmatch(r"0*[1-9][0-9]{0,8}", text) else None

    def ranks(self) -> Ranks:
        unknown = next((w for w in self.words if w.startswith("$")), None)
        if self.kind == "torchrun":
            # torchrun's own defaults: one node, one process
            self.values = {"nodes": "1", "nproc": "1", **self.values}
        needed = ("ranks",) if self.kind == "mpirun" or "ranks" in self.values else ("nodes", "nproc")
        numbers = [self.number(what) for what in needed]
        for what, number in zip(needed, numbers, strict=True):
            if number is None and what in self.values:
                names = ", ".join(_OPTIONS[self.kind][what])
                return self._unknown(f"{names} {self.values[what]} is not a number that can be known")
        if unknown is not None and self._could_hold_options(unknown):
            return self._unknown(f"{unknown} is not set, and may hold options")
        if self.kind not in _OPTIONS:
            return self._unknown("its ranks are not counted here")
        count = 1
        for number in numbers:
            if number is None:
                names = " and ".join(_OPTIONS[self.kind][what][-1] for what in needed)
                return self._unknown(f"it does not say {names}{self._hint()}")
            count *= number
        return Ranks(count, self.name, "")

    def _could_hold_options(self, word: str) -> bool:
        """False for the value of an option: `--rdzv_endpoint $HOST:$PORT`."""
        place = self.words.index(word)
        before = self.words[place - 1] if place else ""
        return not before.startswith("-") or "=" in before or before in _WITHOUT_VALUE

    def _hint(self) -> str:
        gpus = self.values.get("gpus", "")
        return f" (its GPUs, {gpus}, are no ranks)" if gpus else ""

    def _unknown(self, why: str) -> Ranks:
        return Ranks(None, self.name, f"{self.name}: how many ranks it starts can't be known: {why}; {_WAY_OUT}")


def _launchers(words: Sequence[str]) -> list[_Launcher]:
    """Launchers from the outermost to the innermost, each with the words up to what it starts."""
    found: list[tuple[str, str, list[str]]] = []
    is_open = False
    for n, word in enumerate(words):
        base = word.rpartition("/")[2]
        is_module = word in TORCHRUN_MODULES and n > 0 and words[n - 1] == "-m"
        kind = _kind(base, is_module=is_module)
        if kind:
            found.append((kind, "torchrun" if is_module else base, []))
            is_open = True
        elif _STARTED.fullmatch(base):
            is_open = False
        elif is_open:
            found[-1][2].append(word)
    return [_Launcher(*one) for one in found]


def _kind(base: str, *, is_module: bool) -> str:
    if is_module or base in TORCHRUN:
        return "torchrun"
    if base in _MPI:
        return "mpirun"
    return base if base in ("srun", "deepspeed", *_UNCOUNTED) else ""


def _values(words: Sequence[str], options: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """What is counted -> its last value among words: `--name value`, `--name=value`, `-n value` or `-n8`."""
    names = {name: what for what, all_names in options.items() for name in all_names}
    values: dict[str, str] = {}
    for word, behind in zip(words, [*words, ""][1:], strict=False):
        name, equals, attached = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if name in names:
            values[names[name]] = attached if equals else behind
        elif word[:2] in names and not word.startswith("--") and word[2:].isdecimal():
            values[names[word[:2]]] = word[2:]
    return values
