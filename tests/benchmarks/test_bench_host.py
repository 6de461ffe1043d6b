"""What the host does in a step: counted alike each time, nothing of it left behind, and no more than it was."""

import pytest
import torch

from megaspec.runtime.build import mesh_of
from tests.benchmarks import bench_train

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("Triton's interpreter launches nothing", allow_module_level=True)

from tests.benchmarks import bench_host  # noqa: E402

EXPERTS = ["--mbs", "2", "--precision", "fp8", "--set", "precision.recipe=tensorwise"]
ALL_IN_FP8 = ["--set", "precision.first_layers_bf16=0", "--set", "precision.last_layers_bf16=0"]
FEW = ["--warmup", "1", "--steps", "2"]


def line_of(*words: str) -> dict:
    args = bench_host.parser().parse_args([*words, *FEW])
    spec = bench_host.spec_of(args)
    with bench_host.without_gpu() as launches:
        step = bench_train.stepper(args, spec, mesh_of(spec, rank=0, device=torch.device("cpu")))
        return bench_host.measured(args, launches, step)


def test_a_layer_more_is_as_much_more_each_time_and_nothing_is_left_behind() -> None:
    before = (torch._scaled_grouped_mm, torch.cuda.current_device, bench_host.JITFunction._do_compile)
    found = []
    for layers in (1, 2, 3):
        found.append(line_of(*EXPERTS, *ALL_IN_FP8, "--set", f"model.n_layers={layers}"))
    for name in ("operations", "views", "launches"):
        first, second, third = (line[name] for line in found)
        assert third - second == second - first > 0, f"{name}: {first}, {second}, {third}"
    assert before == (torch._scaled_grouped_mm, torch.cuda.current_device, bench_host.JITFunction._do_compile)
    assert not isinstance(bench_host.driver._active, bench_host.Hopper)


def test_the_model_is_that_of_bench_train_but_for_sizes() -> None:
    args = bench_host.parser().parse_args(EXPERTS)
    spec = bench_host.spec_of(args)
    large = bench_train.MODELS["gptoss6"]
    assert spec.model.n_layers == large["n_layers"]
    assert (spec.model.moe.n_experts, spec.model.moe.top_k) == (large["moe"]["n_experts"], large["moe"]["top_k"])
    assert spec.kernels.scaled_grouped == "torch"
    assert spec.kernels.scaled_product == "cublaslt"


def test_lines_are_those_that_run() -> None:
    def work() -> None:
        bench_train.recipe_of(bench_train.parser().parse_args([]), 1)

    # most of the time is in pydantic, called from here: of many samples some are in lines of ours
    lines = bench_host.lines_in(work, steps=1000)
    assert lines, "1,000 recipes take more than a millisecond"
    assert all(text.startswith(("megaspec/", "kernels/")) for _, text in lines)
    assert [time for time, _ in lines] == sorted((time for time, _ in lines), reverse=True)


# measured, and a little more, since torch's own parts are other operations in another version
MOST = [
    pytest.param([*EXPERTS, *ALL_IN_FP8], 600, 372, id="experts in fp8"),
    pytest.param(["--mbs", "2"], 580, 78, id="experts"),
    pytest.param(["--model", "llama1b"], 430, 134, id="dense"),
]


@pytest.mark.parametrize(("words", "operations", "launches"), MOST)
def test_a_step_takes_no_more_than_it_did(words: list[str], operations: int, launches: int) -> None:
    line = line_of(*words)
    assert line["operations"] <= operations
    assert line["launches"] <= launches
