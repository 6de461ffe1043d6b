"""TensorBoard event files. Imported only where they are asked for: tensorboard is an optional package."""

import secrets
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from megaspec.core.regular_files import make_folder_inside
from megaspec.log.events import EvalDone, Event, RoutersDone, Sampled, StepDone


class TensorboardSink:
    """Scalars and samples in `folder`. `step`: where the run goes on; TensorBoard hides what came after it before."""

    def __init__(self, folder: Path, *, step: int):
        make_folder_inside(folder.parent, folder.name)
        # a name that can't be foreseen: TensorBoard follows a link that lies where it makes its file
        self._writer = SummaryWriter(str(folder), purge_step=step + 1, filename_suffix=f".{secrets.token_hex(8)}")

    def __call__(self, event: Event) -> None:
        match event:
            case StepDone():
                for name, value in _scalars(event).items():
                    if value is not None:
                        self._writer.add_scalar(name, value, event.step)
            case RoutersDone():
                for name, values in (
                    ("max_violation", event.max_violation),
                    ("drops", event.drops),
                    ("entropy", event.entropy),
                    *event.losses.items(),
                ):
                    for layer, value in zip(event.layers, values, strict=True):
                        self._writer.add_scalar(f"routers/{name}/{layer}", value, event.step)
            case EvalDone():
                self._writer.add_scalar("loss/valid", event.loss, event.step)
                for name, loss in event.sets.items():
                    # the share of the training data has no name beside that of the whole
                    if len(event.sets) > 1 or name != "valid":
                        self._writer.add_scalar(f"loss/valid/{name}", loss, event.step)
            case Sampled():
                self._writer.add_text("sample", event.prompt + event.text, event.step)

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()


def _scalars(event: StepDone) -> dict[str, float | None]:
    return {
        "loss/train": event.loss,
        "optim/lr": event.lr,
        "optim/grad_norm": event.grad_norm,
        "optim/loss_scale": event.loss_scale,
        "speed/tokens_per_second": event.sequence_tokens / event.seconds if event.seconds > 0 else None,
        "speed/memory_bytes": event.memory_bytes,
    }
