"""Rules about sequences that are divided among context-parallel ranks."""

from megaspec.core.divisors import divisors, multiples
from megaspec.core.errors import Problem
from megaspec.core.problems import one_of, show
from megaspec.rules.case import Case, sequence_unit
from megaspec.rules.ways import Way, way_out


def sequence_splits_over_cp(case: Case) -> Problem | None:
    """Sequences divide into two equal chunks for each context-parallel rank, into one with all_to_all."""
    seq_len = case.recipe.data.seq_len
    kind = case.recipe.parallelism.context.kind
    chunks = 2
    if kind == "all_to_all":
        chunks = 1
    unit = chunks * case.cp
    if case.cp == 1 or seq_len % unit == 0:
        return None
    product = f"parallelism.cp={case.cp}"
    if chunks > 1:
        product = f"{chunks} · {product} = {unit}"
    text = f"data.seq_len={seq_len} must be a multiple of {product} with parallelism.context.kind={kind}"
    legal_cp = [cp for cp in divisors(seq_len) if cp == 1 or seq_len % (chunks * cp) == 0]
    way = way_out(
        case,
        Way("data.seq_len", multiples(seq_len, sequence_unit(case)), seq_len, most=2),
        Way("parallelism.cp", legal_cp, case.cp, most=3),
    )
    return Problem("data.seq_len", f"{text}; {way}")


def heads_split_over_cp(case: Case) -> Problem | None:
    """An all-to-all gives each context-parallel rank whole heads, of queries and of keys, out of a tp rank's own."""
    context = case.recipe.parallelism.context
    model = case.recipe.model
    if case.cp == 1:
        return None
    if context.kind == "all_to_all":
        key = "parallelism.cp"
        value = str(case.cp)
        ranks = case.cp
    elif context.kind == "hierarchical" and context.factors is not None:
        # the outer factor is the all-to-all's, the inner one the ring's
        key = "parallelism.context.factors"
        value = str(list(context.factors))
        ranks = context.factors[0]
    else:
        return None
    # heads of a tensor-parallel rank
    heads = max(1, model.n_heads // case.tp)
    kv_heads = max(1, model.n_kv_heads // case.tp)
    if heads % ranks:
        name = "n_heads"
        uneven = heads
    elif kv_heads % ranks:
        name = "n_kv_heads"
        uneven = kv_heads
    else:
        return None
    text = f"{key}={value}: an all-to-all over {ranks} ranks must divide the heads of a rank, model.{name}="
    text += f"{getattr(model, name)} / parallelism.tp={case.tp} = {uneven}"
    legal = [n for n in divisors(kv_heads) if heads % n == 0]
    if context.kind == "hierarchical":
        pairs = [[n, case.cp // n] for n in legal if case.cp % n == 0]
        return Problem(key, f"{text}; {way_out(case, Way(key, pairs))}")
    kinds = Way("parallelism.context.kind", ("ring", "all_gather"), most=1)
    return Problem(key, f"{text}; {way_out(case, Way(key, legal, ranks), kinds)}")


def hierarchical_has_factors(case: Case) -> Problem | None:
    """The hierarchical kind, and only it, has factors, whose product is cp."""
    context = case.recipe.parallelism.context
    key = "parallelism.context.factors"
    if context.kind != "hierarchical":
        if context.factors is None:
            return None
        text = f"{key}={list(context.factors)} needs parallelism.context.kind=hierarchical, it is {context.kind}"
        return Problem(key, f"{text}; drop it")
    if case.cp == 1:
        return None
    pairs = [f"[{outer},{case.cp // outer}]" for outer in divisors(case.cp) if 1 < outer < case.cp]
    hint = "set parallelism.context.kind=ring"
    if pairs:
        hint = f"try {one_of(pairs[:4])}"
    if context.factors is None:
        return Problem("parallelism.context.kind", f"parallelism.context.kind=hierarchical needs {key}; {hint}")
    outer, inner = context.factors
    if outer * inner == case.cp:
        return None
    text = f"{key}={list(context.factors)}, {outer} · {inner} = {outer * inner}, must make parallelism.cp={case.cp}"
    return Problem(key, f"{text}; {hint}")


def context_settings_need_cp(case: Case) -> Problem | None:
    """Settings of context parallel need more than one rank: with cp=1 nothing reads them."""
    context = case.recipe.parallelism.context
    if case.cp > 1 or context.kind == "ring" or "parallelism.cp" in case.decided:
        return None
    key = "parallelism.context.kind"
    text = f"{key}={show(context.kind)} needs parallelism.cp > 1, it is 1"
    return Problem(key, f"{text}; drop it or raise parallelism.cp")
