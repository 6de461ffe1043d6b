"""The program that a command starts: which launchers stand in front of it, and whether it trains what a recipe can
say."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from megaspec.core.errors import Problem, RecipeError
from megaspec.megatron.launch_options import (
    STARTS_PYTHON,
    TORCHRUN_MODULES,
    Options,
    launcher_kind,
    read_options,
)

GPT = "pretrain_gpt"
_PYTHON = re.compile(r"python[\d.]*")
# Letters of python's own options in one word: those without a value, then one that takes the rest or the next word.
_PYTHON_OPTIONS = re.compile(r"-([bBdEhiIOPqRsSuvVx?]*)([cmWX]?)(.*)")
_LAUNCHING_MODULES = {
    **dict.fromkeys(TORCHRUN_MODULES, "torchrun"),
    "deepspeed.launcher.runner": "deepspeed",
    "accelerate.commands.launch": "accelerate",
}
# Modules that run the program which stands behind them.
_RUNNING_MODULES = ("cProfile", "coverage", "debugpy", "memory_profiler", "pdb", "profile", "scalene", "trace")
_ASSIGNED = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
# Words of a program's name, and what it trains; NVIDIA/Megatron-LM has or had each of them.
_OTHERS = {
    "bert": "a BERT",
    "t5": "an encoder-decoder",
    "vlm": "a vision-language model",
    "llava": "a vision-language model",
    "multimodal": "a multimodal model",
    "mimo": "a multimodal model",
    "mamba": "a hybrid of Mamba and attention layers",
    "hybrid": "a hybrid of Mamba and attention layers",
    "vision": "a vision model",
    "vit": "a vision model",
    "ict": "a retriever",
    "orqa": "a retriever",
    "biencoder": "a retriever",
    "realm": "a retriever",
    "retro": "a model with retrieval",
    "rl": "a policy by reinforcement learning",
    "grpo": "a policy by reinforcement learning",
    "finetune": "a model that is trained already",
    "sft": "a model that is trained already",
    "tasks": "a model that is trained already",
    "segformer": "a vision model",
    "modelopt": "a quantised, pruned or distilled model",
}
# Of examples/multimodal/train.py and tasks/main.py only the folder says what they train.
_SAYS_NOTHING = ("train", "main", "run", "finetune")
# Words in the names of programs that train nothing; in scripts they stand beside the one that does.
_TOOLS = ("preprocess", "prepare", "convert", "merge", "download", "generate", "generation", "inference", "server")
_TOOLS += ("report", "build", "loader", "saver", "linter", "autoformat")
# With one of these a name is of no tool, whatever else stands in it: train_server.py.
_TRAINS = ("train", "pretrain", "training", "trainer", "finetune")


@dataclass(frozen=True)
class Program:
    """A program among the words of a command."""

    name: str
    """As it is written: a file with its path, or a module."""
    begin: int
    """Where its words begin: at `-m` for a module."""
    end: int
    """Where its own flags begin."""

    @property
    def stem(self) -> str:
        """Its name without path, package and ending, in small letters."""
        return self._parts()[-1]

    @property
    def is_gpt(self) -> bool:
        return self.stem == GPT

    @property
    def is_tool(self) -> bool:
        """True for what trains nothing."""
        words = re.split(r"[^a-z0-9]+", self.stem)
        return any(word in _TOOLS for word in words) and not any(word in _TRAINS for word in words)

    @property
    def trains(self) -> str:
        """What it trains that no recipe can say. "": nothing that its name tells."""
        parts = self._parts()
        named = parts[-1:]
        if self.stem in _SAYS_NOTHING:
            named = parts[-2:]
        # the file's own name says more than its folder's
        for part in reversed(named):
            for word in re.split(r"[^a-z0-9]+", part):
                if word in _OTHERS:
                    return _OTHERS[word]
        return ""

    def _parts(self) -> list[str]:
        name = self.name.lower()
        if not name.endswith(".py"):
            return name.split(".")
        path = PurePosixPath(name.replace("\\", "/"))
        return [*path.parts[:-1], path.stem]


@dataclass(frozen=True)
class Launch:
    """A launcher among the words of a command."""

    kind: str
    name: str
    """As it is written, without its path."""
    begin: int
    """Where its name stands."""
    options: Options


@dataclass
class CommandLine:
    """What the words of a command are."""

    launches: list[Launch] = field(default_factory=list)
    """From the outermost to the innermost."""
    program: Program | None = None


def find_program(words: Sequence[str]) -> Program | None:
    """The first Python file that the words start, or a module; None without one."""
    return read_line(words).program


def read_line(words: Sequence[str]) -> CommandLine:
    """The launchers of a command and its program. Their options are read as they read them, so that a value of an
    option is taken for neither; of what else stands in front, such as a profiler, the options are not known."""
    line = CommandLine()
    if words and words[0].startswith("--"):
        return line
    at = 0
    takes_module = False
    while at < len(words) and line.program is None:
        word = words[at]
        kind = launcher_kind(word)
        if kind:
            at = _read_launch(line, kind, word.rpartition("/")[2], words, at)
        elif _PYTHON.fullmatch(word.rpartition("/")[2]):
            takes_module = True
            at = _read_python(line, words, at + 1)
        elif takes_module and word == "-m" and at + 1 < len(words):
            line.program = Program(words[at + 1], at, at + 2)
        else:
            is_option = word.startswith("-") or _ASSIGNED.fullmatch(word) is not None
            if word.endswith(".py") and not is_option:
                line.program = Program(word, at, at + 1)
            at += 1
    return line


def _read_launch(line: CommandLine, kind: str, name: str, words: Sequence[str], begin: int) -> int:
    """Adds a launcher and, where it says it, its program; where the words behind its options begin."""
    options = read_options(kind, words, begin + 1)
    line.launches.append(Launch(kind, name, begin, options))
    at = options.end
    if kind not in STARTS_PYTHON or at >= len(words):
        return at
    if options.refused and options.variables:
        # what is no option of the launcher may be one of a program in a variable
        return len(words)
    is_python = _PYTHON.fullmatch(words[at].rpartition("/")[2]) is not None
    if not (options.refused or is_python or "no-python" in options.flags):
        line.program = Program(words[at], at, at + 1)
    return at


def _read_python(line: CommandLine, words: Sequence[str], at: int) -> int:
    """Passes over python's own options; where what it runs begins."""
    while at < len(words) and words[at].startswith("-"):
        match = _PYTHON_OPTIONS.fullmatch(words[at])
        if match is None or words[at].startswith("--"):
            at += 1
            continue
        _, letter, attached = match.groups()
        value_at = at if attached else at + 1
        if letter == "c":
            # the program stands in a string
            return len(words)
        if letter == "m" and value_at < len(words):
            module = attached or words[value_at]
            return _read_module(line, module, words, at, value_at + 1)
        at = value_at + 1 if letter else at + 1
    return at


def _read_module(line: CommandLine, module: str, words: Sequence[str], begin: int, end: int) -> int:
    kind = _LAUNCHING_MODULES.get(module, "")
    if kind:
        return _read_launch(line, kind, module, words, end - 1)
    if module not in _RUNNING_MODULES:
        line.program = Program(module, begin, end)
    return end


def check_program(program: Program) -> str:
    """What has to be told about a program: "" for pretrain_gpt.py. RecipeError: it trains nothing, or nothing that a
    recipe says."""
    if program.is_gpt:
        return ""
    if program.trains:
        what = f"trains {program.trains}, which no recipe can say"
    elif program.is_tool:
        what = "trains nothing"
    else:
        return f"{program.name} is taken for pretrain_gpt.py: flags and changes of its own are not known here"
    way_out = "give pretrain_gpt.py in its place if it trains what that one trains"
    text = f"{program.name}: by its name it {what}; {way_out}"
    raise RecipeError([Problem("", text, "", "megatron-program")])
