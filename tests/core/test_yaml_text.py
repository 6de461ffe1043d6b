"""Plain data written as YAML is read back as it was: by our reader (YAML 1.2) and by PyYAML's (1.1)."""

import random
import sys

import pytest
import yaml

from megaspec.core.marked_yaml import parse_yaml
from megaspec.core.yaml_text import flow, yaml_lines

# Texts that some reader takes for something else without quotes, or that end a line, a list or a comment early.
TEXTS = (
    *(
        "",
        " ",
        "~",
        "null",
        "true",
        "Yes",
        "on",
        "OFF",
        "auto",
        "1",
        "-1",
        "+1",
        "017",
        "0o17",
        "0x1F",
        "1_000",
        "1:30",
    ),
    *("1:30", "1e5", "1E5", "1e-05", "1.", ".5", "1.5", "-.inf", ".nan", "2026-12-01", "64k", "=", "<<", "---"),
    *("...", "- a"),
    *("a, b", "[a]", "{a: 1}", "a: b", "a:", "a #b", "# a", "#", "'", '"', "it's", "\\", "%a", "@a", "`a", "&a", "*a"),
    *("!a", "|", ">", "?", "? a", " a", "a ", "The ", "two\nlines", "tab\t", "\r", "\x00", "\x1b[2J", "\x85", "\u2028"),
    *("\u202e", "\ufeff", "ü", "語", "😀", "${", "a" * 300, "a b " * 60, "word-word.word/word_1"),
)
# A name of at most 100 letters (MAX_KEY), none that merges.
NAMES = [text for text in TEXTS if len(text) <= 100 and text != "<<"]
NUMBERS = (0, 1, -1, 10**18, 0.0, -0.0, 1.0, 0.1, 1e-05, 1e-8, 3e-4, 1e20, 1.5e300, 5e-324, 2 / 3, sys.float_info.max)
OTHERS = (None, True, False, [], {}, [[]], [{}])


def read(content, remark=None):
    text = "\n".join(yaml_lines(content, remark)) + "\n"
    ours = parse_yaml(text, label="x").content
    assert ours == yaml.safe_load(text), text
    return ours


def is_same(one, other):
    """Equal, and of the same types: 1 is not 1.0."""
    return repr(one) == repr(other)


@pytest.mark.parametrize("value", [*TEXTS, *NUMBERS, *OTHERS])
def test_a_value_comes_back(value):
    content = {"plain": value, "list": [value, 1], "sections": [{"first": value, "second": {"third": value}}, {}]}
    content["mapping"] = {"below": {"it": value}, "in brackets": [[value]]}
    assert is_same(read(content), content)
    assert is_same(read(content, lambda key: f"of {key}"), content)
    if value != "":
        assert is_same(read({"a": [{"b": 1}, value]}), {"a": [{"b": 1}, value]})


@pytest.mark.parametrize("name", NAMES)
def test_so_does_a_name(name):
    assert is_same(read({name: 1, "flow": [[{name: 2}]]}), {name: 1, "flow": [[{name: 2}]]})


def test_any_number_keeps_every_bit():
    drawn = random.Random(7)
    numbers = [drawn.uniform(-1, 1) * 10.0 ** drawn.randint(-300, 300) for _ in range(2000)]
    assert is_same(read({"numbers": numbers})["numbers"], numbers)


@pytest.mark.parametrize("text", TEXTS)
def test_one_line_that_a_terminal_only_shows(text):
    assert flow(text).isprintable()


def test_remarks_stand_behind_values():
    content = {"a": {"b": 1, "c": [1, 2]}, "d": [{"e": "x", "f": None}], "g": {}}
    lines = list(yaml_lines(content, lambda key: key))
    remarks = [line.partition("  # ")[2] for line in lines]
    assert remarks == ["", "a.b", "a.c", "", "d.0.e", "d.0.f", "g"]
    assert lines[4].startswith("  - e: x")
