"""Rules about sequences that are divided among context-parallel ranks."""

from megaspec.core.divisors import divisors, multiples
from megaspec.core.errors import Problem
from megaspec.core.problems import one_of, show
from megaspec.rules.case import Case, sequence_unit
from megaspec.rules.ways import Way, way_out


def sequence_splits_over_cp(case: Case) -> Problem | None:
    """Sequences divide into two equal chunks for each context-parallel rank, into one with all_to_all."""
    seq_len, kind = case.recipe.data.seq_len, case.recipe.parallelism.context.kind
    chunks = 1 if kind == "all_to_all" else 2
    if case.cp == 1 or seq_len % (chunks * case.cp) == 0:
        return None
    unit = f"{chunks} · parallelism.cp={case.cp} = {chunks * case.cp}" if chunks > 1 else f"parallelism.cp={case.cp}"
    text = f"data.seq_len={seq_len} must be a multiple of {unit} with parallelism.context.kind={kind}"
    legal = [c for c in divisors(seq_len) if c == 1 or seq_len % (chunks * c) == 0]
    lengths = Way("data.seq_len", multiples(seq_len, sequence_unit(case)), seq_len, most=2)
    return Problem("data.seq_len", f"{text}; {way_out(case, lengths, Way('parallelism.cp', legal, case.cp, most=3))}")


def heads_split_over_cp(case: Case) -> Problem | None:
    """An all-to-all gives each context-parallel rank whole heads, of queries and of keys, out of a tp rank's own."""
    context, model = case.recipe.parallelism.context, case.recipe.model
    if case.cp == 1 or context.kind not in ("all_to_all", "hierarchical"):
        return None
    if context.kind == "hierarchical" and context.factors is None:
        return None
    ranks = case.cp if context.kind == "all_to_all" else context.factors[0]
    heads, kv_heads = max(1, model.n_heads // case.tp), max(1, model.n_kv_heads // case.tp)
    name, own = ("n_heads", heads) if heads % ranks else ("n_kv_heads", kv_heads)
    if own % ranks == 0:
        return None
    key = "parallelism.cp" if context.kind == "all_to_all" else "parallelism.context.factors"
    value = str(case.cp) if context.kind == "all_to_all" else str(list(context.factors))
    legal = [r for r in divisors(kv_heads) if heads % r == 0]
    text = f"{key}={value}: an all-to-all over {ranks} ranks must divide the heads of a rank, model.{name}="
    text += f"{getattr(model, name)} / parallelism.tp={case.tp} = {own}"
    if context.kind == "hierarchical":
        pairs = [[r, case.cp // r] for r in legal if case.cp % r == 0]
        return Problem(key, f"{text}; {way_out(case, Way(key, pairs))}")
    kinds = Way("parallelism.context.kind", ("ring", "all_gather"), most=1)
    return Problem(key, f"{text}; {way_out(case, Way(key, legal, ranks), kinds)}")


def hierarchical_has_factors(case: Case) -> Problem | None:
    """The hierarchical kind, and only it, has factors, whose product is cp."""
    context, key = case.recipe.parallelism.context, "parallelism.context.factors"
    if context.kind != "hierarchical":
        if context.factors is None:
            return None
        text = f"{key}={list(context.factors)} needs parallelism.context.kind=hierarchical, it is {context.kind}"
        return Problem(key, f"{text}; drop it")
    if case.cp == 1:
        return None
    pairs = [f"[{a},{case.cp // a}]" for a in divisors(case.cp) if 1 < a < case.cp]
    hint = f"try {one_of(pairs[:4])}" if pairs else "set parallelism.context.kind=ring"
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
