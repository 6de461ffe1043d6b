"""Whole numbers as a shell computes them in `$(( ))`: constants, names and operators, in 64 bits."""

import re
from collections.abc import Callable

_TOKEN = re.compile(r"\s*(?:([0-9]+)|([A-Za-z_]\w*)|(\*\*|<=|>=|==|!=|&&|\|\||[-+*/%()<>!]))")
# `++` and `--` count only beside a name: `--5` is twice a minus.
_SETS = re.compile(
    r"[A-Za-z_]\w*\s*(?:\[[^]]*\]\s*)?(?:\+\+|--|(?:<<|>>|[-+*/%&^|])?=(?!=))"
    r"|(?:\+\+|--)\s*[A-Za-z_$]"
)
_MAX_DEPTH = 20
_MOST = 2**63
_MOST_DIGITS = 19
# Binds more tightly further down; all but ** from left to right.
_LEVELS = (("||",), ("&&",), ("==", "!="), ("<", "<=", ">", ">="), ("+", "-"), ("*", "/", "%"))


def sets_variable(text: str) -> bool:
    """True where an expression changes a variable: `X=3`, `X+=1`, `X++`, `--X`."""
    return _SETS.search(text) is not None


def compute(text: str, value_of: Callable[[str], str | None]) -> int | None:
    """The number that an expression stands for; None: it can't be known, or is none that is read here.

    `value_of`: the text of a name, None where it is not known.
    """
    tokens: list[str] = []
    position = 0
    text = text.rstrip()
    if not text:
        return 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            return None
        tokens.append(match.group().strip())
        position = match.end()
    reading = _Expression(tokens, value_of)
    result = reading.level(0)
    if reading.at != len(tokens):
        return None  # something stands behind the expression
    return result


class _Expression:
    def __init__(self, tokens: list[str], value_of: Callable[[str], str | None]):
        self.tokens = tokens
        self.value_of = value_of
        self.at = 0
        self.depth = 0

    def token(self) -> str:
        """The token that comes next; "" at the end."""
        if self.at < len(self.tokens):
            return self.tokens[self.at]
        return ""

    def level(self, n: int) -> int | None:
        """An expression whose operators are those of level `n` and of the ones that bind more tightly."""
        if n == len(_LEVELS):
            return self.power()
        left = self.level(n + 1)
        while self.token() in _LEVELS[n]:
            operator = self.token()
            self.at += 1
            left = _combined(operator, left, self.level(n + 1))
        return left

    def power(self) -> int | None:
        left = self.single()
        if self.token() != "**" or self.depth >= _MAX_DEPTH:
            return left
        self.at += 1
        self.depth += 1
        right = self.power()
        self.depth -= 1
        if left is None or right is None or not 0 <= right < 64:
            return None
        return _bounded(left**right)

    def single(self) -> int | None:
        """A number, a name, a bracket or a sign with what it belongs to."""
        token = self.token()
        self.at += 1
        self.depth += 1
        result: int | None = None
        if self.depth > _MAX_DEPTH:
            # nothing more is read
            self.at = len(self.tokens) + 1
        elif token in ("-", "+", "!"):
            value = self.single()
            if value is not None:
                result = _bounded({"-": -value, "+": value, "!": int(not value)}[token])
        elif token == "(":
            result = self.level(0)
            if self.token() != ")":
                result = None
            self.at += 1
        elif token[:1].isdecimal():
            result = _number(token)
        elif token[:1].isalpha() or token[:1] == "_":
            written = self.value_of(token)
            if written is not None:
                result = _number(written.strip() or "0")
        self.depth -= 1
        return result


def _number(text: str) -> int | None:
    """A plain whole number; None for every other text."""
    digits = text.removeprefix("-")
    if not digits.isascii() or not digits.isdecimal() or len(digits) > _MOST_DIGITS:
        return None
    # a leading 0 makes a number octal
    if digits != "0" and digits.startswith("0"):
        return None
    return _bounded(int(text))


def _bounded(value: int) -> int | None:
    """None for what 64 bits with a sign do not hold: shells wrap around."""
    if -_MOST <= value < _MOST:
        return value
    return None


def _combined(operator: str, left: int | None, right: int | None) -> int | None:
    """The value of `left operator right`."""
    if left is None or right is None:
        return None
    if operator in ("/", "%"):
        return _divided(operator, left, right)
    results: dict[str, Callable[[int, int], int]] = {
        "||": lambda a, b: int(bool(a or b)),
        "&&": lambda a, b: int(bool(a and b)),
        "==": lambda a, b: int(a == b),
        "!=": lambda a, b: int(a != b),
        "<": lambda a, b: int(a < b),
        "<=": lambda a, b: int(a <= b),
        ">": lambda a, b: int(a > b),
        ">=": lambda a, b: int(a >= b),
        "+": lambda a, b: a + b,
        "-": lambda a, b: a - b,
        "*": lambda a, b: a * b,
    }
    return _bounded(results[operator](left, right))


def _divided(operator: str, left: int, right: int) -> int | None:
    """`/` and `%` as C has them: towards zero, where Python's `//` rounds down. None: by zero."""
    if right == 0:
        return None
    quotient = abs(left) // abs(right)
    if (left < 0) != (right < 0):
        quotient = -quotient
    if operator == "%":
        return left - quotient * right
    return quotient
