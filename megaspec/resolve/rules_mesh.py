"""Rules about ranks, the mesh and what is split over it."""

from megaspec.core.axes import world_size
from megaspec.core.errors import Problem
from megaspec.core.problems import one_of
from megaspec.resolve.case import Case, divisors, multiples, nearest
from megaspec.resolve.formula import degrees


def ranks_are_those_that_torchrun_started(case: Case) -> Problem | None:
    """launcher.ranks is the world that torchrun started."""
    ranks, world = case.recipe.launcher.ranks, case.target.world_size
    if world is None or ranks == world:
        return None
    return Problem("launcher.ranks", f"launcher.ranks={ranks} must be the {world} that torchrun started; drop it")


def degrees_make_the_world(case: Case) -> Problem | None:
    """launcher.ranks is the product of the parallel degrees."""
    ranks, sizes = case.recipe.launcher.ranks, degrees(case.recipe.parallelism)
    if world_size(sizes) == ranks:
        return None
    product = " · ".join(
        f"{axis}={n}" for axis, n in sizes.items() if n > 1 or f"parallelism.{axis}" not in case.decided
    )
    given = [axis for axis in ("tp", "pp", "cp", "dp_replicate", "dp_shard") if sizes[axis] > 1]
    given = [axis for axis in given if f"parallelism.{axis}" not in case.decided]
    if len(given) == 1 and {"parallelism.dp_replicate", "parallelism.tp"} & case.decided:
        [axis] = given
        legal = one_of(nearest(sizes[axis], divisors(ranks)))
        text = f"parallelism.{axis}={sizes[axis]} must divide launcher.ranks={ranks}; try {legal}"
        return Problem(f"parallelism.{axis}", text)
    fixed = world_size({axis: n for axis, n in sizes.items() if f"parallelism.{axis}" not in case.decided})
    legal = one_of(multiples(ranks, fixed)) if fixed != world_size(sizes) else str(fixed)
    text = f"launcher.ranks={ranks} must be the product of the degrees, {product}; try {legal}"
    return Problem("launcher.ranks", text)


def a_gpu_for_each_rank(case: Case) -> Problem | None:
    """The ranks of one machine are at most its GPUs."""
    started_elsewhere = case.target.world_size is not None
    ranks = case.target.local_ranks if started_elsewhere else case.recipe.launcher.ranks
    if case.target.device != "cuda" or ranks is None or ranks <= case.target.gpus:
        return None
    if started_elsewhere:
        text = f"torchrun started {ranks} ranks on a machine with {case.target.gpus} GPUs; start {case.target.gpus}"
        return Problem("", text)
    text = f"launcher.ranks={ranks} must be at most the machine's {case.target.gpus} GPUs; try {case.target.gpus}"
    return Problem("launcher.ranks", text)


def tp_divides_heads(case: Case) -> Problem | None:
    """Each tensor-parallel rank has the same number of query heads."""
    heads = case.recipe.model.n_heads
    if heads % case.tp == 0:
        return None
    legal = one_of(nearest(case.tp, divisors(heads)))
    return Problem("parallelism.tp", f"parallelism.tp={case.tp} must divide model.n_heads={heads}; try {legal}")


def tp_fits_kv_heads(case: Case) -> Problem | None:
    """Tensor-parallel ranks share out the key and value heads, or each head is held by equally many ranks."""
    kv = case.recipe.model.n_kv_heads
    if kv % case.tp == 0 or case.tp % kv == 0:
        return None
    legal = [t for t in divisors(case.recipe.model.n_heads) if kv % t == 0 or t % kv == 0]
    text = f"parallelism.tp={case.tp} must divide model.n_kv_heads={kv} or be a multiple of it"
    return Problem("parallelism.tp", f"{text}; try {one_of(nearest(case.tp, legal))}")


def tp_divides_ffn(case: Case) -> Problem | None:
    """Each tensor-parallel rank has the same width of the feed-forward layer."""
    width = case.recipe.model.d_ffn
    if width % case.tp == 0:
        return None
    legal = [t for t in divisors(width) if case.recipe.model.n_heads % t == 0]
    wider = one_of(multiples(width, case.tp))
    text = f"parallelism.tp={case.tp} must divide model.d_ffn={width}; try {one_of(nearest(case.tp, legal))}"
    return Problem("parallelism.tp", f"{text}, or model.d_ffn={wider}")


def sequence_parallel_needs_tp(case: Case) -> Problem | None:
    """Only tensor-parallel ranks can split the sequence."""
    if not case.recipe.parallelism.sequence_parallel or case.tp > 1:
        return None
    text = "parallelism.sequence_parallel=true needs parallelism.tp > 1, it is 1; set it to false or raise tp"
    return Problem("parallelism.sequence_parallel", text)


def sequence_splits_over_tp(case: Case) -> Problem | None:
    """Under sequence parallel, sequences divide into equal parts for the tensor-parallel ranks."""
    seq_len = case.recipe.data.seq_len
    if not case.recipe.parallelism.sequence_parallel or seq_len % case.tp == 0:
        return None
    text = f"data.seq_len={seq_len} must be a multiple of parallelism.tp={case.tp} under sequence parallel"
    legal = one_of(multiples(seq_len, case.tp))
    return Problem("data.seq_len", f"{text}; try {legal}, or parallelism.sequence_parallel=false")


def longest_sequence_splits_over_tp(case: Case) -> Problem | None:
    """Under sequence parallel, the longest sequence divides as well: generated text grows up to it."""
    longest = case.recipe.model.max_seq_len
    if not case.recipe.parallelism.sequence_parallel or longest % case.tp == 0:
        return None
    text = f"model.max_seq_len={longest} must be a multiple of parallelism.tp={case.tp} under sequence parallel"
    legal = one_of(multiples(longest, case.tp))
    return Problem("model.max_seq_len", f"{text}; try {legal}, or parallelism.sequence_parallel=false")
