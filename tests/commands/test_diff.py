"""`megaspec diff`: recipes, runs and checkpoints, apart by what is computed and how."""

import json

import pytest

from megaspec.checkpoint.codec import encode
from megaspec.checkpoint.format import MANIFEST, Manifest
from megaspec.cli import main
from megaspec.compose.compose import compose
from megaspec.core.problems import field_paths
from megaspec.estimate.target import Target
from megaspec.recipe import Recipe
from megaspec.resolve.resolver import resolve
from megaspec.rules.difference import BOUND, FREE, NAMES, changed, differences, is_free, leaves, verdict
from megaspec.rules.run_facts import Facts
from megaspec.run_folder import write_run

CPU = Target(cores=2, versions={"torch": "2.13.0+cpu"})


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def diff(capsys, a, b):
    assert main(["diff", str(a), str(b), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def keys(part):
    return {one["key"]: (one["a"], one["b"]) for one in part}


def make_run(folder, *overrides, target=CPU, fingerprint=""):
    recipe = compose("hello", overrides).recipe
    spec = resolve(recipe, target, Facts(run_dir=str(folder), vocab_size=257, fingerprint=fingerprint))
    folder.mkdir(parents=True)
    write_run(folder, recipe, target, spec)
    return spec


def test_another_mapping(capsys):
    answer = diff(capsys, "llama3_1_405b", "llama3_1_405b_256gpu")
    assert answer["verdict"] == "same experiment, other mapping"
    assert answer["experiment"] == []
    assert keys(answer["mapping"]) == {
        "parallelism.cp": (2, 1),
        "parallelism.dp_shard": (8, 4),
        "launcher.ranks": (1024, 256),
        "parallelism.recompute.kind": ("selective", "full"),
        "parallelism.recompute.parts": (["norm", "activation"], None),
    }


def test_another_experiment(capsys):
    answer = diff(capsys, "hello", "hello optim=sgd optim.lr=3e-3 parallelism.tp=1 train.steps=99")
    assert answer["verdict"] == "another experiment"
    experiment = keys(answer["experiment"])
    assert experiment["optim.kind"] == ("adamw", "sgd")
    assert experiment["optim.schedule.decay_steps"] == (240, 99)
    assert not {"optim.beta1", "optim.momentum", "optim.lr"} & set(experiment)
    assert keys(answer["mapping"])["train.steps"] == (240, 99)


def test_names_say_nothing(capsys):
    assert main(["diff", "recipe=hello", "hello name=other about.purpose=mine run_dir=here"]) == 0
    assert capsys.readouterr().out.strip() == "identical"


def test_the_table_says_both_parts(capsys):
    main(["diff", "hello", "hello train.seed=7 log.every=3"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["what", "is", "computed"]
    assert ["train.seed", "1234", "7"] in lines
    assert lines.index(["how"]) < lines.index(["log.every", "10", "3"])
    assert lines[-1] == ["another", "experiment"]


def test_runs_and_checkpoints(capsys, tmp_path):
    spec = make_run(tmp_path / "runs" / "one", fingerprint="a")
    make_run(tmp_path / "runs" / "two", target=CPU.model_copy(update={"cores": 1}), fingerprint="a")
    make_run(tmp_path / "runs" / "three", "optim.lr=1e-3", fingerprint="b")
    answer = diff(capsys, "runs/one", "runs/two")
    assert answer["verdict"] == "same experiment, other mapping"
    assert keys(answer["mapping"])["launcher.ranks"] == (2, 1)
    answer = diff(capsys, "runs/one", "runs/three")
    assert set(keys(answer["experiment"])) == {"optim.lr", "data_fingerprint"}

    checkpoint = tmp_path / "runs" / "one" / "checkpoints" / "step-00000007"
    checkpoint.mkdir(parents=True)
    manifest = Manifest(7, 1, 0, 8 << 20, (), {}, json.loads(spec.model_dump_json()), {})
    (checkpoint / MANIFEST).write_bytes(encode(manifest))
    assert diff(capsys, "runs/one", checkpoint)["verdict"] == "identical"
    assert set(keys(diff(capsys, checkpoint, "runs/three")["experiment"])) == {"optim.lr", "data_fingerprint"}


def test_a_recipe_is_resolved_for_the_machine_of_the_run(capsys, tmp_path):
    make_run(tmp_path / "run")
    assert diff(capsys, "hello", "./run")["verdict"] == "identical"
    assert set(keys(diff(capsys, "./run", "hello optim.lr=1.0")["experiment"])) == {"optim.lr"}


@pytest.mark.parametrize(
    ("word", "text", "code"),
    [
        ("helo", "recipe=helo does not exist; did you mean hello?", 64),
        ("./empty", "./empty holds neither a run (spec.json) nor a checkpoint", 64),
        ("mine.yaml", "mine.yaml: no such file", 64),
        ("hello optim.lrr=1", "lrr is no key when optim.kind=adamw; did you mean lr?", 64),
        ("./damaged", "expected", 66),
    ],
)
def test_what_is_refused(capsys, tmp_path, word, text, code):
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / MANIFEST).write_text("{}")
    assert main(["diff", "hello", word]) == code
    err = capsys.readouterr().err
    assert text in err
    assert "Traceback" not in err


def test_the_table_names_fields():
    assert {*FREE, *BOUND, *NAMES} <= set(field_paths(Recipe))


def test_every_field_is_in_one_part():
    """Walked leaf by leaf: a change of any field of a full recipe is told, as experiment or as mapping."""
    recipe = compose("deepseek_v3").recipe
    content = recipe.model_dump(mode="json")
    told = {key for key, _ in leaves(content)}
    assert {key.partition(".")[0] for key in told} == set(Recipe.model_fields)
    computed = {key.partition(".")[0] for key in told if not is_free(key, content)}
    assert computed == {"name", "model", "init", "precision", "data", "optim", "train", "parallelism"}


def test_changed_tells_whole_sections_that_come_or_go():
    assert list(changed({"a": None, "b": [1, 2]}, {"a": {"x": 1}, "b": [1, 3]})) == [
        ("a", None, {"x": 1}),
        ("b.1", 2, 3),
    ]
    assert list(changed({"b": [1]}, {"b": [1, 3]})) == [("b", [1], [1, 3])]
    recipe = compose("hello").recipe
    assert verdict(differences(recipe, recipe)) == "identical"
