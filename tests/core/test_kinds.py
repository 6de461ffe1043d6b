"""A union that plug-ins add to is read, told and listed like any other, and so is what was added late."""

import json
from typing import Annotated, Literal, Never

import pytest
from pydantic import ValidationError

from megaspec.core.fields import fields_of
from megaspec.core.frozen import Frozen
from megaspec.core.kinds import Kinds, annotation_of, is_open
from megaspec.core.problems import typed_problems


class One(Frozen):
    kind: Literal["one"] = "one"
    sizes: tuple[int, ...] = ()


class Two(Frozen):
    kind: Literal["two"]
    inner: One = One()


class Late(Frozen):
    kind: Literal["late"]
    sizes: tuple[float, ...]
    inner: Two | None = None


SEVERAL, SINGLE, EMPTY = Kinds(), Kinds(), Kinds()


class Whole(Frozen):
    several: Annotated[One | Two, SEVERAL] = One()
    single: Annotated[One, SINGLE] | None = None
    entries: tuple[Annotated[Never, EMPTY], ...] = ()


@pytest.fixture(params=[False, True], ids=["ours", "added"])
def is_added(request, monkeypatch):
    """Whether another class has come; afterwards it is gone."""
    for kinds in (SEVERAL, SINGLE, EMPTY):
        monkeypatch.setattr(kinds, "_added", ())
        monkeypatch.setattr(kinds, "_adapter", None)
        if request.param:
            kinds.add(Late)
    return request.param


def read(**content) -> Whole:
    return Whole.model_validate_json(json.dumps(content))


def told(content: dict) -> list[str]:
    with pytest.raises(ValidationError) as refused:
        read(**content)
    return [p.message for p in typed_problems(refused.value, model=Whole, content=content, origins={}, choices={})]


def test_values_are_read_and_written_alike(is_added):
    late = {"kind": "late", "sizes": [1.5, 2.0], "inner": {"kind": "two", "inner": {"kind": "one", "sizes": [3]}}}
    content = {"several": {"kind": "two", "inner": {"kind": "one", "sizes": [1, 2]}}, "single": None, "entries": []}
    assert read(**content).several == Two(kind="two", inner=One(sizes=(1, 2)))
    if is_added:
        content |= {"single": late, "entries": [late, late]}
        assert read(**content).entries[1].inner.inner.sizes == (3,)
    made = read(**content)
    assert json.loads(made.model_dump_json()) == content
    assert Whole.model_validate(made.model_dump()) == made
    assert Whole(several=made.several, single=made.single, entries=made.entries) == made


def test_errors_are_those_of_a_plain_union(is_added):
    names = "one, two or late" if is_added else "one or two"
    assert told({"several": {"kind": "twi"}}) == [
        f"several.kind=twi must be {names}; did you mean two? --plugin PACKAGE adds kinds"
    ]
    assert told({"several": {"kind": "x"}}) == [f"several.kind=x must be {names}; --plugin PACKAGE adds kinds"]
    assert told({"several": {"kind": "two", "inner": {"sizes": ["a"]}}})[0].startswith("several.inner.sizes.0=a must")
    assert (
        "sizez is no key when several.kind=one; did you mean sizes?"
        in told({"several": {"kind": "one", "sizez": 1}})[0]
    )
    assert told({"several": {}})[0].startswith("several.kind is missing")
    assert told({"several": 1}) == ["several=1 must be a section (a mapping of keys to values)"]
    ours = "one or late" if is_added else "one"
    assert told({"single": {"kind": "x"}}) == [f"single.kind=x must be {ours}; --plugin PACKAGE adds kinds"]


def test_errors_where_megaspec_has_no_kind(is_added):
    rule = "late" if is_added else "a plug-in's"
    text = f"entries.0.kind=x must be {rule}; --plugin PACKAGE adds kinds"
    assert told({"entries": [{"kind": "x", "sizes": []}]})[0] == text
    assert told({"entries": [{"a": 1}]})[0].startswith("entries.0")
    assert told({"entries": [1]}) == ["entries.0=1 must be a section (a mapping of keys to values)"]


def test_the_alternatives_are_listed(is_added):
    added = ["late"] if is_added else []
    kinds = [word for field in fields_of(Whole) if field.path == "several.kind" for word in field.literals]
    assert kinds == ["one", "two", *added]
    entries = [word for field in fields_of(Whole) if field.path == "entries.*.kind" for word in field.literals]
    assert entries == added
    schema = Whole.model_json_schema()
    assert ("Late" in schema["$defs"]) == is_added
    references = [option["$ref"] for option in schema["properties"]["several"]["oneOf"]]
    assert references == ["#/$defs/One", "#/$defs/Two", *(["#/$defs/Late"] if is_added else [])]


def test_what_is_open():
    fields = Whole.model_fields
    assert is_open(annotation_of(fields["several"]))
    assert is_open(annotation_of(fields["single"]))
    assert not is_open(One.model_fields["kind"].annotation)
