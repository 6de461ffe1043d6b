"""One optimizer step: forward and backward over the micro batches, gradient norm, update."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megaspec.data.batch import Batch
from megaspec.nn.dropout import Noise
from megaspec.optim.norm import global_norm, local_norms
from megaspec.precision.scaler import LossScaler
from megaspec.runtime.build import Built


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
    """1 when the update was not applied because the loss or the gradient norm was not finite."""
    loss_scale: Tensor
    """The factor on the loss in this step."""
    stop: Tensor
    """Ranks that want the run to stop after this step."""


def forward_backward(built: Built, batches: Sequence[Batch], *, tokens: Tensor, loss_scale: Tensor) -> Tensor:
    """Adds the gradients of all micro batches to the buckets. -> this rank's share of the mean loss.

    `tokens`: valid tokens of the global batch; `loss_scale`: factor on the loss; both scalars.
    """
    built.buckets.start_step()
    wide = torch.promote_types(next(iter(built.parameters.values())).dtype, torch.float32)
    loss_scale = loss_scale.to(wide)
    weight = loss_scale / tokens.clamp(min=1)
    total = torch.zeros((), dtype=wide, device=built.device)
    for i, batch in enumerate(batches):
        built.buckets.start_backward(last=i == len(batches) - 1)
        loss = built.model.loss(
            batch.tokens,
            batch.labels,
            batch.mask * weight,
            documents=batch.documents,
            noise=Noise(built.spec.train.seed, batch.ids),
        )
        loss.backward()
        total += loss.detach()
    built.buckets.finish()
    built.tensor_parallel.finish_grads(built.buckets.gradients)
    return total / loss_scale


def count_tokens(built: Built, batches: Sequence[Batch], *, stop: bool) -> tuple[Tensor, Tensor]:
    """Valid tokens of the global batch, and how many ranks ask to stop: one small all-reduce over the world."""
    mask = torch.stack([b.mask.sum() for b in batches]).sum()
    counted = mask if built.mesh.index("tp") == 0 else torch.zeros_like(mask)
    counts = torch.stack([counted, torch.full_like(counted, int(stop))])
    if built.mesh.world_size > 1:
        dist.all_reduce(counts)
    return counts[0], counts[1]


def train_step(
    built: Built,
    batches: Sequence[Batch],
    *,
    lr: float,
    weight_decay: float,
    scaler: LossScaler,
    stop: bool = False,
) -> StepResult:
    """One step on this rank's micro batches. The host reads nothing back."""
    tokens, stop_count = count_tokens(built, batches, stop=stop)
    loss_scale = scaler.scale.clone()
    local = forward_backward(built, batches, tokens=tokens, loss_scale=loss_scale)
    norms = local_norms(built.buckets.gradients, built.layouts)
    scaled_norm = global_norm(norms, built.mesh.group("tp"))
    norm = scaled_norm / loss_scale
    divide_by = loss_scale
    if built.spec.optim.clip is not None:
        divide_by = divide_by * (norm / built.spec.optim.clip).clamp(min=1)
    loss = local.clone()
    if built.mesh.group("dp") is not None:
        dist.all_reduce(loss, group=built.mesh.group("dp"))
    skip = (~(torch.isfinite(norm) & torch.isfinite(loss))).to(torch.float32)
    wide = local.dtype
    built.optimizer.update(
        built.buckets.gradients, lr=lr, weight_decay=weight_decay, divide_by=divide_by.to(wide), skip=skip
    )
    scaler.update(skip)
    return StepResult(loss, local, norm, norms, tokens, skip, loss_scale, stop_count)


@torch.no_grad()
def evaluate(built: Built, batches: Iterable[Batch]) -> Tensor:
    """The mean loss over the valid tokens of all ranks' batches, a scalar in at least fp32."""
    sums = torch.zeros(2, dtype=torch.float64, device=built.device)
    wide = torch.promote_types(next(iter(built.parameters.values())).dtype, torch.float32)
    for batch in batches:
        sums[0] += built.model.loss(batch.tokens, batch.labels, batch.mask.to(wide), documents=batch.documents)
        sums[1] += batch.mask.sum()
    if built.mesh.group("dp") is not None:
        dist.all_reduce(sums, group=built.mesh.group("dp"))
    return sums[0] / sums[1].clamp(min=1)
