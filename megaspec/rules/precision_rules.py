"""Rules about number formats."""

from collections.abc import Iterator
from math import gcd
from typing import NamedTuple

from megaspec.core.divisors import divisors, multiples
from megaspec.core.errors import Problem
from megaspec.core.problems import one_of
from megaspec.core.units import counted
from megaspec.optim.spec import AdamWSpec
from megaspec.precision.spec import BLACKWELL_SM, Fp8Precision, fp8_recipe
from megaspec.rules.case import Case
from megaspec.rules.ways import Way, way_out

# The first compute capability whose tensor cores take bf16.
_BF16_SM = 80
# The compute capabilities that a recipe runs on: from the first to the last.
_FP8_SM = {
    "tensorwise": (89, 999),
    "delayed": (89, 999),
    "rowwise": (89, 999),
    "blockwise": (90, 99),
    **BLACKWELL_SM,
}
# What each side of an fp8 matrix product is a multiple of: numbers that the tensor cores take at a time, and blocks
# that share a scale, so that they are the same however ranks divide a matrix.
_FP8_UNIT = {"tensorwise": 16, "delayed": 16, "rowwise": 16, "blockwise": 128, "mxfp8": 32, "nvfp4": 32}
# Recipes whose products of blocks there are in e4m3 alone.
_ONLY_E4M3 = ("blockwise", "nvfp4")
# Recipes whose scales a grouped product takes: of rows, or of something that rows lie in.
_OF_TENSORS = ("tensorwise", "delayed")
_OF_ROWS = ("tensorwise", "delayed", "rowwise")


class _GemmSide(NamedTuple):
    """A side of a matrix product on a rank, of length value · times / parts."""

    key: str
    value: int
    times: int = 1
    parts: int = 1
    what: str = ""
    """What there are `times` of."""
    axis: str = ""
    """What divides it into `parts`: tp, etp or cp."""


def precision_runs_on_the_gpu(case: Case) -> Problem | None:
    """bf16 needs a GPU of sm80 or newer; CPUs compute it."""
    kind = case.recipe.precision.kind
    sm = case.target.sm
    if kind != "bf16" or case.target.device != "cuda" or sm >= _BF16_SM:
        return None
    text = f"precision.kind=bf16 needs sm{_BF16_SM}, this GPU is sm{sm}; set precision=fp16"
    return Problem("precision.kind", text)


def fp8_runs_on_the_gpu(case: Case) -> Problem | None:
    """fp8 needs a GPU of sm89 or newer, blockwise Hopper (sm90), mxfp8 and nvfp4 Blackwell (sm100); CPUs compute it."""
    precision = case.recipe.precision
    if not isinstance(precision, Fp8Precision) or case.target.device != "cuda":
        return None
    sm = case.target.sm
    first, last = _FP8_SM[precision.recipe]
    if first <= sm <= last:
        return None
    least, _ = _FP8_SM["tensorwise"]
    if sm < least:
        best = "fp16"
        if sm >= _BF16_SM:
            best = "bf16"
        text = f"precision.kind=fp8 needs sm{least}, this GPU is sm{sm}; set precision={best}"
        return Problem("precision.kind", text)
    needs = f"needs Hopper (sm{first})"
    if precision.recipe in BLACKWELL_SM:
        needs = f"needs Blackwell (sm{first} to sm{last})"
    elif sm < first:
        needs = f"needs sm{first}"
    runs = one_of([name for name, (least, most) in _FP8_SM.items() if least <= sm <= most])
    text = f"precision.recipe={precision.recipe} {needs}, this GPU is sm{sm}; set precision.recipe={runs}"
    return Problem("precision.recipe", text)


def fp8_of_experts_has_scales_of_rows(case: Case) -> Problem | None:
    """Grouped products of experts take scales of rows, and of what rows lie in whole: none of blocks."""
    precision = case.recipe.precision
    if not isinstance(precision, Fp8Precision) or case.moe is None or precision.recipe in _OF_ROWS:
        return None
    text = f"precision.recipe={precision.recipe} has no grouped products, and model.moe has experts"
    return Problem("precision.recipe", f"{text}; set precision.recipe={one_of(_OF_ROWS)}")


def fp8_leaves_layers_to_itself(case: Case) -> Problem | None:
    """The layers at both ends that stay in bf16 are fewer than the layers that there are."""
    precision = case.recipe.precision
    n_layers = case.recipe.model.n_layers
    if not isinstance(precision, Fp8Precision):
        return None
    first = precision.first_layers_bf16
    last = precision.last_layers_bf16
    in_bf16 = first + last
    if in_bf16 < n_layers:
        return None
    # the larger of the two is at fault
    if first >= last:
        key = "precision.first_layers_bf16"
        value = first
    else:
        key = "precision.last_layers_bf16"
        value = last
    total = counted(in_bf16, "layer")
    if first and last:
        total = f"{first} + {last} = {total}"
    text = f"{key}={value}: {total} in bf16 must be fewer than model.n_layers={n_layers}"
    room = n_layers - 1 - (in_bf16 - value)
    if room < 0:
        return Problem(key, f"{text}; lower both")
    return Problem(key, f"{text}; try {room}")


def fp8_format_is_one_of_the_recipe(case: Case) -> Problem | None:
    """Products of blocks take e4m3 alone."""
    precision = case.recipe.precision
    if not isinstance(precision, Fp8Precision) or precision.format != "hybrid":
        return None
    if precision.recipe not in _ONLY_E4M3:
        return None
    text = f"precision.format=hybrid does not go with precision.recipe={precision.recipe}, whose products take e4m3"
    return Problem("precision.format", f"{text}; set precision.format=e4m3")


def fp8_heads_have_one_rank(case: Case) -> Problem | None:
    """In fp8 no ranks share a key and value head: each would round a part of its gradient."""
    precision = case.recipe.precision
    n_kv_heads = case.recipe.model.n_kv_heads
    if not isinstance(precision, Fp8Precision) or case.mla is not None or case.tp <= n_kv_heads:
        return None
    text = f"parallelism.tp={case.tp} must be at most model.n_kv_heads={n_kv_heads} with precision.kind=fp8"
    way = way_out(case, Way("parallelism.tp", divisors(n_kv_heads), case.tp))
    return Problem("parallelism.tp", f"{text}; {way}, or precision=bf16")


def fp8_gathers_sharded_weights(case: Case) -> Problem | None:
    """Weights that fsdp and hsdp gather for each pass are gathered in fp8, where a tensor has one scale."""
    # which is the same in rows and in columns, and the same whoever quantises
    precision = case.recipe.precision
    strategy = case.recipe.parallelism.dp_strategy
    if not isinstance(precision, Fp8Precision) or not precision.gather_fp8:
        return None
    key = "precision.gather_fp8"
    # what is needed, what there is, and what to set
    lacks: list[tuple[str, str, str]] = []
    # what no strategy mends comes first
    if case.recipe.kernels.linear == "te":
        needs = "kernels.linear=torch, which takes weights that arrive in fp8"
        lacks.append((needs, "and it is te", "kernels.linear=torch"))
    if precision.recipe not in _OF_TENSORS:
        is_now = f"precision.recipe is {precision.recipe}"
        lacks.append(("scales of whole tensors", is_now, f"precision.recipe={one_of(_OF_TENSORS)}"))
    if strategy not in ("fsdp", "hsdp"):
        is_now = f"parallelism.dp_strategy is {strategy}"
        lacks.append(("weights that are gathered for each pass", is_now, "parallelism.dp_strategy=fsdp"))
    if not lacks:
        return None
    needs, is_now, _ = lacks[0]
    # one way out: what else is lacking is set along with it
    ways = " along with ".join(way for _, _, way in lacks)
    return Problem(key, f"{key}=true needs {needs}, {is_now}; set {key}=false, or {ways}")


def fp8_products_have_whole_tiles(case: Case) -> Problem | None:
    """Every side of an fp8 product on a rank is a multiple of 16, with mxfp8 and nvfp4 of 32, blockwise of 128."""
    precision = case.recipe.precision
    if not isinstance(precision, Fp8Precision):
        return None
    unit = _FP8_UNIT[precision.recipe]
    for side in _gemm_sides(case):
        size, rest = divmod(side.value * side.times, side.parts)
        # a rest is told by the rule of the degree that leaves it
        if rest == 0 and size % unit != 0:
            return _uneven_tiles(case, side, unit)
    return None


def fp4_ranks_keep_whole_bytes(case: Case) -> Problem | None:
    """With nvfp4 ranks that share sequences out keep an even number of tokens of each: two numbers are a byte."""
    recipe = case.recipe
    parallelism = recipe.parallelism
    if fp8_recipe(recipe.precision) != "nvfp4" or not parallelism.sequence_parallel:
        return None
    ranks = parallelism.cp * parallelism.tp
    seq_len = recipe.data.seq_len
    tokens, rest = divmod(seq_len, ranks)
    # a rest is told by the rule of the degree that leaves it
    if rest or tokens % 2 == 0:
        return None
    text = f"data.seq_len={seq_len} / (parallelism.cp={parallelism.cp} · parallelism.tp={parallelism.tp}) = {tokens}"
    text += " tokens must be even with precision.recipe=nvfp4 and parallelism.sequence_parallel=true"
    way = way_out(case, Way("data.seq_len", multiples(seq_len, 2 * ranks), seq_len, most=2))
    return Problem("data.seq_len", f"{text}; {way}, or parallelism.sequence_parallel=false")


def _uneven_tiles(case: Case, side: _GemmSide, unit: int) -> Problem:
    size = f"{side.key}={side.value}"
    if side.times > 1:
        size += f" · {side.times} {side.what}"
    if side.parts > 1:
        size += f" / parallelism.{side.axis}={side.parts}"
    text = f"{size} must be a multiple of {unit} with precision.kind=fp8 and"
    text += f" precision.recipe={case.recipe.precision.recipe}"
    # the smallest step of the value by which value · times / parts stays a multiple of the unit
    step = unit * side.parts // gcd(unit * side.parts, side.times)
    way = way_out(case, Way(side.key, multiples(side.value, step), side.value, most=2))
    return Problem(side.key, f"{text}; {way}, or precision=bf16")


def _gemm_sides(case: Case) -> Iterator[_GemmSide]:
    """Sides of the matrix products of a layer: widths of the model, then tokens."""
    model = case.recipe.model
    moe = case.moe
    mla = case.mla
    tp = case.tp
    heads = max(1, model.n_heads // tp)
    # with more ranks than key and value heads each rank holds a copy of one
    kv_heads = max(1, model.n_kv_heads // tp)
    yield _GemmSide("model.d_model", model.d_model)
    yield _GemmSide("model.d_head", model.d_head, times=heads, what="heads a rank")
    if mla is None:
        yield _GemmSide("model.d_head", model.d_head, times=kv_heads, what="key and value heads a rank")
    else:
        yield _GemmSide("model.attention.d_value", mla.d_value, times=heads, what="heads a rank")
        yield _GemmSide("model.attention.q_rank", mla.q_rank or 0)
        yield _GemmSide("model.attention.kv_rank", mla.kv_rank)
        yield _GemmSide("model.attention.d_rope", mla.d_rope)
    if case.dense_layers:
        yield _GemmSide("model.d_ffn", model.d_ffn, parts=tp, axis="tp")
    if moe is not None:
        yield _GemmSide("model.moe.d_expert", moe.d_expert, parts=case.etp, axis="etp")
        yield _GemmSide("model.moe.d_shared", moe.d_shared or 0, parts=tp, axis="tp")
    sequences = case.recipe.train.micro_batch
    seq_len = case.recipe.data.seq_len
    yield _GemmSide("data.seq_len", seq_len, sequences, case.cp, what="sequences of a micro batch", axis="cp")


def narrow_state_is_sharded(case: Case) -> Problem | None:
    """Narrow master weights and moments need an optimizer state that ranks share out."""
    narrow = _narrow(case)
    if narrow is None or case.recipe.parallelism.dp_strategy != "replicate":
        return None
    key, value = narrow
    text = f"{key}={value} needs a sharded optimizer, parallelism.dp_strategy is replicate"
    return Problem(key, f"{text}; try parallelism.dp_strategy=zero1, or {key}=fp32")


def narrow_state_goes_with_narrow_weights(case: Case) -> Problem | None:
    """Narrow moments need weights of 16 bits or fewer; an fp16 master, the rest of a bf16 weight, needs bf16."""
    narrow = _narrow(case)
    kind = case.recipe.precision.kind
    if narrow is None or kind in ("bf16", "fp8"):
        return None
    key, value = narrow
    if kind == "fp16" and not key.endswith("master"):
        return None
    return Problem(key, f"{key}={value} needs precision=bf16 or precision=fp8, it is {kind}; set {key}=fp32")


def scaled_state_is_of_own_heads(case: Case) -> Problem | None:
    """Moments of fp16 and fp8, scaled by rank, are for key and value heads that one tensor-parallel rank holds."""
    # beside other queries a copy of a head has another scale, is rounded another way, and parts from the first
    optim = case.recipe.optim
    tp = case.recipe.parallelism.tp
    n_kv_heads = case.recipe.model.n_kv_heads
    if not isinstance(optim, AdamWSpec) or tp <= n_kv_heads or case.mla is not None:
        return None
    for name in ("exp_avg", "exp_avg_sq"):
        value = getattr(optim.formats, name)
        if value in ("fp16", "fp8"):
            key = f"optim.formats.{name}"
            text = f"{key}={value} needs parallelism.tp={tp} to be at most model.n_kv_heads={n_kv_heads}"
            return Problem(key, f"{text}: several ranks hold a head otherwise; set {key}=bf16")
    return None


def _narrow(case: Case) -> tuple[str, str] | None:
    """Path and value of the first optimizer format that is narrower than fp32."""
    optim = case.recipe.optim
    if not isinstance(optim, AdamWSpec):
        return None
    formats = {
        "optim.formats.master": optim.formats.master,
        "optim.formats.exp_avg": optim.formats.exp_avg,
        "optim.formats.exp_avg_sq": optim.formats.exp_avg_sq,
    }
    for key, value in formats.items():
        if value != "fp32":
            return key, value
    return None
