"""Rules about the model and its vocabulary, and kernels."""

from megaspec.core.divisors import divisors, multiples
from megaspec.core.errors import Problem
from megaspec.model.llama.spec import LlamaSpec
from megaspec.nn.spec import Llama3RopeScaling
from megaspec.rules.case import Case, sequence_unit
from megaspec.rules.kernel_use import use_of
from megaspec.rules.ways import Way, way_out
from megaspec_kernels.catalog import choose, unmet


def kv_heads_divide_heads(case: Case) -> Problem | None:
    """Each key and value head serves equally many query heads."""
    heads, kv = case.recipe.model.n_heads, case.recipe.model.n_kv_heads
    if heads % kv == 0:
        return None
    ways = Way("model.n_kv_heads", divisors(heads), kv), Way("model.n_heads", multiples(heads, kv), heads, most=2)
    text = f"model.n_kv_heads={kv} must divide model.n_heads={heads}"
    return Problem("model.n_kv_heads", f"{text}; {way_out(case, *ways)}")


def heads_divide_width(case: Case) -> Problem | None:
    """Without model.d_head, heads divide the width of the model."""
    width, heads = case.recipe.model.d_model, case.recipe.model.n_heads
    if "model.d_head" not in case.decided or case.mla is not None or width % heads == 0:
        return None
    text = f"model.n_heads={heads} must divide model.d_model={width} when model.d_head is auto"
    ways = (
        Way("model.n_heads", divisors(width), heads),
        Way("model.d_model", multiples(width, 2 * heads), width, most=2),
    )
    return Problem("model.n_heads", f"{text}; {way_out(case, *ways)}, or set model.d_head")


def rotary_heads_are_even(case: Case) -> Problem | None:
    """Rotary positions turn pairs of a head's numbers."""
    model = case.recipe.model
    if not isinstance(model, LlamaSpec) or model.mla is not None or model.d_head % 2 == 0:
        return None
    text = f"model.d_head={model.d_head} must be even for rotary positions"
    ways = Way("model.d_head", multiples(model.d_head, 2), model.d_head, most=2), _widths_of_even_heads(case)
    return Problem("model.d_head", f"{text}; {way_out(case, *ways)}")


def _widths_of_even_heads(case: Case) -> Way:
    """Widths of the model whose heads are even, where they follow from it."""
    width, unit = case.recipe.model.d_model, 2 * case.recipe.model.n_heads
    return Way("model.d_model", multiples(width, unit) if "model.d_head" in case.decided else (), width, most=2)


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
    text = f"data.seq_len={seq_len} must be at most model.max_seq_len={longest}"
    unit = sequence_unit(case)
    shorter = [longest, *reversed(multiples(longest, unit)[:8])]
    longer = [seq_len, *(m for m in multiples(seq_len, case.tp) if m > seq_len)]
    ways = (
        Way("data.seq_len", [n for n in shorter if n <= longest], most=1),
        Way("model.max_seq_len", longer, most=1),
    )
    return Problem("data.seq_len", f"{text}; {way_out(case, *ways)}")


def vocabulary_holds_the_data(case: Case) -> Problem | None:
    """Every token of the data has a row in the embedding."""
    own, needed = case.recipe.model.vocab_size, case.facts.vocab_size
    if needed is None or own >= needed:
        return None
    text = f"model.vocab_size={own} must be at least the data's {needed}"
    return Problem("model.vocab_size", f"{text}; {way_out(case, Way('model.vocab_size', (needed,)))}, or auto")


def attention_kernel_runs(case: Case) -> Problem | None:
    """The attention implementation runs on the target, with the dropout that the model asks for."""
    return _kernel(case, "attention")


def attention_merge_kernel_runs(case: Case) -> Problem | None:
    """The implementation that puts blocks of attention together runs on the target."""
    return _kernel(case, "attention_merge")


def cross_entropy_kernel_runs(case: Case) -> Problem | None:
    """The cross-entropy implementation runs on the target, in the model's format."""
    return _kernel(case, "cross_entropy")


def grouped_kernel_runs(case: Case) -> Problem | None:
    """The implementation of the experts' products runs on the target, in the model's format and widths."""
    return None if case.moe is None else _kernel(case, "grouped")


def unpermute_kernel_runs(case: Case) -> Problem | None:
    """The implementation of the sum over a token's experts runs on the target."""
    return None if case.moe is None else _kernel(case, "unpermute")


def adamw_kernel_runs(case: Case) -> Problem | None:
    """The implementation of AdamW runs on the target, and keeps its states in the formats of optim.formats."""
    return _kernel(case, "adamw")


def _kernel(case: Case, operation: str) -> Problem | None:
    name, device, sm = getattr(case.recipe.kernels, operation), case.target.device, case.target.sm
    use = use_of(case.recipe)
    lacks = unmet(operation, name, device=device, sm=sm, use=use)
    if lacks is None:
        return None
    best = choose(operation, device=device, sm=sm, use=use)
    if lacks == "has no attention dropout":
        lacks += f", model.attention_dropout={case.recipe.model.attention_dropout}"
    if lacks == "keeps states in 32 bits":
        lacks += ", optim.formats says fewer"
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
    ways = Way("model.mla.d_rope", multiples(case.mla.d_rope, 2), case.mla.d_rope, most=2)
    return Problem("model.mla.d_rope", f"{text}; {way_out(case, ways)}")


def latent_attention_has_its_own_norms(case: Case) -> Problem | None:
    """Norms of query and key heads belong to grouped-query attention: latent attention norms its latents."""
    if case.mla is None or not getattr(case.recipe.model, "qk_norm", False):
        return None
    text = "model.qk_norm=true has no place beside model.mla, whose latents have norms of their own"
    return Problem("model.qk_norm", f"{text}; set it to false, or model.mla=null")
