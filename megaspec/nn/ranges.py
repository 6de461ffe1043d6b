"""Names for stretches of the host's program, by which a profile knows what the operations in them are for.

The name stands in a profile as an operation around those that it holds. Without a profiler a range costs the host half
a microsecond, where torch.profiler.record_function takes ten.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch._C._profiler import _RecordFunctionFast


def marked(name: str) -> AbstractContextManager[object]:
    """A range of that name, see range_names.py. Nothing in what torch.compile traces: operations of compiled code are
    known by their own names."""
    if torch.compiler.is_compiling():
        return nullcontext()
    return _RecordFunctionFast(name)
