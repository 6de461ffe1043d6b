"""Experts in place of the feed-forward layer."""

from math import ceil
from typing import Literal

from megaspec.core.frozen import Auto, Frozen, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Probability


class BalanceLoss(Frozen):
    """A loss that keeps the load of experts even: coefficient · E · Σ f_i P_i (Fedus et al. 2021), f_i the share of all
    choices that expert i got, P_i its mean probability; as in Megatron-LM."""

    kind: Literal["aux", "seq_aux", "global_aux"]
    """What f and P are taken over. aux: a micro batch. seq_aux: a sequence. global_aux: P over a micro batch, f over
    the global batch before this one, since this one's is known only after its last micro batch."""
    coefficient: PositiveFloat
    """Weight of this loss in each layer, whose losses are added. Hugging Face's router_aux_loss_coef times top_k and
    over the number of layers with experts."""


GroupScore = Literal["share", "best", "best_two"]
Weighted = Literal["outputs", "inputs"]


class RouterSpec(Frozen):
    """How tokens choose experts. Scores are computed in at least fp32."""

    score: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    """What turns logits into scores."""
    logit_bias: bool = False
    """Add a learned vector to the logits."""
    norm_top_k: bool = True
    """The weights of a token's experts sum to 1, before `scale`: softmax is taken over the chosen experts, other scores
    are divided by their sum. False: they are weighed by their scores among all experts."""
    scale: PositiveFloat = 1.0
    """Factor on the weights of the chosen experts."""
    n_groups: PositiveInt | None = None
    """Groups of experts; a token first chooses group_top_k of them. None: no groups."""
    group_top_k: PositiveInt | None = None
    """Groups that a token may choose experts from. None: no groups."""
    group_score: GroupScore = "share"
    """Which experts of a group a token compares groups by: the sum of their scores. share: the best
    top_k // group_top_k, as in Megatron-LM. best: the best one, as in DeepSeek-V2. best_two: as in DeepSeek-V3."""
    expert_bias: bool = False
    """Add a bias to the scores that experts are chosen by; it never enters a weight (Wang et al. 2024)."""
    bias_rate: NonNegativeFloat = 0.0
    """Step by which expert_bias moves toward an even load after each step, without a loss. 0: it stays as it is."""
    balancing: Literal["top_k", "sinkhorn"] = "top_k"
    """sinkhorn: scores are balanced before the choice (Clark et al. 2022)."""
    losses: tuple[BalanceLoss, ...] = ()
    """Balancing losses that are added to the loss."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of the mean squared log-sum-exp of the logits (Zoph et al. 2022)."""
    jitter: Probability = 0.0
    """Inputs are multiplied by uniform noise in 1 ± jitter."""


class MoeSpec(Frozen):
    """A mixture of experts in place of the feed-forward layer. Each, shared ones too, is a layer as model.mlp says."""

    n_experts: PositiveInt
    """Routed experts."""
    top_k: PositiveInt = 2
    """Experts that each token takes."""
    d_expert: Auto[PositiveInt] = "auto"
    """Width of an expert. auto: model.d_ffn."""
    d_shared: PositiveInt | None = None
    """Width of the shared experts together, which every token takes. None: there are none."""
    weights_on: Weighted = "outputs"
    """What the weight of a token's expert multiplies. outputs: what the expert puts out, its bias included. inputs:
    what it takes, as in Llama 4."""
    shared_gate: bool = False
    """Weigh the shared experts by a learned gate."""
    every: PositiveInt = 1
    """Every n-th layer has experts, from the first after `first_dense`."""
    first_dense: NonNegativeInt = 0
    """Layers at the start without experts."""
    layers: tuple[Literal[0, 1], ...] | None = None
    """One entry a layer, 1 for experts, instead of `every` and `first_dense`."""
    router: RouterSpec = RouterSpec()
    """How tokens choose experts."""
    capacity_factor: PositiveFloat | None = None
    """Tokens that an expert takes, over the even share; what exceeds it is dropped. None: nothing is dropped."""
    drop: Literal["probs", "position"] = "probs"
    """Whom an expert drops: the lowest weights, or the last in the sequence."""
    pad_to_capacity: bool = False
    """Pad the tokens of each expert to its capacity, so that shapes never change."""

    def in_layers(self, n_layers: int) -> tuple[bool, ...]:
        """One entry for each of `n_layers` layers: whether it has experts in place of the feed-forward layer."""
        if self.layers is not None:
            return tuple(bool(one) for one in self.layers)
        past = (i - self.first_dense for i in range(n_layers))
        return tuple(i >= 0 and i % self.every == 0 for i in past)

    @property
    def experts_of_group(self) -> int:
        """How many experts of a group its score is the sum of."""
        router = self.router
        assert router.group_top_k is not None, "no groups: model.moe.router.group_top_k=null"
        if router.group_score == "share":
            return max(1, self.top_k // router.group_top_k)
        return 2 if router.group_score == "best_two" else 1

    def capacity(self, tokens: int) -> int:
        """Tokens of a micro batch of `tokens` that one expert takes: the even share times the factor, rounded up."""
        assert self.capacity_factor is not None, "nothing is dropped: model.moe.capacity_factor=null"
        return ceil(tokens * self.top_k / self.n_experts * self.capacity_factor)

    def rows(self, tokens: int, *, micro_batch: int) -> int:
        """Rows that the experts get of a rank's `tokens` of a micro batch of so many, spread evenly. Padded, each
        expert gets as many from every rank as it takes of the whole micro batch: that rank may have all of them."""
        if self.capacity_factor is None:
            return tokens * self.top_k
        if self.pad_to_capacity:
            return self.n_experts * min(self.capacity(micro_batch), tokens)
        return max(1, round(tokens * self.top_k * min(1.0, self.capacity_factor)))
