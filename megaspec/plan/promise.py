"""What holds of the numbers of a run that was stopped and goes on."""

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


def promise_of_change(old: Spec, new: Spec) -> str:
    """Of a run that goes on as `new`."""
    keys = [change.key for change in differences(old, new)]
    moved = [key for key in keys if any(key == one or key.startswith(f"{one}.") for one in _ORDERS_SUMS)]
    if not moved:
        return promise(new)
    more = f" and {len(moved) - 1} more" if len(moved) > 1 else ""
    return f"goes on with {_SAME_STATE}: {moved[0]}{more} changed"
