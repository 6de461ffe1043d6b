"""What a shell holds while a script is followed, and what the shells that it starts get of it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from megaspec.megatron.unknowns import unknown

# Set or computed by bash itself, or by whoever logs in: a default behind one of them is never taken.
SET_BY_THE_SHELL = frozenset(
    (
        "BASH",
        "BASHOPTS",
        "BASHPID",
        "BASH_ALIASES",
        "BASH_ARGC",
        "BASH_ARGV",
        "BASH_ARGV0",
        "BASH_CMDS",
        "BASH_COMMAND",
        "BASH_LINENO",
        "BASH_REMATCH",
        "BASH_SOURCE",
        "BASH_SUBSHELL",
        "BASH_VERSINFO",
        "BASH_VERSION",
        "COMP_WORDBREAKS",
        "DIRSTACK",
        "EPOCHREALTIME",
        "EPOCHSECONDS",
        "EUID",
        "FUNCNAME",
        "GROUPS",
        "HISTCMD",
        "HOME",
        "HOSTNAME",
        "HOSTTYPE",
        "IFS",
        "LINENO",
        "LOGNAME",
        "MACHTYPE",
        "OLDPWD",
        "OPTARG",
        "OPTERR",
        "OPTIND",
        "OSTYPE",
        "PATH",
        "PIPESTATUS",
        "PPID",
        "PS4",
        "PWD",
        "RANDOM",
        "REPLY",
        "SECONDS",
        "SHELL",
        "SHELLOPTS",
        "SHLVL",
        "SRANDOM",
        "UID",
        "USER",
        "_",
    )
)
# What they hold isn't what they were set to.
_COMPUTED = frozenset(
    (
        "BASHPID",
        "BASH_COMMAND",
        "BASH_SUBSHELL",
        "EPOCHREALTIME",
        "EPOCHSECONDS",
        "FUNCNAME",
        "GROUPS",
        "HISTCMD",
        "LINENO",
        "OPTIND",
        "PIPESTATUS",
        "RANDOM",
        "SECONDS",
        "SRANDOM",
        "_",
    )
)
_READONLY = frozenset(("BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"))
# How all that comes behind them is read.
_CHANGE_THE_SHELL = frozenset(("BASH_ALIASES", "BASH_ARGV0", "BASH_COMPAT", "BASH_ENV", "IFS", "POSIXLY_CORRECT"))

_OPTION_LETTERS = {"a": "allexport", "e": "errexit", "f": "noglob", "u": "nounset"}
_OPTION_NAMES = ("allexport", "errexit", "noglob", "nounset", "pipefail")
# They change what is shown, which files are written, or how jobs, traps and the terminal behave; never a word.
_HARMLESS_LETTERS = "bhmpvxBCEHPT"
_HARMLESS_NAMES = (
    "braceexpand",
    "emacs",
    "errtrace",
    "functrace",
    "hashall",
    "histexpand",
    "history",
    "ignoreeof",
    "interactive-comments",
    "monitor",
    "noclobber",
    "nolog",
    "notify",
    "physical",
    "privileged",
    "verbose",
    "vi",
    "xtrace",
)


@dataclass
class ShellState:
    """What assignments, `cd`, `set` and `shift` change. Texts carry the marks of `unknowns`."""

    arguments: list[str]
    zero: str
    """`$0`."""
    variables: dict[str, list[str]] = field(default_factory=dict)
    """Name -> its elements: one of a plain value, none of a name that was unset. Lists are replaced, never changed."""
    arrays: set[str] = field(default_factory=set)
    """Names of arrays, which no shell hands on."""
    exported: set[str] = field(default_factory=set)
    perhaps_exported: set[str] = field(default_factory=set)
    readonly: set[str] = field(default_factory=set)
    functions: set[str] = field(default_factory=set)
    exported_functions: set[str] = field(default_factory=set)
    options: set[str] = field(default_factory=set)
    """Of `set`: those of `_OPTION_NAMES` that are on."""
    folder: str = "."
    """Where the script is: in the folder in which it was started, until it goes elsewhere, "" then."""
    is_environment_known: bool = True
    """False where more may be set than what is known here, so that no default can be taken."""

    @property
    def size(self) -> int:
        """How much is copied for a shell of its own."""
        return len(self.variables) + len(self.arguments)

    def copy(self) -> "ShellState":
        """The state of `( )`, of a part of a pipeline, and of what runs in the background."""
        return ShellState(
            arguments=[*self.arguments],
            zero=self.zero,
            variables=dict(self.variables),
            arrays=set(self.arrays),
            exported=set(self.exported),
            perhaps_exported=set(self.perhaps_exported),
            readonly=set(self.readonly),
            functions=set(self.functions),
            exported_functions=set(self.exported_functions),
            options=set(self.options),
            folder=self.folder,
            is_environment_known=self.is_environment_known,
        )

    def child(self) -> "ShellState":
        """The state of a program that this shell starts: only what is exported, and no arguments."""
        inside = ShellState([], "", folder=self.folder, is_environment_known=self.is_environment_known)
        for name, elements in self.variables.items():
            if name in self.exported and name not in self.arrays:
                inside.variables[name] = elements
                inside.exported.add(name)
            elif not elements and name not in self.perhaps_exported:
                inside.variables[name] = elements
            else:
                # the environment may hold it, and then what the script sets is handed on
                inside.variables[name] = [unknown(f"${name}")]
        inside.exported_functions = set(self.exported_functions)
        inside.functions = set(self.exported_functions)
        return inside

    def forget(self) -> None:
        """What another machine or container holds: nothing of this shell for certain."""
        self.variables = {}
        self.exported = set()
        self.functions = set()
        self.exported_functions = set()
        self.folder = ""
        self.is_environment_known = False

    def why_not_set(self, name: str) -> str:
        """Why an assignment to a name can't be followed; "": it can."""
        if name in self.readonly or name in _READONLY:
            return f"{name} is read-only, so that it is an error here"
        if name in _CHANGE_THE_SHELL:
            return f"{name} changes how the script is read, which can't be followed; write out what it makes"
        return ""

    def put(self, name: str, elements: list[str], *, is_array: bool) -> None:
        """Sets a variable. A plain value leaves an array one, as its first element."""
        if name in _COMPUTED:
            return
        self.variables[name] = elements
        if is_array:
            self.arrays.add(name)
        if "allexport" in self.options:
            self.exported.add(name)

    def drop(self, name: str) -> None:
        """Unsets a variable."""
        self.variables[name] = []
        self.arrays.discard(name)
        self.exported.discard(name)
        self.perhaps_exported.discard(name)

    def leave_folder(self) -> None:
        """`cd`: where to is not followed."""
        self.folder = ""
        self.variables.pop("PWD", None)
        self.variables.pop("OLDPWD", None)


def set_options(options: set[str], words: Sequence[str]) -> str:
    """Takes what `set` is given into `options`. -> Why that can't be followed; "": it can."""
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not re.fullmatch(r"[-+]\w+", word):
            return "arguments that are set anew can't be followed; give the script's own behind @FILE"
        for letter in word[1:]:
            name = _OPTION_LETTERS.get(letter, "")
            if letter == "o" and at == len(words):
                # lists them
                return ""
            if letter == "o":
                name = words[at]
                at += 1
            if name in _OPTION_NAMES and word[0] == "-":
                options.add(name)
            elif name in _OPTION_NAMES:
                options.discard(name)
            elif name and name not in _HARMLESS_NAMES:
                return f"`set` with {name} changes how the script is read, which is not followed"
            elif not name and letter not in _HARMLESS_LETTERS:
                return f"`set` with {word[0]}{letter} changes how the script is read, which is not followed"
    return ""
