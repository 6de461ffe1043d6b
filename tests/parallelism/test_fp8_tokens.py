"""Tokens that are gathered in fp8: what compiled layers send. That numbers are the same: tests/parity/test_fp8.py."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_module
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule

from megaspec.estimate.communication import layer_collectives
from megaspec.estimate.layer_run import layer_run
from megaspec.estimate.topology import topology_of
from megaspec.estimate.trained import facts_of
from megaspec.nn.fp8 import Fp8Form, Fp8Input, Fp8Linear, Fp8Shared, Fp8Use
from megaspec.nn.fp8_facts import GRADIENTS_IN_FP8, INPUTS_IN_FP8
from megaspec.nn.fp8_producers import Producer
from megaspec.nn.norm.module import RmsNorm
from megaspec.nn.norm.spec import RmsNormSpec
from megaspec.parallelism.tensor import ColumnParallelLinear, RowParallelLinear
from megaspec.precision.spec import Fp8Precision
from megaspec.verify.trace import fake_world
from megaspec_kernels.registry import REGISTRY
from tests.parity.cases import Case, spec_of

RANKS, TOKENS, WIDTH = 2, 32, 64


class _Pair(nn.Module):
    """Columns, then rows. Tickets are buffers, as torch.compile makes inputs of them."""

    def __init__(self, group: dist.ProcessGroup, recipe: str):
        super().__init__()
        with torch.device("meta"):
            self.columns = ColumnParallelLinear(
                WIDTH, WIDTH, bias=False, residual=False, group=group, sequence=True, overlap=True
            )
            self.rows = RowParallelLinear(WIDTH, WIDTH, bias=False, residual=False, group=group, sequence=True)
        self.to(torch.bfloat16)
        self.layers = []
        gathers = {"columns": recipe in INPUTS_IN_FP8, "rows": recipe in GRADIENTS_IN_FP8}
        for name in gathers:
            cast = REGISTRY["fp8_cast"]["reference"]
            form = Fp8Form(recipe, "e4m3", 0, cast, REGISTRY["scaled_product"]["reference"])
            layer = Fp8Linear(form, Fp8Shared())
            self.layers.append(layer)
            self.register_buffer(f"{name}_ticket", layer.ticket)
        self._recipe = recipe
        self._gathers = gathers

    def forward(self, x: Tensor | Fp8Input) -> Tensor:
        for name, gathers in self._gathers.items():
            ticket = getattr(self, f"{name}_ticket")
            getattr(self, name).fp8 = Fp8Use(ticket, self._recipe, "e4m3", gathers_bytes=gathers)
        return self.rows(torch.nn.functional.silu(self.columns(x)))


class _PairBehindNorm(_Pair):
    """`writes`: the norm, in fp8, what is gathered behind it."""

    def __init__(self, group: dist.ProcessGroup, recipe: str, *, writes: bool):
        super().__init__(group, recipe)
        self.norm = RmsNorm(WIDTH, RmsNormSpec()).to("meta", torch.bfloat16)
        self.norm.kernel = REGISTRY["norm"]["triton"]
        self._writes = writes

    def forward(self, x: Tensor) -> Tensor:
        if self._writes:
            self.norm.fp8 = Producer("triton", self.columns_ticket, columns=False)
        stream, normed = self.norm.of_stream(x)
        return stream + super().forward(normed)


class Passes(NamedTuple):
    """What compiled passes do, by the name of the pass."""

    gathered: dict[str, Counter[torch.dtype]]
    """Formats of what they gather, leaving scales out."""
    cast: dict[str, int]
    """Matrices of a rank's own tokens that they cast before."""


def passes(make: Callable[[dist.ProcessGroup], nn.Module]) -> Passes:
    found = Passes({}, {})

    def count(phase: str) -> Callable[[GraphModule, list[Tensor]], GraphModule]:
        def look(graph: GraphModule, inputs: list[Tensor]) -> GraphModule:
            calls = graph.graph.find_nodes(
                op="call_function", target=torch.ops._c10d_functional.all_gather_into_tensor.default
            )
            values = [call.meta["val"] for call in calls]
            found.gathered[phase] = Counter(value.dtype for value in values if value.shape[-1] == WIDTH)
            casts = graph.graph.find_nodes(op="call_function", target=torch.ops.megaspec.fp8_tokens.default)
            found.cast[phase] = len(casts)
            return graph

        return look

    with fake_world(0, RANKS):
        pair = aot_module(
            make(dist.group.WORLD),
            fw_compiler=count("forward"),
            bw_compiler=count("backward"),
            partition_fn=min_cut_rematerialization_partition,
        )
        x = torch.randn(1, TOKENS, WIDTH, device="meta", dtype=torch.bfloat16, requires_grad=True)
        pair(x).sum().backward()
    return found


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize(
    ("recipe", "forward", "backward"),
    [
        # the input once: what the backward pass takes is what was gathered
        ("tensorwise", {torch.uint8: 1}, {torch.uint8: 1}),
        ("delayed", {torch.uint8: 1}, {torch.uint8: 1}),
        # again by the scales of columns, which wait for no gradient
        ("rowwise", {torch.uint8: 2}, {torch.bfloat16: 1}),
        ("blockwise", {torch.bfloat16: 1, torch.uint8: 1}, {torch.bfloat16: 1}),
    ],
)
def test_what_compiled_layers_gather(
    recipe: str, forward: dict[torch.dtype, int], backward: dict[torch.dtype, int]
) -> None:
    found = passes(partial(_Pair, recipe=recipe))
    assert found.gathered == {"forward": Counter(forward), "backward": Counter(backward)}
    assert planned_bytes(recipe) == {"forward": bytes_of(forward), "backward": bytes_of(backward)}


def bytes_of(gathered: dict[torch.dtype, int]) -> int:
    """Of one number of the tokens that ranks gather."""
    return sum(dtype.itemsize * times for dtype, times in gathered.items())


def planned_bytes(recipe: str) -> dict[str, float]:
    """The same of the plan, of one pair of products: scales, one in fp32 for each token, left out."""
    case = Case(tp=RANKS, sequence=True, precision="bf16", n_layers=3, attention="sdpa", compile="block")
    spec = spec_of(case)
    spec = spec.model_copy(
        update={"precision": Fp8Precision(kind="fp8", recipe=recipe, format="e4m3", first_layers_bf16=1)}
    )
    tokens = layer_run(spec).tokens.all
    # of three layers the one in the middle computes in fp8
    layer = facts_of(spec).layers[1]
    found = {"forward": 0.0, "backward": 0.0}
    for one in layer_collectives(spec, topology_of(spec, None), layer):
        if one.kind == "all_gather" and one.what == "attention" and one.bytes != 4 * tokens:
            found[one.phase] += one.times * one.bytes / (tokens * spec.model.d_model)
    return found


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
def test_what_norms_write_is_gathered_and_not_cast() -> None:
    """The input once, kept for the backward pass as it was gathered; of gradients nothing changes."""
    plain = passes(partial(_PairBehindNorm, recipe="delayed", writes=False))
    written = passes(partial(_PairBehindNorm, recipe="delayed", writes=True))
    assert written.gathered == plain.gathered == {"forward": Counter({torch.uint8: 1}), "backward": {torch.uint8: 1}}
    assert plain.cast == {"forward": 1, "backward": 1}
    assert written.cast == {"forward": 0, "backward": 1}
