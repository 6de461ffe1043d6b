"""What `megaspec bench kernel` runs, by operation of catalog.py."""

from megaspec_kernels.adamw.bench import BENCH as ADAMW
from megaspec_kernels.attention.bench import BENCH as ATTENTION
from megaspec_kernels.attention_merge.bench import BENCH as ATTENTION_MERGE
from megaspec_kernels.bench import Bench
from megaspec_kernels.cross_entropy.bench import BENCH as CROSS_ENTROPY
from megaspec_kernels.fp8_cast.bench import BENCH as FP8_CAST
from megaspec_kernels.gated.bench import BENCH as GATED
from megaspec_kernels.grouped.bench import BENCH as GROUPED
from megaspec_kernels.linear.bench import BENCH as LINEAR
from megaspec_kernels.norm.bench import BENCH as NORM
from megaspec_kernels.rope.bench import BENCH as ROPE
from megaspec_kernels.scaled_grouped.bench import BENCH as SCALED_GROUPED
from megaspec_kernels.scaled_product.bench import BENCH as SCALED_PRODUCT
from megaspec_kernels.unpermute.bench import BENCH as UNPERMUTE

BENCHES: dict[str, Bench] = {
    "attention": ATTENTION,
    "attention_merge": ATTENTION_MERGE,
    "cross_entropy": CROSS_ENTROPY,
    "linear": LINEAR,
    "grouped": GROUPED,
    "unpermute": UNPERMUTE,
    "norm": NORM,
    "gated": GATED,
    "rope": ROPE,
    "fp8_cast": FP8_CAST,
    "scaled_product": SCALED_PRODUCT,
    "scaled_grouped": SCALED_GROUPED,
    "adamw": ADAMW,
}
