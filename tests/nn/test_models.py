"""Kinds of decoders against their equations written out, and against transformers."""

from collections.abc import Callable
from importlib import import_module
from math import log
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megaspec.nn.decoder import Decoder
from megaspec.parallelism.mesh import Mesh
from megaspec.runtime.build import build, initialise
from tests.families import FAMILIES
from tests.parity.cases import SEQUENCES, TOKENS, VOCAB, Case, batches_of, spec_of

EPS = 1e-5
HEADS, SIZE = 4, 8


def model_of(case: Case) -> tuple[Decoder, dict[str, Tensor]]:
    """A model, and weights by name; norms and biases get random values too, so that each of them counts."""
    built = build(spec_of(case), mesh=Mesh({}, rank=0, device=torch.device("cpu")))
    initialise(built)
    draw = torch.Generator().manual_seed(11)
    for weight in built.parameters.values():
        if weight.dim() == 1:
            weight.data += 0.3 * torch.randn(weight.shape, generator=draw, dtype=weight.dtype)
    return built.model, {n: p.detach() for n, p in built.model.named_parameters(remove_duplicate=False)}


def attend(q: Tensor, k: Tensor, v: Tensor, window: int = TOKENS) -> Tensor:
    """[N, T, H], [K, T, H], [K, T, H] -> [T, N · H], one head after the other."""
    outs = []
    for n in range(len(q)):
        kv = n * len(k) // len(q)
        scores = q[n] @ k[kv].t() / SIZE**0.5
        hidden = torch.full_like(scores, float("-inf"))
        scores = scores + torch.triu(hidden, diagonal=1) + torch.tril(hidden, diagonal=-window)
        outs.append(scores.softmax(-1) @ v[kv])
    return torch.cat(outs, dim=-1)


def heads(x: Tensor) -> Tensor:
    """[T, N · H] -> [N, T, H]"""
    return x.view(len(x), -1, SIZE).transpose(0, 1)


def llama(w: dict[str, Tensor], tokens: Tensor, kv: int) -> Tensor:
    """One sequence, [T] -> [T, V]."""
    angle = torch.outer(torch.arange(len(tokens)).double(), 10_000.0 ** (-torch.arange(0, SIZE, 2).double() / SIZE))
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * w[f"{name}.weight"]

    def turn(x: Tensor) -> Tensor:
        return x * cos + torch.cat((-x[..., SIZE // 2 :], x[..., : SIZE // 2]), dim=-1) * sin

    x = w["embed.weight"][tokens]
    for i in range(2):
        b = f"layers.{i}"
        q, k, v = (norm(x, f"{b}.norm1") @ w[f"{b}.attn.wqkv.weight"].t()).split([32, kv * SIZE, kv * SIZE], dim=-1)
        x = x + attend(turn(heads(q)), turn(heads(k)), heads(v)) @ w[f"{b}.attn.wo.weight"].t()
        gate, up = (norm(x, f"{b}.norm2") @ w[f"{b}.mlp.w_gate_up.weight"].t()).chunk(2, dim=-1)
        x = x + (gate * torch.sigmoid(gate) * up) @ w[f"{b}.mlp.w_down.weight"].t()
    return norm(x, "norm") @ w["head.weight"].t()


def gpt(w: dict[str, Tensor], tokens: Tensor, kv: int) -> Tensor:
    """One sequence, [T] -> [T, V]."""

    def norm(x: Tensor, name: str) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].t() + w[f"{name}.bias"]

    x = w["embed.weight"][tokens] + w["positions.weight"][: len(tokens)]
    for i in range(2):
        b = f"layers.{i}"
        q, k, v = linear(norm(x, f"{b}.norm1"), f"{b}.attn.wqkv").split([32, kv * SIZE, kv * SIZE], dim=-1)
        x = x + linear(attend(heads(q), heads(k), heads(v)), f"{b}.attn.wo")
        h = linear(norm(x, f"{b}.norm2"), f"{b}.mlp.w_up")
        h = 0.5 * h * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (h + 0.044715 * h**3)))
        x = x + linear(h, f"{b}.mlp.w_down")
    return norm(x, "norm") @ w["head.weight"].t()


def rms(x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt()


def turned(x: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotary positions, [N, T, H] -> [N, T, H]."""
    return turned_by(x, base ** (-torch.arange(0, SIZE, 2).double() / SIZE))


def turned_by(x: Tensor, frequencies: Tensor) -> Tensor:
    """[N, T, R] -> [N, T, R], by R / 2 frequencies."""
    angle = torch.outer(torch.arange(x.shape[1]).double(), frequencies)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    half = len(frequencies)
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def attention(
    x: Tensor,
    w: dict[str, Tensor],
    name: str,
    kv: int,
    *,
    turn: Callable[[Tensor], Tensor] = turned,
    window: int = TOKENS,
) -> Tensor:
    """[T, D] -> [T, D]"""
    qkv = x @ w[f"{name}.wqkv.weight"].t()
    if f"{name}.wqkv.bias" in w:
        qkv = qkv + w[f"{name}.wqkv.bias"]
    q, k, v = map(heads, qkv.split([32, kv * SIZE, kv * SIZE], dim=-1))
    return attend(turn(q), turn(k), v, window) @ w[f"{name}.wo.weight"].t()


def gated(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    """-> gate and up of a feed-forward layer."""
    return (x @ w[f"{name}.w_gate_up.weight"].t()).chunk(2, dim=-1)


def swiglu(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    gate, up = gated(x, w, name)
    return (gate * torch.sigmoid(gate) * up) @ w[f"{name}.w_down.weight"].t()


def post(w: dict[str, Tensor], tokens: Tensor, kv: int) -> Tensor:
    """x + norm(f(x)). One sequence, [T] -> [T, V]."""
    x = w["embed.weight"][tokens]
    for i in range(2):
        b = f"layers.{i}"
        x = x + rms(attention(x, w, f"{b}.attn", kv)) * w[f"{b}.post_norm1.weight"]
        x = x + rms(swiglu(x, w, f"{b}.mlp")) * w[f"{b}.post_norm2.weight"]
    return rms(x) * w["norm.weight"] @ w["head.weight"].t()


def sandwich(w: dict[str, Tensor], tokens: Tensor, kv: int) -> Tensor:
    """x + norm(f(norm(x))), norms times 1 + w, tanh GELU in the gate, the embedding scaled. [T] -> [T, V]."""

    def norm(x: Tensor, name: str) -> Tensor:
        return rms(x) * (1 + w[f"{name}.weight"])

    x = 2.5 * w["embed.weight"][tokens]
    for i in range(2):
        b = f"layers.{i}"
        x = x + norm(attention(norm(x, f"{b}.norm1"), w, f"{b}.attn", kv), f"{b}.post_norm1")
        gate, up = gated(norm(x, f"{b}.norm2"), w, f"{b}.mlp")
        gate = 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
        x = x + norm((gate * up) @ w[f"{b}.mlp.w_down.weight"].t(), f"{b}.post_norm2")
    return norm(x, "norm") @ w["head.weight"].t()


def parallel(w: dict[str, Tensor], tokens: Tensor, kv: int) -> Tensor:
    """x + attention(norm(x)) + mlp(norm(x)), a LayerNorm without bias, a squared ReLU with biases. [T] -> [T, V]."""

    def norm(x: Tensor, name: str) -> Tensor:
        return rms(x - x.mean(-1, keepdim=True)) * w[f"{name}.weight"]

    x = w["embed.weight"][tokens]
    for i in range(2):
        b = f"layers.{i}"
        h = norm(x, f"{b}.norm1")
        up = (h @ w[f"{b}.mlp.w_up.weight"].t() + w[f"{b}.mlp.w_up.bias"]).clamp(min=0) ** 2
        down = up @ w[f"{b}.mlp.w_down.weight"].t() + w[f"{b}.mlp.w_down.bias"]
        x = x + attention(h, w, f"{b}.attn", kv) + down
    return norm(x, "norm") @ w["head.weight"].t()


def flat(w: dict[str, Tensor], tokens: Tensor, kv: int) -> Tensor:
    """x + attention(norm(x)) in one layer, x + mlp(norm(x)) in the next, without positions. [T] -> [T, V]."""
    x = w["embed.weight"][tokens]
    h = rms(x) * w["layers.0.norm1.weight"]
    x = x + attention(h, w, "layers.0.attn", kv, turn=unturned)
    x = x + swiglu(rms(x) * w["layers.1.norm1.weight"], w, "layers.1.mlp")
    return rms(x) * w["norm.weight"] @ w["head.weight"].t()


def unturned(x: Tensor) -> Tensor:
    return x


def near(x: Tensor) -> Tensor:
    """Half of each head, YaRN of 4 from 8 tokens on: of two frequencies the first stays and the second is divided."""
    half = turned_by(x[..., : SIZE // 2], torch.tensor([1.0, 0.01 / 4], dtype=torch.float64))
    factor = 0.1 * log(4.0) + 1.0
    return torch.cat((factor * half, x[..., SIZE // 2 :]), dim=-1)


def far(x: Tensor) -> Tensor:
    """A base that has grown with the sequence, by 2 from 4 tokens on."""
    growth = 2 * x.shape[1] / 4 - 1
    return turned(x, 10_000.0 * growth ** (SIZE / (SIZE - 2)))


def mixed(w: dict[str, Tensor], tokens: Tensor, kv: int) -> Tensor:
    """Three layers that turn in three ways, the first one with a window. [T] -> [T, V]."""
    x = w["embed.weight"][tokens]
    for i, (turn, window) in enumerate([(near, 3), (unturned, TOKENS), (far, TOKENS)]):
        b = f"layers.{i}"
        h = rms(x) * w[f"{b}.norm1.weight"]
        x = x + attention(h, w, f"{b}.attn", kv, turn=turn, window=window)
        x = x + swiglu(rms(x) * w[f"{b}.norm2.weight"], w, f"{b}.mlp")
    return rms(x) * w["norm.weight"] @ w["head.weight"].t()


def ends(w: dict[str, Tensor], tokens: Tensor, kv: int) -> Tensor:
    """Branches times 0.6, gpt-oss's feed-forward layer, logits with a bias, a factor and a cap. [T] -> [T, V]."""
    x = w["embed.weight"][tokens]
    for i in range(2):
        b = f"layers.{i}"
        x = x + 0.6 * attention(rms(x) * w[f"{b}.norm1.weight"], w, f"{b}.attn", kv)
        gate, up = gated(rms(x) * w[f"{b}.norm2.weight"], w, f"{b}.mlp")
        bias = w[f"{b}.mlp.w_gate_up.bias"].chunk(2)
        gate = (gate + bias[0]).clamp(max=0.5)
        up = (up + bias[1]).clamp(-0.5, 0.5)
        h = (up + 1) * gate / (1 + torch.exp(-1.702 * gate))
        x = x + 0.6 * (h @ w[f"{b}.mlp.w_down.weight"].t() + w[f"{b}.mlp.w_down.bias"])
    product = rms(x) * w["norm.weight"] @ w["head.weight"].t() + w["head.bias"]
    return 1.5 * torch.tanh(0.7 * product / 1.5)


EQUATIONS = {
    "llama": llama,
    "gpt": gpt,
    "post": post,
    "sandwich": sandwich,
    "parallel": parallel,
    "flat": flat,
    "mixed": mixed,
    "ends": ends,
}


def test_every_family_is_held_to_its_equations() -> None:
    assert set(EQUATIONS) == set(FAMILIES), "add its equations to EQUATIONS"


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
@pytest.mark.parametrize(
    ("family", "kv", "tied"),
    [
        ("llama", 2, False),
        ("llama", 4, True),
        ("gpt", 4, True),
        ("post", 2, False),
        ("sandwich", 2, True),
        ("parallel", 2, False),
        ("flat", 2, False),
        ("mixed", 2, False),
        ("ends", 2, True),
    ],
)
def test_logits_and_loss_are_the_equations(family: str, kv: int, tied: bool, attention: str) -> None:
    n_layers = 3 if family == "mixed" else 2
    case = Case(family=family, kv_heads=kv, tied=tied, attention=attention, mask="uneven", n_layers=n_layers)
    model, weights = model_of(case)
    batch = batches_of(case, [], 1)[0]
    expected = torch.stack([EQUATIONS[family](weights, tokens, kv) for tokens in batch.tokens])
    found = model(batch.tokens)
    assert found.shape == (SEQUENCES, TOKENS, VOCAB)
    assert (found - expected).abs().max() <= 1e-13 * expected.abs().max()
    loss = model.loss(batch.tokens, batch.labels, batch.mask.double())
    truth = F.cross_entropy(expected[batch.mask], batch.labels[batch.mask], reduction="sum")
    assert abs(loss - truth) <= 1e-13 * truth


@pytest.mark.parametrize("family", ["llama", "gpt", "post", "sandwich", "parallel", "ends"])
def test_a_document_is_computed_as_if_it_were_alone(family: str) -> None:
    model, _ = model_of(Case(family=family, documents=True))
    batch = batches_of(Case(documents=True), [], 1)[0]
    packed = model(batch.tokens, batch.documents)
    for row in range(SEQUENCES):
        for number in batch.documents.number[row].unique():
            where = batch.documents.number[row] == number
            alone = model(batch.tokens[row, where][None])[0]
            assert (packed[row, where] - alone).abs().max() <= 1e-13 * packed.abs().max()


@pytest.fixture
def transformers() -> ModuleType:
    """Loaded where a test asks for it: it takes seconds, which whoever collects tests need not wait."""
    return import_module("transformers")


def test_llama_equals_transformers(transformers: ModuleType) -> None:
    model, w = model_of(Case(kv_heads=2))
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=TOKENS,
        rms_norm_eps=EPS,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    theirs = {"model.embed_tokens": w["embed.weight"], "model.norm": w["norm.weight"], "lm_head": w["head.weight"]}
    for i in range(2):
        ours, block = f"layers.{i}", f"model.layers.{i}"
        q, k, v = w[f"{ours}.attn.wqkv.weight"].split([32, 16, 16])
        gate, up = w[f"{ours}.mlp.w_gate_up.weight"].chunk(2)
        theirs |= {
            f"{block}.input_layernorm": w[f"{ours}.norm1.weight"],
            f"{block}.post_attention_layernorm": w[f"{ours}.norm2.weight"],
            f"{block}.self_attn.q_proj": q,
            f"{block}.self_attn.k_proj": k,
            f"{block}.self_attn.v_proj": v,
            f"{block}.self_attn.o_proj": w[f"{ours}.attn.wo.weight"],
            f"{block}.mlp.gate_proj": gate,
            f"{block}.mlp.up_proj": up,
            f"{block}.mlp.down_proj": w[f"{ours}.mlp.w_down.weight"],
        }
    compare(model, transformers.LlamaForCausalLM(config), {f"{n}.weight": t for n, t in theirs.items()})


def test_gpt2_equals_transformers(transformers: ModuleType) -> None:
    model, w = model_of(Case(family="gpt", tied=True))
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=TOKENS,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_inner=48,
        layer_norm_epsilon=EPS,
        attn_implementation="eager",
    )
    theirs = {"transformer.wte.weight": w["embed.weight"], "transformer.wpe.weight": w["positions.weight"]}
    names = {"ln_1": "norm1", "ln_2": "norm2", "attn.c_attn": "attn.wqkv", "attn.c_proj": "attn.wo"}
    names |= {"mlp.c_fc": "mlp.w_up", "mlp.c_proj": "mlp.w_down"}
    for kind in ("weight", "bias"):
        theirs[f"transformer.ln_f.{kind}"] = w[f"norm.{kind}"]
        for i in range(2):
            for their, our in names.items():
                value = w[f"layers.{i}.{our}.{kind}"]
                theirs[f"transformer.h.{i}.{their}.{kind}"] = value.t() if value.dim() == 2 else value
    theirs["lm_head.weight"] = w["head.weight"]
    compare(model, transformers.GPT2LMHeadModel(config), theirs)


def compare(model: Decoder, other: torch.nn.Module, weights: dict[str, Tensor]) -> None:
    """Their fp32 rotary table limits how close fp64 logits come."""
    other = other.double().eval()
    missing, unexpected = other.load_state_dict({n: t.contiguous() for n, t in weights.items()}, strict=False)
    assert not unexpected
    assert not [n for n in missing if not n.endswith(("attn.bias", "attn.masked_bias", "inv_freq"))]
    tokens = batches_of(Case(), [], 1)[0].tokens
    with torch.no_grad():
        expected = other(tokens).logits
        found = model(tokens)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
