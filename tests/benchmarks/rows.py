"""The rows of bench_rows.py: what is trained, by whom, with which words."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from megaspec.cli import parse
from megaspec.commands.tune import find, layout_of
from megaspec.estimate.hardware import HARDWARE
from megaspec.estimate.target import Target
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from megaspec.search.tune import Candidate, Found
from megaspec_kernels.catalog import CATALOG
from tests.benchmarks import bench_layouts, bench_train

# Attention that computes what documents hide, or is no kernel at all.
_NO_KERNELS = ("reference",)
# All layers of the peer are in fp8, so ours are, too.
_ALL_IN_FP8 = ("--precision", "fp8", "--set", "precision.first_layers_bf16=0", "--set", "precision.last_layers_bf16=0")
MEANS = (256, 1024, 4096)


@dataclass(frozen=True)
class Run:
    """One side of a comparison."""

    label: str
    side: str
    """`ours`, `mcore` or `torchtitan`."""
    words: tuple[str, ...]
    """Behind the script's name."""
    layout: str = ""
    """Of ours over several GPUs: what bench_layouts.py is told. Runs of a work with the same words share a launch."""
    beside: str = ""
    """The peer's run with the same schedule, by its label."""
    is_repeated: bool = True
    """In every round, not in the first alone."""
    planned_ms: float = 0.0
    """Of a layout that a search has found: what it reckons with."""


@dataclass(frozen=True)
class Work:
    """What both sides are given: ratios are taken within it."""

    row: str
    name: str
    runs: tuple[Run, ...]
    gpus: int = 1
    warmup: int = 0
    """Steps before those that are measured; 0: as the command line says."""
    steps: int = 0
    is_tuned: bool = False
    """Its runs are what a search has found, the fastest first."""


def ours(label: str, *words: str) -> Run:
    return Run(f"megaspec {label}", "ours", words)


def mcore(label: str, *words: str) -> Run:
    return Run(f"mcore+TE {label}", "mcore", words)


def all_works(depth: int, *, quick: bool) -> Iterator[Work]:
    """Every row. `depth`: layers of the 8B; quick: one mean length, and of each side the main recipes alone."""
    big = ("--model", f"llama8b{depth}", "--seq", "8192", "--accum", "4")
    small = ("--model", "llama1b", "--seq", "8192", "--mbs", "2")
    name = f"8B, {depth} layers, s8192"
    recipes = ("delayed", "tensorwise") if quick else ("delayed", "tensorwise", "rowwise", "blockwise")
    runs = [ours(recipe, *big, *_ALL_IN_FP8, "--set", f"precision.recipe={recipe}") for recipe in recipes]
    runs += [mcore(recipe, *big, "--fp8", recipe) for recipe in recipes if recipe != "rowwise"]
    if not quick:
        # what a peer's own kernel of SwiGLU, and a longer history, give it
        runs.append(mcore("delayed, TE's SwiGLU", *big, "--fp8", "delayed", "--te-activation"))
    yield Work("fp8", f"{name}, fp8", tuple(runs))
    yield Work("bf16", f"{name}, bf16", (ours("bf16", *big), mcore("bf16", *big)))
    yield from packed_works("packed8b", name, big, quick=quick)
    yield Work("1b", "1B, s8192, bf16", (ours("bf16", *small), mcore("bf16", *small)))
    yield from packed_works("packed1b", "1B, s8192", small, quick=quick)
    few = ("--model", "llama1b", "--seq", "2048", "--mbs", "1")
    runs = [ours("bf16", *few), Run("torchtitan, CUDA graphs", "torchtitan", (*few, "--attn", "sdpa"))]
    if not quick:
        runs.append(mcore("bf16", *few))
    yield Work("1b2k", "1B, 2,048 tokens a step", tuple(runs))
    experts = ("--model", "gptoss6", "--seq", "4096", "--mbs", "2")
    yield Work("gptoss", "6 layers like gpt-oss-20b, s4096, bf16", (ours("bf16", *experts), mcore("bf16", *experts)))
    in_fp8 = (
        ours("tensorwise", *experts, *_ALL_IN_FP8, "--set", "precision.recipe=tensorwise"),
        mcore("delayed", *experts, "--fp8", "delayed"),
        mcore("tensorwise", *experts, "--fp8", "tensorwise"),
    )
    yield Work("gptoss", "6 layers like gpt-oss-20b, s4096, fp8", in_fp8)


def packed_works(row: str, name: str, words: tuple[str, ...], *, quick: bool) -> Iterator[Work]:
    """Packed documents, for each kernel of attention; beside them rows of one document, which need no mask."""
    means = MEANS[1:2] if quick else MEANS
    kernels = [one for one in CATALOG["attention"].implementations if one not in _NO_KERNELS]
    for mean in means:
        packed = (*words, "--documents", str(mean))
        runs = [ours(kernel, *packed, "--attention", kernel) for kernel in kernels]
        runs.append(mcore("thd", *packed))
        yield Work(row, f"{name}, documents of {mean:,}", tuple(runs))
    yield Work(row, f"{name}, one document a row", (ours("sdpa", *words, "--attention", "sdpa"),))


# Llama-3-8B over four GPUs: 8 sequences of 8,192 tokens a step.
FOUR = 4
# Where the peer's layers are divided; versions are those that rows are measured with.
_FOUR_H200 = Target(
    gpus=FOUR,
    gpu="NVIDIA H200",
    sm=90,
    gpu_memory=HARDWARE["H200"].memory,
    cores=64,
    versions={"torch": "2.11.0", "triton": "3.6.0"},
)
_EIGHT = ("--model", "llama8b", "--sequences", "8")
_EIGHT_OF_MCORE = ("--model", "llama8b", "--accum", "8")
_STAGES_OF_MCORE = (*_EIGHT_OF_MCORE, "--pp", "4")
# label -> the schedule, as a layout says it
SCHEDULES = {
    "1f1b": "pipeline.schedule=1f1b",
    "interleaved, 2 chunks": "pipeline.schedule=interleaved pipeline.virtual_stages=2",
    "interleaved, 4 chunks": "pipeline.schedule=interleaved pipeline.virtual_stages=4",
    "zb_h1": "pipeline.schedule=zb_h1",
    "zb_v": "pipeline.schedule=zb_v pipeline.virtual_stages=2",
}
# Of a schedule: the peer's that is the same.
_SAME = {
    "1f1b": "mcore+TE 1F1B",
    "interleaved, 2 chunks": "mcore+TE interleaved, 2 chunks",
    "interleaved, 4 chunks": "mcore+TE interleaved, 4 chunks",
}
# The layout that hung before messages between stages went in one order.
HUNG = "pp=2 dp_strategy=zero1 pipeline.schedule=zb_v pipeline.virtual_stages=2 mbs=2"


def four_gpu_works() -> Iterator[Work]:
    """Every row over four GPUs whose layouts are known beforehand."""
    yield pipelines()
    yield more_pipelines()
    words = ("--model", "llama8b", "--sequences", "16")
    yield Work("hung", "8B, the layout that hung, 16 sequences", (layout("zb_v", HUNG, words),), FOUR, 2, 5)
    tp4 = (layout("tp 4", "tp=4", _EIGHT), mcore("tp 4", *_EIGHT_OF_MCORE, "--tp", "4"))
    yield Work("tp4", "8B, tp 4 with sequence parallel", tp4, FOUR, 2, 5)
    yield context_parallel()
    yield experts("ep4", 1, "forced balance")
    yield experts("ep4_learned", 0, "the learned router")


def pipelines() -> Work:
    """Five schedules over equal stages beside the peer's, and divided as the plan does."""
    runs = []
    for label, schedule in SCHEDULES.items():
        is_repeated = label in ("1f1b", "interleaved, 4 chunks")
        runs.append(layout(label, f"pp=4 {schedule}", _EIGHT, beside=_SAME.get(label, ""), is_repeated=is_repeated))
    for label, schedule in SCHEDULES.items():
        text = f"pp=4 {schedule} pipeline.layout=auto"
        beside = _SAME.get(label, "")
        runs.append(layout(f"{label}, by time", text, _EIGHT, beside=beside, is_repeated=label == "zb_v"))
    runs.append(mcore("1F1B", *_STAGES_OF_MCORE))
    for chunks in (2, 4):
        words = (*_STAGES_OF_MCORE, "--chunks", str(chunks), "--p2p", "overlapped")
        runs.append(mcore(f"interleaved, {chunks} chunks", *words))
    return Work("pipelines", "8B, pp 4", tuple(runs), FOUR, 2, 5)


def more_pipelines() -> Work:
    """The peer divided by time, which it has words for, too, beside ours, and its interleaved schedule with batched
    messages."""
    runs = []
    beside = {
        "1f1b": "mcore+TE 1F1B, by time",
        "interleaved, 4 chunks": "mcore+TE interleaved, 4 chunks, by time",
    }
    for label, peer in beside.items():
        text = f"pp=4 {SCHEDULES[label]} pipeline.layout=auto"
        runs.append(layout(f"{label}, by time", text, _EIGHT, beside=peer))
    in_chunks = ("--chunks", "4", "--p2p")
    by_time = ("--stages", planned_stages(SCHEDULES["1f1b"]))
    runs.append(mcore("1F1B, by time", *_STAGES_OF_MCORE, *by_time))
    by_time = ("--stages", planned_stages(SCHEDULES["interleaved, 4 chunks"]))
    runs.append(mcore("interleaved, 4 chunks, by time", *_STAGES_OF_MCORE, *in_chunks, "overlapped", *by_time))
    runs.append(mcore("interleaved, 4 chunks, batched", *_STAGES_OF_MCORE, *in_chunks, "batched"))
    return Work("pipelines_more", "8B, pp 4, more divisions", tuple(runs), FOUR, 2, 5)


@cache
def planned_stages(schedule: str) -> str:
    """What each stage holds where the plan divides the layers, in the words that Megatron-core has as well."""
    text = f"pp=4 {schedule} pipeline.layout=auto"
    args = bench_layouts.parser().parse_args([*_EIGHT, text])
    recipe = bench_train.recipe_of(bench_layouts.arguments(text, args, FOUR), FOUR)
    spec = resolve(recipe, _FOUR_H200, Facts(run_dir="-"))
    stages = spec.parallelism.pipeline.layout
    assert stages is not None, text
    return stages


def context_parallel() -> Work:
    """One sequence of 32,768 tokens over four GPUs, half of the 8B's layers."""
    words = ("--model", "llama8b16", "--seq", "32768", "--sequences", "1")
    peers = ("--model", "llama8b16", "--seq", "32768", "--cp", "4")
    runs = (
        layout("ring", "cp=4 context.kind=ring dp_strategy=zero1", words, beside="mcore+TE p2p"),
        layout("all_to_all", "cp=4 context.kind=all_to_all dp_strategy=zero1", words, beside="mcore+TE a2a"),
        mcore("p2p", *peers, "--cp-messages", "p2p"),
        mcore("a2a", *peers, "--cp-messages", "a2a"),
    )
    return Work("cp4", "8B, 16 layers, cp 4, s32768", runs, FOUR, 3, 8)


def experts(row: str, balance: int, name: str) -> Work:
    """Eight layers of Qwen3-30B-A3B over four GPUs, 16 sequences of 4,096."""
    same = ("--model", "qwen3moe8", "--seq", "4096", "--mbs", "4", "--force-balance", str(balance))
    words = (*same, "--sequences", "16")
    runs = []
    for dispatch in ("all_gather", "all_to_all"):
        runs.append(
            layout(dispatch, f"ep=4 dp_strategy=zero1 dispatch={dispatch}", words, beside="mcore+TE all-to-all")
        )
    runs.append(mcore("all-to-all", *same, "--ep", "4"))
    return Work(row, f"Qwen3-30B-A3B, 8 layers, ep 4, {name}", tuple(runs), FOUR, 4, 10)


def layout(label: str, text: str, words: tuple[str, ...], *, beside: str = "", is_repeated: bool = True) -> Run:
    return Run(f"megaspec {label}", "ours", words, text, beside, is_repeated)


# How the label of what tune names first begins.
FIRST = "megaspec 1: "
# Sequences a step -> steps before those that are measured, and those.
TUNED = {8: (2, 5), 64: (1, 2), 512: (1, 1)}


def tuned_works(sequences: int, *, top: int, skip: int = 0, hardware: str = "h200") -> Iterator[Work]:
    """What `megaspec tune` names for Llama-3-8B on four GPUs, from `skip` on to the `top`-th."""
    found = tuned(sequences, top=top, hardware=hardware)
    # a step of 512 sequences takes a minute and a half: what compiles and connects needs only a few of them
    few = ("--warmup-accum", "8") if sequences >= 512 else ()
    runs = []
    for number, one in enumerate(found.best[skip:top], start=skip + 1):
        text = layout_words(one)
        runs.append(
            Run(
                f"megaspec {number}: {in_short(text)}",
                "ours",
                ("--model", "llama8b", "--sequences", str(sequences), *few),
                text,
                is_repeated=False,
                planned_ms=round(one.time.seconds * 1e3, 2),
            )
        )
    warmup, steps = TUNED[sequences]
    name = f"8B, {sequences} sequences, what tune names"
    yield Work(f"tune{sequences}", name, tuple(runs), FOUR, warmup, steps, is_tuned=True)


@cache
def tuned(sequences: int, *, top: int, hardware: str) -> Found:
    """What the search finds, which takes seconds."""
    words = ["tune", "recipe=llama3_8b", f"hardware={hardware}", f"gpus={FOUR}", f"train.global_batch={sequences}"]
    return find(parse([*words, "--trainable", "--top", str(top)])).found


def layout_words(candidate: Candidate) -> str:
    """A layout that was found, as bench_layouts.py is told it."""
    words = []
    for key, value in layout_of(candidate.recipe).items():
        section, _, name = key.partition(".")
        if value is None:
            value = "null"
        if isinstance(value, bool):
            value = str(value).lower()
        if section == "parallelism":
            words.append(f"{name}={value}")
        if key == "train.micro_batch":
            words.append(f"mbs={value}")
    return " ".join(words)


def in_short(text: str) -> str:
    """Of a layout's words those that tell it from others."""
    plain = {"1", "null", "false", "none"}
    said = []
    for word in text.split():
        key, _, value = word.partition("=")
        if value not in plain and key not in ("dp_shard", "pipeline.virtual_stages", "pipeline.micro_batch_group"):
            said.append(word.removeprefix("pipeline."))
    words = " ".join(said)
    if "pp=" not in words:
        words = words.replace("schedule=1f1b ", "")
    return words


def smoke_works() -> Iterator[Work]:
    """Small models that a CPU trains: whether the script itself works."""
    words = ("--model", "tiny", "--seq", "128", "--cross-entropy", "reference", "--compile", "none")
    packed = ours("packed", *words, "--documents", "32", "--set", "kernels.adamw=reference")
    failing = ours("fails", *words, "--set", "train.nothing=1")
    yield Work("smoke", "tiny", (packed, failing, mcore("thd", "--model", "llama1b", "--documents", "32")))
    tiny16 = (
        "--model",
        "tiny16",
        "--seq",
        "128",
        "--cross-entropy",
        "reference",
        "--compile",
        "none",
        "--sequences",
        "8",
    )
    runs = [layout(label, f"pp=4 {schedule}", tiny16, is_repeated=False) for label, schedule in SCHEDULES.items()]
    runs.insert(1, layout("fails", "pp=4 pipeline.nothing=1", tiny16, is_repeated=False))
    runs.append(layout("zb_v, zero1", HUNG, tiny16))
    stages = ("--model", "tiny16", "--seq", "128", "--accum", "8", "--device", "cpu", "--pp", "4")
    runs.append(mcore("1F1B", *stages))
    runs.append(mcore("interleaved", *stages, "--chunks", "2", "--p2p", "overlapped"))
    yield Work("smoke4", "tiny, four ranks", tuple(runs), FOUR)
