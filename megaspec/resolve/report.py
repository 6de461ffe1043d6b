"""A Spec in the few lines that a user wants to see before it runs."""

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megaspec.core.problems import show
from megaspec.resolve.batch import batch_plan
from megaspec.resolve.flops import flops_per_token
from megaspec.resolve.formula import degrees, dense_equation, expert_equation
from megaspec.resolve.parameters import count_parameters
from megaspec.resolve.target import Target
from megaspec.spec import Spec


def print_plan(spec: Spec, target: Target, console: Console) -> None:
    """Mesh with both equations, batch arithmetic, parameters, FLOPs per token, and what was decided for the user."""
    facts = Table.grid(padding=(0, 2))
    for heading, text in _lines(spec, target):
        facts.add_row(f"[bold]{heading}", escape(text))
    console.print(facts)
    decided = Table(title="Decided for you", title_justify="left", box=None, pad_edge=False, header_style="bold")
    for heading in ("key", "value", "why"):
        decided.add_column(heading, overflow="fold")
    for one in spec.decisions:
        decided.add_row(one.key, escape(show(one.value)), escape(one.reason))
    console.print(decided)


def _lines(spec: Spec, target: Target) -> Iterator[tuple[str, str]]:
    model, parallelism, seq_len = spec.model, spec.parallelism, spec.data.seq_len
    yield "run", f"{spec.name} in {spec.run_dir}"
    about = spec.about
    named = (about.purpose, about.source, f"on {about.hardware}" if about.hardware else "")
    if any(named):
        yield "about", "; ".join(filter(None, named))
    devices = f"{target.gpus} x {target.gpu}" if spec.device == "cuda" else f"CPU with {target.cores} cores"
    yield "target", f"{devices}, {spec.precision.kind}"
    heads = f"{model.n_heads} heads" + (f" on {model.n_kv_heads}" if model.n_kv_heads != model.n_heads else "")
    shape = f"{model.kind}, {model.n_layers} layers of {model.d_model}, {heads} of {model.d_head}, ffn {model.d_ffn}"
    yield "model", f"{shape}, vocabulary {model.vocab_size:,}"
    count = count_parameters(model)
    head = "tied" if model.tied_embeddings else f"{count.head:,}"
    positions = f" + positions {count.positions:,}" if count.positions else ""
    parts = f"embedding {count.embedding:,}{positions} + attention {count.attention:,} + mlp {count.mlp:,}"
    yield "parameters", f"{count.total:,} = {parts} + norms {count.norms:,} + head {head}"
    sizes = degrees(parallelism)
    split = "split over tp" if parallelism.sequence_parallel else "whole on each rank"
    yield "mesh", f"{dense_equation(sizes)}; sequence {split}"
    yield "", f"{expert_equation(sizes)} (the same ranks, as experts see them)"
    batch = batch_plan(spec.train, parallelism, seq_len=seq_len)
    product = f"micro {batch.micro_batch} · accumulation {batch.accumulation} · dp {batch.dp}"
    yield "batch", f"{batch.global_batch} sequences = {product}; {batch.tokens_per_step:,} tokens a step"
    if len(batch.stages) > 1:
        yield "", f"ramp: {', '.join(map(str, batch.stages))} sequences"
    run = f"{spec.train.steps:,} steps, {batch.sequences:,} sequences of {seq_len:,}, {batch.tokens:,} tokens"
    yield "length", run if len(spec.segments) == 1 else f"{run}, in {len(spec.segments)} segments of the data order"
    causal = flops_per_token(model, seq_len=seq_len, tp=parallelism.tp)
    full = flops_per_token(model, seq_len=seq_len, convention="full", tp=parallelism.tp)
    total = causal * batch.tokens
    yield "FLOPs", f"{causal:.4e} a token with causal attention, {full:.4e} counted in full; {total:.3e} for the run"
    peak = target.peak_flops(spec.precision.kind)
    if peak is not None:
        hours = total / (peak * spec.world_size * 0.5) / 3600
        yield "time", f"{hours:,.1f} hours at half of the peak of {peak / 1e12:,.0f} TFLOP/s per GPU"
