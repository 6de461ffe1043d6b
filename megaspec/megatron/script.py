"""The words of a shell script that starts a training, as far as plain assignments make them. Nothing is run."""

import re
import shlex

from megaspec.core.errors import RecipeError

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*|\d)(?:\[[@*]\])?(?::?-([^{}]*))?\})")
_BRANCHES = ("if", "for", "while", "until", "case")
_BREAKS = "\n;&|"
_MAX_DEPTH = 10


def script_words(text: str, *, label: str) -> list[str]:
    """The words of the last command of a text, with its variables and arrays put in.

    What no plain assignment made stays as it is written. RecipeError: a quote that doesn't close, or branches.
    """
    variables: dict[str, list[str]] = {}
    command: list[str] = []
    for statement in _statements(text, label):
        if statement[0] in _BRANCHES:
            what = f"{label}: `{statement[0]}` decides what is run, and nothing is run here"
            raise RecipeError(f"{what}; put `echo` before the command, run the script, and give what it prints")
        words = statement[1:] if statement[0] in ("export", "declare", "local") else statement
        if all(_ASSIGNED.fullmatch(w) for w in words[:1]) and _is_assignment(words):
            _assign(words, variables)
        elif any(w.startswith("--") or w.endswith(".py") or w.startswith("$") for w in words):
            command = words
    return [one for word in command for one in _expanded(word, variables)]


def _statements(text: str, label: str) -> list[list[str]]:
    """Words between the ends of commands; `name=(a b)` is the words `name=(`, `a`, `b` and `)`."""
    plain = re.sub(r"(?m)(^|\s)#.*$", r"\1", text).replace("\\\r\n", " ").replace("\\\n", " ")
    lexer = shlex.shlex(plain, posix=True, punctuation_chars=f"{_BREAKS}()")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    try:
        tokens = [part for token in lexer for part in (token if set(token) <= set(f"{_BREAKS}()") else [token])]
    except ValueError as error:
        raise RecipeError(f"{label}: {str(error).lower()}; a quote is missing") from None
    statements: list[list[str]] = [[]]
    depth = 0
    for token in tokens:
        if token in _BREAKS and not depth:
            statements.append([])
        elif token == "(" and (depth or (statements[-1] and statements[-1][-1].endswith(("=", "$")))):
            depth += 1
            statements[-1][-1] += "("
        elif token not in _BREAKS:
            depth -= token == ")" and depth > 0
            statements[-1].append(token)
    return [s for s in statements if s]


def _is_assignment(words: list[str]) -> bool:
    return len(words) == 1 or "=(" in words[0] or "=$(" in words[0]


def _assign(words: list[str], variables: dict[str, list[str]]) -> None:
    match = _ASSIGNED.fullmatch(words[0])
    assert match is not None, words
    name, adds, value = match.groups()
    if value.startswith("$("):
        variables.pop(name, None)
        return
    values = [v for v in words[1:] if v != ")"] if value.startswith("(") else [value]
    if value.startswith("(") and len(value) > 1:
        values.insert(0, value[1:])
    made = [one for v in values for one in _expanded(v, variables)]
    variables[name] = [*(variables.get(name, []) if adds else []), *made]


def _expanded(word: str, variables: dict[str, list[str]], depth: int = 0) -> list[str]:
    """The words that a word stands for."""
    if depth > _MAX_DEPTH:
        return [word]
    whole = _VARIABLE.fullmatch(word)
    if whole:
        values = _value(whole, variables)
        return [word] if values is None else [w for v in values for w in _expanded(v, variables, depth + 1)]

    def put(match: re.Match[str]) -> str:
        values = _value(match, variables)
        return match.group() if values is None else " ".join(values)

    written = _VARIABLE.sub(put, word)
    return written.split() if " --" in f" {written}" else [written]


def _value(match: re.Match[str], variables: dict[str, list[str]]) -> list[str] | None:
    name, default = match.group(1) or match.group(2), match.group(3)
    if name in variables:
        return variables[name]
    return None if default is None else default.split() or [""]
