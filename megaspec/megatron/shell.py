"""The text of a shell script -> its statements: the part of the grammar that scripts which start a training use.

Words keep their quotes and variables apart, so that they can be expanded later. Nothing is run or looked up here.
"""

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NoReturn

from megaspec.core.errors import Problem, RecipeError
from megaspec.megatron.arithmetic import sets_variable
from megaspec.megatron.unknowns import BEGINS, END, MARKED, shown

MAX_DEPTH = 30
"""Blocks, brackets and defaults inside each other."""
DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")

_LONGEST_QUOTE = 100
_NAME = re.compile(r"[A-Za-z_]\w*")
# An index has a bound, so that brackets which don't close are not searched for again and again.
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\[[^]\n]{0,100}\])?(\+?)=")
_FUNCTION = re.compile(r"[\w.:-]+[ \t]*\([ \t]*\)")
_PARAMETER = re.compile(r"([A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[([^]\n]{0,100})\])?(:?[-+=?])?")
_COUNT = re.compile(r"#([A-Za-z_]\w*|[@*])(?:\[([^]\n]{0,100})\])?\}")
_SHORT_PARAMETER = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
# Longest first. A bracket behind < or > begins a process substitution, which is a word.
_REDIRECTION = re.compile(r"(?:\d+|\{\w+\})?(?:<<<|<<-?|<>|<&|>>|>&|>\||[<>](?!\())|&>>?")
_OPERATOR = re.compile(r";;&|;;|;&|&&|\|\||\|&|[;&|()\n]")
_RESERVED = re.compile(r"(?:[a-z]+|\[\[|[{}!])(?=[\s;&|()<>]|$)")
_PLAIN = re.compile(rf"[^\s;&|()<>\\'\"$`{BEGINS}]+")
_PLAIN_IN_BRACES = re.compile(rf"[^}}\\'\"$`{BEGINS}]+")
_PLAIN_IN_QUOTES = re.compile(rf"[^\"\\$`{BEGINS}]+")
_PLAIN_WITH_QUOTES = re.compile(rf"'[^}}\\'\"$`{BEGINS}]*'")
# `${A:=x}`, `${A=x}`, the start of arithmetic, and `${A:1:2}`, whose offsets are arithmetic.
_SETS_DEFAULT = re.compile(r"(?<!\\)\$\{!?[A-Za-z_]\w*(?:\[[^]\n]{0,100}\])?:?=")
_ARITHMETIC_INSIDE = re.compile(r"(?<!\\)\$\(\((.*?)\)\)", re.DOTALL)
_SUBSTRING = re.compile(r"\$\{(?:[A-Za-z_]\w*|[@*\d]+)(?:\[[^]\n]{0,100}\])?:(?![-+=?])(.*)\}", re.DOTALL)
_INDEX = re.compile(r"\$\{[#!]?[A-Za-z_]\w*\[([^]\n]{0,100})\]")
_BLOCK_WORDS = ("then", "elif", "else", "fi", "do", "done", "esac", "}")


@dataclass(frozen=True, slots=True)
class Literal:
    """Text that stands for itself."""

    text: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class Parameter:
    """`$name` or `${name...}`."""

    name: str
    """A variable, digits for an argument of the script, or one of `@ * # ? $ ! -`."""
    index: str
    """What stands in `[ ]`. "": nothing."""
    operator: str
    """What is done where it is not set, such as `:-`. "": nothing."""
    word: "Word"
    """Behind the operator."""
    counts: bool
    """True for `${#name}`."""
    written: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """`$(( ))`."""

    word: "Word"
    written: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class Unreadable:
    """What only a shell can tell: `$(command)`, `${name##*/}`."""

    written: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class Unknown:
    """What wasn't known already where the string was made that is read."""

    marked: str
    """With its marks."""
    quoted: bool


WordPart = Literal | Parameter | Arithmetic | Unreadable | Unknown
Word = tuple[WordPart, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """`name=value`, `name+=value`, `name=(values)`."""

    name: str
    index: str
    adds: bool
    value: Word
    elements: tuple[Word, ...] | None
    """Of an array; None for a plain value."""


@dataclass(frozen=True, slots=True)
class Simple:
    """Assignments and the words of a command."""

    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]
    reads_text: bool
    """True with a here-document."""
    line: int


@dataclass(frozen=True, slots=True)
class Test:
    """`[[ ]]`."""

    tokens: tuple[Word | str, ...]
    """Words, and `&& || ( ) < >` as text."""
    line: int


@dataclass(frozen=True, slots=True)
class ArithmeticTest:
    """`(( ))`."""

    arithmetic: Arithmetic
    line: int


@dataclass(frozen=True, slots=True)
class If:
    """`if`: conditions with what they lead to, in order."""

    branches: tuple[tuple["Body", "Body"], ...]
    otherwise: "Body"
    line: int


@dataclass(frozen=True, slots=True)
class Case:
    """`case`."""

    subject: Word
    branches: tuple[tuple[tuple[Word, ...], "Body"], ...]
    line: int


@dataclass(frozen=True, slots=True)
class While:
    """`while`, or `until` where it is negated."""

    condition: "Body"
    body: "Body"
    negated: bool
    line: int


@dataclass(frozen=True, slots=True)
class Block:
    """`{ }`, or `( )` whose assignments end with it."""

    body: "Body"
    is_subshell: bool
    line: int


@dataclass(frozen=True, slots=True)
class Background:
    """`statement &`: it runs in a shell of its own."""

    statement: "Statement"
    line: int


@dataclass(frozen=True, slots=True)
class Chain:
    """`first && second || third`."""

    first: "Statement"
    rest: tuple[tuple[str, "Statement"], ...]
    line: int


@dataclass(frozen=True, slots=True)
class Pipeline:
    """`first | second`, each in a shell of its own; or `! first`, which is in this one."""

    stages: tuple["Statement", ...]
    negated: bool
    line: int


@dataclass(frozen=True, slots=True)
class Function:
    """`name() { }`. What it does is not kept: a call of it is refused."""

    name: str
    line: int


@dataclass(frozen=True, slots=True)
class Unfollowed:
    """A statement that is read to its end, and refused where it would be run."""

    what: str
    line: int


Statement = (
    Simple | Test | ArithmeticTest | If | Case | While | Block | Background | Chain | Pipeline | Function | Unfollowed
)  # fmt: skip
Body = tuple[Statement, ...]


@dataclass
class Source:
    """A script's text and what it is called, for errors that name the line."""

    text: str
    label: str
    is_posix: bool = False
    """True for a string that a shell reads which may not be bash."""
    ends: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.text = self.text.replace("\r\n", "\n")
        self.ends = [match.start() for match in re.finditer("\n", self.text)]

    def line_at(self, position: int) -> int:
        """The number of the line of a position, counted from 1."""
        return bisect_right(self.ends, position - 1) + 1

    def quote(self, line: int) -> str:
        """A line with its number, as errors and notes name it."""
        # line n lies between the ends of line n - 1 and of its own; the last one may have none
        begin = 0
        if line > 1:
            begin = self.ends[line - 2] + 1
        end = len(self.text)
        if line <= len(self.ends):
            end = self.ends[line - 1]
        text = shown(self.text[begin:end]).strip()
        if len(text) > _LONGEST_QUOTE:
            text = f"{text[:_LONGEST_QUOTE]}..."
        return f"{self.label}:{line}: `{text}`"

    def refuse(self, line: int, why: str) -> NoReturn:
        """Raises RecipeError with the line and its number."""
        raise RecipeError([Problem("", f"{self.quote(line)}: {why}", "", "megatron-script")])


def sets_inside(written: str) -> bool:
    """True where an expansion sets a variable while it is made: `${A:=x}`, `$((A++))`, `${A[N=1]}`, in any depth."""
    texts = [match.group(1) for match in _ARITHMETIC_INSIDE.finditer(written)]
    texts += [match.group(1) for match in _INDEX.finditer(written)]
    substring = _SUBSTRING.fullmatch(written)
    if substring is not None:
        texts.append(substring.group(1))
    return _SETS_DEFAULT.search(written) is not None or any(map(sets_variable, texts))


def parse(source: Source) -> Body:
    """The statements of a script. RecipeError: what is no shell script, or nested too deep; with the line."""
    return _Parser(source).whole()


@dataclass(frozen=True)
class _Delimiter:
    """Of a here-document."""

    text: str
    strips: bool
    """True where tabs may stand in front."""
    is_quoted: bool
    """True where nothing in the text is expanded."""


class _Parser:
    def __init__(self, source: Source):
        self.source = source
        self.text = source.text
        self.at = 0
        self.depth = 0
        self.delimiters: list[_Delimiter] = []
        """Of the here-documents that begin behind this line."""

    def whole(self) -> Body:
        body = self.body(())
        if self.at < len(self.text):
            self.refuse("belongs to no command")
        return body

    def refuse(self, why: str, at: int | None = None) -> NoReturn:
        """RecipeError with the line of a position; without one, of where it reads."""
        if at is None:
            at = self.at
        self.source.refuse(self.source.line_at(min(at, len(self.text))), why)

    @property
    def line(self) -> int:
        return self.source.line_at(self.at)

    def bash_only(self, what: str) -> None:
        """Refuses what another shell than bash reads otherwise, where another one may read it."""
        if self.source.is_posix:
            self.refuse(f"{what} is bash's, and not every `sh` has it; give the string to bash -c")

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.refuse(f"more than {MAX_DEPTH} blocks or brackets inside each other")

    # Between words

    def skip_blanks(self) -> None:
        """Blanks, comments, and line ends behind a backslash."""
        while self.at < len(self.text):
            if self.text[self.at] in " \t\r":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif self.text[self.at] == "#":
                self.at = self.end_of_line()
            else:
                return

    def end_of_line(self) -> int:
        """Where the line ends that is read; the last one ends with the text."""
        end = self.text.find("\n", self.at)
        if end < 0:
            return len(self.text)
        return end

    def take_line_end(self) -> None:
        """A line end, with the here-documents behind it."""
        self.at += 1
        for delimiter in self.delimiters:
            begin = self.at
            end = self.here_document(delimiter)
            if not delimiter.is_quoted and sets_inside(self.text[begin:end]):
                self.refuse("the lines behind it set a variable, which can't be followed; set it above", begin - 1)
        self.delimiters = []

    def here_document(self, delimiter: _Delimiter) -> int:
        """Takes the lines of a here-document and its delimiter, which may be missing at the end. -> where they end"""
        while self.at < len(self.text):
            begin = self.at
            end = self.end_of_line()
            line = self.text[begin:end]
            if delimiter.strips:
                line = line.lstrip("\t")
            self.at = min(end + 1, len(self.text))
            if line == delimiter.text:
                return begin
        return self.at

    def skip_lines(self) -> None:
        self.skip_blanks()
        while self.text.startswith("\n", self.at):
            self.take_line_end()
            self.skip_blanks()

    def operator(self) -> str:
        """The operator that stands here; not taken."""
        return self.match_here(_OPERATOR)

    def reserved(self) -> str:
        """The word that stands here where it could be a reserved one; not taken."""
        return self.match_here(_RESERVED)

    def match_here(self, pattern: re.Pattern[str]) -> str:
        """What a pattern matches here; "" where it matches nothing."""
        match = pattern.match(self.text, self.at)
        if match is None:
            return ""
        return match.group()

    def expect(self, word: str, begin: int) -> None:
        self.skip_lines()
        found = self.operator() if word == ")" else self.reserved()
        if found != word:
            self.refuse(f"its `{word}` is missing", begin)
        self.at += len(word)

    # Statements

    def body(self, ends: tuple[str, ...]) -> Body:
        """Statements up to one of the words or operators in `ends`, which is not taken."""
        statements: list[Statement] = []
        while True:
            self.skip_lines()
            while self.operator() == ";":
                self.at += 1
                self.skip_lines()
            if self.at >= len(self.text) or self.operator() in ends or self.reserved() in ends:
                return tuple(statements)
            if self.operator() not in ("", "(") or self.reserved() in _BLOCK_WORDS:
                self.refuse(f"`{self.operator() or self.reserved()}` belongs to nothing")
            line = self.line
            statement = self.chain()
            self.skip_blanks()
            if self.operator() == "&":
                self.at += 1
                statement = Background(statement, line)
            statements.append(statement)

    def chain(self) -> Statement:
        """Pipelines with `&&` and `||` between them; a single one stands for itself."""
        line = self.line
        first = self.pipeline()
        rest: list[tuple[str, Statement]] = []
        self.skip_blanks()
        while (operator := self.operator()) in ("&&", "||"):
            self.at += 2
            self.skip_lines()
            rest.append((operator, self.pipeline()))
            self.skip_blanks()
        if not rest:
            return first
        return Chain(first, tuple(rest), line)

    def pipeline(self) -> Statement:
        line = self.line
        negated = False
        while self.reserved() in ("!", "time"):
            negated ^= self.reserved() == "!"
            self.at += len(self.reserved())
            self.skip_blanks()
        stages = [self.command()]
        self.skip_blanks()
        while (operator := self.operator()) in ("|", "|&"):
            if operator == "|&":
                self.bash_only("`|&`")
            self.at += len(operator)
            self.skip_lines()
            if self.reserved() in ("!", "time"):
                self.refuse(f"`{self.reserved()}` can't stand behind `{operator}`")
            stages.append(self.command())
            self.skip_blanks()
        if len(stages) == 1 and not negated:
            return stages[0]
        return Pipeline(tuple(stages), negated, line)

    def command(self) -> Statement:
        self.deeper()
        word = self.reserved()
        compound = {
            "if": self.if_block,
            "case": self.case_block,
            "while": self.while_block,
            "until": self.while_block,
            "for": self.for_block,
            "select": self.for_block,
            "{": self.brace_block,
            "[[": self.test,
            "function": self.function,
        }.get(word)
        if word in ("select", "[[", "function"):
            self.bash_only(f"`{word}`")
        if compound is None and self.text.startswith("((", self.at):
            self.bash_only("`((`")
            compound = self.arithmetic_test
        elif compound is None and self.text.startswith("(", self.at):
            compound = self.subshell
        elif compound is None and _FUNCTION.match(self.text, self.at):
            compound = self.function
        if compound is None:
            statement: Statement = self.simple()
        else:
            statement = compound()
            self.skip_blanks()
            while self.redirection() is not None:
                self.skip_blanks()
        self.depth -= 1
        return statement

    def if_block(self) -> Statement:
        line = self.line
        begin = self.at
        branches: list[tuple[Body, Body]] = []
        otherwise: Body = ()
        word = "if"
        while word in ("if", "elif"):
            self.at += len(word)
            condition = self.body(("then",))
            self.expect("then", begin)
            branches.append((condition, self.body(("elif", "else", "fi"))))
            word = self.reserved()
        if word == "else":
            self.at += len(word)
            otherwise = self.body(("fi",))
        self.expect("fi", begin)
        return If(tuple(branches), otherwise, line)

    def while_block(self) -> Statement:
        line = self.line
        begin = self.at
        negated = self.reserved() == "until"
        self.at += len("while")
        condition = self.body(("do",))
        self.expect("do", begin)
        body = self.body(("done",))
        self.expect("done", begin)
        return While(condition, body, negated, line)

    def for_block(self) -> Statement:
        line = self.line
        begin = self.at
        head = re.compile(r"[^;\n]*").match(self.text, self.at)
        assert head is not None
        # `for ((i=0; i<n; i++))` has semicolons of its own
        is_counted = "((" in head.group()
        if is_counted:
            self.at = self.end_of_line()
            closed = self.text.find("))", begin, self.at)
            if closed < 0:
                self.refuse("its `))` is missing", begin)
            self.at = closed + 2
        else:
            self.at = head.end()
        self.skip_lines()
        if self.operator() == ";":
            self.at += 1
        self.expect("do", begin)
        self.body(("done",))
        self.expect("done", begin)
        return Unfollowed("a loop over a list", line)

    def case_block(self) -> Statement:
        line = self.line
        begin = self.at
        self.at += len("case")
        self.skip_lines()
        subject = self.word()
        self.expect("in", begin)
        branches: list[tuple[tuple[Word, ...], Body]] = []
        self.skip_lines()
        while self.reserved() != "esac":
            if self.at >= len(self.text):
                self.refuse("its `esac` is missing", begin)
            if self.operator() == "(":
                self.at += 1
            patterns = [self.pattern()]
            while self.operator() == "|":
                self.at += 1
                patterns.append(self.pattern())
            self.expect(")", begin)
            body = self.body((";;", ";&", ";;&", "esac"))
            branches.append((tuple(patterns), body))
            if self.operator() in (";&", ";;&"):
                self.refuse("a branch that goes on into the next one can't be read here")
            if self.operator() == ";;":
                self.at += 2
            self.skip_lines()
        self.expect("esac", begin)
        return Case(subject, tuple(branches), line)

    def pattern(self) -> Word:
        self.skip_blanks()
        word = self.word()
        if not word:
            self.refuse("a pattern is missing")
        self.skip_blanks()
        return word

    def brace_block(self) -> Statement:
        line = self.line
        begin = self.at
        self.at += 1
        body = self.body(("}",))
        self.expect("}", begin)
        return Block(body, False, line)

    def subshell(self) -> Statement:
        line = self.line
        begin = self.at
        self.at += 1
        body = self.body((")",))
        self.expect(")", begin)
        return Block(body, True, line)

    def function(self) -> Statement:
        line = self.line
        if self.reserved() == "function":
            self.at += len("function")
            self.skip_blanks()
        match = re.compile(r"[\w.:-]+").match(self.text, self.at)
        if match is None:
            self.refuse("a function without a name")
        self.at = match.end()
        self.skip_blanks()
        if self.operator() == "(":
            self.at += 1
            self.expect(")", self.at)
        self.skip_lines()
        self.command()
        return Function(match.group(), line)

    def arithmetic_test(self) -> Statement:
        line = self.line
        return ArithmeticTest(self.arithmetic(self.at, self.at, quoted=True), line)

    def test(self) -> Statement:
        line = self.line
        begin = self.at
        self.at += len("[[")
        tokens: list[Word | str] = []
        while True:
            self.skip_lines()
            if self.at >= len(self.text):
                self.refuse("its `]]` is missing", begin)
            operator = self.operator()
            if not operator and self.text[self.at] in "<>":
                operator = self.text[self.at]  # they compare in `[[ ]]`
            if self.reserved() == "" and re.match(r"\]\](?=[\s;&|)]|$)", self.text[self.at : self.at + 3]):
                self.at += len("]]")
                return Test(tuple(tokens), line)
            if operator:
                self.at += len(operator)
                tokens.append(operator)
            else:
                tokens.append(self.word())

    def simple(self) -> Statement:
        line = self.line
        assignments: list[Assignment] = []
        words: list[Word] = []
        reads_text = False
        declares = False
        while True:
            self.skip_blanks()
            redirection = self.redirection()
            if redirection is not None:
                reads_text |= redirection.startswith("<<")
                continue
            if self.at >= len(self.text) or self.operator():
                break
            # an assignment stands in front of the command, or behind `export`
            match = None
            if declares or not words:
                match = _ASSIGNED.match(self.text, self.at)
            if match is not None:
                assignments.append(self.assignment(match))
                continue
            words.append(self.word())
            declares = words[0] in tuple((Literal(name, False),) for name in DECLARATIONS)
        if self.operator() == "(":
            self.refuse("an opening bracket that is not in quotes")
        return Simple(tuple(assignments), tuple(words), reads_text, line)

    def assignment(self, match: re.Match[str]) -> Assignment:
        name, index, adds = match.groups()
        self.at = match.end()
        elements: tuple[Word, ...] | None = None
        value: Word = ()
        if index or adds or self.text.startswith("(", self.at):
            self.bash_only(f"`{match.group()}`")
        if self.text.startswith("(", self.at):
            elements = self.array(match.start())
        elif self.at < len(self.text) and not self.operator() and self.text[self.at] not in " \t<>":
            value = self.word()
        return Assignment(name, index or "", bool(adds), value, elements)

    def array(self, begin: int) -> tuple[Word, ...]:
        """The words in the brackets of `name=(...)`, which begins at `begin`."""
        elements: list[Word] = []
        self.at += 1
        self.skip_lines()
        while self.at < len(self.text) and not self.operator():
            elements.append(self.word())
            self.skip_lines()
        if self.operator() != ")":
            self.refuse("its `)` is missing", begin)
        self.at += 1
        return tuple(elements)

    def redirection(self) -> str | None:
        """Takes a redirection with its file. -> its operator, None where none stands here."""
        match = _REDIRECTION.match(self.text, self.at)
        if match is None:
            return None
        if match.group().startswith("{"):
            self.refuse("a redirection that sets a variable can't be followed; give the number of the file")
        operator = match.group().lstrip("0123456789")
        if operator in ("<<<", "&>", "&>>"):
            self.bash_only(f"`{operator}`")
        self.at = match.end()
        self.skip_blanks()
        begin = self.at
        target: Word = ()
        if self.at < len(self.text) and not self.operator():
            target = self.word()
        if not target:
            self.refuse("an arrow without a file behind it; is a <place holder> left?", match.start())
        if operator in ("<<", "<<-"):
            delimiter = ""
            for part in target:
                if isinstance(part, Literal):
                    delimiter += part.text
                else:
                    delimiter += self.text[begin : self.at]  # nothing in it is expanded
            is_quoted = any(part.quoted for part in target)
            self.delimiters.append(_Delimiter(delimiter, operator == "<<-", is_quoted))
        elif sets_inside(self.text[begin : self.at]):
            self.refuse("the name of its file sets a variable, which can't be followed; set it above", match.start())
        return operator

    # Words

    def word(self) -> Word:
        """A word up to the next blank or operator."""
        begin = self.at
        parts = self.parts(_PLAIN, closed_by="", in_quotes=False)
        if self.at == begin:
            self.refuse(f"`{self.text[self.at : self.at + 1]}` can't stand here")
        return parts

    def parts(self, plain: re.Pattern[str], *, closed_by: str, in_quotes: bool) -> Word:
        """Parts of a word up to a character that is in none of them. `closed_by`: one that ends it, too; not taken.

        `in_quotes`: True for the default in `"${A:-'b c'}"`, where single quotes stay in the text.
        """
        parts: list[WordPart] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == closed_by:
                break
            match = plain.match(self.text, self.at)
            if match is not None:
                self.at = match.end()
                parts.append(Literal(match.group(), quoted=False))
            elif char in BEGINS:
                parts.append(self.marked(quoted=in_quotes))
            elif char == "\\":
                escaped = self.text[self.at + 1 : self.at + 2]
                self.at += 2
                if in_quotes and escaped not in '"\\$`}\n':
                    escaped = f"\\{escaped}"
                if escaped != "\n":
                    parts.append(Literal(escaped, quoted=True))
            elif char == "'" and in_quotes:
                # bash looks for its end, and keeps both
                match = _PLAIN_WITH_QUOTES.match(self.text, self.at)
                if match is None:
                    self.refuse("a single quote in `${ }` in double quotes can't be read here; leave it out")
                self.at = match.end()
                parts.append(Literal(match.group(), quoted=True))
            elif char == "'":
                parts += self.single_quoted(self.at)
            elif char == '"':
                parts += self.double_quoted()
            elif char == "$":
                parts.append(self.dollar(quoted=in_quotes))
            elif char == "`":
                parts.append(self.back_quoted(quoted=in_quotes))
            elif char in "<>" and self.text.startswith("(", self.at + 1):
                begin = self.at
                self.at = self.behind_bracket(self.at + 1, "()")
                parts.append(Unreadable(f"${self.text[begin + 1 : self.at]}", quoted=False))
            else:
                break
        return tuple(parts)

    def single_quoted(self, begin: int) -> list[WordPart]:
        end = self.text.find("'", begin + 1)
        if end < 0:
            self.refuse("a quote is missing", begin)
        parts: list[WordPart] = []
        self.at = begin + 1
        for match in MARKED.finditer(self.text, begin + 1, end):
            parts.append(Literal(self.text[self.at : match.start()], quoted=True))
            parts.append(Unknown(match.group(), quoted=True))
            self.at = match.end()
        parts.append(Literal(self.text[self.at : end], quoted=True))
        self.at = end + 1
        return parts

    def marked(self, *, quoted: bool) -> WordPart:
        """What could not be known where the string was made that is read."""
        match = MARKED.match(self.text, self.at)
        if match is None:
            self.refuse("a part of it that can't be known can't stand here")
        self.at = match.end()
        return Unknown(match.group(), quoted)

    def double_quoted(self) -> list[WordPart]:
        """What stands in double quotes, with one empty literal, so that nothing in quotes is a word, too."""
        begin = self.at
        self.at += 1
        parts: list[WordPart] = [Literal("", quoted=True), *self.quoted_parts('"')]
        if self.at >= len(self.text):
            self.refuse("a quote is missing", begin)
        self.at += 1
        return parts

    def quoted_parts(self, closed_by: str) -> list[WordPart]:
        parts: list[WordPart] = []
        while self.at < len(self.text) and self.text[self.at] != closed_by:
            match = _PLAIN_IN_QUOTES.match(self.text, self.at)
            char = self.text[self.at]
            if match is not None:
                self.at = match.end()
                parts.append(Literal(match.group(), quoted=True))
            elif char in BEGINS:
                parts.append(self.marked(quoted=True))
            elif char == "\\":
                escaped = self.text[self.at + 1 : self.at + 2]
                self.at += 2
                # in quotes a backslash takes away the meaning of these alone; elsewhere it is a character itself
                if escaped not in '"\\$`\n':
                    escaped = f"\\{escaped}"
                if escaped != "\n":
                    parts.append(Literal(escaped, quoted=True))
            elif char == "$":
                parts.append(self.dollar(quoted=True))
            elif char == "`":
                parts.append(self.back_quoted(quoted=True))
            else:
                # a quote in arithmetic, which ends with the text
                self.at += 1
        return parts

    def back_quoted(self, *, quoted: bool) -> WordPart:
        begin = self.at
        match = re.compile(r"`(?:[^`\\]|\\.)*`", re.DOTALL).match(self.text, self.at)
        if match is None:
            self.refuse("a quote is missing", begin)
        self.at = match.end()
        return Unreadable(f"$({match.group()[1:-1]})", quoted)

    def dollar(self, *, quoted: bool) -> WordPart:
        """A part that begins with `$`."""
        begin = self.at
        behind = self.text[begin + 1 : begin + 2]
        if self.text.startswith("$((", begin):
            return self.arithmetic(begin, begin + 1, quoted=quoted)
        if behind == "(":
            self.at = self.behind_bracket(begin + 1, "()")
            return Unreadable(self.text[begin : self.at], quoted)
        if behind == "{":
            return self.braces(quoted=quoted)
        if behind == "[":
            self.refuse("`$[ ]` is arithmetic in an old spelling, which is not read here; write $(( ))", begin)
        if behind in ("'", '"') and not quoted:
            self.bash_only(f"`${behind}`")
        if behind == "'" and not quoted:
            end = begin + 2
            while end < len(self.text) and self.text[end] != "'":
                if self.text[end] == "\\":
                    end += 1  # what it stands in front of does not end the text
                end += 1
            if end >= len(self.text):
                self.refuse("a quote is missing", begin)
            self.at = end + 1
            written = self.text[begin : self.at]
            if "\\" in written or END in written:
                return Unreadable(written, True)
            return Literal(written[2:-1], quoted=True)
        match = _SHORT_PARAMETER.match(self.text, begin + 1)
        if match is None:
            self.at = begin + 1
            if behind == '"' and not quoted:
                # `$"text"` is text in the user's language
                return Literal("", quoted=True)
            return Literal("$", quoted=True)
        self.at = match.end()
        written = self.text[begin : self.at]
        return Parameter(match.group(), "", "", (), counts=False, written=written, quoted=quoted)

    def braces(self, *, quoted: bool) -> WordPart:
        """`${...}`."""
        self.deeper()
        begin = self.at
        count = _COUNT.match(self.text, begin + 2)
        match = _PARAMETER.match(self.text, begin + 2)
        part: WordPart | None = None
        if count is not None:
            self.at = count.end()
            written = self.text[begin : self.at]
            part = Parameter(count.group(1), count.group(2) or "", "", (), counts=True, written=written, quoted=quoted)
        elif match is not None:
            self.at = match.end()
            name, index, operator = match.groups()
            word: Word = ()
            if operator:
                word = self.parts(_PLAIN_IN_BRACES, closed_by="}", in_quotes=quoted)
            if self.text.startswith("}", self.at):
                self.at += 1
                written = self.text[begin : self.at]
                part = Parameter(name, index or "", operator or "", word, counts=False, written=written, quoted=quoted)
        if part is None:
            self.at = self.behind_bracket(begin + 1, "{}")
            part = Unreadable(self.text[begin : self.at], quoted)
        self.depth -= 1
        return part

    def arithmetic(self, begin: int, bracket: int, *, quoted: bool) -> Arithmetic:
        """`$(( ))` or `(( ))`, whose outer bracket stands at `bracket`."""
        self.deeper()
        end = self.behind_bracket(bracket, "()")
        if not self.text.startswith("))", end - 2):
            self.refuse("two brackets that open and don't close together can't be read here", begin)
        inner = _Parser(Source(self.text[bracket + 2 : end - 2], self.source.label, self.source.is_posix))
        inner.depth = self.depth
        try:
            word = tuple(inner.quoted_parts(""))
        except RecipeError:
            self.refuse("can't be read as arithmetic", begin)
        self.depth -= 1
        self.at = end
        return Arithmetic(word, self.text[begin:end], quoted)

    def behind_bracket(self, begin: int, brackets: str) -> int:
        """The position behind the bracket that closes the one at `begin`; those in quotes don't count."""
        opening, closing = brackets
        position = begin
        depth = 0
        is_quoted = False
        while position < len(self.text):
            char = self.text[position]
            marked = None
            if char in BEGINS:
                marked = MARKED.match(self.text, position)
            if marked is not None:
                position = marked.end() - 1
            elif char == "\\":
                position += 1
            elif char == '"':
                is_quoted = not is_quoted
            elif char == "'" and not is_quoted:
                position = self.text.find("'", position + 1)
                if position < 0:
                    break
            elif char == opening and not is_quoted:
                depth += 1
            elif char == closing and not is_quoted:
                depth -= 1
                if depth == 0:
                    return position + 1
            position += 1
        self.refuse(f"its `{closing}` is missing", begin)
