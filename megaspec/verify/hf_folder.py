"""Does a folder of Hugging Face's hold a run's model? Every tensor to the bit, and the logits of transformers."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from megaspec.checkpoint.reader import Reader, Weights
from megaspec.checkpoint.shard import TORCH_DTYPES
from megaspec.core.problems import show
from megaspec.hf.family import comparable, is_of_training
from megaspec.hf.fits import fit_of
from megaspec.hf.folder import HfFolder
from megaspec.hf.names import WeightTable
from megaspec.hf.stored import read_whole
from megaspec.hf.weights import their_tensor
from megaspec.model.decoder.spec import DecoderSpec
from megaspec.parallelism.expert import buffers_of
from megaspec.parallelism.mesh import Mesh
from megaspec.rules.difference import changed
from megaspec.runtime.build import build_split_model
from megaspec.runtime.generate import for_one_device
from megaspec.runtime.state import fill
from megaspec.spec import Spec

# Both compute in fp32, each in an order of its own: deep models differ by 1e-5 of the largest logit. A forgotten
# permutation of rotary pairs differs by 1e-1.
LARGEST_DIFFERENCE = 1e-3
LARGEST_KL = 1e-5
# What both read where there is no tokenizer: as many tokens, spread over the vocabulary.
N_TOKENS = 64
_STRIDE = 7919


@dataclass
class Compared:
    """What was found of the tensors."""

    n_tensors: int = 0
    n_equal: int = 0
    rounded: set[str] = field(default_factory=set)
    """Formats that the run's weights were rounded to before they were compared."""
    off: dict[str, float] = field(default_factory=dict)
    """By the name there: the largest difference of a tensor that is not equal."""
    problems: list[str] = field(default_factory=list)
    """What could not be compared, in words."""

    @property
    def is_equal(self) -> bool:
        return not self.off and not self.problems


@dataclass(frozen=True)
class Logits:
    """How far two models' logits lie apart, over all tokens of one text."""

    n_tokens: int
    difference: float
    """The largest."""
    largest: float
    """Of theirs, by absolute value."""
    kl: float
    """Mean over the tokens of KL(theirs, ours), in nats."""

    @property
    def is_close(self) -> bool:
        return self.difference <= LARGEST_DIFFERENCE * self.largest and self.kl <= LARGEST_KL


def model_differences(run: DecoderSpec, folder: DecoderSpec) -> list[str]:
    """What of a model config.json says otherwise, but for what is of training alone."""
    found = []
    for key, here, there in changed(*comparable(run, folder)):
        if not is_of_training(key):
            found.append(f"model.{key}={show(here)}, config.json says {show(there)}")
    return found


def compare_tensors(reader: Reader, folder: HfFolder, table: WeightTable) -> Compared:
    """Every tensor of the folder against the run's, one at a time. CheckpointError: damage."""
    fit = fit_of(folder, table)
    found = Compared(problems=fit.problems)
    for name, theirs in table.theirs.items():
        absent = [
            ours for ours, _, _ in theirs.pieces if ours.name not in reader or reader.shape(ours.name) != ours.shape
        ]
        if absent:
            found.problems.append(f"{name}: the run holds no {absent[0].name} of shape {list(absent[0].shape)}")
            continue
        stands_for = [name, *(copy for copy, other in table.copies.items() if other == name)]
        for one in stands_for:
            # what is missing, or doesn't fit, is among the problems
            if one not in fit.tensors:
                continue
            stored = fit.tensors[one]
            dtype = TORCH_DTYPES[stored.dtype]
            here = their_tensor(theirs, reader, dtype)
            if any(reader.dtype(ours.name).itemsize > dtype.itemsize for ours, _, _ in theirs.pieces):
                found.rounded.add(str(dtype).removeprefix("torch."))
            _compare(found, one, here, read_whole(folder, stored))
    return found


def _compare(found: Compared, name: str, here: Tensor, there: Tensor) -> None:
    found.n_tensors += 1
    if torch.equal(here.view(torch.uint8), there.view(torch.uint8)):
        found.n_equal += 1
        return
    found.off[name] = float((here.double() - there.double()).abs().max())


def dequantised_tensors(folder: HfFolder, table: WeightTable) -> dict[str, Tensor] | None:
    """Every tensor of a quantised folder by its name there; None: nothing in it is quantised."""
    fit = fit_of(folder, table)
    if all(stored.form == "plain" for stored in fit.tensors.values()):
        return None
    return {name: read_whole(folder, stored) for name, stored in fit.tensors.items()}


def has_transformers() -> bool:
    """Whether logits can be compared here."""
    return find_spec("transformers") is not None


def fixed_tokens(vocab_size: int, max_seq_len: int) -> list[int]:
    """For a run without a tokenizer."""
    return [number * _STRIDE % vocab_size for number in range(min(N_TOKENS, max_seq_len))]


@dataclass(frozen=True)
class TheirModel:
    """What transformers is given."""

    folder: Path
    architecture: str
    """Its class."""
    tensors: dict[str, Tensor] | None
    """Read in place of the folder's, which it can't compute with on a CPU; None: the folder's."""


@torch.no_grad()
def compare_logits(spec: Spec, weights: Weights, theirs: TheirModel, tokens: Sequence[int]) -> Logits:
    """What transformers computes with a folder against what the run's model computes, both on the CPU in fp32.

    `weights`: of the run's model.
    """
    tokens_1S = torch.tensor([list(tokens)])
    theirs_SV = _their_logits(theirs, tokens_1S)
    split = build_split_model(for_one_device(spec, cuda=False), mesh=Mesh({}, rank=0, device=torch.device("cpu")))
    model = split.chunks[0]
    layouts = split.strategies.tensor.layouts
    for name, parameter in model.global_parameters().items():
        fill(parameter, layouts[name], f"model/{name}", weights)
    for name, buffer in buffers_of(split.chunks).items():
        buffer.copy_(weights.read(f"router/{name}"))
    ours_SV = model(tokens_1S)[0].double()
    kl = torch.nn.functional.kl_div(
        ours_SV.log_softmax(-1), theirs_SV.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    return Logits(
        n_tokens=len(tokens),
        difference=float((ours_SV - theirs_SV).abs().max()),
        largest=float(theirs_SV.abs().max()),
        kl=float(kl),
    )


def _their_logits(theirs: TheirModel, tokens_1S: Tensor) -> Tensor:
    """float64 [S, V]. The folder is read as data: no code in it is run, and nothing is looked up on the hub."""
    # before it is imported, which reads it
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    as_data = {"local_files_only": True, "trust_remote_code": False}
    if theirs.tensors is None:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            theirs.folder, dtype=torch.float32, use_safetensors=True, **as_data
        )
    else:
        config = transformers.AutoConfig.from_pretrained(theirs.folder, **as_data)
        # of tensors that are not quantised any more
        del config.quantization_config
        build = getattr(transformers, theirs.architecture).from_pretrained
        model = build(None, config=config, state_dict=theirs.tensors, dtype=torch.float32)
    return model.train(False)(input_ids=tokens_1S).logits[0].double()
