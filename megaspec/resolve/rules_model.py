"""Rules about the model and its vocabulary, and kernels."""

from megaspec.core.errors import Problem
from megaspec.core.problems import one_of
from megaspec.model.llama.spec import LlamaSpec
from megaspec.nn.spec import Llama3RopeScaling
from megaspec.resolve.case import Case, divisors, legal_tp, multiples, nearest
from megaspec_kernels.catalog import choose, unmet


def kv_heads_divide_heads(case: Case) -> Problem | None:
    """Each key and value head serves equally many query heads."""
    heads, kv = case.recipe.model.n_heads, case.recipe.model.n_kv_heads
    if heads % kv == 0:
        return None
    legal = one_of(nearest(kv, divisors(heads)))
    return Problem("model.n_kv_heads", f"model.n_kv_heads={kv} must divide model.n_heads={heads}; try {legal}")


def heads_divide_width(case: Case) -> Problem | None:
    """Without model.d_head, heads divide the width of the model."""
    width, heads = case.recipe.model.d_model, case.recipe.model.n_heads
    if "model.d_head" not in case.decided or case.mla is not None or width % heads == 0:
        return None
    text = f"model.n_heads={heads} must divide model.d_model={width} when model.d_head is auto"
    return Problem("model.n_heads", f"{text}; try {one_of(nearest(heads, divisors(width)))}, or set model.d_head")


def rotary_heads_are_even(case: Case) -> Problem | None:
    """Rotary positions turn pairs of a head's numbers."""
    model = case.recipe.model
    if not isinstance(model, LlamaSpec) or model.mla is not None or model.d_head % 2 == 0:
        return None
    text = f"model.d_head={model.d_head} must be even for rotary positions; try {one_of(multiples(model.d_head, 2))}"
    return Problem("model.d_head", text)


def rotary_scaling_is_ordered(case: Case) -> Problem | None:
    """Llama 3's rotary scaling goes from low to high frequencies."""
    scaling = getattr(case.recipe.model, "rope_scaling", None)
    if not isinstance(scaling, Llama3RopeScaling) or scaling.low_freq_factor < scaling.high_freq_factor:
        return None
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    text = f"model.rope_scaling.low_freq_factor={low} must be below model.rope_scaling.high_freq_factor={high}"
    return Problem("model.rope_scaling.low_freq_factor", f"{text}; Llama 3 has 1 and 4")


def sequences_fit_the_model(case: Case) -> Problem | None:
    """Training sequences are no longer than the model accepts."""
    longest, seq_len = case.recipe.model.max_seq_len, case.recipe.data.seq_len
    if seq_len <= longest:
        return None
    text = f"data.seq_len={seq_len} must be at most model.max_seq_len={longest}; try {longest}"
    return Problem("data.seq_len", f"{text}, or model.max_seq_len={seq_len}")


def vocabulary_holds_the_data(case: Case) -> Problem | None:
    """Every token of the data has a row in the embedding."""
    own, needed = case.recipe.model.vocab_size, case.facts.vocab_size
    if needed is None or own >= needed:
        return None
    text = f"model.vocab_size={own} must be at least the data's {needed}; try {needed}, or auto"
    return Problem("model.vocab_size", text)


def attention_kernel_runs(case: Case) -> Problem | None:
    """The attention implementation runs on the target, with the dropout that the model asks for."""
    return _kernel(case, "attention", attention_dropout=case.recipe.model.attention_dropout > 0)


def cross_entropy_kernel_runs(case: Case) -> Problem | None:
    """The cross-entropy implementation runs on the target."""
    return _kernel(case, "cross_entropy", attention_dropout=False)


def _kernel(case: Case, operation: str, *, attention_dropout: bool) -> Problem | None:
    name, device, sm = getattr(case.recipe.kernels, operation), case.target.device, case.target.sm
    lacks = unmet(operation, name, device=device, sm=sm, attention_dropout=attention_dropout)
    if lacks is None:
        return None
    best = choose(operation, device=device, sm=sm, attention_dropout=attention_dropout)
    if lacks == "has no attention dropout":
        lacks += f", model.attention_dropout={case.recipe.model.attention_dropout}"
    key = f"kernels.{operation}"
    return Problem(key, f"{key}={name} {lacks}; set {key}={best}")


def latent_attention_has_no_groups(case: Case) -> Problem | None:
    """Latent attention has as many key and value heads as query heads: the latent saves the memory."""
    model = case.recipe.model
    if case.mla is None or model.n_kv_heads == model.n_heads:
        return None
    text = f"model.n_kv_heads={model.n_kv_heads} must be model.n_heads={model.n_heads} with model.mla"
    return Problem("model.n_kv_heads", f"{text}; set it to {model.n_heads}, auto, or model.mla=null")


def latent_heads_have_their_parts(case: Case) -> Problem | None:
    """A head of latent attention is its part without position and its rotary part."""
    mla, d_head = case.mla, case.recipe.model.d_head
    if mla is None or d_head == mla.d_nope + mla.d_rope:
        return None
    text = f"model.d_head={d_head} must be model.mla.d_nope={mla.d_nope} + model.mla.d_rope={mla.d_rope}"
    return Problem("model.d_head", f"{text}; set it to {mla.d_nope + mla.d_rope} or auto")


def latent_rotary_part_is_even(case: Case) -> Problem | None:
    """Rotary positions turn pairs of numbers, in latent attention those of the rotary part."""
    if case.mla is None or case.mla.d_rope % 2 == 0:
        return None
    text = f"model.mla.d_rope={case.mla.d_rope} must be even for rotary positions"
    return Problem("model.mla.d_rope", f"{text}; try {one_of(multiples(case.mla.d_rope, 2))}")


def latent_attention_has_its_own_norms(case: Case) -> Problem | None:
    """Norms of query and key heads belong to grouped-query attention: latent attention norms its latents."""
    if case.mla is None or not getattr(case.recipe.model, "qk_norm", False):
        return None
    text = "model.qk_norm=true has no place beside model.mla, whose latents have norms of their own"
    return Problem("model.qk_norm", f"{text}; set it to false, or model.mla=null")


def tp_divides_latents(case: Case) -> Problem | None:
    """Each tensor-parallel rank makes the same share of the latents, rotary key included."""
    mla = case.mla
    if mla is None:
        return None
    widths = {"q_rank": mla.q_rank or 0, "kv_rank": mla.kv_rank + mla.d_rope}
    name = next((name for name, width in widths.items() if width % case.tp), None)
    if name is None:
        return None
    what = f"model.mla.q_rank={mla.q_rank}"
    if name == "kv_rank":
        what = f"model.mla.kv_rank={mla.kv_rank} + model.mla.d_rope={mla.d_rope} = {widths[name]}"
    legal = one_of(nearest(case.tp, legal_tp(case)))
    return Problem("parallelism.tp", f"parallelism.tp={case.tp} must divide {what}; try {legal}")
