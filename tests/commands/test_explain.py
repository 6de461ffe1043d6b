"""`megaspec explain`: keys with type, default, value and origin; rules; every other code."""

import ast
import re
import sys
from pathlib import Path

import pytest

from megaspec.cli import main
from megaspec.commands.codes import CODES
from megaspec.commands.explain import explain_key, explain_rule, first_sentence, read_by, refusal, rules_about, unit_of
from megaspec.compose.compose import compose
from megaspec.compose.search_path import SearchPath
from megaspec.core.document_lengths import LengthBin
from megaspec.core.errors import RecipeError
from megaspec.core.fields import ENTRY, NAME, FieldAt, fields_of, same_path
from megaspec.core.marked_yaml import parse_yaml
from megaspec.core.problems import field_paths
from megaspec.launcher.spec import ClaimVolume, Mount, Toleration
from megaspec.log.spec import AlertSpec
from megaspec.optim.spec import PieceSpec
from megaspec.recipe import Recipe
from megaspec.rules.examples import EXAMPLES
from megaspec.rules.table import RULES
from megaspec.train.spec import SkippedSteps

ROOT = Path(__file__).parents[2]
FIELDS = list(fields_of(Recipe))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def explain(capsys, *words):
    """heading -> texts."""
    assert main(["explain", *words]) == 0
    told = {}
    for line in capsys.readouterr().out.splitlines()[1:]:
        heading, _, text = line.strip().partition("  ")
        told.setdefault(heading, []).append(text.strip())
    return told


def field(path, when="") -> FieldAt:
    return next(f for f in FIELDS if f.path == path and when in f.when)


def test_a_key_in_a_recipe(capsys):
    told = explain(capsys, "optim.lr", "recipe=llama3_70b")
    assert told["means"] == ["Highest learning rate."]
    assert told["type"] == ["number above 0"]
    assert told["default"] == ["none: it must be set"]
    assert told["in llama3_70b"] == ["0.00015   (recipes/llama3_70b.yaml:7)"]
    assert [text.partition(":")[0] for text in told["rule"]] == [
        "lr-min",
        "lr-init",
        "pieces-highest",
        "pieces-end",
    ]


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["optim.lr", "recipe=hello", "optim.lr=1.0"], "1.0   (command line)"),
        (["optim.kind", "recipe=hello"], "adamw   (conf/optim/adamw.yaml:1)"),
        (["optim.beta1", "recipe=hello"], "0.9   (default)"),
        (["data.blend.0.prefix", "recipe=hello"], "data/hello   (recipes/hello.yaml:7)"),
        (["recipe=llama2_13b", "train.global_batch"], "1024   (recipes/llama2_7b.yaml:12)"),
        (
            ["parallelism.dp_shard", "recipe=gpt3_175b"],
            "4   (decided for 128 x H100: launcher.ranks / (pp · cp) = 16, / tp)",
        ),
        (["parallelism.tp", "recipe=hello", "launcher.ranks=3", "parallelism.tp=2"], "2   (command line)"),
        (["model.moe.layers", "recipe=mixtral_8x7b"], "null   (default)"),
    ],
)
def test_where_a_value_is_from(capsys, words, value):
    told = explain(capsys, *words)
    (heading,) = [h for h in told if h.startswith("in ")]
    assert told[heading] == [value]


def test_a_key_that_two_kinds_have_with_other_defaults(capsys):
    told = explain(capsys, "model.mlp.activation")
    whens = dict(zip(told["default"], told["when"], strict=True))
    assert whens["silu"].startswith("model.mlp.kind=gated")
    assert whens["gelu_tanh"].startswith("model.mlp.kind=plain")
    assert explain(capsys, "model.mlp.activation", "recipe=gpt2_124m")["default"] == ["gelu_tanh"]


def test_a_section_lists_its_keys_and_choices(capsys):
    told = explain(capsys, "optim")
    assert told["kind sgd"] == ["Stochastic gradient descent with momentum, decoupled weight decay."]
    assert list(told).index("kind sgd") == 1
    assert "kind" not in told
    assert told["lr"] == ["Highest learning rate"]
    (momentum,) = told["momentum"]
    assert momentum.startswith("Decay of the momentum; 0 keeps no state   [optim.kind=sgd")
    shipped = SearchPath().choices("optim")
    assert {"adamw", "muon", "sgd"} <= set(shipped)
    assert told["choices"] == [", ".join(f"optim={one}" for one in shipped)]
    assert explain(capsys, "optim.") == told
    assert explain(capsys, "data.blend")["prefix"] == ["Path or URL of the .bin and .idx files without their ending"]


def test_every_kind_of_a_section_has_one_line(capsys):
    headings = [heading for heading in explain(capsys, "model.positions") if heading.startswith("kind")]
    assert headings == ["kind rotary", "kind learned", "kind none"]
    told = explain(capsys, "optim.schedule")
    assert told["means"][-1] == "Learning rate over steps. All lengths are in optimizer steps, counted from first_step."
    assert told["kind"] == ["constant, linear, cosine, inverse_sqrt, wsd or piecewise"]


def test_keys_of_a_section_are_told_in_whole_sentences(capsys):
    assert explain(capsys, "parallelism")["dp_strategy"][0].endswith("share out (Rajbhandari et al. 2020)")
    for text, first in (
        ("One. Two.", "One"),
        ("auto: 1.5 of it. auto: that.", "auto: 1.5 of it"),
        ("As Smith et al. say (a. b). More.", "As Smith et al. say (a. b)"),
        ("No end", "No end"),
        ("", ""),
    ):
        assert first_sentence(text) == first
    for one in FIELDS:
        sentence = first_sentence(one.description)
        assert sentence.count("(") == sentence.count(")"), one.path


def test_types_in_words():
    assert field("train.steps").type_in_words.startswith("whole number above 0")
    assert field("parallelism.tp").type_in_words.endswith(" or auto")
    assert field("optim.beta1").type_in_words == "number at least 0 and below 1"
    assert field("optim.clip").type_in_words == "number above 0 or null"
    assert field("data.document_mask").type_in_words == "true or false"
    implementations = "sdpa, flex, cudnn, flash_attn, flash_attn_3, flash_attn_2, te, reference or auto"
    assert field("kernels.attention").type_in_words == implementations
    assert field("parallelism.context.factors").type_in_words.startswith("list of 2, each whole number above 0")
    assert field("model.moe").type_in_words == "section or null"
    assert field("name").type_in_words == "text"
    assert field("kernels.compile").literals == ("block", "none", "auto")
    assert field("log.tensorboard").literals == ("true", "false", "auto")


def test_fields_are_those_that_pydantic_knows():
    paths = {f.path for f in FIELDS}
    named = {path for path in paths if NAME in path.split(".")}
    entries = {path for path in paths - named if ENTRY in path.split(".")}
    assert set(field_paths(Recipe)) == paths - named - entries
    assert same_path("model.layer_types.NAME.positions", "model.layer_types.local.positions")
    assert {"model.layer_types.NAME", "model.layer_types.NAME.positions.base"} < named
    assert {"data.valid.NAME", "data.valid.NAME.blend.*.prefix", "data.valid.NAME.files"} < named
    assert not [path for path in named if path.count(NAME) > 1]
    assert {"log.sinks.*.kind", "log.sinks.*.project"} < entries
    assert {path for path in entries if not path.startswith("log.sinks.")} == {
        "data.blend.*.prefix",
        "data.blend.*.weight",
        *(f"data.document_lengths.*.{name}" for name in LengthBin.model_fields),
        "data.files.*.path",
        "data.files.*.weight",
        "init.rename.*.name",
        "init.rename.*.source",
        "model.moe.router.losses.*.kind",
        "model.moe.router.losses.*.coefficient",
        *(f"launcher.container.mounts.*.{name}" for name in Mount.model_fields),
        *(f"launcher.tolerations.*.{name}" for name in Toleration.model_fields),
        *(f"launcher.volumes.*.{name}" for name in ClaimVolume.model_fields),
        *(f"log.alerts.*.{name}" for name in AlertSpec.model_fields),
        *(f"optim.schedule.pieces.*.{name}" for name in PieceSpec.model_fields),
        *(f"train.skip_steps.*.{name}" for name in SkippedSteps.model_fields),
    }
    assert same_path("data.blend.*.prefix", "data.blend.12.prefix")
    assert not same_path("data.blend.*.prefix", "data.blend.x.prefix")
    assert same_path("data.valid.NAME.blend", "data.valid.web.blend")


@pytest.mark.parametrize(
    ("path", "unit"),
    [
        ("train.steps", "steps"),
        ("train.global_batch", "sequences"),
        ("data.seq_len", "tokens"),
        ("launcher.grace_seconds", "seconds"),
        ("parallelism.bucket_mb", "MB (10^6 bytes)"),
        ("optim.schedule.warmup_steps", "steps"),
        ("optim.lr", ""),
        ("train.seed", ""),
    ],
)
def test_units(path, unit):
    assert unit_of(field(path)) == unit


def test_every_key_can_be_explained():
    for path in dict.fromkeys(one.path for one in FIELDS):
        assert list(explain_key(path.replace(ENTRY, "0"), None)), path


@pytest.mark.parametrize("code", RULES)
def test_every_rule_can_be_explained(code):
    told = dict(explain_rule(code))
    assert told["rule"] == RULES[code].__doc__
    assert EXAMPLES[code].key in told["says"]
    assert told["wrong"].startswith("megaspec plan recipe=")
    assert told["mended"]
    assert read_by(code) <= {f.path for f in FIELDS}


def test_rules_are_found_by_what_they_read():
    assert "tp-heads" in rules_about("parallelism.tp")
    assert "tp-heads" in rules_about("model.n_heads")
    assert {"moe-sp", "moe-top-k"} <= set(rules_about("model.moe"))
    assert rules_about("train.seed") == rules_about("parallelism") == []
    for code, example in EXAMPLES.items():
        assert code in rules_about(example.key), code


def codes_in_sources():
    """Every code that a Problem is made with, read off the sources."""
    for path in (p for room in ("megaspec", "launchers") for p in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            given = [k.value for k in node.keywords if k.arg == "code"]
            given += node.args[3:4] if name == "Problem" else []
            given += node.args[-1:] if name in ("_refuse", "refuse") and len(node.args) >= 3 else []
            values = [one.value for one in given if isinstance(one, ast.Constant)]
            yield from (v for v in values if isinstance(v, str) and re.fullmatch(r"[a-z]+([.-][a-z-]+)*", v))


def test_every_code_is_known():
    found = set(codes_in_sources())
    assert len(found) > 40
    assert found - set(RULES) <= set(CODES), found - set(RULES) - set(CODES)
    assert not set(CODES) & set(RULES)


@pytest.mark.parametrize("code", [code for code, known in CODES.items() if known.words or known.yaml])
def test_the_example_of_a_code_is_refused_with_it(code):
    known = CODES[code]
    with pytest.raises(RecipeError) as caught:
        parse_yaml(known.yaml, label="x") if known.yaml else compose("hello", known.words)
    assert caught.value.problems[0].code == code
    assert refusal(known)


def test_a_code_in_words(capsys):
    told = explain(capsys, "key.unknown")
    assert told["says"] == ["optim.lrr=0.0003: lrr is no key when optim.kind=adamw; did you mean lr?   (command line)"]
    assert explain(capsys, "tp-heads")["rule"] == [RULES["tp-heads"].__doc__]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["optim.lrr"], "did you mean optim.lr"),
        (["warmup"], "did you mean optim.schedule.warmup_steps or train.numbers.spikes.warmup_steps?"),
        (["lr"], "did you mean optim.lr or optim.schedule.pieces.*.lr?"),
        (["tp-head"], "did you mean tp-heads"),
        (["qqqqqqq"], "sections are"),
        ([], "give one key or code"),
        (["optim.lr", "optim.lr=1"], "name one recipe"),
        (["optim.lr", "recipe=helo"], "did you mean hello?"),
    ],
)
def test_what_is_refused(capsys, words, text):
    assert main(["explain", *words]) == 64
    out, err = capsys.readouterr()
    assert text in err
    assert out == ""


def test_a_person_who_made_a_mistake_is_told_the_codes(capsys, monkeypatch):
    words = ["plan", "recipe=hello", "parallelism.tp=3", "optim.schedule.min_lr=1.0"]
    assert main(words) == 64
    assert "megaspec explain" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(words) == 64
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "more about it: megaspec explain tp-heads | tp-kv-heads | tp-ffn | lr-min"
