"""The program that a command starts: where it stands, and whether it trains what a recipe can say."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from megaspec.core.errors import Problem, RecipeError

GPT = "pretrain_gpt"
TORCHRUN = ("torchrun", "ft_launcher")
TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_PYTHON = re.compile(r"python[\d.]*")
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
# Programs that train nothing and stand in scripts beside the one that does.
_TOOLS = ("preprocess", "prepare", "convert", "merge", "download", "generate", "generation", "inference", "server")


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
        return any(word in _TOOLS for word in re.split(r"[^a-z0-9]+", self.stem))

    @property
    def trains(self) -> str:
        """What it trains that no recipe can say. "": nothing that its name tells."""
        parts = self._parts()
        named = parts[-1:]
        if self.stem in _SAYS_NOTHING:
            named = parts[-2:]
        words = [word for part in reversed(named) for word in re.split(r"[^a-z0-9]+", part)]
        return next((_OTHERS[word] for word in words if word in _OTHERS), "")

    def _parts(self) -> list[str]:
        name = self.name.lower()
        if not name.endswith(".py"):
            return name.split(".")
        path = PurePosixPath(name.replace("\\", "/"))
        return [*path.parts[:-1], path.stem]


def find_program(words: Sequence[str]) -> Program | None:
    """The first Python file among words, or the module behind python's or torchrun's `-m`; None without one."""
    if words and words[0].startswith("--"):
        return None
    takes_module = False
    for n, word in enumerate(words):
        base = word.rpartition("/")[2]
        if word.endswith(".py"):
            return Program(word, n, n + 1)
        if _PYTHON.fullmatch(base) or base in TORCHRUN:
            takes_module = True
        elif takes_module and word in ("-m", "--module") and n + 1 < len(words):
            if words[n + 1] not in TORCHRUN_MODULES:
                return Program(words[n + 1], n, n + 2)
        elif takes_module and word.startswith("--module="):
            return Program(word.partition("=")[2], n, n + 1)
    return None


def check_program(program: Program) -> str:
    """What has to be told about a program: "" for pretrain_gpt.py. RecipeError: it trains something else."""
    if program.is_gpt:
        return ""
    if program.trains:
        text = f"{program.name}: by its name it trains {program.trains}, which no recipe can say;"
        text += " give pretrain_gpt.py in its place if it trains what that one trains"
        raise RecipeError([Problem("", text, "", "megatron-program")])
    return f"{program.name} is taken for pretrain_gpt.py: flags and changes of its own are not known here"
