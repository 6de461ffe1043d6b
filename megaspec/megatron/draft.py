"""A recipe while it is made from flags: values, the flags that they are from, and what has to be told."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megaspec.core.axes import fewest_gpus
from megaspec.core.errors import Problem
from megaspec.megatron.command import Command
from megaspec.megatron.flags import BY_NAME

DEFAULT = "Megatron's default"


class GpusFrom(Enum):
    """Who says the world size."""

    COMMAND = "command"
    OPTION = "option"
    FEWEST = "fewest"
    """Nobody: as few as the degrees need."""


@dataclass
class Draft:
    """What a command becomes."""

    command: Command
    gpus: int
    """World size."""
    gpus_from: GpusFrom = GpusFrom.FEWEST
    content: dict[str, Any] = field(default_factory=dict)
    """The recipe, nested."""
    choices: dict[str, str] = field(default_factory=dict)
    """Group -> choice, where it is not that of base.yaml."""
    remarks: dict[str, str] = field(default_factory=dict)
    """Dotted path -> what stands behind its value: the flags, or why there is none."""
    sources: dict[str, str] = field(default_factory=dict)
    """Dotted path -> the flags that it is from, those that were not given with their default."""
    used: set[str] = field(default_factory=set)
    """Flags that have said something."""
    notes: dict[str, str] = field(default_factory=dict)
    """Flag -> why no key is from it."""
    silent: list[tuple[str, str]] = field(default_factory=list)
    """Flag and change that Megatron makes without a word."""
    lost: list[Problem] = field(default_factory=list)
    """What no recipe can say, so that something else would be trained."""
    problems: list[Problem] = field(default_factory=list)
    """What is wrong with the command itself."""

    def __getitem__(self, name: str) -> Any:
        """A flag's value, else Megatron's default: None where it has none, False for a flag without a value."""
        value = self.command.values.get(name)
        return BY_NAME[name].default_value if value is None else value

    def is_given(self, name: str) -> bool:
        """True when the command has the flag."""
        return name in self.command.values

    def value(self, name: str, default: str) -> str:
        """The value of a flag that is not translated."""
        return self.command.values.get(name, default)

    def put(self, key: str, value: Any, *names: str, ours: Any = ..., remark: str = "") -> None:
        """Sets a key from flags. Left out where none of them was given and `ours`, a recipe's own default, is equal."""
        given = [n for n in names if self.is_given(n)]
        self.used.update(given)
        written = ", ".join(self.command.written[n] for n in given)
        self.sources[key] = written or (f"{names[0]}, which is not given" if names else remark)
        if not given and ours is not ... and value == ours:
            return
        *above, last = key.split(".")
        where = self.content
        for part in above:
            where = where.setdefault(part, {})
        where[last] = value
        said = ", ".join(given) or (DEFAULT if names and not remark else "")
        self.remarks[key] = "; ".join(filter(None, (said, remark)))

    def note(self, name: str, why: str) -> None:
        """Tells why a flag, where it was given, sets no key."""
        if self.is_given(name):
            self.used.add(name)
            self.notes[name] = why

    def lose(self, name: str, what: str) -> None:
        """Tells that a flag, or Megatron's default of it, can't be said here."""
        self.used.add(name)
        written = self.command.written.get(name)
        word = written or f"{name} {BY_NAME[name].default or ''}".strip()
        text = f"{word}: {what}" if written else f"{word} ({DEFAULT}): {what}"
        self.lost.append(Problem(BY_NAME[name].text, text, "", "megatron-lost"))

    def refuse(self, name: str, what: str) -> None:
        """Tells that the command can't be translated."""
        self.used.add(name)
        word = self.command.written.get(name, name)
        self.problems.append(Problem(BY_NAME[name].text, f"{word}: {what}", "", "megatron-flag"))

    def change(self, name: str, what: str) -> None:
        """Tells what Megatron changes without a word."""
        self.used.add(name)
        self.silent.append((name, what))

    @property
    def tp(self) -> int:
        return self["--tensor-model-parallel-size"]

    @property
    def pp(self) -> int:
        return self["--pipeline-model-parallel-size"]

    @property
    def n_layers(self) -> int | None:
        return self["--num-layers"] if self.is_given("--num-layers") else self["--encoder-num-layers"]

    @property
    def seq_len(self) -> int | None:
        return self["--seq-length"] if self.is_given("--seq-length") else self["--encoder-seq-length"]

    @property
    def n_experts(self) -> int:
        return self["--num-experts"] or 0

    @property
    def etp(self) -> int:
        return self["--expert-tensor-parallel-size"] or (self.tp if self.n_experts else 1)

    @property
    def dp(self) -> int:
        """Data-parallel ranks, rounded down."""
        return max(1, self.gpus // max(1, self.tp * self.pp * self["--context-parallel-size"]))

    @property
    def unit(self) -> int:
        """Sequences of one micro batch on every data-parallel rank, of which a global batch is a multiple."""
        return max(1, self["--micro-batch-size"] or 1) * self.dp


def fewest_of(command: Command) -> int:
    """GPUs that the degrees of a command need at least."""
    draft = Draft(command, 1)
    degrees = {"tp": draft.tp, "pp": draft.pp, "cp": draft["--context-parallel-size"], "etp": draft.etp}
    return fewest_gpus(**{k: max(1, n) for k, n in degrees.items()}, ep=max(1, draft["--expert-model-parallel-size"]))
