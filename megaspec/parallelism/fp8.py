"""Which layers compute in fp8, and what their scales are made of over ranks and steps.

Note "Whose scales". A scale is that of a whole tensor, as if one rank held it: of a weight over the tensor-parallel
ranks that hold parts of it, of activations and their gradients over those that hold parts of the same tokens' features.
Of experts: nn/moe/fp8.py, note "Experts".
What differs from rank to rank by its tokens has scales of its own: micro batches, of data-parallel and of
context-parallel ranks. So dp ranks compute what one rank computes with the same micro batches one after the other.

Note "Delayed". Scales of a step are made of the largest elements of the steps before it, so that they are known before
the elements are. After each step the largest of all micro batches and of all ranks that share the layer are remembered:
one all-reduce for all layers. A step that is left out is not remembered: what was not finite in it has neighbours of
any size. Before anything is remembered scales are those of the tensors themselves: in the first step, and of a layer's
inputs or gradients as long as they were all zero or steps were left out, or where a fork trains what was frozen. Which
these are the host reads behind steps that meet some, and when a checkpoint is loaded.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaspec.core import counted
from megaspec.nn.attention.module import Attention
from megaspec.nn.decoder import Decoder
from megaspec.nn.fp4 import Fp4Form, Fp4Linear
from megaspec.nn.fp8 import REMEMBERED, Fp8Form, Fp8Linear, Fp8Memory, Fp8Shared, Fp8Use, Split
from megaspec.nn.fp8_facts import GRADIENTS_IN_FP8, INPUTS_IN_FP8
from megaspec.nn.fp8_layouts import Role
from megaspec.nn.fp8_mx import MxFp8Form, MxFp8Linear
from megaspec.nn.fp8_producers import Producer
from megaspec.nn.fp8_te import TeFp8Form, TeFp8Linear
from megaspec.nn.hashing import key_of
from megaspec.nn.layer.module import Layer
from megaspec.nn.linear import Linear
from megaspec.nn.mlp.module import Gated
from megaspec.nn.moe.fp8 import EXPERTS_GRADIENT, Fp8Experts
from megaspec.nn.moe.module import Experts, GroupedLinear, Moe
from megaspec.nn.norm.module import KernelNorm
from megaspec.parallelism.collectives import all_reduce_max, wait
from megaspec.parallelism.fp8_gather import Fp8Gather
from megaspec.parallelism.mesh import Mesh
from megaspec.parallelism.tensor import ColumnParallelLinear, RowParallelLinear
from megaspec_kernels.fp8_cast.formats import scale_of
from megaspec_kernels.registry import ScaledGroupedKernel

AnyForm = Fp8Form | TeFp8Form | MxFp8Form | Fp4Form
LAYERS: dict[type[AnyForm], type[Fp8Linear]] = {
    Fp8Form: Fp8Linear,
    TeFp8Form: TeFp8Linear,
    MxFp8Form: MxFp8Linear,
    Fp4Form: Fp4Linear,
}
"""What computes a layer, by the form of the model's. Experts have one of their own."""


class Fp8:
    """The strategy. `apply` to all chunks, when their modules are what they stay and lie in memory."""

    def __init__(
        self,
        mesh: Mesh,
        form: AnyForm | None,
        *,
        names: Mapping[int, Sequence[str]],
        history: int,
        grouped: ScaledGroupedKernel,
        recomputed: frozenset[str] = frozenset(),
        gathers: bool = False,
        seed: int = 0,
    ):
        """`form`: None: another precision. `names`: of each layer that computes in fp8, by its number, those of its
        linears. `history`: steps that delayed scales look back. `grouped`: products of experts. `recomputed`: parts of
        each layer that are computed again by themselves. `gathers`: sharded weights are gathered in fp8. `seed`: of the
        run, for what is rounded at random."""
        self._mesh = mesh
        self._form = form
        self._names = names
        self._history = history
        self._recomputed = recomputed
        self._grouped = grouped
        self._shared = Fp8Shared()
        self._seed = seed
        self._steps = 0
        self.linears: dict[str, Fp8Linear] = {}
        """By global name of the weight."""
        self._gathers = gathers

    @property
    def is_delayed(self) -> bool:
        return self._form is not None and self._form.recipe == "delayed"

    def apply(self, chunks: Sequence[Decoder], *, wide: torch.dtype) -> None:
        """Has the layers' products take fp8. `wide`: at least fp32."""
        if self._form is None:
            return
        modules: dict[str, Linear] = {}
        for chunk in chunks:
            for number, layer in chunk.layers.items():
                for name in self._names.get(int(number), ()):
                    modules[f"layers.{number}.{name}.weight"] = layer.get_submodule(name)
        device = self._mesh.device
        count = len(modules)
        # what is remembered of each layer, of what a step takes in, in the order of REMEMBERED, the newest step first
        dtype = self._form.memory_dtype(wide)
        self.largest = torch.zeros(count, len(REMEMBERED), self._history, dtype=dtype, device=device)
        self._scales = torch.ones(count, len(REMEMBERED), dtype=dtype, device=device)
        self._seen = torch.zeros_like(self._scales)
        self.saturated = torch.zeros(1, dtype=torch.int64, device=device)
        experts = [i for i, module in enumerate(modules.values()) if isinstance(module, GroupedLinear)]
        self._of_experts = torch.tensor(experts, dtype=torch.int64, device=device)
        for i, (name, module) in enumerate(modules.items()):
            memory = None
            if self.is_delayed:
                memory = Fp8Memory(self._scales[i], self._seen[i], self.saturated)
            linear = self._linear(module, memory)
            module.fp8 = Fp8Use(
                linear.ticket, self._form.recipe, self._form.gradient_format, gathers_bytes=bool(linear.of_tokens)
            )
            self.linears[name] = linear
        if self._form.takes_written:
            for chunk in chunks:
                for layer in chunk.layers.values():
                    _have_experts_write(layer, self._recomputed)
        if self.is_delayed and self._form.takes_written:
            for chunk in chunks:
                for layer in chunk.layers.values():
                    _have_fp8_written(layer, self._recomputed)

    def _linear(self, module: Linear, memory: Fp8Memory | None) -> Fp8Linear:
        parts = self._parts(module)
        if not isinstance(module, GroupedLinear):
            make = LAYERS[type(self._form)]
            return make(self._form, self._shared, **parts, memory=memory)
        return Fp8Experts(
            self._form, self._shared, **parts, memory=memory, n_experts=module.n_experts, grouped=self._grouped
        )

    def _parts(self, module: Linear) -> dict[str, object]:
        """How ranks divide a layer, as Fp8Linear takes it."""
        if isinstance(module, GroupedLinear):
            return self._parts_over(module.split, self._mesh.group("etp"))
        splits: dict[type[Linear], Split] = {
            Linear: "none",
            ColumnParallelLinear: "outputs",
            RowParallelLinear: "inputs",
        }
        split = splits.get(type(module))
        assert split is not None, f"{type(module).__name__} computes in no fp8"
        if split == "none":
            return self._parts_over(split, None)
        return {**self._parts_over(split, module.group), "of_tokens": self._of_tokens(module)}

    def _of_tokens(self, module: ColumnParallelLinear | RowParallelLinear) -> frozenset[Role]:
        """What its ranks quantise before they gather it."""
        if not module.sequence:
            return frozenset()
        if isinstance(module, ColumnParallelLinear) and self._form.recipe in INPUTS_IN_FP8:
            return frozenset({"input"})
        if isinstance(module, RowParallelLinear) and self._form.recipe in GRADIENTS_IN_FP8:
            return frozenset({"gradient"})
        return frozenset()

    def _parts_over(self, split: Split, group: dist.ProcessGroup | None) -> dict[str, object]:
        if split == "none":
            return {"split": split}
        return {
            "split": split,
            "largest": lambda amax: wait(all_reduce_max(amax, group)),
            "group": group,
            "counts_alike": group is None or dist.get_rank(group) == 0,
        }

    @property
    def gather(self) -> Fp8Gather | None:
        """What gathers sharded weights in fp8; None: nothing does. After `apply`."""
        return Fp8Gather(self._mesh, self.linears) if self._gathers else None

    def renew(self) -> None:
        """The weights have changed, or are about to: what was quantised is of older ones."""
        self._shared.version += 1

    def free(self, names: Sequence[str]) -> None:
        """These weights are freed on this rank: what was quantised of them goes, too."""
        for name in names:
            if name in self.linears:
                self.linears[name].forget_weight()

    @torch.no_grad()
    def start_step(self, step: int = 0) -> None:
        """Call before the first forward pass of a training step. `step`: its number; 0: nobody counts them."""
        if isinstance(self._form, Fp4Form) and self._form.rounding == "stochastic":
            self._set_draws(step)
        if not self.is_delayed:
            return
        self._shared.is_recording = True
        self._shared.met_fresh = False
        self._seen.zero_()
        self.saturated.zero_()

    def _set_draws(self, step: int) -> None:
        """What rounds at random in a step depends on the seed, the step and which tokens and layers a rank has: so a
        step is the same when it is computed again, and behind a checkpoint. Of what tensor-parallel ranks all have they
        round alike."""
        self._steps += 1
        place = [str(self._mesh.index(axis)) for axis in ("pp", "dp", "cp")]
        name = f"fp4 step {step}" if step else f"fp4 call {self._steps}"
        key = key_of(self._seed, f"{name} of {' '.join(place)}")
        device = self._mesh.device
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            torch.cuda.default_generators[index].manual_seed(key)
        elif device.type == "cpu":
            torch.default_generator.manual_seed(key)

    @torch.no_grad()
    def finish_step(self, *, skip: Tensor) -> Tensor | None:
        """Call behind the last backward pass of a step, on all ranks: remembers its largest elements. `skip`: scalar,
        not 0 where the step was left out, whose elements may be of any size. -> how many elements saturated, over all
        ranks; None: none can, or nobody counts them."""
        if not self.is_delayed:
            return None
        self._shared.is_recording = False
        group = self._mesh.group("tp-dp-cp")
        if group is not None and len(self.linears):
            counted.all_reduce(self._seen, dist.ReduceOp.MAX, group=group)
        # a step that was left out, or saw nothing, is taken to be as the one before it
        is_seen = (self._seen > 0) & torch.isfinite(self._seen) & (skip == 0)
        newest = torch.where(is_seen, self._seen, self.largest[..., 0])
        self.largest.copy_(torch.cat((newest[..., None], self.largest[..., :-1]), dim=-1))
        if self._shared.met_fresh:
            self._find_fresh()
        # here, so that what is evaluated or written between two steps has the scales that the next step has, and a run
        # that goes on from a checkpoint of this one
        self._set_scales()
        if not self._form.counts_saturated:
            return None
        saturated = self.saturated.clone()
        if self._mesh.world_size > 1:
            counted.all_reduce(saturated)
        return saturated

    @torch.no_grad()
    def _set_scales(self) -> None:
        amax = self.largest.amax(-1)
        for place, role in enumerate(REMEMBERED):
            self._scales[:, place] = self._form.delayed_scale(amax[:, place], role)
        # of experts, whose gradients are in a format of their own
        place = REMEMBERED.index("gradient")
        mine = amax[self._of_experts, place]
        self._scales[self._of_experts, place] = scale_of(mine, EXPERTS_GRADIENT, margin=self._form.margin)

    def state(self) -> dict[str, Tensor]:
        """What delayed scales are made of, [2, history] by the name of the layer's weight, the same on all ranks that
        have the layer; it belongs into checkpoints. Empty: nothing is remembered."""
        if not self.is_delayed:
            return {}
        return dict(zip(self.linears, self.largest, strict=True))

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state`; empty: nothing is remembered."""
        if not state:
            self.largest.zero_()
        else:
            for name, mine in self.state().items():
                mine.copy_(state[name])
        self._find_fresh()
        self._set_scales()

    def _find_fresh(self) -> None:
        """Looks of what nothing is remembered; waits for the device."""
        if self.largest.is_meta:
            # traced: there are no numbers
            return
        is_known = (self.largest.amax(-1) > 0).tolist()
        for linear, known in zip(self.linears.values(), is_known, strict=True):
            linear.memory.fresh = frozenset(role for role, one in zip(REMEMBERED, known, strict=True) if not one)


def _have_fp8_written(layer: Layer, recomputed: frozenset[str]) -> None:
    """Has norms and gates of a layer write fp8 for what takes it, and gates and rotations for the gradient of what they
    take.

    Of tokens that tensor-parallel ranks gather behind a norm it writes rows alone: columns are what is gathered, turned
    round. So it does for a frozen weight: columns are for weight gradients. Gates and rotations write both in any case,
    which moves fewer bytes than a cast in rows behind them would. What lies between a layer whose outputs they divide
    and one whose inputs they divide is a rank's own.
    Layers that have a bias quantise their gradient, too. A norm that is computed apart, and a gate that is, being one
    of the parts that are `recomputed`, is no part of another operation.
    """
    for norm, mixer in layer.pairs():
        if not isinstance(norm, KernelNorm) or norm.is_alone or norm.kernel.producer is None:
            continue
        entry = getattr(mixer, "entry", None)
        if _takes_written(entry, Linear, ColumnParallelLinear):
            gathers = isinstance(entry, ColumnParallelLinear) and entry.sequence
            columns = entry.weight.requires_grad and not gathers
            norm.fp8 = Producer(norm.kernel.producer.implementation, entry.fp8.ticket, columns=columns)
    for mixer in layer.mixers():
        if isinstance(mixer, Gated):
            _have_gate_write(mixer, recomputed)
        if isinstance(mixer, Attention) and mixer.turns_product:
            producer = mixer.rotation.kernel.producer
            if producer is not None and _takes_written_gradient(mixer.wqkv):
                mixer.fp8_producer = producer.implementation


def _have_experts_write(layer: Layer, recomputed: frozenset[str]) -> None:
    """Has what lies around the products of experts write fp8: see nn/moe/fp8_producers.py. What is computed again by
    itself is no part of another operation."""
    for mixer in layer.mixers():
        if not isinstance(mixer, Moe) or "moe" in recomputed:
            continue
        experts = mixer.experts
        if type(experts) is not Experts or not experts.is_in_fp8 or not experts.shares_scales:
            continue
        experts.writes_fp8 = experts.activation.writer is not None and "activation" not in recomputed
        # rows that other ranks send are there in the model's format; those that are weighted are so before the cast
        experts.moves_fp8 = mixer.dispatch.hands_tokens and experts.weights_on != "inputs"


def _have_gate_write(mixer: Gated, recomputed: frozenset[str]) -> None:
    """See _have_fp8_written."""
    if not mixer.is_by_kernel or mixer.kernel.producer is None or recomputed & mixer.recompute_parts:
        return
    if _takes_written(mixer.w_down, Linear, RowParallelLinear) and _takes_written_gradient(mixer.w_gate_up):
        mixer.fp8_producer = mixer.kernel.producer.implementation


def _takes_written(linear: nn.Module | None, *kinds: type[Linear]) -> bool:
    """Whether its input may arrive in fp8, where it is one of these kinds."""
    return type(linear) in kinds and linear.fp8 is not None


def _takes_written_gradient(linear: Linear) -> bool:
    """Whether its output's gradient may arrive in fp8."""
    return type(linear) in (Linear, ColumnParallelLinear) and linear.fp8 is not None and linear.bias is None
