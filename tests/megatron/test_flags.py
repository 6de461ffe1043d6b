"""The table of flags against Megatron's own parser, dumped at d98e8a64 (golden/megatron_flags.json)."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from megaspec.core.errors import RecipeError
from megaspec.core.problems import field_paths
from megaspec.megatron.command import read_command
from megaspec.megatron.flag import COMMIT, COMMIT_DATE, Fate
from megaspec.megatron.flags import BY_NAME, FLAGS, OTHERS, hint
from megaspec.megatron.silent import SILENT
from megaspec.recipe import SECTIONS, Recipe

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "megatron_flags.json").read_text())
PARSED = {tuple(one["flags"]): one for one in GOLDEN["flags"]}


def test_every_flag_has_one_entry():
    assert len(FLAGS) == len(PARSED) == 838
    assert {f.names for f in FLAGS} == set(PARSED)
    theirs = {name for names in PARSED for name in names}
    others = [name for flag in OTHERS for name in flag.names]
    assert len(others) == len(set(others)), "a flag of a fork stands twice"
    assert theirs.isdisjoint(others)
    assert BY_NAME.keys() == theirs | set(others)


def test_the_readme_counts_right():
    readme = " ".join((Path(__file__).parents[2] / "megaspec" / "megatron" / "README.md").read_text().split())
    fates = Counter(flag.fate for flag in FLAGS)
    for sentence in (
        f"All {len(FLAGS)} flags",
        f"{fates[Fate.TRANSLATED]} are translated, {fates[Fate.DEAD]} are parsed and read nowhere",
        f"{fates[Fate.REMOVED]} are refused by it",
        f"{len(OTHERS)} more flags, of older releases and of forks",
        f"({len(SILENT)} kinds of change",
        f"at commit {COMMIT[:8]} ({COMMIT_DATE})",
    ):
        assert sentence in readme, sentence


def test_the_table_is_of_the_commit_that_it_names():
    assert GOLDEN["source"].split("@ ")[1].split()[0] == COMMIT[:8]


def test_flags_take_as_many_values_as_there():
    for flag in FLAGS:
        takes = PARSED[flag.names]["nargs"]
        ours = 0 if flag.type is None else flag.many or None
        assert ours == ("+" if takes == 3 else takes), flag.name


@pytest.mark.parametrize("flag", [f for f in FLAGS if f.fate is Fate.TRANSLATED], ids=lambda f: f.name)
def test_translated_flags_have_the_choices_and_defaults_of_there(flag):
    parsed = PARSED[flag.names]
    if flag.type is None or flag.name == "--split":  # whose default is set later, where no other source of data is
        return
    default = parsed["default"].strip("[]'") if parsed["default"] != "None" else None
    shown = flag.default_value[0] if flag.many and flag.default else flag.default_value
    assert shown == (None if default is None else flag.read(default))
    choices = set(parsed["choices"].strip("[]()").replace("'", "").replace(" ", "").split(",")) - {""}
    if choices and flag.type != "text":
        assert set(flag.type.split("|")) == choices


def test_lost_flags_have_the_defaults_of_there():
    # None there: the first becomes single, the second leaves positions as they are, as 1 does
    odd = {"--dataloader-type", "--rotary-seq-len-interpolation-factor"}
    for flag in FLAGS:
        if flag.fate is Fate.LOST and flag.default is not None and flag.name not in odd:
            assert flag.default == PARSED[flag.names]["default"], flag.name


def test_fates_say_what_becomes_of_a_flag():
    keys = {*field_paths(Recipe), *SECTIONS}
    for flag in FLAGS:
        assert flag.text, flag.name
        if flag.fate is Fate.TRANSLATED:
            assert flag.text in keys, flag.name
        elif flag.fate in (Fate.DETAIL, Fate.REMOVED):
            assert flag.text in BY_NAME, flag.name
    assert Counter(f.fate for f in FLAGS)[Fate.DEAD] == 47


# Each is no flag of Megatron's; the nearest one by spelling says the opposite.
@pytest.mark.parametrize(
    ("name", "opposite"),
    [
        ("--masked-softmax-fusion", "--no-masked-softmax-fusion"),
        ("--rope-fusion", "--no-rope-fusion"),
        ("--bias-linear", "--disable-bias-linear"),
        ("--enable-bias-linear", "--disable-bias-linear"),
        ("--gloo-process-groups", "--disable-gloo-process-groups"),
        ("--no-swiglu", "--swiglu"),
        ("--no-overlap-grad-reduce", "--overlap-grad-reduce"),
        ("--disable-sequence-parallel", "--sequence-parallel"),
        ("--no-enable-msc", "--enable-msc"),
        ("--tie-embeddings-and-output-weights", "--untie-embeddings-and-output-weights"),
        ("--torch-fsdp2-reshard-after-forward", "--torch-fsdp2-no-reshard-after-forward"),
        ("--noswiglu", "--swiglu"),
        ("--dont-swiglu", "--swiglu"),
        ("--swiglu-off", "--swiglu"),
        ("--never-swiglu", "--swiglu"),
        ("--skip-overlap-grad-reduce", "--overlap-grad-reduce"),
        ("--persistent-ckpt-type", "--non-persistent-ckpt-type"),
    ],
)
def test_a_hint_is_never_the_opposite(name, opposite):
    assert opposite in BY_NAME
    assert opposite not in re.findall(r"--[\w-]+", hint(name))
    with pytest.raises(RecipeError) as caught:
        read_command([name])
    assert opposite not in str(caught.value).removeprefix(name)


def test_no_flag_is_answered_with_its_opposite():
    """With and without the words that deny, every flag of Megatron's that has none of its own."""
    for name in (name for flag in FLAGS for name in flag.names):
        words = name.removeprefix("--").split("-")
        denied = words[0] in ("no", "disable")
        other = "--" + "-".join(words[1:] if denied else ["no", *words])
        if other not in BY_NAME:
            assert name not in re.findall(r"--[\w-]+", hint(other)), other


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("--disble-bias-linear", "--disable-bias-linear"),
        ("--no-rope-fuson", "--no-rope-fusion"),
        ("--untie-embedings-and-output-weights", "--untie-embeddings-and-output-weights"),
        ("--num_layers", "--num-layers"),
        ("--tensor-parallel-size", "--tensor-model-parallel-size"),
    ],
)
def test_a_hint_is_the_flag_that_is_meant(misspelt, meant):
    assert meant in re.findall(r"--[\w-]+", hint(misspelt))


@pytest.mark.parametrize(
    "name",
    [
        "--deepspeed",
        "--zero-stage",
        "--pp-size",
        "--skip-bias",
        "--load-rng",
        "--rms-norm",
        "--tied-embeddings",
        "--use",
    ],
)
def test_a_flag_that_is_not_near_is_no_hint(name):
    assert hint(name) == ""


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("--num_layers", "did you mean --num-layers?"),
        ("--NUM-LAYERS", "did you mean --num-layers?"),
        ("--hidden", "did you mean --hidden-size or --hidden-dropout?"),
        ("--micro-batch", "did you mean --micro-batch-size or --eval-micro-batch-size?"),
    ],
)
def test_the_nearest_flag_alone_where_it_is_plain(name, answer):
    assert hint(name) == answer
