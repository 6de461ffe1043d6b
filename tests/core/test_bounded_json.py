import json

import pytest

from megaspec.core.bounded_json import MAX_DEPTH, parse_json


@pytest.mark.parametrize("content", [None, 7, "x", [], {}, {"a": [1, {"b": [2.5, True]}]}, [[]] * 3])
def test_json_is_read(content):
    assert parse_json(json.dumps(content).encode()) == content


def nested(depth: int, opening: str, closing: str) -> bytes:
    return (opening * depth + "1" + closing * depth).encode()


@pytest.mark.parametrize(("opening", "closing", "levels"), [("[", "]", 1), ('{"a":', "}", 1), ('[{"a":', "}]", 2)])
def test_depth_has_a_bound(opening, closing, levels):
    most = MAX_DEPTH // levels
    parse_json(nested(most, opening, closing))
    for depth in (most + 1, 900, 100_000):
        with pytest.raises(ValueError, match=f"nested deeper than {MAX_DEPTH}"):
            parse_json(nested(depth, opening, closing))


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"1 2", b"9" * 10_000])
def test_what_is_no_json_is_a_value_error(data):
    with pytest.raises(ValueError):  # noqa: PT011 json's own texts
        parse_json(data)
