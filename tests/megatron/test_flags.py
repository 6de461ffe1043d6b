"""The table of flags against Megatron's own parser, dumped at d98e8a64 (golden/megatron_flags.json)."""

import json
from collections import Counter
from pathlib import Path

import pytest

from megaspec.core.problems import field_paths
from megaspec.megatron.flag import Fate
from megaspec.megatron.flags import BY_NAME, FLAGS
from megaspec.recipe import SECTIONS, Recipe

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "megatron_flags.json").read_text())["flags"]
PARSED = {tuple(one["flags"]): one for one in GOLDEN}


def test_every_flag_has_one_entry():
    assert len(FLAGS) == len(PARSED) == 838
    assert {f.names for f in FLAGS} == set(PARSED)
    assert len(BY_NAME) == sum(len(names) for names in PARSED)


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
    odd = {"--dataloader-type"}  # None there, which becomes single
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
