"""A recipe while it is made from flags: values, the flags that they are from, and what has to be told."""

from collections.abc import Sequence
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
class RecipeDraft:
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
        if value is None:
            return BY_NAME[name].default_value
        return value

    def is_given(self, name: str) -> bool:
        """True when the command has the flag."""
        return name in self.command.values

    def value(self, name: str, default: str) -> str:
        """The value of a flag that is not translated."""
        return self.command.values.get(name, default)

    def put(self, key: str, value: Any, *names: str, ours: Any = ..., remark: str = "") -> None:
        """Sets a key from flags. Left out where none of them was given and `ours`, a recipe's own default, is equal."""
        given = [name for name in names if self.is_given(name)]
        self.used.update(given)
        self.sources[key] = self._source(given, names, remark)
        if not given and ours is not ... and value == ours:
            return
        *above, last = key.split(".")
        section = self.content
        for part in above:
            section = section.setdefault(part, {})
        section[last] = value
        said_by = ", ".join(given)
        if not given and names and not remark:
            said_by = DEFAULT
        self.remarks[key] = "; ".join(filter(None, (said_by, remark)))

    def _source(self, given: Sequence[str], names: Sequence[str], remark: str) -> str:
        """What a key is from: the flags as they were written, else the one that would have said it, else the remark."""
        if given:
            return ", ".join(self.command.written[name] for name in given)
        if names:
            return f"{names[0]}, which is not given"
        return remark

    def note(self, name: str, why: str) -> None:
        """Tells why a flag, where it was given, sets no key."""
        if self.is_given(name):
            self.used.add(name)
            self.notes[name] = why

    def lose(self, name: str, what: str) -> None:
        """Tells that a flag, or Megatron's default of it, can't be said here."""
        self.used.add(name)
        flag = BY_NAME[name]
        said = self.command.written.get(name)
        if not said:
            default = f"{name} {flag.default or ''}".strip()
            said = f"{default} ({DEFAULT})"
        self.lost.append(Problem(flag.text, f"{said}: {what}", "", "megatron-lost"))

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
        return self._first_given("--num-layers", "--encoder-num-layers")

    @property
    def seq_len(self) -> int | None:
        return self._first_given("--seq-length", "--encoder-seq-length")

    def _first_given(self, name: str, other: str) -> Any:
        """The value of a flag, or of the one that stands in for it."""
        if self.is_given(name):
            return self[name]
        return self[other]

    @property
    def n_experts(self) -> int:
        return self["--num-experts"] or 0

    @property
    def etp(self) -> int:
        """Megatron splits experts as everything else, unless it is told otherwise."""
        given = self["--expert-tensor-parallel-size"]
        if given:
            return given
        if self.n_experts:
            return self.tp
        return 1

    @property
    def dp(self) -> int:
        """Data-parallel ranks, rounded down."""
        ranks_of_a_replica = self.tp * self.pp * self["--context-parallel-size"]
        return max(1, self.gpus // max(1, ranks_of_a_replica))

    @property
    def unit(self) -> int:
        """Sequences of one micro batch on every data-parallel rank, of which a global batch is a multiple."""
        return max(1, self["--micro-batch-size"] or 1) * self.dp


def fewest_of(command: Command) -> int:
    """GPUs that the degrees of a command need at least."""
    draft = RecipeDraft(command, 1)
    # degrees of 0 or less are refused elsewhere
    return fewest_gpus(
        tp=max(1, draft.tp),
        pp=max(1, draft.pp),
        cp=max(1, draft["--context-parallel-size"]),
        ep=max(1, draft["--expert-model-parallel-size"]),
        etp=max(1, draft.etp),
    )
