"""Settings that only some runs read, and what a run must have to read each of them.

Rules refuse one that the command line sets for a run that does without (unread_rules.py), and the plan's screen leaves
out what was decided for nothing. What a file sets is passed over: it sets values for whatever run takes it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megaspec.core.fields import NAME
from megaspec.core.problems import show
from megaspec.data.urls import all_url_places, url_places
from megaspec.precision.spec import BLACKWELL_SM, fp8_recipe
from megaspec.recipe import Recipe


@dataclass(frozen=True)
class Need:
    """Something that a run must have, so that it reads a setting."""

    keys: tuple[str, ...]
    """Dotted paths of the settings that decide whether it has it, the foremost one first."""
    is_met: Callable[[Recipe], bool]
    """Of a recipe. True where what decides is `auto` still."""
    otherwise: str
    """What the run does without it, as a clause; `{value}` is that of the foremost key."""
    way: str
    """What to set instead, so that it has it."""

    def reason(self, recipe: Recipe) -> str:
        """What a recipe does without it."""
        return self.otherwise.format(value=show(setting_at(recipe, self.keys[0]).value))


@dataclass(frozen=True)
class Setting:
    """A value of a recipe, and that which it has when nobody sets it."""

    value: Any
    default: Any


def setting_at(recipe: Recipe, key: str) -> Setting:
    """Of a dotted path; both None where its section is of a kind without such a key. An evaluation set takes what
    nobody sets from the training data."""
    section: Any = recipe
    *above, name = key.split(".")
    for part in above:
        section = section[part] if isinstance(section, dict) else getattr(section, part)
    # not type(): what notes the fields that a rule reads stands in for sections
    field = section.__class__.model_fields.get(name)
    if field is None:
        return Setting(None, None)
    default = field.default
    if above[:-1] == ["data", "valid"]:
        default = getattr(recipe.data, name, default)
    return Setting(getattr(section, name), default)


def has_buckets(dp_strategy: str) -> bool:
    """Whether a data-parallel strategy reduces gradients in buckets."""
    return dp_strategy in ("replicate", "zero1")


def _turns_heads(recipe: Recipe) -> bool:
    """Whether some layer may turn the product of its queries, keys and values by rotary positions: nothing else asks
    for the kernel."""
    model = recipe.model
    kinds = [model.positions]
    for layer_type in model.layer_types.values():
        if layer_type.positions is not None:
            kinds.append(layer_type.positions)
    return model.attention.turns_product and any(positions.is_rotary for positions in kinds)


def _asks_for_linear(recipe: Recipe) -> bool:
    """Whether kernels.linear computes anything. In fp8 `torch` and `reference` compute what stays in another format:
    layers at the ends, experts that every token takes and their gate."""
    precision = recipe.precision
    model = recipe.model
    # of `torch` fp8 reads that it is not te
    if precision.kind != "fp8" or recipe.kernels.linear != "reference":
        return True
    # it casts and multiplies them itself
    if precision.recipe in BLACKWELL_SM:
        return True
    if len(precision.layers(model.n_layers)) < model.n_layers:
        return True
    for layer in model.facts.kinds:
        for linear in layer.linears:
            # routers have an operation of their own
            if not linear.takes_fp8 and not linear.in_fp32:
                return True
    return False


_CP = Need(
    ("parallelism.cp",),
    lambda recipe: recipe.parallelism.cp != 1,
    "parallelism.cp={value} leaves sequences whole",
    "parallelism.cp=2",
)
_BLOCKS = Need(
    ("parallelism.context.kind",),
    lambda recipe: recipe.parallelism.cp == 1 or recipe.parallelism.context.kind != "all_to_all",
    "parallelism.context.kind={value} attends to whole sequences",
    "parallelism.context.kind=ring",
)
_EXPERTS = Need(
    ("model.moe",),
    lambda recipe: recipe.model.moe is not None,
    "model.moe=null, the model has no experts",
    "give the model experts with model.moe",
)
_FP8 = Need(
    ("precision.kind",),
    lambda recipe: recipe.precision.kind == "fp8",
    "precision.kind={value} computes nothing in fp8",
    "precision=fp8",
)
_CASTS_APART = Need(
    ("kernels.linear",),
    # in other precisions it would not be read with any, and of Blackwell's recipes _CASTS_OF_ANY speaks
    lambda recipe: recipe.kernels.linear != "te" or fp8_recipe(recipe.precision) in (None, *BLACKWELL_SM),
    "kernels.linear={value} casts and multiplies itself",
    "kernels.linear=torch",
)
_CASTS_OF_ANY = Need(
    ("precision.recipe",),
    lambda recipe: fp8_recipe(recipe.precision) not in BLACKWELL_SM,
    "kernels.linear casts and multiplies itself with precision.recipe={value}",
    "precision.recipe=tensorwise",
)
_GATE = Need(
    ("model.mlp.kind",),
    lambda recipe: recipe.model.mlp.kind != "plain",
    "model.mlp.kind={value} has no gate",
    "model.mlp.kind=gated",
)
_ROTATION = Need(
    ("model.positions", "model.attention", "model.layer_types"),
    _turns_heads,
    "no layer of the model turns its queries and keys right behind the product that makes them",
    "choose model.positions.kind=rotary, and an attention with nothing before it",
)
_ADAMW = Need(
    ("optim.kind",),
    lambda recipe: recipe.optim.kind in ("adamw", "muon"),
    "optim.kind={value} updates no parameter with AdamW",
    "optim=adamw",
)
_NOT_IN_FP8 = Need(
    ("precision.first_layers_bf16", "precision.last_layers_bf16"),
    _asks_for_linear,
    "precision.first_layers_bf16={value} and precision.last_layers_bf16={value} have kernels.fp8_cast and"
    " kernels.scaled_product compute all linear layers",
    "precision.first_layers_bf16=1",
)
_DELAYED = Need(
    ("precision.recipe",),
    # other precisions have neither the key nor what it would tell
    lambda recipe: fp8_recipe(recipe.precision) in (None, "delayed"),
    "precision.recipe={value} fits scales to the elements at hand",
    "precision.recipe=delayed",
)
_ROUNDS = Need(
    ("precision.recipe",),
    lambda recipe: fp8_recipe(recipe.precision) in (None, "nvfp4"),
    "precision.recipe={value} rounds gradients to nearest",
    "precision.recipe=nvfp4",
)
LAYER_BY_LAYER = "parallelism.dp_strategy={value} reduces layer by layer"
"""Of a data-parallel strategy, why it reads no size of buckets."""
_BUCKETS = Need(
    ("parallelism.dp_strategy",),
    lambda recipe: recipe.parallelism.dp_strategy == "auto" or has_buckets(recipe.parallelism.dp_strategy),
    LAYER_BY_LAYER,
    "parallelism.dp_strategy=zero1",
)
_URL = Need(
    ("data.kind", "data.blend", "data.files", "data.valid"),
    lambda recipe: bool(all_url_places(recipe.data)),
    "no data is given as a URL, so that nothing is fetched",
    "give data as a URL",
)


def _url_of_set(name: str) -> Need:
    """Of an evaluation set."""

    def is_met(recipe: Recipe) -> bool:
        return any(url_places(recipe.data.valid[name]))

    place = f"data.valid.{name}"
    return Need(
        (f"{place}.kind", f"{place}.blend", f"{place}.files"),
        is_met,
        f"no data of {place} is given as a URL, so that nothing is fetched for it",
        f"give {place} as a URL",
    )


NEEDS: dict[str, tuple[Need, ...]] = {
    "kernels.attention_merge": (_CP, _BLOCKS),
    "kernels.linear": (_NOT_IN_FP8,),
    "kernels.grouped": (_EXPERTS,),
    "kernels.unpermute": (_EXPERTS,),
    "kernels.gated": (_GATE,),
    "kernels.rope": (_ROTATION,),
    "kernels.fp8_cast": (_FP8, _CASTS_APART, _CASTS_OF_ANY),
    "kernels.scaled_product": (_FP8, _CASTS_APART, _CASTS_OF_ANY),
    "kernels.scaled_grouped": (_FP8, _EXPERTS),
    "kernels.adamw": (_ADAMW,),
    "precision.amax_history": (_DELAYED,),
    "precision.margin": (_DELAYED,),
    "precision.gradient_rounding": (_ROUNDS,),
    "parallelism.bucket_mb": (_BUCKETS,),
    "data.download_dir": (_URL,),
}
"""Setting -> what a run must have to read it."""
NEEDS_OF_SETS: dict[str, Callable[[str], tuple[Need, ...]]] = {
    f"data.valid.{NAME}.download_dir": lambda name: (_url_of_set(name),),
}
"""Setting of an evaluation set -> what the set of that name must have, so that the run reads it."""


def needs_of(key: str) -> tuple[Need, ...]:
    """What a run must have to read a setting; (): every run reads it."""
    name, after = key.removeprefix("data.valid.").partition(".")[::2]
    of_set = NEEDS_OF_SETS.get(f"data.valid.{NAME}.{after}")
    if key.startswith("data.valid.") and of_set is not None:
        return of_set(name)
    return NEEDS.get(key, ())


def unmet_needs(key: str, recipe: Recipe) -> tuple[Need, ...]:
    """What a recipe lacks, so that it does not read a setting; (): it reads it, or every run does."""
    return tuple(need for need in needs_of(key) if not need.is_met(recipe))


def why_unread(key: str, recipe: Recipe, needs: Sequence[Need]) -> str:
    """That a recipe does not read a setting, and why. `needs`: what it lacks for that."""
    reasons = ", and ".join(need.reason(recipe) for need in needs)
    return f"{key}={show(setting_at(recipe, key).value)} is not read: {reasons}"


def no_longer_read(before: Recipe, recipe: Recipe) -> list[str]:
    """What a recipe sets and does not read, though that which it was made from, `before`, did: a clause for each."""
    told = []
    for key in NEEDS:
        setting = setting_at(recipe, key)
        needs = unmet_needs(key, recipe)
        if needs and setting.value != setting.default and not unmet_needs(key, before):
            told.append(why_unread(key, recipe, needs))
    return told
