"""Operations that torch.compile leaves whole, and that take little of the host's time.

torch.library.custom_op makes the same, with a formula for autograd to look for and a count of changes to memory, each
in Python at every call: 10 us of the host, 16 of one that writes to an argument, where this takes 5 and 3 (one core,
torch 2.13). A dense layer in fp8 calls twelve of them in a step. They are called in the passes of autograd.Functions,
which have no use for either.

Note "Caches". torch keeps what it has compiled on disk and finds it again by the code that it was made of. Of an
operation that is its name, so that code compiled for the strides that a fake told once would be taken for an operation
that makes others today. What files with fakes say is therefore a part of torch's key, by its `cache_key_tag`.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import get_library_allowing_overwrite
from torch._library.utils import _c_check_aliasing_constraint
from torch._ops import OpOverload

_libraries: dict[str, torch.library.Library] = {}
# Of each file with fakes; and what somebody else has put into the key.
_source_of_file: dict[str, str] = {}
_tag_of_others = torch.compiler.config.cache_key_tag


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

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        code = getattr(function, "__code__", None)
        if code is not None:
            _add_to_cache_key(code.co_filename)
        return torch.library.register_fake(name, function, lib=_libraries[name])

    return register


def _add_to_cache_key(file: str) -> None:
    """See note "Caches"."""
    if file in _source_of_file:
        return
    _source_of_file[file] = sha256(Path(file).read_bytes()).hexdigest()
    # wherever the files lie, and whichever is imported first
    of_all = "".join(sorted(_source_of_file.values()))
    torch.compiler.config.cache_key_tag = f"{_tag_of_others}megaspec {sha256(of_all.encode()).hexdigest()}"


def _refuse_gradient(name: str, args: Sequence[Any]) -> None:
    for one in args:
        if isinstance(one, Tensor) and one.requires_grad:
            raise RuntimeError(f"{name} has no gradient: call it in an autograd.Function, or within torch.no_grad")
