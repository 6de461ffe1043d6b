"""Predictions beside measurements that set none of the model's constants: what was measured after these were fixed.

But for the step times of pipelines: on those BESIDE_PASSES was set. What power.py says was set later, on clocks and
profiles of one H200, with these lines in view.

tests/benchmarks/results: held_out_four_h200.jsonl, five layouts; dimensions_*.jsonl, llama8b_two_h200.jsonl and
pipelines_two_h200.jsonl, each parallel dimension; divided_four_h200.jsonl, layers divided by time;
tuned_four_h200.jsonl, what tune names; switches_two_h200.jsonl, overlaps and offloads on and off;
train_one_h100.jsonl, one H100, measured together with its table. All of them are of the code before tables' gradients
were summed in place: see conftest.py. What was measured since is in FILES. Its first two gave rates of kernels by
profiles. On steps of scales_in_one_launch_two_h200 and quantisers_steps_h200 the power of rowwise products was set, and
on a profile beside rowwise_and_blockwise_before_two_h200 the price of blockwise weight gradients.
"""

import json
from pathlib import Path

import pytest

from megaspec.compose.compose import compose
from megaspec.estimate.hardware import HARDWARE
from megaspec.estimate.memory import fullest, memory_of
from megaspec.estimate.step_time import step_time
from megaspec.estimate.target import Target
from megaspec.estimate.throughput import throughput_of
from megaspec.estimate.work import layer_parts
from megaspec.resolve.fill import plainly_filled
from megaspec.rules.run_facts import Facts
from tests.benchmarks import bench_train, tables
from tests.benchmarks.bench_switches import SWITCHES, arguments

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def lines(name):
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


ROWS = lines("held_out_four_h200.jsonl")
DIMENSIONS = [
    row
    for name in (
        "dimensions_four_h200.jsonl",
        "dimensions_two_h200.jsonl",
        "divided_four_h200.jsonl",
        "llama8b_two_h200.jsonl",
        "pipelines_two_h200.jsonl",
        "tuned_four_h200.jsonl",
    )
    for row in lines(name)
    if row["peer"] == "megaspec"
]
PIPELINES = [row for row in DIMENSIONS if row["parallelism"]["pp"] > 1 and "compute_ms" in row["ranks"][0]]
MEASURED = lines("switches_two_h200.jsonl")
RECIPES = {"llama1b": "llama3_2_1b", "llama8b16": "llama3_8b_half"}
H200 = HARDWARE["H200"]
TARGET = Target(gpus=4, gpu="NVIDIA H200", sm=90, gpu_memory=H200.memory, versions={"torch": "2.11.0"})


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']} seq{row['seq']} tp{row['tp']}")
@pytest.mark.usefixtures("before")
def test_time_within_ten_and_memory_within_five_per_cent(row):
    dp = row["gpus"] // row["tp"]
    words = (
        f"data.seq_len={row['seq']}",
        f"model.max_seq_len={row['seq']}",
        f"parallelism.tp={row['tp']}",
        f"parallelism.dp_replicate={dp}",
        f"train.micro_batch={row['mbs']}",
        f"train.global_batch={row['mbs'] * row['accum'] * dp}",
    )
    recipe = plainly_filled(compose(RECIPES[row["model"]], words).recipe, TARGET, Facts(run_dir="runs/x"))
    predicted = step_time(recipe, H200, throughput_of(H200)).seconds
    assert predicted == pytest.approx(row["step_ms"] / 1e3, rel=0.10)
    assert fullest(memory_of(recipe)).allocated == pytest.approx(row["max_memory_allocated"], rel=0.05)


def test_the_rows_are_five_different_ones():
    assert len({(row["model"], row["seq"], row["tp"]) for row in ROWS}) == 5


def filled(words, gpus):
    recipe = bench_train.recipe_of(bench_train.parser().parse_args(words), gpus)
    return plainly_filled(recipe, TARGET.model_copy(update={"gpus": gpus}), Facts(run_dir="-"))


H100 = HARDWARE["H100"]
ONE_H100 = Target(gpus=1, gpu="NVIDIA H100 80GB HBM3", sm=90, gpu_memory=H100.memory, versions={"torch": "2.11.0"})


@pytest.mark.parametrize("row", lines("train_one_h100.jsonl"), ids=lambda row: f"{row['model']} mb{row['mbs']}")
@pytest.mark.usefixtures("before")
def test_one_h100(row):
    """By the H200's table the dense rows came out 1.7 to 4.2 % too long; by its own they are within 2 %. Experts lie
    as far off as on the H200."""
    words = ["--model", row["model"]]
    for name in ("seq", "mbs", "accum"):
        words += [f"--{name}", str(row[name])]
    arguments = bench_train.parser().parse_args(words)
    recipe = plainly_filled(bench_train.recipe_of(arguments, 1), ONE_H100, Facts(run_dir="-"))
    predicted = step_time(recipe, H100, throughput_of(H100)).seconds
    within = 0.10 if "moe" in row["model"] else 0.02
    assert predicted == pytest.approx(row["step_ms"] / 1e3, rel=within)
    assert fullest(memory_of(recipe)).allocated == pytest.approx(row["max_memory_allocated"], rel=0.005)


def layout_of(row):
    own = row["parallelism"]
    degrees = " ".join(f"{axis}{own[axis]}" for axis in ("tp", "pp", "cp", "ep") if own[axis] > 1)
    schedule = own["pipeline"]["schedule"] if own["pp"] > 1 else ""
    divided = own["pipeline"]["layout"] or ""
    dispatch = own["dispatch"] if own["ep"] > 1 else ""
    words = (row["model"], degrees, own["dp_strategy"], schedule, divided, dispatch, f"mb{row['mbs']}x{row['accum']}")
    return " ".join(word for word in words if word)


def recipe_of(row):
    words = ["--model", row["model"]]
    for name in ("seq", "mbs", "accum"):
        words += [f"--{name}", str(row[name])]
    for name, value in row["parallelism"].items():
        words += ["--set", f"parallelism.{name}={json.dumps(value)}"]
    return filled(words, row["gpus"])


@pytest.mark.parametrize("row", DIMENSIONS, ids=layout_of)
@pytest.mark.usefixtures("before")
def test_every_dimension(row):
    recipe = recipe_of(row)
    stages = memory_of(recipe)
    assert fullest(stages).allocated == pytest.approx(row["max_memory_allocated"], rel=0.05)
    each = row["gpus"] // len(stages)
    for rank, measured in enumerate(row["ranks"]):
        assert stages[rank // each].allocated == pytest.approx(measured["peak"], rel=0.05)
    assert step_time(recipe, H200, throughput_of(H200)).seconds == pytest.approx(row["step_ms"] / 1e3, rel=0.10)


@pytest.mark.parametrize("row", PIPELINES, ids=layout_of)
@pytest.mark.usefixtures("before")
def test_what_stages_wait(row):
    """Of the rank that computes most, over what it computes: within a hundredth for each stage, where equal stages
    would wait 0.02 to 0.125 of two, 0.06 to 0.375 of four."""
    busiest = max(row["ranks"], key=lambda rank: rank["compute_ms"])
    measured = busiest["step_ms"] / busiest["compute_ms"] - 1
    assert step_time(recipe_of(row), H200, throughput_of(H200)).bubble == pytest.approx(
        measured, abs=0.01 * row["gpus"]
    )


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row['layout']} {row['switch']}={row['value']}")
@pytest.mark.usefixtures("before")
def test_every_switch(row):
    n = row["gpus"]
    (switch,) = (s for s in SWITCHES if (s.path, s.layout.format(n=n)) == (row["switch"], row["layout"]))
    recipe = filled(arguments(switch, row["value"], n), n)
    peak = max(rank["peak"] for rank in row["ranks"])
    assert fullest(memory_of(recipe)).allocated == pytest.approx(peak, rel=0.05)
    if recipe.parallelism.offload.optimizer == 0:
        # what a CPU updates depends on the cores that it gets, here 4 a rank
        assert step_time(recipe, H200, throughput_of(H200)).seconds == pytest.approx(row["step_ms"] / 1e3, rel=0.10)


@pytest.mark.parametrize(
    ("kind", "forward", "backward"),
    [
        # a token has 4,096 numbers of queries and 2,048 of keys and values, in bf16, and sums in fp32.
        # Forward: the causal part is cast up, the other rank's merged, all cast down; keys and values are joined.
        # Backward: the causal part cast up, the other rank's and half a block of its own added, one sum comes home.
        ("ring", 4096 * (6 + 10 + 6) + 2048 * 4, 6144 * (6 + 5 + 6) + (4096 + 1024) * 10 + 2048 * 16),
        # Forward: the same, but keys and values of both are put in order. Backward: three of four chunks' keys are
        # added twice, the sums are put in order and reduced.
        ("all_gather", 4096 * 22 + 6144 * 4, 4096 * 30 + 2048 * 16 + 3072 * 10 + 4096 * 24),
    ],
)
def test_bytes_of_blocks_put_together(kind, forward, backward):
    words = "--model llama8b16 --seq 32768 --set parallelism.cp=2 --set parallelism.context.kind="

    def attention(kind):
        recipe = filled((words + kind).split(), 2)
        parts = layer_parts(recipe, recipe.model.facts.layers[0], in_fp8=False)
        return next(part for part in parts if part.name == "core_attention")

    some, none = attention(kind), attention("all_to_all")
    assert some.forward_bytes - none.forward_bytes == 16384 * forward
    assert some.backward_bytes - none.backward_bytes == 16384 * backward


# Raw lines of fp8, documents, small steps and experts, with the sides of each file that are of code like today's. None:
# its lines name no side. Lines of other sides are of peers, or of earlier code, whose kernels no field says and whose
# documents had a mask over all pairs. But those before cuBLASLt had scales of lines and of blocks say that their
# products are torch's, which a recipe can still ask for.
FILES = {
    "fp8_and_documents_one_h200": (None,),
    "fp8_and_documents_one_h100": (None,),
    "dense_and_experts_one_h200": ("after",),
    "rowwise_and_blockwise_before_two_h200": ("before",),
    "rowwise_and_blockwise_one_h200": ("after",),
    "scales_in_one_launch_two_h200": ("ours",),
    "documents_before_and_after_one_h200": ("after",),
    "before_and_after_two_h200": ("after",),
    "quantisers_steps_h200": ("ours",),
    "quantisers_steps_one_h200": ("after",),
    "fp8_and_one_order_one_h200": ("ours",),
    "one_order_one_h200": ("ours", "after"),
    "attention_in_one_order_one_h200": ("ours",),
    "fast_sums_one_h200": ("after",),
    "experts_rowwise_one_h200": ("after",),
    "steps_ahead_one_h200": ("ours",),
    "steps_ahead_one_h100": ("ours",),
    "experts_four_h200": ("ours",),
}

# Steps that are left out, by their milliseconds. Their peaks are held, but for the last ones'.
#
# Lines of 2026-11-25 whose steps waited for the host: kernels of the first take 43.6 in a profile of the same command,
# and beside the others a process loaded its libraries.
WAITED_FOR_THE_HOST = (54.83, 79.01, 57.01)
# Of 1B with 2,048 tokens a step on two machines with slower hosts: the quickest steps of the same lines are at 45 ms.
SLOW_HOSTS = (55.41, 63.35, 57.22)
# Of other kernels than those of today: torch's copy added up experts' gradients, and experts' rows were cast to fp8 at
# a quarter of memory's rate.
OF_OTHER_KERNELS = (161.27, 204.1)
# Experts in fp8 wait for the host: the plan is 6 to 7 % short of these, and 2 % above the quickest step of the second.
EXPERTS_IN_FP8 = (195.61, 197.04)
# 1B's documents of 256 tokens on a second H100, which takes 4 % longer than the first one (231.88): the plan is 5.6 %
# short of it, and 2.9 % of its quickest step.
ON_A_SLOWER_H100 = (241.36,)
# Rowwise with torch's products: the plan is 6.1 to 6.5 % short, 80 to 85 ms. Each layout was cast by itself then, which
# takes 117 ms of a profiled step, where both together, as the plan has them, take 73. Blockwise casts were other ones,
# too (112 ms); those steps are within 5 % all the same.
ROWWISE_CAST_APART = (1311.54, 1313.26, 1316.05)
# Experts over four GPUs with forced balance by all_gather: the plan is 5.5 % long, over two GPUs 4.3. By the plan
# all_gather saves 17 ms of all_to_all's step, which is 3 % long itself; measured are 22. Why is not known: the row was
# measured once, without a profile.
ALL_GATHER_OF_FOUR = (220.03,)
# The plan takes all experts for equally full. By the learned router of new weights they are not: peaks are 0.9 to 1.0
# GiB above those with forced balance, and the plan is 2.2 to 2.4 % short of them. Steps take 8 (all_gather, the first
# two) and 16 % longer, and the plan is 2 and 11 % short. The first two are within 5 % because the plan of all_gather is
# long, see above.
LEARNED_ROUTER = (236.6, 237.84, 280.75, 279.59)
WITHOUT_TIME = (
    WAITED_FOR_THE_HOST
    + SLOW_HOSTS
    + OF_OTHER_KERNELS
    + EXPERTS_IN_FP8
    + ON_A_SLOWER_H100
    + ROWWISE_CAST_APART
    + ALL_GATHER_OF_FOUR
)
LEFT_OUT = WITHOUT_TIME + LEARNED_ROUTER


def new_rows():
    """Our lines of FILES that tell of a step, each with its kind of GPU. A run that was not done tells of none."""
    found = []
    for file, sides in FILES.items():
        kind = file.rpartition("_")[2].upper()
        for row in lines(f"{file}.jsonl"):
            if row.get("peer") != "megaspec" or row.get("side") not in sides:
                continue
            words = (file, row.get("row", row["model"]), row.get("layout", ""), f"{row['step_ms']:.0f} ms")
            found.append(pytest.param(row, kind, id=" ".join(word for word in words if word)))
    return found


NEW = new_rows()


def only(step_ms):
    return [param for param in NEW if param.values[0]["step_ms"] in step_ms]


def but_for(step_ms):
    return [param for param in NEW if param.values[0]["step_ms"] not in step_ms]


def time_apart(row, kind):
    """How far the plan is off, as a share of what was measured."""
    return tables.predicted_time(row, kind).seconds / (row["step_ms"] / 1e3) - 1


def peak_apart(row, kind):
    return fullest(tables.predicted_memory(row, kind)).allocated / row["max_memory_allocated"] - 1


def test_rows_that_are_left_out_are_there_once_and_the_others_are_held():
    found = [param.values[0]["step_ms"] for param in only(LEFT_OUT)]
    assert sorted(found) == sorted(LEFT_OUT)
    assert len(but_for(LEFT_OUT)) == 143


@pytest.mark.parametrize(("row", "kind"), but_for(LEFT_OUT))
def test_time_of_fp8_documents_small_steps_and_experts(row, kind):
    """On H200 those whose profiles gave the rates are within 3 %, the others within 4.5: H200 differ by 2 % themselves,
    by their clocks, and H100 by 1.4 to 4."""
    assert abs(time_apart(row, kind)) <= 0.05


@pytest.mark.parametrize(("row", "kind"), but_for(LEARNED_ROUTER))
def test_peak_of_fp8_documents_small_steps_and_experts(row, kind):
    assert abs(peak_apart(row, kind)) <= 0.01


@pytest.mark.parametrize(("row", "kind"), only(WITHOUT_TIME))
def test_times_that_are_left_out_are_outside(row, kind):
    """One that the plan has got right is held from then on."""
    assert abs(time_apart(row, kind)) > 0.05


@pytest.mark.parametrize(("row", "kind"), only(LEARNED_ROUTER))
def test_peaks_that_are_left_out_are_outside(row, kind):
    assert abs(peak_apart(row, kind)) > 0.01
