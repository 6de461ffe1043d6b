"""Plugins extend the language and what ranks build; a bad one is refused, and a run folder never imports one.

Loading changes the process for good, so whatever loads one runs in a process of its own.
"""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megaspec.cli import main
from megaspec.core.errors import RecipeError
from megaspec.core.kinds import annotation_of, models_of, tags_of
from megaspec.core.problems import one_of
from megaspec.plugins import demand, load, loaded, take_flags
from megaspec.recipe import Recipe
from tests.hf.folders import save_tokenizer
from tests.warm import warm_command, warm_script

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join(str(ROOT / p) for p in ("", "kernels", "launchers")),
    "OMP_NUM_THREADS": "1",
}
PLUGINS = ("--plugin", str(HERE / "tiny_plugin"), f"--plugin={HERE / 'smooth_plugin'}")
WORDS = (
    "recipe=hello",
    "data={kind: count, vocab_size: 16, seq_len: 16}",
    "~data.blend",
    "~data.prepare",
    "model={kind: sparse, n_layers: 3, d_model: 16, n_heads: 2, vocab_size: 16, tied_embeddings: true}",
    "model.mlp={kind: squared, power: 3}",
    "~model.mlp.activation",
    "model.norm={kind: tanh}",
    "optim={kind: lion, lr: 1e-3, schedule: {warmup_steps: 0, min_lr: 1e-4}}",
    "train={steps: 3, global_batch: 4, eval_every: 0, sample: null, loss: {kind: smooth, share: 0.25}}",
    "launcher.ranks=2",
    "parallelism.tp=2",
    "log={console: quiet, tensorboard: false, sinks: [{kind: csv, file: out.csv}]}",
)


def start(*words: str, cwd: Path) -> subprocess.CompletedProcess:
    return warm_command(words, cwd=cwd, env=ENVIRONMENT)


def test_a_run_with_a_plugin_from_train_to_resume(tmp_path):
    trained = start("train", *WORDS, *PLUGINS, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    run = tmp_path / "runs" / "hello"
    spec = json.loads((run / "spec.json").read_text())
    assert spec["plugins"] == ["smooth_plugin", "tiny_plugin"]
    model = spec["model"]
    assert (model["kind"], model["every"], model["d_ffn"]) == ("sparse", 2, 64)
    assert (model["mlp"], model["norm"]) == ({"kind": "squared", "power": 3}, {"kind": "tanh", "alpha": 0.5})
    assert spec["optim"]["beta"] == 0.9

    alone = start("resume", "runs/hello", "train.steps=5", cwd=tmp_path)
    assert alone.returncode == 64
    assert "runs/hello was made with plugins" in alone.stderr
    assert "add --plugin smooth_plugin --plugin tiny_plugin" in alone.stderr

    # as it says: here the package is found by its name
    flags = {"PYTHONPATH": f"{ENVIRONMENT['PYTHONPATH']}{os.pathsep}{HERE}"}
    words = (
        "resume",
        "runs/hello",
        "train.steps=5",
        "parallelism.tp=1",
        "--plugin",
        "smooth_plugin",
        "--plugin",
        "tiny_plugin",
    )
    more = warm_command(words, cwd=tmp_path, env=ENVIRONMENT | flags)
    assert more.returncode == 0, more.stderr
    rows = list(csv.reader((run / "out.csv").open()))
    assert [int(step) for step, _ in rows] == [1, 2, 3, 4, 5]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line and "grad_norm" in line]
    assert [float(loss) for _, loss in rows] == pytest.approx(losses, rel=1e-6)

    # its layers are ours, of kinds that look at each token alone
    save_tokenizer(run / "tokenizer")
    texts = []
    for cache in ("keys", "none"):
        written = start("generate", "runs/hello", "abc", "--tokens", "8", "--cache", cache, *PLUGINS, cwd=tmp_path)
        assert written.returncode == 0, written.stderr
        texts.append(written.stdout)
    assert texts[0] == texts[1]
    assert len(texts[0]) > len("abc\n")


COUNTED = """
import sys
from megaspec.plugins import load
load(sys.argv[1:])
from tests.nn.random_specs import VOCABULARY
from tests.nn.test_random_specs import check_flops, check_kept, check_parameters
sizes = {"n_layers": 3, "d_model": 16, "n_heads": 2, "vocab_size": VOCABULARY, "vocab_pad_to": 1}
family, tanh, squared = {"kind": "sparse"}, {"norm": {"kind": "tanh"}}, {"mlp": {"kind": "squared", "power": 3}}
normed_heads = {"attention": {"kind": "gqa", "qk_norm": "per_head"}}
for chosen in (family, family | tanh | squared, {"kind": "decoder"} | tanh | squared | normed_heads):
    for check in (check_parameters, check_flops, check_kept):
        check(sizes | chosen)
"""


def test_the_parts_of_a_plugin_are_counted_to_the_byte(tmp_path):
    paths = {"PYTHONPATH": f"{ENVIRONMENT['PYTHONPATH']}{os.pathsep}{ROOT}"}
    counted = warm_script(COUNTED, [str(HERE / "tiny_plugin")], cwd=tmp_path, env=ENVIRONMENT | paths)
    assert counted.returncode == 0, counted.stderr


def test_two_ranks_train_the_parts_of_a_plugin_as_one_does(tmp_path):
    words = [word for word in WORDS if not word.startswith(("train=", "log="))]
    train = "train={steps: 2, global_batch: 4, eval_every: 0, sample: null}"
    verified = start("verify", *words, train, "--cpu", *PLUGINS, cwd=tmp_path)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "equal:" in verified.stdout


PLAN = """
import sys
from megaspec.cli import main
assert main(["plan", *sys.argv[1:]]) == 0
wrong = ("model.mlp.pwer=2", "train.loss.share=1", "log.sinks.0.fil=a", "optim.beta=2")
code = main(["plan", *sys.argv[1:], *wrong])
assert "torch" not in sys.modules
sys.exit(code)
"""


def test_planning_needs_no_torch_and_every_key_of_a_plugin_is_typed_and_closed(tmp_path):
    command = [sys.executable, "-P", "-c", PLAN, *PLUGINS, *WORDS]
    plan = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert plan.returncode == 64, plan.stderr
    assert "parameters" in plan.stdout
    for told in ("did you mean power?", "train.loss.share=1 must be less than 1", "did you mean file?", "optim.beta=2"):
        assert told in plan.stderr


def kinds_of(section: str) -> str:
    """The kinds that megaspec itself has, in words."""
    models = models_of(annotation_of(Recipe.model_fields[section]))
    return one_of([tag for model in models for tag in tags_of(model)])


def test_without_the_flag_nothing_is_known(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *WORDS]) == 64
    error = capsys.readouterr().err
    for told in (
        "model.kind=sparse must be decoder; --plugin PACKAGE adds kinds",
        f"data.kind=count must be {kinds_of('data')}; --plugin",
        f"optim.kind=lion must be {kinds_of('optim')}; --plugin",
        "train.loss.kind=smooth must be a plug-in's; --plugin",
        "log.sinks.0.kind=csv must be wandb, mlflow or trackio; --plugin",
    ):
        assert told in error


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("model.norm.kind=tanh", "model.norm.kind=tanh must be rms or layer; --plugin PACKAGE adds kinds"),
        ("model.mlp={kind: squared, power: 3}", "must be gated, plain or clamped; --plugin PACKAGE"),
        ("model.attention.kind=linear", "model.attention.kind=linear must be gqa or mla; --plugin PACKAGE adds kinds"),
        ("model.positions.kind=alibi", "model.positions.kind=alibi must be rotary, learned or none; --plugin PACKAGE"),
        # named like one of ours
        ("optim.kind=adamw8", "did you mean adamw? --plugin PACKAGE adds kinds"),
        # in a text alone, or where a choice is looked for
        ("train.loss=smooth", "write train.loss={kind: smooth}, of a plug-in with --plugin PACKAGE"),
        ("log.sinks=[csv]", "write log.sinks.0={kind: csv}, of a plug-in with --plugin PACKAGE"),
        ("optim=lion", "(a plug-in's kind: optim.kind=lion, with --plugin PACKAGE)"),
        ("data=count", "(a plug-in's kind: data.kind=count, with --plugin PACKAGE)"),
        ("model=sparse", "(a plug-in's kind: model.kind=sparse, with --plugin PACKAGE)"),
    ],
)
def test_every_kind_of_a_plugin_is_told_of_the_flag(word, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "recipe=hello", word]) == 64
    assert told in capsys.readouterr().err


def test_yaml_names_no_plugin(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "sly.yaml").write_text("defaults: [hello]\nplugins: [tiny_plugin]\n")
    assert main(["plan", "recipe=sly"]) == 64
    assert "plugins is no key of a recipe" in capsys.readouterr().err


LOSSES = """
import sys, torch
from megaspec.plugins import load
load(sys.argv[1].split())
from megaspec.compose.words import compose_words
from megaspec.estimate.target import detect_target
from megaspec.resolve.gather import gather_facts
from megaspec.resolve.resolver import resolve
from megaspec.data.loader import open_source
from megaspec.parallelism.mesh import Mesh
from megaspec.runtime.build import build, initialise
from megaspec.runtime.plugins import loaded_builders
for loss in ("null", "{kind: smooth, share: 0}", "{kind: smooth, share: 0.5}", "{kind: smooth, share: 0.25}"):
    words = [w for w in sys.argv[2:] if not w.startswith(("launcher.ranks", "parallelism", "train="))]
    train = f"train={{steps: 1, global_batch: 1, eval_every: 0, sample: null, loss: {loss}}}"
    words += ["launcher.ranks=1", "precision=fp64", train]
    recipe = compose_words(words).recipe
    spec = resolve(recipe, detect_target(), gather_facts(recipe))
    built = build(spec, mesh=Mesh({}, rank=0, device=torch.device("cpu")))
    initialise(built)
    sources = loaded_builders().sources
    source = open_source(spec.data, split="train", seed=1, segments=(4,), vocab_size=16, sources=sources)
    tokens = torch.tensor(source.read(0).tokens)[None]
    model, index = built.model, torch.arange(16)
    hidden = model.finish(model.body(tokens[:, :-1], model.context(index, length=16)), lambda h: h)
    print(repr(model.head.loss(hidden, tokens[:, 1:], torch.ones(1, 16, dtype=torch.float64)).item()))
    logits = hidden[0] @ built.model.head.weight[:16].t()
print(repr((torch.logsumexp(logits, -1).sum() - logits.mean(-1).sum()).item()))
"""


def test_the_loss_of_a_plugin_is_the_loss_that_is_trained(tmp_path):
    packages = f"{HERE / 'tiny_plugin'} {HERE / 'smooth_plugin'}"
    made = warm_script(LOSSES, [packages, *WORDS], cwd=tmp_path, env=ENVIRONMENT)
    assert made.returncode == 0, made.stderr
    plain, none, half, quarter, flat = map(float, made.stdout.split())
    assert none == pytest.approx(plain, rel=1e-12)
    assert half == pytest.approx(0.5 * plain + 0.5 * flat, rel=1e-12)
    assert quarter == pytest.approx(0.75 * plain + 0.25 * flat, rel=1e-12)


@pytest.mark.parametrize(
    ("arguments", "packages", "rest"),
    [
        (["plan", "--plugin", "a", "x=1"], ["a"], ["plan", "x=1"]),
        (["--plugin=a", "plan", "--plugin", "./b/c"], ["a", "./b/c"], ["plan"]),
        (["from-megatron", "--", "--plugin", "a"], [], ["from-megatron", "--", "--plugin", "a"]),
    ],
)
def test_flags_stand_anywhere_before_the_dashes(arguments, packages, rest):
    assert take_flags(arguments) == (packages, rest)


@pytest.mark.parametrize("arguments", [["plan", "--plugin"], ["--plugin=", "plan"], ["--plugin", "--json", "plan"]])
def test_a_flag_without_its_package(arguments):
    with pytest.raises(RecipeError, match="its package is missing"):
        take_flags(arguments)


IMPORTS = """
from typing import Literal
from megaspec.core.frozen import Frozen
from megaspec.data.spec import DataSpec
from megaspec.model.decoder.spec import DecoderSpec
from megaspec.nn.mlp.spec import GatedMlpSpec, MlpSpec
from megaspec.nn.norm.spec import NormSpec
from megaspec.optim.spec import OptimizerSpec
from megaspec.plugins import Kind, Plugin
class Silent(NormSpec):
    kind: Literal["silent"]
    statistics = 1
class Sink(Frozen):
    kind: Literal["sink"]
class Mine(DecoderSpec):
    kind: Literal["{kind}"]
    "A model."
"""
# Of what is written behind them.
FIRST_LINE = IMPORTS.count("\n") + 1
CALLED = "is called with (spec, run_dir, step): "
TWO = """
class Two:
    def __init__(self, spec, run_dir): pass
"""


FAMILY = """from dataclasses import replace
from megaspec.hf.families import llama
def of(name, **changes): return replace(llama.FAMILY, model_type=name, **changes)
"""


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("", "it has no PLUGIN"),
        ("PLUGIN = 3", "it has no PLUGIN"),
        (
            "PLUGIN = Plugin()",
            "adds nothing; give models, norms, mlps, attentions, positions, sources",
        ),
        ("PLUGIN = Plugin(models=(3,))", "models: 3 must be a megaspec.plugins.Kind"),
        ("PLUGIN = Plugin(models=(Kind(Mine, 'x'),))", "build='x' must be text such as my_plugin.model:MyModel"),
        ("PLUGIN = Plugin(models=(Kind(Mine, 'nowhere.at:all'),))", "there is no module nowhere.at"),
        ("PLUGIN = Plugin(models=(Kind(Mine, 'NAME:Absent'),))", "NAME defines no Absent"),
        ("PLUGIN = Plugin(models=(Kind(Mine, 'NAME:Mine'),) * 2)", "model.kind=mine is its own already's"),
        ("PLUGIN = Plugin(losses=(Kind(Frozen, 'NAME:Mine'),))", 'Frozen lacks kind: Literal["name"]'),
        ("PLUGIN = Plugin(sources=(Kind(DataSpec, 'NAME:Mine'),))", "DataSpec lacks the field vocab_size"),
        ("PLUGIN = Plugin(optimizers=(Kind(OptimizerSpec, 'NAME:Mine'),))", "OptimizerSpec must inherit from"),
        ("PLUGIN = Plugin(mlps=(Kind(Mine, 'NAME:Mine'),))", "Mine must inherit from megaspec.nn.mlp.spec.MlpSpec"),
        ("PLUGIN = Plugin(norms=(Kind(Silent, 'NAME:Mine'),))", "norms: Silent doesn't say its vectors"),
        ("PLUGIN = Plugin(mlps=(Kind(GatedMlpSpec, 'NAME:Mine'),))", "model.mlp.kind=gated is megaspec's"),
        ("import nowhere_at_all", "FILE:FIRST: ModuleNotFoundError: No module named 'nowhere_at_all'; mend it"),
        ("x = = 1", "FILE:FIRST: SyntaxError: invalid syntax; mend it"),
        ("{}['here']", "FILE:FIRST: KeyError: 'here'; mend it"),
        ("import json\njson.loads('{')", "FILE:SECOND: JSONDecodeError: Expecting property name"),
        ("def f():\n    raise ValueError('a\\nb')\nf()", "FILE:SECOND: ValueError: a; b; mend it"),
        ("raise SystemExit(0)", "FILE:FIRST: SystemExit: 0; mend it"),
        ("PLUGIN = Plugin(loses=())", "FILE:FIRST: TypeError: Plugin.__init__() got an unexpected keyword argument"),
        ("class Bad(Frozen):\n    x: object()", "FILE:FIRST: "),
        ("PLUGIN = Plugin(sinks=(Kind(Sink, 'NAME:two'),))\ndef two(spec, run_dir): pass", CALLED + "too many"),
        ("PLUGIN = Plugin(sinks=(Kind(Sink, 'NAME:Two'),))\n" + TWO, CALLED + "too many positional arguments"),
        ("PLUGIN = Plugin(sinks=(Kind(Sink, 'NAME:f'),))\ndef f(a, b, c, *, d): pass", CALLED + "missing"),
        ("PLUGIN = Plugin(families=(Frozen,))", "must be a megaspec.hf.family.Family"),
        (
            FAMILY + "PLUGIN = Plugin(families=(of('llama'),))",
            "families: model_type=llama is megaspec's; choose another",
        ),
        (FAMILY + "PLUGIN = Plugin(families=(of('x'), of('x')))", "families: model_type=x is its own already; choose"),
        (
            FAMILY + "PLUGIN = Plugin(families=(of('a b'),))",
            "families: model_type='a b' must be a name such as my_model",
        ),
        (FAMILY + "PLUGIN = Plugin(families=(of('x', architecture='a b'),))", "x: architecture='a b' must be a class"),
        (FAMILY + "PLUGIN = Plugin(families=(of('x', write=None),))", "x: write=None must be a function of one arg"),
        (
            FAMILY + "PLUGIN = Plugin(families=(of('x', kinds={'norms': 'rms'}),))",
            "x: kinds has 'norms', and model has",
        ),
        (FAMILY + "PLUGIN = Plugin(families=(of('x', read=lambda c: {}),))", "x: read gives no section with a kind"),
        (
            FAMILY + "PLUGIN = Plugin(families=(of('x', read=lambda c: c.values['n']),))",
            "of x: FILE:LAST: KeyError: 'n'; mend it",
        ),
        (
            "PLUGIN = Plugin(losses=(Kind(Sink, 'NAME:f'),))\ndef f(a, b): pass",
            "called with (spec): missing a required",
        ),
    ],
)
def test_a_plugin_that_lacks_a_part_is_refused_with_what_is_missing(body, told, tmp_path, monkeypatch):
    name = f"plugin_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(
        IMPORTS.replace("{kind}", "mine") + body.replace("NAME", name, body.count(":"))
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = models_of(annotation_of(Recipe.model_fields["model"]))
    with pytest.raises(RecipeError) as refused:
        load([f"{tmp_path / name}.py"])
    for word, value in (
        ("NAME", name),
        ("FILE", tmp_path / f"{name}.py"),
        ("FIRST", FIRST_LINE),
        ("SECOND", FIRST_LINE + 1),
        ("LAST", FIRST_LINE + FAMILY.count("\n")),
    ):
        told = told.replace(word, str(value))
    assert told in str(refused.value)
    assert refused.value.exit_code == 64
    assert (loaded(), models_of(annotation_of(Recipe.model_fields["model"]))) == ((), before)


def test_a_name_that_is_taken_is_refused(tmp_path, monkeypatch):
    (tmp_path / "clashing.py").write_text(
        IMPORTS.replace("{kind}", "decoder") + "PLUGIN = Plugin(models=(Kind(Mine, 'clashing:Mine'),))"
    )
    (tmp_path / "json.py").write_text("")
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(RecipeError, match=r"model\.kind=decoder is megaspec's; choose another name"):
        load([f"{tmp_path}/clashing.py"])
    with pytest.raises(RecipeError, match="has the same name and is found first"):
        load([f"{tmp_path}/json.py"])
    with pytest.raises(RecipeError, match="no such folder or file"):
        load(["./nowhere"])
    with pytest.raises(RecipeError, match="no import name"):
        load(["a-b"])


LATE = """
from megaspec.core.errors import RecipeError
from megaspec.hf.family import objections
from megaspec.hf.names import weight_table
from megaspec.hf.table import FAMILIES, read_model
from megaspec.plugins import load
from tests.hf.tiny import TINY

load(["./late.py"])
late = FAMILIES["late"]
spec = read_model({"model_type": "llama", **TINY["llama 2"][1]}, "config.json")
for ask in (lambda: objections(late, spec), lambda: weight_table(spec.facts, late.names(spec))):
    try:
        ask()
    except RecipeError as error:
        print(error)
"""


def test_a_mistake_in_a_family_is_told_with_its_line_when_it_is_used(tmp_path):
    """Of what an empty configuration does not show."""
    (tmp_path / "late.py").write_text(
        "from dataclasses import replace\nfrom megaspec.hf.families import llama\nfrom megaspec.plugins import Plugin\n"
        "def write(spec):\n    return {'n': spec.no_such_option}\n"
        "short = replace(llama.NAMES, matrices={})\n"
        "one = replace(llama.FAMILY, model_type='late', write=write, names=lambda spec: short)\n"
        "PLUGIN = Plugin(families=(one,))\n"
    )
    paths = {"PYTHONPATH": f"{ENVIRONMENT['PYTHONPATH']}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-P", "-c", LATE]
    asked = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT | paths, capture_output=True, text=True, timeout=120)
    assert asked.returncode == 0, asked.stderr
    found = asked.stdout
    assert "--plugin ./late.py: write of late: " in found
    assert "late.py:5: AttributeError: 'DecoderSpec' object has no attribute 'no_such_option'; mend it" in found
    assert "the names of the family say nothing of attn.wqkv, which this model has; add it to matrices" in found


def test_specs_that_import_torch_are_refused(tmp_path):
    (tmp_path / "heavy.py").write_text("import torch\n")
    # in a process that has not loaded it already
    command = [sys.executable, "-P", "-m", "megaspec", "plan", "recipe=hello", "--plugin", "./heavy.py"]
    refused = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 64
    assert "its specs import torch" in refused.stderr


BUILDERS = {
    "raises.py": ("import torch\n\nraise KeyError('weights')\n", "raises.py:4: KeyError: 'weights'; mend it"),
    "gone.py": ("def build(spec): pass\ndel build\n", "gone has no build once it is imported; define it there"),
}


# a file and the name in it are looked for in one place
@pytest.mark.parametrize("file", ["raises.py", pytest.param("gone.py", marks=pytest.mark.slow)])
def test_a_builder_that_raises_on_import_is_one_line_on_a_rank(file, tmp_path):
    body, told = BUILDERS[file]
    spec = "class Spec(Frozen):\n    kind: Literal['late']\n"
    head = "from typing import Literal\nfrom megaspec.core.frozen import Frozen\n"
    head += "from megaspec.plugins import Kind, Plugin\n"
    plugin = f"PLUGIN = Plugin(losses=(Kind(Spec, 'late.{file[:-3]}:build'),))\n"
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "__init__.py").write_text(head + spec + plugin)
    (tmp_path / "late" / file).write_text("def build(spec): pass\n" * (file == "raises.py") + body)
    words = ["recipe=hello", "data={kind: synthetic, seq_len: 16}", "~data.blend", "~data.prepare", "launcher.ranks=1"]
    words += ["train={steps: 1, eval_every: 0, sample: null, loss: {kind: late}}", "optim.schedule.warmup_steps=0"]
    trained = start("train", *words, "--plugin", "./late", cwd=tmp_path)
    assert trained.returncode == 64, trained.stderr
    assert told in trained.stderr
    assert "Traceback" not in trained.stderr


def test_a_builder_that_can_not_be_read_is_refused_with_its_line(tmp_path, monkeypatch):
    (tmp_path / "halved.py").write_text("def build(spec):\n    return (\n")
    (tmp_path / "whole.py").write_text(
        IMPORTS.replace("{kind}", "mine") + "PLUGIN = Plugin(losses=(Kind(Sink, 'halved:build'),))"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(RecipeError, match=r"build=halved:build: can't be read: .*halved\.py:2: SyntaxError: '\(' was"):
        load([f"{tmp_path}/whole.py"])


def test_a_run_without_its_plugins_names_the_flag_that_finds_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "near").mkdir()
    (tmp_path / "beside.py").write_text("")
    with pytest.raises(RecipeError) as refused:
        demand({"plugins": ["beside", "elsewhere", "near"]}, "runs/x")
    assert "add --plugin ./beside.py --plugin elsewhere --plugin ./near, or their folders" in str(refused.value)
