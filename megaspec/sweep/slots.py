"""Places for points to run in: disjoint GPUs, or a number of runs at once where there are none. Pure."""

from collections.abc import Mapping, Sequence

from megaspec.core.errors import Problem, RecipeError
from megaspec.core.frozen import AUTO
from megaspec.estimate.target import Target
from megaspec.sweep.spec import SweepSpec

CORES_OF_A_SLOT = 2


def visible_gpus(target: Target, environment: Mapping[str, str]) -> list[str]:
    """The GPUs that a process may use, as CUDA_VISIBLE_DEVICES names them."""
    if target.device != "cuda":
        return []
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(index) for index in range(target.gpus)]
    names = [name.strip() for name in visible.split(",")]
    return [name for name in names if name][: target.gpus]


def point_target(spec: SweepSpec, target: Target) -> Target:
    """The machine as one point sees it: its share of the GPUs. RecipeError: there are fewer than are asked for."""
    if target.device != "cuda":
        if spec.gpus != AUTO:
            text = f"sweep.gpus={spec.gpus}: this machine has no GPU; drop it, or set sweep.slots"
            raise RecipeError([Problem("sweep.gpus", text, code="sweep.gpus")])
        return target
    gpus = target.gpus
    if spec.gpus != AUTO:
        gpus = spec.gpus
    if gpus > target.gpus:
        text = f"sweep.gpus={gpus} must be at most the {target.gpus} GPUs of this machine"
        raise RecipeError([Problem("sweep.gpus", text, code="sweep.gpus")])
    if spec.slots == AUTO:
        return target.model_copy(update={"gpus": gpus})
    if spec.slots > gpus:
        text = f"sweep.slots={spec.slots} must be at most the {gpus} GPUs of the sweep; a point needs one at least"
        raise RecipeError([Problem("sweep.slots", text, code="sweep.gpus")])
    return target.model_copy(update={"gpus": gpus // spec.slots})


class Slots:
    """Hands places out and takes them back. `gpus`: names of those that may be used; none: CPU."""

    def __init__(self, *, most: int, gpus: Sequence[str] = ()):
        self._free = list(gpus)
        self._order = list(gpus)
        self.on_gpus = bool(gpus)
        self.most = most
        self.taken = 0

    def fits(self, ranks: int) -> bool:
        """Whether a point of that many ranks could start now."""
        return self.taken < self.most and (not self.on_gpus or len(self._free) >= ranks)

    def take(self, ranks: int) -> tuple[str, ...]:
        """A place for a point that fits: the names of its GPUs, none on a CPU."""
        assert self.fits(ranks), f"{ranks} ranks find {len(self._free)} GPUs and {self.taken} of {self.most} slots"
        self.taken += 1
        if not self.on_gpus:
            return ()
        taken = tuple(self._free[:ranks])
        del self._free[:ranks]
        return taken

    def give(self, gpus: Sequence[str]) -> None:
        """Takes a place back."""
        self.taken -= 1
        # in the order of the machine, so that the ranks of a run are neighbours where they can be
        self._free = [name for name in self._order if name in self._free or name in gpus]


def make_slots(spec: SweepSpec, target: Target, environment: Mapping[str, str]) -> Slots:
    """The places of a sweep on this machine."""
    gpus = visible_gpus(target, environment)
    if gpus and spec.gpus != AUTO:
        gpus = gpus[: spec.gpus]
    if spec.slots != AUTO:
        most = spec.slots
    elif gpus:
        most = len(gpus)
    else:
        most = max(1, target.cores // CORES_OF_A_SLOT)
    return Slots(most=most, gpus=gpus)
