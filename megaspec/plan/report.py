"""A plan in words and small tables that are readable on 80 columns."""

from collections.abc import Iterator, Sequence

from rich.console import Console, JustifyMethod
from rich.table import Table

from megaspec.core.axes import DENSE_AXES, EXPERT_AXES
from megaspec.core.problems import in_a_shell, one_of, show
from megaspec.core.terminal import escape
from megaspec.core.units import bytes_in_words, counted, plural, seconds_in_words
from megaspec.estimate.hardware import LEFT_FREE, hardware_of
from megaspec.estimate.target import Target
from megaspec.estimate.throughput import throughput_of
from megaspec.plan.plan import Fit, MachineMemory, Message, Plan, RankGroup, RankView, SchedulePart, make_plan
from megaspec.resolve.fill import PLAIN
from megaspec.rules.unbuilt import feature_of
from megaspec.rules.unread import unmet_needs
from megaspec.search.tune import SEARCHED
from megaspec.spec import Decision, Spec

_BAR = 40
_MOST_STAGES = 8
_MOST_PARTS = 8
# A degree or strategy that was decided to be one of these leaves things as they are: those are told in a line.
_PLAIN = ("1", "false", "none", "replicate")
_LENGTHS = "data.document_lengths"
# Before `train` those decisions are told that say how it runs; of kernels, which are many, their names.
_FOREMOST = ("launcher.ranks", "parallelism.", "train.micro_batch", "precision.", _LENGTHS)
_KERNELS = "kernels."
_OF_PIPELINES = "parallelism.pipeline."
# Axes in words, as the first screen names them.
_AXES = {
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
    "etp": "tensor parallel inside experts",
    "pp": "pipeline parallel",
    "dp_shard": "data parallel, sharded",
    "dp_replicate": "data parallel, replicas",
}
# Headings of what a rank sends, and the side that their columns lean to.
_MESSAGE_COLUMNS: dict[str, JustifyMethod] = {
    "over": "left",
    "link": "left",
    "GB": "right",
    "ms": "right",
    "exposed": "right",
    "what": "left",
}
_OF_GPUS = ("link", "ms", "exposed")

Lines = Iterator[tuple[str, str]]


def print_plan(spec: Spec, target: Target, console: Console, *, data: str = "") -> None:
    """Before `train`, on one screen: what is trained, how it is divided, memory, time, and what decides about it.

    `data`: what it reads, in words, where that says more than the recipe.
    """
    hardware = None
    throughput = None
    if spec.device == "cuda":
        hardware = hardware_of(target)
    if hardware is not None:
        throughput = throughput_of(hardware)
    plan = make_plan(spec, target, hardware=hardware, throughput=throughput)
    _print_lines(_run(plan), console)
    _print_lines(_model(plan), console)
    _print_lines(_layout(plan), console)
    _print_lines(_data(data), console)
    _print_lines(_batch(plan), console)
    _print_lines(_schedules(plan), console)
    _print_lines(_memory_in_short(plan), console)
    _print_lines(_speed_in_short(plan), console)
    _print_lines(_decided_in_short(plan, spec), console)
    if spec.checkpoint.last == "weights" or spec.checkpoint.saving == "async":
        # what can't be made up for later, and what takes memory
        _print_lines(_checkpoint(plan), console)
    _print_hints(plan, console)


def print_whole_plan(plan: Plan, console: Console, *, data: str = "") -> None:
    """Everything. `data`: see `print_plan`."""
    _print_lines(_run(plan), console)
    _print_lines(_about(plan), console)
    _print_lines(_model(plan), console)
    _print_lines(_stages(plan), console)
    _print_lines(_mesh(plan), console)
    _print_groups(plan, console)
    _print_lines(_data(data), console)
    _print_lines(_batch(plan), console)
    _print_lines(_schedules(plan), console)
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
    _print_lines(_checkpoint(plan), console)
    _print_lines(_resume(plan), console)
    if plan.unbuilt:
        told = ", ".join(f"{key} ({feature_of(key)})" for key in plan.unbuilt)
        console.print(f"\n[bold]Can be planned, not trained yet:[/] {escape(told)}")
    console.print()
    _print_decisions(plan, console)


def print_ranks(views: Sequence[RankView], console: Console) -> None:
    """What single ranks hold, and whom they talk to."""
    for view in views:
        console.print(f"\n[bold]Rank {view.rank}[/]")
        facts = Table.grid(padding=(0, 2))
        facts.add_row("place", ", ".join(f"{axis} {view.dense[axis]}" for axis in DENSE_AXES))
        if view.has_experts:
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
    if plan.device != "cuda":
        yield "target", f"CPU ({machine.why}), {plan.precision}"
        return
    gpus = f"{machine.gpus} x {machine.name}"
    if machine.gpus > machine.node_size:
        gpus += f", {machine.node_size} a node"
    yield "target", f"{gpus} ({machine.why}), {plan.precision}"


def _about(plan: Plan) -> Lines:
    named = []
    for text in (plan.about["purpose"], plan.about["source"]):
        if text:
            named.append(text.rstrip("."))
    if named:
        yield "about", "; ".join(filter(None, named))


def _model(plan: Plan) -> Lines:
    model = plan.model
    heads = counted(model["n_heads"], "head")
    if model["n_kv_heads"] != model["n_heads"]:
        heads += f" ({model['n_kv_heads']} for keys and values)"
    layers = counted(model["n_layers"], "layer")
    shape = f"{model['kind']}, {layers} of {model['d_model']}, {heads} of {model['d_head']}"
    yield "model", f"{shape}, feed-forward {model['d_ffn']}, vocabulary {model['vocab_size']:,}"
    moe = model.get("moe")
    if moe:
        yield "", f"{counted(moe['n_experts'], 'expert')} of {moe['d_expert']}, {moe['top_k']} for each token"
    counts = plan.parameters
    kinds = [f"{name.replace('_', ' ')} {n:,}" for name, n in counts["by_kind"].items() if n]
    text = f"{counts['total']:,} = {' + '.join(kinds)}"
    if model["tied_embeddings"]:
        text += " (head tied)"
    yield "parameters", text
    if counts["active"] != counts["total"]:
        yield "", f"{counts['active']:,} active for each token"
    if counts["trained"] != counts["total"]:
        yield "trainable", f"{counts['trained']:,} of {counts['total']:,} parameters"
    yield from _starts_with(plan)


def _starts_with(plan: Plan) -> Lines:
    starts = plan.starts_with
    if starts is None:
        return
    step = ""
    if starts.step is not None:
        step = f", step {starts.step:,}"
    yield "weights", f"those of {starts.path}{step}"
    rows = starts.vocabulary
    if rows is not None and rows.new + rows.dropped == 0:
        yield "", f"vocabulary: all {rows.taken:,} rows taken, none new, none dropped"
    elif rows is not None:
        new = f"{rows.new:,} new"
        if rows.new:
            new += f" ({rows.new_rows})"
        yield "", f"vocabulary: {rows.taken:,} rows taken, {new}, {rows.dropped:,} dropped"
    if starts.upcycled_layers:
        layers = f"{starts.upcycled_layers} {plural('layer', starts.upcycled_layers)}"
        yield "", f"experts of {layers}: copies of the feed-forward layer there; routers are drawn"


def _checkpoint(plan: Plan) -> Lines:
    size = plan.checkpoint
    text = bytes_in_words(size["bytes"])
    if size["last_bytes"] != size["bytes"]:
        text += f"; the last {bytes_in_words(size['last_bytes'])}, weights alone (checkpoint.last=weights): the"
        text += " finished run can't be trained further"
    if size["copied_bytes"]:
        text += f"; {bytes_in_words(size['copied_bytes'])} of a machine's memory hold it while it is written"
        text += " (checkpoint.saving=async)"
    yield "checkpoint", text


def _resume(plan: Plan) -> Lines:
    yield "resume", f"stopped, it {plan.resume}"


def _stages(plan: Plan) -> Lines:
    n_stages = len(plan.stages)
    if n_stages == 1:
        yield "a rank", f"{plan.stages[0].parameters:,} weights"
        return
    shown = list(range(n_stages))
    if n_stages > _MOST_STAGES:
        # the first and the last ones, since these hold the embedding and the head
        shown = [0, 1, 2, n_stages - 2, n_stages - 1]
    heading = "stages"
    for rank in shown:
        stage = plan.stages[rank]
        yield heading, f"pp {rank}: {'; '.join(stage.layers)} ({stage.parameters:,} weights a rank)"
        heading = ""
        if rank + 1 < n_stages and rank + 1 not in shown:
            heading = "..."


def _mesh(plan: Plan) -> Lines:
    sequence = "whole on each rank"
    if plan.sequence_parallel:
        sequence = "split over tp"
    yield "mesh", f"{plan.equations[0]}; sequence {sequence}"
    if plan.model.get("moe"):
        yield "", f"{plan.equations[1]} (the same ranks, as experts see them)"


def _layout(plan: Plan) -> Lines:
    """How the ranks divide the work: the axes of more than one rank."""
    ranks = plan.mesh["world"]
    text = f"{ranks:,} {plural('rank', ranks)}"
    axes = []
    for axis, words in _AXES.items():
        if plan.mesh[axis] > 1:
            axes.append(f"{axis} {plan.mesh[axis]:,} ({words})")
    if axes:
        text += f" = {' · '.join(axes)}"
    if plan.sequence_parallel:
        text += ", sequence parallel"
    yield "layout", text


def _print_groups(plan: Plan, console: Console) -> None:
    if not plan.groups:
        return
    table = Table.grid(padding=(0, 2))
    heading = "[bold]groups"
    for group in plan.groups:
        table.add_row(heading, *_group(group, plan.device))
        heading = "          "
    console.print(table)


def _group(group: RankGroup, device: str) -> tuple[str, str, str]:
    where = "across nodes"
    if device != "cuda":
        # ranks of one machine, unless torchrun has joined several
        where = ""
    elif group.within_node:
        where = "in a node"
    return f"{group.axis} {group.size}", f"{group.count} of them, the first: {_ranks(group.first)}", where


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) <= 6:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]}, {ranks[2]} ... {ranks[-1]}"


def _data(text: str) -> Lines:
    if text:
        yield "data", text


def _batch(plan: Plan) -> Lines:
    batch = plan.batch
    product = f"micro {batch['micro_batch']} · accumulation {batch['accumulation']} · dp {batch['dp']}"
    sequences = f"{batch['global_batch']} {plural('sequence', batch['global_batch'])}"
    yield "batch", f"{sequences} = {product}; {batch['tokens_per_step']:,} tokens a step"
    if len(batch["stages"]) > 1:
        yield "", f"ramp: {', '.join(map(str, batch['stages']))} sequences"
    length = f"{counted(batch['steps'], 'step')}, {counted(batch['sequences'], 'sequence')} of {batch['seq_len']:,}"
    length += f", {batch['tokens']:,} tokens"
    if plan.segments != 1:
        length += f", in {plan.segments} segments of the data order"
    yield "length", length


def _schedules(plan: Plan) -> Lines:
    """The learning rate at the steps at which it turns, and the weight decay where it changes."""
    first = plan.learning_rate[0].first_step
    if first:
        yield "rate", f"counted from step {first:,}"
    yield from _parts("rate" if not first else "", plan.learning_rate)
    if len(plan.weight_decay) > 1 or plan.weight_decay[0].shape != "constant":
        yield from _parts("decay", plan.weight_decay)


def _parts(heading: str, parts: Sequence[SchedulePart]) -> Lines:
    for number, part in enumerate(parts):
        if number == _MOST_PARTS and len(parts) > _MOST_PARTS + 1:
            yield "", f"... and {len(parts) - _MOST_PARTS} more"
            return
        text = f"{part.start:.4g}"
        if part.shape != "constant":
            text += f" to {part.end:.4g}, {part.shape}"
        # a jump: it does not go on where the part before it ended
        if number and part.start != parts[number - 1].end:
            text += f" (jumps from {parts[number - 1].end:.4g})"
        yield heading, f"steps {part.first_step:,}-{part.last_step:,}: {text}"
        heading = ""


def _flops(plan: Plan) -> Lines:
    causal = plan.flops_per_token["causal"]
    full = plan.flops_per_token["full"]
    text = f"{causal:.4e} a token with causal attention, {full:.4e} counted in full; {plan.flops:.3e} for the run"
    yield "FLOPs", text


def verdict(fit: Fit, hardware: str) -> str:
    """Whether it fits, by how much, and what would."""
    if fit.machine is not None:
        return _machine_verdict(fit.machine)
    if fit.fits is None:
        return "of a machine whose memory is not known"
    free = fit.capacity - fit.total
    capacity = bytes_in_words(fit.capacity)
    if fit.fits:
        text = f"fits {hardware}'s {capacity}, {bytes_in_words(free)} free"
        if free < LEFT_FREE * fit.capacity:
            text += f", less than the {100 * LEFT_FREE:.0f} % that tune and auto leave"
        return text
    text = f"does NOT fit {hardware}'s {capacity}, {bytes_in_words(-free)} too much"
    if not fit.fits_on:
        return f"{text}; fits no GPU in the table"
    return f"{text}; fits {one_of(fit.fits_on)}"


def _machine_verdict(machine: MachineMemory) -> str:
    """Of ranks that share a machine's memory with its other processes."""
    needed = f"{machine.ranks:,} ranks with their processes need {bytes_in_words(machine.needed)}"
    if machine.ranks == 1:
        needed = f"1 rank with its process needs {bytes_in_words(machine.needed)}"
    if not machine.available:
        return f"{needed}; how much this machine has available is not known"
    available = f"the {bytes_in_words(machine.available)} that this machine has available"
    free = machine.available - machine.needed
    if free < 0:
        return f"{needed}, which does NOT fit {available}, {bytes_in_words(-free)} too much"
    return f"{needed}, which fits {available}"


def _memory_in_short(plan: Plan) -> Lines:
    fit = plan.memory
    text = f"{bytes_in_words(fit.total)} on the fullest rank"
    yield "memory", f"{text}; {verdict(fit, plan.hardware.name)}"
    if not fit.fits:
        for remedy in fit.remedies:
            yield "", f"{remedy.words} would take {bytes_in_words(remedy.total)}"


def _print_memory(plan: Plan, console: Console) -> None:
    fit = plan.memory
    stage = ""
    if len(plan.stages) > 1:
        stage = f" (pp {fit.rank})"
    console.print(f"\n[bold]Memory of the fullest rank{stage}[/]")
    scale = max(fit.capacity, fit.total)
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    for kind, count in fit.by_kind.items():
        if count:
            table.add_row(kind.replace("_", " "), bytes_in_words(count), "#" * round(_BAR * count / scale))
    table.add_row("[bold]total", bytes_in_words(fit.total), escape(f"[{_memory_bar(fit)}]"))
    console.print(table)
    console.print(escape(verdict(fit, plan.hardware.name)))
    if not fit.fits:
        for remedy in fit.remedies:
            console.print(f"  {bytes_in_words(remedy.total)} with {escape(remedy.words)}", soft_wrap=True)
    if plan.source_fit:
        console.print(escape(plan.source_fit))


def _memory_bar(fit: Fit) -> str:
    """`####....` up to the capacity, `####!!` past it."""
    scale = max(fit.capacity, fit.total)
    used = round(_BAR * fit.total / scale)
    end = round(_BAR * fit.capacity / scale)
    if end == 0:
        # a capacity that is not known
        return "#" * used
    if used <= end:
        return "#" * used + "." * (end - used)
    return "#" * end + "!" * (used - end)


def _print_messages(plan: Plan, console: Console) -> None:
    if not plan.communication:
        return
    is_on_gpus = plan.device == "cuda"
    exposed_in_words = ""
    if is_on_gpus:
        exposed_in_words = " (exposed: ms that the step waits for it)"
    console.print(f"\n[bold]What a rank sends in a step[/]{exposed_in_words}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, justify in _MESSAGE_COLUMNS.items():
        # between ranks on a CPU there are neither links nor times
        if is_on_gpus or heading not in _OF_GPUS:
            table.add_column(heading, justify=justify, overflow="fold")
    # a line for all that goes over one link of one axis
    by_link: dict[tuple[str, str], list[Message]] = {}
    for message in plan.communication:
        by_link.setdefault((message.group, message.link), []).append(message)
    for (group, link), messages in by_link.items():
        gigabytes = sum(message.sent for message in messages) / 1e9
        alone = _milliseconds([message.seconds for message in messages])
        exposed = _milliseconds([message.exposed_seconds for message in messages])
        what = ", ".join(dict.fromkeys(message.what for message in messages))
        over = f"{group} ({messages[0].ranks})"
        if is_on_gpus:
            table.add_row(over, link, f"{gigabytes:,.3f}", alone, exposed, what)
        else:
            table.add_row(over, f"{gigabytes:,.3f}", what)
    console.print(table)


def _milliseconds(seconds: Sequence[float | None]) -> str:
    """Of all together, "" where they are not known."""
    if None in seconds:
        return ""
    return f"{sum(seconds) * 1e3:,.1f}"


def _print_bubble(plan: Plan, console: Console) -> None:
    bubble = plan.bubble
    if bubble is None:
        return
    text = f"{bubble.formula:.1%} of the busy time with equal stages"
    if bubble.ratio is not None:
        text += f", {bubble.ratio:.1%} with these"
    console.print(f"\n[bold]Pipeline[/] {bubble.schedule}, {bubble.micro_batches} micro batches: bubble {text}")
    for line in bubble.chart:
        console.print(escape(line), soft_wrap=True)
    if bubble.seconds_by_time is not None:
        seconds = seconds_in_words(bubble.seconds_by_time)
        console.print(f"layers divided so would take {seconds} a step; auto searches the schedule too:")
        # on a line of its own, which is whole wherever it is pasted
        word = in_a_shell(f"parallelism.pipeline.layout='{bubble.layout_by_time or ''}'")
        console.print(escape(word), soft_wrap=True)
    legend = "pp rank, then time: 0 1 2 forward, a b c backward"
    if any("+" in line for line in bubble.chart):
        legend += ", + weight gradient"
    console.print(f"{legend}, . waiting", style="dim")


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
    if plan.hardware.throughput:
        console.print(f"speeds: {escape(plan.hardware.throughput)}", style="dim")


def _print_change(plan: Plan, console: Console) -> None:
    change = plan.change
    speed = plan.step_time
    if change is None or speed is None:
        return
    now = seconds_in_words(speed.seconds, like=speed.seconds)
    then = seconds_in_words(change.seconds, like=speed.seconds)
    text = f"{then} a step for {now}, {change.saves:.0%} less; {bytes_in_words(change.total)} on the fullest rank"
    console.print(f"\n[bold]The one change that would save most:[/] {text}")
    console.print(f"  {escape(change.words)}", soft_wrap=True)


def _print_hints(plan: Plan, console: Console) -> None:
    for hint in plan.hints:
        console.print(f"[bold]hint:[/] {escape(hint.text)}")


def _days(days: float) -> str:
    """In the largest unit of which it is at least one."""
    for unit, count in (("days", days), ("hours", 24 * days), ("minutes", 1440 * days)):
        if count >= 1:
            return f"{count:,.1f} {unit}"
    return f"{86_400 * days:.1f} seconds"


def _decided_in_short(plan: Plan, spec: Spec) -> Lines:
    """The decisions that say how the run is laid out, and how many there are besides."""
    plain = _left_plain(plan.decisions)
    told = []
    kernels = []
    for decision in plan.decisions:
        if decision in plain or _is_idle(decision.key, spec):
            continue
        if decision.key.startswith(_KERNELS):
            kernels.append(decision)
        elif decision.key.startswith(_FOREMOST):
            told.append(f"{decision.key}={_decided_value(decision)}: {decision.reason}")
    if kernels:
        names = [f"{one.key.removeprefix(_KERNELS)} {show(one.value)}" for one in kernels]
        told.append(f"kernels: {', '.join(names)}")
    n_others = len(plan.decisions) - len(told) - max(0, len(kernels) - 1)
    if n_others:
        told.append(f"and {n_others} more, with reasons: megaspec show {plan.run_dir} --origins")
    heading = "decided"
    for text in told:
        yield heading, text
        heading = ""


def _decided_value(decision: Decision) -> str:
    """What was decided; of a histogram how fine it is."""
    if decision.key != _LENGTHS:
        return show(decision.value)
    if not decision.value:
        return "unknown"
    return counted(len(decision.value), "bin")


def _is_idle(key: str, spec: Spec) -> bool:
    """Whether nothing of this run asks for a decision, or another line of the screen says it."""
    if key.startswith(_OF_PIPELINES):
        return spec.parallelism.pp == 1
    return key == "parallelism.sequence_parallel" or bool(unmet_needs(key, spec))


def _print_decisions(plan: Plan, console: Console) -> None:
    plain = _left_plain(plan.decisions)
    decided = Table(title="Decided for you", title_justify="left", box=None, pad_edge=False, header_style="bold")
    for heading in ("key", "value", "why"):
        decided.add_column(heading, overflow="fold")
    for decision in plan.decisions:
        if decision not in plain:
            decided.add_row(decision.key, escape(_decided_value(decision)), escape(decision.reason))
    console.print(decided)
    if plain:
        words = ", ".join(f"{decision.key}={show(decision.value)}" for decision in plain)
        console.print(f"left as they are: {escape(words)}")


def _left_plain(decisions: Sequence[Decision]) -> list[Decision]:
    """Degrees and strategies that nothing changes, but for those that a search was asked for."""
    asked: Sequence[str] = ()
    if any(decision.key in PLAIN for decision in decisions):
        asked = SEARCHED
    plain = []
    for decision in decisions:
        is_layout = decision.key.startswith("parallelism.") and decision.key not in asked
        if is_layout and show(decision.value) in _PLAIN:
            plain.append(decision)
    return plain
