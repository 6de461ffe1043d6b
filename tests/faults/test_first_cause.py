"""The console shows the first cause; what the other ranks write when they miss that rank is in their logs."""

from tests.faults.runs import go, make_run, recipe


def test_a_rank_that_raises_is_all_that_the_console_shows(tmp_path, factory, capfd):
    run = make_run(tmp_path / "run", recipe())
    assert go(run, factory, fault={"rank": 1, "kind": "raise", "point": "step", "count": 3}) == 70
    said = capfd.readouterr().err
    lines = [line for line in said.splitlines() if line]
    # the cause first, and then what that rank wrote
    assert lines[0] == f"megaspec: rank 1 ended with exit code 1; what it wrote: {run}/logs/rank-1.log"
    assert any(line.startswith("  [rank 1]") and line.endswith("ZeroDivisionError: planted") for line in lines)
    assert lines[-1] == f"  what other ranks wrote when they missed it: {run}/logs/rank-*.log"
    assert "rank 0" not in said
    assert "rank0" not in said
    assert "rank 0: a collective failed" in (run / "logs" / "rank-0.log").read_text()


def test_rank_0_shows_its_own_error(tmp_path, factory, capfd):
    run = make_run(tmp_path / "run", recipe())
    assert go(run, factory, fault={"rank": 0, "kind": "raise", "point": "step", "count": 3}) == 70
    said = capfd.readouterr().err
    assert said.count("ZeroDivisionError: planted") == 1
    assert said.index("ZeroDivisionError") < said.index("megaspec: rank 0 ended with exit code 1")
    assert "missed it" not in said
