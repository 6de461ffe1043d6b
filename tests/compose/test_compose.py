"""Composition: what wins, where a value is from, and what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megaspec.compose.compose import compose, recompose
from megaspec.compose.paths import recipes_dir
from megaspec.compose.search_path import SearchPath, search_path
from megaspec.core.errors import RecipeError
from megaspec.core.kinds import annotation_of, models_of, tags_of
from megaspec.core.problems import field_paths, one_of
from megaspec.recipe import SECTIONS, Recipe

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(p.stem for p in (ROOT / "recipes").glob("*.yaml"))


def choices(group):
    """What ships of a group, in the order of messages."""
    return sorted(p.stem for p in (ROOT / "conf" / group).glob("*.yaml"))


def problems_of(*args, **keywords):
    with pytest.raises(RecipeError) as caught:
        compose(*args, **keywords)
    return caught.value.problems


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's folder with ./recipes and a folder of groups."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "recipes").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes(name):
    composed = compose(name)
    assert composed.recipe.name == name
    assert composed.origins["name"] == f"recipe={name}"
    assert len((ROOT / "recipes" / f"{name}.yaml").read_text().splitlines()) <= 40


def test_every_section_is_a_group_with_choices_that_compose():
    assert set(SECTIONS) < set(Recipe.model_fields)
    # what only the user knows
    machine = "launcher.hardware=cpu"
    needed = {
        "data/stream": ["data.files=[{path: x.jsonl}]", "data.tokenizer=byte"],
        "launcher/slurm": [machine],
        "launcher/kubernetes": [machine, "launcher.image=x", "launcher.volumes=[{claim: x, path: /x}]"],
    }
    for section in SECTIONS:
        assert choices(section), section
        for choice in choices(section):
            composed = compose("hello", [f"{section}={choice}", *needed.get(f"{section}/{choice}", [])])
            label = f"conf/{section}/{choice}.yaml"
            assert any(o.startswith(label) for o in composed.origins.values()), label


def test_recipe_beats_group_and_command_line_beats_both():
    assert compose("llama3_2_1b").recipe.optim.lr == 3e-4
    hello = compose("hello")
    assert (hello.recipe.optim.lr, hello.origins["optim.lr"]) == (3e-3, "recipes/hello.yaml:17")
    assert hello.origins["optim.kind"] == "conf/optim/adamw.yaml:1"
    changed = compose("hello", ["optim.lr=1e-5", "optim.beta2=0.99", "model=gpt2_124m"])
    assert (changed.recipe.optim.lr, changed.recipe.optim.beta2) == (1e-5, 0.99)
    assert changed.recipe.model.positions.kind == "learned"
    assert changed.origins["optim.lr"] == changed.origins["optim.beta2"] == "command line"
    assert changed.origins["model.kind"] == "conf/model/gpt2_124m.yaml:2"


def test_recipes_and_groups_inherit():
    half, whole = compose("llama3_8b_half"), compose("llama3_8b_half", ["model=llama3_8b"])
    assert (half.recipe.model.n_layers, whole.recipe.model.n_layers) == (16, 32)
    assert half.recipe.model.d_ffn == whole.recipe.model.d_ffn == 14336
    assert half.origins["model.n_layers"] == "conf/model/llama3_8b_half.yaml:4"
    assert half.origins["model.d_ffn"].startswith("conf/model/llama3_8b.yaml:")
    assert half.origins["data.seq_len"].startswith("recipes/llama3_2_1b.yaml:")


def test_the_users_own_folders(folder):
    (folder / "recipes" / "small.yaml").write_text(
        "defaults:\n  - hello\n  - override /model: mini\ntrain:\n  steps: 7\n"
    )
    (folder / "mine" / "model" / "mini.yaml").write_text("defaults:\n  - hello\nn_layers: 1\n")
    (folder / "mine" / "recipes" / "other.yaml").write_text("# @package _global_\ndefaults:\n  - small\n")
    composed = compose("small", [], ["mine"])
    assert (composed.recipe.train.steps, composed.recipe.model.n_layers, composed.recipe.model.d_model) == (7, 1, 128)
    assert composed.origins["train.steps"] == "recipes/small.yaml:5"
    assert composed.origins["model.n_layers"] == "mine/model/mini.yaml:3"
    assert compose("other", [], ["mine"]).recipe.train.steps == 7
    (problem,) = problems_of("small")
    options = one_of(choices("model"))
    assert str(problem) == (
        f"model/mini does not exist; choose {options} (a plug-in's kind: model.kind=mini, with --plugin PACKAGE)"
        "   (recipes/small.yaml:3)"
    )
    assert "--config-dir nowhere: no such folder" in str(problems_of("small", [], ["nowhere"])[0])


def test_a_recipe_may_write_its_model_and_data_out(folder):
    (folder / "recipes" / "whole.yaml").write_text(
        "model: {kind: decoder, n_layers: 2, d_model: 8, n_heads: 2}\ndata: {kind: synthetic, seq_len: 4}\n"
        "train: {steps: 3, global_batch: 2}\n"
    )
    recipe = compose("whole").recipe
    assert (recipe.model.n_layers, recipe.data.kind, recipe.precision.kind) == (2, "synthetic", "bf16")
    (folder / "recipes" / "whole.yaml").write_text("data: {kind: synthetic, seq_len: 4}\ntrain: {steps: 3}\n")
    assert [p.key for p in problems_of("whole")] == ["train.global_batch", "model"]
    (folder / "recipes" / "whole.yaml").write_text("train: {steps: 3, global_batch: 2}\n")
    assert sorted(p.key for p in problems_of("whole")) == ["data", "model"]


def test_a_name_that_is_in_two_places_is_never_chosen_silently(folder):
    own = folder / "recipes" / "hello.yaml"
    own.write_text("train: {steps: 1}\n")
    (problem,) = problems_of("hello")
    assert f"recipe=hello is in {recipes_dir() / 'hello.yaml'} and {own.resolve()}; rename one" in problem.message


def test_a_word_of_other_commands_is_no_key_and_told_as_such():
    (problem,) = problems_of("hello", ["gpus=4"])
    assert "a word for plan, tune and verify; a run takes launcher.ranks=N" in problem.message


def test_any_field_can_be_set_without_plus():
    composed = compose(
        "hello", ["train.batch_ramp.start=4", "train.batch_ramp.increment=4", "train.batch_ramp.samples=8"]
    )
    assert composed.recipe.train.batch_ramp.start == 4
    same = compose(
        "hello", ["+optim.eps=1e-7", "++log.every=3", "optim.weight_decay_ramp={kind: linear, end: 0.2, steps: 5}"]
    )
    assert (same.recipe.optim.eps, same.recipe.log.every) == (1e-7, 3)
    assert same.recipe.optim.weight_decay_ramp.end == 0.2
    assert compose("hello", ["train.sample=null"]).recipe.train.sample is None
    assert compose("hello", ["~train.sample"]).recipe.train.sample is None
    assert compose("hello", ["data.blend.0.weight=2"]).recipe.data.blend[0].weight == 2
    blend = compose("hello", ["data.blend=[{prefix: a},{prefix: b,weight: 3}]"]).recipe.data.blend
    assert [b.prefix for b in blend] == ["a", "b"]


def test_every_scalar_of_the_schema_can_be_named_on_the_command_line():
    for path in field_paths(Recipe):
        if path.count(".") == 1 and not path.endswith(".kind"):
            found = problems_of("hello", [f"{path}=[[[]]]"])
            assert all("is no key of a recipe" not in str(p) for p in found), path


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e6", 10**6), ("2k", 2000), ("1.5k", 1500), ("3M", 3 * 10**6), ("1_000", 1000), ("12", 12)],
)
def test_counts(text, value):
    assert compose("hello", [f"train.steps={text}"]).recipe.train.steps == value


@pytest.mark.parametrize("text", ["017", "1:30", "1.5", "-1", "0", "1.23k4", "true", "1e-3", "on", "''", "9e999"])
def test_what_is_no_count(text):
    (problem,) = problems_of("hello", [f"train.steps={text}"])
    assert (problem.key, problem.origin) == ("train.steps", "command line")


def test_references_take_values_and_nothing_else(folder, monkeypatch):
    assert compose("hello", ["data=random", "~data.blend"]).recipe.data.vocab_size == 257
    composed = compose(
        "hello",
        ["train.steps=120", "run_dir='runs/${name}-${train.steps}'", "optim.schedule.decay_steps=${train.steps}"],
    )
    assert composed.recipe.run_dir == "runs/hello-120"
    assert composed.recipe.optim.schedule.decay_steps == 120
    monkeypatch.setenv("SECRET", "hidden")
    for text in ("${oc.env:SECRET}", "${oc.decode:1}", "${hydra:runtime.cwd}", "${now:%Y}", "${a.${b}}", "${"):
        quoted = f"run_dir='{text}'"
        (problem,) = problems_of("hello", [quoted])
        assert "no functions, no environment" in problem.message
        assert "hidden" not in str(problem)
        (folder / "recipes" / "bad.yaml").write_text(f"defaults:\n  - hello\nrun_dir: '{text}'\n")
        (problem,) = problems_of("bad")
        assert problem.origin == "recipes/bad.yaml:3"
    assert "is not set" in str(problems_of("hello", ["run_dir=${nope.x}"])[0])
    assert "itself a reference" in str(problems_of("hello", ["run_dir=${name}", "name=${run_dir}"])[0])
    (folder / "recipes" / "bad.yaml").write_text("defaults:\n  - hello\n  - override /model: ${oc.env:SECRET}\n")
    assert problems_of("bad")[0].origin == "recipes/bad.yaml:3"
    assert "hidden" not in str(problems_of("hello", ["model=${oc.env:SECRET}"])[0])


def test_everything_wrong_is_told_at_once_with_the_nearest_key():
    found = problems_of(
        "hello",
        [
            "optim.lrr=3",
            "parallelism.tpp=3",
            "train.lr=3",
            "modle.n_layers=1",
            "optim.kind=adamm",
            "train.global_batch=-1",
            "log.console=loud",
        ],
    )
    texts = {p.key: p.message for p in found}
    assert texts["parallelism.tpp"] == "parallelism.tpp=3: tpp is no key of parallelism; did you mean tp, pp or etp?"
    assert texts["train.lr"] == "train.lr=3: lr is no key of train; did you mean optim.lr?"
    assert texts["modle"] == "modle: modle is no key of a recipe; did you mean model?"
    assert texts["optim.kind"].startswith("optim.kind=adamm must be adamw, sgd")
    assert texts["optim.kind"].endswith("; did you mean adamw? --plugin PACKAGE adds kinds")
    assert texts["train.global_batch"] == "train.global_batch=-1 must be greater than 0"
    assert texts["log.console"] == "log.console=loud must be live, plain or quiet"
    assert {p.origin for p in found} == {"command line"}


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("train.profile.steps=[10,12]", "profile.steps"),
        ("train.profile.stepz=[10,12]", "profile.steps"),
        ("train.profile={steps: [10, 12], memory: true}", "profile at the top of the recipe"),
        ("train.model=hello", "model=hello"),
        ("log.tokenizer.path=x", "data.prepare.tokenizer or data.tokenizer"),
    ],
)
def test_a_key_of_another_section_is_named_by_its_whole_path(word, meant):
    """The last name alone reads like what was written."""
    (problem,) = problems_of("hello", [word])
    assert problem.message.endswith(f"; did you mean {meant}?")


def test_a_key_of_another_kind_says_whose_it_is():
    (problem,) = problems_of("hello", ["optim=sgd", "optim.beta1=0.9"])
    # the kinds that have it follow, as many as there are
    assert problem.message.startswith("optim.beta1=0.9: beta1 is no key when optim.kind=sgd but of optim.kind=adamw")
    assert problem.message.endswith(", or take it away with ~optim.beta1")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        # a choice sets what else its kind needs
        (["precision.recipe=delayed"], "but of precision.kind=fp8; set precision=fp8, or take it away"),
        (["launcher.partition=x"], "but of launcher.kind=slurm; set launcher=slurm, or take it away"),
        # no group: its kind alone
        (["model.attention.kv_rank=12"], "; set model.attention.kind=mla, or take it away"),
        # a value that is wrong there, too
        (
            ["precision.recipe=delayd"],
            "precision.kind=fp8, where it must be tensorwise, delayed, rowwise, blockwise, mxfp8 or nvfp4; "
            "did you mean delayed? set precision=fp8, or take it away",
        ),
        (
            ["optim.momentum=9"],
            "optim.kind=sgd or optim.kind=muon, where it must be less than 1.0; set optim=sgd or optim=muon, or take",
        ),
        (["data=random", "train.sample=null", "data.blend=3"], "where it must be a list; set data=indexed, or take"),
    ],
)
def test_a_key_of_another_kind_names_the_choice_that_has_it(words, told):
    (problem,) = problems_of("hello", words)
    assert told in problem.message


def test_a_choice_is_only_named_by_a_kind_where_it_has_that_kind():
    """What tells it so goes by the names alone."""
    search = SearchPath()
    for group in SECTIONS:
        for model in models_of(annotation_of(Recipe.model_fields[group])):
            for tag in set(tags_of(model)) & set(search.choices(group)):
                kinds = [search.read(path).body.get("kind") for path in search.closure(f"{group}/{tag}")]
                assert [kind for kind in kinds if kind][-1] == tag


def test_what_files_set_for_the_kind_that_a_choice_replaces_is_left_out_and_said():
    composed = compose("hello", ["data=random"])
    assert composed.left_out == (
        "data.blend (recipes/hello.yaml:7): no key of data.kind=random",
        "data.prepare (recipes/hello.yaml:8): no key of data.kind=random",
    )
    assert (composed.recipe.data.kind, composed.recipe.data.seq_len) == ("random", 256)
    assert not [key for key in composed.origins if key.startswith("data.blend")]
    assert compose("hello", ["data=indexed"]).recipe == compose("hello").recipe
    assert compose("hello", ["data=indexed"]).left_out == compose("hello", ["optim=sgd"]).left_out == ()


def test_a_key_of_another_kind_on_the_command_line_is_never_left_out():
    for word in ("data.blend=[{prefix: x}]", "data.blend.0.prefix=x", "data.cache=x"):
        assert [p.code for p in problems_of("hello", ["data=random", word])] == ["key.unknown"], word
    # taken away by their own words
    assert compose("hello", ["data=random", "~data.blend", "~data.prepare"]).left_out == ()
    # a value chooses no group
    assert {p.key for p in problems_of("hello", ["data.kind=random"])} == {
        "data.blend",
        "data.prepare",
        "data.vocab_size",
    }


def test_a_choice_replaces_optimizer_precision_and_model_and_the_kind_that_a_recipe_writes_out(folder):
    (folder / "recipes" / "mine.yaml").write_text(
        "defaults:\n  - hello\n  - override /precision: fp16\n"
        "optim: {beta1: 0.8, formats: {master: fp16}, clip: 2.0}\n"
        "precision: {hysteresis: 3}\n"
        "model: {positions: {base: 100.0}, n_layers: 3}\n"
        "data: {kind: indexed, split: [1, 1, 0], blnd: 1}\n"
    )
    composed = compose("mine", ["optim=sgd", "precision=fp32", "model=gpt2_124m", "~data.blnd"])
    assert composed.left_out == (
        "optim.beta1 (recipes/mine.yaml:4): no key of optim.kind=sgd",
        "optim.formats (recipes/mine.yaml:4): no key of optim.kind=sgd",
        "precision.hysteresis (recipes/mine.yaml:5): no key of precision.kind=fp32",
        "model.positions.base (recipes/mine.yaml:6): no key of model.positions.kind=learned",
    )
    assert (composed.recipe.optim.clip, composed.recipe.model.n_layers) == (2.0, 3)
    # a part of the model that the recipe writes out, as a section
    (folder / "recipes" / "parts.yaml").write_text(
        "defaults:\n  - hello\nmodel: {positions: {kind: none}, mlp: {bias: true}}\n"
    )
    assert compose("parts").recipe.model.positions.kind == "none"
    composed = compose("parts", ["model=gpt2_124m"])
    assert composed.left_out == ("model.positions.kind=none (recipes/parts.yaml:3): model=gpt2_124m is chosen",)
    assert (composed.recipe.model.positions.kind, composed.recipe.model.mlp.bias) == ("learned", True)
    assert composed.origins["model.positions.kind"] == "conf/model/gpt2_124m.yaml:10"
    composed = compose("mine", ["data=random", "~data.blnd"])
    assert composed.left_out[-1] == "data.kind=indexed (recipes/mine.yaml:7): data=random is chosen"
    assert (composed.recipe.data.kind, composed.origins["data.kind"]) == ("random", "conf/data/random.yaml:2")
    # a key that no kind has is a mistake, whatever is chosen
    assert [p.key for p in problems_of("mine", ["data=random"])] == ["data.blnd"]
    # files that contradict themselves are told how to mend it
    (folder / "recipes" / "both.yaml").write_text("defaults:\n  - mine\n  - override /optim: sgd\n")
    found = {p.key: p.message for p in problems_of("both", ["~data.blnd"])}
    assert found["optim.beta1"].endswith("take it away with ~optim.beta1")
    (folder / "recipes" / "none.yaml").write_text("defaults:\n  - hello\ndata: 5\n")
    assert [p.key for p in problems_of("none", ["data=random"])] == ["data"]


def test_a_recipe_in_a_subfolder_chooses_groups_too(folder):
    (folder / "recipes" / "mine").mkdir()
    (folder / "recipes" / "mine" / "one.yaml").write_text("defaults:\n  - /recipe/hello\n  - override /optim: sgd\n")
    assert compose("mine/one").recipe.optim.kind == "sgd"


def test_a_list_with_a_wrong_entry_is_not_called_short(folder):
    assert [p.code for p in problems_of("hello", ["data.blend=[{prefix: a, wieght: 2}]"])] == ["key.unknown"]


def test_typing_errors_name_file_and_line(folder):
    (folder / "recipes" / "bad.yaml").write_text(
        "defaults:\n  - hello\ntrain:\n  deterministic: on\n  steps: 017\n"
        "optim:\n  lr: ???\n  schedule: {kind: cosin}\n"
    )
    others = [
        "optim.schedule.kind=cosin must be constant, linear, cosine, inverse_sqrt, wsd or piecewise; "
        "did you mean cosine?   (recipes/bad.yaml:8)",
        "train.steps=017 must be a whole number; '017' reads as text   (recipes/bad.yaml:5)",
        "train.deterministic=on must be true or false; 'on' reads as text   (recipes/bad.yaml:4)",
    ]
    missing = "optim.lr=??? must be set; in the recipe, or on the command line: optim.lr=...   (recipes/bad.yaml:7)"
    assert [str(p) for p in problems_of("bad")] == [missing, *others]
    infinite = "optim.lr=nan must be a finite number   (command line)"
    assert [str(p) for p in problems_of("bad", ["optim.lr=nan"])] == [infinite, *others]


QUOTED = [
    ("train.steps", "64"),
    ("train.steps", "15T"),
    ("train.steps", "1.5B"),
    ("train.steps", "1e6"),
    ("parallelism.tp", "2"),
    ("optim.schedule.warmup_steps", "0"),
]


LENGTHS = "data.document_lengths"


def test_a_list_may_be_json_as_programs_print_it():
    """As `megaspec data inspect --json` prints document_lengths; Hydra's grammar has no quotes around keys."""
    bins = [{"documents": 10.0, "tokens": 1000.0, "squares": 1e5}]
    recipe = compose("hello", [f"{LENGTHS}={json.dumps(bins)}"]).recipe
    assert [one.model_dump() for one in recipe.data.document_lengths] == bins
    # what is text there stays text
    text = 'a "quoted" \\" \\ end\\'
    stream = {"kind": "stream", "files": [{"path": text}], "tokenizer": "9"}
    made = compose("hello", [f"data={json.dumps(stream)}", "~data.blend", "~data.prepare"]).recipe
    assert (made.data.files[0].path, made.data.tokenizer) == (text, "9")
    (problem,) = problems_of("hello", [f'{LENGTHS}=[{{"documents": "10", "tokens": 1000, "squares": 1e5}}]'])
    assert "'10' is text in quotes" in problem.message
    for wrong in ('[{"documents" 10}]', '[{"two words": 10}]', '{"documents": 1', '[{"": 1}]'):
        (problem,) = problems_of("hello", [f"{LENGTHS}={wrong}"])
        assert problem.code == "override.syntax"
        assert problem.message.startswith(f"{LENGTHS}={wrong}: not an override")


@pytest.mark.parametrize(
    ("bins", "said"),
    [
        ("[{documents: 10, tokens: 1000, squares: 5}]", "must be a bin whose squares are at least"),
        ("[{documents: 10, tokens: 1000}]", "squares is missing"),
        ("[{documents: 10, tokens: 1000, squares: 1e5, x: 1}]", "x is no key"),
        ("[1]", "must be a section"),
    ],
)
def test_a_wrong_entry_of_a_list_is_told_alone(bins, said):
    """Nothing says that the list must be auto: it is of the right form."""
    (problem,) = problems_of("hello", [f"{LENGTHS}={bins}"])
    assert problem.key.startswith(f"{LENGTHS}.0")
    assert said in problem.message


@pytest.mark.parametrize(("key", "text"), QUOTED)
@pytest.mark.parametrize("quote", ["'", '"'])
def test_a_text_in_quotes_is_no_number(folder, key, text, quote):
    wanted = f"{key}={text} must be a whole number"
    way_out = f"{text!r} is text in quotes, take them away"
    (found,) = problems_of("hello", [f"{key}={quote}{text}{quote}"])
    assert (found.key, found.code, found.origin) == (key, "key.type", "command line")
    assert wanted in found.message
    assert way_out in found.message
    *sections, name = key.split(".")
    body = f"{name}: {quote}{text}{quote}"
    for depth, section in reversed(list(enumerate(sections))):
        body = f"{section}:\n{'  ' * (depth + 1)}{body}"
    (folder / "recipes" / "quoted.yaml").write_text(f"defaults:\n  - hello\n{body}\n")
    (found,) = problems_of("quoted")
    assert wanted in found.message
    assert way_out in found.message
    assert found.origin == f"recipes/quoted.yaml:{3 + len(sections)}"


def test_quoted_numbers_are_told_beside_all_else(folder):
    words = ["train.steps='64'", "train.global_batch='2k'", "optim.lr=x", "data.blend=[{prefix: 'a', weight: '2'}]"]
    found = {p.key: p.message for p in problems_of("hello", words)}
    assert sorted(found) == ["data.blend.0.weight", "optim.lr", "train.global_batch", "train.steps"]
    assert "take them away" not in found["optim.lr"]
    assert all("take them away" in text for key, text in found.items() if key != "optim.lr")


def test_counts_without_quotes_and_texts_in_them_stay_what_they_are(folder):
    (folder / "recipes" / "plain.yaml").write_text(
        "defaults:\n  - 'hello'\n  - override /optim: 'sgd'\nname: '15T'\n"
        "train: {steps: 15T, eval_samples: 1.5k, sample: {prompt: '64'}}\nparallelism: {tp: 'auto'}\n"
    )
    recipe = compose("plain", ["train.seed=1e6", "log.every=2k", "data.cache='12'"]).recipe
    assert (recipe.name, recipe.data.cache, recipe.train.sample.prompt) == ("15T", "12", "64")
    assert (recipe.train.steps, recipe.train.eval_samples, recipe.train.seed) == (15 * 10**12, 1500, 10**6)
    assert (recipe.log.every, recipe.parallelism.tp, recipe.optim.kind) == (2000, "auto", "sgd")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["helo=1"], "helo is no key"),
        (["optim=sgdd"], "optim=sgdd does not exist; did you mean sgd?"),
        (["optim=5"], f"choose {one_of(choices('optim'))}"),
        (["~optim"], "optim is a section"),
        (["train.steps"], "write path=value"),
        (["train.steps=1,2"], "write a list as [1,2]"),
        (["train.steps=range(1,3)"], "several values"),
        (["hydra.run.dir=x"], "neither @packages nor hydra settings"),
        (["model@x=hello"], "neither @packages nor hydra settings"),
        (["recipe=hello"], "a run has one recipe"),
        (["~optim.foo"], "can't be taken away"),
        (["train.steps.x=1"], "train.steps is not a section"),
        (["data.blend.7.prefix=x"], "data.blend.7 is not set"),
        (["data.blend.1=x"], "has entries 0 to 0"),
        (["model._target_=os.system"], "can't name code"),
        (["train.steps=???"], "train.steps=??? must be set"),
        (["model=../../secret"], "model=../../secret does not exist"),
        (["~data.kind"], f"data.kind is missing; choose one: {', '.join(f'data={one}' for one in choices('data'))}"),
        (["data.split=[1]"], "too few entries"),
        (["data.blend=[]"], "data.blend=[] must be a list whose length is at least 1"),
        (["name='a/b'"], "must be text that matches"),
    ],
)
def test_refused_overrides(overrides, words):
    found = problems_of("hello", overrides)
    assert words in str(found[0])
    assert found[0].origin == "command line" or "missing" in str(found[0])


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("defaults:\n  - helo\n", 2, "recipe/helo does not exist; did you mean hello?"),
        ("defaults:\n  - bad\n", 2, "inherits from itself"),
        ("defaults:\n  - ../x\n", 2, "is no name of a file"),
        ("defaults:\n  - hello\n  - override /modle: hello\n", 3, "modle is no group; did you mean model?"),
        ("defaults:\n  - hello\n  - override /model: helo\n", 3, "model/helo does not exist; did you mean hello?"),
        ("defaults:\n  - hello\n  - /model: hello\n", 3, "a recipe chooses with `override /group: choice`"),
        ("defaults:\n  - hello\n  - override model: hello\n", 3, "a recipe chooses with `override /group: choice`"),
        ("defaults:\n  - /model/hello\n", 2, "a file inherits from its own group"),
        ("defaults:\n  - [1]\n", 2, "an entry is a name"),
        ("defaults: hello\n", 1, "defaults is a list"),
        ("defaults:\n  - hello\nmodel:\n  _target_: os.system\n", 4, "can't name code"),
        ("defaults:\n  - hello\nhydra:\n  run: {dir: x}\n", 3, "hydra is no key"),
        ("# @package model\ndefaults:\n  - hello\n", None, "a recipe is global"),
    ],
)
def test_refused_recipes(folder, text, line, words):
    (folder / "recipes" / "bad.yaml").write_text(text)
    problem = problems_of("bad")[0]
    assert words in problem.message
    assert problem.origin == (f"recipes/bad.yaml:{line}" if line else "recipes/bad.yaml")


def test_wrong_order_of_defaults_is_an_error(folder):
    (folder / "recipes" / "bad.yaml").write_text("defaults:\n  - override /model: hello\n  - hello\n")
    assert "must be at the end" in problems_of("bad")[0].message


def test_a_shipped_file_that_is_edited_meanwhile_is_read_again(tmp_path, monkeypatch):
    """As in a notebook; files that stay as they are are read once."""
    recipes = tmp_path / "shipped"
    recipes.mkdir()
    hello = (ROOT / "recipes/hello.yaml").read_text()
    (recipes / "hello.yaml").write_text(hello)
    monkeypatch.setattr("megaspec.compose.search_path.recipes_dir", lambda: recipes)
    monkeypatch.chdir(tmp_path)
    before = compose("hello")
    assert search_path(()) is search_path(())
    (recipes / "hello.yaml").write_text(hello.replace("steps: 240", "steps: 4321"))
    assert compose("hello").recipe.train.steps == 4321 != before.recipe.train.steps
    (recipes / "other.yaml").write_text(hello)
    assert compose("other").recipe.train == before.recipe.train


def test_shipped_yaml_names_no_code():
    files = [*ROOT.glob("conf/**/*.yaml"), *ROOT.glob("recipes/**/*.yaml")]
    assert len(files) > 20
    for file in files:
        text = file.read_text()
        assert "_target_" not in text, file
        assert "oc." not in text, file
        assert "@package" not in text, file


def test_recompose_changes_a_saved_recipe():
    saved = json.loads(compose("hello").recipe.model_dump_json())
    again = recompose(saved, "run/recipe.json", ["train.steps=9", "kernels=reference", "optim=sgd"])
    assert again.recipe.train.steps == 9
    assert again.recipe.kernels.attention == "reference"
    assert (again.recipe.optim.kind, again.recipe.optim.lr) == ("sgd", 0.1)
    assert again.recipe.model == compose("hello").recipe.model
    assert again.origins["train.global_batch"] == "run/recipe.json"
    assert again.origins["train.steps"] == "command line"
    assert again.origins["optim.kind"] == "conf/optim/sgd.yaml:1"
    half = recompose(saved, "run/recipe.json", ["model=llama3_8b_half"]).recipe.model
    assert (half.n_layers, half.d_model) == (16, 4096)


def test_composing_imports_no_torch_and_leaves_hydra_alone(tmp_path):
    program = (
        "import sys; from megaspec.compose.compose import compose; compose('hello');"
        "from hydra.core.global_hydra import GlobalHydra;"
        "assert not GlobalHydra.instance().is_initialized(); assert 'torch' not in sys.modules"
    )
    path = os.pathsep.join(str(ROOT / p) for p in ("", "kernels", "launchers"))
    subprocess.run([sys.executable, "-P", "-c", program], check=True, cwd=tmp_path, env={"PYTHONPATH": path})
