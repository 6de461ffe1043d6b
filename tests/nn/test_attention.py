"""Every option of attention against its equation written out, query by query, in fp64."""

import json
from dataclasses import replace
from math import floor, log1p

import pytest
import torch
from torch import Tensor

from megaspec.core.part_facts import Sight
from megaspec.data.tokenizer import ByteTokenizer
from megaspec.estimate.flops import flops_per_sequence
from megaspec.nn.decoder import Decoder
from megaspec.parallelism.mesh import Mesh
from megaspec.runtime.build import build_model, build_split_model, materialise
from megaspec.runtime.draw import Draw, Sampling
from megaspec.runtime.generate import Limits, Prompt, for_one_device, generate
from megaspec.runtime.text_passes import ModelOnRanks, cached_passes, whole_passes
from megaspec.spec import Spec
from megaspec_kernels.registry import kernels_of
from tests.nn.test_models import HEADS, SIZE, rms
from tests.parity.cases import ATTENTIONS, SEQUENCES, TOKENS, Case, batches_of, content_of, spec_of

KV = 2
NAMES = [name for name in ATTENTIONS if name]


def case_of(name: str, *, attention: str = "reference") -> Case:
    family = "flat" if name == "temperature" else "llama"
    return Case(options=name, family=family, kv_heads=KV, attention=attention, documents=True)


def kernels_for(name: str) -> list[str]:
    return ["reference"] if "score_cap" in ATTENTIONS[name] else ["reference", "sdpa"]


def model_of(spec: Spec) -> Decoder:
    """A model whose weights are drawn at random, those of norms and sinks too, so that each of them counts."""
    model = build_model(spec.model, kernels_of(spec.kernels), dtype=torch.float64)
    materialise(model, device=torch.device("cpu"), dtype=torch.float64)
    draw = torch.Generator().manual_seed(11)
    for weight in model.parameters():
        weight.data.normal_(std=0.3, generator=draw)
    return model


def turned(x_H: Tensor, position: int) -> Tensor:
    """A head at its place, pair by pair."""
    out = []
    half = SIZE // 2
    for i in range(half):
        angle = torch.tensor(position * 10_000.0 ** (-2 * i / SIZE), dtype=torch.float64)
        out.append(x_H[i] * angle.cos() - x_H[i + half] * angle.sin())
    for i in range(half):
        angle = torch.tensor(position * 10_000.0 ** (-2 * i / SIZE), dtype=torch.float64)
        out.append(x_H[i + half] * angle.cos() + x_H[i] * angle.sin())
    return torch.stack(out)


def equation(
    x_TD: Tensor, w: dict[str, Tensor], options: dict, *, documents: list[int], is_rotary: bool = True
) -> Tensor:
    """One sequence."""
    T = len(x_TD)
    starts = [documents.index(number) for number in documents]
    positions = [t - start for t, start in enumerate(starts)]
    qkv = x_TD @ w["wqkv.weight"].t() + w.get("wqkv.bias", 0.0)
    sizes = [HEADS * SIZE, KV * SIZE, KV * SIZE]
    q, k, v = qkv[:, : sum(sizes)].split(sizes, dim=-1)
    if options.get("qk_norm") == "whole":
        q, k = rms(q) * w["q_norm.weight"], rms(k) * w["k_norm.weight"]
    if "clip_qkv" in options:
        c = options["clip_qkv"]
        q, k, v = (part.clamp(-c, c) for part in (q, k, v))
    mask = options.get("mask", {"kind": "causal"})
    outs = []
    for t in range(T):
        heads = []
        for n in range(HEADS):
            kv = n * KV // HEADS

            def at(part: Tensor, head: int, s: int) -> Tensor:
                x = part[s, head * SIZE : (head + 1) * SIZE]
                x = turned(x, positions[s]) if is_rotary else x
                return rms(x) if options.get("qk_norm") == "l2" and is_rotary else x

            query = at(q, n, t)
            warmth = options.get("temperature")
            if warmth is not None:
                query = query * (1 + warmth["scale"] * log1p(floor((positions[t] + 1) / warmth["floor_scale"])))
            exps, values = [], []
            for s in range(t + 1):
                near = mask["kind"] != "window" or t - s < mask["size"]
                same_chunk = mask["kind"] != "chunk" or positions[t] // mask["size"] == positions[s] // mask["size"]
                if not (documents[s] == documents[t] and near and same_chunk):
                    continue
                score = query @ at(k, kv, s) * options.get("score_scale", SIZE**-0.5)
                if "score_cap" in options:
                    score = options["score_cap"] * torch.tanh(score / options["score_cap"])
                exps.append(score.exp())
                values.append(v[s, kv * SIZE : (kv + 1) * SIZE])
            total = torch.stack(exps).sum()
            if options.get("sinks"):
                total = total + w["sinks"][n].exp()
            heads.append((torch.stack(exps) / total) @ torch.stack(values))
        outs.append(torch.cat(heads))
    o = torch.stack(outs)
    if options.get("output_gate"):
        o = o * torch.sigmoid(qkv[:, sum(sizes) :])
    return o @ w["wo.weight"].t() + w.get("wo.bias", 0.0)


@pytest.mark.parametrize("is_packed", [False, True], ids=["one", "packed"])
@pytest.mark.parametrize(
    ("name", "kernel"),
    # each option and each kernel by default, in turn
    [
        pytest.param(name, kernel, marks=[pytest.mark.slow] * ((number + turn) % 2 and len(kernels_for(name)) > 1))
        for number, name in enumerate(NAMES)
        for turn, kernel in enumerate(kernels_for(name))
    ],
)
def test_output_and_gradients_are_the_equation(name: str, kernel: str, is_packed: bool) -> None:
    case = case_of(name, attention=kernel)
    model = model_of(spec_of(case))
    module = model.layers["0"].attn
    documents = batches_of(case, [], 1)[0].documents.of_rows(slice(1))
    assert len(documents.number[0].unique()) > 2
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(1, TOKENS, 32, generator=draw, dtype=torch.float64).requires_grad_()
    grad = torch.randn(1, TOKENS, 32, generator=draw, dtype=torch.float64)
    given = documents if is_packed else None
    context = model.context(torch.arange(TOKENS), length=TOKENS, documents=given)
    weights = dict(module.named_parameters())
    found = module(x, context)
    numbers = documents.number[0].tolist() if is_packed else [0] * TOKENS
    expected = equation(x[0], weights, ATTENTIONS[name], documents=numbers, is_rotary=case.family != "flat")[None]
    assert (found - expected).abs().max() <= 1e-13 * expected.abs().max()
    leaves = [x, *weights.values()]
    for key, mine, truth in zip(
        ("x", *weights),
        torch.autograd.grad(found, leaves, grad),
        torch.autograd.grad(expected, leaves, grad),
        strict=True,
    ):
        # a key's bias moves all scores of a query alike, and has no gradient in exact arithmetic
        assert (mine - truth).abs().max() <= 1e-12 * max(1.0, truth.abs().max()), key
        assert key == "wqkv.bias" or truth.abs().max() > 1e-3, f"{key}: there is nothing to compare"


@pytest.mark.parametrize("name", NAMES)
def test_every_option_matters(name: str) -> None:
    """Each changes the output alone, so that the equation above is not held by an option that does nothing."""
    case = case_of(name)
    model = model_of(spec_of(case))
    tokens = batches_of(case, [], 1)[0].tokens
    whole = model(tokens)
    for option, value in ATTENTIONS[name].items():
        content = content_of(case)
        del content["model"]["attention"][option]
        if value is True or option == "qk_norm":
            # parameters go with it
            continue
        more = {"world_size": 1, "device": "cpu", "segments": [SEQUENCES * 20], "forked_from": None}
        spec = Spec.model_validate_json(json.dumps(content | more))
        without = model_of(spec)
        without.load_state_dict(model.state_dict())
        assert (without(tokens) - whole).abs().max() > 1e-4, option


@pytest.mark.parametrize("name", NAMES)
def test_a_document_is_computed_as_if_it_were_alone(name: str) -> None:
    case = case_of(name)
    model = model_of(spec_of(case))
    batch = batches_of(case, [], 1)[0]
    packed = model(batch.tokens, batch.documents)
    for row in range(2):
        for number in batch.documents.number[row].unique():
            where = batch.documents.number[row] == number
            alone = model(batch.tokens[row, where][None])[0]
            assert (packed[row, where] - alone).abs().max() <= 1e-13 * packed.abs().max()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kept", [True, False])
def test_text_is_written_with_it(name: str, kept: bool) -> None:
    """Token by token what the whole sequence says."""
    spec = for_one_device(spec_of(case_of(name, attention="reference")), cuda=False)
    expected_kernel = "reference" if "score_cap" in ATTENTIONS[name] else "sdpa"
    assert spec.kernels.attention == expected_kernel
    mesh = Mesh({}, rank=0, device=torch.device("cpu"))
    split = build_split_model(spec, mesh=mesh)
    (model,) = split.chunks
    drawn = model_of(spec_of(case_of(name, attention=expected_kernel)))
    model.load_state_dict(drawn.state_dict())
    here = ModelOnRanks.of_weights(spec, mesh, split)
    draw = Draw(Sampling(temperature=0.0))
    how = whole_passes(here, draw)
    if kept:
        how = cached_passes(here, draw, rows=1, length=TOKENS)
    prompt = [3, 1, 4]
    limits = Limits(tokens=8, max_seq_len=TOKENS)
    with how as passes:
        (written,) = generate(passes, [Prompt(prompt)], tokenizer=ByteTokenizer(), limits=limits, rows=1, seed=0)
    ids = list(written.ids)
    logits = model(torch.tensor([prompt + ids[:-1]]))[0]
    assert logits.argmax(-1)[len(prompt) - 1 :].tolist() == ids


@pytest.mark.parametrize("T", [1, 5, 12, 13])
@pytest.mark.parametrize("size", [1, 3, 4, 12, 40])
def test_pairs_are_those_that_a_mask_leaves(T: int, size: int) -> None:
    """Pairs on an edge are half inside: a query with itself, and with the first key that a window leaves out."""
    window = 0.0
    chunk = 0.0
    for t in range(T):
        for s in range(t + 1):
            window += _inside(t - s, size)
            if t // size == s // size:
                chunk += _inside(t - s, T)
    assert Sight(window=size).twice_the_pairs(T) == 2 * window
    assert Sight(chunk=size).twice_the_pairs(T) == 2 * chunk
    assert Sight().twice_the_pairs(T) == T * T


def _inside(distance: int, size: int) -> float:
    """How much of a pair counts."""
    if distance in (0, size):
        return 0.5
    return float(distance < size)


def test_windows_make_attention_linear() -> None:
    spec = spec_of(case_of("window")).model
    far = [flops_per_sequence(spec, seq_len=length) for length in (1000, 2000, 3000)]
    assert far[1] - far[0] == far[2] - far[1]
    plain = spec_of(replace(case_of("window"), options="")).model
    full = [flops_per_sequence(plain, seq_len=length) for length in (1000, 2000, 3000)]
    assert full[2] - full[1] > full[1] - full[0]
    assert far[0] < full[0]
