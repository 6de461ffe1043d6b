"""Conditions of a recipe on the numbers of a run, and what happens when one holds. Torch-free.

Rank 0 looks, since it alone has all numbers. An alert is raised once, when its condition has held for as long as it has
to, and again when it has not held meanwhile.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

from megaspec.log.events import AlertRaised, Emit, EvalDone, Event, StepDone
from megaspec.log.scalars import scalars
from megaspec.log.spec import AlertSpec

_NO_NUMBERS = ("step", "steps")
OF_EVALUATIONS = ("eval/loss", "eval/seconds")


def known_metrics() -> list[str]:
    """What an alert may look at, besides the losses of evaluation sets: `eval/NAME/loss`."""
    of_steps = [one.name for one in fields(StepDone) if one.name not in _NO_NUMBERS]
    return [*of_steps, *OF_EVALUATIONS]


@dataclass
class _Watched:
    alert: AlertSpec
    number: int
    streak: int = 0
    is_raised: bool = False

    def takes(self, step: int, value: float) -> AlertRaised | None:
        """An alert, when this value makes it one."""
        if self.alert.comparison == "above":
            holds = value > self.alert.value
        else:
            holds = value < self.alert.value
        if not holds:
            self.streak = 0
            self.is_raised = False
            return None
        self.streak += 1
        if self.streak < self.alert.for_steps or self.is_raised:
            return None
        self.is_raised = True
        return AlertRaised(
            step=step,
            alert=self.number,
            metric=self.alert.metric,
            comparison=self.alert.comparison,
            limit=self.alert.value,
            value=value,
            for_steps=self.alert.for_steps,
            severity=self.alert.severity,
            action=self.alert.action,
        )


@dataclass
class Alerts:
    """Takes events, hands them on, and adds an event for each alert that is raised. `stop`: asks the run to stop, with
    the reason."""

    alerts: Sequence[AlertSpec]
    emit: Emit
    stop: Callable[[str], object]
    _watched: list[_Watched] = field(init=False)

    def __post_init__(self) -> None:
        self._watched = [_Watched(alert, number) for number, alert in enumerate(self.alerts)]

    def __call__(self, event: Event) -> None:
        self.emit(event)
        if not self._watched or not isinstance(event, (StepDone, EvalDone)):
            return
        numbers = scalars(event)
        for watched in self._watched:
            value = numbers.get(watched.alert.metric)
            if value is None:
                continue
            raised = watched.takes(event.step, value)
            if raised is None:
                continue
            self.emit(raised)
            if raised.action == "stop":
                self.stop(alert_text(raised))


def alert_text(event: AlertRaised) -> str:
    """`critical: loss=9.31 was above 8 for 20 steps (log.alerts.0)`."""
    held = f" for {event.for_steps} in a row" if event.for_steps > 1 else ""
    what = f"{event.metric}={event.value:.6g} was {event.comparison} {event.limit:.6g}{held}"
    return f"{event.severity}: {what} (log.alerts.{event.alert})"
