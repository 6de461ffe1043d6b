"""Operations, their implementations and what each needs: what the resolver reads. Torch-free.

registry.py holds the functions under the same names; a test keeps the two equal.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Literal

from megaspec.core.problems import one_of

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
    max_sm: int = 999
    """Highest."""
    attention_dropout: bool = True
    """Whether it can drop attention weights."""
    score_cap: bool = True
    """Whether it can cap attention scores."""
    skips_hidden: bool = False
    """Whether it leaves out what a mask hides: `auto` takes such a one first where something is hidden."""
    head_size: int = 1
    """The smallest that it takes."""
    largest_head: int = 0
    """The largest; 0 for all."""
    head_step: int = 1
    """What sizes of heads must be multiples of."""
    documents: bool = True
    """Whether it keeps attention inside packed documents."""
    window: bool = True
    """Whether it has windows of keys and chunks of a sequence."""
    blocks: bool = True
    """Whether it attends to a part of a sequence, with its log-sum-exp, for ranks that train on parts of sequences.
    Where text is generated those that don't take sdpa's blocks."""
    deterministic: bool = True
    """Whether it can add gradients in one order."""
    deterministic_documents: bool = True
    """Whether it can do that inside packed documents, too, in memory that there is."""
    package: str = ""
    """What has to be installed beside torch, as packages are named; nothing: empty."""
    install: str = ""
    """How to install it."""
    precisions: tuple[str, ...] = ()
    """Formats of the model that it computes in; empty: all."""
    copies_values: Literal["never", "hidden", "always"] = "never"
    """Whether it takes queries, keys and values that lie by themselves, so that values are copied out of the product
    that all three are made by: only in layers where keys are hidden or scores are capped, or in all."""
    keeps_without_sinks: Literal["never", "hidden", "always"] = "never"
    """In which layers, as in `copies_values`, its output is kept as it was before sinks scaled it, too."""
    plain_through_sdpa: Literal["never", "in any order", "always"] = "never"
    """Whether layers that hide and cap nothing go through sdpa: only where gradients may be added in any order, or
    always. Those that it takes itself are as the ones that `hidden` is said of."""
    narrow_states: bool = True
    """Whether it can keep an optimizer's states in fewer than 32 bits."""
    fp8_recipes: tuple[str, ...] = ()
    """Of precision.recipe, those whose scales it takes; empty: all."""
    hopper_recipes: tuple[str, ...] = ()
    """Of precision.recipe, those whose scales it takes on Hopper (sm90) alone, with CUDA_WITH_LINES or newer."""
    cpu_recipes: tuple[str, ...] = ()
    """Of precision.recipe, those whose scales it takes on CPUs alone."""
    writes_fp8: bool = False
    """Whether it writes what a layer beside it multiplies in fp8 itself, by a delayed scale: with such scales `auto`
    takes such a one first."""
    for_large: bool = False
    """It is started by itself, where the compiler puts a plain one together with its neighbours: `auto` takes it where
    layers are so large that nobody waits for the host."""
    step: int = 1
    """What the widths of its matrices must be multiples of."""

    def takes_all_layers(self, *, deterministic: bool) -> bool:
        """Whether attention computes itself what goes through sdpa where gradients may be added in any order."""
        return deterministic and self.plain_through_sdpa == "in any order"


@dataclass(frozen=True)
class Operation:
    """Implementations by name, best first: `auto` takes the first whose requirement the target meets."""

    implementations: dict[str, Requirement] = field(default_factory=dict)


# What Triton kernels that sum in fp32 take.
UP_TO_FP32 = ("fp32", "bf16", "fp16", "fp8")
# What kernels on tensor cores take; beside fp8, attention is in bf16.
HALF = ("bf16", "fp16", "fp8")
BLACKWELL = ("mxfp8", "nvfp4")
"""Of precision.recipe, those that linear layers cast and multiply in by themselves: on GPUs Blackwell's tensor cores
have them, by Transformer Engine."""
TE = "transformer-engine"
INSTALL_TE = "pip install 'megaspec[te]'"

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
                # With larger heads none of torch's tiles fits the shared memory of an H200 (288, 320 and 512 were tried
                # with torch 2.11).
                largest_head=256,
                blocks=False,
                copies_values="hidden",
                keeps_without_sinks="hidden",
                plain_through_sdpa="in any order",
                precisions=HALF,
            ),
            "cudnn": Requirement(
                devices=("cuda",),
                min_sm=90,
                attention_dropout=False,
                score_cap=False,
                skips_hidden=True,
                head_size=16,
                largest_head=128,
                head_step=16,
                deterministic=False,
                copies_values="hidden",
                plain_through_sdpa="always",
                precisions=HALF,
                package="nvidia-cudnn-frontend",
                install="pip install 'megaspec[cudnn]'",
            ),
            "flash_attn": Requirement(
                devices=("cuda",),
                min_sm=90,
                attention_dropout=False,
                skips_hidden=True,
                # The package says 8 to 128 by 8. On an H200 gradients of documents' queries were wrong with heads of 16
                # (4.0.0b36); these two sizes are right.
                head_size=64,
                largest_head=128,
                head_step=64,
                precisions=HALF,
                package="flash-attn-4",
                install="pip install 'megaspec[fa]'",
            ),
            "flash_attn_3": Requirement(
                devices=("cuda",),
                # hopper/setup.py builds for sm_90a, which no later GPU runs
                min_sm=90,
                max_sm=90,
                attention_dropout=False,
                skips_hidden=True,
                head_size=8,
                largest_head=256,
                head_step=8,
                precisions=HALF,
                package="flash-attn-3",
                install="build flash-attention's folder hopper",
            ),
            "flash_attn_2": Requirement(
                devices=("cuda",),
                min_sm=80,
                attention_dropout=False,
                skips_hidden=True,
                head_size=8,
                largest_head=256,
                head_step=8,
                precisions=HALF,
                package="flash-attn",
                install="pip install flash-attn --no-build-isolation",
            ),
            "te": Requirement(
                devices=("cuda",),
                min_sm=90,
                attention_dropout=False,
                score_cap=False,
                skips_hidden=True,
                head_size=8,
                largest_head=256,
                head_step=8,
                blocks=False,
                # see Note "Documents" in attention/te.py
                deterministic_documents=False,
                copies_values="always",
                precisions=HALF,
                package=TE,
                install=INSTALL_TE,
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
            # on CPUs by the reference's casts and products
            "torch": Requirement(cpu_recipes=BLACKWELL),
            "te": Requirement(
                devices=("cuda",),
                min_sm=80,
                precisions=("bf16", "fp16"),
                fp8_recipes=("tensorwise", "delayed", "blockwise", *BLACKWELL),
                package=TE,
                install=INSTALL_TE,
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
            "triton": Requirement(devices=("cuda",), min_sm=80, precisions=UP_TO_FP32, writes_fp8=True, for_large=True),
            "reference": Requirement(),
            "te": Requirement(devices=("cuda",), min_sm=80, precisions=UP_TO_FP32, package=TE, install=INSTALL_TE),
        }
    ),
    "gated": Operation(
        {
            "triton": Requirement(devices=("cuda",), min_sm=80, precisions=UP_TO_FP32, writes_fp8=True, for_large=True),
            "reference": Requirement(),
        }
    ),
    "rope": Operation(
        {
            "reference": Requirement(),
            "triton": Requirement(devices=("cuda",), min_sm=80, precisions=UP_TO_FP32, writes_fp8=True),
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
                hopper_recipes=("rowwise", "blockwise"),
            ),
            "torch": Requirement(
                devices=("cuda",),
                min_sm=89,
                precisions=("fp32", "bf16"),
                # its rows are CUTLASS's, on all of them
                hopper_recipes=("blockwise",),
            ),
            "reference": Requirement(),
        }
    ),
    "scaled_grouped": Operation(
        {
            # torch has it for Hopper alone (2.11)
            "torch": Requirement(devices=("cuda",), min_sm=90, max_sm=90, precisions=("bf16",), step=16),
            "reference": Requirement(),
        }
    ),
    "adamw": Operation(
        {
            "triton": Requirement(devices=("cuda",), min_sm=80, precisions=UP_TO_FP32),
            "torch": Requirement(narrow_states=False),
            "reference": Requirement(),
        }
    ),
}

IDLE_BESIDE_LINEAR = ("fp8_cast", "scaled_product")
"""Operations that nothing asks for in fp8 where what computes linear layers casts and multiplies itself."""


def casts_itself(linear: str, fp8_recipe: str | None) -> bool:
    """Whether kernels.linear casts to fp8 and multiplies itself."""
    return fp8_recipe is not None and (linear == "te" or fp8_recipe in BLACKWELL)


@dataclass(frozen=True)
class Use:
    """What a model asks of an operation."""

    attention_dropout: bool = False
    score_cap: bool = False
    hides_keys: bool = False
    """Windows, chunks or documents hide a part of the past."""
    documents: bool = False
    """Attention stays inside packed documents."""
    window: bool = False
    """A query sees a window or a chunk of keys in some layer."""
    blocks: bool = False
    """A rank attends to parts of a sequence, not to whole ones."""
    deterministic: bool = False
    """Gradients are added in one order."""
    head_size: int | None = None
    """Of queries and keys; None when it does not matter."""
    precision: str | None = None
    """The model's format; None when it does not matter."""
    fp8_recipe: str | None = None
    """What elements share a scale in fp8; None when it does not matter."""
    writes_fp8: frozenset[str] = frozenset()
    """Operations that may write what layers beside them multiply in fp8: scales are delayed, a rank has all of what
    they make, and nothing computes it again by itself."""
    small: frozenset[str] = frozenset()
    """Operations inside of layers that are so small that a step waits for the host."""
    widths: tuple[int, ...] = ()
    """Of its matrices on one rank."""
    narrow_states: bool = False
    """An optimizer's states are kept in fewer than 32 bits."""


_PLAIN = Use()


NONE: frozenset[str] = frozenset()

# The first CUDA whose products take scales of lines and of blocks (cuBLAS 12.9).
CUDA_WITH_LINES = (12, 9)


def cuda_of_torch(packages: Container[str]) -> tuple[int, int] | None:
    """What the target's torch was built for, where its version says so: 2.11.0+cu126. None: nothing is said, as of
    torch's own choice."""
    if not isinstance(packages, Mapping):
        return None
    _, _, digits = packages.get("torch", "").partition("+cu")
    if not digits.isdecimal() or len(digits) < 3:
        return None
    return int(digits[:-1]), int(digits[-1])


def why_no_lines(packages: Container[str]) -> str | None:
    """Why cuBLAS takes no scales of lines or of blocks, as the end of a sentence; None: nothing says that."""
    cuda = cuda_of_torch(packages)
    if cuda is None or cuda >= CUDA_WITH_LINES:
        return None
    return f"from CUDA {CUDA_WITH_LINES[0]}.{CUDA_WITH_LINES[1]} on, torch is built for {cuda[0]}.{cuda[1]}"


def unmet(
    operation: str, name: str, *, device: str, sm: int, use: Use = _PLAIN, packages: Container[str] = NONE
) -> str | None:
    """What an implementation needs and the target lacks, in words; None when it can run. `packages`: those of the
    target that implementations may need."""
    need = CATALOG[operation].implementations[name]
    if device not in need.devices:
        return f"needs {one_of(need.devices)}, the target is {device}"
    if device == "cuda" and sm < need.min_sm:
        return f"needs sm{need.min_sm}, this GPU is sm{sm}"
    if device == "cuda" and sm > need.max_sm:
        return f"runs up to sm{need.max_sm}, this GPU is sm{sm}"
    if need.package and need.package not in packages:
        return f"needs the package {need.package}, which is not installed ({need.install})"
    for lacks in (_unmet_by_attention(need, use), _unmet_by_heads(need, use)):
        if lacks is not None:
            return lacks
    if use.narrow_states and not need.narrow_states:
        return "keeps states in 32 bits"
    if use.precision is not None and need.precisions and use.precision not in need.precisions:
        return f"needs {one_of(need.precisions)}, the model is in {use.precision}"
    lacks = _unmet_by_scales(need, use, device=device, sm=sm, packages=packages)
    if lacks is not None:
        return lacks
    odd = next((width for width in use.widths if width % need.step), None)
    if odd is not None:
        return f"needs matrices whose widths are multiples of {need.step}, one is {odd} wide"
    return None


def _unmet_by_scales(need: Requirement, use: Use, *, device: str, sm: int, packages: Container[str]) -> str | None:
    """Of precision.recipe."""
    recipe = use.fp8_recipe
    if recipe is None:
        return None
    if need.fp8_recipes and recipe not in need.fp8_recipes:
        return f"needs precision.recipe={one_of(need.fp8_recipes)}, it is {recipe}"
    if recipe in need.cpu_recipes and device != "cpu":
        return f"takes precision.recipe={recipe} on CPUs alone"
    if recipe not in need.hopper_recipes or device != "cuda":
        return None
    if sm // 10 != 9:
        return f"takes precision.recipe={recipe} on sm90 alone, this GPU is sm{sm}"
    too_old = why_no_lines(packages)
    if too_old is not None:
        return f"takes precision.recipe={recipe} {too_old}"
    return None


def _unmet_by_attention(need: Requirement, use: Use) -> str | None:
    if use.attention_dropout and not need.attention_dropout:
        return "has no attention dropout"
    if use.score_cap and not need.score_cap:
        return "caps no scores"
    if use.documents and not need.documents:
        return "keeps no documents apart"
    if use.window and not need.window:
        return "has no windows"
    if use.blocks and not need.blocks:
        return "attends to whole sequences"
    if use.deterministic and not need.deterministic:
        return "adds gradients in no fixed order"
    if use.deterministic and use.documents and not need.deterministic_documents:
        return "adds gradients of documents in no fixed order"
    return None


def _unmet_by_heads(need: Requirement, use: Use) -> str | None:
    size = use.head_size
    if size is None:
        return None
    if size < need.head_size:
        return f"needs heads of at least {need.head_size}, the model's have {size}"
    if need.largest_head and size > need.largest_head:
        return f"needs heads of at most {need.largest_head}, the model's have {size}"
    if size % need.head_step:
        return f"needs heads whose size is a multiple of {need.head_step}, the model's have {size}"
    return None


def runs_on(
    operation: str, *, device: str, sm: int, use: Use = _PLAIN, packages: Container[str] = NONE
) -> dict[str, Requirement]:
    """The implementations that the target can run, best first."""
    runs = {}
    for name, need in CATALOG[operation].implementations.items():
        if unmet(operation, name, device=device, sm=sm, use=use, packages=packages) is None:
            runs[name] = need
    assert runs, f"no implementation of {operation} runs on {device} sm{sm}"
    return runs


def choose(operation: str, *, device: str, sm: int, use: Use = _PLAIN, packages: Container[str] = NONE) -> str:
    """The best implementation that the target can run, by the catalog's order."""
    runs = runs_on(operation, device=device, sm=sm, use=use, packages=packages)
    if operation in use.writes_fp8:
        for name, need in runs.items():
            if need.writes_fp8:
                return name
    if use.hides_keys:
        for name, need in runs.items():
            if need.skips_hidden:
                return name
    if operation in use.small:
        for name, need in runs.items():
            if not need.for_large:
                return name
    return next(iter(runs))


def packages_of(names: Mapping[str, object], *, fp8_recipe: str | None = None) -> frozenset[str]:
    """What implementations, by operation, are made of beside torch, and what a recipe of fp8 can't do without: where it
    does not matter what is installed."""
    found = set()
    if fp8_recipe in BLACKWELL:
        found.add(TE)
    for operation, one in CATALOG.items():
        need = one.implementations.get(str(names.get(operation)))
        if need is not None and need.package:
            found.add(need.package)
    return frozenset(found)


PACKAGES = tuple(
    dict.fromkeys(need.package for one in CATALOG.values() for need in one.implementations.values() if need.package)
)
"""All that an implementation may need beside torch."""
