"""Every family against transformers, in true fp64: logits, loss, gradients and what three steps make of the weights."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megaspec.core.errors import CheckpointError, RecipeError
from megaspec.hf.family import OF_TRAINING, comparable, objections, typed
from megaspec.hf.names import weight_table
from megaspec.hf.table import FAMILIES, read_model
from megaspec.model.decoder.spec import DecoderSpec
from megaspec.nn.embedding.spec import LearnedPositionsSpec
from tests.hf.models import Pair, as_theirs, our_model, pair_of, tokens
from tests.hf.tiny import TINY, TOKENS
from tests.hf.true_fp64 import true_fp64
from tests.nn.test_cache import check_growing, greedy

# What fp64 leaves of two orders of the same sums: 5e-16 was measured for logits, 1e-15 for gradients.
LOGITS = 1e-12
GRADIENTS = 1e-10
# Tokens that are written.
TEXT = 14
# A change that moves logits by less is not seen by this test.
SEEN = 1e-4


@pytest.fixture(scope="module", params=TINY)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return pair_of(request.param, tmp_path_factory.mktemp("hf") / "model")


def test_logits_are_theirs(pair: Pair) -> None:
    with true_fp64(), torch.no_grad():
        theirs = pair.theirs(tokens()).logits
    with torch.no_grad():
        ours = pair.ours(tokens())
    assert ours.dtype == theirs.dtype == torch.float64
    assert theirs.std() > 0.05, "logits that say nothing"
    assert (ours - theirs).abs().max() < LOGITS


def test_texts_are_theirs(pair: Pair) -> None:
    """The likeliest tokens, from what is kept of those before; behind lengths at which frequencies change, too."""
    prompts = tokens()[:, :10]
    with true_fp64(), torch.no_grad():
        more = {"do_sample": False, "max_new_tokens": TEXT, "eos_token_id": None, "pad_token_id": 0}
        theirs = pair.theirs.generate(prompts, attention_mask=torch.ones_like(prompts), **more)
    ours = [greedy(pair.ours, prompt.tolist(), tokens=TEXT) for prompt in prompts]
    assert ours == theirs[:, 10:].tolist()
    assert check_growing(pair.ours, [4, 9], upto=TOKENS) > 0


def loss_of(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten())


def test_loss_gradients_and_steps_are_theirs(pair: Pair) -> None:
    their_optimizer = torch.optim.AdamW(pair.theirs.parameters(), lr=1e-3, weight_decay=0.1)
    our_optimizer = torch.optim.AdamW(pair.ours.parameters(), lr=1e-3, weight_decay=0.1)
    for step in range(3):
        with true_fp64():
            theirs = loss_of(pair.theirs(tokens()).logits)
            theirs.backward()
        ours = loss_of(pair.ours(tokens()))
        ours.backward()
        assert abs(float((ours - theirs).detach())) < LOGITS
        if step == 0:
            gradients = {f"model/{name}": value.grad for name, value in pair.ours.named_parameters()}
            compare(pair, {name: value.grad for name, value in pair.theirs.named_parameters()}, gradients)
        for optimizer in (their_optimizer, our_optimizer):
            optimizer.step()
            optimizer.zero_grad()
    weights = {f"model/{name}": value.detach() for name, value in pair.ours.named_parameters()}
    compare(pair, {name: value.detach() for name, value in pair.theirs.named_parameters()}, weights)


def compare(pair: Pair, in_memory: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> None:
    """Every tensor of theirs as transformers has it in memory, where experts are fused, and out of ours."""
    for name, value in ours.items():
        assert value is not None, f"{name} has no gradient"
    compared = 0
    for name, theirs in pair.table.theirs.items():
        if any(ours_of.name not in ours for ours_of, _, _ in theirs.pieces):
            continue
        expected = in_memory_tensor(in_memory, name)
        found = as_theirs(theirs, ours)
        assert found.shape == expected.shape, name
        error = (found - expected).abs().max() / max(1e-3, float(expected.abs().max()))
        assert error < GRADIENTS, f"{name}: {float(error)}"
        compared += found.numel()
    assert compared == sum(value.numel() for value in ours.values())


def in_memory_tensor(in_memory: Mapping[str, Tensor], name: str) -> Tensor:
    """A tensor of the folder's layout out of the layout that transformers 5 has in memory."""
    name = name.replace("block_sparse_moe", "mlp")
    if name in in_memory:
        return in_memory[name]
    prefix, _, rest = name.partition(".experts.")
    expert, which, _ = rest.split(".")
    fused = f"{prefix}.experts"
    if which in ("down_proj", "w2"):
        return in_memory[f"{fused}.down_proj"][int(expert)]
    gate, up = in_memory[f"{fused}.gate_up_proj"][int(expert)].chunk(2)
    return gate if which in ("gate_proj", "w1") else up


def test_a_configuration_comes_back(pair: Pair) -> None:
    family = FAMILIES[pair.config["model_type"]]
    assert objections(family, pair.spec) == []
    written = family.write(pair.spec) | {"model_type": family.model_type}
    assert read_model(written, "written").model_dump() == pair.spec.model_dump()


# What moves no logits, with the reason: (configuration, path).
UNSEEN = {
    ("phi3", "positions.scaling.short_factor"): "sequences are longer than the original length: long_factor alone",
    ("phi3, short sequences", "positions.scaling.long_factor"): "sequences are shorter: short_factor alone",
}


def test_another_option_is_another_model(pair: Pair) -> None:
    """Each option, changed to each of its neighbours, moves the logits or needs other tensors."""
    values = {f"model/{name}": value.detach() for name, value in pair.ours.named_parameters()}
    with torch.no_grad():
        truth = pair.ours(tokens())
    unseen = []
    n_mutants = 0
    for path, mutant in mutants(pair.spec):
        n_mutants += 1
        if shapes_of(mutant) != shapes_of(pair.spec):
            continue
        with torch.no_grad():
            moved = our_model(mutant, values)(tokens()) - truth
        if moved.abs().max() < SEEN:
            unseen.append(path.partition("=")[0])
    assert n_mutants >= 8
    assert unseen == [path for name, path in UNSEEN if name == pair.name]


def shapes_of(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    facts = spec.facts
    found = {name: (linear.n_experts * linear.columns, linear.inputs.whole) for name, linear in facts.linears()}
    found |= {f"{name}.bias": () for name, linear in facts.linears() if linear.bias}
    found |= {name: (vector.size,) for name, vector in facts.vectors()}
    found |= {table.name: (table.rows, table.width) for table in facts.tables()}
    found |= {f"{table.name}.bias": () for table in facts.tables() if table.bias}
    return found | facts.tied_names


# Sizes make other tensors; what remains is told apart by these neighbours.
NEIGHBOURS: dict[str, list[Any]] = {
    "rms": ["layer"],
    "layer": ["rms"],
    "pre": ["post", "sandwich"],
    "gated": ["plain"],
    "plain": ["gated"],
    "silu": ["gelu"],
    "gelu_tanh": ["gelu", "silu"],
    "scale": ["one_plus"],
    "rotary": ["none"],
    "llama3": ["none"],
    "linear": ["none"],
    "dynamic": ["none"],
    "yarn": ["none"],
    "longrope": ["none"],
    "window": ["causal"],
    "whole": ["none"],
    "relu_squared": ["relu"],
    "parallel": ["sequential"],
    "softmax": ["sigmoid"],
    "outputs": ["inputs"],
    "per_head": ["none"],
    "l2": ["none"],
    "chunk": ["causal"],
    "log": ["none"],
    "sigmoid": ["softmax", "sqrt_softplus"],
    "inputs": ["outputs"],
    "best_two": ["best", "share"],
    "clamped": ["gated"],
    "sequential": ["parallel"],
}
SIZES = frozenset(
    {
        "n_layers",
        "d_model",
        "n_heads",
        "n_kv_heads",
        "d_head",
        "d_ffn",
        "vocab_size",
        "max_seq_len",
        "moe.n_experts",
        "moe.d_expert",
        "moe.first_dense",
        "moe.every",
        "moe.layers",
    }
)


def mutants(spec: DecoderSpec) -> Iterator[tuple[str, DecoderSpec]]:
    """Every model that differs from this one in one option, where the language takes it."""
    content = spec.model_dump(mode="json")
    for path, value in leaves(content, ""):
        if path in OF_TRAINING or path in SIZES:
            continue
        for neighbour in neighbours(value):
            changed = with_value(content, path.split("."), neighbour)
            try:
                yield f"{path}={neighbour}", typed(changed)
            except CheckpointError:
                continue


def leaves(content: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def neighbours(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [value * 1.5]
    if isinstance(value, str):
        return NEIGHBOURS.get(value, [])
    if isinstance(value, list) and value and isinstance(value[0], str):
        # layers of other kinds
        return [value[1:] + value[:1]]
    if isinstance(value, list) and value and isinstance(value[0], float):
        return [[1.5 * number for number in value]]
    return []


def with_value(content: Mapping[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    name, *rest = path
    if rest:
        return {**content, name: with_value(content[name], rest, value)}
    if name == "kind":
        # another kind has other keys
        return {"kind": value}
    return {**content, name: value}


def test_every_family_has_a_tiny_configuration() -> None:
    assert {model_type for model_type, _ in TINY.values()} == set(FAMILIES)


def test_what_a_family_cant_say_is_named(tmp_path: Path) -> None:
    pair = pair_of("qwen3", tmp_path / "model")
    assert objections(FAMILIES["llama"], pair.spec) == ["model.attention.qk_norm=per_head, where llama has none"]
    assert objections(FAMILIES["gpt2"], pair.spec) == [
        "model.positions.kind=rotary, where gpt2 has learned",
        "model.norm.kind=rms, where gpt2 has layer",
        "model.mlp.kind=gated, where gpt2 has plain",
    ]
    with_experts = pair_of("mixtral", tmp_path / "experts")
    assert objections(FAMILIES["qwen3"], with_experts.spec) == ["model.moe=..., where qwen3 has none"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_sizes": 3}, "hidden_sizes=3 is mapped to nothing; did you mean hidden_size"),
        ({"hidden_size": "64"}, 'hidden_size="64" must be a whole number of at least 1'),
        ({"hidden_size": None}, "hidden_size is missing; it must be a whole number of at least 1"),
        ({"rope_scaling": {"type": "su", "rope_theta": 1.0}}, "rope_type='su' is none of"),
        ({"hidden_act": "mish"}, 'hidden_act="mish" must be one of'),
        ({"is_encoder_decoder": True}, "is_encoder_decoder=true: only false can be said"),
        ({"model_type": "lama"}, "model_type=lama can't be said in the options of a decoder; did you mean llama?"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0 must be a whole number of at least 1"),
        ({"rope_parameters": {"rope_theta": 5.0}, "rope_theta": 6.0}, "contradict each other"),
    ],
)
def test_a_configuration_that_cant_be_said_is_refused(change: dict[str, Any], message: str) -> None:
    config = {"model_type": "llama", **TINY["llama 2"][1]} | change
    with pytest.raises(CheckpointError) as caught:
        read_model(config, "config.json")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mlp_only_layers": [4]}, "mlp_only_layers has 4, num_hidden_layers=4 are numbered from 0"),
        ({"mlp_only_layers": [0, 1, 2, 3]}, "leave no layer with experts"),
        ({"decoder_sparse_step": 5}, "decoder_sparse_step=5 and mlp_only_layers=[] leave no layer with experts"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0 must be a whole number of at least 1"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size=0 must be a whole number"),
        ({"model_type": "phimoe"}, "model_type=phimoe can't be said in the options of a decoder: its router draws"),
        ({"model_type": "olmoe", "head_dim": 4}, "head_dim=4: only 8 can be said"),
        (
            {"model_type": "qwen3_moe", "use_sliding_window": True, "layer_types": ["full_attention"] * 4},
            "use_sliding_window=true gives a window to all layers of qwen3_moe",
        ),
        ({"use_sliding_window": True, "layer_types": [{}] * 4}, "must be a list of texts"),
        ({"mlp_only_layers": [[1]]}, "mlp_only_layers=[[1]] must be a list of whole numbers"),
    ],
)
def test_experts_that_cant_be_said_are_refused(change: dict[str, Any], message: str) -> None:
    config = {"model_type": "qwen2_moe", **TINY["qwen2, every other layer with experts"][1]} | change
    with pytest.raises(CheckpointError) as caught:
        read_model(config, "config.json")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "gpt_oss",
            {"experts_per_token": 2},
            "experts_per_token=2: only 3 can be said, since it is num_experts_per_tok",
        ),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for num_hidden_layers=4"),
        ("gpt_oss", {"swiglu_limits": 7.0}, "swiglu_limits=7.0 is mapped to nothing; did you mean swiglu_limit"),
        ("gpt_oss", {"num_local_experts": None}, "num_local_experts is missing"),
        ("llama4", {"model_type": "llama4"}, "it looks at images, too; its text alone is a llama4_text"),
        ("llama4", {"no_rope_layers": [1, 0]}, "no_rope_layers must have 1 or 0 for each of num_hidden_layers=4"),
        ("llama4", {"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers must have 1 or 0 for each"),
        ("llama4", {"layer_types": ["sliding_attention"] * 4}, "layer_types must have chunked_attention or full_atten"),
        ("llama4", {"moe_layers": [4]}, "moe_layers has 4, num_hidden_layers=4 are numbered from 0"),
        ("llama4", {"moe_layers": []}, "moe_layers=[] leaves no layer with experts"),
        ("llama4", {"attn_temperature_tuning": "yes"}, 'attn_temperature_tuning="yes" must be a whole number'),
        ("llama4", {"moe_layers": [True]}, "moe_layers=[true] must be a list of whole numbers"),
        ("glm4 with experts", {"n_group": 0}, "n_group=0 must be a whole number of at least 1"),
        ("glm4 with experts", {"n_shared_experts": 0}, "n_shared_experts=0 must be a whole number of at least 1"),
    ],
)
def test_what_a_mixture_says_wrong_is_told(name: str, change: dict[str, Any], message: str) -> None:
    model_type, keys = TINY[name]
    with pytest.raises(CheckpointError) as caught:
        read_model({"model_type": model_type, **keys} | change, "config.json")
    assert message in str(caught.value)


def test_layers_with_experts_are_read_as_a_step_or_a_list() -> None:
    config = {"model_type": "qwen2_moe", **TINY["qwen2, every other layer with experts"][1]}
    stepped = read_model(config, "config.json")
    assert (stepped.moe.every, stepped.moe.first_dense, stepped.moe.layers) == (2, 1, None)
    listed = read_model(config | {"mlp_only_layers": [1]}, "config.json")
    assert listed.moe.layers == (0, 0, 0, 1)
    assert FAMILIES["qwen2_moe"].write(listed)["mlp_only_layers"] == [0, 1, 2]


def test_the_same_layers_are_the_same_model_however_they_are_said() -> None:
    """An option that a family writes in one form is no objection in another."""
    family = FAMILIES["qwen2_moe"]
    spec = read_model({"model_type": "qwen2_moe", **TINY["qwen2, every other layer with experts"][1]}, "config.json")
    assert objections(family, spec) == []
    for layers in ({"every": 2, "first_dense": 0}, {"every": 3, "first_dense": 0}, {"layers": (0, 1, 0, 1)}):
        plain = {"every": 1, "first_dense": 0, "layers": None}
        other = spec.model_copy(update={"moe": spec.moe.model_copy(update=plain | layers)})
        assert objections(family, other) == []
    # llama4 has a list, too, and glm4_moe layers behind dense ones alone
    scout = read_model({"model_type": "llama4_text", **TINY["llama4"][1]}, "config.json")
    moved = scout.model_copy(update={"moe": scout.moe.model_copy(update={"first_dense": 2})})
    assert objections(FAMILIES["llama4_text"], moved) == []
    glm = read_model({"model_type": "glm4_moe", **TINY["glm4 with experts"][1]}, "config.json")
    behind = glm.model_copy(update={"moe": glm.moe.model_copy(update={"first_dense": 0, "layers": (0, 1, 1)})})
    assert objections(FAMILIES["glm4_moe"], behind) == []
    between = glm.model_copy(update={"moe": glm.moe.model_copy(update={"layers": (1, 0, 1)})})
    assert objections(FAMILIES["glm4_moe"], between) == ["model.moe.layers=[1, 0, 1], where glm4_moe has [1, 1, 1]"]


def test_layers_may_have_other_names() -> None:
    model_type, keys = TINY["gemma3"]
    spec = read_model({"model_type": model_type, **keys}, "config.json")
    types = {"near": spec.layer_types["sliding_attention"], "far": spec.layer_types["full_attention"]}
    renamed = spec.model_copy(update={"layer_types": types, "layer_pattern": ("near", "near", "far", "near")})
    one, other = comparable(spec, renamed)
    assert one == other
    assert one != comparable(spec, renamed.model_copy(update={"layer_pattern": ("near", "far")}))[1]
    # the model's own table of positions counts beside what layers have
    learned = renamed.model_copy(update={"positions": LearnedPositionsSpec(kind="learned")})
    one, other = comparable(spec, learned)
    assert one["positions"] != other["positions"]
    assert objections(FAMILIES[model_type], renamed) == []


def test_all_that_is_wrong_is_said_at_once() -> None:
    config = {"model_type": "llama", **TINY["llama 2"][1]} | {"a_key": 1, "another": 2, "hidden_size": -1}
    with pytest.raises(CheckpointError) as caught:
        read_model(config, "config.json")
    assert len(caught.value.problems) == 3


def test_a_map_that_leaves_a_tensor_out_is_no_map() -> None:
    spec = typed(
        {"kind": "decoder", "n_layers": 1, "d_model": 8, "n_heads": 2, "n_kv_heads": 1, "d_head": 4, "d_ffn": 12}
        | {"vocab_size": 16, "max_seq_len": 8, "attention": {"kind": "gqa", "qk_norm": "per_head"}}
    )
    with pytest.raises(RecipeError, match=r"say nothing of attn\.q_norm, which this model has; add it to vectors"):
        weight_table(spec.facts, FAMILIES["llama"].names(spec))
