"""Traces: one of a GPU made by hand in the form of torch's exports, and real ones of a CPU."""

import pytest
import torch
from torch import nn

from megaspec.nn.range_names import ATTENTION as ATTENTION_RANGE
from megaspec.nn.range_names import OPTIMIZER as OPTIMIZER_RANGE
from megaspec.nn.range_names import REST, WINDOW
from megaspec.nn.ranges import marked
from megaspec.profiling.kinds import (
    ATTENTION,
    COMMUNICATION,
    COPIES,
    ELEMENT_WISE,
    IDLE,
    KINDS,
    MATRIX_PRODUCTS,
    OPTIMIZER,
    OTHER,
)
from megaspec.profiling.recording import Recording
from megaspec.profiling.trace import TraceError, breakdown

CPU = torch.device("cpu")
MAIN, BACKWARD = 100, 200


def operation(name, start, end, *, thread=MAIN, sequence=None, forward_thread=0):
    args = {}
    if sequence is not None:
        args = {"Sequence number": sequence, "Fwd thread id": forward_thread}
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": start, "dur": end - start, "tid": thread, "args": args}


class Gpu:
    """Launches and kernels, each with a number of its own."""

    def __init__(self):
        self.events = []
        self._number = 0

    def launch(self, name, at, start, end, *, thread=MAIN, cat="kernel", **more):
        """A kernel that the host launches at `at`, and that runs from `start` to `end`."""
        self._number += 1
        args = {"correlation": self._number}
        call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at, "dur": 1, "tid": thread}
        self.events.append(call | {"args": args})
        kernel = {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "tid": 7}
        self.events.append(kernel | {"args": args | more})


def gpu_trace():
    gpu = Gpu()
    gpu.events += [
        operation(WINDOW, 0, 1000),
        # the forward pass: attention written out, whose softmax makes node 5
        operation(ATTENTION_RANGE, 10, 30),
        operation("aten::softmax", 12, 20, sequence=5),
        operation("aten::_softmax", 13, 19, sequence=5),
        operation("aten::mm", 32, 38, sequence=6),
        # its backward pass, in autograd's thread, and one of a compiled block
        operation("autograd::engine::evaluate_function: SoftmaxBackward0", 50, 60, thread=BACKWARD, sequence=5,
                  forward_thread=1),
        operation("aten::_softmax_backward_data", 51, 59, thread=BACKWARD),
        operation("CompiledFunctionBackward", 62, 90, thread=BACKWARD, sequence=9, forward_thread=1),
        operation("aten::mm", 64, 70, thread=BACKWARD),
        operation(OPTIMIZER_RANGE, 100, 120),
        operation("aten::_foreach_mul_", 102, 110),
        operation(REST, 800, 900),
    ]  # fmt: skip
    gpu.launch("softmax_warp_forward", 15, 20, 120)
    gpu.launch("nvjet_tst_128x256", 34, 120, 320)
    gpu.launch("softmax_warp_backward", 55, 320, 420, thread=BACKWARD)
    gpu.launch("nvjet_tst_64x8", 66, 420, 470, thread=BACKWARD)
    gpu.launch("triton_poi_fused_mul_silu_4", 80, 470, 500, thread=BACKWARD)
    gpu.launch("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 85, 450, 560, thread=BACKWARD)
    gpu.launch("void at::native::multi_tensor_apply_kernel<...>", 104, 560, 600)
    gpu.launch("Memcpy HtoD (Pinned -> Device)", 130, 600, 610, cat="gpu_memcpy", bytes=4096)
    gpu.launch("somebodys_kernel", 131, 610, 620)
    # of an evaluation
    gpu.launch("nvjet_tst_128x256", 810, 820, 880)
    return {"traceEvents": gpu.events}


def test_kernels_of_a_gpu_get_the_kind_of_who_launched_them():
    found = breakdown(gpu_trace())
    assert found.seconds == pytest.approx(900e-6)
    micros = {kind: one.seconds * 1e6 for kind, one in found.kinds.items()}
    assert micros == pytest.approx(
        {
            MATRIX_PRODUCTS: 250,
            ATTENTION: 200,
            ELEMENT_WISE: 30,
            OPTIMIZER: 40,
            COMMUNICATION: 60,  # 110, of which 50 beside products and a pointwise kernel
            COPIES: 10,
            OTHER: 10,
            IDLE: 300,
        }
    )
    assert sum(micros.values()) == pytest.approx(900)
    assert found.kinds[COMMUNICATION].busy_seconds == pytest.approx(110e-6)
    assert found.kinds[COPIES].copied_bytes == 4096
    assert found.kinds[MATRIX_PRODUCTS].count == 2
    assert found.largest_other == pytest.approx({"somebodys_kernel": 10e-6})
    assert found.accounted == pytest.approx(1 - 10 / 900)


def test_a_forward_pass_that_autograds_thread_computes_again_is_not_taken_for_another_with_its_numbers():
    """Each thread numbers its nodes by itself."""
    gpu = Gpu()
    gpu.events += [
        operation(WINDOW, 0, 100),
        operation(ATTENTION_RANGE, 1, 5),
        operation("aten::softmax", 2, 4, sequence=3),
        # computed again: no attention, with the number of one
        operation("aten::gelu", 20, 24, thread=BACKWARD, sequence=3),
        operation("GeluBackward0", 30, 40, thread=BACKWARD, sequence=3, forward_thread=2),
        operation("aten::gelu_backward", 31, 39, thread=BACKWARD),
        operation("SoftmaxBackward0", 50, 60, thread=BACKWARD, sequence=3, forward_thread=1),
        operation("aten::_softmax_backward_data", 51, 59, thread=BACKWARD),
    ]
    gpu.launch("void at::native::gelu_backward", 33, 40, 50, thread=BACKWARD)
    gpu.launch("softmax_warp_backward", 53, 60, 80, thread=BACKWARD)
    found = breakdown({"traceEvents": gpu.events})
    assert found.kinds[ELEMENT_WISE].seconds == pytest.approx(10e-6)
    assert found.kinds[ATTENTION].seconds == pytest.approx(20e-6)


@pytest.mark.parametrize(
    ("events", "told"),
    [
        ([], "no range"),
        (
            [
                operation(WINDOW, 0, 10),
                {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1, "dur": 1, "tid": MAIN},
            ],
            "no kernel was recorded",
        ),
        ([operation(WINDOW, 0, 10), operation(REST, 0, 10)], "nothing ran"),
    ],
)  # fmt: skip
def test_a_trace_that_says_nothing_is_refused(events, told):
    with pytest.raises(TraceError, match=told):
        breakdown({"traceEvents": events})


def recorded(work):
    """The breakdown of `work`, which is done once before."""
    work()
    with Recording(CPU, memory=True) as recording:
        recording.begin()
        work()
        return recording.finish()


def test_a_cpu_is_told_by_its_operations_backward_passes_too():
    x = torch.randn(512, 512)
    weight = nn.Parameter(torch.randn(512, 512))

    def work():
        y = x @ weight
        with marked(ATTENTION_RANGE):
            y = torch.softmax(y @ y.t(), dim=-1) @ y
        y = nn.functional.gelu(y).sum()
        y.backward()
        with marked(OPTIMIZER_RANGE), torch.no_grad():
            for _ in range(50):
                weight.mul_(0.99)

    found = recorded(work).breakdown
    kinds = found.kinds
    assert set(kinds) == set(KINDS)
    assert sum(one.seconds for one in kinds.values()) == pytest.approx(found.seconds)
    assert found.accounted >= 0.97
    # a product of the layer and its gradient of the weight, two products in attention and four in its backward pass; by
    # their number, since on a busy machine any of them may take longest
    assert kinds[MATRIX_PRODUCTS].count == 2
    assert kinds[ATTENTION].count >= 6
    for kind in (MATRIX_PRODUCTS, ATTENTION, ELEMENT_WISE, OPTIMIZER):
        assert kinds[kind].seconds > 0, kind
    assert kinds[OPTIMIZER].count >= 50
    assert kinds[OTHER].seconds == 0


def test_what_rests_is_no_part_of_the_steps():
    x = torch.randn(400, 400)
    with Recording(CPU, memory=False) as recording:
        recording.begin()
        for _ in range(3):
            x @ x
        with recording.rest():
            for _ in range(60):
                x @ x
        found = recording.finish()
    inside = [event for event in found.trace["traceEvents"] if event.get("name") == REST]
    assert len(inside) == 1
    assert found.breakdown.seconds < inside[0]["dur"] / 1e6
    assert found.breakdown.kinds[MATRIX_PRODUCTS].count == 3


def test_compiled_code_sees_no_range():
    def work(x):
        with marked(ATTENTION_RANGE):
            return x * 2

    x = torch.randn(8)
    assert torch.equal(torch.compile(work, fullgraph=True, backend="eager")(x), x * 2)
