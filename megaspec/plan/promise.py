"""What holds of the numbers of a run that was stopped and goes on."""

from collections.abc import Sequence

from megaspec.rules.difference import differences
from megaspec.spec import Spec

# Whoever changes one of these has sums taken in another order.
_ORDERS_SUMS = ("parallelism", "kernels", "device", "train.micro_batch", "train.deterministic", "model.vocab_pad_to")
_SAME_STATE = "the same data, weights and optimizer state, sums in another order from then on"


def promise(spec: Spec) -> str:
    """Of a run that goes on as it was."""
    if spec.device == "cuda" and not spec.train.deterministic:
        return f"goes on with {_SAME_STATE}: numbers drift apart; train.deterministic=true goes on to the bit"
    return "goes on to the bit as if it had never stopped, on the same layout, machine and versions"


def promise_of_change(old: Spec, new: Spec, gone: Sequence[str] = ()) -> str:
    """Of a run that goes on as `new`. `gone`: keys of what its version had and this one does not, whatever `old` says
    there."""
    changes = [change.key for change in differences(old, new)]
    reordering = [key for key in dict.fromkeys((*changes, *gone)) if _orders_sums(key)]
    if not reordering:
        return promise(new)
    changed = reordering[0]
    if len(reordering) > 1:
        changed += f" and {len(reordering) - 1} more"
    return f"goes on with {_SAME_STATE}: {changed} changed"


def _orders_sums(key: str) -> bool:
    """Whether a path is one of those, or lies below one."""
    return any(key == path or key.startswith(f"{path}.") for path in _ORDERS_SUMS)
