"""The command with which a shell script starts a training: its text is followed as a shell would, and never run.

Followed are assignments, arrays, the script's arguments, arithmetic, and conditions whose operands are known. What only
the machine knows (an environment variable that nothing sets, the output of a command) stays as it is written.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NoReturn

from megaspec.core.errors import Problem, RecipeError
from megaspec.core.problems import show
from megaspec.megatron.arithmetic import compute
from megaspec.megatron.batch import directives
from megaspec.megatron.conditions import both, decide, either, negation
from megaspec.megatron.flag import Fate
from megaspec.megatron.flags import BY_NAME
from megaspec.megatron.launcher import VARIABLES, exported, exports_all
from megaspec.megatron.program import Program, find_program
from megaspec.megatron.shell import (
    DECLARATIONS,
    MAX_DEPTH,
    Arithmetic,
    ArithmeticTest,
    Assignment,
    Block,
    Body,
    Case,
    Chain,
    Function,
    If,
    Literal,
    Parameter,
    Part,
    Pipeline,
    Simple,
    Source,
    Statement,
    Test,
    Unfollowed,
    Unreadable,
    While,
    Word,
    parse,
)

MOST_CHARACTERS = 1 << 25
"""That all expansions of a script may make together; a word counts as `_WORD_COST` more."""
MOST_STATEMENTS = 10_000
MOST_WORDS = 1 << 16
"""Of one command."""

# A scheduler sets them, so a default that is written behind one says nothing about the job.
_SCHEDULERS = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "PBS_", "LSB_", "PET_", "FLUX_", "KUBERNETES_")
# Of commands that are passed over: these succeed, so that what stands behind `&&` is done.
_SUCCEED = ("cd", "chmod", "conda", "date", "echo", "mkdir", "module", "popd", "printf", "pushd", "pwd", "sleep")
_SUCCEED += ("true", ":", "umask", "ulimit", "wait", "trap", "touch")
# They change what comes behind them in ways that are not followed.
_UNFOLLOWED = {
    ".": "another file is read",
    "source": "another file is read",
    "alias": "a command gets another name",
    "break": "a loop is left",
    "continue": "a loop is left",
    "getopts": "options are read one by one",
    "let": "arithmetic is done",
    "mapfile": "input is read",
    "read": "input is read",
    "readarray": "input is read",
}
_WORD_COST = 64
# Text that is followed for the second time, out of a string, is read again.
_READING_COST = 128
_SHELLS = ("bash", "sh", "zsh", "dash")
_HARMLESS = (Fate.IDLE, Fate.ABSENT, Fate.DEAD)
# Marks around what can't be known, and around an argument that is not given: `$NAME` and `$1` as they are written.
_UNKNOWN, _MISSING, _END = "\ue000", "\ue001", "\ue002"
_MARKS = dict.fromkeys(map(ord, (_UNKNOWN, _MISSING, _END)))
_MISSING_ARGUMENT = re.compile(f"{_MISSING}[^{_END}]*{_END}")
_FIELD = re.compile(f"(?:[{_UNKNOWN}{_MISSING}][^{_END}]*{_END}|[^ \t\n{_UNKNOWN}{_MISSING}{_END}]+)+")
_GLOB = re.compile(r"[*?[]")
_WAY_OUT = "give NAME=VALUE in front of @FILE (NAME= for nothing), or write out the branch that is taken"


@dataclass(frozen=True)
class Script:
    """What a script comes to."""

    words: list[str]
    """Of the command that trains. What can't be known is left as `$NAME`, `${NAME:-DEFAULT}` or `$(command)`."""
    notes: list[str]
    """What was assumed or passed over."""
    directives: list[str]
    """Options of its `#SBATCH` lines."""


@dataclass(frozen=True)
class _Found:
    words: list[str]
    program: Program | None
    line: int


class _Ended(Exception):
    """The script ends itself."""

    def __init__(self, line: int):
        self.line = line


def script_words(
    text: str, *, label: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Script:
    """The command that a script trains with. `arguments`: of the script. `environment`: variables that are set for it.

    RecipeError, with the line: what is no shell script, what decides what is trained and can't be known, several
    trainings or none, or more text than a script that starts a training has.
    """
    source = Source(text.translate(_MARKS), label)
    follower = _Follower(source, [one.translate(_MARKS) for one in arguments], environment or {})
    try:
        follower.body(parse(source))
    except _Ended as ended:
        if not follower.found:
            source.refuse(ended.line, "it ends here, before it trains; what it needs stands behind it: @FILE ARG...")
    found = follower.training()
    return Script(found.words, follower.notes(), directives(source))


def _unknown(written: str) -> str:
    return f"{_UNKNOWN}{written}{_END}"


def _shown(text: str) -> str:
    """A text with what can't be known as it is written."""
    return text.translate(_MARKS)


def _value(text: str) -> str | None:
    """A text with arguments that are not given as nothing; None where a part of it can't be known."""
    return None if _UNKNOWN in text else _MISSING_ARGUMENT.sub("", text)


def _is_marked(text: str) -> bool:
    return _END in text


@dataclass
class _Fields:
    """The words that one word becomes."""

    done: list[str] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    """Of the word that is open."""

    def add(self, text: str) -> None:
        self.pieces.append(text)

    def close(self) -> None:
        if self.pieces:
            self.done.append("".join(self.pieces))
        self.pieces = []

    def split(self, text: str) -> None:
        """Adds what stands in no quotes: blanks end words. What can't be known is not split."""
        if text[:1] in (" ", "\t", "\n"):
            self.close()
        for n, one in enumerate(_FIELD.findall(text)):
            if n:
                self.close()
            self.add(one)
        if text[-1:] in (" ", "\t", "\n"):
            self.close()


class _Follower:
    def __init__(self, source: Source, arguments: list[str], environment: Mapping[str, str]):
        self.source = source
        self.arguments = arguments
        self.variables = {name: [value.translate(_MARKS)] for name, value in environment.items()}
        """Name -> its elements: one of a plain value, none of a name that was unset."""
        self.exported = set(environment)
        """Names whose values the commands see."""
        self.exports_all = False
        """True behind `set -a`."""
        self.settings: list[str] = []
        """NAME=VALUE in front of the command that is followed, of variables that launchers read."""
        self.functions: set[str] = set()
        self.found: list[_Found] = []
        self.nameless: list[int] = []
        """Lines of commands with flags, but with no program that could be known."""
        self.folder = "."
        """Where the script is: in the folder in which it was started, until it goes elsewhere."""
        self.prefix: list[str] = []
        """Words in front of the command that stands in a string: `srun -n 8 bash -c`."""
        self.strings = 0
        """In how many strings the command stands that is followed."""
        self.line = 1
        self.depth = 0
        self.n_characters = 0
        self.n_statements = 0
        self.defaults: dict[str, str] = {}
        self.left_out: list[str] = []

    def refuse(self, why: str, line: int | None = None) -> NoReturn:
        self.source.refuse(self.line if line is None else line, why)

    def notes(self) -> list[str]:
        """What the recipe says about the reading."""
        notes = list(dict.fromkeys(self.left_out))
        if self.defaults:
            taken = ", ".join(f"{name}={show(value)}" for name, value in self.defaults.items())
            notes.append(f"{self.source.label}: not set, so that its own defaults are taken: {taken}")
        return notes

    def training(self) -> _Found:
        """The one command that trains."""
        with_program = [f for f in self.found if f.program is not None]
        alone = [f for f in self.found if f.program is None]
        if with_program and alone:
            why = "it begins with a flag: a comment, or a backslash with a blank behind it, ends the command above"
            self.refuse(why, alone[0].line)
        gpt = [f for f in with_program if f.program is not None and f.program.is_gpt]
        training = [f for f in with_program if f.program is not None and not f.program.is_tool]
        several = gpt or training or with_program or alone
        if not several:
            if self.nameless:
                self.refuse("its program can't be known; give NAME=VALUE in front of @FILE", self.nameless[0])
            text = f"{self.source.label}: no command in it starts pretrain_gpt.py with its flags"
            raise RecipeError([Problem("", text, "", "megatron-script")])
        other = next((f for f in several if f.words != several[0].words), None)
        if other is not None:
            self.refuse(f"another training starts in line {several[0].line}; give a script with one", other.line)
        return several[0]

    # Statements. Each gives its status: True, False, or None where it can't be known.

    def body(self, statements: Body) -> bool | None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.refuse(f"more than {MAX_DEPTH} blocks and commands inside each other")
        status: bool | None = True
        for statement in statements:
            status = self.statement(statement)
        self.depth -= 1
        return status

    def statement(self, statement: Statement) -> bool | None:
        self.n_statements += 1
        self.line = statement.line
        if self.n_statements > MOST_STATEMENTS:
            self.refuse(f"more than {MOST_STATEMENTS:,} commands are done until here")
        match statement:
            case Simple():
                return self.simple(statement)
            case Test():
                return _Condition(self, statement).whole()
            case ArithmeticTest():
                return self.arithmetic_test(statement)
            case If():
                return self.if_block(statement)
            case Case():
                return self.case_block(statement)
            case While():
                return self.while_block(statement)
            case Block():
                return self.block(statement)
            case Chain():
                return self.chain(statement)
            case Pipeline():
                return self.pipeline(statement)
            case Function():
                self.functions.add(statement.name)
                return True
            case Unfollowed():
                self.refuse(f"{statement.what} can't be followed; write out what it makes")

    def if_block(self, statement: If) -> bool | None:
        bodies: list[Body] = []
        for condition, body in statement.branches:
            status = self.body(condition)
            if status is not False:
                bodies.append(body)
            if status is True:
                break
        else:
            bodies.append(statement.otherwise)
        return self.one_of(bodies, statement.line)

    def case_block(self, statement: Case) -> bool | None:
        bodies: list[Body] = []
        subject = _value(self.joined(statement.subject))
        for patterns, body in statement.branches:
            status: bool | None = False
            for pattern in patterns:
                status = either(status, self.is_like(subject, pattern))
            if status is not False:
                bodies.append(body)
            if status is True:
                break
        else:
            bodies.append(())
        return self.one_of(bodies, statement.line)

    def is_like(self, value: str | None, pattern: Word) -> bool | None:
        """Whether a value is the text of a pattern, or the pattern is `*`; None for others that aren't plain."""
        if pattern == (Literal("*", quoted=False),):
            return True
        text = _value(self.joined(pattern))
        if value is None or text is None:
            return None
        if _GLOB.search(text) and not all(part.quoted for part in pattern):
            return None
        return value == text

    def one_of(self, bodies: list[Body], line: int) -> bool | None:
        """Follows the only body that can lead to a training, or passes over several that make no difference to it."""
        going_on = [body for body in bodies if not _ends(body)]
        if len(bodies) == 1 or len(going_on) == 1:
            return self.body((going_on or bodies)[0])
        if not going_on:
            raise _Ended(line)
        flags: list[str] = []
        for body in going_on:
            self.weigh(body, line, flags)
        if flags:
            names = ", ".join(dict.fromkeys(flags))
            self.left_out.append(f"{self.source.quote(line)} can't be known; without {names}")
        return None

    def weigh(self, body: Body, line: int, flags: list[str]) -> None:
        """Looks at what is done perhaps: plain variables can't be known from here on, and flags that say nothing are
        collected. RecipeError: it could change what is trained."""
        for statement in body:
            match statement:
                case Simple():
                    self.weigh_simple(statement, line, flags)
                case If():
                    for condition, inner in statement.branches:
                        self.weigh(condition, line, flags)
                        self.weigh(inner, line, flags)
                    self.weigh(statement.otherwise, line, flags)
                case Case():
                    for _, inner in statement.branches:
                        self.weigh(inner, line, flags)
                case Block():
                    self.weigh(statement.body, line, flags)
                case Chain():
                    self.weigh((statement.first, *(one for _, one in statement.rest)), line, flags)
                case Pipeline():
                    self.weigh(statement.stages, line, flags)
                case Test():
                    pass
                case _:
                    self.undecided(line)

    def weigh_simple(self, statement: Simple, line: int, flags: list[str]) -> None:
        words = [_shown(text) for word in statement.words for text in self.expanded(word)]
        name = words[0] if words else ""
        if name in (*_UNFOLLOWED, *self.functions, "eval", "exec", "set", "shift") or find_program(words):
            self.undecided(line)
        if name == "unset":
            for one in words[1:]:
                self.variables[one] = [_unknown(f"${one}")]
        if name and name not in DECLARATIONS:
            return
        if name:
            self.exported |= exported(words, [one.name for one in statement.assignments])
        for assignment in statement.assignments:
            values = [assignment.value] if assignment.elements is None else assignment.elements
            texts = [word for value in values for text in self.expanded(value) for word in _shown(text).split()]
            given = [text.partition("=")[0] for text in texts if text.startswith("--")]
            if given and assignment.adds and texts[0].startswith("--") and all(map(_says_nothing, given)):
                flags += given
            elif given or assignment.elements is not None:
                self.undecided(line)
            else:
                self.variables[assignment.name] = [_unknown(f"${assignment.name}")]

    def undecided(self, line: int) -> NoReturn:
        self.refuse(f"what it asks can't be known, and it decides what is trained; {_WAY_OUT}", line)

    def while_block(self, statement: While) -> bool | None:
        while True:
            status = self.body(statement.condition)
            if status is None:
                self.refuse("a loop whose end can't be known; write out what it makes", statement.line)
            if status is statement.negated:
                return True
            self.body(statement.body)

    def block(self, statement: Block) -> bool | None:
        if not statement.is_subshell:
            return self.body(statement.body)
        self.charge("", times=len(self.variables))
        before = {name: [*elements] for name, elements in self.variables.items()}
        status = self.body(statement.body)
        self.variables = before
        return status

    def chain(self, statement: Chain) -> bool | None:
        status = self.statement(statement.first)
        for operator, then in statement.rest:
            # of `python setup.py && torchrun ...` the training is what is asked for
            if status is None and not (operator == "&&" and self.trains(then)):
                self.one_of([(then,), ()], statement.line)
            elif status is None or status is (operator == "&&"):
                status = self.statement(then)
        return status

    def trains(self, statement: Statement) -> bool:
        first = statement.stages[0] if isinstance(statement, Pipeline) else statement
        if not isinstance(first, Simple):
            return False
        return find_program([_shown(text) for word in first.words for text in self.expanded(word)]) is not None

    def pipeline(self, statement: Pipeline) -> bool | None:
        status: bool | None = True
        for stage in statement.stages:
            status = self.statement(stage)
        return negation(status) if statement.negated else status

    def arithmetic_test(self, statement: ArithmeticTest) -> bool | None:
        if re.search(r"\+\+|--|(?<![<>=!])=(?!=)", statement.arithmetic.written):
            self.refuse("arithmetic that sets a variable can't be followed; write out what it makes")
        value = _value(self.computed(statement.arithmetic))
        return None if value is None else value != "0"

    def simple(self, statement: Simple) -> bool | None:
        texts = [text for word in statement.words for text in self.expanded(word)]
        if len(texts) > MOST_WORDS:
            self.refuse(f"it has more than {MOST_WORDS:,} words")
        name = _shown(texts[0]) if texts else ""
        options = [_shown(text) for text in texts if text.startswith("-")]
        if name in DECLARATIONS and any(set(option) & {"A", "n"} for option in options):
            self.refuse(f"`{name}` with {options[0]} can't be followed; write out what it makes")
        # in front of a command they are for that command only
        if not texts:
            for assignment in statement.assignments:
                self.variables[assignment.name] = self.assigned(assignment)
                if self.exports_all:
                    self.exported.add(assignment.name)
        elif name in DECLARATIONS:
            # all values are made before the first is set
            self.variables |= {one.name: self.assigned(one) for one in statement.assignments}
            names = [one.name for one in statement.assignments]
            self.exported |= exported([_shown(text) for text in texts], names)
        if statement.reads_text and name not in ("", "cat", "tee"):
            self.refuse("what it reads from the lines below is not followed; give that text as a file of its own")
        if texts:
            outer = self.settings
            for one in statement.assignments:
                if one.name in VARIABLES and name not in DECLARATIONS:
                    self.settings = [*self.settings, f"{one.name}={_shown(self.joined(one.value))}"]
            status = self.command(texts)
            self.settings = outer
            return status
        # `name=$(command)` ends as the command does
        is_made = any(isinstance(part, Unreadable) for one in statement.assignments for part in one.value)
        return None if is_made else True

    def command(self, texts: list[str]) -> bool | None:
        words = [_shown(text) for text in texts]
        name = words[0]
        if name in self.functions:
            self.refuse(f"it calls the function {name}, and functions are not followed; write out what it does")
        if name in _UNFOLLOWED:
            self.refuse(f"{_UNFOLLOWED[name]}, which is not followed; write out what it makes")
        if name in ("[", "test"):
            if name == "[" and words[-1] != "]":
                self.refuse("its `]` is missing")
            return decide([_value(text) for text in (texts[1:-1] if name == "[" else texts[1:])])
        if name in ("exit", "return"):
            raise _Ended(self.line)
        if name == "exec" and len(words) > 1:
            return self.command(texts[1:])
        if name == "eval":
            return self.inner(" ".join(words[1:]), [])
        if name == "shift":
            return self.shift(words)
        if name == "set" and not all(re.fullmatch(r"[-+]\w+|pipefail", word) for word in words[1:]):
            self.refuse("arguments that are set anew can't be followed; give the script's own behind @FILE")
        if name == "set":
            self.exports_all = exports_all(words, self.exports_all)
        if name == "unset":
            for one in words[1:]:
                self.variables[one] = []
        if name == "false":
            return False
        if name in ("cd", "pushd", "popd"):
            self.folder = ""
        if name in _SUCCEED or name in (*DECLARATIONS, "set", "unset"):
            return True
        place = _string_at(words)
        if place is not None:
            return self.inner(words[place], words[:place])
        self.find(words)
        return None

    def shift(self, words: list[str]) -> bool | None:
        n = words[1] if len(words) > 1 else "1"
        if not re.fullmatch(r"[0-9]{1,5}", n):
            self.refuse("by how many arguments can't be known")
        if int(n) > len(self.arguments):
            return False
        del self.arguments[: int(n)]
        return True

    def inner(self, text: str, prefix: list[str]) -> bool | None:
        """Follows a command that stands in a string."""
        self.charge(text, times=_READING_COST)
        outer, outer_line, outer_prefix = self.source, self.line, self.prefix
        n_found, n_nameless = len(self.found), len(self.nameless)
        label = outer.label if self.strings else f"{outer.label}:{outer_line}, its string"
        self.source = Source(text, label)
        self.strings += 1
        self.prefix = [*outer_prefix, *prefix]
        depth = self.depth
        status: bool | None = None
        try:
            status = self.body(parse(self.source))
        except _Ended:
            self.depth = depth
        # what stands in the string is told with the line of the string
        self.found[n_found:] = [replace(one, line=outer_line) for one in self.found[n_found:]]
        self.nameless[n_nameless:] = [outer_line] * len(self.nameless[n_nameless:])
        self.strings -= 1
        self.source, self.line, self.prefix = outer, outer_line, outer_prefix
        return status

    def find(self, words: list[str]) -> None:
        """Keeps a command that could be the one that trains."""
        if find_program(words) is not None or words[0].startswith("--"):
            words = [*self.prefix, *words]
            program = find_program(words)
            if program is not None:
                words = [*self.launcher_settings(), *words]
            self.found.append(_Found(words, program, self.line))
        elif any("$" in word for word in words) and any(word.startswith("--") for word in words):
            self.nameless.append(self.line)

    def launcher_settings(self) -> list[str]:
        """NAME=VALUE of variables that launchers read, as the command sees them: those in front of it win."""
        settings: list[str] = []
        for name in VARIABLES:
            elements = self.variables.get(name)
            if name in self.exported and elements:
                settings.append(f"{name}={_shown(elements[0])}")
        return [*settings, *self.settings]

    # Words

    def charge(self, text: str, *, times: int = 1) -> None:
        """Counts what an expansion makes, before it is put together."""
        self.n_characters += times * (len(text) + _WORD_COST)
        if self.n_characters > MOST_CHARACTERS:
            self.refuse(f"until here its words and variables have more than {MOST_CHARACTERS:,} characters")

    def expanded(self, word: Word) -> list[str]:
        """The words that a word becomes."""
        fields = _Fields()
        holds_list, n_elements = False, 0
        for part in word:
            if isinstance(part, Literal) and part.quoted:
                self.charge(part.text)
                fields.add(part.text)
                continue
            texts, splits = self.values(part, is_whole=part.quoted)
            if part.quoted and not _is_list(part):
                fields.add(" ".join(texts))
                continue
            holds_list |= part.quoted
            n_elements += len(texts)
            for n, text in enumerate(texts):
                if n:
                    fields.close()
                if part.quoted or not splits:
                    fields.add(text)
                else:
                    self.charge("", times=sum(map(text.count, " \t\n")))
                    fields.split(text)
        fields.close()
        # quotes keep an empty word, but `"${A[@]}"` without elements is none
        if fields.done == [""] and holds_list and not n_elements:
            return []
        return fields.done

    def joined(self, word: Word) -> str:
        """A word as an assignment takes it: not split."""
        texts: list[str] = []
        for part in word:
            texts.append(" ".join(self.values(part, is_whole=True)[0]))
        return "".join(texts)

    def values(self, part: Part, *, is_whole: bool) -> tuple[list[str], bool]:
        """What a part stands for, an element each, and whether blanks in it end words.

        `is_whole`: True where they don't, in quotes and behind `name=`.
        """
        splits = True
        if isinstance(part, Literal):
            texts = [part.text]
        elif isinstance(part, Arithmetic):
            texts = [self.computed(part)]
        elif isinstance(part, Unreadable):
            texts = [_unknown(self.folder if part.written == "$(pwd)" and self.folder else part.written)]
        elif part.counts:
            texts = [self.counted(part)]
        else:
            texts, splits = self.parameter(part, is_whole=is_whole)
        for text in texts:
            self.charge(text)
        return texts, splits

    def counted(self, part: Parameter) -> str:
        """`${#name}`: elements of a list, else characters."""
        held = self.held(part)
        if held is None:
            return _unknown(part.written)
        if "@" in (part.name, part.index) or "*" in (part.name, part.index):
            # what can't be known may be several elements, or none
            return _unknown(part.written) if any(map(_is_marked, held)) else str(len(held))
        value = _value("".join(held))
        return _unknown(part.written) if value is None else str(len(value))

    def parameter(self, part: Parameter, *, is_whole: bool) -> tuple[list[str], bool]:
        """A variable with what is done where it is not set."""
        held = self.held(part)
        kind = part.operator[-1:]
        is_set = bool(held)
        if held and part.operator.startswith(":"):
            is_set = any(_value(text) != "" for text in held)
        if held is None and part.name.isdecimal():
            # nobody else gives an argument, so it is known to be empty; a flag that would take it shows it
            held = [f"{_MISSING}{part.written}{_END}"]
        if kind in ("-", "=") and not is_set:
            if held is None and part.name.startswith(_SCHEDULERS):
                return [_unknown(part.written)], True
            texts = [self.joined(part.word)] if is_whole else self.expanded(part.word)
            if held is None:
                self.defaults[part.name] = _shown(" ".join(texts))
            if kind == "=":
                self.variables[part.name] = [" ".join(texts)]
            return texts, False
        if held is None and part.name == "PWD" and self.folder:
            return [_unknown(self.folder)], True
        if held is None:
            return [_unknown(part.written)], True
        if kind == "+" and any(_UNKNOWN in text for text in held):
            return [_unknown(part.written)], True
        if kind == "+" and is_set:
            return ([self.joined(part.word)] if is_whole else self.expanded(part.word)), False
        if kind == "+":
            return [], False
        return held, True

    def held(self, part: Parameter) -> list[str] | None:
        """The elements that a name holds; None where nothing sets it."""
        name = part.name
        if name in ("@", "*"):
            return [*self.arguments]
        if name == "#":
            return [str(len(self.arguments))]
        if name == "0":
            return [self.source.label]
        if name.isdecimal():
            place = int(name[:6]) - 1
            return [self.arguments[place]] if place < len(self.arguments) else None
        if name in ("?", "$", "!", "-"):
            return [_unknown(part.written)]
        elements = self.variables.get(name)
        if elements is None or part.index in ("@", "*"):
            return elements
        if part.index and not re.fullmatch(r"[0-9]{1,6}", part.index):
            return [_unknown(part.written)]
        place = int(part.index or 0)
        if any(map(_is_marked, elements[:place])):
            return [_unknown(part.written)]
        return elements[place : place + 1]

    def computed(self, part: Arithmetic) -> str:
        text = _value(self.joined(part.word))

        def value_of(name: str) -> str | None:
            held = self.variables.get(name)
            return _value(held[0]) if held else None

        number = None if text is None else compute(text, value_of)
        return _unknown(part.written) if number is None else str(number)

    def assigned(self, assignment: Assignment) -> list[str]:
        """The elements that a variable has after an assignment."""
        name = assignment.name
        if assignment.index or name == "IFS":
            self.refuse(f"{name}{assignment.index} can't be followed; write out what it makes")
        before = self.variables.get(name)
        if assignment.elements is not None:
            elements = [text for word in assignment.elements for text in self.expanded(word)]
            if assignment.adds and before:
                self.n_characters += len(before)
                elements = [*before, *elements]
            return elements
        value = self.joined(assignment.value)
        if assignment.adds:
            start = "".join(before[:1]) if before is not None else _unknown(f"${name}")
            self.charge(start)
            value = start + value
        return [value, *(before or [])[1:]]


class _Condition:
    """`[[ ]]`: its words are not split, and `&&`, `||`, `!` and brackets join what is asked."""

    def __init__(self, follower: _Follower, test: Test):
        self.follower = follower
        self.tokens = test.tokens
        self.at = 0
        self.depth = 0

    def whole(self) -> bool | None:
        status = self.either()
        return status if self.at == len(self.tokens) else None

    def token(self) -> Word | str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def either(self) -> bool | None:
        status = self.both()
        while self.token() == "||":
            self.at += 1
            status = either(status, self.both())
        return status

    def both(self) -> bool | None:
        status = self.single()
        while self.token() == "&&":
            self.at += 1
            status = both(status, self.single())
        return status

    def single(self) -> bool | None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.follower.refuse(f"more than {MAX_DEPTH} brackets inside each other")
        if self.token() == (Literal("!", quoted=False),):
            self.at += 1
            status = negation(self.single())
        elif self.token() == "(":
            self.at += 1
            status = self.either()
            self.at += 1
        else:
            begin = self.at
            while self.at < len(self.tokens) and self.token() not in ("&&", "||", ")"):
                self.at += 1
            status = self.asked(self.tokens[begin : self.at])
        self.depth -= 1
        return status

    def asked(self, tokens: Sequence[Word | str]) -> bool | None:
        words = [token for token in tokens if not isinstance(token, str)]
        if len(words) != len(tokens):
            return None
        values = [_value(self.follower.joined(word)) for word in words]
        if len(words) == 3 and values[1] in ("=", "==", "!="):
            same = self.follower.is_like(values[0], words[2])
            return negation(same) if values[1] == "!=" else same
        return decide(values)


def _ends(body: Body) -> bool:
    """True when no training comes behind a body: the script ends in it."""
    for statement in body:
        if isinstance(statement, Simple) and statement.words[:1] == ((Literal("exit", quoted=False),),):
            return True
        if isinstance(statement, Block) and not statement.is_subshell and _ends(statement.body):
            return True
    return False


def _is_list(part: Part) -> bool:
    return isinstance(part, Parameter) and not part.counts and "@" in (part.name, part.index)


def _says_nothing(name: str) -> bool:
    """True for a flag without which the recipe is the same."""
    flag = BY_NAME.get(name)
    return flag is not None and flag.fate in _HARMLESS


def _string_at(words: Sequence[str]) -> int | None:
    """Where the command stands that a shell among the words is given: `bash -x -c "..."`."""
    is_shell = False
    for n, (word, behind) in enumerate(pairwise(words)):
        if word.rpartition("/")[2] in _SHELLS:
            is_shell = True
        elif is_shell and re.fullmatch(r"-[a-z]*c", word) and behind:
            return n + 1
        elif is_shell and not word.startswith("-"):
            is_shell = False
    return None
