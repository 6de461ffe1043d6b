"""Operations that torch.compile leaves whole, and that take little of the host's time.

torch.library.custom_op makes the same, with a formula for autograd to look for and a count of changes to memory, each
in Python at every call: 10 us of the host, 16 of one that writes to an argument, where this takes 5 and 3 (one core,
torch 2.13). A dense layer in fp8 calls twelve of them in a step. They are called in the passes of autograd.Functions,
which have no use for either.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import get_library_allowing_overwrite
from torch._library.utils import _c_check_aliasing_constraint
from torch._ops import OpOverload

_libraries: dict[str, torch.library.Library] = {}


def operation(name: str, *, mutates_args: Sequence[str] = ()) -> Callable[[Callable[..., Any]], OpOverload]:
    """Makes an operation of a function whose arguments have types; `name`: with its namespace.

    `mutates_args`: arguments that it writes to, without any that a backward pass keeps. It returns none of its
    arguments, and nothing that shares memory with one. It has no gradient: RuntimeError where one is asked for.
    """

    def register(function: Callable[..., Any]) -> OpOverload:
        namespace, _, short = name.partition("::")

        # what it computes is nothing to compile, also where it is called outside of what is compiled
        @torch.compiler.disable
        def run(*args: Any) -> Any:
            if torch.is_grad_enabled():
                _refuse_gradient(name, args)
            result = function(*args)
            if result is not None:
                # the compiler gives memory of arguments to others
                _c_check_aliasing_constraint(name, args, {}, result)
            return result

        # planted bugs import all of the project once more
        library = get_library_allowing_overwrite(namespace, short)
        schema = torch.library.infer_schema(function, mutates_args=mutates_args)
        library.define(short + schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(short, run, "CompositeExplicitAutograd")
        _libraries[name] = library
        return getattr(getattr(torch.ops, namespace), short).default

    return register


def fake_of(one: OpOverload) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Tells the compiler of what shapes and formats an operation's results are."""
    name = one.name()
    return torch.library.register_fake(name, lib=_libraries[name])


def _refuse_gradient(name: str, args: Sequence[Any]) -> None:
    for one in args:
        if isinstance(one, Tensor) and one.requires_grad:
            raise RuntimeError(f"{name} has no gradient: call it in an autograd.Function, or within torch.no_grad")
