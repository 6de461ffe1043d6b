"""Weights & Biases. Imported only where a recipe asks for it: wandb is an optional package.

The API key is the package's own affair: `wandb login`, WANDB_API_KEY or ~/.netrc.
"""

import html
import secrets
from pathlib import Path

import wandb

from megaspec.core.regular_files import make_folder_inside
from megaspec.log.events import EvalDone, Event, RunEnded, Sampled
from megaspec.log.remote import logged_run, note_remote_run, remote_run, status_of
from megaspec.log.scalars import scalars
from megaspec.log.spec import WandbSpec

FOLDER = "wandb"
EXIT_CODES = {"finished": 0, "preempted": 75, "failed": 1}


class WandbSink:
    """A run of a project. Its steps are ours: of a step that is taken again after a kill the first numbers stay."""

    def __init__(self, spec: WandbSpec, run_dir: Path, step: int):
        run = logged_run(run_dir)
        place = f"wandb:{spec.entity or ''}/{spec.project}"
        known = remote_run(run_dir, place)
        # chosen here, so that it is known even if this process dies before the service has answered
        run_id = known.id or secrets.token_hex(8)
        if known.id is None:
            note_remote_run(run_dir, place, run_id)
        make_folder_inside(run_dir, FOLDER)
        self._status = "failed"
        self._resumed_at = step
        self._run = wandb.init(
            project=spec.project,
            entity=spec.entity,
            name=run.name,
            id=run_id,
            resume="allow",
            mode=spec.mode,
            dir=str(run_dir),
            # the run beside which its forks stand
            group=known.parent or run_id,
            reinit="create_new",
            settings=wandb.Settings(
                console="off",
                silent=True,
                symlink=False,
                save_code=False,
                disable_git=True,
                # a command line may hold secrets; environment.json has it without them
                x_disable_meta=True,
            ),
        )
        config = run.spec | {"parent_run": known.parent}
        self._run.config.update(config, allow_val_change=True)

    def __call__(self, event: Event) -> None:
        numbers = scalars(event)
        if numbers:
            self._run.log(numbers, step=self._row_of(event))
        match event:
            case Sampled():
                text = html.escape(event.prompt + event.text)
                self._run.log({"sample": wandb.Html(f"<pre>{text}</pre>")}, step=event.step)
            case RunEnded():
                self._status = status_of(event)

    def _row_of(self, event: Event) -> int:
        """The step that the numbers of an event are sent with.

        The service drops what comes with a step that it has already. So an evaluation that a resumed run makes up for,
        of the step that it goes on after, is sent with the next one.
        """
        if isinstance(event, EvalDone) and event.step == self._resumed_at:
            return max(event.step, self._run.step)
        return event.step

    def close(self) -> None:
        """Waits until the service has everything."""
        self._run.summary["status"] = self._status
        if self._status == "preempted":
            self._run.mark_preempting()
        self._run.finish(exit_code=EXIT_CODES[self._status])
