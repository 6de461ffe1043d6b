"""One optimizer step: forward and backward over the micro batches, gradient norm, update."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from megaspec.core import counted
from megaspec.core.faults import failpoint
from megaspec.data.batch import Batch
from megaspec.nn.dropout import Noise
from megaspec.nn.range_names import OPTIMIZER
from megaspec.nn.ranges import marked
from megaspec.optim.norm import global_norm, local_norms
from megaspec.parallelism.expert import RouterStatistics
from megaspec.precision.scaler import LossScaler
from megaspec.runtime.build import Summed, TrainState
from megaspec.train.guard import NO_LIMITS, Limits

FORWARD_BACKWARD, REDUCE_GRADIENTS, UPDATE = PHASES = ("forward_backward", "reduce_gradients", "optimizer")
"""What a step consists of, in this order."""


def ignore_phase(phase: str) -> None:
    """For who measures no phases."""


def nothing_to_do() -> None:
    """For who has nothing to do before the update."""


def ignore_sum(summed: Tensor) -> None:
    """For who saves nothing beside the step."""


@dataclass(frozen=True)
class Found:
    """Ranks whose checks found something in a step, over all ranks: scalars of float64 on the device."""

    changed: Tensor
    """Whose memory was not what it was after the update before."""
    recomputed: Tensor
    """That came to other numbers when they computed the step again."""
    differing: Tensor
    """Comparisons of copies in which a rank had another sum; 0 in steps in which nothing was compared."""


class StepChecks(Protocol):
    """Looks for ranks that compute or remember wrongly (runtime/checks.py). The host reads nothing back."""

    def before_step(self, run: Callable[[], Tensor]) -> None:
        """`run` computes the step's loss and gradients, which are computed again after it."""

    def before_update(self, local_loss: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients are summed. -> whether memory has changed, whether the step was computed otherwise before: 0 or 1
        of this rank, scalars."""

    def after_update(self) -> Tensor:
        """The update is done, or was skipped. -> comparisons in which ranks differ, a scalar."""


@dataclass(frozen=True)
class StepResult:
    """What a step measured, still on the device: reading it waits for the step."""

    loss: Tensor
    """Mean over the valid tokens of the global batch."""
    local_loss: Tensor
    """This rank's share of `loss`, before ranks were summed: tells which rank went wrong."""
    grad_norm: Tensor
    """Before clipping, without loss scale."""
    norms: Tensor
    """[n]: this rank's norm of each gradient, in the order of the buckets' gradients, with loss scale."""
    tokens: Tensor
    """Valid tokens of the global batch."""
    skipped: Tensor
    """1 when the update was not applied: the loss or the gradient norm was not finite or above its limit, or a check
    found something."""
    broken_losses: Tensor
    """Ranks on which the loss was not finite."""
    found: Found
    """What checks found."""
    loss_scale: Tensor
    """The factor on the loss in this step."""
    asked_to_stop: Tensor
    """Ranks that want the run to stop after this step."""
    saturated: Tensor | None
    """int64 [1]: elements that were too large for fp8 by the scales of this step, over all ranks; what several ranks
    have is counted by each. None: none can be, since scales are those of the elements themselves."""
    routers: RouterStatistics | None
    """Of the layers on this rank; None where none has experts."""


def forward_backward(
    built: TrainState,
    batches: Sequence[Batch],
    *,
    tokens: Tensor,
    loss_scale: Tensor,
    on_phase: Callable[[str], object] = ignore_phase,
) -> Tensor:
    """Adds the gradients of all micro batches to the buckets. -> this rank's share of the mean loss.

    `tokens`: valid tokens of the global batch; `loss_scale`: factor on the loss; both scalars. `on_phase`: as in
    `train_step`.
    """
    data, pipeline = built.data_parallel, built.pipeline
    data.start_step()
    built.fp8.start_step(built.position.step)
    built.summed = None
    loss_scale = loss_scale.to(built.wide)
    weight = loss_scale / tokens.clamp(min=1)
    aux_weight = loss_scale / (len(batches) * built.mesh.size("dp"))
    total = torch.zeros((), dtype=built.wide, device=built.device)

    def forward(chunk: int, micro: int, x: Tensor | None) -> Tensor:
        built.position.micro = micro
        with built.position.forward_pass():
            failpoint("forward")
            out = run_chunk(built, chunk, batches[micro], x, weight=weight, aux_weight=aux_weight)
        if built.chunks[chunk].head is not None:
            total.add_(out.detach())
        return out

    # the losses below are what backward passes start from, so that their tables' gradients can be added up as they come
    with pipeline.sums.step():
        pipeline.forward_backward(
            len(batches),
            size=activations_size(built, *batches[0].tokens.shape),
            forward=forward,
            start_backward=lambda chunk, last: data.start_backward(chunk, last=last),
        )
    on_phase(FORWARD_BACKWARD)
    finish_gradients(built, loss_scale=loss_scale)
    on_phase(REDUCE_GRADIENTS)
    return total / loss_scale


def finish_gradients(built: TrainState, *, loss_scale: Tensor) -> None:
    """Sums what backward passes have added to the buckets over all ranks, which call it together. `loss_scale`: the
    factor on the losses that they were of."""
    data = built.data_parallel
    # first: the other two add up what whole buckets have become
    data.finish_grads()
    built.tensor_parallel.finish_grads(data.gradients, data.rows)
    built.pipeline.finish_grads(data.gradients)
    built.summed = Summed(loss_scale)


def run_chunk(
    built: TrainState, chunk: int, batch: Batch, x: Tensor | None, *, weight: Tensor, aux_weight: Tensor | None = None
) -> Tensor:
    """One micro batch through a chunk: activations, or Σ weight · cross-entropy where the chunk has the head.

    `x`: activations of the stage before, None on the first. `weight`: of a valid token. `aux_weight`: of the micro
    batch's auxiliary losses; None: evaluation, without dropout.
    """
    model, length = built.chunks[chunk], batch.tokens.shape[1]
    index = built.context_parallel.index(length)
    noise = None if aux_weight is None else Noise(built.spec.train.seed, batch.ids, index)
    context = model.context(
        index,
        length=length,
        documents=batch.documents,
        noise=noise,
        aux_weight=aux_weight,
        way=built.context_parallel.way,
    )
    split_batch = built.context_parallel.split_batch
    if x is None:
        x = split_batch(batch.tokens)
    y = model.body(x, context)
    if model.head is None:
        return y
    labels = split_batch(batch.labels)
    weights = split_batch(batch.mask) * weight
    return model.finish(y, lambda h_BTD: model.head.loss(h_BTD, labels, weights))


def activations_size(built: TrainState, sequences: int, length: int) -> torch.Size:
    """[B, T, D] of what goes from stage to stage, for whole sequences of `length` tokens."""
    tokens = built.context_parallel.index(length).shape[0]
    if built.tensor_parallel.sequence_parallel:
        tokens //= built.mesh.size("tp")
    return torch.Size((sequences, tokens, built.spec.model.d_model))


def count_tokens(built: TrainState, batches: Sequence[Batch], *, stop: bool, saving: int = 0) -> tuple[Tensor, Tensor]:
    """Valid tokens of the global batch, and [2]: how many ranks ask to stop, and the sum of what they say of the save
    under way. One small all-reduce over the world."""
    mask = torch.stack([b.mask.sum() for b in batches]).sum()
    # every rank of these axes has the same batch
    first = all(built.mesh.index(axis) == 0 for axis in ("tp", "cp", "pp"))
    valid = mask if first else torch.zeros_like(mask)
    counts = torch.stack([valid, torch.full_like(valid, int(stop)), torch.full_like(valid, saving)])
    if built.mesh.world_size > 1:
        counted.all_reduce(counts)
    return counts[0], counts[1:]


def train_step(
    built: TrainState,
    batches: Sequence[Batch],
    *,
    lr: float,
    weight_decay: float,
    scaler: LossScaler,
    stop: bool = False,
    limits: Limits = NO_LIMITS,
    checks: StepChecks | None = None,
    saving: int = 0,
    on_saving: Callable[[Tensor], object] = ignore_sum,
    before_update: Callable[[], object] = nothing_to_do,
    on_gradients: Callable[[], None] | None = None,
    on_phase: Callable[[str], object] = ignore_phase,
) -> StepResult:
    """One step on this rank's micro batches. The host reads nothing back.

    The update is not applied where loss or gradient norm are not finite or exceed `limits`, or where `checks` find
    something; all ranks agree, since what each of them found is summed with the norm.
    `on_gradients` is called when the gradients are summed, before the update, which may divide them in place.
    `saving` is summed over the ranks, as `stop` is, before all else: `on_saving` gets the sum while the device was
    given nothing more, so that it may be read while the step runs. `before_update` is called right before the optimizer
    changes anything. `on_phase` is called with each of PHASES when the device was given all of its work.
    """
    tokens, of_ranks = count_tokens(built, batches, stop=stop, saving=saving)
    asked_to_stop, summed_saving = of_ranks.unbind()
    on_saving(summed_saving)
    loss_scale = scaler.scale.clone()
    compute = partial(forward_backward, built, batches, tokens=tokens, loss_scale=loss_scale)
    if checks is not None:
        checks.before_step(compute)
    local = compute(on_phase=on_phase)
    data = built.data_parallel
    known = data.norms
    if on_gradients is not None:
        on_gradients()
        # whoever looks may also have written
        known = {}
    changed = recomputed = torch.zeros((), dtype=torch.float64, device=built.device)
    if checks is not None:
        changed, recomputed = checks.before_update(local)
    with marked(OPTIMIZER):
        loss = _summed(built, local.clone())
        is_broken = ~torch.isfinite(loss)
        norms = local_norms(data.gradients, built.shards, known=known, device=built.device)
        beside = (is_broken, loss > limits.loss, changed, recomputed)
        agreed = global_norm(norms.square, world_size=built.mesh.world_size, beside=beside)
        broken_losses, _, changed, recomputed = agreed.beside
        norm = agreed.norm / loss_scale
        divide_by = loss_scale
        if built.spec.optim.clip is not None:
            divide_by = divide_by * (norm / built.spec.optim.clip).clamp(min=1)
        is_in_order = torch.isfinite(norm) & (norm <= limits.grad_norm) & (agreed.beside.sum() == 0)
        skip = (~is_in_order).to(torch.float32)
        before_update()
        built.optimizer.update(
            data.gradients, lr=lr, weight_decay=weight_decay, divide_by=divide_by.to(built.wide), skip=skip
        )
    built.summed.is_spent = True
    data.gather_weights()
    routers = built.expert_parallel.finish_step(built.chunks, skip=skip)
    saturated = built.fp8.finish_step(skip=skip)
    scaler.update((~torch.isfinite(norm) | ~torch.isfinite(loss)).to(torch.float32))
    differing = torch.zeros_like(norm)
    if checks is not None:
        differing = checks.after_update()
    on_phase(UPDATE)
    return StepResult(
        loss=loss,
        local_loss=local,
        grad_norm=norm,
        norms=norms.each,
        tokens=tokens,
        skipped=skip,
        broken_losses=broken_losses,
        found=Found(changed, recomputed, differing),
        loss_scale=loss_scale,
        asked_to_stop=asked_to_stop,
        saturated=saturated,
        routers=routers,
    )


def evaluate(built: TrainState, batches: Iterable[Batch]) -> Tensor:
    """The mean loss over the valid tokens of all ranks' batches, a scalar in at least fp32."""
    sums = evaluation_sums(built, batches, is_cut=lambda: False)
    assert sums is not None, "an evaluation that nothing cuts"
    return mean_loss(sums)


def mean_loss(sums: Tensor) -> Tensor:
    """The mean of what `evaluation_sums` returns."""
    return sums[0] / sums[1].clamp(min=1)


@torch.no_grad()
def evaluation_sums(built: TrainState, batches: Iterable[Batch], *, is_cut: Callable[[], bool]) -> Tensor | None:
    """float64 [2]: the sum of the losses of the valid tokens of all ranks' batches, and how many tokens these are.

    `is_cut` is asked before each pass through the pipeline, by all ranks together, and answers the same on each. None:
    it said yes, and the rest was left.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=built.device)
    one = torch.ones((), dtype=built.wide, device=built.device)
    count_here = built.mesh.index("cp") == 0 and built.mesh.index("pp") == 0
    following = iter(batches)
    while window := list(islice(following, built.pipeline.window)):
        if is_cut():
            built.pipeline.finish()
            return None

        def forward(chunk: int, micro: int, x: Tensor | None, window: Sequence[Batch] = window) -> Tensor:
            built.position.micro = micro
            out = run_chunk(built, chunk, window[micro], x, weight=one)
            if built.chunks[chunk].head is not None:
                sums[0] += out
            return out

        size = activations_size(built, *window[0].tokens.shape)
        built.pipeline.forward_only(len(window), size=size, forward=forward)
        if count_here:
            sums[1] += torch.stack([batch.mask.sum() for batch in window]).sum()
    built.pipeline.finish()
    return _summed(built, sums)


def _summed(built: TrainState, x: Tensor) -> Tensor:
    """The sum over all ranks but those of one tensor-parallel group, which all have the same."""
    group = built.mesh.group("pp-dp-cp")
    if group is not None:
        counted.all_reduce(x, group=group)
    return x
