"""Measured throughput: curves, the shipped H200 table against others' measurements, other GPUs, groups across nodes."""

import json
from itertools import pairwise
from math import inf, sqrt
from statistics import mean

import pytest
from pydantic import ValidationError

from megaspec.core.errors import RecipeError
from megaspec.estimate import throughput as throughput_module
from megaspec.estimate.curves import Curve, never_faster
from megaspec.estimate.hardware import HARDWARE
from megaspec.estimate.throughput import MeasuredThroughput, read_throughput, throughput_of

H200 = throughput_of(HARDWARE["H200"])
KINDS = ("forward", "dgrad", "wgrad")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")


def test_a_curve_gives_back_its_points_and_geometric_means_between_them():
    curve = Curve(sizes=((1, 4), (10, 100)), seconds=(1e-6, 4e-6, 9e-6, 16e-6))
    points = [(1, 10, 1e-6), (1, 100, 4e-6), (4, 10, 9e-6), (4, 100, 16e-6)]
    assert [curve.at(a, b) for a, b, _ in points] == pytest.approx([s for *_, s in points])
    assert curve.at(2, 10) == pytest.approx(3e-6)
    assert curve.at(2, sqrt(1000)) == pytest.approx((1 * 4 * 9 * 16) ** 0.25 * 1e-6)
    assert curve.at(0.01, 3) == pytest.approx(1e-6)
    assert curve.at(4, 300) == pytest.approx(48e-6)
    assert curve.at(8, 200) == pytest.approx(64e-6)


@pytest.mark.parametrize(
    ("sizes", "seconds"),
    [((), (1e-3,)), (((),), ()), (((2, 1),), (1e-3, 1e-3)), (((1, 1),), (1e-3, 1e-3)), (((1, 2),), (1e-3,))],
)
def test_what_is_no_grid_is_refused(sizes, seconds):
    with pytest.raises(ValidationError):
        Curve(sizes=sizes, seconds=seconds)


def test_a_lucky_shape_does_not_make_larger_work_faster():
    sizes = ((1, 2), (1, 2, 3))
    assert never_faster(sizes, [1, 3, 2, 2, 1, 5]) == [1, 3, 3, 2, 3, 5]


# TFLOP/s of forward, input and weight gradient that two other programs measured on other days, tokens x outputs x
# inputs: one that keeps the GPU busy for seconds, and one that lets it cool down between shapes.
BUSY = {
    (8192, 6144, 4096): (653, 659, 646),
    (8192, 4096, 4096): (647, 646, 637),
    (8192, 28672, 4096): (712, 691, 649),
    (8192, 4096, 14336): (611, 629, 635),
    (8192, 3072, 2048): (613, 652, 640),
    (8192, 2048, 2048): (614, 621, 634),
    (8192, 16384, 2048): (742, 802, 723),
    (8192, 2048, 8192): (703, 647, 621),
    (8192, 128256, 4096): (657, 671, 641),
    (16384, 4096, 2048): (633, 669, 663),
    (16384, 2048, 512): (490, 583, 536),
    (16384, 8192, 7168): (624, 674, 658),
}
COOL = {
    (16384, 6144, 4096): (617, 616, 642),
    (16384, 4096, 4096): (555, 554, 582),
    (16384, 28672, 4096): (645, 681, 695),
    (16384, 4096, 14336): (664, 699, 704),
    (8192, 128256, 4096): (695, 662, 648),
    (16384, 16384, 2048): (773, 815, 716),
    (16384, 2048, 8192): (665, 611, 695),
}


@pytest.mark.parametrize("measured", [BUSY, COOL], ids=["busy", "cool"])
def test_products_agree_with_other_measurements(measured):
    """Kernel choice and clocks move single shapes by up to a fifth; they must cancel out over a model's shapes."""
    off = {}
    for (m, n, k), rates in measured.items():
        for kind, rate in zip(KINDS, rates, strict=True):
            seconds = H200.matmul_seconds(m, n, k, precision="bf16", kind=kind)
            off[m, n, k, kind] = seconds * rate * 1e12 / (2 * m * n * k) - 1
    assert max(map(abs, off.values())) < 0.2, off
    assert abs(mean(off.values())) < 0.02, off


@pytest.mark.parametrize(
    ("head_size", "length", "batch", "forward", "backward"),
    [(128, 4096, 4, 612, 490), (128, 8192, 2, 644, 510), (128, 32768, 1, 599, 535), (64, 8192, 2, 458, 420)],
)
def test_attention_agrees_with_other_measurements(head_size, length, batch, forward, backward):
    once = 2 * batch * 32 * length**2 * head_size
    for direction, flops, rate in (("forward", once, forward), ("backward", 2.5 * once, backward)):
        seconds = H200.attention_seconds(
            tokens=batch * length, seq_len=length, heads=32, kv_heads=8, head_size=head_size, direction=direction
        )
        assert flops / seconds / 1e12 == pytest.approx(rate, rel=0.1)


def test_memory_and_links_agree_with_other_measurements():
    assert 2**32 / H200.memory_seconds(2**32) == pytest.approx(4.27e12, rel=0.04)
    # fused AdamW reads and writes 28 bytes per parameter
    assert 28 * 2**30 / H200.update_seconds(28 * 2**30) == pytest.approx(3.48e12, rel=0.04)
    # GB/s of a ring's links for 512 MB over four GPUs
    for kind, bus, part in (
        ("all_reduce", 348, 1.5),
        ("all_gather", 333, 0.75),
        ("reduce_scatter", 310, 0.75),
        ("all_to_all", 315, 0.75),
    ):
        assert 2**29 * part / H200.collective_seconds(kind, 2**29, 4, within_node=True) / 1e9 == pytest.approx(
            bus, rel=0.06
        )


def ladder(first: float, last: float, steps: int = 60) -> list[float]:
    return [first * (last / first) ** (i / steps) for i in range(steps + 1)]


def assert_ascending(times: list[float]) -> None:
    assert all(b >= a * (1 - 1e-9) for a, b in pairwise(times)), times
    assert times[-1] > 2 * times[0] > 0


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8", "fp32", "fp64"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_larger_product_is_never_faster(precision, kind):
    def seconds(m, n, k):
        return H200.matmul_seconds(m, n, k, precision=precision, kind=kind)

    for at in (300, 3000, 20000):
        assert_ascending([seconds(size, at, at) for size in ladder(100, 200_000)])
        assert_ascending([seconds(at, size, at) for size in ladder(100, 200_000)])
        assert_ascending([seconds(at, at, size) for size in ladder(100, 200_000)])


def test_other_larger_work_is_never_faster():
    base = {"tokens": 8192, "seq_len": 4096, "heads": 16, "kv_heads": 4, "head_size": 96}
    for direction in ("forward", "backward"):
        for key in ("tokens", "seq_len", "heads", "head_size"):
            sizes = ladder(base[key] / 8, base[key] * 64)
            assert_ascending([H200.attention_seconds(**base | {key: s}, direction=direction) for s in sizes])
    assert_ascending([H200.memory_seconds(size) for size in ladder(1e3, 1e12)])
    for kind in KINDS:
        for shape in (lambda s: (16, s, 1024, 1024), lambda s: (16, 8192, s, 1024), lambda s: (16, 8192, 1024, s)):
            groups = [
                H200.grouped_matmul_seconds(*shape(s), precision="bf16", kind=kind) for s in ladder(256, 1_000_000)
            ]
            assert_ascending(groups)
    for kind in COLLECTIVES:
        for within in (True, False):
            sizes = ladder(1e3, 1e11)
            assert_ascending([H200.collective_seconds(kind, size, 8, within_node=within) for size in sizes])


def test_nothing_costs_nothing():
    assert H200.matmul_seconds(0, 512, 512, precision="bf16", kind="forward") == 0
    assert H200.grouped_matmul_seconds(8, 0, 512, 512, precision="bf16", kind="forward") == 0
    assert H200.memory_seconds(0) == 0
    assert H200.collective_seconds("all_reduce", 2**20, 1, within_node=True) == 0
    assert H200.collective_seconds("all_reduce", 0, 8, within_node=False) == 0


def test_formats():
    size = {"kind": "forward"}
    bf16, fp16, fp8, fp32, fp64 = (
        H200.matmul_seconds(8192, 8192, 4096, precision=p, **size) for p in ("bf16", "fp16", "fp8", "fp32", "fp64")
    )
    assert fp16 == bf16
    assert 1.6 < bf16 / fp8 < 2.0
    assert 10 < fp32 / bf16 < 16
    assert 8 < fp64 / bf16 < 16
    whole = H200.attention_seconds(
        tokens=8192, seq_len=8192, heads=32, kv_heads=8, head_size=128, direction="forward", causal=False
    )
    half = H200.attention_seconds(tokens=8192, seq_len=8192, heads=32, kv_heads=8, head_size=128, direction="forward")
    assert whole == pytest.approx(2 * half)
    with pytest.raises(
        RecipeError, match=r"precision=fp8: A100-80 has no such matrix products; try fp64, fp32, bf16 or fp16"
    ):
        throughput_of(HARDWARE["A100-80"]).matmul_seconds(8192, 8192, 8192, precision="fp8", kind="forward")


def test_experts_cost_at_least_what_one_product_costs():
    one = H200.matmul_seconds(65536, 4096, 4096, precision="bf16", kind="forward")
    few, many = (
        H200.grouped_matmul_seconds(groups, 65536, 4096, 4096, precision="bf16", kind="forward") for groups in (8, 1024)
    )
    assert one <= few < 1.2 * one
    # 64 tokens for each expert: half of the rows of a tile are empty, and all weights are read
    assert many > 1.3 * few
    fp8 = H200.grouped_matmul_seconds(8, 65536, 4096, 4096, precision="fp8", kind="forward")
    assert 1.5 < few / fp8 < 2.2


def test_other_gpus_are_scaled_by_their_data_sheets():
    h100, b200 = (MeasuredThroughput(H200.table, HARDWARE[name]) for name in ("H100", "B200"))
    assert h100.memory_seconds(2**30) == pytest.approx(H200.memory_seconds(2**30) * 4.8 / 3.35)
    attention = {"tokens": 8192, "seq_len": 8192, "heads": 32, "kv_heads": 8, "head_size": 128, "direction": "forward"}
    assert b200.attention_seconds(**attention) == pytest.approx(H200.attention_seconds(**attention) * 989 / 2250)
    short, long = (
        [one.collective_seconds("all_gather", size, 4, within_node=True) for one in (H200, b200)]
        for size in (2**10, 2**34)
    )
    assert short[0] == short[1]
    assert long[0] == pytest.approx(2 * long[1], rel=0.01)


# TFLOP/s of the best products of each kind in a burst (Bekman, Machine Learning Engineering, maximum achievable matmul
# FLOPS); an H200's is an H100's in bf16.
BURSTS = {
    "A100-40": {"bf16": 271.2},
    "A100-80": {"bf16": 271.2},
    "H100": {"bf16": 794.5, "fp8": 1402.6},
    "H200": {"bf16": 794.5, "fp8": 1453.4},
    "B200": {"bf16": 1745.0, "fp8": 3432.5},
    "GB200": {"bf16": 1822.0, "fp8": 3615.6},
}


def seconds_of(throughput, precision, kind="forward"):
    return throughput.matmul_seconds(8192, 8192, 8192, precision=precision, kind=kind)


@pytest.mark.parametrize("name", ["H100", "B200", "GB200"])
def test_products_of_gpus_short_of_power_go_by_their_bursts(name):
    other = MeasuredThroughput(H200.table, HARDWARE[name])
    for precision in ("bf16", "fp8"):
        expected = seconds_of(H200, precision) * BURSTS["H200"][precision] / BURSTS[name][precision]
        assert seconds_of(other, precision) == pytest.approx(expected)
    assert seconds_of(other, "fp16") == seconds_of(other, "bf16")
    # what was not measured goes by the data sheets
    assert seconds_of(other, "fp64") == pytest.approx(seconds_of(H200, "fp64") * 67e12 / HARDWARE[name].peak["fp64"])


def test_products_of_an_a100_keep_their_rate():
    """The H200's table was measured on one that is kept busy: its best product is 713 TFLOP/s, of 794.5 in a burst."""
    curve = H200.table.products["bf16"].forward
    rates = []
    for i, m in enumerate(curve.sizes[0]):
        for j, n in enumerate(curve.sizes[1]):
            for k, width in enumerate(curve.sizes[2]):
                seconds = curve.seconds[(i * len(curve.sizes[1]) + j) * len(curve.sizes[2]) + k]
                rates.append(2 * m * n * width / seconds)
    best = max(rates)
    assert best == pytest.approx(713e12, rel=0.001)
    for name in ("A100-40", "A100-80"):
        a100 = throughput_of(HARDWARE[name])
        assert seconds_of(a100, "bf16") == pytest.approx(seconds_of(H200, "bf16") * best / 271.2e12)
        assert seconds_of(a100, "fp16", "wgrad") == pytest.approx(seconds_of(H200, "fp16", "wgrad") * best / 271.2e12)
        few = a100.grouped_matmul_seconds(64, 65536, 2048, 2048, precision="bf16", kind="forward")
        own = H200.grouped_matmul_seconds(64, 65536, 2048, 2048, precision="bf16", kind="forward")
        assert few == pytest.approx(own * best / 271.2e12)


def test_a_table_of_another_kind_serves_as_well(tmp_path):
    """An A100's own products, planned for an H200, are what a busy H200 reaches by both bursts."""
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(table() | {"hardware": "A100-80", "source": "mine"}))
    mine, other = read_throughput(path), read_throughput(path, HARDWARE["H200"])
    assert seconds_of(other, "bf16") == pytest.approx(seconds_of(mine, "bf16") * 271.2e12 / 713.4e12, rel=0.001)


def test_where_speeds_are_from(tmp_path):
    measured = "NVIDIA H200, links over 4 of them, torch 2.11.0+cu130"
    assert H200.source == f"measured on {measured}"
    a100 = throughput_of(HARDWARE["A100-80"]).source
    assert a100.startswith("A100-80's data sheet: of its matrix products as much as others measured (Bekman 2026, ")
    assert a100.endswith(f"of all else as much as the H200 reaches of its own (measured on {measured})")
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(table() | {"hardware": "H100", "collectives": [], "source": "mine"}))
    links = f"links: H100's data sheet, of which as much as the H200 reaches ({measured})"
    assert read_throughput(path).source == f"measured on mine; {links}"
    assert read_throughput(path, HARDWARE["B200"]).source.endswith("the H100 reaches of its own (measured on mine)")


def test_a_table_that_is_shipped_is_taken(tmp_path, monkeypatch):
    own = table() | {"hardware": "A100-80", "source": "an A100"}
    for name, content in (("h200.json", table()), ("a100-80.json", own)):
        (tmp_path / name).write_text(json.dumps(content))
    monkeypatch.setattr(throughput_module, "_MEASURED", tmp_path)
    throughput_module._shipped.cache_clear()
    try:
        assert throughput_of(HARDWARE["A100-80"]).source == "measured on an A100"
        assert throughput_of(HARDWARE["A100-40"]).table.hardware == "H200"
    finally:
        throughput_module._shipped.cache_clear()


def test_groups_across_nodes_are_bound_by_network_cards():
    size = 2**32
    card = 400e9 / 8
    alone = H200.collective_seconds("all_gather", size, 16, within_node=False)
    assert alone == pytest.approx(size * 15 / 16 / (0.9 * card), rel=0.01)
    eight = H200.collective_seconds("all_gather", size, 16, within_node=False, ranks_per_node=8)
    inside = H200.collective_seconds("all_gather", size, 16, within_node=True)
    assert eight == pytest.approx(max(alone / 8, inside), rel=0.01)
    assert H200.collective_seconds("all_reduce", size, 16, within_node=False) == pytest.approx(2 * alone, rel=0.01)
    moved = H200.collective_seconds("all_to_all", size, 16, within_node=False, ranks_per_node=8)
    assert moved == pytest.approx(size / 2 / (0.9 * card), rel=0.01)
    assert H200.collective_seconds("p2p", size, 2, within_node=False) == pytest.approx(size / (0.9 * card), rel=0.01)
    short = [H200.collective_seconds("all_reduce", 1024, n, within_node=False) for n in (2, 64, 4096)]
    assert short[0] < short[1] < short[2] < 2e-4


def test_more_ranks_of_a_node_take_longer_for_one_tensor():
    for kind in COLLECTIVES:
        times = [H200.collective_seconds(kind, 2**30, ranks, within_node=True) for ranks in (2, 4, 8, 16, 72)]
        assert times == sorted(times) or kind == "p2p"
        assert times[-1] < 2 * times[1]


def table() -> dict:
    return json.loads(H200.table.model_dump_json())


def test_a_users_table(tmp_path):
    path = tmp_path / "mine.json"
    alone = table() | {"hardware": "H100", "collectives": [], "source": "mine"}
    path.write_text(json.dumps(alone))
    mine = read_throughput(path)
    assert (mine.hardware, mine.table.source) == (HARDWARE["H100"], "mine")
    # a machine of one GPU measured no links: those of the shipped table are taken
    assert mine.collective_seconds("all_reduce", 2**28, 4, within_node=True) == H200.collective_seconds(
        "all_reduce", 2**28, 4, within_node=True
    )
    other = read_throughput(path, HARDWARE["B200"])
    assert MeasuredThroughput(mine.table, HARDWARE["B200"]).memory_seconds(2**30) == other.memory_seconds(2**30)


def broken(**changes: object) -> str:
    return json.dumps(table() | changes)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is no table of measured throughput: its content"),
        ("[" * 100_000, "is no table of measured throughput"),
        ("{}", "is no table of measured throughput: hardware: Field required"),
        (broken(memory={"sizes": [[2, 1]], "seconds": [1, 2]}), "memory: Value error, every axis of sizes must ascend"),
        (broken(memory={"sizes": [[1, 2]], "seconds": [1]}), "1 seconds for a grid of 2 points"),
        (broken(memory={"sizes": [[1, 2]], "seconds": [1e-4, inf]}), "memory.seconds.1"),
        (broken(launch_seconds=-1), "launch_seconds"),
        (broken(hardware="TPU"), "is of hardware=TPU, which is not known; known are A100-40"),
        (broken(collectives=table()["collectives"][:2]), "no collective of kind all_to_all, p2p or reduce_scatter"),
        (broken(surprise=1), "surprise: Extra inputs are not permitted"),
        (" " * (4 * 2**20 + 1), "more than 4,194,304"),
    ],
)
def test_files_that_are_no_tables(tmp_path, text, told):
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(RecipeError) as error:
        read_throughput(path)
    assert [problem.key for problem in error.value.problems] == ["throughput"]
    assert f"throughput={path}" in str(error.value)
    assert told in str(error.value)


def test_no_file(tmp_path):
    for path in (tmp_path, tmp_path / "absent.json"):
        with pytest.raises(RecipeError, match="is no file; megaspec bench throughput writes such a file"):
            read_throughput(path)
