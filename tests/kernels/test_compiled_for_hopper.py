"""Triton's kernels are compiled for Hopper on a machine without a GPU: ptxas takes each of them, and none that was
tuned spills more than a few registers.

Triton's interpreter, in which their arithmetic is tested there, knows neither: ptxas 12.8 ended with a segmentation
fault on casts that the interpreter had passed. Nothing is launched here, so that nothing is said of what they compute.
"""

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megaspec_kernels import dependent_launch
from megaspec_kernels.attention.flex_blocks import blocks_by_kernel
from megaspec_kernels.benches import BENCHES
from megaspec_kernels.fp8_cast.bench import known_one, tokens_of_rows, unbalanced_ends
from megaspec_kernels.fp8_cast.tiles import TILES_OF_LARGEST
from megaspec_kernels.gated.form import GatedForm
from megaspec_kernels.norm.form import NormForm
from megaspec_kernels.registry import REGISTRY
from megaspec_kernels.rope.bench import angles
from megaspec_kernels.rope.form import Heads

triton = pytest.importorskip("triton", reason="triton has no wheel for this platform")
tl = triton.language
pytestmark = [
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="Triton interprets in this process"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU that is here"),
]

CPU = torch.device("cpu")
# bench_host.py pretends to have device 0, whose kernels are none
DEVICE = 90
CUOBJDUMP = "backends/nvidia/bin/cuobjdump"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Whole tiles of every kernel, and ends that fill none.
WHOLE = (256, 512)
ENDS = ((144, 512), (256, 272), (144, 272))
# Bytes of a thread, of some 48 to 170 registers of 4 bytes: what Triton 3.6 and 3.7 leave where a limit of registers
# made a kernel faster (gates' gradients 8, largest elements of lines 24). One that is short of registers has hundreds.
FEW = 32
OF_BENCHES = sorted(name for name, bench in BENCHES.items() if "triton" in REGISTRY[name])


class Compiled(NamedTuple):
    kernel: str
    warps: int
    stack: int
    """Bytes of a thread that lie in memory: registers that were spilled."""
    follows: bool
    """Whether it is launched while the kernel before it runs, see dependent_launch.py."""
    ptx: str


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], list[Compiled]]:
    """From here on a launch compiles and does no more. -> what was compiled so far."""
    # it imports Triton
    from tests.kernels.pretended import Hopper

    # what was compiled before is compiled anew
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    jit = triton.runtime.jit.JITFunction
    compile_or_launch = jit.run
    found: dict[int, tuple[str, Any]] = {}

    def compile_alone(self: Any, *args: Any, **kwargs: Any) -> None:
        kernel = compile_or_launch(self, *args, **(kwargs | {"warmup": True}))
        found[id(kernel)] = (self.fn.__name__, kernel)

    monkeypatch.setattr(jit, "run", compile_alone)
    # what asks for the driver that is there raises where there is none, its own way back among it
    monkeypatch.setattr(triton.runtime.driver, "_active", Hopper(DEVICE))
    return lambda: [compiled_of(name, kernel) for name, kernel in found.values()]


def compiled_of(name: str, kernel: Any) -> Compiled:
    ptx = kernel.asm["ptx"]
    return Compiled(name, kernel.metadata.num_warps, stack_of(kernel), kernel.metadata.launch_pdl, ptx)


def stack_of(kernel: Any) -> int:
    dump = Path(triton.__file__).parent / CUOBJDUMP
    # it reads no pipe
    file = Path(kernel.metadata_group[next(name for name in kernel.metadata_group if name.endswith(".cubin"))])
    done = subprocess.run([dump, "-res-usage", file], capture_output=True, text=True, check=True)
    (stack,) = re.findall(r"STACK:(\d+)", done.stdout)
    return int(stack)


def spilling(found: list[Compiled]) -> list[Compiled]:
    assert found
    return [one for one in found if one.stack > FEW]


# What follows another kernel and reads the matrix, its first argument, ahead of that one's end.
READ_AHEAD = {"amax_of_lines_kernel", "lines_kernel"}
# Instructions of PTX that reach memory which kernels share, with the register that has the address.
REACHES = re.compile(r"\b(ld|st|red|atom|cp|prefetch|discard)\b[\w.:]*\.global\b[^\[;]*\[ *(%rd\d+)")


def racing(found: list[Compiled]) -> list[str]:
    """Kernels that touch memory which the kernel before them may still write or read."""
    assert found
    racing = []
    for one in found:
        ahead, wait, _ = one.ptx.partition("griddepcontrol.wait")
        allowed = {("ld", f"{one.kernel}_param_0")} if one.kernel in READ_AHEAD else set()
        if one.follows and (not wait or not reached(ahead) <= allowed):
            racing.append(one.kernel)
    return racing


def reached(ptx: str) -> set[tuple[str, str]]:
    """What is done to memory, and by an address that is computed from which pointer."""
    pointers = set(re.findall(r"\.param \.u64 \.ptr \.global \.align \d+ (\w+)", ptx))
    made_of: dict[str, set[str]] = {}
    for line in ptx.splitlines():
        # `add.s64 %rd53, %rd5, %rd52;`, `ld.param.b64 %rd5, [kernel_param_0];`
        if made := re.match(r"\s*(?:@!?%p\d+ )?[a-z][\w.]*\s+(%r\w*\d+), (.*);", line):
            made_of.setdefault(made[1], set()).update(re.findall(r"%r\w*\d+|\w+_param_\d+", made[2]))
    found = set()
    for kind, address in REACHES.findall(ptx):
        sources = {address}
        missing = [address]
        while missing:
            new = made_of.get(missing.pop(), set()) - sources
            sources |= new
            missing += new
        # an address of no pointer would be one that is not understood here
        found |= {(kind, name) for name in sources & pointers or {"unknown"}}
    return found


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def writers(M: int, K: int) -> dict[str, Callable[[], object]]:
    """Kernels that write fp8 in both layouts."""
    e4m3 = known_one(E4M3, CPU)
    e5m2 = known_one(E5M2, CPU)
    gate = REGISTRY["gated"]["triton"].producer
    code = GatedForm("silu").code
    heads = Heads(4, 2, 128)
    tokens = [bf16(2, M // 2, count, heads.size) for count in (heads.queries, heads.keys, heads.keys)]
    turn = REGISTRY["rope"]["triton"].producer
    norm = REGISTRY["norm"]["triton"].producer
    rms = NormForm("rms", "scale", 1e-5).code
    x = bf16(M, K)
    normed = partial(norm.forward_in_fp8, x, x, bf16(K), None, rms, known=e4m3)
    cast = REGISTRY["fp8_cast"]["triton"]
    scale = torch.ones(1, 1)
    recorded = {"seen": e5m2.seen, "saturated": e5m2.saturated, "scale_copy": torch.ones(1, 1)}
    return {
        "gate": partial(gate.forward_in_fp8, bf16(M, 2 * K), code, known=e4m3),
        "gate's gradient": partial(gate.backward_in_fp8, x, bf16(M, 2 * K), code, known=e5m2),
        "rotation's gradient": partial(turn.backward_in_fp8, *tokens, *angles(M // 2, half=64, device=CPU), known=e5m2),
        "norm": normed,
        "norm, rows alone": partial(normed, columns=False),
        "cast": partial(cast.cast, x, scale, block=(None, None), dtype=E5M2, columns=True, **recorded),
        "lines": partial(cast.quantise_lines, x, dtype=E5M2),
        "short lines": partial(cast.quantise_short_lines, x, dtype=E5M2),
        "columns": partial(cast.columns, x.to(E5M2)),
        "scale": partial(cast.scale, x, block=(None, None), dtype=E5M2),
    }


@pytest.mark.parametrize("name", writers(*WHOLE))
def test_what_writes_fp8(name: str, compiled) -> None:
    writers(*WHOLE)[name]()
    found = compiled()
    assert not spilling(found)
    assert not racing(found)


def test_what_is_launched_while_the_kernel_before_it_runs(compiled) -> None:
    for write in writers(*WHOLE).values():
        write()
    following = {one.kernel for one in compiled() if one.follows}
    assert following == READ_AHEAD | {"pairs_kernel", "columns_kernel", "finish_kernel"}


class Launches(TorchDispatchMode):
    """Operations of torch that launch a kernel on a GPU, and kernels of Triton, in their order."""

    # views, and memory that nothing is written to
    LAUNCH_NOTHING = frozenset(("empty", "empty_like", "new_empty", "detach", "slice", "t", "view"))

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        jit = triton.runtime.jit.JITFunction
        run = jit.run

        def recorded(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            self.names.append(kernel.fn.__name__)
            return run(kernel, *args, **kwargs)

        monkeypatch.setattr(jit, "run", recorded)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.overloadpacket.__name__
        if name not in self.LAUNCH_NOTHING:
            self.names.append(name)
        return op(*args, **(kwargs or {}))


def test_what_is_read_ahead_was_written_before_an_ordinary_launch(compiled, monkeypatch) -> None:
    """A copy of a matrix that is not contiguous too: the filling with zeros begins when the copy has ended."""
    cast = REGISTRY["fp8_cast"]["triton"]
    x = bf16(*WHOLE).t()
    with Launches(monkeypatch) as launches:
        cast.quantise_lines(x, dtype=E4M3)
    assert launches.names == ["clone", "zeros", "amax_of_lines_kernel", "lines_kernel"]
    assert all(one.follows for one in compiled())


def test_by_known_largest_elements_lines_follow_nothing(compiled) -> None:
    """Whatever the kernel before may be, it may have written the matrix."""
    amax = (torch.zeros(WHOLE[0], 1), torch.zeros(1, WHOLE[1]))
    REGISTRY["fp8_cast"]["triton"].quantise_lines(bf16(*WHOLE), dtype=E4M3, amax=amax)
    assert [(one.kernel, one.follows) for one in compiled()] == [("lines_kernel", False)]


@pytest.mark.slow
@pytest.mark.parametrize("shape", ENDS, ids=str)
def test_what_writes_fp8_where_tiles_are_not_whole(shape: tuple[int, int], compiled) -> None:
    """These may spill: such shapes are few and small."""
    for write in writers(*shape).values():
        write()
    assert not racing(compiled())


@pytest.mark.slow
@pytest.mark.parametrize("operation", OF_BENCHES)
def test_what_benchmarks_time(operation: str, compiled, monkeypatch) -> None:
    """In bf16, as on a GPU; of casts all tiles."""
    bench = BENCHES[operation]
    module = sys.modules[bench.works.__module__]
    if hasattr(module, "training_dtype"):
        monkeypatch.setattr(module, "training_dtype", lambda device: torch.bfloat16)
    for work in bench.works("triton", CPU):
        work.call()
    found = compiled()
    assert not spilling(found)
    assert not racing(found)


def test_gates_of_experts_that_write_fp8(compiled) -> None:
    E, R, F = 32, 256, 384
    groups = REGISTRY["fp8_cast"]["triton"].groups(unbalanced_ends(E, R, CPU), R)
    weighted = REGISTRY["gated"]["triton"].weighted
    form = GatedForm("silu")
    weights = torch.ones(R)
    weighted.forward_in_fp8(bf16(R, 2 * F), weights, groups, form=form, known=known_one(E4M3, CPU))
    weighted.gradients_in_fp8(bf16(R, F), bf16(R, 2 * F), weights, groups, form=form, known=known_one(E5M2, CPU))
    assert not spilling(compiled())


@pytest.mark.parametrize("width", [512, 2880])
def test_casts_of_groups(width: int, compiled) -> None:
    E, R, M = 32, 1024, 256
    cast = REGISTRY["fp8_cast"]["triton"]
    groups = cast.groups(unbalanced_ends(E, R, CPU), R)
    x_RI = bf16(R, width)
    known = known_one(E4M3, CPU)
    recorded = {"seen": known.seen, "saturated": known.saturated, "scale_copy": torch.empty(1, 1)}
    form = {"dtype": E4M3, "columns": True}
    cast.group_cast(x_RI, known.scale.view(1, 1), groups, **form, **recorded)
    cast.group_cast(
        x_RI[:M], known.scale.view(1, 1), groups, index_R=tokens_of_rows(groups.ends, M), **form, **recorded
    )
    cast.group_cast(x_RI, cast.scale_of(cast.group_amax(x_RI, groups.ends), E4M3), groups, **form)
    of_columns = cast.scale_of(cast.group_amax(x_RI, groups.ends, by_column=True), E4M3)
    cast.group_cast(x_RI, of_columns, groups, rows=False, **form)
    found = compiled()
    assert {"group_amax_kernel", "group_column_amax_of_pairs_kernel", "group_pairs_kernel"} < {
        one.kernel for one in found
    }
    assert not spilling(found)


@pytest.mark.parametrize("T", [1, 8192, 131072])
def test_blocks_of_flex(T: int, compiled) -> None:
    blocks_by_kernel(torch.zeros(2, T, dtype=torch.int32))
    assert not spilling(compiled())


def test_a_kernel_that_spills_would_be_seen(compiled) -> None:
    cast = REGISTRY["fp8_cast"]["triton"]
    too_few = TILES_OF_LARGEST["128x128"]._replace(registers=24)
    cast.amax_of_lines(bf16(*WHOLE), tile=too_few)
    assert [one.kernel for one in spilling(compiled())] == ["amax_of_lines_kernel"]


@triton.jit
def racing_kernel(x_ptr, y_ptr, hazard: tl.constexpr):
    i = tl.arange(0, 128) + 128 * tl.program_id(0)
    x = tl.load(x_ptr + i)
    if hazard == "reads":
        x += tl.load(y_ptr + i)
    if hazard == "writes":
        tl.store(y_ptr + i, x)
    if hazard == "adds":
        tl.atomic_add(y_ptr + i, x, sem="relaxed")
    if hazard != "never waits":
        dependent_launch.wait_for_kernel_before(True)
    tl.store(y_ptr + i, x + 1)


@pytest.mark.parametrize("hazard", ["never waits", "reads", "writes", "adds"])
def test_a_kernel_that_does_not_wait_would_be_seen(hazard: str, compiled, monkeypatch) -> None:
    x, y = torch.zeros(2, 128, dtype=torch.int32)
    racing_kernel[(1,)](x, y, hazard, launch_pdl=True)
    assert racing(compiled()) == ["racing_kernel"]
    # also where it may read its first argument
    monkeypatch.setattr(sys.modules[__name__], "READ_AHEAD", {"racing_kernel"})
    assert racing(compiled()) == ["racing_kernel"]


def test_a_kernel_that_reads_ahead_is_told_from_one_that_races(compiled, monkeypatch) -> None:
    x, y = torch.zeros(2, 128, dtype=torch.int32)
    racing_kernel[(1,)](x, y, "none", launch_pdl=True)
    assert racing(compiled()) == ["racing_kernel"]
    monkeypatch.setattr(sys.modules[__name__], "READ_AHEAD", {"racing_kernel"})
    assert not racing(compiled())


@triton.jit
def refused_kernel(x_ptr):
    x = tl.load(x_ptr + tl.arange(0, 128))
    y = tl.inline_asm_elementwise("no.such.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(x_ptr + tl.arange(0, 128), y)


def test_a_kernel_that_ptxas_refuses_would_be_seen(compiled) -> None:
    with pytest.raises(triton.runtime.errors.PTXASError):
        refused_kernel[(1,)](torch.zeros(128, dtype=torch.int32))
