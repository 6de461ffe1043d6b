"""YAML as data: scalars without surprises, a line for every value, and bounds."""

import time

import pytest

from megaspec.core.errors import RecipeError
from megaspec.core.marked_yaml import MAX_BYTES, Quoted, parse_yaml, read_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-3", -3),
        ("131_072", 131072),
        ("1e-4", 1e-4),
        ("1e6", 1e6),
        (".5", 0.5),
        ("1.", 1.0),
        ("500_000.0", 5e5),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        # what YAML 1.1 turns into truth values, octal, base 60 and dates
        ("on", "on"),
        ("no", "no"),
        ("017", "017"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("0x10", "0x10"),
        ("'3'", Quoted("3")),
        ('"true"', Quoted("true")),
        ("=", "="),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_scalars(text, value):
    found = parse_yaml(f"a: {text}", label="x").content["a"]
    assert found == value
    assert type(found) is type(value)


def test_every_value_has_its_line():
    marked = parse_yaml("a: 1\nb:\n  c:\n    - 2\n    - {d: 3}\n\ne: [4,\n  5]\n", label="x")
    assert marked.content == {"a": 1, "b": {"c": [2, {"d": 3}]}, "e": [4, 5]}
    assert marked.lines == {
        "a": 1,
        "b": 2,
        "b.c": 3,
        "b.c.0": 4,
        "b.c.1": 5,
        "b.c.1.d": 5,
        "e": 7,
        "e.0": 7,
        "e.1": 8,
    }


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nb: 2\na: 3", 3, "a is set twice, first in line 1"),
        ("a: {b: 1, b: 2}", 1, "b is set twice"),
        ("a: !!python/object/apply:os.system [true]", 1, "a recipe is data"),
        ("a: !x 1", 1, "a recipe is data"),
        ("x: &x {a: 1}\ny:\n  <<: *x", 3, "defaults"),
        ("a: &a [*a]", 1, "holds itself"),
        ("a: *b", 1, "has no anchor"),
        ("? [a]\n: 1", 1, "a key is plain text"),
        ("a: 1\n---\nb: 2", 2, "one document"),
        ("a: [1, 2", 1, "not valid YAML"),
        ("a: b: c", 1, "not valid YAML"),
        ("- 1", 1, "a recipe is a mapping"),
        ("[" * 100_000, 1, "nested deeper"),
    ],
)
def test_refused_with_file_and_line(text, line, words):
    with pytest.raises(RecipeError, match=r"mine\.yaml") as caught:
        parse_yaml(text, label="mine.yaml")
    assert words in str(caught.value)
    assert f"mine.yaml:{line})" in str(caught.value)


def test_aliases_are_values_and_a_bomb_is_bounded():
    assert parse_yaml("a: &x [1]\nb: *x", label="x").content == {"a": [1], "b": [1]}
    bomb = "a0: &a0 [1,1,1,1,1,1,1,1,1]\n"
    bomb += "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))
    start = time.perf_counter()
    with pytest.raises(RecipeError, match="more than 10000 values"):
        parse_yaml(bomb, label="x")
    assert time.perf_counter() - start < 2


def test_files_are_bounded_and_utf8(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_bytes(b"a: \xff")
    with pytest.raises(RecipeError, match=r"x\.yaml is not UTF-8: byte 3 is 0xff"):
        read_yaml(file, label="x.yaml")
    file.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(RecipeError, match="larger than"):
        read_yaml(file, label="x.yaml")
    with pytest.raises(RecipeError, match="can't be read: No such file"):
        read_yaml(tmp_path / "none.yaml", label="none.yaml")
    file.write_bytes(b"")
    assert read_yaml(file, label="x.yaml").content == {}
