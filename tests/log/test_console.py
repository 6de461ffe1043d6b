"""What the terminal shows."""

import io
import re
import time

import pytest

from megaspec.log import console
from megaspec.log.console import CLEAR_LINE, ConsoleSink, duration, quantity
from megaspec.log.events import (
    CheckpointSaved,
    DataLeftOut,
    EvalDone,
    RunEnded,
    RunStarted,
    Sampled,
    StepsProfiled,
    TimeOfKind,
)
from megaspec.log.profile_table import table_lines
from megaspec.profiling.kinds import KINDS
from tests.log.events_for_tests import rolled_back, skipped, step_done


class Terminal(io.StringIO):
    def isatty(self):
        return True


def show(stream, events, *, every=10, live=True):
    sink = ConsoleSink(every=every, live=live, stream=stream)
    for event in events:
        sink(event)
    sink.close()
    return stream.getvalue()


def screen(text):
    """The lines that a terminal shows at the end."""
    return [line.split(CLEAR_LINE)[-1] for line in text.split("\n")]


def test_without_a_terminal_a_line_every_few_steps():
    text = show(io.StringIO(), [step_done(s, steps=25) for s in range(1, 26)])
    assert "\x1b" not in text
    assert "\r" not in text
    assert re.findall(r"^step (\d+)/25 ", text, re.MULTILINE) == ["10", "20", "25"]


def test_the_numbers_of_a_step():
    run = RunStarted(
        step=0, steps=100, world_size=4, flops_per_token_causal=3e9, flops_per_token_full=4e9, peak_flops=5e12
    )
    slow_first = step_done(1, seconds=60.0)
    events = [run, slow_first, *(step_done(s, memory_bytes=12_300_000_000) for s in range(2, 11))]
    (line,) = show(io.StringIO(), events).splitlines()
    # 1000 tokens in 0.5 s; 2000 tokens/s * 3e9 FLOPs / (4 * 5e12 FLOP/s) = 30 %; 90 steps left of 0.5 s
    assert line == (
        "step 10/100  loss 3.9000  lr 1.00e-03  grad norm 0.500  2k tokens/s  MFU 30.0 % causal, 40.0 % full  "
        "12.3 GB  ETA 0:45"
    )


@pytest.mark.parametrize(("saturated", "said"), [(1, "  1 element saturated"), (1200, "  1,200 elements saturated")])
def test_what_is_too_large_for_fp8_is_counted(saturated, said):
    (line,) = show(io.StringIO(), [step_done(10, fp8_saturated=saturated)]).splitlines()
    assert f"{said} in fp8" in line


def test_a_line_says_so_where_the_host_waits_for_data():
    run = RunStarted(step=0, steps=100)
    slow = show(io.StringIO(), [run, *(step_done(s, data_seconds=0.1) for s in range(1, 11))])
    assert "waits for data 20 % of the time" in slow
    assert "waits" not in show(io.StringIO(), [run, *(step_done(s, data_seconds=0.02) for s in range(1, 11))])


def test_no_mfu_where_the_peak_is_not_known():
    run = RunStarted(step=0, steps=100, flops_per_token_causal=3e9, flops_per_token_full=4e9)
    assert "MFU" not in show(io.StringIO(), [run, *(step_done(s) for s in range(1, 11))])


def test_a_skipped_update_is_always_shown():
    text = show(io.StringIO(), [step_done(3, skipped=True, loss_scale=512.0)])
    assert "loss scale 512" in text
    assert "update skipped" in text


def test_a_terminal_has_one_line_that_is_rewritten(monkeypatch):
    monkeypatch.setattr(console, "REDRAW_SECONDS", 0.0)
    text = show(Terminal(), [step_done(s, steps=30) for s in range(1, 31)])
    assert text.count(CLEAR_LINE + "step") >= 30
    assert [line.split()[1] for line in screen(text) if line] == ["30/30"]


def test_other_events_stay_above_the_live_line():
    events = [
        step_done(1),
        EvalDone(step=1, loss=2.0, sets={"valid": 2.0}, tokens={"valid": 9}, seconds=1.0),
        step_done(10),
        CheckpointSaved(step=10, path="runs/x/10", seconds=0.5),
        Sampled(step=10, prompt="Once", text=" upon\x1b]0;title\x07 a time"),
        RunEnded(step=10, how="Preempted"),
    ]
    lines = screen(show(Terminal(), events))
    assert lines[0].startswith("step 1/100")
    assert lines[1] == "step 1  valid loss 2.0000 (perplexity 7.39), 1.0 s"
    assert lines[2].startswith("step 10/100")
    assert lines[3] == "step 10  saved runs/x/10, 0.5 s"
    assert lines[5] == "Once upon\\x1b]0;title\\x07 a time"
    assert lines[6] == "ended after step 10: Preempted"


def test_a_line_fits_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    text = show(Terminal(), [step_done(10)])
    first, *_ = screen(text)
    assert len(first) <= 39
    # what doesn't fit goes from the middle
    assert first == "step 10/100  loss 3.9000  ETA 0:45"


def test_drawing_is_bounded():
    events = [step_done(s, steps=10**6) for s in range(1, 20_000)]
    start = time.monotonic()
    text = show(Terminal(), events, every=10**6)
    assert text.count(CLEAR_LINE) <= 3 + (time.monotonic() - start) / console.REDRAW_SECONDS


@pytest.mark.parametrize(
    ("number", "text"), [(7, "7"), (999, "999"), (1234, "1.23k"), (41_234, "41.2k"), (1.5e6, "1.5M"), (2e12, "2000B")]
)
def test_quantity(number, text):
    assert quantity(number) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (90061, "25:01:01")])
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_bad_numbers_are_told_with_what_is_done_about_them():
    left_out = DataLeftOut(step=9, steps=20, first_sample=32, samples=4)
    text = show(io.StringIO(), [skipped(7), rolled_back(8, 12), left_out], live=False)
    assert text.splitlines() == [
        "step 7  not finite: loss nan, grad norm 1.5: update skipped, 1 of 3 within 100 steps; seen in the loss of "
        "rank 1 of 2; samples 24 to 27",
        "step 12  not finite: loss nan, grad norm 1.5, seen in the loss of rank 1 of 2: back to step 8, rollback 1 of "
        "2; the data of steps 10 to 12 is left out, samples 24 to 35",
        "step 9/20  left out: samples 32 to 35",
    ]


@pytest.mark.parametrize(
    ("profiled", "said"),
    [(1.1, "with it +10.0%, which is the host's time"), (0.8, "with it -20.0%, so steps differ by themselves")],
)
def test_what_a_profiler_costs_is_told_where_it_costs_something(profiled, said):
    nothing = TimeOfKind(0.0, 0.0, 0)
    event = StepsProfiled(
        step=5, first_step=5, rank=0, device="cpu", seconds=profiled, accounted=1.0,
        kinds=dict.fromkeys(KINDS, nothing), largest_other={}, no_plan="none", clock_mhz=None, clock_mhz_lowest=None,
        clock_mhz_highest=None, power_watts=None, power_limit_watts=None, no_clock="none", unprofiled_seconds=1.0,
        files=[],
    )  # fmt: skip
    assert f"a step without the profiler took 1,000.0 ms: {said}" in list(table_lines(event))
