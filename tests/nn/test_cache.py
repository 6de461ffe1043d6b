"""Keys and values that are kept: each token's logits are those of the whole forward pass, whatever decoder it is."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from megaspec.core.errors import UsageError
from megaspec.core.part_facts import Sight
from megaspec.nn.attention.cache import CachedCore, NewTokens, cached
from megaspec.nn.attention.module import Attention, CausalCore
from megaspec.nn.decoder import Decoder
from megaspec.nn.moe.router import Router
from tests.nn.random_specs import TOKENS, decoders
from tests.nn.test_random_specs import OPTIONS, model_of

TOLERANCE = 1e-12


def logits_of(
    decoder: Decoder, tokens_BT: Tensor, *, counts: Sequence[int], rows: Sequence[int], starts: bool, at: Sequence[int]
) -> Tensor:
    """[B, V] behind the last token of each row. `at`: position of each row's first token."""
    B, T = tokens_BT.shape
    last_B = torch.tensor([begin + count - 1 for begin, count in zip(at, counts, strict=True)])
    positions_BT = torch.minimum(torch.tensor(at)[:, None] + torch.arange(T), last_B[:, None])
    lengths = (last_B + 1).tolist()
    new = NewTokens(
        rows=torch.tensor(rows),
        counts=torch.tensor(counts),
        starts=starts,
        longest=max(lengths),
        leading=list(rows) == list(range(B)),
    )
    context = decoder.context_of_rows(positions_BT, lengths=lengths, length=T, way=new)
    x_BTD = decoder.body(tokens_BT, context)
    logits_BTV = decoder.finish(x_BTD, decoder.head)
    return logits_BTV[torch.arange(B), torch.tensor(counts) - 1]


def frequencies(decoder: Decoder, length: int) -> list[list[int]]:
    return [rope.effective_lengths([length]) for rope in decoder.ropes]


@torch.no_grad()
def check_growing(decoder: Decoder, prompts: Sequence[int], *, upto: int) -> int:
    """Grows texts of random tokens side by side, from prompts of so many tokens, and holds each token's logits to those
    of its text alone. -> how many were computed from what was kept"""
    rows = [2, 0, 3][: len(prompts)]
    draw = torch.Generator().manual_seed(5)
    tokens_BS = torch.randint(decoder.embed.vocab_size, (len(prompts), upto), generator=draw)
    n_kept = 0
    with cached([decoder], rows=4, length=upto):
        padded = tokens_BS[:, : max(prompts)]
        zero = [0] * len(prompts)
        found_BV = logits_of(decoder, padded, counts=prompts, rows=rows, starts=True, at=zero)
        check(decoder, tokens_BS, prompts, found_BV)
        for step in range(upto - max(prompts)):
            lengths = [one + step + 1 for one in prompts]
            for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
                if frequencies(decoder, length) != frequencies(decoder, length - 1):
                    one = tokens_BS[number : number + 1, :length]
                    found_V = logits_of(decoder, one, counts=[length], rows=[row], starts=True, at=[0])
                    check(decoder, tokens_BS[number : number + 1], [length], found_V)
            on = [n for n, x in enumerate(lengths) if frequencies(decoder, x) == frequencies(decoder, x - 1)]
            if not on:
                continue
            places = [lengths[n] - 1 for n in on]
            one_each = tokens_BS[torch.tensor(on), torch.tensor(places)][:, None]
            # a second one is padding
            fed = torch.cat((one_each, one_each), dim=1)
            found_BV = logits_of(
                decoder, fed, counts=[1] * len(on), rows=[rows[n] for n in on], starts=False, at=places
            )
            check(decoder, tokens_BS[torch.tensor(on)], [lengths[n] for n in on], found_BV)
            n_kept += len(on)
    assert all(type(m) is not CachedCore for m in decoder.modules())
    return n_kept


@torch.no_grad()
def greedy(decoder: Decoder, prompt: Sequence[int], *, tokens: int) -> list[int]:
    """The likeliest tokens that go on from a prompt, from what is kept."""
    ids = list(prompt)
    with cached([decoder], rows=1, length=len(prompt) + tokens):
        while len(ids) < len(prompt) + tokens:
            starts = len(ids) == len(prompt) or frequencies(decoder, len(ids)) != frequencies(decoder, len(ids) - 1)
            new = ids if starts else ids[-1:]
            at = len(ids) - len(new)
            logits_1V = logits_of(decoder, torch.tensor([new]), counts=[len(new)], rows=[0], starts=starts, at=[at])
            ids.append(int(logits_1V[0].argmax()))
    return ids[len(prompt) :]


def check(decoder: Decoder, tokens_BS: Tensor, lengths: Sequence[int], found_BV: Tensor) -> None:
    cores = {}
    for module in decoder.modules():
        if isinstance(module, Attention):
            cores[module] = module.core
            core = module.core
            module.core = CausalCore(core.kernel, 0.0, core.site, sight=core.sight, scoring=core.scoring)
    for tokens_S, length, found_V in zip(tokens_BS, lengths, found_BV, strict=True):
        wanted_V = decoder(tokens_S[None, :length])[0, -1]
        assert (found_V - wanted_V).abs().max() <= TOLERANCE * max(1.0, float(wanted_V.abs().max()))
    for module, core in cores.items():
        module.core = core


def check_model(model: dict[str, Any]) -> int:
    decoder, _ = model_of(model, torch.float64)
    for module in decoder.modules():
        if isinstance(module, Router) and module.expert_bias is not None:
            module.expert_bias.normal_(generator=torch.Generator().manual_seed(2))
    return check_growing(decoder, [3, 6, 1], upto=2 * TOKENS)


@settings(max_examples=60, **OPTIONS)
@given(model=decoders())
def test_logits_are_those_of_the_whole_forward(model: dict[str, Any]) -> None:
    check_model(model)


@pytest.mark.slow
@settings(max_examples=600, **OPTIONS)
@given(model=decoders())
def test_logits_of_many_decoders(model: dict[str, Any]) -> None:
    check_model(model)


def test_what_is_kept_is_what_a_mask_leaves() -> None:
    core = CausalCore(None, 0.0, "x", sight=Sight(window=5))
    assert CachedCore(core, rows=2, length=9).places == 5
    assert CachedCore(core, rows=2, length=3).places == 3
    core = CausalCore(None, 0.0, "x", sight=Sight(chunk=4))
    kept = CachedCore(core, rows=2, length=9)
    assert kept.places == 4
    places = torch.arange(4)
    # positions 4, 5 and 6 of the second chunk, behind 3 of the first
    assert kept._seen(torch.tensor([6, 3, 0]), places).tolist() == [
        [True, True, True, False],
        [True, True, True, True],
        [True, False, False, False],
    ]


MODEL = {
    "kind": "decoder",
    "n_layers": 2,
    "d_model": 16,
    "n_heads": 4,
    "n_kv_heads": 2,
    "d_head": 4,
    "d_ffn": 20,
    "vocab_size": 24,
    "vocab_pad_to": 1,
    "max_seq_len": 2 * TOKENS,
}


@pytest.mark.parametrize(
    "wrong",
    [
        # a place too few; what lies in no place yet is seen
        lambda core: setattr(core, "places", core.places - 1),
        lambda core: setattr(core, "_seen", lambda last, place: torch.ones(len(last), len(place), dtype=torch.bool)),
    ],
)
def test_a_cache_that_keeps_something_else_is_found(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, _ = model_of(MODEL | {"attention": {"kind": "gqa", "mask": {"kind": "window", "size": 5}}}, torch.float64)
    assert check_growing(decoder, [3, 6], upto=12) > 0
    made = CachedCore.__init__

    def spoilt(core: CachedCore, *what: Any, **more: Any) -> None:
        made(core, *what, **more)
        wrong(core)

    monkeypatch.setattr(CachedCore, "__init__", spoilt)
    with pytest.raises(AssertionError):
        check_growing(decoder, [3, 6], upto=12)


@pytest.mark.parametrize(("kind", "kept"), [("none", 30), ("dynamic", 18), ("longrope", 27)])
def test_texts_start_anew_where_their_frequencies_change(kind: str, kept: int) -> None:
    scaling: dict[str, Any] = {"kind": kind}
    if kind == "dynamic":
        scaling |= {"factor": 2.0, "original_max_seq_len": 8}
    if kind == "longrope":
        scaling |= {"short_factor": [1.0, 1.5], "long_factor": [3.0, 5.0], "original_max_seq_len": 8, "factor": 2.0}
    decoder, _ = model_of(MODEL | {"positions": {"kind": "rotary", "scaling": scaling}}, torch.float64)
    # lengths 4 to 13, 2 to 11 and 3 to 12
    assert check_growing(decoder, [3, 1, 2], upto=13) == kept


class _Shifted(Attention):
    """Of a plug-in: it may look at other tokens in any way."""


def test_what_can_t_be_cached_is_refused() -> None:
    decoder, _ = model_of(MODEL, torch.float64)
    decoder.layers["1"].attn.__class__ = _Shifted
    refused = pytest.raises(UsageError, match=r"layers\.1\.attn is a _Shifted, which keeps no keys and values")
    with refused, cached([decoder], rows=1, length=4):
        pass
    assert type(decoder.layers["0"].attn.core) is CausalCore
