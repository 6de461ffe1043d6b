"""What the host does in a training step, on a machine without a GPU: one JSON line, and where the time goes.

python tests/benchmarks/bench_host.py --model gptoss6 --mbs 2 --precision fp8
python tests/benchmarks/bench_host.py --model llama1b --compile block --lines 40

A GPU waits for its host where that takes longer to call kernels than they run. So the step here is that of an H200's
Spec with as many layers, experts and micro batches, and with tensors so small that they take no time: what is left is
Python, torch's dispatch of operations, and Triton's way to a kernel, up to its launcher. Triton's kernels, and products
in fp8, which a CPU lacks, do not run: numbers are nobody's, and experts are chosen in turn, as bench_train has it.

Not seen here: what CUDA's driver takes for a launch, some 3 to 5 us each, and events and streams. Counts are the same
in each run: `operations` of torch that are a kernel each on a GPU, `views` (and new tensors) that are none, `launches`
of Triton and of products in fp8, `calls` of Python functions. Times are this machine's: of the process's CPU, so that
others on it matter less, the least and the median of the steps.
"""

import argparse
import json
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from megaspec.estimate.hardware import HARDWARE
from megaspec.estimate.target import Target
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from megaspec.runtime.build import mesh_of
from megaspec.runtime.step import StepResult
from megaspec.spec import Spec
from megaspec_kernels.scaled_product import cublaslt
from tests.benchmarks import bench_train
from tests.kernels.pretended import Hopper

ROOT = Path(__file__).parents[2]
H200 = Target(
    gpus=1, gpu="NVIDIA H200", sm=90, gpu_memory=HARDWARE["H200"].memory, cores=16, versions={"torch": "2.11.0"}
)
# Widths that take no time; products in fp8 take multiples of 16.
WIDTHS = {"d_model": 64, "n_heads": 4, "n_kv_heads": 2, "d_head": 16, "d_ffn": 64, "vocab_size": 256}
EXPERT_WIDTH = 64
TOKENS = 32
# Operations that are no kernel on a GPU: new memory, and other views of what is there.
VIEWS = {
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand",
    "is_same_size", "lift_fresh", "new_empty", "new_empty_strided", "permute", "prim_layout", "promote_types", "select",
    "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
}  # fmt: skip
# Numbers that lie on the host for a GPU, too.
ON_HOST = {"_local_scalar_dense"}


class Launches:
    """Counts kernels that are not run."""

    def __init__(self) -> None:
        self.count = 0
        self._kernel = SimpleNamespace(
            function=0, packed_metadata=(), launch_metadata=lambda *_: None, run=lambda *_: self.add()
        )

    def add(self) -> None:
        self.count += 1

    def compiled(self, function: JITFunction, key: str, _signature: object, device: int, *_: object) -> Any:
        """In JITFunction._do_compile's place."""
        kernels = function.device_caches[device][0]
        kernels[key] = self._kernel
        return self._kernel

    def scaled_grouped(
        self,
        a: Tensor,
        b: Tensor,
        _a_scale: Tensor,
        _b_scale: Tensor,
        *,
        offs: Tensor,
        out_dtype: torch.dtype,
        **_: Any,
    ) -> Tensor:
        """In torch._scaled_grouped_mm's place."""
        self.add()
        if b.dim() == 2:
            return a.new_empty(offs.shape[0], a.shape[0], b.shape[1], dtype=out_dtype)
        return a.new_empty(a.shape[0], b.shape[2], dtype=out_dtype)

    def matmul(self, *_: object) -> int:
        """In cublasLtMatmul's place. -> success"""
        self.add()
        return 0


def _always(result: object) -> Callable[..., Any]:
    """A function in another's place. Not a mock, which would take longer than what it stands for."""
    return lambda *_: result


@contextmanager
def without_gpu() -> Iterator[Launches]:
    """What runs in here calls a GPU's kernels, which do nothing, with tensors on the CPU."""
    launches = Launches()
    plan = cublaslt.Plan(None, None, None, None, [cublaslt._Found()])
    cublas = SimpleNamespace(cublasLtMatmul=launches.matmul, cublasLtMatmulDescSetAttribute=_always(0))
    before = driver._active
    driver.set_active(Hopper())
    with ExitStack() as stack:
        for patch in (
            mock.patch.object(JITFunction, "_do_compile", lambda *args: launches.compiled(*args)),
            mock.patch.object(torch, "_scaled_grouped_mm", launches.scaled_grouped),
            mock.patch.object(cublaslt, "library", _always(cublas)),
            mock.patch.object(cublaslt, "_plan", _always(plan)),
            mock.patch.object(cublaslt, "_handle", _always(None)),
            mock.patch.dict(cublaslt._workspaces, {(-1, 0): torch.empty(1)}),
            # the device of a tensor on the CPU
            mock.patch.object(torch.cuda, "current_device", _always(-1)),
            mock.patch.object(torch.cuda, "current_stream", _always(SimpleNamespace(cuda_stream=0))),
        ):
            stack.enter_context(patch)
        # in this thread, where what counts and what samples look
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        try:
            yield launches
        finally:
            driver._active = before
            forget_kernels()


def forget_kernels() -> None:
    """Kernels that were not compiled are asked for anew."""
    for module in list(sys.modules.values()):
        if module is not None and module.__name__.startswith("megaspec_kernels"):
            for function in vars(module).values():
                if isinstance(function, JITFunction):
                    function.device_caches.clear()


def spec_of(args: argparse.Namespace) -> Spec:
    """An H200's, but for sizes."""
    model = bench_train.MODELS[args.model] | WIDTHS
    if "moe" in model:
        model["moe"] = model["moe"] | {"d_expert": EXPERT_WIDTH}
    with mock.patch.dict(bench_train.MODELS, {args.model: model}):
        return resolve(bench_train.recipe_of(args, 1), H200, Facts(run_dir="-"))


class Operations(TorchDispatchMode):
    """Counts what is dispatched. Compiled code does not run under it: what it was compiled from does."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.views: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if func.namespace == "aten" and name not in ON_HOST:
            counted = self.views if name in VIEWS else self.kernels
            counted[name] += 1
        return func(*args, **(kwargs or {}))


def calls_in(run: Callable[[], object]) -> int:
    """Python functions that are called, and those in C that Python calls."""
    count = 0

    def note(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def lines_in(run: Callable[[], object], *, steps: int) -> list[tuple[float, str]]:
    """Milliseconds of CPU time a step by the innermost line of ours, which is charged with all that it calls; the most
    first."""
    found: Counter[str] = Counter()

    def sample(_number: int, frame: FrameType | None) -> None:
        while frame is not None:
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(ROOT / "megaspec") or file.is_relative_to(ROOT / "kernels"):
                found[f"{file.relative_to(ROOT)}:{frame.f_lineno} {frame.f_code.co_qualname}"] += 1
                return
            frame = frame.f_back

    before = signal.signal(signal.SIGPROF, sample)
    begun = time.process_time()
    # a sample for each millisecond of CPU time
    signal.setitimer(signal.ITIMER_PROF, 1e-3, 1e-3)
    try:
        for _ in range(steps):
            run()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    seconds = time.process_time() - begun
    each = seconds * 1e3 / steps / max(1, found.total())
    return [(count * each, line) for line, count in found.most_common()]


def measured(args: argparse.Namespace, launches: Launches, step: Callable[[int], StepResult]) -> dict[str, Any]:
    """The line that is printed."""
    for i in range(args.warmup):
        step(i)
    times = []
    for i in range(args.steps):
        begun = time.process_time()
        step(i)
        times.append(time.process_time() - begun)
    before = launches.count
    with Operations() as operations:
        step(0)
    return {
        "model": args.model,
        "precision": args.precision,
        "compile": args.compile,
        "set": args.set,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "operations": operations.kernels.total(),
        "views": operations.views.total(),
        "launches": launches.count - before,
        "calls": calls_in(lambda: step(0)),
        "cpu_ms_min": round(min(times) * 1e3, 2),
        "cpu_ms": round(statistics.median(times) * 1e3, 2),
    }


def parser() -> argparse.ArgumentParser:
    parser = bench_train.parser()
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    # compiling layers takes minutes; kernels in the places where the compiler would make some
    parser.set_defaults(model="gptoss6", seq=TOKENS, compile="none", set=["kernels.norm=triton", "kernels.rope=triton"])
    parser.add_argument("--lines", type=int, default=0, metavar="N", help="then the N lines that take the most")
    return parser


def main() -> None:
    args = parser().parse_args()
    spec = spec_of(args)
    with without_gpu() as launches:
        step = bench_train.stepper(args, spec, mesh_of(spec, rank=0, device=torch.device("cpu")))
        print(json.dumps(measured(args, launches, step)), flush=True)
        if args.lines:
            for milliseconds, line in lines_in(lambda: step(0), steps=args.steps)[: args.lines]:
                print(f"{milliseconds:8.3f} ms  {line}")


if __name__ == "__main__":
    main()
