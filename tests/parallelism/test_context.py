"""Attention over sequences that lie on several ranks against attention on one, in fp64."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from megaspec.nn.attention.module import Attention, CausalCore, SequenceContext
from megaspec.nn.attention.spec import GroupedQuerySpec
from megaspec.nn.dropout import Dropout, Noise
from megaspec.parallelism.context import ContextCore, ContextParallel, Way, token_index
from megaspec.parallelism.mesh import Mesh
from megaspec.parallelism.spec import ContextSpec
from megaspec_kernels.attention.documents import Documents, documents_of
from megaspec_kernels.gate import BACKWARD, FORWARD, within
from megaspec_kernels.registry import REGISTRY
from tests.ranks import RankPool, gpu_of, needs_gpus
from tests.source_patch import Patch, check


@dataclass(frozen=True)
class Case:
    """A kind of context parallelism over cp ranks; a sequence of S tokens, N query and K key and value heads."""

    kind: str
    cp: int
    S: int
    N: int = 4
    K: int = 2
    B: int = 2
    factors: tuple[int, int] | None = None
    kernel: str = "reference"
    documents: bool = False
    dropout: float = 0.0

    def __str__(self) -> str:
        factors = "" if self.factors is None else f"{self.factors[0]}x{self.factors[1]}"
        extra = "".join(x for x, on in (("-docs", self.documents), ("-drop", self.dropout)) if on)
        return f"{self.kind}{factors}-cp{self.cp}-S{self.S}n{self.N}k{self.K}-{self.kernel}{extra}"


H = 8
MERGING = REGISTRY["attention_merge"]["reference"]
KINDS = [("ring", 2, None), ("all_gather", 2, None), ("all_to_all", 2, None), ("hierarchical", 2, (2, 1)),
         ("hierarchical", 2, (1, 2)), ("ring", 4, None), ("all_gather", 4, None), ("all_to_all", 4, None),
         ("hierarchical", 4, (2, 2))]  # fmt: skip


def cases() -> Iterator[Case]:
    """Every kind x documents x dropout with grouped heads, odd chunks, and both kernels."""
    for kind, cp, factors in KINDS:
        K = 4 if (kind, cp) == ("all_to_all", 4) else 2
        for documents in (False, True):
            for dropout in (0.0, 0.3):
                yield Case(kind, cp, 24, N=8, K=K, factors=factors, documents=documents, dropout=dropout)
            yield Case(kind, cp, 40, N=K, K=K, B=1, factors=factors, kernel="sdpa", documents=documents)
    yield Case("ring", 4, 8, N=3, K=1, documents=True, dropout=0.3)  # chunks of one token
    yield Case("all_gather", 4, 8, N=3, K=1, documents=True, dropout=0.3)
    yield Case("all_to_all", 4, 28)  # an odd number of tokens a rank
    yield Case("hierarchical", 4, 24, N=6, K=2, factors=(2, 2), documents=True)  # a rank's part is 1.5 chunks
    yield Case("ring", 2, 12, N=6, K=1)


CASES = [c for c in cases() if c.kind != "all_to_all" or c.K % c.cp == 0]


def inputs(case: Case) -> tuple[list[Tensor], Tensor, Documents | None]:
    """q, k and v of the whole sequence, the output's gradient, documents."""
    draw = torch.Generator().manual_seed(7)

    def tensor(heads: int) -> Tensor:
        return torch.randn(case.B, case.S, heads, H, generator=draw, dtype=torch.float64)

    qkv, grad = [tensor(case.N), tensor(case.K), tensor(case.K)], tensor(case.N)
    starts = torch.rand(case.B, case.S, generator=draw) < 0.15
    return qkv, grad, documents_of(starts.cumsum(1, dtype=torch.int32)) if case.documents else None


def attention(case: Case) -> Attention:
    core = CausalCore(REGISTRY["attention"][case.kernel], case.dropout, "layers.3.attn")
    heads = {"n_heads": 4, "n_kv_heads": 4, "d_head": H}
    module = Attention(4 * H, **heads, spec=GroupedQuerySpec(), core=core, out=Dropout(0.0, "out"))
    core.first_head = 5  # as on the second tensor-parallel rank
    return module


def context(case: Case, index: Tensor, documents: Documents | None, way: Way | None) -> SequenceContext:
    ids = torch.arange(40, 40 + case.B, device=index.device)
    noise = Noise(seed=11, ids=ids, index=index) if case.dropout else None
    return SequenceContext(positions=index, documents=documents, noise=noise, index=index, length=case.S, way=way)


def attend(case: Case, module: Attention, index: Tensor, way: Way | None = None) -> list[Tensor]:
    """Output and gradients of q, k and v at the tokens of `index`."""
    qkv, grad, documents = inputs(case)
    leaves = [x[:, index].requires_grad_() for x in qkv]
    out = module.core(*leaves, context(case, index, documents, way))
    return [out.detach(), *torch.autograd.grad(out, leaves, grad[:, index])]


def on_rank(rank: int, some: list[Case]) -> list[list[np.ndarray]]:
    """The task: for each case the places of this rank's tokens and what is there."""
    found = []
    meshes: dict[int, Mesh] = {}
    for case in some:
        mesh = meshes.setdefault(case.cp, Mesh({"cp": case.cp}, rank=rank, device=torch.device("cpu")))
        strategy = ContextParallel(mesh, ContextSpec(kind=case.kind, factors=case.factors), MERGING)
        module = attention(case)
        strategy.split_model(module)
        assert isinstance(module.core, ContextCore)
        assert module.core.first_head == 5
        index = strategy.index(case.S)
        found.append([x.numpy() for x in (index, *attend(case, module, index, strategy.way))])
    return found


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool() as ranks:
        yield ranks


@pytest.fixture(scope="module")
def found(pool: RankPool) -> dict[Case, list[list[np.ndarray]]]:
    """What every rank found, by case: one world for all cases of as many ranks."""
    by_case: dict[Case, list[list[np.ndarray]]] = {}
    for cp in (2, 4):
        some = [c for c in CASES if c.cp == cp]
        by_rank = pool.run(on_rank, some, ranks=cp)
        by_case |= {case: [of_rank[i] for of_rank in by_rank] for i, case in enumerate(some)}
    return by_case


def errors(case: Case, by_rank: list[list[np.ndarray]]) -> dict[str, float]:
    """The largest differences from one rank, over the largest value where that is above one."""
    alone = attend(case, attention(case), torch.arange(case.S))
    whole = [torch.full_like(x, float("nan")) for x in alone]
    for index, *parts in by_rank:
        for total, part in zip(whole, parts, strict=True):
            total[:, torch.from_numpy(index)] = torch.from_numpy(part)
    wrong = {}
    for name, mine, truth in zip(("out", "dq", "dk", "dv"), whole, alone, strict=True):
        assert truth.abs().max() > 0.1, f"{name}: there is nothing to compare"
        wrong[name] = ((mine - truth).abs().max() / truth.abs().max().clamp_min(1.0)).item()
    return wrong


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equal_to_one_rank(case: Case, found: dict[Case, list[list[np.ndarray]]]) -> None:
    wrong = errors(case, found[case])
    assert all(error <= 1e-13 for error in wrong.values()), wrong


def of_several_degrees(rank: int, some: list[Case], cp: int) -> list[list[np.ndarray]]:
    """The task: one module, split once, attends to batches that lie on all `cp` ranks, on fewer of them, or on one."""
    module, found = attention(some[0]), []
    device = torch.device("cpu")
    ContextParallel(Mesh({"cp": cp}, rank=rank, device=device), ContextSpec(kind="ring"), MERGING).split_model(module)
    for case in some:
        mesh = Mesh({"cp": case.cp, "dp_shard": cp // case.cp}, rank=rank, device=device)
        batch = ContextParallel(mesh, ContextSpec(kind=case.kind), MERGING)
        index = batch.index(case.S)
        found.append([x.numpy() for x in (index, *attend(case, module, index, batch.way))])
    return found


def test_the_degree_is_a_property_of_the_batch(pool: RankPool) -> None:
    some = [Case("ring", 4, 24), Case("all_to_all", 2, 24), Case("ring", 1, 24), Case("all_gather", 2, 24)]
    by_rank = pool.run(of_several_degrees, some, 4, ranks=4)
    for i, case in enumerate(some):
        for first in range(0, 4, case.cp):
            wrong = errors(case, [of_rank[i] for of_rank in by_rank[first : first + case.cp]])
            assert all(error <= 1e-13 for error in wrong.values()), (case, first, wrong)


CONTEXT = "megaspec.parallelism.context"
MERGE = "megaspec_kernels.attention_merge.reference"
BUGS = {
    "keys taken for those of another rank": (
        Patch(CONTEXT, "source = (rank - step) % size", "source = (rank + step) % size"),
        Case("ring", 4, 24),
    ),
    "log-sum-exp of the diagonal only": (
        Patch(MERGE, "torch.logaddexp(lse_BNT, new_lse_BNT, out=lse_BNT)", "pass"),
        Case("ring", 2, 24),
    ),
    "gradients of keys stay where they were last": (
        Patch(CONTEXT, "d_own_kv += handle.wait()[0]", "d_own_kv += handle.outgoing[0] + 0 * handle.wait()[0]"),
        Case("ring", 2, 24),
    ),
    "late queries see one chunk of a later rank": (
        Patch(CONTEXT, "return AttentionBlock(late, every)", "return AttentionBlock(late, early)"),
        Case("ring", 2, 24),
    ),
    "documents of the wrong keys": (
        Patch(CONTEXT, "keys[block.keys]\n", "keys[block.keys].flip(0)\n"),
        Case("ring", 2, 24, documents=True),
    ),
    "the same heads dropped on every rank of an all-to-all": (
        Patch(CONTEXT, "first_head += first_here", "first_head += 0"),
        Case("all_to_all", 2, 24, dropout=0.3),
    ),
    "no gradients through an all-to-all": (
        Patch(CONTEXT, "return _exchange(grad, ctx.group), None", "return grad, None"),
        Case("all_to_all", 2, 24),
    ),
    "gathered chunks in the order of the ranks": (
        Patch(CONTEXT, "*reversed(late.unbind())", "*late.unbind()"),
        Case("all_gather", 2, 24),
    ),
    "gradients of gathered keys not summed": (
        Patch(CONTEXT, "return wait(reduce_scatter(torch.stack(of_ranks), group))[0]", "return of_ranks[group.rank()]"),
        Case("all_gather", 2, 24),
    ),
    "groups of neighbours and of the ring mixed up": (
        Patch(CONTEXT, 'token_index("ring", length, b, rank // a', 'token_index("ring", length, b, rank % b'),
        Case("hierarchical", 4, 24, factors=(2, 2)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_caught(name: str) -> None:
    patch, case = BUGS[name]
    check(patch)
    with RankPool(patches=(patch,)) as patched:
        wrong = errors(case, [found[0] for found in patched.run(on_rank, [case], ranks=case.cp)])
    assert not all(error <= 1e-11 for error in wrong.values()), "nothing shows"


def compiled(rank: int, case: Case) -> tuple[float, float]:
    """The task: the largest differences of output and gradient under torch.compile from what eager code gives."""
    mesh = Mesh({"cp": case.cp}, rank=rank, device=torch.device("cpu"))
    strategy = ContextParallel(mesh, ContextSpec(kind=case.kind, factors=case.factors), MERGING)
    index, both = strategy.index(case.S), []
    x = torch.randn(1, len(index), 4 * H, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    for compile_it in (False, True):
        module = attention(case)
        strategy.split_model(module)
        module.wqkv.weight, module.wo.weight = (
            torch.nn.Parameter(torch.linspace(-1, 1, p.numel(), dtype=torch.float64).view_as(p))
            for p in (module.wqkv.weight, module.wo.weight)
        )
        if compile_it:  # traced and broken up as for a GPU, then run as it is
            module.compile(backend="eager")
        leaf = x.clone().requires_grad_()
        out = module(leaf, context(case, index, None, strategy.way))
        both.append((out.detach(), *torch.autograd.grad(out, leaf, torch.ones_like(out))))
    return tuple((a - b).abs().max().item() for a, b in zip(*both, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "cp", "factors"), [("ring", 2, None), ("all_to_all", 2, None), ("hierarchical", 4, (2, 2))]
)
def test_a_compiled_module_breaks_around_it_and_computes_the_same(
    kind: str, cp: int, factors: tuple[int, int] | None, pool: RankPool
) -> None:
    for differences in pool.run(compiled, Case(kind, cp, 16, K=4, B=1, factors=factors), ranks=cp):
        assert max(differences) <= 1e-13


@pytest.mark.parametrize(("kind", "cp", "factors"), [*KINDS, ("hierarchical", 8, (4, 2)), ("hierarchical", 8, (2, 4)),
                                                      ("hierarchical", 6, (3, 2)), ("ring", 1, None)])  # fmt: skip
def test_every_token_is_on_one_rank(kind: str, cp: int, factors: tuple[int, int] | None) -> None:
    length = 2 * cp * 3
    parts = [token_index(kind, length, cp, rank, factors) for rank in range(cp)]
    assert sorted(torch.cat(parts).tolist()) == list(range(length))
    for part in parts:
        assert part.dtype == torch.int64
        assert part.shape == (length // cp,)
        assert (part.diff() > 0).all(), "tokens lie in the order of the sequence"


def test_where_tokens_lie() -> None:
    def lie(kind: str, length: int, cp: int, factors: tuple[int, int] | None = None) -> list[list[int]]:
        return [token_index(kind, length, cp, rank, factors).tolist() for rank in range(cp)]

    assert lie("ring", 8, 2) == lie("all_gather", 8, 2) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert lie("all_to_all", 6, 2) == [[0, 1, 2], [3, 4, 5]]
    assert lie("hierarchical", 8, 4, (2, 2)) == [[0, 1], [6, 7], [2, 3], [4, 5]]
    assert lie("ring", 3, 1) == lie("hierarchical", 3, 1) == [[0, 1, 2]]


def test_a_length_that_does_not_divide_is_named() -> None:
    with pytest.raises(AssertionError, match="10 tokens don't divide into 2 chunks on each of 2 ranks"):
        token_index("ring", 10, 2, 0)


def test_the_work_of_a_ring_is_balanced() -> None:
    """Under the causal mask every rank has the same number of pairs of query and key to compute."""
    pairs = [int((token_index("ring", 48, 4, r) + 1).sum()) for r in range(4)]
    assert len(set(pairs)) == 1


def test_one_rank_keeps_its_core() -> None:
    mesh = Mesh({}, rank=0, device=torch.device("cpu"))
    strategy, module = ContextParallel(mesh, ContextSpec(kind="ring"), MERGING), attention(Case("ring", 1, 5))
    strategy.split_model(module)
    assert type(module.core) is CausalCore
    assert strategy.index(5).tolist() == [0, 1, 2, 3, 4]


def what_is_saved(rank: int, case: Case) -> list[tuple[int, ...]]:
    """The task: shapes of what the forward pass keeps."""
    mesh = Mesh({"cp": case.cp}, rank=rank, device=torch.device("cpu"))
    strategy, module, shapes = ContextParallel(mesh, ContextSpec(kind=case.kind), MERGING), attention(case), []
    strategy.split_model(module)
    index = strategy.index(case.S)
    leaves = [x[:, index].requires_grad_() for x in inputs(case)[0]]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: shapes.append(tuple(x.shape)) or x, lambda x: x):
        module.core(*leaves, context(case, index, None, strategy.way))
    return shapes


@pytest.mark.parametrize("kind", ["ring", "all_gather"])
def test_nothing_quadratic_and_nobody_elses_is_kept(kind: str, pool: RankPool) -> None:
    T = 20
    for shapes in pool.run(what_is_saved, Case(kind, 2, 2 * T), ranks=2):
        assert sorted(shapes) == sorted([(2, T, 4, H), (2, 2, T, 2, H), (2, T, 4, H), (2, 4, T)])


def on_gpu(rank: int, case: Case) -> list[tuple[float, float]]:
    """The task: errors of output and gradients in bf16 on this rank, and what the gate allows."""
    device = gpu_of(rank)
    mesh = Mesh({"cp": case.cp}, rank=rank, device=device)
    strategy = ContextParallel(
        mesh, ContextSpec(kind=case.kind, factors=case.factors), REGISTRY["attention_merge"]["triton"]
    )
    draw, every = torch.Generator().manual_seed(3), torch.arange(case.S, device=device)
    wide = [torch.randn(case.B, case.S, heads, 128, generator=draw).to(device) for heads in (case.N, case.K, case.K)]
    wide = [x.bfloat16().double() for x in (*wide, torch.randn(wide[0].shape, generator=draw).to(device))]
    starts = torch.rand(case.B, case.S, generator=draw).to(device) < 0.01
    documents = documents_of(starts.cumsum(1, dtype=torch.int32)) if case.documents else None

    def run(kernel: str, dtype: torch.dtype, *, split: bool) -> list[Tensor]:
        module = attention(replace(case, kernel=kernel))
        if split:
            strategy.split_model(module)
        index = strategy.index(case.S) if split else every
        *leaves, grad = (x[:, index].to(dtype) for x in wide)
        leaves = [x.requires_grad_() for x in leaves]
        out = module.core(*leaves, context(case, index, documents, strategy.way if split else None))
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    index, found = strategy.index(case.S), []
    fast = run("sdpa", torch.bfloat16, split=True)
    plain, truth = run("reference", torch.bfloat16, split=False), run("reference", torch.float64, split=False)
    for number, (mine, yardstick, exact) in enumerate(zip(fast, plain, truth, strict=True)):
        factor, size = BACKWARD if number else FORWARD, exact.abs().max().item()
        found.append(within(mine, yardstick[:, index], exact[:, index], factor=factor, size=size))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("kind", "cp", "factors"), KINDS)
def test_the_gate_of_kernels_holds_over_nccl(
    kind: str, cp: int, factors: tuple[int, int] | None, documents: bool, gpu_pool: RankPool
) -> None:
    needs_gpus(cp)
    case = Case(kind, cp, 4096, N=8, K=4, factors=factors, documents=documents)
    for of_rank in gpu_pool.run(on_gpu, case, ranks=cp):
        for error, allowed in of_rank:
            assert error <= allowed
