"""A pickle read as data: its opcodes are followed, and nothing that it names is imported or called.

What a pickle would have made by a call is a `Made`, which says what was to be called with what. Names come from a
whitelist (pickled_names.py); any other name is an error. Only the opcodes that torch and pickle write under protocols 2
to 5 are known. A value may stand in several places and in itself, as in any pickle: whoever walks one has to end.
"""

import struct
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from megaspec.core.errors import CheckpointError
from megaspec.core.problems import show
from megaspec.megatron.pickled_names import is_known_name

MOST_BYTES = 1 << 29
MOST_OPCODES = 40_000_000
MOST_DEPTH = 1000
"""Open marks: a pickle opens one for each container around a value."""
MOST_STACK = 1_000_000
_MOST_INTEGER_BYTES = 256
# A name of a module or a class, of which the longest in Megatron have 90 characters.
_MOST_NAME_BYTES = 500


@dataclass(frozen=True)
class Global:
    """A function or class that a pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Made:
    """What a pickle would make by a call."""

    function: Global | None
    """None: what it says is to be called was itself to be made."""
    arguments: tuple[Any, ...]
    state: Any = None
    """What it would be given behind the call."""
    items: list[Any] = field(default_factory=list)
    """What it would be given by append."""
    pairs: dict[Any, Any] = field(default_factory=dict)
    """What it would be given by item assignment: an OrderedDict's entries."""


@dataclass(frozen=True)
class Persistent:
    """What lies outside of the pickle: torch's storages."""

    id: Any


def read_pickle(data: bytes, where: str) -> Any:
    """The value of a pickle. CheckpointError: it is damaged, too large, or says what no checkpoint says."""
    if len(data) > MOST_BYTES:
        raise CheckpointError(f"{where}: a pickle of {len(data):,} bytes, expected at most {MOST_BYTES:,}")
    return _Reading(data, where).value()


class _Reading:
    def __init__(self, data: bytes, where: str):
        self._data = data
        self._where = where
        self._at = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def value(self) -> Any:
        if self._take(1) != b"\x80":
            self._refuse("it doesn't begin as a pickle of protocol 2 or later")
        protocol = self._take(1)[0]
        if not 2 <= protocol <= 5:
            self._refuse(f"protocol {protocol}, expected 2 to 5")
        for _ in range(MOST_OPCODES):
            code = self._take(1)
            if code == b".":
                return self._result()
            step = _STEPS.get(code)
            if step is None:
                self._refuse(f"opcode {code!r}, which no checkpoint of Megatron's has")
            step(self)
        return self._refuse(f"more than {MOST_OPCODES:,} opcodes")

    def _result(self) -> Any:
        value = self._pop()
        if self._stack or self._marks or self._at != len(self._data):
            self._refuse("there is more behind its end")
        return value

    def _refuse(self, what: str) -> Any:
        raise CheckpointError(f"{self._where}: no pickle that can be read: {what} (at byte {self._at:,})")

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if count < 0 or end > len(self._data):
            self._refuse("it is cut off")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def _number(self, layout: str) -> Any:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))[0]

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at, self._at + _MOST_NAME_BYTES)
        if end < 0:
            self._refuse("a name without an end")
        line = self._take(end + 1 - self._at)[:-1]
        return self._text(line)

    def _text(self, content: bytes) -> str:
        try:
            return content.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return self._refuse("a text that is no UTF-8")

    def _push(self, value: Any) -> None:
        if len(self._stack) >= MOST_STACK:
            self._refuse(f"more than {MOST_STACK:,} values side by side")
        self._stack.append(value)

    def _pop(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            self._refuse("a value is missing")
        return self._stack.pop()

    def _top(self) -> Any:
        value = self._pop()
        self._stack.append(value)
        return value

    def _since_mark(self) -> list[Any]:
        if not self._marks:
            self._refuse("a container without a beginning")
        begin = self._marks.pop()
        values = self._stack[begin:]
        del self._stack[begin:]
        return values

    # --- opcodes, by what they do

    def frame(self) -> None:
        if self._number("<Q") > len(self._data) - self._at:
            self._refuse("it is cut off")

    def mark(self) -> None:
        if len(self._marks) >= MOST_DEPTH:
            self._refuse(f"more than {MOST_DEPTH:,} containers in each other")
        self._marks.append(len(self._stack))

    def pop(self) -> None:
        self._pop()

    def pop_mark(self) -> None:
        self._since_mark()

    def get(self, layout: str) -> None:
        number = self._number(layout)
        if number not in self._memo:
            self._refuse(f"entry {number} of its memo, which nothing was put into")
        self._push(self._memo[number])

    def put(self, layout: str) -> None:
        # as many entries as opcodes at most
        self._memo[self._number(layout)] = self._top()

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._top()

    def integer(self, size_layout: str) -> None:
        size = self._number(size_layout)
        if not 0 <= size <= _MOST_INTEGER_BYTES:
            self._refuse(f"a number of {size:,} bytes")
        self._push(int.from_bytes(self._take(size), "little", signed=True))

    def text(self, size_layout: str) -> None:
        self._push(self._text(self._take(self._number(size_layout))))

    def bytes(self, size_layout: str) -> None:
        self._push(self._take(self._number(size_layout)))

    def tuple(self, count: int) -> None:
        values = [self._pop() for _ in range(count)]
        self._push(tuple(reversed(values)))

    def tuple_since_mark(self) -> None:
        self._push(tuple(self._since_mark()))

    def append(self) -> None:
        value = self._pop()
        self._extend([value])

    def appends(self) -> None:
        self._extend(self._since_mark())

    def _extend(self, values: list[Any]) -> None:
        target = self._top()
        if isinstance(target, Made):
            target.items.extend(values)
        elif isinstance(target, list):
            target.extend(values)
        else:
            self._refuse(f"entries for a {type(target).__name__}")

    def set_item(self) -> None:
        value = self._pop()
        key = self._pop()
        self._update([key, value])

    def set_items(self) -> None:
        self._update(self._since_mark())

    def _update(self, keys_and_values: list[Any]) -> None:
        target = self._top()
        if isinstance(target, Made):
            target = target.pairs
        if not isinstance(target, dict) or len(keys_and_values) % 2:
            self._refuse(f"keys and values for a {type(target).__name__}")
        for key, value in zip(keys_and_values[::2], keys_and_values[1::2], strict=True):
            target[self._key(key)] = value

    def _key(self, key: Any) -> Hashable:
        """What checkpoints have for keys: tuples only of plain values, so that a hash ends."""
        parts = key if type(key) is tuple else (key,)
        for part in parts:
            if not isinstance(part, str | int | float | bytes | Global | Made | None):
                self._refuse(f"a {type(part).__name__} in a key")
        return key

    def add_items(self) -> None:
        # a set's, which nothing is read of
        self._since_mark()
        if type(self._top()) is not set:
            self._refuse("members for what is no set")

    def frozen_set(self) -> None:
        self._since_mark()
        self._push(frozenset())

    def global_of_lines(self) -> None:
        module = self._line()
        self._push(self._named(module, self._line()))

    def global_of_stack(self) -> None:
        name = self._pop()
        module = self._pop()
        self._push(self._named(module, name))

    def _named(self, module: Any, name: Any) -> Global:
        if type(module) is not str or type(name) is not str:
            self._refuse("a name that is no text")
        if not is_known_name(module, name):
            found = show(f"{module}.{name}")
            self._refuse(f"it names {found}, which no checkpoint of Megatron's needs")
        return Global(module, name)

    def reduce(self) -> None:
        arguments = self._pop()
        function = self._pop()
        self._make(function, arguments)

    def new_object(self) -> None:
        arguments = self._pop()
        self._make(self._pop(), arguments)

    def new_object_with_keywords(self) -> None:
        keywords = self._pop()
        arguments = self._pop()
        self._make(self._pop(), arguments)
        self._top().state = keywords

    def _make(self, function: Any, arguments: Any) -> None:
        if type(arguments) is not tuple:
            self._refuse("a call without arguments")
        if isinstance(function, Global):
            self._push(Made(function, arguments))
        elif isinstance(function, Made):
            self._push(Made(None, arguments))
        else:
            self._refuse(f"a call of a {type(function).__name__}")

    def build(self) -> None:
        state = self._pop()
        target = self._top()
        if not isinstance(target, Made):
            self._refuse(f"a state for a {type(target).__name__}")
        target.state = state

    def persistent(self) -> None:
        self._push(Persistent(self._pop()))

    def push_float(self) -> None:
        self._push(self._number(">d"))


def _pushes(make: Callable[[], Any]) -> Callable[[_Reading], None]:
    return lambda reading: reading._push(make())


def _numbers(layout: str) -> Callable[[_Reading], None]:
    return lambda reading: reading._push(reading._number(layout))


_STEPS: dict[bytes, Callable[[_Reading], Any]] = {
    b"\x95": _Reading.frame,
    b"(": _Reading.mark,
    b"0": _Reading.pop,
    b"1": _Reading.pop_mark,
    b"h": lambda reading: reading.get("<B"),
    b"j": lambda reading: reading.get("<I"),
    b"q": lambda reading: reading.put("<B"),
    b"r": lambda reading: reading.put("<I"),
    b"\x94": _Reading.memoize,
    b"N": _pushes(lambda: None),
    b"\x88": _pushes(lambda: True),
    b"\x89": _pushes(lambda: False),
    b"K": _numbers("<B"),
    b"M": _numbers("<H"),
    b"J": _numbers("<i"),
    b"G": _Reading.push_float,
    b"\x8a": lambda reading: reading.integer("<B"),
    b"\x8b": lambda reading: reading.integer("<i"),
    b"\x8c": lambda reading: reading.text("<B"),
    b"X": lambda reading: reading.text("<I"),
    b"\x8d": lambda reading: reading.text("<Q"),
    b"C": lambda reading: reading.bytes("<B"),
    b"B": lambda reading: reading.bytes("<I"),
    b"\x8e": lambda reading: reading.bytes("<Q"),
    b"\x96": lambda reading: reading.bytes("<Q"),
    b")": _pushes(tuple),
    b"\x85": lambda reading: reading.tuple(1),
    b"\x86": lambda reading: reading.tuple(2),
    b"\x87": lambda reading: reading.tuple(3),
    b"t": _Reading.tuple_since_mark,
    b"]": _pushes(list),
    b"a": _Reading.append,
    b"e": _Reading.appends,
    b"}": _pushes(dict),
    b"s": _Reading.set_item,
    b"u": _Reading.set_items,
    b"\x8f": _pushes(set),
    b"\x90": _Reading.add_items,
    b"\x91": _Reading.frozen_set,
    b"c": _Reading.global_of_lines,
    b"\x93": _Reading.global_of_stack,
    b"R": _Reading.reduce,
    b"\x81": _Reading.new_object,
    b"\x92": _Reading.new_object_with_keywords,
    b"b": _Reading.build,
    b"Q": _Reading.persistent,
}
"""pickle's names for them: FRAME, MARK, POP, ... (pickletools)."""
