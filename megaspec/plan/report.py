"""A plan in words and small tables that are readable on 80 columns."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from megaspec.core.axes import DENSE_AXES, EXPERT_AXES
from megaspec.core.problems import in_a_shell, one_of, show
from megaspec.core.terminal import escape
from megaspec.core.units import bytes_in_words, seconds_in_words
from megaspec.estimate.ceilings import ceilings_of
from megaspec.estimate.hardware import LEFT_FREE, hardware_of
from megaspec.estimate.target import Target
from megaspec.plan.plan import Fit, Group, Message, Plan, RankView, make_plan
from megaspec.resolve.fill import PLAIN
from megaspec.search.tune import SEARCHED
from megaspec.spec import Decision, Spec

_BAR = 40
_MOST_STAGES = 8
# A degree or strategy that was decided to be one of these leaves things as they are: those are told in a line.
_PLAIN = ("1", "false", "none", "replicate")

Lines = Iterator[tuple[str, str]]


def print_plan(spec: Spec, target: Target, console: Console) -> None:
    """The first screen of a plan, before `train`: mesh, batch, memory, time, and what was decided for the user."""
    hardware = hardware_of(target) if spec.device == "cuda" else None
    plan = make_plan(spec, target, hardware=hardware, ceilings=hardware and ceilings_of(hardware))
    _print_lines(_run(plan), console)
    _print_lines(_model(plan), console)
    _print_lines(_mesh(plan), console)
    _print_lines(_batch(plan), console)
    _print_lines(_memory_in_short(plan), console)
    _print_lines(_speed_in_short(plan), console)
    _print_hints(plan, console)
    _print_decisions(plan, console)


def print_whole_plan(plan: Plan, console: Console) -> None:
    """Everything."""
    _print_lines(_run(plan), console)
    _print_lines(_about(plan), console)
    _print_lines(_model(plan), console)
    _print_lines(_stages(plan), console)
    _print_lines(_mesh(plan), console)
    _print_groups(plan, console)
    _print_lines(_batch(plan), console)
    _print_lines(_flops(plan), console)
    _print_memory(plan, console)
    _print_messages(plan, console)
    _print_bubble(plan, console)
    _print_speed(plan, console)
    _print_change(plan, console)
    if plan.hints:
        console.print()
    _print_hints(plan, console)
    console.print()
    _print_lines(_resume(plan), console)
    if plan.unbuilt:
        console.print(f"\n[bold]Can be planned, not trained yet:[/] {escape(', '.join(plan.unbuilt))}")
    console.print()
    _print_decisions(plan, console)


def print_ranks(views: Sequence[RankView], console: Console) -> None:
    """What single ranks hold, and whom they talk to."""
    for view in views:
        console.print(f"\n[bold]Rank {view.rank}[/]")
        facts = Table.grid(padding=(0, 2))
        facts.add_row("place", ", ".join(f"{axis} {view.dense[axis]}" for axis in DENSE_AXES))
        facts.add_row("for experts", ", ".join(f"{axis} {view.expert[axis]}" for axis in EXPERT_AXES))
        for axis, ranks in view.groups.items():
            facts.add_row(f"its {axis} group", _ranks(ranks))
        facts.add_row("layers", "; ".join(view.layers))
        facts.add_row("weights", f"{view.parameters:,}")
        facts.add_row("memory", bytes_in_words(view.memory["total"]))
        console.print(facts)


def _print_lines(lines: Lines, console: Console) -> None:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(width=10)
    facts.add_column()
    for heading, text in lines:
        facts.add_row(f"[bold]{heading}", escape(text))
    console.print(facts)


def _run(plan: Plan) -> Lines:
    yield "run", f"{plan.name} in {plan.run_dir}"
    machine = plan.hardware
    if plan.device == "cuda":
        nodes = f", {machine.node_size} a node" if machine.gpus > machine.node_size else ""
        yield "target", f"{machine.gpus} x {machine.name}{nodes} ({machine.why}), {plan.precision}"
    else:
        yield "target", f"CPU ({machine.why}), {plan.precision}"


def _about(plan: Plan) -> Lines:
    named = (plan.about["purpose"], plan.about["source"])
    if any(named):
        yield "about", "; ".join(filter(None, (one.rstrip(".") for one in named if one)))


def _model(plan: Plan) -> Lines:
    model = plan.model
    heads = f"{model['n_heads']} heads"
    heads += f" on {model['n_kv_heads']}" if model["n_kv_heads"] != model["n_heads"] else ""
    shape = f"{model['kind']}, {model['n_layers']} layers of {model['d_model']}, {heads} of {model['d_head']}"
    yield "model", f"{shape}, ffn {model['d_ffn']}, vocabulary {model['vocab_size']:,}"
    moe = model.get("moe")
    if moe:
        yield "", f"{moe['n_experts']} experts of {moe['d_expert']}, {moe['top_k']} for each token"
    counts = plan.parameters
    kinds = [f"{name.replace('_', ' ')} {n:,}" for name, n in counts["by_kind"].items() if n]
    tied = " (head tied)" if model["tied_embeddings"] else ""
    yield "parameters", f"{counts['total']:,} = {' + '.join(kinds)}{tied}"
    if counts["active"] != counts["total"]:
        yield "", f"{counts['active']:,} active for each token"


def _resume(plan: Plan) -> Lines:
    yield "resume", f"stopped, it {plan.resume}"


def _stages(plan: Plan) -> Lines:
    if len(plan.stages) == 1:
        yield "a rank", f"{plan.stages[0].parameters:,} weights"
        return
    shown = [
        r for r in range(len(plan.stages)) if len(plan.stages) <= _MOST_STAGES or r < 3 or r >= len(plan.stages) - 2
    ]
    heading = "stages"
    for rank in shown:
        stage = plan.stages[rank]
        yield heading, f"pp {rank}: {'; '.join(stage.layers)} ({stage.parameters:,} weights a rank)"
        heading = "..." if rank + 1 not in shown and rank != len(plan.stages) - 1 else ""


def _mesh(plan: Plan) -> Lines:
    split = "split over tp" if plan.sequence_parallel else "whole on each rank"
    yield "mesh", f"{plan.equations[0]}; sequence {split}"
    yield "", f"{plan.equations[1]} (the same ranks, as experts see them)"


def _print_groups(plan: Plan, console: Console) -> None:
    if not plan.groups:
        return
    table = Table.grid(padding=(0, 2))
    for number, group in enumerate(plan.groups):
        table.add_row("[bold]groups" if number == 0 else "          ", *_group(group))
    console.print(table)


def _group(group: Group) -> tuple[str, str, str]:
    place = "in a node" if group.within_node else "across nodes"
    return f"{group.axis} {group.size}", f"{group.count} of them, the first: {_ranks(group.first)}", place


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) <= 6:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]}, {ranks[2]} ... {ranks[-1]}"


def _batch(plan: Plan) -> Lines:
    batch = plan.batch
    product = f"micro {batch['micro_batch']} · accumulation {batch['accumulation']} · dp {batch['dp']}"
    yield "batch", f"{batch['global_batch']} sequences = {product}; {batch['tokens_per_step']:,} tokens a step"
    if len(batch["stages"]) > 1:
        yield "", f"ramp: {', '.join(map(str, batch['stages']))} sequences"
    run = f"{batch['steps']:,} steps, {batch['sequences']:,} sequences of {batch['seq_len']:,}"
    run += f", {batch['tokens']:,} tokens"
    yield "length", run if plan.segments == 1 else f"{run}, in {plan.segments} segments of the data order"


def _flops(plan: Plan) -> Lines:
    causal, full = plan.flops_per_token["causal"], plan.flops_per_token["full"]
    text = f"{causal:.4e} a token with causal attention, {full:.4e} counted in full; {plan.flops:.3e} for the run"
    yield "FLOPs", text


def verdict(fit: Fit, hardware: str) -> str:
    """Whether it fits, by how much, and what would."""
    if fit.fits is None:
        return "of a machine whose memory is not known"
    free = fit.capacity - fit.total
    if fit.fits:
        little = (
            ""
            if free >= LEFT_FREE * fit.capacity
            else f", less than the {100 * LEFT_FREE:.0f} % that tune and auto leave"
        )
        return f"fits {hardware}'s {bytes_in_words(fit.capacity)}, {bytes_in_words(free)} free{little}"
    text = f"does NOT fit {hardware}'s {bytes_in_words(fit.capacity)}, {bytes_in_words(-free)} too much"
    return text + (f"; fits {one_of(fit.fits_on)}" if fit.fits_on else "; fits no GPU in the table")


def _memory_in_short(plan: Plan) -> Lines:
    if plan.device == "cuda":
        total, fits = bytes_in_words(plan.memory.total), verdict(plan.memory, plan.hardware.name)
        yield "memory", f"{total} on the fullest rank: {fits}"
        for remedy in plan.memory.remedies if not plan.memory.fits else ():
            yield "", f"{remedy.words} would take {bytes_in_words(remedy.total)}"
    else:
        yield "memory", f"{bytes_in_words(plan.memory.total)} on the fullest rank"


def _print_memory(plan: Plan, console: Console) -> None:
    fit = plan.memory
    stage = f" (pp {fit.rank})" if len(plan.stages) > 1 else ""
    console.print(f"\n[bold]Memory of the fullest rank{stage}[/]")
    scale = max(fit.capacity, fit.total)
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    for kind, count in fit.by_kind.items():
        if count:
            table.add_row(kind.replace("_", " "), bytes_in_words(count), "#" * round(_BAR * count / scale))
    end = round(_BAR * fit.capacity / scale) if fit.capacity else 0
    used = round(_BAR * fit.total / scale)
    bar = "#" * used + "." * max(0, end - used) if not end or used <= end else "#" * end + "!" * (used - end)
    table.add_row("[bold]total", bytes_in_words(fit.total), escape(f"[{bar}]"))
    console.print(table)
    if plan.device == "cuda":
        console.print(escape(verdict(fit, plan.hardware.name)))
    for remedy in fit.remedies if not fit.fits else ():
        console.print(f"  {bytes_in_words(remedy.total)} with {escape(remedy.words)}", soft_wrap=True)
    if plan.source_fit:
        console.print(escape(plan.source_fit))


def _print_messages(plan: Plan, console: Console) -> None:
    if not plan.communication:
        return
    console.print("\n[bold]What a rank sends in a step[/] (exposed: ms that the step waits for it)")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("over", "link", "GB", "ms", "exposed", "what"):
        table.add_column(heading, justify="right" if heading in ("GB", "ms", "exposed") else "left", overflow="fold")
    together: dict[tuple[str, str], list[Message]] = {}
    for one in plan.communication:
        together.setdefault((one.group, one.link), []).append(one)
    for (group, link), messages in together.items():
        sent = sum(m.sent for m in messages)
        times = [_milliseconds(one) for one in ([m.seconds for m in messages], [m.exposed_seconds for m in messages])]
        what = ", ".join(dict.fromkeys(m.what for m in messages))
        over = f"{group} ({messages[0].ranks})"
        table.add_row(over, link, f"{sent / 1e9:,.3f}", *times, what)
    console.print(table)


def _milliseconds(seconds: Sequence[float | None]) -> str:
    """Of all together, "" where they are not known."""
    return f"{sum(seconds) * 1e3:,.1f}" if None not in seconds else ""


def _print_bubble(plan: Plan, console: Console) -> None:
    if plan.bubble is None:
        return
    one = plan.bubble
    text = f"{one.formula:.1%} of the busy time with equal stages"
    text += f", {one.ratio:.1%} with these" if one.ratio is not None else ""
    console.print(f"\n[bold]Pipeline[/] {one.schedule}, {one.micro_batches} micro batches: bubble {text}")
    for line in one.chart:
        console.print(escape(line), soft_wrap=True)
    if one.seconds_by_time is not None:
        text = f"layers divided by time would take {seconds_in_words(one.seconds_by_time)} a step:"
        word = in_a_shell(f"parallelism.pipeline.layout='{one.layout_by_time or ''}'")
        console.print(f"{text} {escape(word)}; auto searches the schedule too", soft_wrap=True)
    plus = ", + weight gradient" if any("+" in line for line in one.chart) else ""
    console.print(f"pp rank, then time: 0 1 2 forward, a b c backward{plus}, . waiting", style="dim")


def _speed_in_short(plan: Plan) -> Lines:
    speed = plan.step_time
    if speed is not None:
        rate = f"{speed.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, MFU {speed.mfu['causal']:.1%}"
        yield "time", f"{seconds_in_words(speed.seconds)} a step predicted: {rate}; {_days(speed.days)} for the run"


def _print_speed(plan: Plan, console: Console) -> None:
    speed = plan.step_time
    if speed is None:
        return
    console.print(f"\n[bold]A step takes about {seconds_in_words(speed.seconds)}[/]")
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    for kind, seconds in speed.parts.items():
        share = seconds / speed.seconds
        words = seconds_in_words(seconds, like=speed.seconds)
        if share >= 0.0005:
            table.add_row(kind, words, f"{share:.1%}", "#" * round(_BAR * share))
    console.print(table)
    rate = f"{speed.tokens_per_second:,.0f} tokens/s, {speed.tokens_per_second_per_gpu:,.0f} a GPU"
    mfu = f"MFU {speed.mfu['causal']:.1%} with causal attention, {speed.mfu['full']:.1%} counted in full"
    console.print(f"{rate}; {mfu}; {_days(speed.days)} for {plan.batch['tokens']:,} tokens")
    if plan.hardware.ceilings:
        console.print(f"speeds: {escape(plan.hardware.ceilings)}", style="dim")


def _print_change(plan: Plan, console: Console) -> None:
    change, speed = plan.change, plan.step_time
    if change is None or speed is None:
        return
    now, then = (seconds_in_words(seconds, like=speed.seconds) for seconds in (speed.seconds, change.seconds))
    text = f"{then} a step for {now}, {change.saves:.0%} less; {bytes_in_words(change.total)} on the fullest rank"
    console.print(f"\n[bold]The one change that would save most:[/] {text}")
    console.print(f"  {escape(change.words)}", soft_wrap=True)


def _print_hints(plan: Plan, console: Console) -> None:
    for hint in plan.hints:
        console.print(f"[bold]hint:[/] {escape(hint.text)}")


def _days(days: float) -> str:
    for unit, many in (("days", 1.0), ("hours", 24.0), ("minutes", 1440.0)):
        if days * many >= 1:
            return f"{days * many:,.1f} {unit}"
    return f"{days * 86_400:.1f} seconds"


def _print_decisions(plan: Plan, console: Console) -> None:
    left = _left(plan.decisions)
    told = [one for one in plan.decisions if one not in left]
    decided = Table(title="Decided for you", title_justify="left", box=None, pad_edge=False, header_style="bold")
    for heading in ("key", "value", "why"):
        decided.add_column(heading, overflow="fold")
    for one in told:
        decided.add_row(one.key, escape(show(one.value)), escape(one.reason))
    console.print(decided)
    if left:
        words = ", ".join(f"{one.key}={show(one.value)}" for one in left)
        console.print(f"left as they are: {escape(words)}")


def _left(decisions: Sequence[Decision]) -> list[Decision]:
    """Degrees and strategies that nothing changes, but for those that a search was asked for."""
    asked = SEARCHED if any(one.key in PLAIN for one in decisions) else ()
    layout = [one for one in decisions if one.key.startswith("parallelism.") and one.key not in asked]
    return [one for one in layout if show(one.value) in _PLAIN]
