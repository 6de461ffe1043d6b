"""AdamW's update, with states in 32 bits and in narrow formats."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from megaspec_kernels.adamw.formats import FORMATS, decoded, decoded_square, hashed, joined, split
from megaspec_kernels.adamw.reference import Moments, Step
from megaspec_kernels.bench import Bench, Held, Work, random
from megaspec_kernels.catalog import Use
from megaspec_kernels.gate import Results
from megaspec_kernels.registry import REGISTRY

# What every step is made with.
LR = 1e-2
DECAY = 0.1
BETA1 = 0.9
BETA2 = 0.95
EPS = 1e-8
STEPS = 3
# Formats of the two moments; the narrow ones go with bf16 weights and the 16 bits that they lack of fp32.
WIDE = ("fp32", "fp32")
NARROW = ("fp8", "fp16")
# Bytes that a step reads of each element and writes again: weight (with its master) and both moments, in each format.
_STATE_BYTES = {WIDE: 4 + 4 + 4, NARROW: (2 + 2) + 1 + 2}
# Bytes that it reads alone: the gradient.
_GRADIENT_BYTES = 4
# Bytes that it writes alone: a weight in bf16 beside its master in fp32.
_COPY_BYTES = 2


class State:
    """Weights, what is kept of their masters, and both moments."""

    def __init__(
        self,
        values: Sequence[Tensor],
        formats: tuple[str, str],
        wide: torch.dtype,
        *,
        weights: torch.dtype | None = None,
    ):
        """`weights`: their format beside masters in `wide`; None: they are the masters, or with narrow formats half."""
        self.wide = wide
        self.is_narrow = formats == NARROW
        self.weights: list[Tensor] = []
        self.masters: list[Tensor] = []
        for value in values:
            if self.is_narrow:
                weight, master = split(value.to(torch.float32))
            else:
                master = value.to(wide)
                weight = master if weights is None else master.to(weights)
            self.weights.append(weight)
            self.masters.append(master)
        self.first = self._moments(formats[0])
        self.second = self._moments(formats[1])
        device = values[0].device
        self.keys = hashed(torch.arange(len(values), device=device) * 77)
        self.updates = torch.zeros((), dtype=torch.int64, device=device)

    def _moments(self, name: str) -> Moments:
        form = FORMATS.get(name)
        dtype = self.wide if form is None else form.dtype
        values = [torch.zeros_like(weight, dtype=dtype) for weight in self.weights]
        zeros = torch.zeros(len(values), dtype=self.wide, device=values[0].device)
        return Moments(values, form, torch.ones_like(zeros), zeros)

    def update(self, kernel: Callable[..., None], gradients: Sequence[Tensor]) -> None:
        """One step."""
        ones = torch.ones((), dtype=self.wide, device=self.updates.device)
        step = Step(LR, DECAY, BETA1, BETA2, EPS, ones, torch.zeros_like(ones), self.updates)
        decays = [weight.dim() > 1 for weight in self.weights]
        kernel(self.weights, self.masters, self.first, self.second, gradients, decays, self.keys, step)
        self.updates = self.updates + 1

    def results(self) -> Results:
        """The masters and moments that are meant."""
        found: Results = {}
        second = self.second
        for i, (weight, master) in enumerate(zip(self.weights, self.masters, strict=True)):
            found[f"weight {i}"] = joined(weight, master) if self.is_narrow else master
            found[f"first {i}"] = decoded(self.first.values[i], self.first.scale[i], self.wide)
            found[f"second {i}"] = decoded_square(second.values[i], second.form, second.scale[i], self.wide)
        return found


def _by_torch(values: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]) -> Results:
    """The same steps by torch.optim.AdamW."""
    weights = [value.to(torch.float32).requires_grad_() for value in values]
    optimizer = torch_adamw(weights)
    for of_step in gradients:
        for weight, gradient in zip(weights, of_step, strict=True):
            weight.grad = gradient.to(torch.float32)
        optimizer.step()
    found: Results = {}
    for i, weight in enumerate(weights):
        found[f"weight {i}"] = weight.detach()
        found[f"first {i}"] = optimizer.state[weight]["exp_avg"]
        found[f"second {i}"] = optimizer.state[weight]["exp_avg_sq"]
    return found


def torch_adamw(weights: Sequence[Tensor]) -> torch.optim.Optimizer:
    """torch's optimizer, in which vectors have no weight decay."""
    matrices = [weight for weight in weights if weight.dim() > 1]
    vectors = [weight for weight in weights if weight.dim() == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}]
    if vectors:
        groups.append({"params": vectors, "weight_decay": 0.0})
    return REGISTRY["adamw"]["torch"](groups, lr=LR, betas=(BETA1, BETA2), eps=EPS, fused=True)


def _trained(kernel: Callable[..., None], state: State, gradients: Sequence[Sequence[Tensor]]) -> Results:
    """What is left after a step with each of the gradients."""
    for of_step in gradients:
        state.update(kernel, [gradient.to(state.wide) for gradient in of_step])
    return state.results()


def held(name: str, device: torch.device) -> Iterator[Held]:
    """Tensors of odd sizes, a vector without decay; three steps."""
    shapes = ((1,), (3, 5), (63, 33), (2049,))
    values = [random(*shape, seed=i, device=device) for i, shape in enumerate(shapes)]
    gradients: list[list[Tensor]] = []
    for step in range(STEPS):
        gradients.append([0.01 * random(*shape, seed=10 * step + i, device=device) for i, shape in enumerate(shapes)])
    plain = REGISTRY["adamw"]["reference"]
    truth = _trained(plain, State(values, WIDE, torch.float64), gradients)
    if name == "torch":
        expected = _trained(plain, State(values, WIDE, torch.float32), gradients)
        yield Held(_moments_in(WIDE), _by_torch(values, gradients), expected, truth)
        return
    for formats in (WIDE, NARROW):
        expected = _trained(plain, State(values, formats, torch.float32), gradients)
        found = _trained(REGISTRY["adamw"][name], State(values, formats, torch.float32), gradients)
        yield Held(_moments_in(formats), found, expected, truth)


def works(name: str, device: torch.device) -> Iterator[Work]:
    """A step over matrices: gradients in fp32 are read; weights, masters and moments read and written. And the same of
    weights in bf16, with gradients to be scaled, as a training step has it."""
    count, side = (16, 4096) if device.type == "cuda" else (2, 256)
    values = [0.02 * torch.randn(side, side, device=device) for _ in range(count)]
    gradients = [0.01 * torch.randn_like(value) for value in values]
    elements = count * side * side
    if name == "torch":
        weights = [value.requires_grad_() for value in values]
        optimizer = torch_adamw(weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        yield _work(optimizer.step, elements, WIDE)
        yield _work(torch_and_copy(optimizer, weights), elements, WIDE, copied=True)
        return
    for formats in (WIDE, NARROW):
        state = State(values, formats, torch.float32)
        yield _work(partial(state.update, REGISTRY["adamw"][name], gradients), elements, formats)
    state = State(values, WIDE, torch.float32, weights=torch.bfloat16)
    yield _work(partial(state.update, REGISTRY["adamw"][name], gradients), elements, WIDE, copied=True)


def torch_and_copy(optimizer: torch.optim.Optimizer, masters: Sequence[Tensor]) -> Callable[[], None]:
    """A step of torch's that divides the gradients, and the copy of masters into weights, as optim/adamw.py does it."""
    copies = [master.detach().to(torch.bfloat16) for master in masters]
    kept = [master.detach() for master in masters]
    device = masters[0].device

    def call() -> None:
        if device.type == "cuda":
            optimizer.grad_scale = torch.ones((), device=device)
            optimizer.found_inf = torch.zeros((), device=device)
        optimizer.step()
        torch._foreach_copy_(copies, kept)

    return call


def _work(call: Callable[[], object], elements: int, formats: tuple[str, str], *, copied: bool = False) -> Work:
    """A step, with the bytes that one pass has to move."""
    moved = (_GRADIENT_BYTES + 2 * _STATE_BYTES[formats] + _COPY_BYTES * copied) * elements
    weights = "bf16 weights" if copied else "weights"
    return Work(f"{elements / 1e6:,.1f} M {weights}, {_moments_in(formats)}", call, moved, "bytes")


def _moments_in(formats: tuple[str, str]) -> str:
    return f"moments in {' and '.join(formats)}"


def _use(name: str) -> Use:
    return Use(narrow_states=name != "torch")


BENCH = Bench(held, works, uses=_use)
