"""Rules about number formats."""

from collections.abc import Iterator
from math import gcd
from typing import NamedTuple

from megaspec.core.divisors import multiples
from megaspec.core.errors import Problem
from megaspec.core.problems import one_of
from megaspec.model.kinds import mla_of
from megaspec.optim.spec import AdamWSpec
from megaspec.precision.spec import Fp8Precision
from megaspec.rules.case import Case
from megaspec.rules.ways import Way, way_out

# The compute capabilities that a recipe runs on: from the first to the last.
_FP8_SM = {"tensorwise": (89, 999), "blockwise": (90, 99), "mxfp8": (100, 999)}
# Numbers that fp8 matrix products take at a time along each side.
_FP8_UNIT = {"tensorwise": 16, "blockwise": 16, "mxfp8": 32}


def precision_runs_on_the_gpu(case: Case) -> Problem | None:
    """bf16 needs a GPU of sm80 or newer; CPUs compute it."""
    kind, sm = case.recipe.precision.kind, case.target.sm
    if kind != "bf16" or case.target.device != "cuda" or sm >= 80:
        return None
    return Problem("precision.kind", f"precision.kind=bf16 needs sm80, this GPU is sm{sm}; set precision=fp16")


def fp8_runs_on_the_gpu(case: Case) -> Problem | None:
    """fp8 needs a GPU of sm89 or newer, blockwise scales Hopper (sm90), mxfp8 Blackwell (sm100) or newer."""
    precision = case.recipe.precision
    if not isinstance(precision, Fp8Precision):
        return None
    if case.target.device != "cuda":
        return Problem("precision.kind", "precision.kind=fp8 needs a GPU, the target is cpu; set precision=bf16")
    sm, (need, last) = case.target.sm, _FP8_SM[precision.recipe]
    if need <= sm <= last:
        return None
    least = _FP8_SM["tensorwise"][0]
    if sm < least:
        best = "bf16" if sm >= 80 else "fp16"
        return Problem(
            "precision.kind", f"precision.kind=fp8 needs sm{least}, this GPU is sm{sm}; set precision={best}"
        )
    runs = one_of([name for name, (first, end) in _FP8_SM.items() if first <= sm <= end])
    needed = f"sm{need}" if sm < need else f"Hopper (sm{need})"
    text = f"precision.recipe={precision.recipe} needs {needed}, this GPU is sm{sm}; set precision.recipe={runs}"
    return Problem("precision.recipe", text)


def fp8_leaves_layers_to_itself(case: Case) -> Problem | None:
    """The layers at both ends that stay in bf16 are fewer than the layers that there are."""
    precision, n_layers = case.recipe.precision, case.recipe.model.n_layers
    if not isinstance(precision, Fp8Precision):
        return None
    first, last = precision.first_layers_bf16, precision.last_layers_bf16
    if first + last < n_layers:
        return None
    name, value = ("first_layers_bf16", first) if first >= last else ("last_layers_bf16", last)
    other = f"{first} + {last} = " if first and last else ""
    text = f"precision.{name}={value}: {other}{first + last} layers in bf16 must be below model.n_layers={n_layers}"
    room = n_layers - 1 - (first + last - value)
    return Problem(f"precision.{name}", f"{text}; try {room}" if room >= 0 else f"{text}; lower both")


def fp8_gathers_sharded_weights(case: Case) -> Problem | None:
    """Only weights that ranks share out are gathered."""
    precision, strategy = case.recipe.precision, case.recipe.parallelism.dp_strategy
    if not isinstance(precision, Fp8Precision) or not precision.gather_fp8 or strategy != "replicate":
        return None
    text = "precision.gather_fp8=true needs sharded weights, parallelism.dp_strategy is replicate"
    return Problem("precision.gather_fp8", f"{text}; set it to false, or dp_strategy=zero1, zero2, fsdp or hsdp")


def fp8_products_have_whole_tiles(case: Case) -> Problem | None:
    """Every side of an fp8 matrix product on a rank is a multiple of 16, with mxfp8 of 32."""
    precision = case.recipe.precision
    if not isinstance(precision, Fp8Precision):
        return None
    unit = _FP8_UNIT[precision.recipe]
    for side in _sides(case):
        if side.value * side.times % side.parts == 0 and side.value * side.times // side.parts % unit:
            words = f" · {side.times}" if side.times > 1 else ""
            words += f" / {side.parts}" if side.parts > 1 else ""
            text = f"{side.key}={side.value}{words} must be a multiple of {unit} with precision.kind=fp8 and"
            text += f" precision.recipe={precision.recipe}"
            step = unit * side.parts // gcd(unit * side.parts, side.times)
            ways = Way(side.key, multiples(side.value, step), side.value, most=2)
            return Problem(side.key, f"{text}; {way_out(case, ways)}, or precision=bf16")
    return None


class _Side(NamedTuple):
    """A width of a matrix product on a rank: value · times / parts."""

    key: str
    value: int
    times: int = 1
    parts: int = 1


def _sides(case: Case) -> Iterator[_Side]:
    """Widths of the matrix products of a block."""
    model, moe, mla, tp = case.recipe.model, case.moe, case.mla, case.tp
    heads, kv_heads = max(1, model.n_heads // tp), max(1, model.n_kv_heads // tp)
    yield _Side("model.d_model", model.d_model)
    yield _Side("model.d_head", model.d_head, times=heads)
    if mla is None:
        yield _Side("model.d_head", model.d_head, times=kv_heads)
    else:
        yield _Side("model.mla.d_value", mla.d_value, times=heads)
        yield _Side("model.mla.q_rank", mla.q_rank or 0)
        yield _Side("model.mla.kv_rank", mla.kv_rank)
        yield _Side("model.mla.d_rope", mla.d_rope)
    if case.dense_layers:
        yield _Side("model.d_ffn", model.d_ffn, parts=tp)
    if moe is not None:
        yield _Side("model.moe.d_expert", moe.d_expert, parts=case.etp)
        yield _Side("model.moe.d_shared", moe.d_shared or 0, parts=tp)
    yield _Side("data.seq_len", case.recipe.data.seq_len, times=case.recipe.train.micro_batch, parts=case.cp)


def narrow_state_is_sharded(case: Case) -> Problem | None:
    """Narrow master weights and moments need an optimizer state that ranks share out."""
    narrow = _narrow(case)
    if narrow is None or case.recipe.parallelism.dp_strategy != "replicate":
        return None
    key, value = narrow
    text = f"{key}={value} needs a sharded optimizer, parallelism.dp_strategy is replicate"
    return Problem(key, f"{text}; try parallelism.dp_strategy=zero1, or fp32")


def narrow_state_goes_with_narrow_weights(case: Case) -> Problem | None:
    """Narrow moments need weights of 16 bits or fewer; an fp16 master, the rest of a bf16 weight, needs bf16."""
    narrow, kind = _narrow(case), case.recipe.precision.kind
    if narrow is None or kind in ("bf16", "fp8"):
        return None
    key, value = narrow
    if kind == "fp16" and not key.endswith("master"):
        return None
    return Problem(key, f"{key}={value} needs precision=bf16 or precision=fp8, it is {kind}; set {key}=fp32")


def scaled_state_is_of_own_heads(case: Case) -> Problem | None:
    """Moments of fp16 and fp8, scaled by rank, are for key and value heads that one tensor-parallel rank holds."""
    # beside other queries a copy of a head has another scale, is rounded another way, and parts from the first
    optim, tp, model = case.recipe.optim, case.recipe.parallelism.tp, case.recipe.model
    if not isinstance(optim, AdamWSpec) or tp <= model.n_kv_heads or mla_of(model) is not None:
        return None
    for name in ("exp_avg", "exp_avg_sq"):
        value = getattr(optim.formats, name)
        if value in ("fp16", "fp8"):
            key = f"optim.formats.{name}"
            text = f"{key}={value} needs parallelism.tp={tp} to be at most model.n_kv_heads={model.n_kv_heads}"
            return Problem(key, f"{text}: several ranks hold a head otherwise; set {key}=bf16")
    return None


def _narrow(case: Case) -> tuple[str, str] | None:
    """The first optimizer format that is narrower than fp32."""
    optim = case.recipe.optim
    if not isinstance(optim, AdamWSpec):
        return None
    formats = [(name, getattr(optim.formats, name)) for name in ("master", "exp_avg", "exp_avg_sq")]
    return next(((f"optim.formats.{name}", value) for name, value in formats if value != "fp32"), None)
