"""Of what norms, gates and the way to experts write in fp8 nobody has a gradient, and none is made up: no zeros are
filled in for it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from megaspec.nn.attention.module import SequenceContext
from megaspec.nn.fp8_layouts import FORMATS
from megaspec.nn.layer.module import Layer
from megaspec.runtime.build import TrainState, build, initialise, mesh_of
from megaspec.verify.parity import run_steps
from tests.nn.plain_producers import OPERATIONS, plain_producers
from tests.parity.cases import TOKENS, Case, batches_of, spec_of

FILLS = ("zeros", "zeros_like", "new_zeros", "zero", "zero_", "fill", "fill_", "full", "full_like", "new_full")
CASE = Case(precision="fp8 delayed", also=tuple((f"kernels.{operation}", "triton") for operation in OPERATIONS))


@pytest.fixture(autouse=True)
def calls() -> Any:
    with plain_producers() as found:
        yield found


def fills_fp8(operation: Any, made: Any) -> bool:
    """Whether numbers in fp8 are filled in, or the scale of such."""
    if not isinstance(made, Tensor) or operation.overloadpacket.__name__ not in FILLS:
        return False
    return made.dtype in FORMATS.values() or made.shape == (1, 1)


class Operations(TorchDispatchMode):
    """What runs, and what of it fills in fp8."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.fills: list[tuple[int, ...]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        self.names.append(function.name())
        if fills_fp8(function, made):
            self.fills.append(tuple(made.shape))
        return made


def built_model() -> TrainState:
    """Norms, a gate and a rotation of its layers write fp8, as in a step that comes after others."""
    spec = spec_of(CASE)
    built = build(spec, mesh=mesh_of(spec, rank=0, device=torch.device("cpu")))
    initialise(built)
    for linear in built.fp8.linears.values():
        linear.memory.fresh = frozenset()
    return built


def taken(built: TrainState) -> tuple[Layer, Tensor, SequenceContext]:
    """A layer, and what it takes."""
    layer = built.model.layers["0"]
    x = torch.randn(2, TOKENS, built.spec.model.d_model, dtype=torch.float64, requires_grad=True)
    return layer, x, built.model.context(torch.arange(TOKENS), length=TOKENS)


def test_operation_by_operation(calls: dict[str, int]) -> None:
    built = built_model()
    layer, x, context = taken(built)
    y = layer(x, context)
    with Operations() as found:
        y.backward(torch.ones_like(y))
    assert calls == {"norm": 2, "gate": 1, "gradient": 1, "rope": 1}
    assert "megaspec::gated_gradient_into_fp8" in found.names
    assert not found.fills


def test_experts(calls: dict[str, int]) -> None:
    """Steps of a model whose experts' rows and gates are written in fp8, and nothing else is."""
    case = replace(
        Case(precision="fp8 delayed", accumulate=2, mask="uneven", router="softmax"),
        also=(("kernels.norm", "reference"), ("kernels.gated", "triton")),
    )
    spec = spec_of(case)
    with Operations() as found:
        run_steps(spec, mesh=mesh_of(spec, rank=0, device=torch.device("cpu")), batches=batches_of(case, [], 2))
    assert calls["experts' gate"], calls
    # scales of whole tensors are made of zeros in the reference
    assert not [shape for shape in found.fills if shape != (1, 1)]


def test_what_is_filled_in_is_seen() -> None:
    """By what counts it above."""
    with Operations() as found:
        torch.zeros(3, 2, dtype=torch.float8_e5m2)
        torch.zeros(1, 1)
        torch.zeros(3, 2)
    assert found.fills == [(3, 2), (1, 1)]


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
def test_compiled() -> None:
    built = built_model()
    layer, x, context = taken(built)
    graphs: list[GraphModule] = []

    def run_as_it_is(graph: GraphModule, inputs: Sequence[Tensor]) -> GraphModule:
        return graph

    def keep(graph: GraphModule, inputs: Sequence[Tensor]) -> GraphModule:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=run_as_it_is, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    y = torch.compile(layer, backend=backend, fullgraph=True)(x, context)
    y.backward(torch.ones_like(y))
    (backward,) = graphs
    operations = [node for node in backward.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert torch.ops.megaspec.gated_gradient_into_fp8.default in [node.target for node in operations]
    assert not [node for node in operations if fills_fp8(node.target, node.meta["val"])]


@pytest.mark.parametrize("norm", ["norm1", "norm2"])
def test_who_takes_the_stream_alone_has_its_gradient(norm: str) -> None:
    """Nobody takes what is normed: that has a gradient of zero."""
    built = built_model()
    layer, x, _ = taken(built)
    times = 1
    if norm == "norm1":
        stream, _ = layer.norm1.of_stream(x)
    else:
        stream, _ = layer.norm2.of_sum(x, x)
        times = 2
    stream.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, times))
