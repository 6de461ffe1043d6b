"""What Megatron-core asks of CUDA, answered on a CPU: enough to see that mcore_rows.py trains over several ranks."""

from typing import Any

import torch


class _Anything:
    """A stream or an event: whatever is asked of it is done."""

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: None


def stand_in_for_cuda() -> None:
    """From now on Megatron-core finds a device that is a CPU, nothing to wait for, and torch's random numbers."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_stream = lambda *_: _Anything()
    torch.cuda.manual_seed = lambda *_: None
    for module in (torch.cuda, torch.cuda.random):
        module.set_rng_state = lambda *_, **__: None
        module.get_rng_state = lambda *_, **__: torch.get_rng_state()
    for name in ("zeros", "ones", "tensor", "empty"):
        _put_on_the_cpu(name)
    of_tensor = torch.Tensor.type

    def type_of(tensor: torch.Tensor, *words: Any, **more: Any) -> Any:
        found = of_tensor(tensor, *words, **more)
        # optimizers take parameters by this name alone
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    torch.Tensor.type = type_of


def _put_on_the_cpu(name: str) -> None:
    """Tensors that torch's function of this name is asked to make on a GPU."""
    made = getattr(torch, name)

    def make(*words: Any, device: Any = None, **more: Any) -> torch.Tensor:
        if device is not None and torch.device(device).type == "cuda":
            device = "cpu"
        return made(*words, device=device, **more)

    setattr(torch, name, make)
