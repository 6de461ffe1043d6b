"""Predictions beside measurements that set none of the model's constants.

tests/benchmarks/results/held_out_four_h200.jsonl: five layouts that were measured after the constants were fixed.
"""

import json
from pathlib import Path

import pytest

from megaspec.compose import compose
from megaspec.resolve.ceilings import ceilings_of
from megaspec.resolve.facts import Facts
from megaspec.resolve.fill import plainly_filled
from megaspec.resolve.hardware import HARDWARE
from megaspec.resolve.memory import fullest, memory_of
from megaspec.resolve.step_time import step_time
from megaspec.resolve.target import Target

LINES = Path(__file__).parents[1] / "benchmarks" / "results" / "held_out_four_h200.jsonl"
ROWS = [json.loads(line) for line in LINES.read_text().splitlines()]
RECIPES = {"llama1b": "llama3_2_1b", "llama8b16": "llama3_8b_half"}
H200 = HARDWARE["H200"]
TARGET = Target(gpus=4, gpu="NVIDIA H200", sm=90, gpu_memory=H200.memory, versions={"torch": "2.11.0"})


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']} seq{row['seq']} tp{row['tp']}")
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
    predicted = step_time(recipe, H200, ceilings_of(H200)).seconds
    assert predicted == pytest.approx(row["step_ms"] / 1e3, rel=0.10)
    assert fullest(memory_of(recipe)).allocated == pytest.approx(row["max_memory_allocated"], rel=0.05)


def test_the_rows_are_five_different_ones():
    assert len({(row["model"], row["seq"], row["tp"]) for row in ROWS}) == 5
