"""What holds of a linear layer in fp8, and below, whatever its casts are: what it adds up, casts once and keeps."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megaspec.nn.fp8 import Fp8Linear
from megaspec.nn.linear import Linear, WeightGradientQueue, WeightGradientSums
from tests.kernels.te import Fake


def hold_sums(layer: Linear, x: Tensor, grad: Tensor) -> Tensor:
    """Holds that weight gradients are added to a sum [O, I], at once and put off. -> the sum."""
    total = torch.full(layer.weight.shape, float("nan"))
    sums = WeightGradientSums()
    sums.connect(layer, total, lambda: None)
    layer(x).backward(grad)
    once = total.clone()
    layer(x).backward(grad)
    torch.testing.assert_close(total, 2 * once)
    # put off, as schedules of zero bubbles do: the same numbers
    queue = WeightGradientQueue()
    with sums.defer(queue):
        layer(x).backward(grad)
    torch.testing.assert_close(total, 2 * once)
    queue.run()
    torch.testing.assert_close(total, 3 * once)
    return total


def hold_sums_of_products(products: Sequence, total: Tensor) -> None:
    """Holds that of three products of weight gradients the first replaces what is in the sum, and all write there."""
    assert [call.accumulate for call in products] == [False, True, True]
    assert {call.out.data_ptr() for call in products} == {total.data_ptr()}


def hold_one_cast_of_a_weight(layer: Linear, fp8: Fp8Linear, fake: Fake, x: Tensor, grad: Tensor) -> None:
    """Holds that it is cast once for each version, and again once it was forgotten."""
    layer(x).backward(grad)
    first = len(fake.casts)
    assert first == 3
    layer(x).backward(grad)
    assert len(fake.casts) == first + 2
    fp8.shared.version += 1
    layer(x).backward(grad)
    assert len(fake.casts) == first + 2 + 3
    fp8.forget_weight()
    layer(x)
    assert len(fake.casts) == first + 2 + 3 + 2


def kept_by(layer: Linear, x: Tensor) -> list[Tensor]:
    """What waits for the backward pass, each memory once, but for the weight."""
    kept = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = layer(x)
    assert y.requires_grad
    return [one for one in kept.values() if one.data_ptr() != layer.weight.data_ptr()]
