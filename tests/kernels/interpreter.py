"""A plugin of pytest for tests under TRITON_INTERPRET=1, `-p tests.kernels.interpreter`: the same in less time.

Triton's interpreter puts its own functions into the modules of the language that a kernel sees, and again at each call
of a function in it, into those that this function sees: a quarter of all its time. Here they are put into both modules
once a launch.

With `-p tests.kernels.drawn`, too, no sum of integers is asked whether it overflows, which is a third of what is left.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from triton import language
from triton.runtime import interpreter

_BOTH = SimpleNamespace(__globals__={"tl": language, "core": language.core})
_put_into = interpreter._patch_lang


def call_in_a_launch(self: interpreter.InterpretedFunction, *arguments: Any, **keywords: Any) -> Any:
    return self.rewrite()(*arguments, **keywords)


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.has_plugin("tests.kernels.drawn"):
        builder = interpreter.interpreter_builder
        builder.options = replace(builder.options, sanitize_overflow=False)


interpreter._patch_lang = lambda _kernel: _put_into(_BOTH)
interpreter.InterpretedFunction.__call__ = call_in_a_launch
