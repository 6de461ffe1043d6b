"""Rules about ranks, the mesh and what is split over it."""

from collections.abc import Mapping

from megaspec.core.axes import world_size
from megaspec.core.divisors import divisors, multiples, widths
from megaspec.core.errors import Problem
from megaspec.core.problems import did_you_mean, one_of
from megaspec.estimate.hardware import HARDWARE
from megaspec.rules.case import Case, legal_tp, sequence_unit
from megaspec.rules.ways import Way, way_out


def ranks_are_those_that_torchrun_started(case: Case) -> Problem | None:
    """launcher.ranks is the world that torchrun started."""
    ranks = case.recipe.launcher.ranks
    world = case.target.world_size
    if world is None or ranks == world:
        return None
    return Problem("launcher.ranks", f"launcher.ranks={ranks} must be the {world} that torchrun started; drop it")


def degrees_make_the_world(case: Case) -> Problem | None:
    """launcher.ranks is the product of the parallel degrees."""
    ranks = case.recipe.launcher.ranks
    sizes = case.recipe.parallelism.degrees
    world = world_size(sizes)
    if world == ranks:
        return None
    said = {axis: n for axis, n in sizes.items() if f"parallelism.{axis}" not in case.decided}
    given = {axis: n for axis, n in said.items() if n > 1}
    if len(given) == 1 and _fills_the_world(case):
        # the one degree that was set is at fault: what follows from it takes any rest that is whole
        [(axis, n)] = given.items()
        text = f"parallelism.{axis}={n} must divide launcher.ranks={ranks}"
        way = way_out(case, Way(f"parallelism.{axis}", divisors(ranks), n), _worlds(case, n))
        return Problem(f"parallelism.{axis}", f"{text}; {way}")
    product = " · ".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1 or axis in said)
    ways = _ways_to_the_world(case, said, given)
    if "launcher.ranks" in case.decided and given:
        largest = max(given, key=lambda axis: given[axis])
        key = f"parallelism.{largest}"
        text = f"{key}={given[largest]}: the degrees, {product} = {world}"
        return Problem(key, f"{text}, must make launcher.ranks={ranks}; {way_out(case, *ways, key=key)}")
    text = f"launcher.ranks={ranks} must be the product of the degrees, {product} = {world}"
    return Problem("launcher.ranks", f"{text}; {way_out(case, *ways)}")


def _fills_the_world(case: Case) -> bool:
    """Whether a degree was left to us that takes what ranks the others leave."""
    rest = "parallelism.dp_shard"
    if case.recipe.parallelism.dp_strategy == "replicate":
        rest = "parallelism.dp_replicate"
    return rest in case.decided or "parallelism.tp" in case.decided


def _ways_to_the_world(case: Case, said: Mapping[str, int], given: Mapping[str, int]) -> list[Way]:
    """Another number of ranks, then another degree, the largest first. `said`: degrees that were set; `given`: those of
    them that are not 1."""
    ranks = case.recipe.launcher.ranks
    fixed = world_size(said)
    ways = [Way("launcher.ranks", [fixed])]
    if _fills_the_world(case):
        ways = [_worlds(case, fixed)]
    for axis in sorted(given, key=lambda axis: -given[axis]):
        others = fixed // given[axis]
        fitting = [d for d in divisors(ranks) if ranks % (others * d) == 0]
        ways.append(Way(f"parallelism.{axis}", fitting, given[axis], most=3))
    return ways


def _worlds(case: Case, of: int) -> Way:
    """Numbers of ranks that are multiples of a product of degrees."""
    ranks = case.recipe.launcher.ranks
    return Way("launcher.ranks", multiples(ranks, of), ranks, most=2)


def a_gpu_for_each_rank(case: Case) -> Problem | None:
    """The ranks of one machine are at most its GPUs."""
    gpus = case.target.gpus
    started_elsewhere = case.target.world_size is not None
    if started_elsewhere:
        ranks = case.target.local_ranks
    else:
        ranks = case.recipe.launcher.ranks
    if case.target.device != "cuda" or ranks is None or ranks <= gpus:
        return None
    if started_elsewhere:
        return Problem("", f"torchrun started {ranks} ranks on a machine with {gpus} GPUs; start {gpus}")
    text = f"launcher.ranks={ranks} must be at most the machine's {gpus} GPUs"
    inner = case.pp * case.cp * case.tp
    fewer = range(inner, gpus + 1, inner)
    if fewer:
        way = way_out(case, Way("launcher.ranks", fewer, ranks, most=1))
        if way.startswith("try"):
            return Problem("launcher.ranks", f"{text}; {way}")
    way = f"pp · cp · tp = {inner} leave room for no fewer: lower these degrees with it, or plan for more GPUs"
    return Problem("launcher.ranks", f"{text}; {way}")


def a_place_for_each_rank(case: Case) -> Problem | None:
    """The ranks of a supervised run on the CPU are at most the devices that it may use."""
    ranks = case.recipe.launcher.ranks
    places = case.target.places
    if case.target.device == "cuda" or places is None or ranks <= places:
        return None
    text = f"launcher.ranks={ranks} must be at most the {places} devices that the run may use"
    return Problem("launcher.ranks", f"{text}; lower it, or name more in the file `devices` of the run's folder")


def named_hardware_is_known(case: Case) -> Problem | None:
    """about.hardware is a kind of GPU that the planner knows."""
    name = case.recipe.about.hardware
    if name is None or name in HARDWARE:
        return None
    hint = did_you_mean(name, HARDWARE) or f"try {one_of(list(HARDWARE))}"
    return Problem("about.hardware", f"about.hardware={name} is no GPU that is known; {hint}, or null")


def tp_divides_heads(case: Case) -> Problem | None:
    """Each tensor-parallel rank has the same number of query heads."""
    heads = case.recipe.model.n_heads
    if heads % case.tp == 0:
        return None
    text = f"parallelism.tp={case.tp} must divide model.n_heads={heads}"
    way = way_out(
        case,
        Way("parallelism.tp", legal_tp(case), case.tp),
        Way("model.n_heads", multiples(heads, case.tp), heads, 2),
    )
    return Problem("parallelism.tp", f"{text}; {way}")


def tp_fits_kv_heads(case: Case) -> Problem | None:
    """Tensor-parallel ranks share out the key and value heads, or each head is held by equally many ranks."""
    kv = case.recipe.model.n_kv_heads
    if kv % case.tp == 0 or case.tp % kv == 0:
        return None
    text = f"parallelism.tp={case.tp} must divide model.n_kv_heads={kv} or be a multiple of it"
    legal = [n for n in divisors(case.recipe.model.n_heads) if n % case.tp == 0 or case.tp % n == 0]
    ways = Way("parallelism.tp", legal_tp(case), case.tp), Way("model.n_kv_heads", legal, kv, most=3)
    return Problem("parallelism.tp", f"{text}; {way_out(case, *ways)}")


def tp_divides_ffn(case: Case) -> Problem | None:
    """Each tensor-parallel rank has the same width of the feed-forward layer."""
    d_ffn = case.recipe.model.d_ffn
    if d_ffn % case.tp == 0 or case.dense_layers == 0:
        return None
    text = f"parallelism.tp={case.tp} must divide model.d_ffn={d_ffn}"
    way = way_out(
        case,
        Way("parallelism.tp", legal_tp(case), case.tp),
        Way("model.d_ffn", widths(d_ffn, case.tp), most=2),
    )
    return Problem("parallelism.tp", f"{text}; {way}")


def sequence_parallel_needs_tp(case: Case) -> Problem | None:
    """Only tensor-parallel ranks can split the sequence."""
    if not case.recipe.parallelism.sequence_parallel or case.tp > 1:
        return None
    text = "parallelism.sequence_parallel=true needs parallelism.tp > 1, it is 1; set it to false or raise tp"
    return Problem("parallelism.sequence_parallel", text)


def sequence_splits_over_tp(case: Case) -> Problem | None:
    """Under sequence parallel, a context-parallel rank's part of a sequence divides among tensor-parallel ranks."""
    seq_len = case.recipe.data.seq_len
    part = seq_len
    if seq_len % case.cp == 0:
        part = seq_len // case.cp
    if not case.recipe.parallelism.sequence_parallel or part % case.tp == 0:
        return None
    unit = f"parallelism.tp={case.tp}"
    if case.cp > 1:
        unit = f"parallelism.cp={case.cp} · {unit}"
    text = f"data.seq_len={seq_len} must be a multiple of {unit} under sequence parallel"
    fitting_tp = [tp for tp in legal_tp(case) if part % tp == 0]
    way = way_out(
        case,
        Way("data.seq_len", multiples(seq_len, sequence_unit(case)), seq_len, most=2),
        Way("parallelism.sequence_parallel", (False,)),
        Way("parallelism.tp", fitting_tp, case.tp, most=3),
    )
    return Problem("data.seq_len", f"{text}; {way}")


def longest_sequence_splits_over_ranks(case: Case) -> Problem | None:
    """What divides sequences divides the longest one as well: generated text grows up to it."""
    longest = case.recipe.model.max_seq_len
    parallelism = case.recipe.parallelism
    unit = sequence_unit(case)
    # one that follows data.seq_len is told of with it
    if longest % unit == 0 or "model.max_seq_len" in case.decided:
        return None
    units = []
    ways = [Way("model.max_seq_len", multiples(longest, unit), longest, most=2)]
    if case.cp > 1:
        units.append(f"{unit} with parallelism.cp={case.cp}, context.kind={parallelism.context.kind}")
    if parallelism.sequence_parallel:
        units.append(f"parallelism.tp={case.tp} under sequence parallel")
        ways.append(Way("parallelism.sequence_parallel", (False,)))
    text = f"model.max_seq_len={longest} must be a multiple of {' and '.join(units)}"
    return Problem("model.max_seq_len", f"{text}; {way_out(case, *ways)}")


def replicas_share_nothing(case: Case) -> Problem | None:
    """With dp_strategy=replicate no rank shards anything."""
    parallelism = case.recipe.parallelism
    if parallelism.dp_strategy != "replicate" or parallelism.dp_shard == 1:
        return None
    text = f"parallelism.dp_shard={parallelism.dp_shard} needs a dp_strategy that shards, it is replicate"
    text += f"; try parallelism.dp_strategy=zero1, or dp_replicate={case.dp} and dp_shard=1"
    return Problem("parallelism.dp_shard", text)


def sharding_has_ranks_to_share(case: Case) -> Problem | None:
    """zero1, zero2 and fsdp share out over dp_shard: it is not 1 while there are data-parallel ranks."""
    parallelism = case.recipe.parallelism
    if parallelism.dp_strategy not in ("zero1", "zero2", "fsdp") or case.dp == 1 or parallelism.dp_shard > 1:
        return None
    text = f"parallelism.dp_shard=1 shards nothing, parallelism.dp_strategy={parallelism.dp_strategy} has {case.dp}"
    text += f" data-parallel ranks; try dp_shard={case.dp} and dp_replicate=1, or dp_strategy=replicate"
    return Problem("parallelism.dp_shard", text)


def fsdp_has_one_replica(case: Case) -> Problem | None:
    """fsdp shards over all data-parallel ranks; with replicas of the shards it is hsdp."""
    parallelism = case.recipe.parallelism
    if parallelism.dp_strategy != "fsdp" or parallelism.dp_replicate == 1 or parallelism.dp_shard == 1:
        return None
    text = f"parallelism.dp_replicate={parallelism.dp_replicate} must be 1 with parallelism.dp_strategy=fsdp"
    way = way_out(case, Way("parallelism.dp_replicate", (1,)), Way("parallelism.dp_strategy", ("hsdp",)))
    return Problem("parallelism.dp_replicate", f"{text}; {way}")


def hsdp_shards_and_replicates(case: Case) -> Problem | None:
    """hsdp has several shards and several replicas of them; with one of either it is another strategy."""
    parallelism = case.recipe.parallelism
    if parallelism.dp_strategy != "hsdp" or (parallelism.dp_replicate > 1 and parallelism.dp_shard > 1):
        return None
    if parallelism.dp_shard == 1:
        key = "parallelism.dp_shard"
        same_strategy = "replicate"
    else:
        key = "parallelism.dp_replicate"
        same_strategy = "fsdp"
    text = f"{key}=1 must be at least 2 with parallelism.dp_strategy=hsdp over {case.dp} data-parallel"
    legal = [n for n in divisors(case.dp) if 1 < n < case.dp]
    way = way_out(
        case,
        Way(key, legal, case.dp, most=3),
        Way("parallelism.dp_strategy", (same_strategy,)),
    )
    return Problem(key, f"{text} ranks; {way}")


def reduced_gradients_have_ranks(case: Case) -> Problem | None:
    """grad_reduce says how gradients are summed over ranks: with dp = cp = 1 there is nothing to sum."""
    grad_reduce = case.recipe.parallelism.grad_reduce
    if grad_reduce == "fp32" or case.dp * case.cp > 1:
        return None
    text = f"parallelism.grad_reduce={grad_reduce} needs data-parallel or context-parallel ranks"
    return Problem("parallelism.grad_reduce", f"{text}, dp=1 and cp=1; drop it or use more ranks")
