"""TensorBoard event files. Imported only where they are asked for: tensorboard is an optional package."""

import secrets
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from megaspec.core.regular_files import make_folder_inside
from megaspec.log.events import Event, Sampled
from megaspec.log.scalars import scalars


class TensorboardSink:
    """Scalars and samples in `folder`. `step`: where the run goes on; TensorBoard hides what came after it before."""

    def __init__(self, folder: Path, *, step: int):
        make_folder_inside(folder.parent, folder.name)
        # a name that can't be foreseen: TensorBoard follows a link that lies where it makes its file
        self._writer = SummaryWriter(str(folder), purge_step=step + 1, filename_suffix=f".{secrets.token_hex(8)}")

    def __call__(self, event: Event) -> None:
        for name, value in scalars(event).items():
            self._writer.add_scalar(name, value, event.step)
        if isinstance(event, Sampled):
            self._writer.add_text("sample", event.prompt + event.text, event.step)

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()
