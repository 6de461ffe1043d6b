"""The command with which a shell script starts a training: its text is followed as a shell would, and never run.

Followed are assignments, arrays, the script's arguments, arithmetic, and conditions whose operands are known. What only
the machine knows (an environment variable that nothing sets, the output of a command) stays as it is written.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NoReturn

from megaspec.core.errors import Problem, RecipeError
from megaspec.core.problems import show
from megaspec.megatron.arithmetic import compute, sets_variable
from megaspec.megatron.batch import directives
from megaspec.megatron.conditions import COMPARISONS, both, decide, either, matches, negation
from megaspec.megatron.flag import Fate
from megaspec.megatron.flags import BY_NAME
from megaspec.megatron.launcher import VARIABLES
from megaspec.megatron.program import Program, find_program
from megaspec.megatron.shell import (
    DECLARATIONS,
    MAX_DEPTH,
    Arithmetic,
    ArithmeticTest,
    Assignment,
    Background,
    Block,
    Body,
    Case,
    Chain,
    Function,
    If,
    Literal,
    Parameter,
    Pipeline,
    Simple,
    Source,
    Statement,
    Test,
    Unfollowed,
    Unknown,
    Unreadable,
    While,
    Word,
    WordPart,
    parse,
    sets_inside,
)
from megaspec.megatron.shell_starts import MAKE_WORDS, ShellLaunch, Start, find_start, read_launch, ssh_command
from megaspec.megatron.shell_state import SET_BY_THE_SHELL, ShellState, set_options
from megaspec.megatron.unknowns import BEGINS, END, MARKED, PATTERN, is_marked, known, missing, pattern, shown, unknown

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
# In front of these an assignment doesn't stay with the one command, or is read while it is done.
_NO_ASSIGNMENT_IN_FRONT = (*DECLARATIONS, "eval", "set", "shift", "unset")
# Options of `shopt` by which no word and no condition changes that is followed.
_HARMLESS_SHOPT = (
    "autocd",
    "cdspell",
    "checkhash",
    "checkjobs",
    "checkwinsize",
    "cmdhist",
    "dotglob",
    "extglob",
    "globstar",
    "histappend",
    "huponexit",
    "inherit_errexit",
    "nocaseglob",
    "nullglob",
)
# What another shell than bash doesn't have, or not in the same way.
_BASH_ONLY = ("declare", "dirs", "local", "popd", "pushd", "shopt", "source", "typeset")
# They change what comes behind them in ways that are not followed.
_UNFOLLOWED = {
    ".": "another file is read",
    "source": "another file is read",
    "alias": "a command gets another name",
    "break": "a loop is left",
    "continue": "a loop is left",
    "coproc": "a command runs beside the script and sets variables",
    "enable": "a command gets another meaning",
    "getopts": "options are read one by one",
    "let": "arithmetic is done",
    "mapfile": "input is read",
    "read": "input is read",
    "readarray": "input is read",
    "return": "outside of a function it goes on or ends, as the script is started or read by another",
}
_WORD_COST = 64
# Text that is followed for the second time, out of a string, is read again.
_READING_COST = 128
_HARMLESS = (Fate.IDLE, Fate.ABSENT, Fate.DEAD)
_FIELD = re.compile(f"(?:[{BEGINS}][^{END}]*{END}|[^ \t\n{BEGINS}{END}]+)+")
# What a shell looks for files with; a bracket alone is none.
_GLOB = re.compile(r"[*?]|\[.*\]|[@+!]\(", re.DOTALL)
_BRACES = re.compile(r"\{.*(?:,|\.\.).*\}", re.DOTALL)
# Stands for a part of a word that isn't read for braces.
_HOLE = "\0"
_TILDE = re.compile(r"~([^/:]*)")
_NAME = re.compile(r"[A-Za-z_]\w*")
_NAME_AND_VALUE = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_TILDE_BEHIND_NAME = re.compile(r"[A-Za-z_]\w*=(?:.*:)?~", re.DOTALL)
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
class _FoundCommand:
    words: list[str]
    program: Program | None
    line: int


class _Ended(Exception):
    """The script ends itself."""

    def __init__(self, line: int, status: bool | None = None):
        self.line = line
        self.status = status


def script_words(
    text: str, *, label: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Script:
    """The command that a script trains with. `arguments`: of the script. `environment`: variables that are set for it.

    RecipeError, with the line: what is no shell script, what decides what is trained and can't be known, several
    trainings or none, or more text than a script that starts a training has.
    """
    source = Source(shown(text), label)
    follower = _Follower(source, [shown(one) for one in arguments], environment or {})
    try:
        follower.body(parse(source))
    except _Ended as ended:
        if not follower.found:
            source.refuse(ended.line, "it ends here, before it trains; what it needs stands behind it: @FILE ARG...")
    found = follower.training()
    return Script(found.words, follower.notes(), directives(source))


@dataclass
class _Fields:
    """The words that one word becomes."""

    looks_for_files: bool
    """False behind `set -f`."""
    done: list[str] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    """Of the word that is open."""
    unquoted: list[str] = field(default_factory=list)
    """Of the word that is open: what stands in no quotes and is known."""

    def add(self, text: str, *, quoted: bool) -> None:
        self.pieces.append(text)
        if not quoted:
            self.unquoted.append(MARKED.sub("", text))

    def close(self) -> None:
        if self.pieces:
            text = "".join(self.pieces)
            if self.looks_for_files and _GLOB.search("".join(self.unquoted)):
                text = pattern(text)
            self.done.append(text)
        self.pieces = []
        self.unquoted = []

    def split(self, text: str) -> None:
        """Adds what stands in no quotes: blanks end words. What can't be known is not split."""
        if text[:1] in (" ", "\t", "\n"):
            self.close()
        for n, one in enumerate(_FIELD.findall(text)):
            if n:
                self.close()
            self.add(one, quoted=False)
        if text[-1:] in (" ", "\t", "\n"):
            self.close()


class _Follower:
    def __init__(self, source: Source, arguments: list[str], environment: Mapping[str, str]):
        self.source = source
        self.state = ShellState(arguments, zero=source.label)
        for name, text in environment.items():
            # bash takes no IFS from outside
            if name != "IFS":
                self.state.variables[name] = [shown(text)]
                self.state.exported.add(name)
        self.found: list[_FoundCommand] = []
        self.nameless: list[int] = []
        """Lines of commands with flags, but with no program that could be known."""
        self.prefix: list[str] = []
        """Words, with their marks, in front of the command that stands in a string: `srun -n 8 bash -c`."""
        self.strings = 0
        """In how many strings the command stands that is followed."""
        self.line = 1
        self.depth = 0
        self.n_characters = 0
        self.n_statements = 0
        self.n_perhaps = 0
        """Above 0 while what is followed is done perhaps: a variable that is set can't be known then."""
        self.n_conditions = 0
        """Above 0 where a command that fails doesn't end the script in spite of `set -e`."""
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

    def training(self) -> _FoundCommand:
        """The one command that trains."""
        with_program: list[_FoundCommand] = []
        alone: list[_FoundCommand] = []
        gpt: list[_FoundCommand] = []
        training: list[_FoundCommand] = []
        for found in self.found:
            if found.program is None:
                alone.append(found)
                continue
            with_program.append(found)
            if found.program.is_gpt:
                gpt.append(found)
            if not found.program.is_tool:
                training.append(found)
        if with_program and alone:
            why = "it begins with a flag: a comment, or a backslash with a blank behind it, ends the command above"
            self.refuse(why, alone[0].line)
        # the more a command looks like a training, the sooner it is the one that is meant
        several = gpt or training or with_program or alone
        if not several:
            if self.nameless:
                self.refuse("its program can't be known; give NAME=VALUE in front of @FILE", self.nameless[0])
            text = f"{self.source.label}: no command in it starts pretrain_gpt.py with its flags"
            raise RecipeError([Problem("", text, "", "megatron-script")])
        first = several[0]
        for other in several[1:]:
            if other.words != first.words:
                self.refuse(f"another training starts in line {first.line}; give a script with one", other.line)
        return first

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
        status = self.done(statement)
        # those whose failure `set -e` ends the script at
        ends = isinstance(statement, Simple | Test | ArithmeticTest)
        ends |= isinstance(statement, Pipeline) and not statement.negated
        ends |= isinstance(statement, Block) and statement.is_subshell
        if status is False and ends and "errexit" in self.state.options and not self.n_conditions:
            raise _Ended(statement.line, False)
        return status

    def done(self, statement: Statement) -> bool | None:
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
            case Background():
                self.apart(lambda: self.statement(statement.statement))
                return True
            case Chain():
                return self.chain(statement)
            case Pipeline():
                return self.pipeline(statement)
            case Function():
                self.state.functions.add(statement.name)
                return True
            case Unfollowed():
                self.refuse(f"{statement.what} can't be followed; write out what it makes")

    def apart(self, follow: Callable[[], bool | None]) -> bool | None:
        """Follows what runs in a shell of its own: what it sets is gone behind it, and `exit` ends only it."""
        self.charge("", times=self.state.size)
        outer = self.state
        depth = self.depth
        self.state = outer.copy()
        try:
            status = follow()
        except _Ended as ended:
            status = ended.status
        self.state = outer
        self.depth = depth
        return status

    @contextmanager
    def perhaps(self, *, is_perhaps: bool = True) -> Iterator[None]:
        """Around what may not be done: what it sets can't be known then."""
        self.n_perhaps += is_perhaps
        try:
            yield
        finally:
            self.n_perhaps -= is_perhaps

    @contextmanager
    def failing(self, *, may_fail: bool = True) -> Iterator[None]:
        """Around what may fail without an end of the script, in spite of `set -e`."""
        self.n_conditions += may_fail
        try:
            yield
        finally:
            self.n_conditions -= may_fail

    def condition(self, statements: Body) -> bool | None:
        """What decides an `if` or a loop. `set -e` doesn't look at it."""
        with self.failing():
            return self.body(statements)

    def if_block(self, statement: If) -> bool | None:
        bodies: list[Body] = []
        is_reached = True
        for condition, body in statement.branches:
            status: bool | None = None
            if is_reached:
                status = self.condition(condition)
            else:
                # behind a condition that can't be known
                flags: list[str] = []
                self.weigh(condition, statement.line, flags)
                if flags:
                    self.undecided(statement.line)
            is_reached = is_reached and status is not None
            if status is not False:
                bodies.append(body)
            if status is True:
                break
        else:
            bodies.append(statement.otherwise)
        return self.one_of(bodies, statement.line)

    def case_block(self, statement: Case) -> bool | None:
        bodies: list[Body] = []
        subject = known(self.joined(statement.subject, tildes="~"))
        is_reached = True
        for patterns, body in statement.branches:
            status: bool | None = False
            for one in patterns:
                if status is True:
                    break
                with self.perhaps(is_perhaps=not is_reached):
                    is_like = self.is_like(subject, one)
                is_reached = is_reached and is_like is not None
                status = either(status, is_like)
            if status is not False:
                bodies.append(body)
            if status is True:
                break
        else:
            bodies.append(())
        return self.one_of(bodies, statement.line)

    def is_like(self, text: str | None, word: Word) -> bool | None:
        """Whether a text is one that a pattern stands for."""
        pieces: list[tuple[str, bool]] = []
        is_known = True
        for part in word:
            piece = known(self.joined((part,), tildes="~" if part is word[0] else ""))
            is_known = is_known and piece is not None
            pieces.append((piece or "", not part.quoted))
        if word == (Literal("*", quoted=False),):
            return True
        if text is None or not is_known:
            return None
        self.n_characters += len(text) * sum(len(piece) for piece, _ in pieces)
        self.charge("")
        return matches(text, pieces)

    def one_of(self, bodies: list[Body], line: int) -> bool | None:
        """Follows the only body that can lead to a training, or passes over several that make no difference to it."""
        going_on = [body for body in bodies if not _ends(body)]
        if len(bodies) > 1:
            for body in bodies:
                if _ends(body):
                    self.weigh_end(body, line)
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

    def weigh_end(self, body: Body, line: int) -> None:
        """RecipeError: a body that ends the script and is passed over trains something before it does."""
        for statement in _simple_statements(body):
            words = self.words_perhaps(statement)
            program = find_program(words)
            if program is not None and program.is_tool:
                program = None
            starts = find_start(words) is not None or ssh_command(words) is not None
            if words and words[0] not in _SUCCEED and (program is not None or starts):
                self.undecided(line)

    def words_perhaps(self, statement: Simple) -> list[str]:
        """The words of a command that may not be done, as they are written; nothing that they set stays."""
        self.charge("", times=self.state.size)
        outer = self.state
        self.state = outer.copy()
        with self.perhaps():
            words = _all_shown(self.all_expanded(statement.words))
        self.state = outer
        return words

    def weigh(self, body: Body, line: int, flags: list[str]) -> None:
        """Looks at what is done perhaps: plain variables can't be known from here on, and flags that say nothing are
        collected. RecipeError: it could change what is trained."""
        for statement in body:
            match statement:
                case Simple():
                    with self.perhaps():
                        self.weigh_simple(statement, line, flags)
                case If():
                    for condition, inner in statement.branches:
                        self.weigh(condition, line, flags)
                        self.weigh(inner, line, flags)
                    self.weigh(statement.otherwise, line, flags)
                case Case():
                    with self.perhaps():
                        self.joined(statement.subject, tildes="~")
                        for patterns, _ in statement.branches:
                            for one in patterns:
                                self.joined(one, tildes="~")
                    for _, inner in statement.branches:
                        self.weigh(inner, line, flags)
                case Block() if statement.is_subshell:
                    self.weigh_apart(statement.body, line)
                case Block():
                    self.weigh(statement.body, line, flags)
                case Background():
                    self.weigh_apart((statement.statement,), line)
                case Chain():
                    self.weigh((statement.first, *(one for _, one in statement.rest)), line, flags)
                case Pipeline() if len(statement.stages) > 1:
                    for stage in statement.stages:
                        self.weigh_apart((stage,), line)
                case Pipeline():
                    self.weigh(statement.stages, line, flags)
                case Test():
                    with self.perhaps():
                        _Condition(self, statement).whole()
                case _:
                    self.undecided(line)

    def weigh_apart(self, body: Body, line: int) -> None:
        """The same for what runs in a shell of its own, so that what it sets is gone."""

        def follow() -> None:
            self.weigh(body, line, [])

        self.apart(follow)

    def weigh_simple(self, statement: Simple, line: int, flags: list[str]) -> None:
        texts = _behind_prefix(self.all_expanded(statement.words))
        words = _all_shown(texts)
        name = words[0] if words else ""
        if self.matters(words) or (statement.reads_text and name not in ("", "cat", "tee")):
            self.undecided(line)
        if name == "set":
            options = set(self.state.options)
            if set_options(options, words[1:]) or options != self.state.options:
                self.undecided(line)
        elif name == "shopt":
            self.shopt(words)
        elif name == "unset":
            self.unset(texts)
        elif name in ("cd", "pushd", "popd"):
            self.state.leave_folder()
        elif name in DECLARATIONS:
            self.declare(name, texts, ())
            letters = "".join(word for word in words[1:] if word.startswith("-"))
            if name == "readonly" or "r" in letters:
                self.state.readonly |= {one.name for one in statement.assignments}
        if name and name not in DECLARATIONS:
            for assignment in statement.assignments:
                self.joined(assignment.value, tildes=":")
            return
        for assignment in statement.assignments:
            values: Sequence[Word] = [assignment.value]
            if assignment.elements is not None:
                values = assignment.elements
            words = " ".join(_all_shown(self.all_expanded(values))).split()
            given = [word.partition("=")[0] for word in words if word.startswith("--")]
            # `ARGS+=" --no-op"`: flags that say nothing, added to a list of flags
            adds_flags = assignment.adds and bool(given) and words[0].startswith("--")
            if adds_flags and all(map(_says_nothing, given)):
                flags += given
            elif given or assignment.elements is not None or assignment.index:
                self.undecided(line)
            else:
                if name in DECLARATIONS and assignment.name not in self.state.exported:
                    self.state.perhaps_exported.add(assignment.name)
                self.put(assignment.name, [])

    def matters(self, words: list[str]) -> bool:
        """True for a command that could train, or change what comes behind it in ways that are not followed."""
        if not words:
            return False
        name = words[0]
        if name in (*_UNFOLLOWED, *self.state.functions, "eval", "exec", "shift"):
            return True
        if find_program(words) is not None or name.startswith("--"):
            return True
        if "$" in name and any(word.startswith("--") for word in words):
            # a program that can't be known with flags of its own
            return True
        starts = find_start(words) is not None or ssh_command(words) is not None
        if starts and any(_may_train(word) for word in words):
            return True
        return _sets_silently(words)

    def undecided(self, line: int) -> NoReturn:
        self.refuse(f"what it asks can't be known, and it decides what is trained; {_WAY_OUT}", line)

    def while_block(self, statement: While) -> bool | None:
        while True:
            status = self.condition(statement.condition)
            if status is None:
                self.refuse("a loop whose end can't be known; write out what it makes", statement.line)
            if status is statement.negated:
                return True
            self.body(statement.body)

    def block(self, statement: Block) -> bool | None:
        if statement.is_subshell:
            return self.apart(lambda: self.body(statement.body))
        return self.body(statement.body)

    def chain(self, statement: Chain) -> bool | None:
        # `set -e` looks at the last command only
        with self.failing():
            status = self.statement(statement.first)
        for n, (operator, then) in enumerate(statement.rest):
            is_last = n == len(statement.rest) - 1
            # of `python setup.py && torchrun ...` the training is what is asked for
            if status is None and not (operator == "&&" and self.trains(then)):
                self.one_of([(then,), ()], statement.line)
            elif status is None or status is (operator == "&&"):
                with self.failing(may_fail=not is_last):
                    status = self.statement(then)
        return status

    def trains(self, statement: Statement) -> bool:
        """True for a program, or a pipeline that begins with one."""
        first = statement
        if isinstance(statement, Pipeline):
            first = statement.stages[0]
        if not isinstance(first, Simple):
            return False
        return find_program(self.words_perhaps(first)) is not None

    def pipeline(self, statement: Pipeline) -> bool | None:
        if len(statement.stages) == 1:
            with self.failing(may_fail=statement.negated):
                status = self.statement(statement.stages[0])
        else:
            statuses = [self.stage(stage) for stage in statement.stages]
            status = statuses[-1]
            if "pipefail" in self.state.options:
                for one in statuses:
                    status = both(status, one)
        if statement.negated:
            return negation(status)
        return status

    def stage(self, statement: Statement) -> bool | None:
        """A part of a pipeline, in a shell of its own."""
        return self.apart(lambda: self.statement(statement))

    def arithmetic_test(self, statement: ArithmeticTest) -> bool | None:
        """`(( ))`: any number but 0 is true."""
        number = known(self.computed(statement.arithmetic))
        if number is None:
            return None
        return number != "0"

    def simple(self, statement: Simple) -> bool | None:
        texts = self.all_expanded(statement.words)
        if len(texts) > MOST_WORDS:
            self.refuse(f"it has more than {MOST_WORDS:,} words")
        name = shown(texts[0]) if texts else ""
        given: dict[str, str] = {}
        if not texts:
            for assignment in statement.assignments:
                self.assign(assignment)
        elif name in DECLARATIONS:
            self.declare(name, texts, statement.assignments)
        else:
            given = self.in_front(name, statement.assignments)
        if all(MARKED.fullmatch(text) for text in texts):
            # where the words are none in the end, the assignments stay
            for variable in given:
                self.put(variable, [unknown(f"${variable}")])
        if statement.reads_text and name not in ("", "cat", "tee"):
            self.refuse("what it reads from the lines below is not followed; give that text as a file of its own")
        if texts:
            return self.command(texts, given)
        # `name=$(command)` ends as the command does
        for assignment in statement.assignments:
            if any(isinstance(part, Unreadable) for part in assignment.value):
                return None
        return True

    def in_front(self, name: str, assignments: Sequence[Assignment]) -> dict[str, str]:
        """`A=1 command`: what the command gets in its environment; a later value sees an earlier one."""
        given: dict[str, str] = {}
        if not assignments:
            return given
        if name in _NO_ASSIGNMENT_IN_FRONT:
            self.refuse(f"an assignment in front of `{name}` can't be followed; write it as a command of its own")
        outer = self.state
        self.charge("", times=outer.size)
        self.state = outer.copy()
        for one in assignments:
            why = self.state.why_not_set(one.name)
            if one.elements is not None or (why and one.name != "IFS"):
                self.refuse(why or "an array in front of a command can't be followed")
            value = self.assigned(one)[0]
            given[one.name] = value
            self.state.variables[one.name] = [value]
        inside = self.state
        self.state = outer
        # `A=${B:=x} command` sets B here
        for name, elements in inside.variables.items():
            if name not in given and outer.variables.get(name) is not elements:
                self.put(name, elements)
        return given

    def command(self, texts: list[str], given: Mapping[str, str] | None = None) -> bool | None:
        """A command that may be a function."""
        name = shown(texts[0])
        if name in self.state.functions:
            self.refuse(f"it calls the function {name}, and functions are not followed; write out what it does")
        return self.known_command(texts, given or {})

    def known_command(self, texts: list[str], given: Mapping[str, str]) -> bool | None:
        """A command of the shell's, or a program. `given`: variables that are set for it alone."""
        words = _all_shown(texts)
        name = words[0]
        if name in _UNFOLLOWED:
            self.refuse(f"{_UNFOLLOWED[name]}, which is not followed; write out what it makes")
        if self.source.is_posix and name in _BASH_ONLY:
            self.refuse(f"`{name}` is bash's, and not every `sh` has it; give the string to bash -c")
        if name in ("command", "builtin"):
            return self.as_command(texts, given)
        if name in ("[", "test"):
            return self.bracket_test(texts)
        if name == "exit":
            status = None  # that of the command before it
            if len(words) > 1 and words[1].isdecimal():
                status = words[1] == "0"
            raise _Ended(self.line, status)
        if name == "exec":
            return self.exec(texts, given)
        if name == "eval":
            return self.eval(texts)
        if name == "shift":
            return self.shift(words)
        if name == "set":
            why = set_options(self.state.options, words[1:])
            if not why and self.source.is_posix and "pipefail" in words:
                why = "`pipefail` is bash's, and not every `sh` has it; give the string to bash -c"
            if why:
                self.refuse(why)
        if name == "shopt":
            self.shopt(words)
        if name == "unset":
            self.unset(texts)
        if _sets_silently(words):
            self.refuse(
                "it sets a variable or trains beside what it does, which is not followed; write out what it makes"
            )
        if name == "false":
            return False
        if name in ("cd", "pushd", "popd"):
            self.state.leave_folder()
        if name in _SUCCEED or name in (*DECLARATIONS, "set", "shopt", "unset"):
            return True
        return self.program(texts, given)

    def program(self, texts: list[str], given: Mapping[str, str]) -> bool | None:
        """A program: one that is given a string to follow, the one that trains, or another, which is passed over."""
        words = _all_shown(texts)
        place = ssh_command(words)
        if place is not None and any(_may_train(word) for word in words[place:]):
            # ssh joins its words, and a shell of the other machine reads them again
            inside = self.state.child()
            inside.forget()
            inside.zero = unknown("$0")
            return self.inner(" ".join(texts[place:]), texts[:place], inside, is_posix=True)
        start = find_start(words)
        if start is not None:
            return self.started(texts, start, given)
        self.find(texts, given)
        return None

    def as_command(self, texts: list[str], given: Mapping[str, str]) -> bool | None:
        """`command NAME`, `builtin NAME`: NAME, but no function of that name."""
        at = 1
        while at < len(texts) and shown(texts[at]) in ("command", "builtin", "-p", "--"):
            at += 1
        if at == len(texts):
            return True
        name = shown(texts[at])
        if name.startswith("-"):
            # it asks where the command is
            return None
        if given and name in _NO_ASSIGNMENT_IN_FRONT:
            self.refuse(f"an assignment in front of `{name}` can't be followed; write it as a command of its own")
        if name in DECLARATIONS:
            if any("=" in text for text in texts[at:]):
                self.refuse(f"`{shown(texts[0])}` in front of `{name}` can't be followed; leave it out")
            self.declare(name, texts[at:], ())
        return self.known_command(texts[at:], given)

    def exec(self, texts: list[str], given: Mapping[str, str]) -> bool | None:
        """Another program in place of the shell; without one, files are opened."""
        if len(texts) == 1:
            return True
        if texts[1].startswith("-"):
            self.refuse(f"`exec` with {shown(texts[1])} can't be followed; leave it out")
        line = self.line
        raise _Ended(line, self.program(texts[1:], given))

    def eval(self, texts: list[str]) -> bool | None:
        """Text that is followed here, in the same shell."""
        if any(PATTERN in text for text in texts):
            self.refuse("the names of files or several words may be in what it does; write out what it makes")
        followed = texts[1:]
        if followed[:1] == ["--"]:
            followed = followed[1:]
        return self.read_again(
            " ".join(followed), [], is_posix=self.source.is_posix, follow=lambda body: self.body(body)
        )

    def bracket_test(self, texts: list[str]) -> bool | None:
        operands = [known(text) for text in texts[1:]]
        if any(PATTERN in text for text in texts):
            # they may be several operands
            return None
        if shown(texts[0]) == "[":
            if shown(texts[-1]) != "]" or len(texts) == 1:
                self.refuse("its `]` is missing")
            operands = operands[:-1]
        if self.source.is_posix and "==" in operands:
            self.refuse("`==` is bash's, and not every `sh` has it; write `=`")
        return decide(operands)

    def shift(self, words: list[str]) -> bool | None:
        n = words[1] if len(words) > 1 else "1"
        if not re.fullmatch(r"[0-9]{1,5}", n) or any(map(is_marked, self.state.arguments)):
            self.refuse("by how many arguments can't be known")
        if int(n) > len(self.state.arguments):
            return False
        del self.state.arguments[: int(n)]
        return True

    def shopt(self, words: list[str]) -> None:
        """RecipeError: it sets an option by which what comes behind it is read in another way."""
        names = []
        letters = ""
        for word in words[1:]:
            if word.startswith("-"):
                letters += word[1:]
            else:
                names.append(word)
        is_set = "s" in letters or "u" in letters
        is_harmless = "o" not in letters and all(name in _HARMLESS_SHOPT for name in names)
        if is_set and not is_harmless:
            self.refuse(f"`shopt` with {' '.join(words[1:])} changes how the script is read, which is not followed")

    def unset(self, texts: list[str]) -> None:
        options = ""
        for text in texts[1:]:
            if text.startswith("-"):
                options += text[1:]
                continue
            if "n" in options or not _NAME.fullmatch(text):
                what = shown(" ".join(texts[1:]))
                self.refuse(f"`unset {what}` can't be followed; give it whole variables, by their names")
            if "f" in options:
                # where it is done perhaps, the name stays one that is not followed
                if not self.n_perhaps:
                    self.state.functions.discard(text)
                    self.state.exported_functions.discard(text)
                continue
            why = self.state.why_not_set(text)
            if why and text != "IFS":
                self.refuse(why)
            if not self.n_perhaps:
                self.state.drop(text)
                continue
            if text in self.state.exported:
                self.state.exported.discard(text)
                self.state.perhaps_exported.add(text)
            self.state.variables[text] = [unknown(f"${text}")]

    def declare(self, name: str, texts: list[str], assignments: Sequence[Assignment]) -> None:
        """`export`, `declare`, `readonly` and their like, outside of functions."""
        if name == "local":
            self.refuse("outside of a function `local` is an error; leave it out")
        options = [shown(text) for text in texts[1:] if text[:1] in ("-", "+") and text not in ("-", "+", "--")]
        letters = "".join(option[1:] for option in options if option.startswith("-"))
        taken_back = "".join(option[1:] for option in options if option.startswith("+"))
        changing = set(letters) - set("aFfgprtx")
        if name == "export":
            changing.discard("n")
        if changing or set(taken_back) - {"x"}:
            self.refuse(f"`{name}` with {' '.join(options)} can't be followed; write out what it makes")
        names = [text for text in texts[1:] if text[:1] not in ("-", "+")]
        if set(letters) & {"f", "F"}:
            if name == "export":
                self.state.exported_functions |= {*names} & self.state.functions
            return
        # all values are made before the first is set
        made: list[tuple[str, list[str] | None, bool]] = []
        for one in assignments:
            if self.has_braces(one.value):
                self.refuse("a brace expansion can't be read here; write its words out")
            if self.source.is_posix and not all(part.quoted for part in one.value if not isinstance(part, Literal)):
                self.refuse("whether blanks end words behind `=` is another matter in every `sh`; put it in quotes")
            is_array = one.elements is not None or "a" in letters
            made.append((one.name, self.assigned(one), is_array))
        for text in names:
            made.append((*self.declared(name, text), "a" in letters))
        for variable, elements, is_array in made:
            if elements is not None:
                self.put(variable, elements, is_array=is_array)
            elif is_array:
                self.state.arrays.add(variable)
            self.mark(variable, name, letters, taken_back)

    def declared(self, name: str, text: str) -> tuple[str, list[str] | None]:
        """A name that a declaration is given as a word, and its elements: `export $NAME`, `export "A=$B"`."""
        if _NAME.fullmatch(text):
            return text, None
        match = _NAME_AND_VALUE.fullmatch(text)
        if match is None or match.group(2) or (name != "export" and match.group(3).startswith("(")):
            self.refuse(f"`{name}` with {shown(text)} can't be followed; write out what it makes")
        before = self.state.variables.get(match.group(1))
        return match.group(1), [match.group(3), *(before or [])[1:]]

    def mark(self, variable: str, name: str, letters: str, taken_back: str) -> None:
        """Exports a variable, or makes it read-only."""
        state = self.state
        is_taken_back = "x" in taken_back or (name == "export" and "n" in letters)
        is_exported = name == "export" or "x" in letters
        if self.n_perhaps and (is_taken_back or is_exported):
            was = variable in state.exported
            if was == is_taken_back:
                state.exported.discard(variable)
                state.perhaps_exported.add(variable)
        elif is_taken_back:
            state.exported.discard(variable)
            state.perhaps_exported.discard(variable)
        elif is_exported:
            state.exported.add(variable)
        if name == "readonly" or "r" in letters:
            state.readonly.add(variable)

    # Strings that are followed

    def started(self, texts: list[str], start: Start, given: Mapping[str, str]) -> bool | None:
        """A string that another shell is given, with arguments and an environment of its own."""
        # an option that can't be known is none of those that are read
        front = ["" if text[:1] in BEGINS else text for text in texts[: start.begin]]
        launch = read_launch(front)
        inside = self.state.child()
        for name, value in given.items():
            inside.variables[name] = [value]
            inside.exported.add(name)
        self.launch(inside, launch)
        is_posix = start.name != "bash"
        if is_posix:
            inside.functions = set()
        why = launch.why_not
        for option in start.options:
            if option.startswith("--"):
                why = f"`{start.name}` with {shown(option)} can't be followed; leave it out"
        why = why or set_options(inside.options, start.options)
        if start.name == "zsh":
            why = "zsh reads words in another way, which is not followed; give the string to bash -c"
        if why:
            self.refuse(why)
        inside.zero = texts[start.begin]
        if len(texts) > start.string + 1:
            inside.zero = texts[start.string + 1]
        inside.arguments = texts[start.string + 2 :]
        if any(PATTERN in text for text in texts[start.string :]):
            self.refuse("the names of files or several words may be in what it is given; write out what it makes")
        return self.inner(texts[start.string], texts[: start.string], inside, is_posix=is_posix)

    def launch(self, inside: ShellState, launch: ShellLaunch) -> None:
        """What the words in front of a shell change for it."""
        if not launch.is_handed_on:
            folder = inside.folder
            inside.forget()
            inside.folder = folder
        if launch.leaves_folder:
            inside.leave_folder()
        for name, value in launch.variables.items():
            if not _NAME.fullmatch(name):
                self.refuse(f"`env` with {shown(name)} can't be followed; write out what it makes")
            if value is None:
                inside.drop(name)
            else:
                inside.variables[name] = [value]
                inside.exported.add(name)

    def inner(self, text: str, prefix: list[str], inside: ShellState, *, is_posix: bool) -> bool | None:
        """Follows a string in a shell that is started for it."""

        def follow(body: Body) -> bool | None:
            return self.apart(lambda: self.in_state(inside, body))

        # an `if` around it says nothing about `set -e` inside
        n_conditions = self.n_conditions
        self.n_conditions = 0
        status = self.read_again(text, prefix, is_posix=is_posix, follow=follow)
        self.n_conditions = n_conditions
        return status

    def in_state(self, inside: ShellState, body: Body) -> bool | None:
        self.state = inside
        return self.body(body)

    def read_again(
        self, text: str, prefix: list[str], *, is_posix: bool, follow: Callable[[Body], bool | None]
    ) -> bool | None:
        """Reads the text of a string. What is found in it has the line of the string."""
        self.charge(text, times=_READING_COST)
        outer = self.source
        outer_line = self.line
        outer_prefix = self.prefix
        n_found = len(self.found)
        n_nameless = len(self.nameless)
        label = outer.label
        if not self.strings:
            label = f"{outer.label}:{outer_line}, its string"
        self.source = Source(text, label, is_posix)
        self.strings += 1
        self.prefix = [*outer_prefix, *prefix]
        try:
            return follow(parse(self.source))
        except _Ended as ended:
            # it ends the shell that follows it, in the line of the string
            raise _Ended(outer_line, ended.status) from None
        finally:
            self.found[n_found:] = [replace(one, line=outer_line) for one in self.found[n_found:]]
            self.nameless[n_nameless:] = [outer_line] * len(self.nameless[n_nameless:])
            self.strings -= 1
            self.source = outer
            self.line = outer_line
            self.prefix = outer_prefix

    def find(self, texts: list[str], given: Mapping[str, str]) -> None:
        """Keeps a command that could be the one that trains."""
        words = _all_shown(texts)
        if find_program(words) is not None or words[0].startswith("--"):
            if re.search(r"\s", words[0]):
                self.refuse("the name of its program has blanks in it; leave out the quotes around the command")
            program = find_program(words)
            if program is not None and not program.is_tool:
                self.refuse_made_words(words[: program.begin])
            whole = [*self.prefix, *texts]
            for text in whole:
                self.refuse_pattern(text)
            words = _all_shown(whole)
            program = find_program(words)
            if program is not None:
                words = [*self.launcher_settings(given), *words]
            self.found.append(_FoundCommand(words, program, self.line))
        elif any("$" in word for word in words) and any(word.startswith("--") for word in words):
            self.nameless.append(self.line)

    def launcher_settings(self, given: Mapping[str, str]) -> list[str]:
        """NAME=VALUE of variables that launchers read, as the command sees them: those in front of it win."""
        settings: list[str] = []
        for name in VARIABLES:
            elements = self.state.variables.get(name)
            if name in given:
                settings.append(f"{name}={shown(given[name])}")
            elif name in self.state.perhaps_exported:
                settings.append(f"{name}={shown(unknown(f'${name}'))}")
            elif name in self.state.exported and elements:
                settings.append(f"{name}={shown(elements[0])}")
        return settings

    def refuse_made_words(self, words: Sequence[str]) -> None:
        """RecipeError: what stands in front of a training starts it with other words."""
        for word in words:
            name = word.rpartition("/")[2]
            # `find . -name train.py` starts nothing
            if name in MAKE_WORDS and (name != "find" or "-exec" in words):
                self.refuse(f"{word} makes other words of a command's; write out the command that it makes")

    def refuse_pattern(self, text: str) -> None:
        """RecipeError: a word of a training that only the machine makes."""
        if PATTERN not in text:
            return
        if _BRACES.search(text):
            self.refuse("a brace expansion can't be read here; write its words out")
        why = "becomes what the machine's files and users say, which can't be known; put it in quotes or write it out"
        self.refuse(f"{show(shown(text))} {why}")

    # Words

    def charge(self, text: str, *, times: int = 1) -> None:
        """Counts what an expansion makes, before it is put together."""
        self.n_characters += times * (len(text) + _WORD_COST)
        if self.n_characters > MOST_CHARACTERS:
            self.refuse(f"until here its words and variables have more than {MOST_CHARACTERS:,} characters")

    def expanded(self, word: Word) -> list[str]:
        """The words that a word becomes."""
        fields = _Fields("noglob" not in self.state.options)
        holds_list = False
        n_elements = 0
        for n_part, part in enumerate(word):
            if isinstance(part, Literal) and part.quoted:
                self.charge(part.text)
                fields.add(part.text, quoted=True)
                continue
            if isinstance(part, Literal):
                self.charge(part.text)
                self.add_unquoted(fields, part.text, n_part, word)
                continue
            texts, splits = self.values(part, is_whole=part.quoted)
            if part.quoted and not _is_list(part):
                fields.add(" ".join(texts), quoted=True)
                continue
            holds_list |= part.quoted
            n_elements += len(texts)
            for n, text in enumerate(texts):
                if n:
                    fields.close()
                if part.quoted or not splits:
                    fields.add(text, quoted=True)
                else:
                    self.charge("", times=sum(map(text.count, " \t\n")))
                    fields.split(text)
        fields.close()
        if self.has_braces(word):
            return [pattern(" ".join(fields.done))]
        # quotes keep an empty word, but `"${A[@]}"` without elements is none
        if fields.done == [""] and holds_list and not n_elements:
            return []
        return fields.done

    def all_expanded(self, words: Sequence[Word]) -> list[str]:
        """The words that several words become."""
        texts: list[str] = []
        for word in words:
            texts += self.expanded(word)
        return texts

    def add_unquoted(self, fields: _Fields, text: str, n_part: int, word: Word) -> None:
        """Adds what is written without quotes. `~` in front of it is a folder."""
        begins = text.startswith("~") and n_part == 0
        if begins:
            folder = self.tilde(text, is_last=len(word) == 1)
            if folder is not None:
                fields.add(folder, quoted=True)
                text = text[_behind_tilde(text) :]
        elif n_part == 0 and _TILDE_BEHIND_NAME.match(text):
            # `make A=~/x`: a word that looks like an assignment
            text = pattern(text)
        # in `${A:-b c}` there are blanks
        fields.split(text)

    def tilde(self, text: str, *, is_last: bool) -> str | None:
        """What `~` in front of a text becomes; None where it stays as it is. `is_last`: no part comes behind it."""
        if _behind_tilde(text) == len(text) and not is_last:
            # with quotes or variables in it, it names no user
            return None
        written = text[: _behind_tilde(text)]
        if written != "~":
            return pattern(written)
        held = self.state.variables.get("HOME")
        if not held:
            return unknown("$HOME")
        return held[0]

    def has_braces(self, word: Word) -> bool:
        """True where braces outside of quotes make several words of one: `{a,b}`, `{1..3}`."""
        text = ""
        for part in word:
            if isinstance(part, Literal) and not part.quoted:
                text += part.text
            else:
                text += _HOLE
        return _BRACES.search(text) is not None

    def joined(self, word: Word, *, tildes: str = "") -> str:
        """A word as an assignment takes it: not split.

        `tildes`: "" leaves each `~`, "~" takes one in front for a folder, ":" also those behind a colon.
        """
        texts: list[str] = []
        for n, part in enumerate(word):
            is_literal = isinstance(part, Literal) and not part.quoted
            if is_literal and tildes and "~" in part.text:
                self.charge(part.text)
                texts.append(self.with_folders(part.text, is_first=n == 0, is_last=n == len(word) - 1, tildes=tildes))
            else:
                texts.append(" ".join(self.values(part, is_whole=True)[0]))
        return "".join(texts)

    def with_folders(self, text: str, *, is_first: bool, is_last: bool, tildes: str) -> str:
        """A text in no quotes, with what each `~` in it stands for."""
        pieces = text.split(":") if tildes == ":" else [text]
        for n, piece in enumerate(pieces):
            if piece.startswith("~") and (n > 0 or is_first):
                folder = self.tilde(piece, is_last=is_last or n < len(pieces) - 1)
                if folder is not None:
                    pieces[n] = folder + piece[_behind_tilde(piece) :]
        return ":".join(pieces)

    def values(self, part: WordPart, *, is_whole: bool) -> tuple[list[str], bool]:
        """What a part stands for, an element each, and whether blanks in it end words.

        `is_whole`: True where they don't, in quotes and behind `name=`.
        """
        splits = True
        if isinstance(part, Literal):
            texts = [part.text]
        elif isinstance(part, Unknown):
            texts = [part.marked]
        elif isinstance(part, Arithmetic):
            texts = [self.computed(part)]
        elif isinstance(part, Unreadable):
            texts = [self.unreadable(part)]
        elif part.counts:
            texts = [self.counted(part)]
        else:
            texts, splits = self.parameter(part, is_whole=is_whole)
        for text in texts:
            self.charge(text)
        return texts, splits

    def unreadable(self, part: Unreadable) -> str:
        # a command runs in a shell of its own, and sets nothing here
        if part.written.startswith("${") and sets_inside(part.written):
            self.refuse(f"{show(shown(part.written))} sets a variable, which can't be followed; set it above")
        if part.written == "$(pwd)" and self.state.folder:
            return unknown(self.state.folder)
        return unknown(part.written)

    def counted(self, part: Parameter) -> str:
        """`${#name}`: elements of a list, else characters."""
        held = self.held(part)
        if held is None:
            return unknown(part.written)
        if "@" in (part.name, part.index) or "*" in (part.name, part.index):
            # what can't be known may be several elements, or none
            if any(map(is_marked, held)):
                return unknown(part.written)
            return str(len(held))
        if not held:
            self.refuse_unset(part)
        text = known("".join(held))
        if text is None:
            return unknown(part.written)
        return str(len(text))

    def parameter(self, part: Parameter, *, is_whole: bool) -> tuple[list[str], bool]:
        """A variable with what is done where it is not set."""
        held = self.held(part)
        kind = part.operator[-1:]
        is_set = bool(held)
        if held and part.operator.startswith(":"):
            is_set = any(known(text) != "" for text in held)
        if held is None and part.name == "PWD" and self.state.folder:
            return [unknown(self.state.folder)], True
        if held is None and part.name.isdecimal():
            # nobody else gives an argument, so it is known to be empty; a flag that would take it shows it
            held = [missing(part.written)]
            if not kind:
                self.refuse_unset(part)
        elif held is None and (part.name in SET_BY_THE_SHELL or not self.state.is_environment_known):
            with self.perhaps():
                self.joined(part.word)
            return [unknown(part.written)], True
        if kind in ("-", "=") and not is_set:
            return self.default(part, held, is_whole=is_whole)
        if kind == "?" and not is_set and held is not None and not self.n_perhaps:
            self.refuse(f"it ends here, before it trains, since {part.name} is not given; give it with @FILE")
        if held is None or (kind == "+" and any(known(text) is None for text in held)):
            with self.perhaps():
                self.joined(part.word)
            return [unknown(part.written)], True
        if kind == "+" and is_set:
            return self.word_behind(part, is_whole=is_whole), False
        if kind == "+":
            return [], False
        if kind in ("-", "=") and any(known(text) is None for text in held):
            with self.perhaps():
                self.joined(part.word)
        if not held and not kind:
            self.refuse_unset(part)
        return held, True

    def default(self, part: Parameter, held: list[str] | None, *, is_whole: bool) -> tuple[list[str], bool]:
        """What stands behind `-` or `=` for a variable that is not set."""
        is_outside = held is None
        if is_outside and part.name.startswith(_SCHEDULERS):
            with self.perhaps():
                self.joined(part.word)
            return [unknown(part.written)], True
        texts = self.word_behind(part, is_whole=is_whole)
        if is_outside:
            self.defaults[part.name] = shown(" ".join(texts))
        if part.operator.endswith("="):
            if part.index or not _NAME.fullmatch(part.name):
                self.refuse(f"{show(shown(part.written))} can't be followed; set it above")
            texts = [self.joined(part.word, tildes="" if part.quoted else "~")]
            self.put(part.name, texts)
            # what is set is split as any other value is
            return texts, True
        return texts, False

    def word_behind(self, part: Parameter, *, is_whole: bool) -> list[str]:
        """The words behind an operator such as `:-`."""
        if not is_whole:
            return self.expanded(part.word)
        if part.quoted and any(_is_list(one) for one in part.word):
            # `"${A:-$@}"` is several words
            with self.perhaps():
                self.joined(part.word)
            return [unknown(part.written)]
        return [self.joined(part.word, tildes="" if part.quoted else "~")]

    def refuse_unset(self, part: Parameter) -> None:
        """RecipeError: `set -u` ends the script at a variable that is known not to be set."""
        is_list = "@" in (part.name, part.index) or "*" in (part.name, part.index)
        if "nounset" in self.state.options and not is_list:
            why = f"{shown(part.written)} is not set, so that `set -u` ends it here; give it with @FILE"
            self.refuse(why)

    def held(self, part: Parameter) -> list[str] | None:
        """The elements that a name holds; None where nothing sets it."""
        name = part.name
        if sets_variable(part.index) or sets_inside(part.index):
            self.refuse(f"{show(shown(part.written))} sets a variable, which can't be followed; set it above")
        if name in ("@", "*"):
            return [*self.state.arguments]
        if name == "#":
            # what can't be known may be several arguments, or none
            if any(map(is_marked, self.state.arguments)):
                return [unknown(part.written)]
            return [str(len(self.state.arguments))]
        if name == "0":
            return [self.state.zero]
        if name.isdecimal():
            place = int(name[:6]) - 1
            if any(map(is_marked, self.state.arguments[:place])):
                return [unknown(part.written)]
            if place >= len(self.state.arguments):
                return None
            return [self.state.arguments[place]]
        if name in ("?", "$", "!", "-"):
            return [unknown(part.written)]
        elements = self.state.variables.get(name)
        if elements is None or part.index in ("@", "*"):
            return elements
        # a leading 0 makes a number octal
        if part.index and not re.fullmatch(r"0|[1-9][0-9]{0,5}", part.index):
            return [unknown(part.written)]
        place = int(part.index or 0)
        if any(map(is_marked, elements[:place])):
            return [unknown(part.written)]
        return elements[place : place + 1]

    def computed(self, part: Arithmetic) -> str:
        """The number of `$(( ))`."""
        number = self.number(self.joined(part.word))
        if number is None:
            return unknown(part.written)
        return str(number)

    def number(self, text: str) -> int | None:
        """What an expression comes to; None: it can't be known. RecipeError: it sets a variable."""
        if sets_variable(shown(text)):
            self.refuse("arithmetic that sets a variable can't be followed; write out what it makes")
        expression = known(text)

        def value_of(name: str) -> str | None:
            held = self.state.variables.get(name)
            if held == [] and "nounset" in self.state.options:
                self.refuse(f"{name} is not set, so that `set -u` ends it here; give it with @FILE")
            if held and sets_variable(shown(held[0])):
                self.refuse(f"arithmetic sets a variable by what {name} holds; write out what it makes")
            if not held:
                return None
            return known(held[0])

        if expression is None or (self.source.is_posix and "**" in expression):
            return None
        return compute(expression, value_of)

    def assign(self, assignment: Assignment) -> None:
        """`name=value` as a command of its own."""
        elements = self.assigned(assignment)
        self.put(assignment.name, elements, is_array=assignment.elements is not None)

    def put(self, name: str, elements: list[str], *, is_array: bool = False) -> None:
        """Sets a variable; where that is done perhaps, it can't be known from here on."""
        why = self.state.why_not_set(name)
        if why:
            self.refuse(why)
        if self.n_perhaps:
            elements = [unknown(f"${name}")]
        self.state.put(name, elements, is_array=is_array)

    def assigned(self, assignment: Assignment) -> list[str]:
        """The elements that a variable has after an assignment."""
        name = assignment.name
        if assignment.index:
            self.refuse(f"{name}{assignment.index} can't be followed; write out what it makes")
        before = self.state.variables.get(name)
        if assignment.elements is not None:
            elements: list[str] = []
            for word in assignment.elements:
                if _has_index(word):
                    self.refuse(f"an element of {name} with its place can't be followed; write all of them in order")
                elements += self.expanded(word)
            if assignment.adds and before:
                self.n_characters += len(before)
                elements = [*before, *elements]
            return elements
        text = self.joined(assignment.value, tildes=":")
        # its own value may set it: `A+=${A:=x}`
        before = self.state.variables.get(name)
        if assignment.adds:
            start = unknown(f"${name}")
            if before is not None:
                start = "".join(before[:1])
            self.charge(start)
            text = start + text
        return [text, *(before or [])[1:]]


class _Condition:
    """`[[ ]]`: its words are not split, and `&&`, `||`, `!` and brackets join what is asked."""

    def __init__(self, follower: _Follower, test: Test):
        self.follower = follower
        self.tokens = test.tokens
        self.at = 0
        self.depth = 0
        self.n_skipped = 0
        """Above 0 behind `&&` and `||` by which nothing more is asked."""

    def whole(self) -> bool | None:
        """What all of it says; None where something stands behind it."""
        status = self.either()
        if self.at != len(self.tokens):
            return None
        return status

    def token(self) -> Word | str:
        """The token that comes next; "" at the end."""
        if self.at < len(self.tokens):
            return self.tokens[self.at]
        return ""

    def either(self) -> bool | None:
        status = self.both()
        while self.token() == "||":
            self.at += 1
            status = either(status, self.behind(status, False, self.both))
        return status

    def both(self) -> bool | None:
        status = self.single()
        while self.token() == "&&":
            self.at += 1
            status = both(status, self.behind(status, True, self.single))
        return status

    def behind(self, status: bool | None, goes_on: bool, ask: Callable[[], bool | None]) -> bool | None:
        """What is asked behind `&&` or `||`, if what stands in front of it goes on to it."""
        is_perhaps = status is None
        is_skipped = not is_perhaps and status is not goes_on
        self.n_skipped += is_skipped
        with self.follower.perhaps(is_perhaps=is_perhaps):
            result = ask()
        self.n_skipped -= is_skipped
        return result

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
        if self.n_skipped:
            return None
        words = [token for token in tokens if not isinstance(token, str)]
        asks_pattern = len(words) == 3 and _plain_text(words[1]) in ("=", "==", "!=")
        # a pattern is no text: it is read part by part, below
        plain_words = words[:2] if asks_pattern else words
        texts = [self.follower.joined(word, tildes="~") for word in plain_words]
        values = [known(text) for text in texts]
        if len(words) != len(tokens):
            return None
        if asks_pattern:
            is_like = self.follower.is_like(values[0], words[2])
            if values[1] == "!=":
                return negation(is_like)
            return is_like
        if len(words) == 3 and values[1] in COMPARISONS:
            return self.compared(texts[0], texts[1], texts[2])
        return decide(values)

    def compared(self, left: str, comparison: str, right: str) -> bool | None:
        """Both sides are arithmetic: names of variables, too."""
        first = self.follower.number(left)
        second = self.follower.number(right)
        if first is None or second is None:
            return None
        return COMPARISONS[comparison](first, second)


def _ends(body: Body) -> bool:
    """True when no training comes behind a body: the script ends in it."""
    for statement in body:
        if isinstance(statement, Simple) and statement.words[:1] == ((Literal("exit", quoted=False),),):
            return True
        if isinstance(statement, Block) and not statement.is_subshell and _ends(statement.body):
            return True
    return False


def _is_list(part: WordPart) -> bool:
    return isinstance(part, Parameter) and not part.counts and "@" in (part.name, part.index)


def _says_nothing(name: str) -> bool:
    """True for a flag without which the recipe is the same."""
    flag = BY_NAME.get(name)
    return flag is not None and flag.fate in _HARMLESS


def _plain_text(word: Word) -> str:
    """The text of a word without variables."""
    return "".join(part.text for part in word if isinstance(part, Literal))


def _all_shown(texts: Sequence[str]) -> list[str]:
    """Words as they are written, without the marks of what can't be known."""
    return [shown(text) for text in texts]


def _behind_tilde(text: str) -> int:
    """Where `~user` ends that stands in front of a text."""
    match = _TILDE.match(text)
    if match is None:
        return 0
    return match.end()


def _has_index(word: Word) -> bool:
    """True for `[5]=x`, an element of an array with its place."""
    first = word[0]
    return isinstance(first, Literal) and not first.quoted and first.text.startswith("[") and "]=" in _plain_text(word)


def _sets_silently(words: Sequence[str]) -> bool:
    """True where a command that is passed over sets a variable beside what it does, or starts a training later."""
    if words[0] == "printf":
        return len(words) > 1 and words[1].startswith("-v")
    if words[0] == "wait":
        return any(word.startswith("-") and "p" in word for word in words[1:])
    return words[0] == "trap" and not _is_trap_followed(words)


def _is_trap_followed(words: Sequence[str]) -> bool:
    """False for a trap that sets a variable, or that trains. It is taken for granted that no command fails."""
    if len(words) < 3:
        return True
    if any(word in ("DEBUG", "RETURN") for word in words[2:]):
        return False
    sets = "ERR" in words[2:] and ("=" in words[1] or "eval" in words[1])
    return not sets and not any(word in words[1] for word in ("python", "torchrun", ".py"))


def _may_train(text: str) -> bool:
    """Whether a string that is not followed could start a training."""
    return any(word in text for word in ("python", "torchrun", ".py", ".sh", "$"))


def _behind_prefix(texts: list[str]) -> list[str]:
    """The words of a command behind `command` and `builtin`."""
    at = 0
    while at < len(texts) and (texts[at] in ("command", "builtin") or (at > 0 and texts[at] in ("-p", "--"))):
        at += 1
    return texts[at:]


def _simple_statements(body: Body) -> Iterator[Simple]:
    """The commands of a body with those of the blocks in it, whatever decides them."""
    for statement in body:
        match statement:
            case Simple():
                yield statement
            case If():
                for condition, inner in statement.branches:
                    yield from _simple_statements((*condition, *inner))
                yield from _simple_statements(statement.otherwise)
            case Case():
                for _, inner in statement.branches:
                    yield from _simple_statements(inner)
            case While():
                yield from _simple_statements((*statement.condition, *statement.body))
            case Block():
                yield from _simple_statements(statement.body)
            case Background():
                yield from _simple_statements((statement.statement,))
            case Chain():
                yield from _simple_statements((statement.first, *(one for _, one in statement.rest)))
            case Pipeline():
                yield from _simple_statements(statement.stages)
            case _:
                pass
