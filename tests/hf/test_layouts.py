"""Families on several ranks against transformers in true fp64: each layout reads the folder for itself."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megaspec.core.frozen import AUTO
from megaspec.data.batch import Batch
from megaspec.hf.short import short_section
from megaspec.hf.table import read_model
from megaspec.resolve.gather import gather_facts, with_digest
from megaspec.resolve.resolver import resolve
from megaspec.rules.difference import leaves
from megaspec.runtime.initial_weights import start_from_source
from megaspec.runtime.step import train_step
from megaspec.runtime.weights import gradients, weights
from megaspec.spec import Spec
from megaspec.verify.parity import build_scaler, divide
from tests.hf.models import Pair, as_theirs, pair_of
from tests.hf.test_families import GRADIENTS, LOGITS, in_memory_tensor
from tests.hf.tiny import TINY, TOKENS
from tests.hf.true_fp64 import true_fp64
from tests.ranks import RankPool
from tests.runtime.lives import build_here, comm_of
from tests.runtime.specs import TARGET, recipe

STEPS = 2
# A large eps: the gradient of a bias of keys is zero in exact arithmetic, and AdamW would divide rounding by rounding.
ADAMW = {"weight_decay": 0.0, "clip": None, "beta1": 0.9, "beta2": 0.95, "eps": 1e-5}
TP = {"tp": 2, "sequence_parallel": True}
PP = {"pp": 2}
CP = {"cp": 2}
EP = {"ep": 2, "dp_strategy": "replicate", "dp_replicate": 2}
# One family at least for each kind of part, on the axes that divide it.
LAYOUTS: dict[str, tuple[dict[str, Any], ...]] = {
    # learned positions, biases everywhere, a tied head
    "gpt2": (TP, PP, CP),
    # rope that is scaled, groups of heads
    "llama 3.1": (TP, PP, CP),
    # biases of queries, keys and values, windows in some layers
    "qwen2, windows": (TP, PP, CP),
    # norms of each head
    "qwen3": (TP, CP),
    # norms on both sides, capped scores and logits, windows, scales
    "gemma2": (TP, PP, CP),
    # two ropes, norms with 1 + weight
    "gemma3": (TP, CP),
    # norms behind, and of whole queries and keys
    "olmo2": (TP, PP),
    # one norm for attention and feed-forward, rope of a part, a bias of the head
    "phi": (TP, CP),
    # layers without positions, rotary pairs
    "cohere2": (TP, PP),
    # scales of residuals and scores
    "granite": (TP, PP),
    # chosen weights that sum to 1, layers without experts
    "qwen3, some with experts": (EP, TP),
    # a gate for shared experts
    "qwen2 with experts": (EP,),
    # layers without positions by a list
    "smollm3": (TP, PP),
    # norms without a weight
    "olmo": (TP, CP),
    # a window in all layers
    "mistral 0.1": (TP, CP),
    # plain feed-forward with squared relu, norms of layers with 1 + weight
    "nemotron": (TP, PP),
    # rope that is another one behind a length
    "phi3": (TP, CP),
    # clipped queries, keys and values
    "olmoe": (EP, CP),
    # sinks, windows, biases of experts, of the router, a clamped activation
    "gpt_oss": (TP, PP, CP, EP),
    # groups of experts, a bias that chooses, shared experts, dense layers first
    "glm4 with experts": (TP, EP),
    # chunks, weights on the experts' inputs, norms behind the rope, a temperature
    "llama4": (TP, CP, EP),
}
# By default a family is cut in every second way, the next one in the others: tests/parity cuts parts in all of them.
CASES = [
    pytest.param(name, layout, marks=[pytest.mark.slow] * ((number + turn) % 2 and len(layouts) > 1))
    for number, (name, layouts) in enumerate(LAYOUTS.items())
    for turn, layout in enumerate(layouts)
]


def said(layout: Any) -> str:
    return "-".join(f"{key}{value}" for key, value in layout.items()) if isinstance(layout, dict) else layout


def inputs_and_labels() -> tuple[Tensor, Tensor]:
    """int64 [2, T] twice: the token behind each."""
    text = torch.randint(0, 96, (2, TOKENS + 1), generator=torch.Generator().manual_seed(3))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool() as ranks:
        yield ranks


@pytest.fixture(scope="module")
def truths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What transformers made of a family, kept for its layouts."""
    return {"root": tmp_path_factory.mktemp("layouts")}


def truth_of(name: str, truths: dict[str, Any]) -> tuple[Pair, list[float], dict[str, Tensor], dict[str, Tensor]]:
    """-> the pair, and losses, first gradients and last weights of transformers' model."""
    if name not in truths:
        pair = pair_of(name, truths["root"] / name.replace(" ", "-"))
        inputs, labels = inputs_and_labels()
        optimizer = torch.optim.AdamW(pair.theirs.parameters(), lr=1e-3, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-5)
        losses = []
        for step in range(STEPS):
            with true_fp64():
                loss = F.cross_entropy(pair.theirs(inputs).logits.flatten(0, 1), labels.flatten())
                loss.backward()
            losses.append(loss.item())
            if step == 0:
                first = {key: value.grad.clone() for key, value in pair.theirs.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
        truths[name] = pair, losses, first, {key: value.detach() for key, value in pair.theirs.named_parameters()}
    return truths[name]


def spec_of(pair: Pair, layout: dict[str, Any]) -> Spec:
    """A run that starts with the folder."""
    one = {"pp": 1, "cp": 1, "ep": 1, "dp_strategy": "replicate", "dp_replicate": AUTO, "sequence_parallel": False}
    pipeline = {"pipeline": {"schedule": "1f1b", "micro_batch_group": AUTO}}
    made = recipe(
        {
            "model": short_section(pair.spec) | {"vocab_pad_to": 1},
            "data": {"kind": "synthetic", "vocab_size": 96, "seq_len": TOKENS},
            "optim": {"kind": "adamw", "lr": 1e-3, "schedule": {"kind": "constant"}} | ADAMW,
            "parallelism": {"tp": 1} | one | pipeline | layout,
            "train": {"steps": STEPS, "global_batch": 2, "micro_batch": 1},
            "init": {"from_hf": str(pair.folder)},
        }
    )
    facts = replace(with_digest(gather_facts(made)), run_dir="run")
    return resolve(made, TARGET, facts)


def train(rank: int, text: str) -> dict[str, Any]:
    """Losses, first gradients and last weights, whole, by global name."""
    spec = Spec.model_validate_json(text)
    built = build_here(spec, rank)
    start_from_source(built, comm_of(spec, rank))
    scaler = build_scaler(spec.precision, device=built.device)
    inputs, labels = inputs_and_labels()
    batch = Batch(inputs, labels, torch.ones_like(inputs, dtype=torch.bool), torch.arange(2))
    first: dict[str, Tensor] = {}
    losses = []
    for step in range(STEPS):
        result = train_step(
            built,
            divide(batch, mesh=built.mesh, micro_batch=spec.train.micro_batch),
            lr=spec.optim.lr,
            weight_decay=0.0,
            scaler=scaler,
            on_gradients=(lambda: first.update(gradients(built))) if step == 0 else None,
        )
        losses.append(result.loss.item())
    last = weights(built)
    if rank > 0:
        return {}
    arrays = [{key: value.numpy() for key, value in part.items()} for part in (first, last)]
    return {"losses": losses, "gradients": arrays[0], "weights": arrays[1]}


@pytest.mark.parametrize(("name", "layout"), CASES, ids=said)
def test_a_layout_trains_as_transformers_does(
    name: str, layout: dict[str, Any], pool: RankPool, truths: dict[str, Any]
) -> None:
    pair, losses, first, last = truth_of(name, truths)
    spec = spec_of(pair, layout)
    assert spec.world_size == 2
    found = pool.run(train, spec.model_dump_json(), ranks=2)[0]
    assert max(abs(a - b) for a, b in zip(found["losses"], losses, strict=True)) < LOGITS
    for ours, theirs in ((found["gradients"], first), (found["weights"], last)):
        compare(pair, theirs, {key: torch.from_numpy(value) for key, value in ours.items()})


def compare(pair: Pair, in_memory: dict[str, Tensor], ours: dict[str, Tensor]) -> None:
    """Every parameter of theirs."""
    compared = 0
    ours = {f"model/{name}": value for name, value in ours.items()}
    for name, theirs in pair.table.theirs.items():
        # what experts are chosen by beside their scores is no parameter
        if theirs.pieces[0][0].name.startswith("router/"):
            continue
        expected = in_memory_tensor(in_memory, name)
        error = (as_theirs(theirs, ours) - expected).abs().max() / max(1e-3, float(expected.abs().max()))
        assert error < GRADIENTS, f"{name}: {float(error)}"
        compared += expected.numel()
    assert compared == sum(value.numel() for name, value in ours.items() if name in pair.table.ours)


def test_each_choice_that_a_family_makes_is_made_by_one_of_these() -> None:
    """So that a new option comes with a layout."""

    def choices(names: Iterable[str]) -> set[tuple[str, Any]]:
        found = set()
        for name in names:
            model_type, keys = TINY[name]
            section = short_section(read_model(keys | {"model_type": model_type}, name))
            # what layers are called is no choice
            section.pop("layer_pattern", None)
            for path, value in leaves(section):
                if isinstance(value, str | bool):
                    found.add((re.sub(r"layer_types\.\w+", "layer_types.*", path), value))
        return found

    assert sorted(choices(TINY) - choices(LAYOUTS)) == []
