"""Rules about settings that the command line gives to a run that does not read them. Those of files are no concern."""

from megaspec.core.errors import Problem
from megaspec.core.problems import show
from megaspec.rules.case import Case
from megaspec.rules.unread import setting_at, unmet_needs, why_unread


def attention_merge_is_of_split_sequences(case: Case) -> Problem | None:
    """A kernel that puts blocks of attention together is chosen where sequences are attended to in blocks."""
    return _unread(case, "kernels.attention_merge")


def linear_kernel_is_of_layers_outside_fp8(case: Case) -> Problem | None:
    """Plain products of linear layers are chosen where some layer does not compute in fp8."""
    return _unread(case, "kernels.linear")


def grouped_kernel_is_of_experts(case: Case) -> Problem | None:
    """A kernel for the experts' products is chosen for a model with experts."""
    return _unread(case, "kernels.grouped")


def unpermute_kernel_is_of_experts(case: Case) -> Problem | None:
    """A kernel for the sum over a token's experts is chosen for a model with experts."""
    return _unread(case, "kernels.unpermute")


def gated_kernel_is_of_gates(case: Case) -> Problem | None:
    """A kernel for gated activations is chosen for a model with gates."""
    return _unread(case, "kernels.gated")


def rope_kernel_is_of_rotary_positions(case: Case) -> Problem | None:
    """A kernel for rotary positions is chosen for a model that turns what its first product makes."""
    return _unread(case, "kernels.rope")


def fp8_cast_is_of_fp8(case: Case) -> Problem | None:
    """A kernel for the cast to fp8 is chosen for a run in fp8 whose linear layers have none of their own."""
    return _unread(case, "kernels.fp8_cast")


def scaled_product_is_of_fp8(case: Case) -> Problem | None:
    """A kernel for fp8 products is chosen for a run in fp8 whose linear layers have none of their own."""
    return _unread(case, "kernels.scaled_product")


def scaled_grouped_is_of_experts_in_fp8(case: Case) -> Problem | None:
    """A kernel for experts' fp8 products is chosen for a model with experts in fp8."""
    return _unread(case, "kernels.scaled_grouped")


def adamw_kernel_is_of_adamw(case: Case) -> Problem | None:
    """A kernel for AdamW is chosen for an optimizer that updates with it."""
    return _unread(case, "kernels.adamw")


def histories_are_of_delayed_scales(case: Case) -> Problem | None:
    """A length of the history is given where scales look back: others are those of the elements at hand."""
    return _unread(case, "precision.amax_history")


def margins_are_of_delayed_scales(case: Case) -> Problem | None:
    """A margin is given where scales are delayed: others fit their elements."""
    return _unread(case, "precision.margin")


def roundings_are_of_nvfp4(case: Case) -> Problem | None:
    """How gradients are rounded is said with nvfp4: others round them to nearest."""
    return _unread(case, "precision.gradient_rounding")


def buckets_are_of_replicated_weights(case: Case) -> Problem | None:
    """A size of gradient buckets is given where gradients are reduced in buckets."""
    return _unread(case, "parallelism.bucket_mb")


def downloads_are_of_urls(case: Case) -> Problem | None:
    """A folder for downloads is given where some data is a URL."""
    return _unread(case, "data.download_dir")


def downloads_of_sets_are_of_urls(case: Case) -> Problem | None:
    """A folder for downloads of an evaluation set is given where some of its data is a URL."""
    for name in case.recipe.data.valid:
        problem = _unread(case, f"data.valid.{name}.download_dir")
        if problem is not None:
            return problem
    return None


def _unread(case: Case, key: str) -> Problem | None:
    """What a run lacks that would read a setting of the command line. What we decided is never held against it."""
    if key not in case.chosen or key in case.decided:
        return None
    needs = [need for need in unmet_needs(key, case.recipe) if case.decided.isdisjoint(need.keys)]
    if not needs:
        return None
    setting = setting_at(case.recipe, key)
    if setting.value == setting.default:
        return None
    ways = " and ".join(need.way for need in needs)
    text = why_unread(key, case.recipe, needs)
    return Problem(key, f"{text}; set {key}={show(setting.default)}, or {ways}")
