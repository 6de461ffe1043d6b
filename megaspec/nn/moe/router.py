"""The router of a mixture of experts: which experts each token takes, with what weights, and what keeps them even."""

# B sequences, T tokens of this rank, S tokens of a whole sequence, M = B·T, D model, E experts, k choices of a token

from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from megaspec.nn.attention.module import SequenceContext
from megaspec.nn.by_position import ByPosition
from megaspec.nn.hashing import site_key, uniform
from megaspec.nn.linear import TORCH, Linear, bias_gradient, weight_gradient
from megaspec.nn.moe.balance import load, sinkhorn, within_capacity
from megaspec.nn.moe.spec import MoeSpec

LOSSES = ("aux", "seq_aux", "global_aux", "z")
# Beside a sum of scores, so that scores that all underflowed don't divide by zero.
_SUM_EPS = 1e-20


@dataclass(frozen=True)
class Routing:
    """Where tokens go. Tokens are numbered sequence by sequence."""

    experts: Tensor
    """int64 [M, k], all different in a row."""
    weights: Tensor
    """[M, k] in at least fp32: of the experts' outputs. The auxiliary losses' gradients enter through them."""
    keep: Tensor | None
    """bool [M, k]: False where an expert has no room for the token. None: nothing is dropped."""


@dataclass(frozen=True)
class StepSums:
    """What routers saw in a step; views of one fp64 vector, of which ranks that share a router's tokens take sums."""

    tokens: Tensor
    """[E]: tokens that chose each expert, before drops."""
    plain: Tensor
    """[E]: tokens that would have, without bias and groups."""
    drops: Tensor
    """[E]: of `tokens`, those that the expert had no room for."""
    micro_batches: Tensor
    """Scalar: each rank adds its share of the micro batch's tokens."""
    entropy: Tensor
    """Scalar: sum over tokens of the entropy of their probabilities, in nats."""
    losses: Tensor
    """[4]: sums over micro batches of each of LOSSES, with its coefficient."""


class Tokens:
    """Where the tokens of a micro batch lie: here, all of them. Strategies that split sequences put their own instead.

    Nothing here has a gradient.
    """

    def gather(self, x_BT: Tensor) -> Tensor:
        """This rank's [B, T, ...] -> everybody's [B, S, ...], in the order of the sequence."""
        return x_BT

    def take(self, x_BS: Tensor) -> Tensor:
        """The tokens of the whole sequence -> this rank's."""
        return x_BS

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks that share the sequences."""
        return x


class RouterOp(torch.autograd.Function):
    """x Wᵀ + b, computed in at least fp32 and kept in what x and W come in. `main_grad`: see weight_gradient."""

    @staticmethod
    def forward(ctx, x, weight, bias, main_grad):
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.x_dtype = x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.main_grad = main_grad
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), weight.to(wide))
        if bias is None:
            return logits
        return logits + bias.to(wide)

    @staticmethod
    def backward(ctx, grad_out):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_x = None
        if needs_x:
            grad_x = TORCH.input_gradient(grad_out, weight.to(grad_out.dtype)).to(ctx.x_dtype)
        grad_weight = None
        if needs_weight:
            grad_weight = weight_gradient(ctx.main_grad, grad_out, x.to(grad_out.dtype))
        grad_bias = None
        if needs_bias:
            grad_bias = bias_gradient(grad_out).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None


class _AttachedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, loss, weight, seen, sums):
        ctx.save_for_backward(weight, seen)
        ctx.sums = sums
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        weight, seen = ctx.saved_tensors
        ctx.sums.add_(seen)
        return grad, weight, None, None, None


def attach(x: Tensor, loss: Tensor, *, weight: Tensor, seen: Tensor, sums: Tensor) -> Tensor:
    """Forward: x. Backward: beside x's gradient, `loss` gets the gradient `weight`, and `seen` is added to `sums`.

    In the backward pass, since a forward pass that is recomputed runs twice.
    """
    return _AttachedLoss.apply(x, loss, weight.to(loss.dtype), seen, sums)


class Router(Linear, ByPosition):
    """softmax, sigmoid or sqrt(softplus) of x Wᵀ + b, and the best k of E experts, [B, T, D] -> Routing.

    Rules of choice and weights as in Megatron-core and DeepSeek-V3 (2024): the expert bias and the groups decide who is
    chosen and never enter a weight. `site` is a name that is unique in the model. `tokens`: see Tokens.

    State beside the parameters, in at least fp32: `expert_bias` [E], added to the scores that experts are chosen by
    (None: there is none), and `shares` [E], the previous global batch's share of choices that each expert got (None
    without a global_aux loss). `sums` is what this step saw so far: see StepSums and finish_step. `moves_bias`: false
    where the bias is frozen.
    """

    def __init__(self, d_model: int, moe: MoeSpec, *, site: str):
        super().__init__(d_model, moe.n_experts, bias=moe.router.logit_bias)
        self.moe = moe
        self.spec = moe.router
        self.site = site
        self.moves_bias = True
        # weakly, so that a context that is gone leaves its number to another
        self._counted: WeakValueDictionary[int, SequenceContext] = WeakValueDictionary()
        self.tokens = Tokens()
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        expert_bias = None
        if self.spec.expert_bias:
            expert_bias = torch.empty(moe.n_experts, dtype=wide)
        shares = None
        if any(loss.kind == "global_aux" for loss in self.spec.losses):
            shares = torch.empty(moe.n_experts, dtype=wide)
        self.register_buffer("expert_bias", expert_bias)
        self.register_buffer("shares", shares)
        self.register_buffer("site_key", site_key(site), persistent=False)
        self.fill_buffers()

    @torch.no_grad()
    def fill_buffers(self) -> None:
        """Starts from a bias of 0 and from an even load; called once the module has left the meta device."""
        E = self.moe.n_experts
        self.site_key.copy_(site_key(self.site))
        if self.expert_bias is not None:
            self.expert_bias.zero_()
        if self.shares is not None:
            self.shares.fill_(1 / E)
        # no buffer: those are rounded to the model's precision, and counts of a step don't fit fp32
        self.sums = torch.zeros(3 * E + 2 + len(LOSSES), dtype=torch.float64, device=self.weight.device)

    def forward(self, x_BTD: Tensor, context: SequenceContext) -> Routing:
        logits_BTE = RouterOp.apply(self._jittered(x_BTD, context), self.weight, self.bias, self.main_grad)
        # a choice has no gradient: the router learns from the weights of those that were chosen, and from the losses
        with torch.no_grad():
            experts_BTk = self.choose(self._ranking(logits_BTE, context), context)
        weights_BTk = self._weights(logits_BTE, experts_BTk)
        keep_BTk = self._kept(experts_BTk, weights_BTk.detach(), context)
        if context.aux_weight is not None:
            loss, seen = self._balance(logits_BTE, experts_BTk, keep_BTk, context)
            if logits_BTE.requires_grad:
                weights_BTk = attach(weights_BTk, loss, weight=context.aux_weight, seen=seen, sums=self.sums)
            else:
                self._count(seen, context)
        keep_Mk = None
        if keep_BTk is not None:
            keep_Mk = keep_BTk.flatten(0, 1)
        return Routing(experts_BTk.flatten(0, 1), weights_BTk.flatten(0, 1), keep_Mk)

    def choose(self, ranking_BTE: Tensor, context: SequenceContext) -> Tensor:
        """-> int64 [B, T, k], the highest of each token. Replay and forced balance put a function in its place."""
        return ranking_BTE.topk(self.moe.top_k).indices

    def _count(self, seen: Tensor, context: SequenceContext) -> None:
        """Adds to `sums` here, where nothing is trained up to the choice, so that no backward pass comes. A forward
        pass that is recomputed, for what is trained behind it, comes with the same context and counts once."""
        if id(context) not in self._counted:
            self._counted[id(context)] = context
            self.sums.add_(seen)

    def read(self, sums: Tensor) -> StepSums:
        """Names for the parts of such a vector as `sums`."""
        E = self.moe.n_experts
        tokens, plain, drops, micro_batches, entropy, losses = sums.split([E, E, E, 1, 1, len(LOSSES)])
        return StepSums(tokens, plain, drops, micro_batches[0], entropy[0], losses)

    @torch.no_grad()
    def finish_step(self, sums: Tensor, *, skip: Tensor) -> None:
        """Moves the expert bias toward an even load, keeps the shares for the next step, and starts new sums.

        `sums`: fp64, this router's summed over all ranks that have tokens of the global batch (tp, cp and dp). `skip`:
        scalar, 1 in a step that is not applied: what it saw is forgotten.
        """
        seen = self.read(sums)
        # selected on the device: reading `skip` would wait for the step
        if self.expert_bias is not None and self.moves_bias:
            # up by bias_rate where fewer tokens came than the mean, down where more did (Wang et al. 2024)
            direction_E = (seen.tokens.mean() - seen.tokens).sign()
            moved = self.expert_bias + self.spec.bias_rate * direction_E.to(self.expert_bias.dtype)
            self.expert_bias.copy_(torch.where(skip == 0, moved, self.expert_bias))
        if self.shares is not None:
            shares = (seen.plain / seen.plain.sum()).to(self.shares.dtype)
            self.shares.copy_(torch.where(skip == 0, shares, self.shares))
        self.sums.zero_()

    def _jittered(self, x_BTD: Tensor, context: SequenceContext) -> Tensor:
        """x times numbers that are equally likely in [1 - jitter, 1 + jitter) (Fedus et al. 2021)."""
        noise = context.noise
        jitter = self.spec.jitter
        if noise is None or jitter == 0:
            return x_BTD
        _, T, D = x_BTD.shape
        # by each token's place in the whole sequence, so that every layout draws the same numbers
        position_T = self.places_here(noise.index, T)
        feature_D = torch.arange(D, device=x_BTD.device)
        counters = (noise.ids[:, None, None], position_T[None, :, None], feature_D[None, None, :])
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        return x_BTD * (1 - jitter + 2 * jitter * uniform(noise.key(self.site_key), counters, dtype=wide))

    def _scores(self, logits: Tensor) -> Tensor:
        """[..., E] -> the same shape, none below zero."""
        if self.spec.score == "softmax":
            return logits.softmax(-1)
        if self.spec.score == "sigmoid":
            return logits.sigmoid()
        # where softplus underflows its root has no slope
        return F.softplus(logits).clamp(min=torch.finfo(logits.dtype).tiny).sqrt()

    def _probabilities(self, logits: Tensor) -> Tensor:
        """Scores that sum to 1 over the experts."""
        scores = self._scores(logits)
        if self.spec.score == "softmax":
            return scores
        return scores / (scores.sum(-1, keepdim=True) + _SUM_EPS)

    def _ranking(self, logits_BTE: Tensor, context: SequenceContext) -> Tensor:
        """What experts are chosen by, [B, T, E]."""
        if self.spec.balancing == "sinkhorn":
            # Sinkhorn balances what trains; what is evaluated takes the best experts, whatever else is in the batch
            if context.aux_weight is None:
                return logits_BTE
            whole_BSE = self.tokens.gather(logits_BTE)
            return self.tokens.take(sinkhorn(whole_BSE.flatten(0, 1)).view_as(whole_BSE))
        if self._softmax_of_chosen:
            ranking_BTE = logits_BTE
        else:
            ranking_BTE = self._scores(logits_BTE)
        if self.expert_bias is not None:
            ranking_BTE = ranking_BTE + self.expert_bias
        if self.spec.n_groups is not None:
            ranking_BTE = self._in_best_groups(ranking_BTE)
        return ranking_BTE

    @property
    def _softmax_of_chosen(self) -> bool:
        """Whether the softmax is taken over the logits of the chosen experts alone, behind the choice."""
        return self.spec.score == "softmax" and self.spec.norm_top_k

    def _in_best_groups(self, ranking_BTE: Tensor) -> Tensor:
        """-inf outside of the token's best groups. A group counts as much as its best experts: see group_score.

        G groups of E / G experts each, as in DeepSeek-V3 (2024): a token's experts lie on few nodes.
        """
        n_best = self.spec.group_top_k
        grouped_BTGe = ranking_BTE.unflatten(-1, (self.spec.n_groups, -1))
        scores_BTG = grouped_BTGe.topk(self.moe.experts_of_group).values.sum(-1)
        best_BTg = scores_BTG.topk(n_best).indices
        is_best_BTG = torch.zeros_like(scores_BTG, dtype=torch.bool).scatter(-1, best_BTg, True)
        return grouped_BTGe.where(is_best_BTG[..., None], float("-inf")).flatten(-2)

    def _weights(self, logits_BTE: Tensor, experts_BTk: Tensor) -> Tensor:
        """What the chosen experts' outputs are multiplied by, [B, T, k]: of the scores, without bias and groups."""
        k = self.moe.top_k
        if self.spec.balancing == "sinkhorn":
            # as in Megatron-core: one choice is weighed by itself, several against all experts
            if k == 1:
                scores_BTE = logits_BTE.sigmoid()
            else:
                scores_BTE = logits_BTE.softmax(-1)
            weights_BTk = scores_BTE.gather(-1, experts_BTk)
        elif self._softmax_of_chosen:
            weights_BTk = logits_BTE.gather(-1, experts_BTk).softmax(-1)
        else:
            weights_BTk = self._scores(logits_BTE).gather(-1, experts_BTk)
            if self.spec.norm_top_k:
                weights_BTk = weights_BTk / (weights_BTk.sum(-1, keepdim=True) + _SUM_EPS)
        if self.spec.scale == 1.0:
            return weights_BTk
        return weights_BTk * self.spec.scale

    @torch.no_grad()
    def _kept(self, experts_BTk: Tensor, weights_BTk: Tensor, context: SequenceContext) -> Tensor | None:
        """bool [B, T, k], decided over the whole micro batch."""
        if self.moe.capacity_factor is None:
            return None
        experts_BSk = self.tokens.gather(experts_BTk)
        weights_Nk = None
        if self.moe.drop == "probs":
            weights_Nk = self.tokens.gather(weights_BTk).flatten(0, 1)
        keep_Nk = within_capacity(
            experts_BSk.flatten(0, 1),
            weights_Nk,
            n_experts=self.moe.n_experts,
            capacity=self.moe.capacity(experts_BSk.shape[0] * context.length),
        )
        return self.tokens.take(keep_Nk.view_as(experts_BSk))

    def _balance(
        self, logits_BTE: Tensor, experts_BTk: Tensor, keep_BTk: Tensor | None, context: SequenceContext
    ) -> tuple[Tensor, Tensor]:
        """This rank's share of the micro batch's losses, a scalar, and what it adds to `sums`."""
        probabilities_BTE = self._probabilities(logits_BTE)
        chosen_BE = load(experts_BTk, self.moe.n_experts)
        plain_BE = chosen_BE
        if self.expert_bias is not None or self.spec.n_groups is not None or self.spec.balancing == "sinkhorn":
            plain_BE = load(logits_BTE.detach().topk(self.moe.top_k).indices, self.moe.n_experts)
        loss = logits_BTE.new_zeros(())
        losses_4 = None
        if self.spec.losses or self.spec.z_loss > 0:
            losses_4 = self._losses(logits_BTE, probabilities_BTE, plain_BE, context.length)
            loss = losses_4.sum()
        with torch.no_grad():
            # written part by part: put together they would take three times the operations, each of which is a launch
            vector = logits_BTE.new_zeros(self.sums.shape, dtype=torch.float64)
            seen = self.read(vector)
            seen.tokens.copy_(chosen_BE.sum(0))
            if plain_BE is chosen_BE:
                seen.plain.copy_(seen.tokens)
            else:
                seen.plain.copy_(plain_BE.sum(0))
            if keep_BTk is not None:
                seen.drops.copy_(load(experts_BTk, self.moe.n_experts, ~keep_BTk).sum(0))
            seen.micro_batches.copy_(logits_BTE.new_full((), logits_BTE.shape[1] / context.length))
            seen.entropy.copy_(torch.special.entr(probabilities_BTE).sum())
            if losses_4 is not None:
                seen.losses.copy_(losses_4)
        return loss, vector

    def _losses(self, logits_BTE: Tensor, probabilities_BTE: Tensor, plain_BE: Tensor, sequence_length: int) -> Tensor:
        """This rank's shares of the micro batch's LOSSES, [4]. `plain_BE`: who would choose each expert, without bias
        and groups.

        A balancing loss is coefficient · E · Σ f P, with f the share of choices that an expert got in whatever the loss
        is named after, and P its mean probability. f has no gradient and is known here in full, so the loss is linear
        in P, whose mean over the micro batch is a sum over ranks. The global batch's f is known only when its last
        micro batch has been routed: that of the one before is taken.
        """
        B, _, E = logits_BTE.shape
        k = self.moe.top_k
        S = sequence_length
        kinds = {loss.kind: loss.coefficient for loss in self.spec.losses}
        losses = dict.fromkeys(LOSSES, logits_BTE.new_zeros(()))
        # f of each loss: [E], by sequences [B, E]
        shares: dict[str, Tensor | None] = {"global_aux": self.shares}
        if {"aux", "seq_aux"} & kinds.keys():
            whole_BE = self.tokens.sum(plain_BE).to(logits_BTE.dtype)
            shares["aux"] = whole_BE.sum(0) / (B * S * k)
            shares["seq_aux"] = whole_BE / (S * k)
        if kinds:
            # P: this rank's tokens over all tokens of the micro batch, summed over sequences where f is of all of them
            mean_BE = probabilities_BTE.sum(1) / (B * S)
            for kind, coefficient in kinds.items():
                losses[kind] = coefficient * E * (shares[kind] * mean_BE).sum()
        if self.spec.z_loss > 0:
            # the mean over tokens of logsumexp² (Zoph et al. 2022)
            losses["z"] = self.spec.z_loss * logits_BTE.logsumexp(-1).square().sum() / (B * S)
        return torch.stack([losses[kind] for kind in LOSSES])
