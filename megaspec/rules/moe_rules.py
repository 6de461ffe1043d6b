"""Rules about experts: which layers have them, how tokens choose them, and the ranks that hold them."""

from math import lcm

from megaspec.core.axes import fewest_gpus
from megaspec.core.divisors import divisors, multiples, nearest, widths
from megaspec.core.errors import Problem
from megaspec.core.problems import one_of, show
from megaspec.core.units import counted
from megaspec.nn.moe.spec import RouterSpec
from megaspec.rules.case import Case, legal_tp
from megaspec.rules.ways import Way, mending, way_out


def some_layer_has_experts(case: Case) -> Problem | None:
    """A model with experts has them in one layer at least."""
    moe = case.moe
    n_layers = case.recipe.model.n_layers
    if moe is None:
        return None
    n_entries = n_layers
    if moe.layers is not None:
        n_entries = len(moe.layers)
    if n_entries == 0 or case.dense_layers < n_entries:
        return None
    if moe.layers is not None:
        text = f"model.moe.layers={show(list(moe.layers))} leaves none of model.n_layers={n_layers} to experts"
        return Problem("model.moe.layers", f"{text}; set a 1, or model.moe=null")
    text = f"model.moe.first_dense={show(moe.first_dense)} leaves none of model.n_layers={n_layers} to experts"
    fewer = range(min(moe.first_dense, n_layers) - 1, -1, -1)
    way = way_out(case, Way("model.moe.first_dense", fewer, most=1), Way("model.moe.every", (1,)))
    return Problem("model.moe.first_dense", f"{text}; {way}, or model.moe=null")


def layer_list_is_as_long_as_the_model(case: Case) -> Problem | None:
    """The list of layers with experts has an entry for each layer."""
    moe = case.moe
    n_layers = case.recipe.model.n_layers
    if moe is None or moe.layers is None or len(moe.layers) == n_layers:
        return None
    text = f"model.moe.layers has {counted(len(moe.layers), 'entry')} and must have one for each of"
    text += f" model.n_layers={n_layers}"
    return Problem("model.moe.layers", f"{text}; write {n_layers}, or use model.moe.every and first_dense")


def expert_layers_are_named_once(case: Case) -> Problem | None:
    """A list of layers, and every or first_dense, are two answers to which layers have experts."""
    moe = case.moe
    if moe is None or moe.layers is None:
        return None
    given = []
    if moe.every != 1:
        given.append(f"model.moe.every={moe.every}")
    if moe.first_dense != 0:
        given.append(f"model.moe.first_dense={moe.first_dense}")
    if not given:
        return None
    text = f"model.moe.layers and {' and '.join(given)} both say which layers have experts; drop one of them"
    return Problem("model.moe.layers", text)


def tokens_find_enough_experts(case: Case) -> Problem | None:
    """A token takes at most as many experts as there are."""
    moe = case.moe
    if moe is None or moe.top_k <= moe.n_experts:
        return None
    text = f"model.moe.top_k={moe.top_k} must be at most model.moe.n_experts={moe.n_experts}"
    router = moe.router
    most = [moe.n_experts]
    if router.n_groups is not None and router.group_top_k is not None:
        # a token chooses among the experts of its groups alone
        most.append(moe.n_experts // router.n_groups * router.group_top_k)
    way = way_out(
        case,
        Way("model.moe.top_k", most, most=1),
        Way("model.moe.n_experts", _more_experts(case, moe.top_k), most=1),
    )
    return Problem("model.moe.top_k", f"{text}; {way}")


def _more_experts(case: Case, least: int) -> list[int]:
    """Numbers of experts from `least` on that the expert ranks and the groups divide."""
    unit = lcm(case.ep, case.moe.router.n_groups or 1)
    first = -(-least // unit) * unit
    return [first, first + unit]


def groups_are_given_together(case: Case) -> Problem | None:
    """A choice by groups needs both the number of groups and how many a token may take."""
    router = _router(case)
    if router is None or (router.n_groups is None) == (router.group_top_k is None):
        return None
    if router.group_top_k is None:
        given = "n_groups"
        absent = "group_top_k"
    else:
        given = "group_top_k"
        absent = "n_groups"
    text = f"model.moe.router.{given}={getattr(router, given)} needs model.moe.router.{absent}, it is null"
    return Problem(f"model.moe.router.{given}", f"{text}; set both or neither")


def groups_divide_experts(case: Case) -> Problem | None:
    """Groups of experts are equally large."""
    moe = case.moe
    if moe is None or moe.router.n_groups is None or moe.n_experts % moe.router.n_groups == 0:
        return None
    n_groups = moe.router.n_groups
    more_experts = multiples(moe.n_experts, lcm(n_groups, case.ep))
    way = way_out(
        case,
        Way("model.moe.router.n_groups", divisors(moe.n_experts), n_groups),
        Way("model.moe.n_experts", more_experts, moe.n_experts, most=2),
    )
    text = f"model.moe.router.n_groups={n_groups} must divide model.moe.n_experts={moe.n_experts}"
    return Problem("model.moe.router.n_groups", f"{text}; {way}")


def group_choice_is_within_the_groups(case: Case) -> Problem | None:
    """A token takes experts from at most as many groups as there are."""
    router = _router(case)
    if router is None or router.n_groups is None or router.group_top_k is None:
        return None
    if router.group_top_k <= router.n_groups:
        return None
    text = f"model.moe.router.group_top_k={router.group_top_k} must be at most"
    text += f" model.moe.router.n_groups={router.n_groups}"
    more_groups = [n for n in divisors(case.moe.n_experts) if n >= router.group_top_k]
    way = way_out(
        case,
        Way("model.moe.router.group_top_k", range(router.n_groups, 0, -1), most=1),
        Way("model.moe.router.n_groups", more_groups, most=1),
    )
    return Problem("model.moe.router.group_top_k", f"{text}; {way}")


def chosen_groups_hold_enough_experts(case: Case) -> Problem | None:
    """The groups that a token may choose from hold the experts that it takes."""
    moe = case.moe
    router = _router(case)
    if router is None or router.n_groups is None or router.group_top_k is None or moe.top_k > moe.n_experts:
        return None
    group_size = moe.n_experts // router.n_groups
    if router.group_top_k > router.n_groups or moe.n_experts % router.n_groups:
        return None  # told by the rules before this one
    reachable = group_size * router.group_top_k
    if reachable >= moe.top_k:
        return None
    text = f"model.moe.router.group_top_k={router.group_top_k} groups of {group_size} experts hold"
    text += f" {reachable}, model.moe.top_k={moe.top_k} needs more"
    fewest_groups = -(-moe.top_k // group_size)
    way = way_out(
        case,
        Way("model.moe.router.group_top_k", range(fewest_groups, router.n_groups + 1), most=1),
        Way("model.moe.top_k", (reachable,)),
    )
    return Problem("model.moe.router.group_top_k", f"{text}; {way}")


def a_group_score_needs_groups(case: Case) -> Problem | None:
    """How groups are compared is said where there are groups."""
    router = _router(case)
    if router is None or router.group_score == "share" or router.n_groups is not None or router.group_top_k is not None:
        return None
    text = f"model.moe.router.group_score={router.group_score} needs groups, model.moe.router.n_groups is null"
    return Problem("model.moe.router.group_score", f"{text}; give n_groups and group_top_k, or drop it")


def a_group_has_the_experts_of_its_score(case: Case) -> Problem | None:
    """A group that is scored by its best two experts has two."""
    moe = case.moe
    if moe is None or moe.router.n_groups is None or moe.router.group_score != "best_two":
        return None
    n_groups = moe.router.n_groups
    if moe.n_experts % n_groups or moe.n_experts >= 2 * n_groups:
        return None  # whether groups are even is told by the rule before this one
    text = f"model.moe.router.group_score=best_two needs groups of two experts, model.moe.n_experts={moe.n_experts}"
    text += f" in model.moe.router.n_groups={n_groups} have one each"
    way = way_out(case, Way("model.moe.router.n_groups", divisors(moe.n_experts), n_groups))
    return Problem("model.moe.router.group_score", f"{text}; set group_score=best, or {way}")


def bias_balances_independent_scores(case: Case) -> Problem | None:
    """The balancing bias needs scores that don't depend on each other: sigmoid or sqrt_softplus."""
    router = _router(case)
    if router is None or not router.expert_bias or router.score != "softmax":
        return None
    text = "model.moe.router.expert_bias=true needs score=sigmoid or score=sqrt_softplus, it is softmax"
    return Problem("model.moe.router.expert_bias", f"{text}; set one of them, or expert_bias=false")


def only_a_bias_that_exists_moves(case: Case) -> Problem | None:
    """bias_rate is said of a bias that exists."""
    router = _router(case)
    if router is None or router.bias_rate == 0 or router.expert_bias:
        return None
    text = f"model.moe.router.bias_rate={router.bias_rate:g} needs model.moe.router.expert_bias=true, it is false"
    return Problem("model.moe.router.bias_rate", f"{text}; set it to true, or bias_rate=0")


def a_single_expert_has_a_weight(case: Case) -> Problem | None:
    """With top_k=1 weights are not normalised: the chosen one would always have 1, and the router learn nothing."""
    moe = case.moe
    if moe is None or moe.top_k > 1 or not moe.router.norm_top_k:
        return None
    if moe.router.balancing == "sinkhorn" or moe.n_experts == 1:
        return None
    text = "model.moe.top_k=1 with model.moe.router.norm_top_k=true weighs every chosen expert 1, so that the router"
    return Problem("model.moe.top_k", f"{text} learns nothing; set norm_top_k=false, or top_k=2")


def sinkhorn_balances_alone(case: Case) -> Problem | None:
    """Under sinkhorn there are no balancing losses, no bias, no groups and no other weights: it balances by itself."""
    router = _router(case)
    if router is None or router.balancing != "sinkhorn":
        return None
    idle_values = (
        ("losses", (), "[]"),
        ("expert_bias", False, "false"),
        ("n_groups", None, "null"),
        ("norm_top_k", True, "true"),
    )
    for name, idle, instead in idle_values:
        value = getattr(router, name)
        if value == idle:
            continue
        key = f"model.moe.router.{name}"
        shown = key
        if name != "losses":
            shown = f"{key}={show(value)}"
        text = f"{shown} has no place beside model.moe.router.balancing=sinkhorn"
        return Problem(key, f"{text}; set {key}={instead}, or balancing=top_k")
    return None


def capacity_needs_a_plain_choice(case: Case) -> Problem | None:
    """A capacity needs balancing=top_k: sinkhorn evens the load by itself."""
    moe = case.moe
    if moe is None or moe.capacity_factor is None or moe.router.balancing == "top_k":
        return None
    text = f"model.moe.capacity_factor={moe.capacity_factor:g} needs model.moe.router.balancing=top_k, it is sinkhorn"
    return Problem("model.moe.capacity_factor", f"{text}; set capacity_factor=null, or balancing=top_k")


def dropping_needs_a_capacity(case: Case) -> Problem | None:
    """drop and pad_to_capacity need a capacity factor: without one nothing is dropped or padded."""
    moe = case.moe
    if moe is None or moe.capacity_factor is not None:
        return None
    if moe.pad_to_capacity:
        name = "pad_to_capacity"
    elif moe.drop != "probs":
        name = "drop"
    else:
        return None
    text = f"model.moe.{name}={show(getattr(moe, name))} needs model.moe.capacity_factor, it is null"
    return Problem(f"model.moe.{name}", f"{text}; drop it, or try capacity_factor=1.25")


def losses_are_given_once(case: Case) -> Problem | None:
    """Each kind of balancing loss is given once."""
    router = _router(case)
    if router is None:
        return None
    kinds = [loss.kind for loss in router.losses]
    for kind in kinds:
        times = kinds.count(kind)
        if times > 1:
            text = f"model.moe.router.losses has kind={kind} {times} times; keep one and add up the coefficients"
            return Problem("model.moe.router.losses", text)
    return None


def _router(case: Case) -> RouterSpec | None:
    """The router of the experts; None where the model has no experts."""
    if case.moe is None:
        return None
    return case.moe.router


def a_gate_needs_shared_experts(case: Case) -> Problem | None:
    """The gate of the shared experts needs shared experts."""
    moe = case.moe
    if moe is None or not moe.shared_gate or moe.d_shared is not None:
        return None
    text = "model.moe.shared_gate=true needs model.moe.d_shared, it is null; set it to false or give d_shared a width"
    return Problem("model.moe.shared_gate", text)


def experts_under_tp_split_the_sequence(case: Case) -> Problem | None:
    """Experts and tensor parallel together need sequence parallel: else every tp rank would dispatch every token."""
    if case.moe is None or case.tp == 1 or case.recipe.parallelism.sequence_parallel:
        return None
    key = "parallelism.sequence_parallel"
    text = f"{key}=false does not go with experts (model.moe) and parallelism.tp={case.tp}"
    without_tp = Way("parallelism.tp", (1,))
    # a sequence divides into cp · tp shares; the two chunks of a cp rank are of equal length, too
    unit = case.cp * case.tp
    if case.cp > 1:
        unit = lcm(2 * case.cp, unit)
    seq_len = case.recipe.data.seq_len
    if seq_len % unit:
        lengths = f"data.seq_len={one_of(nearest(seq_len, multiples(seq_len, unit), most=2))}"
    elif case.recipe.model.max_seq_len % case.tp:
        longest = case.recipe.model.max_seq_len
        lengths = f"model.max_seq_len={one_of(nearest(longest, multiples(longest, case.tp), most=2))}"
    else:
        return Problem(key, f"{text}; {way_out(case, Way(key, (True,)), without_tp)}")
    return Problem(key, f"{text}; set it to true with {lengths}, or {way_out(case, without_tp, key=key)}")


def expert_degrees_need_experts(case: Case) -> Problem | None:
    """ep and etp divide experts: a model without any has nothing to divide."""
    axis = _expert_axis(case)
    degree = getattr(case, axis)
    if case.moe is not None or degree == 1:
        return None
    text = f"parallelism.{axis}={degree} needs experts, the model has none (model.moe); set it to 1"
    return Problem(f"parallelism.{axis}", text)


def _expert_axis(case: Case) -> str:
    """The axis of experts that a problem of both is told of."""
    if case.ep > 1:
        return "ep"
    return "etp"


def dispatch_needs_expert_ranks(case: Case) -> Problem | None:
    """How tokens are dispatched matters only where experts lie on more than one rank."""
    dispatch = case.recipe.parallelism.dispatch
    if dispatch == "all_to_all" or case.ep * case.etp > 1 or "parallelism.ep" in case.decided:
        return None
    text = f"parallelism.dispatch={dispatch} needs parallelism.ep > 1, it is 1; drop it or raise ep"
    return Problem("parallelism.dispatch", text)


def ep_divides_experts(case: Case) -> Problem | None:
    """Each expert-parallel rank has the same number of experts."""
    if case.moe is None or case.moe.n_experts % case.ep == 0:
        return None
    n_experts = case.moe.n_experts
    text = f"parallelism.ep={case.ep} must divide model.moe.n_experts={n_experts}"
    way = way_out(
        case,
        Way("parallelism.ep", _legal_ep(case) or divisors(n_experts), case.ep),
        Way("model.moe.n_experts", multiples(n_experts, case.ep), n_experts, 2),
    )
    return Problem("parallelism.ep", f"{text}; {way}")


def expert_grid_fits_the_ranks(case: Case) -> Problem | None:
    """ep · etp divides the ranks of a pipeline stage, tp · cp · dp: experts lie over the same ranks."""
    stage_ranks = case.tp * case.cp * case.dp
    if case.moe is None or stage_ranks % (case.ep * case.etp) == 0:
        return None
    ranks = case.recipe.launcher.ranks
    if case.dp_is_open and ranks % (case.pp * case.ep * case.etp) == 0:
        return None  # another number of data-parallel ranks would do: the rule of the degrees tells
    axis = _expert_axis(case)
    key = f"parallelism.{axis}"
    product = f"ep={case.ep} · etp={case.etp} = {case.ep * case.etp}"
    text = f"{key}={getattr(case, axis)}: {product} must divide tp={case.tp} · cp={case.cp} · dp={case.dp}"
    text += f" = {stage_ranks}"
    fewest = fewest_gpus(tp=case.tp, cp=case.cp, pp=case.pp, ep=case.ep, etp=case.etp)
    legal_etp = [n for n in divisors(stage_ranks) if stage_ranks % (n * case.ep) == 0]
    way = way_out(
        case,
        Way("parallelism.ep", _legal_ep(case), case.ep),
        Way("parallelism.etp", legal_etp, case.etp),
        Way("launcher.ranks", multiples(ranks, fewest), ranks, most=2),
        key=key,
    )
    return Problem(key, f"{text}; {way}")


def _legal_ep(case: Case) -> list[int]:
    """Degrees that divide both the experts and the ranks of a stage."""
    stage_ranks = case.tp * case.cp * case.dp
    return [ep for ep in divisors(case.moe.n_experts) if stage_ranks % (ep * case.etp) == 0]


def replicas_hold_all_experts(case: Case) -> Problem | None:
    """What is sharded is sharded inside a replica, experts too: ep · etp divides dp_shard · cp · tp."""
    parallelism = case.recipe.parallelism
    stage_ranks = case.tp * case.cp * case.dp
    grid = case.ep * case.etp
    replica_ranks = case.tp * case.cp * parallelism.dp_shard
    if case.moe is None or parallelism.dp_strategy == "replicate" or parallelism.dp_replicate == 1:
        return None
    if replica_ranks % grid == 0:
        return None
    if stage_ranks % grid or case.dp_is_open:
        return None  # told by the rules of the grid and of the degrees
    key = "parallelism.dp_replicate"
    text = f"{key}={parallelism.dp_replicate} makes replicas of dp_shard={parallelism.dp_shard} · cp={case.cp} · "
    text += f"tp={case.tp} = {replica_ranks} ranks, which ep={case.ep} · etp={case.etp} = {grid} must divide; try "
    ways = [_larger_replicas(case, grid)]
    legal_ep = [n for n in divisors(case.moe.n_experts) if replica_ranks % (n * case.etp) == 0]
    degrees = Way("parallelism.ep", legal_ep, case.ep)
    if mending(case, degrees):
        ways.append(way_out(case, degrees, key=key).removeprefix("try "))
    return Problem(key, text + ", or ".join(ways))


def _larger_replicas(case: Case, grid: int) -> str:
    """The most replicas of which each holds all experts, as settings."""
    parallelism = case.recipe.parallelism
    stage_ranks = case.tp * case.cp * case.dp
    replicas = 1
    for n in divisors(case.dp):
        # replicas of one data-parallel rank would shard nothing
        if n < case.dp and stage_ranks // n % grid == 0:
            replicas = n
    settings = f"dp_replicate={replicas} and dp_shard={case.dp // replicas}"
    if replicas == 1 and parallelism.dp_strategy == "hsdp":
        settings += " with dp_strategy=fsdp"
    return settings


def etp_divides_experts_width(case: Case) -> Problem | None:
    """Each rank that holds a part of an expert has the same width of it."""
    if case.moe is None or case.moe.d_expert % case.etp == 0:
        return None
    d_expert = case.moe.d_expert
    stage_ranks = case.tp * case.cp * case.dp
    text = f"parallelism.etp={case.etp} must divide model.moe.d_expert={d_expert}"
    dividing = divisors(d_expert)
    fitting = [n for n in dividing if stage_ranks % (n * case.ep) == 0]
    way = way_out(
        case,
        Way("parallelism.etp", fitting or dividing, case.etp),
        Way("model.moe.d_expert", widths(d_expert, case.etp), most=2),
    )
    return Problem("parallelism.etp", f"{text}; {way}")


def tp_divides_shared_experts(case: Case) -> Problem | None:
    """Each tensor-parallel rank has the same width of the shared experts."""
    if case.moe is None:
        return None
    d_shared = case.moe.d_shared
    if d_shared is None or d_shared % case.tp == 0:
        return None
    text = f"parallelism.tp={case.tp} must divide model.moe.d_shared={d_shared}"
    way = way_out(
        case,
        Way("parallelism.tp", legal_tp(case), case.tp),
        Way("model.moe.d_shared", widths(d_shared, case.tp), most=2),
    )
    return Problem("parallelism.tp", f"{text}; {way}")
