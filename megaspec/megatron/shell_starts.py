"""Commands that give another shell a string: `srun env A=1 bash -ec STRING NAME ARG...`, `ssh HOST STRING`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

SHELLS = ("bash", "sh", "zsh", "dash")
# Launchers whose command gets the environment as it is.
_HAND_ON = (
    "chrt",
    "ionice",
    "ncu",
    "nice",
    "nohup",
    "nsys",
    "numactl",
    "setsid",
    "srun",
    "stdbuf",
    "strace",
    "taskset",
    "time",
    "timeout",
)
# Behind another launcher, too: what they start gets another environment, or one that their options change.
_OTHER_ENVIRONMENT = (
    "apptainer",
    "chroot",
    "docker",
    "enroot",
    "kubectl",
    "mpiexec",
    "mpirun",
    "nerdctl",
    "podman",
    "shifter",
    "singularity",
    "su",
    "sudo",
    "unshare",
)
MAKE_WORDS = ("clush", "find", "parallel", "pdsh", "pssh", "ssh", "watch", "xargs")
"""They make words of what they read, or read the words that they are given a second time."""
_SHELL_OPTIONS_WITH_VALUE = ("--init-file", "--rcfile")
_SHELL_OPTIONS = ("--login", "--noediting", "--noprofile", "--norc", "--verbose")
_SSH_OPTIONS_WITH_VALUE = "BbcDEeFIiJLlmOoPpQRSWw"


@dataclass(frozen=True)
class Start:
    """A shell among the words of a command, with a string that it follows."""

    begin: int
    """Where its name stands."""
    string: int
    """Where the string stands; `$0` and the arguments come behind it."""
    options: tuple[str, ...]
    """As `set` takes them."""
    name: str


@dataclass
class ShellLaunch:
    """What the words in front of a shell do to the environment that it gets."""

    is_handed_on: bool = True
    """False where the variables of this shell may not be there, or others may be."""
    variables: dict[str, str | None] = field(default_factory=dict)
    """What `env` sets; None: unset by it."""
    leaves_folder: bool = False
    why_not: str = ""
    """Why it can't be followed. "": it can."""


def find_start(words: Sequence[str]) -> Start | None:
    """The first shell among words that is given a string."""
    for n, word in enumerate(words):
        name = word.rpartition("/")[2]
        if name in SHELLS:
            start = _options(words, n, name)
            if start is not None:
                return start
    return None


def _options(words: Sequence[str], begin: int, name: str) -> Start | None:
    at = begin + 1
    options: list[str] = []
    takes_string = False
    while at < len(words) and words[at][:1] in ("-", "+") and words[at] not in ("-", "--"):
        word = words[at]
        at += 1
        if word in _SHELL_OPTIONS_WITH_VALUE:
            at += 1
        elif word.startswith("--") and word not in _SHELL_OPTIONS:
            options.append(word)
        elif not word.startswith("--"):
            takes_string |= word.startswith("-") and "c" in word
            # a login shell reads files of the user's, which are taken to set nothing that is asked for
            letters = word[1:].replace("c", "").replace("l", "")
            if letters:
                options.append(f"{word[0]}{letters}")
            for _ in range(letters.count("o")):
                options += words[at : at + 1]
                at += 1
    if at < len(words) and words[at] in ("-", "--"):
        at += 1
    if not takes_string or at >= len(words):
        return None
    return Start(begin, at, tuple(options), name)


def read_launch(words: Sequence[str]) -> ShellLaunch:
    """What launchers make of the environment. Words that can't be known are empty here, since they may be any."""
    launch = ShellLaunch()
    at = 0
    begins_command = True
    while at < len(words):
        name = words[at].rpartition("/")[2]
        if name == "env":
            at = _read_env(words, at + 1, launch)
            begins_command = True
            continue
        if name in MAKE_WORDS:
            launch.why_not = f"{name} makes other words of a shell's, which is not followed"
        is_launcher = not begins_command or name in _HAND_ON
        changes = name in _OTHER_ENVIRONMENT or name.endswith(".sh") or words[at].startswith("--export")
        if not is_launcher or changes or not words[at]:
            launch.is_handed_on = False
            launch.variables = {}
            launch.leaves_folder = True
        begins_command = False
        at += 1
    return launch


def _read_env(words: Sequence[str], at: int, launch: ShellLaunch) -> int:
    """Takes options and assignments of `env`. -> Where the command stands that it starts."""
    while at < len(words) and words[at].startswith("-"):
        word = words[at]
        at += 1
        if word in ("-u", "--unset") and at < len(words):
            launch.variables[words[at]] = None
            at += 1
        elif word.startswith("--unset="):
            launch.variables[word.partition("=")[2]] = None
        elif word.startswith("-u"):
            launch.variables[word[2:]] = None
        elif word in ("-", "-i", "--ignore-environment"):
            launch.is_handed_on = False
            launch.variables = {}
        elif word in ("-C", "--chdir"):
            launch.leaves_folder = True
            at += 1
        elif word.startswith("--chdir="):
            launch.leaves_folder = True
        elif word not in ("--", "-v", "--debug"):
            launch.why_not = f"`env` with {word} can't be followed; write out what it makes"
    while at < len(words) and "=" in words[at]:
        name, _, value = words[at].partition("=")
        launch.variables[name] = value
        at += 1
    return at


def ssh_command(words: Sequence[str]) -> int | None:
    """Where the command stands that ssh starts on another machine; None: it is no ssh, or has none."""
    if not words or words[0].rpartition("/")[2] != "ssh":
        return None
    at = 1
    while at < len(words) and words[at].startswith("-"):
        takes_value = len(words[at]) == 2 and words[at][1] in _SSH_OPTIONS_WITH_VALUE
        at += 2 if takes_value else 1
    # behind the host
    return at + 1 if at + 1 < len(words) else None
