"""Rules about experts: which layers have them, how tokens choose them, and the ranks that hold them."""

from math import lcm

from megaspec.core.axes import fewest_gpus
from megaspec.core.divisors import divisors, multiples, nearest, widths
from megaspec.core.errors import Problem
from megaspec.core.problems import one_of, show
from megaspec.rules.case import Case, legal_tp
from megaspec.rules.ways import Way, mending, way_out

_EVERY = Way("model.moe.every", (1,))


def some_layer_has_experts(case: Case) -> Problem | None:
    """A model with experts has them in one layer at least."""
    moe, n_layers = case.moe, case.recipe.model.n_layers
    entries = n_layers if moe is None or moe.layers is None else len(moe.layers)
    if moe is None or entries == 0 or case.dense_layers < entries:
        return None
    name, shown = ("layers", list(moe.layers)) if moe.layers is not None else ("first_dense", moe.first_dense)
    text = f"model.moe.{name}={show(shown)} leaves none of model.n_layers={n_layers} to experts"
    if moe.layers is not None:
        return Problem(f"model.moe.{name}", f"{text}; set a 1, or model.moe=null")
    ways = Way("model.moe.first_dense", range(min(moe.first_dense, n_layers) - 1, -1, -1), most=1), _EVERY
    return Problem(f"model.moe.{name}", f"{text}; {way_out(case, *ways)}, or model.moe=null")


def layer_list_is_as_long_as_the_model(case: Case) -> Problem | None:
    """The list of layers with experts has an entry for each layer."""
    moe, n_layers = case.moe, case.recipe.model.n_layers
    if moe is None or moe.layers is None or len(moe.layers) == n_layers:
        return None
    text = f"model.moe.layers has {len(moe.layers)} entries and must have one for each of model.n_layers={n_layers}"
    return Problem("model.moe.layers", f"{text}; write {n_layers}, or use model.moe.every and first_dense")


def expert_layers_are_named_once(case: Case) -> Problem | None:
    """A list of layers, and every or first_dense, are two answers to which layers have experts."""
    moe = case.moe
    if moe is None or moe.layers is None:
        return None
    given = [
        f"model.moe.{n}={getattr(moe, n)}" for n, idle in (("every", 1), ("first_dense", 0)) if getattr(moe, n) != idle
    ]
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
    router, most = moe.router, [moe.n_experts]
    if router.n_groups is not None and router.group_top_k is not None:
        most.append(moe.n_experts // router.n_groups * router.group_top_k)
    experts = Way("model.moe.n_experts", _more(case, moe.top_k), most=1)
    return Problem("model.moe.top_k", f"{text}; {way_out(case, Way('model.moe.top_k', most, most=1), experts)}")


def _more(case: Case, least: int) -> list[int]:
    """Numbers of experts from `least` on that the expert ranks and the groups divide."""
    unit = lcm(case.ep, case.moe.router.n_groups or 1) if case.moe else 1
    first = -(-least // unit) * unit
    return [first, first + unit]


def groups_are_given_together(case: Case) -> Problem | None:
    """A choice by groups needs both the number of groups and how many a token may take."""
    router = case.moe.router if case.moe else None
    if router is None or (router.n_groups is None) == (router.group_top_k is None):
        return None
    given, absent = ("n_groups", "group_top_k") if router.group_top_k is None else ("group_top_k", "n_groups")
    text = f"model.moe.router.{given}={getattr(router, given)} needs model.moe.router.{absent}, it is null"
    return Problem(f"model.moe.router.{given}", f"{text}; set both or neither")


def groups_divide_experts(case: Case) -> Problem | None:
    """Groups of experts are equally large."""
    moe = case.moe
    if moe is None or moe.router.n_groups is None or moe.n_experts % moe.router.n_groups == 0:
        return None
    n_groups = moe.router.n_groups
    experts = Way("model.moe.n_experts", multiples(moe.n_experts, lcm(n_groups, case.ep)), moe.n_experts, most=2)
    way = way_out(case, Way("model.moe.router.n_groups", divisors(moe.n_experts), n_groups), experts)
    text = f"model.moe.router.n_groups={n_groups} must divide model.moe.n_experts={moe.n_experts}"
    return Problem("model.moe.router.n_groups", f"{text}; {way}")


def group_choice_is_within_the_groups(case: Case) -> Problem | None:
    """A token takes experts from at most as many groups as there are."""
    router = case.moe.router if case.moe else None
    if router is None or router.n_groups is None or router.group_top_k is None:
        return None
    if router.group_top_k <= router.n_groups:
        return None
    text = f"model.moe.router.group_top_k={router.group_top_k} must be at most"
    ways = (
        Way("model.moe.router.group_top_k", range(router.n_groups, 0, -1), most=1),
        Way("model.moe.router.n_groups", [n for n in divisors(case.moe.n_experts) if n >= router.group_top_k], most=1),
    )
    return Problem(
        "model.moe.router.group_top_k", f"{text} model.moe.router.n_groups={router.n_groups}; {way_out(case, *ways)}"
    )


def chosen_groups_hold_enough_experts(case: Case) -> Problem | None:
    """The groups that a token may choose from hold the experts that it takes."""
    moe = case.moe
    router = moe.router if moe else None
    if router is None or router.n_groups is None or router.group_top_k is None or moe.top_k > moe.n_experts:
        return None
    size = moe.n_experts // router.n_groups
    if (
        router.group_top_k > router.n_groups
        or moe.n_experts % router.n_groups
        or size * router.group_top_k >= moe.top_k
    ):
        return None
    text = f"model.moe.router.group_top_k={router.group_top_k} groups of {size} experts hold"
    text += f" {size * router.group_top_k}, model.moe.top_k={moe.top_k} needs more"
    ways = (
        Way("model.moe.router.group_top_k", range(-(-moe.top_k // size), router.n_groups + 1), most=1),
        Way("model.moe.top_k", (size * router.group_top_k,)),
    )
    return Problem("model.moe.router.group_top_k", f"{text}; {way_out(case, *ways)}")


def bias_balances_independent_scores(case: Case) -> Problem | None:
    """The balancing bias needs scores that don't depend on each other: sigmoid or sqrt_softplus."""
    router = case.moe.router if case.moe else None
    if router is None or router.bias_rate == 0 or router.score != "softmax":
        return None
    text = f"model.moe.router.bias_rate={router.bias_rate:g} needs score=sigmoid or score=sqrt_softplus, it is softmax"
    return Problem("model.moe.router.bias_rate", f"{text}; set one of them, or bias_rate=0")


def only_a_softmax_comes_first(case: Case) -> Problem | None:
    """softmax_first is said of softmax scores: the others have no softmax."""
    router = case.moe.router if case.moe else None
    if router is None or not router.softmax_first or router.score == "softmax":
        return None
    text = f"model.moe.router.softmax_first=true needs score=softmax, it is {router.score}"
    return Problem("model.moe.router.softmax_first", f"{text}; set it to false")


def a_single_expert_has_a_weight(case: Case) -> Problem | None:
    """With top_k=1, softmax comes first: over the one that is chosen it is always 1, and the router learns nothing."""
    moe = case.moe
    if moe is None or moe.top_k > 1 or moe.router.score != "softmax" or moe.router.softmax_first:
        return None
    if moe.router.balancing == "sinkhorn" or moe.n_experts == 1:
        return None
    text = "model.moe.top_k=1 with score=softmax weighs every chosen expert 1, so that the router learns nothing"
    return Problem("model.moe.top_k", f"{text}; set model.moe.router.softmax_first=true, or top_k=2")


def sinkhorn_balances_alone(case: Case) -> Problem | None:
    """Under sinkhorn there are no balancing losses, no bias and no groups: it balances by itself."""
    router = case.moe.router if case.moe else None
    if router is None or router.balancing != "sinkhorn":
        return None
    for name, idle, instead in (("losses", (), "[]"), ("bias_rate", 0, "0"), ("n_groups", None, "null")):
        value = getattr(router, name)
        if value != idle:
            key = f"model.moe.router.{name}"
            shown = "" if name == "losses" else f"={show(value)}"
            text = f"{key}{shown} has no place beside model.moe.router.balancing=sinkhorn"
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
    name = "pad_to_capacity" if moe.pad_to_capacity else "drop"
    if name == "drop" and moe.drop == "probs":
        return None
    text = f"model.moe.{name}={show(getattr(moe, name))} needs model.moe.capacity_factor, it is null"
    return Problem(f"model.moe.{name}", f"{text}; drop it, or try capacity_factor=1.25")


def losses_are_given_once(case: Case) -> Problem | None:
    """Each kind of balancing loss is given once."""
    kinds = [loss.kind for loss in case.moe.router.losses] if case.moe else []
    twice = next((kind for kind in kinds if kinds.count(kind) > 1), None)
    if twice is None:
        return None
    text = f"model.moe.router.losses has kind={twice} {kinds.count(twice)} times; keep one and add up the coefficients"
    return Problem("model.moe.router.losses", text)


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
    key, seq_len = "parallelism.sequence_parallel", case.recipe.data.seq_len
    text = f"{key}=false does not go with experts (model.moe) and parallelism.tp={case.tp}"
    unit = lcm(2 * case.cp if case.cp > 1 else 1, case.cp * case.tp)
    ways = Way(key, (True,)), Way("parallelism.tp", (1,))
    if seq_len % unit == 0 and case.recipe.model.max_seq_len % case.tp == 0:
        return Problem(key, f"{text}; {way_out(case, *ways)}")
    name, value = ("data.seq_len", seq_len) if seq_len % unit else ("model.max_seq_len", case.recipe.model.max_seq_len)
    lengths = nearest(value, multiples(value, unit if seq_len % unit else case.tp), most=2)
    return Problem(key, f"{text}; set it to true with {name}={one_of(lengths)}, or {way_out(case, ways[1], key=key)}")


def expert_degrees_need_experts(case: Case) -> Problem | None:
    """ep and etp divide experts: a model without any has nothing to divide."""
    name = "ep" if case.ep > 1 else "etp"
    degree = getattr(case, name)
    if case.moe is not None or degree == 1:
        return None
    text = f"parallelism.{name}={degree} needs experts, the model has none (model.moe); set it to 1"
    return Problem(f"parallelism.{name}", text)


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
    n_experts, legal = case.moe.n_experts, _legal_ep(case) or divisors(case.moe.n_experts)
    text = f"parallelism.ep={case.ep} must divide model.moe.n_experts={n_experts}"
    ways = (
        Way("parallelism.ep", legal, case.ep),
        Way("model.moe.n_experts", multiples(n_experts, case.ep), n_experts, 2),
    )
    return Problem("parallelism.ep", f"{text}; {way_out(case, *ways)}")


def expert_grid_fits_the_ranks(case: Case) -> Problem | None:
    """ep · etp divides the ranks of a pipeline stage, tp · cp · dp: experts lie over the same ranks."""
    inner = case.tp * case.cp * case.dp
    if case.moe is None or inner % (case.ep * case.etp) == 0:
        return None
    if case.dp_is_open and case.recipe.launcher.ranks % (case.pp * case.ep * case.etp) == 0:
        return None
    name = "ep" if case.ep > 1 else "etp"
    key, value = f"parallelism.{name}", getattr(case, name)
    product = f"ep={case.ep} · etp={case.etp} = {case.ep * case.etp}"
    text = f"{key}={value}: {product} must divide tp={case.tp} · cp={case.cp} · dp={case.dp} = {inner}"
    fewest, ranks = (
        fewest_gpus(tp=case.tp, cp=case.cp, pp=case.pp, ep=case.ep, etp=case.etp),
        case.recipe.launcher.ranks,
    )
    ways = (
        Way("parallelism.ep", _legal_ep(case), case.ep),
        Way("parallelism.etp", [n for n in divisors(inner) if inner % (n * case.ep) == 0], case.etp),
        Way("launcher.ranks", multiples(ranks, fewest), ranks, most=2),
    )
    return Problem(key, f"{text}; {way_out(case, *ways, key=key)}")


def _legal_ep(case: Case) -> list[int]:
    """Degrees that divide both the experts and the ranks of a stage."""
    inner = case.tp * case.cp * case.dp
    return [ep for ep in divisors(case.moe.n_experts) if inner % (ep * case.etp) == 0] if case.moe else []


def replicas_hold_all_experts(case: Case) -> Problem | None:
    """What is sharded is sharded inside a replica, experts too: ep · etp divides dp_shard · cp · tp."""
    own, inner = case.recipe.parallelism, case.tp * case.cp * case.dp
    grid, ranks = case.ep * case.etp, case.tp * case.cp * own.dp_shard
    if case.moe is None or own.dp_strategy == "replicate" or own.dp_replicate == 1 or ranks % grid == 0:
        return None
    if inner % grid or case.dp_is_open:
        return None
    text = f"parallelism.dp_replicate={own.dp_replicate} makes replicas of dp_shard={own.dp_shard} · cp={case.cp} · "
    text += f"tp={case.tp} = {ranks} ranks, which ep={case.ep} · etp={case.etp} = {grid} must divide; try "
    replicas = max(d for d in divisors(case.dp) if inner // d % grid == 0 and (d < case.dp or d == 1))
    fsdp = " with dp_strategy=fsdp" if replicas == 1 and own.dp_strategy == "hsdp" else ""
    ways = [f"dp_replicate={replicas} and dp_shard={case.dp // replicas}{fsdp}"]
    legal = [n for n in divisors(case.moe.n_experts) if ranks % (n * case.etp) == 0]
    degrees = Way("parallelism.ep", legal, case.ep)
    ways += (
        [way_out(case, degrees, key="parallelism.dp_replicate").removeprefix("try ")] if mending(case, degrees) else []
    )
    return Problem("parallelism.dp_replicate", text + ", or ".join(ways))


def etp_divides_experts_width(case: Case) -> Problem | None:
    """Each rank that holds a part of an expert has the same width of it."""
    if case.moe is None or case.moe.d_expert % case.etp == 0:
        return None
    width, inner = case.moe.d_expert, case.tp * case.cp * case.dp
    legal = [n for n in divisors(width) if inner % (n * case.ep) == 0] or divisors(width)
    ways = Way("parallelism.etp", legal, case.etp), Way("model.moe.d_expert", widths(width, case.etp), most=2)
    text = f"parallelism.etp={case.etp} must divide model.moe.d_expert={width}"
    return Problem("parallelism.etp", f"{text}; {way_out(case, *ways)}")


def tp_divides_shared_experts(case: Case) -> Problem | None:
    """Each tensor-parallel rank has the same width of the shared experts."""
    width = case.moe.d_shared if case.moe else None
    if width is None or width % case.tp == 0:
        return None
    ways = Way("parallelism.tp", legal_tp(case), case.tp), Way("model.moe.d_shared", widths(width, case.tp), most=2)
    text = f"parallelism.tp={case.tp} must divide model.moe.d_shared={width}"
    return Problem("parallelism.tp", f"{text}; {way_out(case, *ways)}")
