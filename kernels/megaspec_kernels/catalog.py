"""Operations, their implementations and what each needs: what the resolver reads. Torch-free.

registry.py holds the functions under the same names; a test keeps the two equal.
"""

from dataclasses import dataclass, field

# Bytes of logits that the chunked losses hold at a time. Few big pieces: GEMMs below about 4 k tokens lose their speed.
LOGITS_BYTES = 1 << 30


def logits_piece(rows: int, row_bytes: int) -> int:
    """Rows of a piece of logits [rows, columns] of `row_bytes` a row: as few pieces as LOGITS_BYTES allows, of one size
    but for the last."""
    pieces = -(-rows * row_bytes // LOGITS_BYTES)
    return max(1, -(-rows // max(1, pieces)))


@dataclass(frozen=True)
class Requirement:
    """Where an implementation runs."""

    devices: tuple[str, ...] = ("cuda", "cpu")
    min_sm: int = 0
    """Lowest compute capability, 90 for Hopper; 0 when it does not matter."""
    attention_dropout: bool = True
    """Whether it can drop attention weights."""
    score_cap: bool = True
    """Whether it can cap attention scores."""
    skips_hidden: bool = False
    """Whether it leaves out what a mask hides: `auto` takes such a one first where something is hidden."""
    head_size: int = 1
    """The smallest that it takes."""
    head_sizes_up_to: int = 0
    """The largest that it takes; 0: any."""
    head_step: int = 1
    """What head sizes must be multiples of."""
    precisions: tuple[str, ...] = ()
    """Formats of the model that it computes in; empty: all."""
    narrow_states: bool = True
    """Whether it can keep an optimizer's states in fewer than 32 bits."""
    fp8_recipes: tuple[str, ...] = ()
    """Of precision.recipe, those whose scales it takes; empty: all."""
    step: int = 1
    """What the widths of its matrices must be multiples of."""


@dataclass(frozen=True)
class Operation:
    """Implementations by name, best first: `auto` takes the first whose requirement the target meets."""

    implementations: dict[str, Requirement] = field(default_factory=dict)


# What Triton kernels that sum in fp32 take.
UP_TO_FP32 = ("fp32", "bf16", "fp16", "fp8")

CATALOG: dict[str, Operation] = {
    "attention": Operation(
        {
            "sdpa": Requirement(attention_dropout=False, score_cap=False),
            "flex": Requirement(
                devices=("cuda",),
                min_sm=80,
                attention_dropout=False,
                skips_hidden=True,
                head_size=16,
                precisions=("bf16", "fp16", "fp8"),
            ),
            "te": Requirement(
                devices=("cuda",),
                min_sm=90,
                attention_dropout=False,
                score_cap=False,
                head_sizes_up_to=256,
                head_step=8,
                precisions=("bf16", "fp16"),
            ),
            "reference": Requirement(),
        }
    ),
    "attention_merge": Operation(
        {
            "triton": Requirement(devices=("cuda",), min_sm=80),
            "reference": Requirement(),
        }
    ),
    "cross_entropy": Operation(
        {
            "triton": Requirement(devices=("cuda",), min_sm=80, precisions=UP_TO_FP32),
            "chunked": Requirement(),
            "reference": Requirement(),
        }
    ),
    "linear": Operation(
        {
            "torch": Requirement(),
            "te": Requirement(
                devices=("cuda",),
                min_sm=80,
                precisions=("bf16", "fp16"),
                fp8_recipes=("tensorwise", "delayed", "blockwise"),
            ),
            "reference": Requirement(),
        }
    ),
    "grouped": Operation(
        {
            "torch": Requirement(devices=("cuda",), min_sm=90, precisions=("bf16",), step=8),
            "reference": Requirement(),
        }
    ),
    "unpermute": Operation(
        {
            "triton": Requirement(devices=("cuda",), min_sm=80),
            "reference": Requirement(),
        }
    ),
    "norm": Operation(
        {
            "reference": Requirement(),
            "triton": Requirement(devices=("cuda",), min_sm=80, precisions=UP_TO_FP32),
            "te": Requirement(devices=("cuda",), min_sm=80, precisions=UP_TO_FP32),
        }
    ),
    "gated": Operation(
        {
            "reference": Requirement(),
            "triton": Requirement(devices=("cuda",), min_sm=80, precisions=UP_TO_FP32),
        }
    ),
    "fp8_cast": Operation(
        {
            # the first GPUs that convert to fp8 themselves
            "triton": Requirement(devices=("cuda",), min_sm=89, precisions=UP_TO_FP32),
            "reference": Requirement(),
        }
    ),
    "scaled_product": Operation(
        {
            "cublaslt": Requirement(
                devices=("cuda",),
                min_sm=89,
                precisions=("fp32", "bf16"),
                fp8_recipes=("tensorwise", "delayed"),
            ),
            "torch": Requirement(devices=("cuda",), min_sm=89, precisions=("fp32", "bf16")),
            "reference": Requirement(),
        }
    ),
    "adamw": Operation(
        {
            "torch": Requirement(narrow_states=False),
            "triton": Requirement(devices=("cuda",), min_sm=80, precisions=UP_TO_FP32),
            "reference": Requirement(),
        }
    ),
}


@dataclass(frozen=True)
class Use:
    """What a model asks of an operation."""

    attention_dropout: bool = False
    score_cap: bool = False
    hides_keys: bool = False
    """Windows, chunks or documents hide a part of the past."""
    head_size: int | None = None
    """Of queries and keys; None when it does not matter."""
    precision: str | None = None
    """The model's format; None when it does not matter."""
    fp8_recipe: str | None = None
    """What elements share a scale in fp8; None when it does not matter."""
    widths: tuple[int, ...] = ()
    """Of its matrices on one rank."""
    narrow_states: bool = False
    """An optimizer's states are kept in fewer than 32 bits."""


_PLAIN = Use()


def unmet(operation: str, name: str, *, device: str, sm: int, use: Use = _PLAIN) -> str | None:
    """What an implementation needs and the target lacks, in words; None when it can run."""
    need = CATALOG[operation].implementations[name]
    if device not in need.devices:
        return f"needs {' or '.join(need.devices)}, the target is {device}"
    if device == "cuda" and sm < need.min_sm:
        return f"needs sm{need.min_sm}, this GPU is sm{sm}"
    if use.attention_dropout and not need.attention_dropout:
        return "has no attention dropout"
    if use.score_cap and not need.score_cap:
        return "caps no scores"
    if use.head_size is not None and use.head_size < need.head_size:
        return f"needs heads of at least {need.head_size}, the model's have {use.head_size}"
    if use.head_size is not None and need.head_sizes_up_to and use.head_size > need.head_sizes_up_to:
        return f"needs heads of at most {need.head_sizes_up_to}, the model's have {use.head_size}"
    if use.head_size is not None and use.head_size % need.head_step:
        return f"needs heads of a multiple of {need.head_step}, the model's have {use.head_size}"
    if use.narrow_states and not need.narrow_states:
        return "keeps states in 32 bits"
    if use.precision is not None and need.precisions and use.precision not in need.precisions:
        return f"needs {' or '.join(need.precisions)}, the model is in {use.precision}"
    if use.fp8_recipe is not None and need.fp8_recipes and use.fp8_recipe not in need.fp8_recipes:
        return f"needs precision.recipe={' or '.join(need.fp8_recipes)}, it is {use.fp8_recipe}"
    odd = next((width for width in use.widths if width % need.step), None)
    if odd is not None:
        return f"needs matrices whose widths are multiples of {need.step}, one is {odd} wide"
    return None


def choose(operation: str, *, device: str, sm: int, use: Use = _PLAIN) -> str:
    """The best implementation that the target can run."""
    runs = {}
    for name, need in CATALOG[operation].implementations.items():
        if unmet(operation, name, device=device, sm=sm, use=use) is None:
            runs[name] = need
    assert runs, f"no implementation of {operation} runs on {device} sm{sm}"
    if use.hides_keys:
        for name, need in runs.items():
            if need.skips_hidden:
                return name
    return next(iter(runs))
