"""What a run reports, and where."""

from typing import Annotated, Literal

from pydantic import Field

from megaspec.core.frozen import Auto, Frozen, PositiveFloat, PositiveInt
from megaspec.core.kinds import Kinds

SINK_KINDS = Kinds()
# W&B and Trackio take these; a slash would be part of a path there.
ServiceName = Annotated[str, Field(pattern=r"^[^/\\#?%:\x00-\x1f]{1,128}$")]


class WandbSpec(Frozen):
    """Weights & Biases, with the extra `wandb`. Its key comes from `wandb login` or WANDB_API_KEY, never from here."""

    kind: Literal["wandb"]
    project: ServiceName = "megaspec"
    """Where the run is listed, under the run's name."""
    entity: ServiceName | None = None
    """User or team; null: the default of whose key it is."""
    mode: Literal["online", "offline"] = "online"
    """offline: files in the run's folder, which `wandb sync` sends later."""


class MlflowSpec(Frozen):
    """MLflow, with the extra `mlflow`. User, password and token come from MLflow's own variables, never from here."""

    kind: Literal["mlflow"]
    experiment: Annotated[str, Field(min_length=1, max_length=256)] = "megaspec"
    """Where the run is listed, under the run's name."""
    tracking_uri: str | None = None
    """`https://HOST`, or `sqlite:///FILE`; null: a database in the run's folder, offline."""


class TrackioSpec(Frozen):
    """Trackio, with the extra `trackio`. The token for a Space comes from `hf auth login` or HF_TOKEN."""

    kind: Literal["trackio"]
    project: ServiceName = "megaspec"
    """Where the run is listed."""
    folder: str | None = None
    """Of Trackio's databases, which several runs may share; null: one in the run's folder."""
    space: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")] | None = None
    """`user/space` on Hugging Face that shows the run; null: offline."""


class AlertSpec(Frozen):
    """A condition on a number of the run, and what happens when it holds."""

    metric: str
    """A number of a step, or of an evaluation, as metrics.jsonl and the curves call it: loss, grad_norm, eval/loss."""
    comparison: Literal["above", "below"]
    value: float
    """In the metric's unit."""
    for_steps: PositiveInt = 1
    """So many steps in a row, or evaluations, it has to hold: one that stands out is no alert."""
    severity: Literal["info", "warning", "critical"] = "warning"
    """What whoever is told makes of it."""
    action: Literal["log", "webhook", "stop"] = "log"
    """log: a line on the console and in metrics.jsonl. webhook: that, and log.webhook is told. stop: both, where there
    is a webhook, and the run saves and ends with exit code 76."""


class WebhookSpec(Frozen):
    """An address that is told of events by HTTP POST, a JSON object each. It can't stop or delay a run."""

    url_variable: Annotated[str, Field(pattern=r"^[A-Z_][A-Z0-9_]{0,127}$")] = "MEGASPEC_WEBHOOK_URL"
    """The NAME of the environment variable that holds the address, which is a secret for most services."""
    events: tuple[
        Literal["alert", "slow", "hardware", "skip", "rollback", "eval", "checkpoint", "start", "end"], ...
    ] = ("alert", "slow", "hardware", "rollback", "end")
    """Which events of metrics.jsonl are sent. `alert`: those whose action says so."""
    timeout_seconds: PositiveFloat = 10.0
    """Of one try; there are three."""


class ReportSpec(Frozen):
    """The page of the run, kept up to date while it trains. It can't stop or delay a run."""

    every_seconds: PositiveFloat = 60.0
    """Between two times that rank 0 writes report.html, in a thread of its own; longer where a page takes more than a
    hundredth of that."""


class LogSpec(Frozen):
    """metrics.jsonl in the run folder is always written."""

    every: PositiveInt = 10
    """Steps between lines on the console."""
    console: Literal["live", "plain", "quiet"] = "live"
    """live: one line that is rewritten on a terminal, plain lines elsewhere."""
    tensorboard: Auto[bool] = "auto"
    """Write TensorBoard event files. auto: where tensorboard is installed."""
    sinks: tuple[Annotated[WandbSpec | MlflowSpec | TrackioSpec, SINK_KINDS], ...] = Field(
        (), exclude_if=lambda sinks: not sinks
    )
    """Services that the run is reported to, and sinks of plug-ins. None of them can stop or delay a run."""
    alerts: tuple[AlertSpec, ...] = Field((), exclude_if=lambda alerts: not alerts)
    """Conditions on the run's numbers, looked at after every step and evaluation."""
    webhook: WebhookSpec | None = Field(None, exclude_if=lambda webhook: webhook is None)
    """Who is told of alerts and of how the run ends; null: nobody."""
    report: ReportSpec | None = Field(None, exclude_if=lambda report: report is None)
    """report.html in the run folder while it trains; null: when `megaspec report RUN` asks for it."""
