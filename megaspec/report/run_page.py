"""The page of one run. Torch-free."""

import time
from typing import Any

from megaspec.core.units import GIB, MIB
from megaspec.report.chart import Chart, Curve, Level, Mark, Points, bars
from megaspec.report.folder import RunFolder
from megaspec.report.history import known_number
from megaspec.report.html import Child, Html, card, element, escaped, joined, newest, page, table, tile
from megaspec.report.words import (
    at_time,
    beside_plan,
    in_bytes,
    in_figures,
    in_percent,
    in_seconds,
    in_words,
)

# Rows of a table, and sets of an evaluation that have a curve each.
MOST_ROWS = 100
MOST_CURVES = 16
MOST_DECISIONS = 300
MOST_RECIPE = 60_000
"""Characters of the recipe that are shown."""
PHASES = {
    "seconds": "whole step",
    "forward_backward_seconds": "forward and backward",
    "reduce_gradients_seconds": "reduce gradients",
    "optimizer_seconds": "optimizer",
    "data_seconds": "waiting for data",
}
"""By key of a step: what it is called."""
SUMMARY = {
    "model": "model",
    "sequence length": "data.seq_len",
    "sequences of a step": "train.global_batch",
    "micro batch": "train.micro_batch",
    "steps": "train.steps",
    "ranks": "world_size",
    "layout": "parallelism",
    "precision": "precision",
    "optimizer": "optim",
    "seed": "train.seed",
}
"""What of a recipe is seen at once, and where it stands; of a section its plain values."""


def run_page(run: RunFolder, *, seconds_until_reload: int = 0) -> str:
    """The page of a run that has been read."""
    return page(
        f"{run.name} · run",
        *_head(run),
        element("div", *_charts(run), class_="charts"),
        _memory(run),
        _evaluations(run),
        _checkpoints(run),
        _starts(run),
        _attempts(run),
        _findings(run),
        _pace(run),
        _profile(run),
        _samples(run),
        _recipe(run),
        _machine(run),
        seconds_until_reload=seconds_until_reload,
    )


def state_of(run: RunFolder) -> tuple[str, str]:
    """How it stands with a run, in words, and the class that colours it."""
    ended = run.history.ended
    if ended == "done":
        return "done", "done"
    if ended == "Preempted":
        return "stopped and saved; resume goes on", "interrupted"
    code = run.exit.code if run.exit is not None else None
    if ended is not None:
        what = f"ended with {ended}"
        if code is not None and run.exit is not None:
            what += f" (exit code {code}: {run.exit.meaning})"
        return what, "failed"
    if code is not None and run.exit is not None:
        return f"exit code {code}: {run.exit.meaning}", "done" if code == 0 else "failed"
    if not run.history.is_there:
        return "not begun", "waiting"
    return "under way, or ended without a word", "running"


def note(troubles: list[str]) -> Html | None:
    """What could not be read, where there is anything."""
    if not troubles:
        return None
    return element("div", element("ul", *[element("li", trouble) for trouble in troubles]), class_="note")


def _head(run: RunFolder) -> list[Child]:
    history = run.history
    steps = history.steps
    state, css = state_of(run)
    last = steps.steps[-1] if steps.steps else 0
    loss = steps.last("loss")
    speed = steps.usual("tokens_per_second")
    mfu = steps.usual("mfu_causal")
    tiles = [tile(f"{last:,} / {history.n_steps:,}", "steps"), tile(in_figures(loss), "loss of the last step")]
    evaluations = history.rows("eval")
    if evaluations:
        tiles.append(tile(in_figures(evaluations[-1].get("loss")), "evaluation loss"))
    text = "tokens/s, median"
    if run.planned_tokens_per_second is not None:
        text += f", {beside_plan(speed, run.planned_tokens_per_second)} beside the plan"
    tiles.append(tile(in_figures(speed), text))
    if mfu is not None:
        text = "MFU, median"
        if run.planned_mfu is not None:
            text += f", planned {in_percent(run.planned_mfu)}"
        tiles.append(tile(in_percent(mfu), text))
    tiles.append(tile(in_bytes(steps.most("memory_bytes")), "most memory of rank 0"))
    tiles.append(tile(run.n_restarts, "times started again"))
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    return [
        element("h1", run.name),
        element(
            "div",
            element("span", state, class_=f"state {css}"),
            f" · written {written} UTC · last line {at_time(history.last_time)} UTC · ",
            element("bdi", element("code", str(run.path))),
            class_="soft",
        ),
        note(run.troubles),
        element("div", *tiles, class_="tiles"),
    ]


def marks_of(run: RunFolder) -> list[Mark]:
    """Where the run was started again or went back."""
    found = []
    for event in run.history.rows("start")[1:]:
        found.append(Mark(event["step"], f"started again, attempt {in_words(event.get('attempt'))}"))
    for event in run.history.rows("rollback"):
        found.append(Mark(event["step"], f"went back from step {in_words(event.get('from_step'))}"))
    return found


def evaluation_curves(run: RunFolder) -> dict[str, Points]:
    """By name of a set its losses; `evaluation` is the mean of several sets."""
    curves: dict[str, list[tuple[int, float]]] = {"evaluation": []}
    for event in run.history.rows("eval"):
        losses = {"evaluation": event.get("loss")}
        sets = event.get("sets")
        if isinstance(sets, dict) and len(sets) > 1:
            losses |= {f"evaluation: {name}": loss for name, loss in sets.items()}
        for name, loss in losses.items():
            number = known_number(loss)
            if number is not None:
                curves.setdefault(name, []).append((event["step"], number))
    return {name: points for name, points in curves.items() if points}


def _charts(run: RunFolder) -> list[Html]:
    steps = run.history.steps
    marks = marks_of(run)
    losses = [Curve("training", steps.curve("loss"))]
    of_sets = evaluation_curves(run)
    for name, points in list(of_sets.items())[:MOST_CURVES]:
        losses.append(Curve(name, points, has_dots=True))
    left_out = None
    if len(of_sets) > MOST_CURVES:
        left_out = element("p", f"{len(of_sets) - MOST_CURVES:,} more sets stand in the table", class_="soft")
    charts = [
        card("Loss, nats", Chart(losses, in_figures, marks=marks).drawn(), left_out),
        card("Gradient norm", Chart([Curve("of the whole gradient", steps.curve("grad_norm"))], in_figures).drawn()),
    ]
    planned = run.planned_tokens_per_second
    levels = [] if planned is None else [Level("planned", planned)]
    curve = Curve("measured", steps.curve("tokens_per_second"))
    speeds = Chart([curve], in_figures, levels=levels, marks=marks, from_zero=True)
    charts.append(card("Tokens per second, all ranks", speeds.drawn(), _why_no_plan(run)))
    planned = run.planned_mfu
    levels = [] if planned is None else [Level("planned", planned)]
    mfu = steps.curve("mfu_causal")
    drawn: Child = Chart([Curve("measured", mfu)], in_percent, levels=levels, from_zero=True).drawn()
    if not mfu:
        drawn = element("p", _why_no_mfu(run), class_="soft")
    charts.append(card("Model FLOPs utilisation", drawn))
    phases = [Curve(name, steps.curve(key)) for key, name in PHASES.items() if steps.usual(key) is not None]
    levels = [] if run.planned_seconds is None else [Level("planned step", run.planned_seconds)]
    charts.append(
        card("Time of a step by phase, rank 0", Chart(phases, in_seconds, levels=levels, from_zero=True).drawn())
    )
    charts.append(
        card("Learning rate", Chart([Curve("of the step", steps.curve("lr"))], in_figures, from_zero=True).drawn())
    )
    return charts


def _why_no_plan(run: RunFolder) -> Html | None:
    if run.planned_tokens_per_second is not None or run.prediction is None:
        return None
    why = run.prediction.no_step_seconds or "the plan tells no time"
    return element("p", f"no plan to compare with: {why}", class_="soft")


def _why_no_mfu(run: RunFolder) -> str:
    if run.prediction is not None and run.prediction.no_peak:
        return f"not known: {run.prediction.no_peak}"
    return "no numbers yet"


def _memory(run: RunFolder) -> Html:
    steps = run.history.steps
    curve = Curve("held by rank 0", steps.curve("memory_bytes"))
    planned = []
    levels = []
    if run.prediction is not None:
        for number, stage in enumerate(run.prediction.memory):
            planned.append((f"planned, stage {number}", {kind: float(size) for kind, size in stage.items()}))
        levels = [Level("planned for its stage", sum(planned[0][1].values()))]
    most = steps.most("memory_bytes")
    rows = planned[:MOST_ROWS]
    measured: dict[str, float] = {}
    if most is not None:
        measured = _measured_memory(run, most)
        rows = [*rows, ("rank 0, measured", measured)]
    told = None
    if run.setting("device") == "cpu":
        told = element("p", "on a CPU rank 0's whole process is measured, its libraries included", class_="soft")
    kinds: list[str] = []
    for _, parts in rows:
        kinds += [kind for kind in parts if kind not in kinds]
    numbers: list[list[Child]] = []
    for name, parts in rows:
        cells = [in_bytes(parts[kind]) if kind in parts else "" for kind in kinds]
        numbers.append([name, *cells, in_bytes(sum(parts.values()))])
    whole: Child = None
    if planned and numbers:
        whole = table(["", *[kind.replace("_", " ") for kind in kinds], "total"], numbers)
    unit = GIB
    if most is not None and most < GIB:
        unit = MIB
    by_step = Chart([curve], in_bytes, levels=levels, from_zero=True, unit=unit).drawn()
    drawn = element("div", element("div", by_step), element("div", bars(rows, in_bytes)), class_="charts")
    return card("Memory", drawn, told, whole)


def _measured_memory(run: RunFolder, most: float) -> dict[str, float]:
    """Bytes of rank 0 by what they are for: what its tensors take between steps, and what was beside them when most was
    held; in one where a run of an earlier version told no more."""
    told = run.history.rows("memory")
    held: dict[str, float] = {}
    if told:
        for kind in ("weights", "gradients", "optimizer"):
            size = known_number(told[-1].get(kind))
            if size is not None and size >= 0:
                held[kind] = size
    rest = most - sum(held.values())
    if not held or rest < 0:
        return {"measured, all kinds": most}
    return held | {"measured beside them": rest}


def _evaluations(run: RunFolder) -> Child:
    rows: list[list[Child]] = []
    for event in run.history.rows("eval"):
        sets = event.get("sets")
        tokens = event.get("tokens")
        if not isinstance(sets, dict):
            sets = {}
        if not isinstance(tokens, dict):
            tokens = {}
        each = [f"{name} {in_figures(loss)} ({in_figures(tokens.get(name))} tokens)" for name, loss in sets.items()]
        rows.append([event["step"], in_figures(event.get("loss")), in_seconds(event.get("seconds")), "; ".join(each)])
    return _listed("Evaluation", ["step", "loss", "took", "by set:"], rows, run.history.count["eval"])


def _checkpoints(run: RunFolder) -> Child:
    rows: list[list[Child]] = []
    for event in run.history.rows("checkpoint"):
        is_kept = "yes" if event["step"] in run.kept_steps else "no"
        rows.append(
            [
                event["step"],
                at_time(event.get("time")),
                in_seconds(event.get("seconds")),
                in_seconds(event.get("stall_seconds")),
                is_kept,
                in_words(event.get("path")),
            ]
        )
    titles = ["step", "published, UTC", "took", "training stood still", "still there", "path:"]
    return _listed("Checkpoints", titles, rows, run.history.count["checkpoint"])


def _starts(run: RunFolder) -> Child:
    ends = {}
    for event in run.history.rows("end"):
        ends[event["order"]] = event
    rows: list[list[Child]] = []
    starts = run.history.rows("start")
    for number, event in enumerate(starts):
        until = starts[number + 1]["order"] if number + 1 < len(starts) else None
        end = None
        for order, one in ends.items():
            if order > event["order"] and (until is None or order < until):
                end = one
        how = "no end was written: killed, or under way"
        last: Child = None
        if end is not None:
            how = in_words(end.get("how"))
            last = end["step"]
        rows.append(
            [
                in_words(event.get("attempt")),
                at_time(event.get("time")),
                event["step"],
                last,
                in_words(event.get("world_size")),
                how,
                in_words(event.get("why")),
            ]
        )
    titles = ["attempt", "started, UTC", "from step", "to step", "ranks", "ended:", "because:"]
    return _listed("Starts", titles, rows, run.history.count["start"])


def _attempts(run: RunFolder) -> Child:
    rows: list[list[Child]] = []
    for attempt in run.attempts:
        start = attempt.start
        row: list[Child] = [start.attempt, in_words(start.host), in_words(start.devices), in_words(start.why)]
        if attempt.end is None:
            row += [None, None, None, None, None, "no end was written", None, None]
        else:
            end = attempt.end
            row += [in_words(end.code), in_words(end.world_size), in_words(end.from_step), in_words(end.step)]
            row += [in_words(end.saved), in_words(end.reason), in_words(end.layout), in_words(end.next)]
        rows.append(row)
    titles = ["attempt", "host:", "devices:", "follows:", "code", "ranks", "from", "to step", "saved", "ended:"]
    return _listed("Attempts of the supervisor", [*titles, "layout:", "then:"], rows, len(rows))


def _findings(run: RunFolder) -> Child:
    """Stragglers, alerts, what was skipped or taken back, suspected hardware: in the order of the file."""
    found: list[tuple[int, list[Child]]] = []
    for kind, (name, told) in FINDINGS.items():
        for event in run.history.rows(kind):
            found.append((event["order"], [event["step"], at_time(event.get("time")), name, told(event)]))
    found.sort(key=lambda one: one[0])
    count = sum(run.history.count[kind] for kind in FINDINGS)
    if not count:
        return card("Stragglers, alerts, skips", element("p", "none", class_="soft"))
    titles = ["step", "time, UTC", "what:", "details:"]
    return _listed("Stragglers, alerts, skips", titles, [row for _, row in found], count)


def _slow(event: dict[str, Any]) -> str:
    where = f"rank {in_words(event.get('rank'))} on {in_words(event.get('host'))}, {in_words(event.get('device'))}"
    loses = f"loses {in_seconds(event.get('seconds'))} in {in_words(event.get('phase'))}"
    usual = f"which takes others {in_seconds(event.get('usual_seconds'))}"
    return f"{where} {loses}, {usual}; {in_percent(event.get('share'))} of a step"


def _alert(event: dict[str, Any]) -> str:
    value = f"{in_words(event.get('metric'))}={in_figures(event.get('value'))}"
    limit = f"{in_words(event.get('comparison'))} {in_figures(event.get('limit'))}"
    how = f"{in_words(event.get('severity'))}, action {in_words(event.get('action'))}"
    return f"{how}: {value} was {limit} for {in_words(event.get('for_steps'))} in a row"


def _skip(event: dict[str, Any]) -> str:
    numbers = f"loss {in_figures(event.get('loss'))}, gradient norm {in_figures(event.get('grad_norm'))}"
    budget = (
        f"{in_words(event.get('recent'))} of {in_words(event.get('allowed'))} within {in_words(event.get('within'))}"
    )
    return f"{in_words(event.get('kind'))}: {numbers}; first in {in_words(event.get('where'))}; {budget} steps"


def _rollback(event: dict[str, Any]) -> str:
    went = f"from step {in_words(event.get('from_step'))}, without the data of steps"
    steps = f"{in_words(event.get('first_left_out'))} to {in_words(event.get('last_left_out'))}"
    why = f"{in_words(event.get('kind'))} in {in_words(event.get('where'))}"
    return f"{went} {steps}: {why}; {in_words(event.get('rollbacks'))} of {in_words(event.get('allowed'))} times"


def _left_out(event: dict[str, Any]) -> str:
    return f"{in_words(event.get('samples'))} sequences from {in_words(event.get('first_sample'))} on"


def _hardware(event: dict[str, Any]) -> str:
    who = f"ranks {in_words(event.get('ranks'))} on {in_words(event.get('hosts'))}, {in_words(event.get('devices'))}"
    where = f"seen in {in_words(event.get('tensors'))}; certain: {in_words(event.get('is_certain'))}"
    return f"{in_words(event.get('what'))}: {who}; {where}; at step {in_words(event.get('agreed_step'))} all agreed"


FINDINGS = {
    "slow": ("straggler", _slow),
    "alert": ("alert", _alert),
    "skip": ("update skipped", _skip),
    "rollback": ("went back", _rollback),
    "left_out": ("data left out", _left_out),
    "hardware": ("suspected hardware", _hardware),
}
"""By event: what it is called, and what is told of it."""


def _pace(run: RunFolder) -> Child:
    events = run.history.rows("pace")
    if not events or not isinstance(events[-1].get("phases"), dict):
        return None
    rows: list[list[Child]] = []
    for phase, one in events[-1]["phases"].items():
        if not isinstance(one, dict):
            continue
        median = in_seconds(one.get("median"))
        rows.append([in_words(phase), median, in_seconds(one.get("slowest")), in_words(one.get("rank"))])
    title = f"Ranks beside each other, last measured at step {events[-1]['step']:,}"
    return card(title, table(["phase", "median of ranks", "slowest", "which is rank"], rows))


def _profile(run: RunFolder) -> Child:
    events = run.history.rows("profile")
    if not events or not isinstance(events[-1].get("kinds"), dict):
        return None
    event = events[-1]
    first = known_number(event.get("first_step"))
    steps = event["step"] - first + 1 if first is not None else 1
    rows: list[list[Child]] = []
    for kind, one in event["kinds"].items():
        if not isinstance(one, dict):
            continue
        seconds = known_number(one.get("seconds"))
        each = seconds / steps if seconds is not None and steps > 0 else None
        planned = known_number(one.get("planned_seconds"))
        rows.append([in_words(kind), in_seconds(each), in_seconds(planned), beside_plan(each, planned)])
    title = f"Where the time of a step went, rank {in_words(event.get('rank'))}, until step {event['step']:,}"
    told = None
    if event.get("no_plan"):
        told = element("p", f"no plan to compare with: {in_words(event.get('no_plan'))}", class_="soft")
    return card(title, table(["kind", "measured", "planned", "beside the plan"], rows), told)


def _samples(run: RunFolder) -> Child:
    events = run.history.rows("sample")
    if not events:
        return None
    shown = []
    for event in events[-5:]:
        said = escaped(in_words(event.get("prompt")), keep="\n")
        text = escaped(in_words(event.get("text")), keep="\n")
        what = element("div", f"after step {event['step']:,}", class_="soft")
        shown.append(joined(what, element("pre", element("b", said), text)))
    return card("What the model writes", *shown)


def _recipe(run: RunFolder) -> Html:
    rows: list[list[Child]] = []
    for name, path in SUMMARY.items():
        value = run.setting(path)
        if isinstance(value, dict):
            value = {key: one for key, one in value.items() if one is not None and not isinstance(one, dict | list)}
        rows.append([name, in_words(value)])
    decided: list[list[Child]] = []
    for one in run.decisions():
        decided.append([in_words(one.get("key")), in_words(one.get("value")), in_words(one.get("reason"))])
    lines = "\n".join(f"{key}: {in_words(value)}" for key, value in run.settings().items())
    whole = element(
        "details",
        element("summary", "every setting"),
        element("pre", escaped(lines, keep="\n", most=MOST_RECIPE), class_="mono"),
    )
    reasons = element(
        "details",
        element("summary", f"{len(decided):,} settings were decided for this run, and why"),
        table(["key:", "value:", "reason:"], decided[:MOST_DECISIONS]),
        _and_more(len(decided) - MOST_DECISIONS),
    )
    return card("Recipe", table(["", "value:"], rows), reasons, whole)


def _and_more(count: int) -> Html | None:
    if count <= 0:
        return None
    return element("p", f"and {count:,} more", class_="soft")


def _machine(run: RunFolder) -> Child:
    if not run.environment:
        return None
    rows: list[list[Child]] = []
    for name in ("platform", "python", "cores", "gpus", "versions", "source", "command"):
        value = run.environment.get(name)
        if name == "command" and isinstance(value, list):
            value = " ".join(in_words(one) for one in value)
        rows.append([name, in_words(value)])
    return card("Machine and versions", table(["", "value:"], rows))


def _listed(title: str, titles: list[str], rows: list[list[Child]], count: int) -> Child:
    """A table of the newest rows; nothing where there are none. `count`: how many there were in all."""
    if not rows:
        return None
    shown, told = newest(rows, MOST_ROWS, count)
    return card(title, table(titles, shown, words=0), told)
