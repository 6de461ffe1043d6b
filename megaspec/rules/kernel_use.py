"""What a recipe asks of its kernels, in the catalog's words."""

from dataclasses import replace

from megaspec.optim.spec import has_narrow_states
from megaspec.parallelism.spec import attends_to_blocks
from megaspec.precision.spec import fp8_recipe, model_format
from megaspec.recipe import Recipe
from megaspec_kernels.catalog import Use


def use_of(recipe: Recipe) -> Use:
    """Of a filled recipe. `blocks` is left out, since it reads the layout; see `attention_use_of`."""
    moe = recipe.model.moe
    # both sides of the experts' products on a rank
    widths: tuple[int, ...] = ()
    if moe is not None:
        widths = (recipe.model.d_model, moe.d_expert // recipe.parallelism.etp)
    return Use(
        attention_dropout=recipe.model.attention.dropout > 0,
        score_cap=recipe.model.caps_scores,
        hides_keys=recipe.data.document_mask or recipe.model.hides_keys(recipe.data.seq_len),
        documents=recipe.data.document_mask,
        window=recipe.model.hides_keys(recipe.data.seq_len),
        deterministic=recipe.train.deterministic,
        head_size=recipe.model.d_head,
        precision=model_format(recipe.precision),
        fp8_recipe=fp8_recipe(recipe.precision),
        widths=widths,
        narrow_states=has_narrow_states(recipe.optim),
    )


def attention_use_of(recipe: Recipe) -> Use:
    """Of a filled recipe, and whether its ranks attend to parts of sequences."""
    parallelism = recipe.parallelism
    return replace(use_of(recipe), blocks=attends_to_blocks(parallelism.context.kind, cp=parallelism.cp))
