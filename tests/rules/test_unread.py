"""Settings of the command line that the run does not read are refused; those of files, and where they are read, not."""

import pytest
from pydantic import BaseModel

from megaspec.compose.compose import compose, recompose
from megaspec.core.errors import RecipeError
from megaspec.core.fields import NAME
from megaspec.recipe import Recipe
from megaspec.resolve.beside import with_rules
from megaspec.resolve.resolver import settle
from megaspec.rules.examples import EXAMPLES, FACTS, H200, H200_WITH_TE
from megaspec.rules.table import RULES
from megaspec.rules.unread import NEEDS, NEEDS_OF_SETS, no_longer_read, setting_at, unmet_needs
from tests.rules.composed import composed

CODES = [code for code in RULES if code.startswith("unread-")]
EXPERTS = "model.moe={n_experts: 8, top_k: 2}"
MERGE = "kernels.attention_merge=reference"
ALL_IN_FP8 = ("precision.first_layers_bf16=0", "precision.last_layers_bf16=0")
# What some run refuses -> the reasons and ways out that are told.
REFUSED = {
    ("kernels.scaled_product=cublaslt", "precision=bf16"): (
        "kernels.scaled_product=cublaslt is not read: precision.kind=bf16 computes nothing in fp8; "
        "set kernels.scaled_product=auto, or precision=fp8"
    ),
    ("kernels.scaled_grouped=reference", "precision=bf16"): (
        "kernels.scaled_grouped=reference is not read: precision.kind=bf16 computes nothing in fp8, and model.moe=null,"
        " the model has no experts; set kernels.scaled_grouped=auto, or precision=fp8 and give the model experts with"
        " model.moe"
    ),
    ("precision.margin=2", "precision=fp8", "precision.recipe=rowwise"): (
        "precision.margin=2 is not read: precision.recipe=rowwise fits scales to the elements at hand;"
        " set precision.margin=0, or precision.recipe=delayed"
    ),
    ("precision.gradient_rounding=nearest", "precision=fp8", "precision.recipe=rowwise"): (
        "precision.gradient_rounding=nearest is not read: precision.recipe=rowwise rounds gradients to nearest;"
        " set precision.gradient_rounding=stochastic, or precision.recipe=nvfp4"
    ),
    ("kernels.linear=reference", "precision=fp8", *ALL_IN_FP8): (
        "kernels.linear=reference is not read: precision.first_layers_bf16=0 and precision.last_layers_bf16=0 have"
        " kernels.fp8_cast and kernels.scaled_product compute all linear layers; set kernels.linear=auto, or"
        " precision.first_layers_bf16=1"
    ),
    ("kernels.fp8_cast=reference", "kernels.scaled_product=reference", "precision=fp8", "kernels.linear=te"): (
        "kernels.fp8_cast=reference is not read: kernels.linear=te casts and multiplies itself;"
        " set kernels.fp8_cast=auto, or kernels.linear=torch",
        "kernels.scaled_product=reference is not read: kernels.linear=te casts and multiplies itself;"
        " set kernels.scaled_product=auto, or kernels.linear=torch",
    ),
    (MERGE, "parallelism.cp=2", "parallelism.context.kind=all_to_all"): (
        "kernels.attention_merge=reference is not read: parallelism.context.kind=all_to_all attends to whole sequences;"
        " set kernels.attention_merge=auto, or parallelism.context.kind=ring"
    ),
    # one of two sets is fetched
    (
        "data.valid={web: {blend: [{prefix: 's3://bucket/data/web'}]}, code: {blend: [{prefix: data/code}]}}",
        "data.valid.code.download_dir=/fast",
        "data.download_dir=/scratch",
    ): (
        "data.valid.code.download_dir=/fast is not read: no data of data.valid.code is given as a URL, so that nothing"
        " is fetched for it; set data.valid.code.download_dir=/scratch, or give data.valid.code as a URL"
    ),
}
READ = [
    ("precision.gradient_rounding=nearest", "precision=fp8", "precision.recipe=nvfp4", "model.d_ffn=352"),
    (MERGE, "parallelism.cp=2"),
    ("kernels.linear=reference", "precision=bf16"),
    ("kernels.linear=reference", "precision=fp8"),
    # what says that it is not te
    ("kernels.linear=torch", "precision=fp8", *ALL_IN_FP8),
    ("kernels.grouped=reference", EXPERTS),
    ("kernels.unpermute=reference", EXPERTS),
    ("kernels.gated=reference",),
    ("kernels.rope=reference",),
    ("kernels.fp8_cast=reference", "precision=fp8"),
    ("kernels.scaled_product=reference", "precision=fp8"),
    ("kernels.scaled_grouped=reference", "precision=fp8", EXPERTS),
    ("kernels.adamw=reference",),
    ("kernels.adamw=reference", "optim=muon"),
    ("precision.amax_history=16", "precision=fp8", "precision.recipe=delayed"),
    ("precision.margin=2", "precision=fp8", "precision.recipe=delayed"),
    ("parallelism.bucket_mb=50", "parallelism.dp_strategy=replicate"),
    ("parallelism.bucket_mb=50", "parallelism.dp_strategy=zero1"),
    ("parallelism.bucket_mb=50", "parallelism.dp_strategy=auto"),
    ("data.download_dir=/scratch", "data.blend=[{prefix: 's3://bucket/data/web'}]"),
    # of a set, which takes it from the training data
    ("data.download_dir=/scratch", "data.valid.web.blend=[{prefix: 's3://bucket/data/web'}]"),
    ("data.valid.web.download_dir=/scratch", "data.valid.web.blend=[{prefix: 's3://bucket/data/web'}]"),
    # the same that it would take
    ("data.valid.web.download_dir=runs/downloads", "data.valid.web.blend=[{prefix: data/web}]"),
]


def unread(words: tuple[str, ...]) -> list[str]:
    """What is said of settings that are not read, whatever else is wrong."""
    made = compose("hello", words)
    try:
        settle(made.recipe, H200, FACTS, made.origins)
    except RecipeError as error:
        return [problem.message for problem in error.problems if problem.code in CODES]
    return []


def _as_in_table(key: str) -> str:
    return key.replace("data.valid.web.", f"data.valid.{NAME}.")


def test_each_setting_of_the_table_has_its_rule():
    settings = {*NEEDS, *NEEDS_OF_SETS}
    assert sorted(_as_in_table(EXAMPLES[code].key) for code in CODES) == sorted(settings)
    assert {_as_in_table(words[0].partition("=")[0]) for words in READ} == settings


@pytest.mark.parametrize("words", REFUSED)
def test_every_reason_is_told_with_its_way_out(words):
    said = REFUSED[words]
    assert unread(words) == ([said] if isinstance(said, str) else list(said))


@pytest.mark.parametrize("words", READ, ids=" ".join)
def test_what_is_read_is_taken(words):
    assert unread(words) == []


@pytest.mark.parametrize("code", CODES)
def test_what_is_told_has_value_reason_and_way(code):
    example = EXAMPLES[code]
    made = composed(example.recipe, example.overrides)
    with pytest.raises(RecipeError) as raised:
        settle(made.recipe, example.target, example.facts, made.origins)
    (problem,) = raised.value.problems
    value = setting_at(made.recipe, example.key).value
    assert problem.message.startswith(f"{example.key}={value} is not read: ")
    assert f"; set {example.key}=" in problem.message
    assert problem.origin == "command line"


@pytest.mark.parametrize("code", CODES)
def test_what_no_command_line_sets_is_passed_over(code):
    """In a saved recipe, in Python's, and in a run that goes on."""
    example = EXAMPLES[code]
    made = composed(example.recipe, example.overrides)
    settle(made.recipe, example.target, example.facts)
    saved = recompose(made.recipe.model_dump(mode="json"), "recipe.json", ["train.seed=3"])
    settle(saved.recipe, example.target, example.facts, saved.origins)
    settle(made.recipe, example.target, example.facts, made.origins, has_begun=True)


def test_a_recipes_file_is_passed_over(tmp_path):
    folder = tmp_path / "recipes"
    folder.mkdir()
    text = "defaults: [/recipe/hello]\nkernels: {scaled_product: reference}\n"
    (folder / "mine.yaml").write_text(text)
    made = compose("mine", ("precision=bf16",), [tmp_path])
    settle(made.recipe, H200, FACTS, made.origins)


def test_a_choice_of_kernels_is_passed_over_beside_transformer_engine():
    """The file sets casts and products, too, which nothing reads then."""
    made = composed("hello", ("precision=fp8", "kernels=reference", "kernels.linear=te"))
    settled = settle(made.recipe, H200_WITH_TE, FACTS, made.origins)
    assert settled.recipe.kernels.linear == "te"


def test_beside_a_value_of_the_wrong_type_it_is_told_too_but_for_a_run_that_goes_on():
    with pytest.raises(RecipeError) as raised:
        compose("hello", ("kernels.grouped=reference", "optim.lr=much"))

    def codes(**words: bool) -> list[str]:
        error = with_rules(raised.value, lambda _: H200, **words)
        return [problem.code for problem in error.problems]

    assert codes() == ["key.type", "unread-grouped"]
    assert codes(has_begun=True) == ["key.type"]


def test_every_setting_of_the_table_is_one():
    made: Recipe = composed("hello", ("precision=fp8",)).recipe
    for key, needs in NEEDS.items():
        if key != "data.download_dir":  # of the kinds that have files
            section: BaseModel = getattr(made, key.partition(".")[0])
            assert key.partition(".")[2] in type(section).model_fields
        assert set(unmet_needs(key, made)) <= set(needs)


def test_what_a_recipe_no_longer_reads_is_told_once():
    """What it never read is nothing new; what nobody set is no loss."""
    settings = ("precision.amax_history=16", "precision.margin=2")
    delayed = ("precision=fp8", "precision.recipe=delayed", *settings, "kernels.grouped=reference")
    before = composed("hello", delayed).recipe
    saved = before.model_dump(mode="json")

    def told(*words: str) -> list[str]:
        return no_longer_read(before, recompose(saved, "recipe.json", words).recipe)

    why = "precision.recipe=rowwise fits scales to the elements at hand"
    assert told("precision.recipe=rowwise") == [f"{word} is not read: {why}" for word in settings]
    assert told("precision=bf16") == told("optim.lr=1e-3") == []
