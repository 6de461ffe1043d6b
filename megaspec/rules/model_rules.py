"""Rules about the model and its vocabulary, and kernels."""

from dataclasses import replace

from megaspec.core.divisors import divisors, multiples
from megaspec.core.errors import Problem
from megaspec.core.units import counted
from megaspec.precision.spec import BLACKWELL_SM, Fp8Precision, fp8_recipe
from megaspec.rules.case import Case, sequence_unit
from megaspec.rules.kernel_use import attention_use_of
from megaspec.rules.precision_rules import fp8_runs_on_the_gpu
from megaspec.rules.ways import Way, way_out
from megaspec_kernels.catalog import CATALOG, Use, choose, unmet, why_no_lines

# From here on tensor cores take fp8 matrices as they are, and Transformer Engine makes no columns of whole tensors.
_BLACKWELL = 100


def kv_heads_divide_heads(case: Case) -> Problem | None:
    """Each key and value head serves equally many query heads."""
    heads = case.recipe.model.n_heads
    kv_heads = case.recipe.model.n_kv_heads
    if heads % kv_heads == 0:
        return None
    text = f"model.n_kv_heads={kv_heads} must divide model.n_heads={heads}"
    way = way_out(
        case,
        Way("model.n_kv_heads", divisors(heads), kv_heads),
        Way("model.n_heads", multiples(heads, kv_heads), heads, most=2),
    )
    return Problem("model.n_kv_heads", f"{text}; {way}")


def heads_divide_width(case: Case) -> Problem | None:
    """Without model.d_head, heads divide the width of the model."""
    d_model = case.recipe.model.d_model
    heads = case.recipe.model.n_heads
    if "model.d_head" not in case.decided or case.mla is not None or d_model % heads == 0:
        return None
    text = f"model.n_heads={heads} must divide model.d_model={d_model} when model.d_head is auto"
    way = way_out(
        case,
        Way("model.n_heads", divisors(d_model), heads),
        # heads of an even width, since rotary positions turn pairs
        Way("model.d_model", multiples(d_model, 2 * heads), d_model, most=2),
    )
    return Problem("model.n_heads", f"{text}; {way}, or set model.d_head")


def sequences_fit_the_model(case: Case) -> Problem | None:
    """Training sequences are no longer than the model accepts."""
    longest = case.recipe.model.max_seq_len
    seq_len = case.recipe.data.seq_len
    if seq_len <= longest:
        return None
    text = f"data.seq_len={seq_len} must be at most model.max_seq_len={longest}"
    # the longest one that divides over the ranks, the nearest first
    below = multiples(longest, sequence_unit(case))[:8]
    shorter = [n for n in (longest, *reversed(below)) if n <= longest]
    longer = [seq_len]
    longer += [n for n in multiples(seq_len, case.tp) if n > seq_len]
    way = way_out(
        case,
        Way("data.seq_len", shorter, most=1),
        Way("model.max_seq_len", longer, most=1),
    )
    return Problem("data.seq_len", f"{text}; {way}")


def vocabulary_holds_the_data(case: Case) -> Problem | None:
    """Every token of the data has a row in the embedding."""
    vocab_size = case.recipe.model.vocab_size
    needed = case.facts.vocab_size
    if needed is None or vocab_size >= needed:
        return None
    text = f"model.vocab_size={vocab_size} must be at least the data's {needed}"
    return Problem("model.vocab_size", f"{text}; {way_out(case, Way('model.vocab_size', (needed,)))}, or auto")


def attention_kernel_runs(case: Case) -> Problem | None:
    """The attention implementation runs on the target, with the dropout and the cap of scores that the model has."""
    instead = case.kernel_use
    # asked only for a report: the rule itself reads no layout, since none mends it
    if case.mends is not None:
        instead = attention_use_of(case.recipe)
    return _kernel(case, "attention", instead=instead)


def attention_has_parts_of_sequences(case: Case) -> Problem | None:
    """Where ranks have parts of sequences, the implementation of attention attends to parts."""
    # apart from `attention_kernel_runs`, which no layout mends
    name = case.recipe.kernels.attention
    use = attention_use_of(case.recipe)
    if not use.blocks or CATALOG["attention"].implementations[name].blocks:
        return None
    best = choose("attention", device=case.target.device, sm=case.target.sm, use=use, packages=case.target.versions)
    parallelism = case.recipe.parallelism
    key = "kernels.attention"
    text = f"{key}={name} attends to whole sequences, parallelism.cp={parallelism.cp} with"
    text += f" parallelism.context.kind={parallelism.context.kind} gives ranks parts"
    return Problem(key, f"{text}; set {key}={best}, or parallelism.context.kind=all_to_all")


def attention_merge_kernel_runs(case: Case) -> Problem | None:
    """The implementation that puts blocks of attention together runs on the target."""
    return _kernel(case, "attention_merge")


def cross_entropy_kernel_runs(case: Case) -> Problem | None:
    """The cross-entropy implementation runs on the target, in the model's format."""
    return _kernel(case, "cross_entropy")


def linear_kernel_runs(case: Case) -> Problem | None:
    """The implementation of linear layers' products runs on the target, in the model's format."""
    if case.target.device == "cuda" and fp8_recipe(case.recipe.precision) in BLACKWELL_SM:
        # the next rule's
        return None
    return _kernel(case, "linear")


def blackwell_recipes_are_computed_by_te(case: Case) -> Problem | None:
    """On a GPU that has tensor cores for mxfp8 and nvfp4 Transformer Engine alone asks for them: kernels.linear=te."""
    recipe = fp8_recipe(case.recipe.precision)
    if recipe not in BLACKWELL_SM or case.target.device != "cuda":
        return None
    first, last = BLACKWELL_SM[recipe]
    if not first <= case.target.sm <= last:
        # the rule of the recipe says so
        return None
    key = "kernels.linear"
    linear = case.recipe.kernels.linear
    use = case.kernel_use
    lacks = unmet("linear", "te", device="cuda", sm=case.target.sm, use=use, packages=case.target.versions)
    other = "precision.recipe=tensorwise and kernels.linear=torch"
    if linear == "te":
        if lacks is None:
            return None
        return Problem(key, f"{key}=te {lacks}; set {other}")
    if linear == "torch":
        return Problem(key, f"{key}=torch takes precision.recipe={recipe} on CPUs alone; set {key}=te, or {other}")
    if key not in case.decided:
        # the reference, which was chosen
        return None
    text = f"{key}=auto has no kernel for precision.recipe={recipe}: te {lacks}; set precision.recipe=tensorwise,"
    return Problem(key, f"{text} or {key}=reference, which multiplies in fp32, slower than bf16")


def te_casts_run_on_the_gpu(case: Case) -> Problem | None:
    """In fp8 linear=te scales whole tensors on GPUs of sm89 to sm99."""
    precision = case.recipe.precision
    if case.recipe.kernels.linear != "te" or not isinstance(precision, Fp8Precision):
        return None
    sm = case.target.sm
    if precision.recipe not in ("tensorwise", "delayed") or sm < _BLACKWELL:
        return None
    text = f"kernels.linear=te with precision.recipe={precision.recipe} needs a GPU below sm{_BLACKWELL}"
    return Problem("kernels.linear", f"{text}, this one is sm{sm}; set kernels.linear=torch")


def te_casts_no_experts(case: Case) -> Problem | None:
    """In fp8 linear=te has no experts: their products are of an operation with scales of its own."""
    if case.recipe.kernels.linear != "te" or not isinstance(case.recipe.precision, Fp8Precision) or case.moe is None:
        return None
    text = "kernels.linear=te with precision.kind=fp8 computes no experts, model.moe asks for some"
    return Problem("kernels.linear", f"{text}; set kernels.linear=torch, or precision=bf16")


def experts_are_dequantised_where_it_is_chosen(case: Case) -> Problem | None:
    """Experts' fp8 products without a kernel, dequantised and multiplied in fp32, have to be chosen on a GPU."""
    key = "kernels.scaled_grouped"
    is_chosen = key not in case.decided or case.recipe.kernels.scaled_grouped != "reference"
    if is_chosen or case.recipe.precision.kind != "fp8" or case.moe is None or case.target.device != "cuda":
        return None
    # of GPUs without fp8 another rule speaks, and another one of widths
    if fp8_runs_on_the_gpu(case) is not None:
        return None
    use = replace(case.kernel_use, widths=())
    lacks = unmet("scaled_grouped", "torch", device="cuda", sm=case.target.sm, use=use)
    if lacks is None:
        return None
    text = f"{key}=auto has no kernel for experts in fp8: torch {lacks}; set precision=bf16, or"
    return Problem(key, f"{text} {key}=reference, which multiplies them in fp32, slower than bf16")


def fp8_is_dequantised_where_it_is_chosen(case: Case) -> Problem | None:
    """fp8 products without a kernel, dequantised and multiplied in fp32, have to be chosen on a GPU."""
    key = "kernels.scaled_product"
    kernels = case.recipe.kernels
    is_chosen = key not in case.decided or kernels.scaled_product != "reference"
    if is_chosen or case.kernel_use.fp8_recipe is None or kernels.linear == "te" or case.target.device != "cuda":
        return None
    recipe = case.recipe.precision.recipe
    too_old = why_no_lines(case.target.versions)
    # of GPUs that have none another rule speaks
    if too_old is None:
        return None
    text = f"{key}=auto has no kernel for precision.recipe={recipe}, which products take {too_old}; set"
    text += f" precision.recipe=tensorwise, or {key}=reference, which multiplies in fp32, slower than bf16"
    return Problem(key, text)


def grouped_kernel_runs(case: Case) -> Problem | None:
    """The implementation of the experts' products runs on the target, in the model's format and widths."""
    if case.moe is None:
        return None
    return _kernel(case, "grouped")


def unpermute_kernel_runs(case: Case) -> Problem | None:
    """The implementation of the sum over a token's experts runs on the target."""
    if case.moe is None:
        return None
    return _kernel(case, "unpermute")


def norm_kernel_runs(case: Case) -> Problem | None:
    """The implementation of norms runs on the target, in the model's format."""
    return _kernel(case, "norm")


def gated_kernel_runs(case: Case) -> Problem | None:
    """The implementation of gated activations runs on the target, in the model's format."""
    return _kernel(case, "gated")


def rope_kernel_runs(case: Case) -> Problem | None:
    """The implementation of rotary positions runs on the target, in the model's format."""
    return _kernel(case, "rope")


def fp8_cast_kernel_runs(case: Case) -> Problem | None:
    """The implementation of the cast to fp8 runs on the target."""
    if case.recipe.precision.kind != "fp8":
        return None
    return _kernel(case, "fp8_cast")


def scaled_product_kernel_runs(case: Case) -> Problem | None:
    """The implementation of fp8 products runs on the target."""
    if case.recipe.precision.kind != "fp8":
        return None
    return _kernel(case, "scaled_product")


def scaled_grouped_kernel_runs(case: Case) -> Problem | None:
    """The implementation of experts' fp8 products runs on the target, in the model's format and widths."""
    if case.recipe.precision.kind != "fp8" or case.moe is None:
        return None
    return _kernel(case, "scaled_grouped")


def adamw_kernel_runs(case: Case) -> Problem | None:
    """The implementation of AdamW runs on the target, and keeps its states in the formats of optim.formats."""
    return _kernel(case, "adamw")


def _kernel(case: Case, operation: str, *, instead: Use | None = None) -> Problem | None:
    """Why the implementation of an operation can't run on the target, and the one to set instead. `instead`: what that
    one has to do, where it is more than the rule asks for."""
    name = getattr(case.recipe.kernels, operation)
    device = case.target.device
    sm = case.target.sm
    use = case.kernel_use
    packages = case.target.versions
    lacks = unmet(operation, name, device=device, sm=sm, use=use, packages=packages)
    if lacks is None:
        return None
    asked = _who_asks(case).get(lacks)
    if asked is not None:
        lacks += f", {asked}"
    best = choose(operation, device=device, sm=sm, use=instead or use, packages=packages)
    key = f"kernels.{operation}"
    return Problem(key, f"{key}={name} {lacks}; set {key}={best}")


def _who_asks(case: Case) -> dict[str, str]:
    """The catalog's words for what an implementation lacks -> the setting that asks for it, which it doesn't know."""
    model = case.recipe.model
    return {
        "has no attention dropout": f"model.attention.dropout={model.attention.dropout} asks for it",
        "caps no scores": f"model.attention.score_cap={getattr(model.attention, 'score_cap', None)} asks for it",
        "keeps no documents apart": "data.document_mask=true asks for it",
        "has no windows": "some layer of the model has one",
        "adds gradients in no fixed order": "train.deterministic=true asks for one",
        "adds gradients of documents in no fixed order": "train.deterministic=true and data.document_mask=true ask for "
        "one",
        "keeps states in 32 bits": "optim.formats asks for fewer",
    }


def latent_attention_has_no_groups(case: Case) -> Problem | None:
    """Latent attention has as many key and value heads as query heads: the latent saves the memory."""
    model = case.recipe.model
    if case.mla is None or model.n_kv_heads == model.n_heads:
        return None
    text = f"model.n_kv_heads={model.n_kv_heads} must be model.n_heads={model.n_heads} with model.attention.kind=mla"
    return Problem("model.n_kv_heads", f"{text}; set it to {model.n_heads}, auto, or model.attention={{kind: gqa}}")


def latent_heads_have_their_parts(case: Case) -> Problem | None:
    """A head of latent attention is its part without position and its rotary part."""
    mla = case.mla
    d_head = case.recipe.model.d_head
    if mla is None or d_head == mla.d_nope + mla.d_rope:
        return None
    text = f"model.d_head={d_head} must be model.attention.d_nope={mla.d_nope} + model.attention.d_rope={mla.d_rope}"
    return Problem("model.d_head", f"{text}; set it to {mla.d_nope + mla.d_rope} or auto")


def latent_rotary_part_is_even(case: Case) -> Problem | None:
    """Rotary positions turn pairs of numbers, in latent attention those of the rotary part."""
    if case.mla is None or case.mla.d_rope % 2 == 0:
        return None
    d_rope = case.mla.d_rope
    text = f"model.attention.d_rope={d_rope} must be even for rotary positions"
    way = way_out(case, Way("model.attention.d_rope", multiples(d_rope, 2), d_rope, most=2))
    return Problem("model.attention.d_rope", f"{text}; {way}")


def latent_attention_is_rotary(case: Case) -> Problem | None:
    """Latent attention turns a part of each head by its position."""
    model = case.recipe.model
    if case.mla is None:
        return None
    sections = {"model.positions": model.positions}
    for name, layer_type in model.layer_types.items():
        if layer_type.positions is not None:
            sections[f"model.layer_types.{name}.positions"] = layer_type.positions
    for key, positions in sections.items():
        if positions.kind != "rotary":
            text = f"model.attention.kind=mla needs {key}.kind=rotary, it is {positions.kind}"
            return Problem(f"{key}.kind", f"{text}; set it to rotary, or model.attention={{kind: gqa}}")
    return None


def whole_norms_are_root_mean_squares(case: Case) -> Problem | None:
    """A norm over all heads of a token is one that takes no mean away: ranks add up one number of their heads."""
    model = case.recipe.model
    if model.attention.kind != "gqa" or model.attention.qk_norm != "whole" or model.norm.kind == "rms":
        return None
    text = f"model.attention.qk_norm=whole needs model.norm.kind=rms, it is {model.norm.kind}"
    return Problem(
        "model.attention.qk_norm", f"{text}; set model.attention.qk_norm=per_head, or model.norm={{kind: rms}}"
    )


def flat_layers_are_as_many_as_the_model_has(case: Case) -> Problem | None:
    """A list of sub-layers has one entry a layer."""
    layer = case.recipe.model.layer
    n_layers = case.recipe.model.n_layers
    if layer.kind != "flat" or len(layer.mixers) == n_layers:
        return None
    text = f"model.layer.mixers has {counted(len(layer.mixers), 'entry')} and must have one for each of"
    text += f" model.n_layers={n_layers}; write {n_layers}"
    if layer.mixers:
        text += f", or set model.n_layers={len(layer.mixers)}"
    return Problem("model.layer.mixers", text)


def flat_layers_and_experts_agree(case: Case) -> Problem | None:
    """Of a list of sub-layers, those of experts take model.moe, which is there if and only if they are."""
    layer = case.recipe.model.layer
    moe = case.moe
    if layer.kind != "flat":
        return None
    names_experts = "moe" in layer.mixers
    if names_experts and moe is None:
        text = "model.layer.mixers names moe and model.moe is null; set model.moe, or write mlp in its place"
        return Problem("model.layer.mixers", text)
    if moe is not None and not names_experts:
        text = "model.layer.mixers names no moe, so that model.moe says nothing; name it, or set model.moe=null"
        return Problem("model.layer.mixers", text)
    return None


def flat_layers_say_where_experts_are(case: Case) -> Problem | None:
    """Of a list of sub-layers, no other setting says which layers have experts."""
    moe = case.moe
    if case.recipe.model.layer.kind != "flat" or moe is None:
        return None
    if moe.layers is not None:
        given = "model.moe.layers"
    elif moe.every != 1:
        given = f"model.moe.every={moe.every}"
    elif moe.first_dense != 0:
        given = f"model.moe.first_dense={moe.first_dense}"
    else:
        return None
    text = f"{given} and model.layer.mixers both say which layers have experts; drop {given.partition('=')[0]}"
    return Problem(given.partition("=")[0], text)
