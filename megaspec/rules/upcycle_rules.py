"""Rules of experts that begin as copies of a model without any."""

from megaspec.core.errors import Problem
from megaspec.core.problems import show
from megaspec.nn.layer.spec import FlatLayers
from megaspec.recipe import ModelSpec
from megaspec.rules.case import Case


def copies_add_up_to_the_dense_model(case: Case) -> Problem | None:
    """Experts that are copies of a feed-forward layer put out together what it does."""
    init = case.recipe.init
    moe = case.moe
    source = case.facts.weights
    # a run that goes on, or a fork, has its beginning behind it
    if init.upcycle == "none" or source is None:
        return None
    text = f"init.upcycle={init.upcycle}"
    if moe is None:
        return Problem("init.upcycle", f"{text} makes experts, and model.moe=null has none; set model.moe, or drop it")
    there = source.model
    if there is not None and there.moe is not None:
        text += f" begins with a model without experts, and {show(source.path)} has {there.moe.n_experts}"
        return Problem("init.upcycle", f"{text}; drop it, and {source.key} reads them as they are")
    found = []
    ways = []
    for key, value, mended in _obstacles(case):
        found.append(f"model.moe.{key}={show(value)}")
        ways.append(f"model.moe.{key}={show(mended)}")
    if there is not None and moe.d_expert != there.d_ffn:
        found.append(f"model.moe.d_expert={moe.d_expert} (there model.d_ffn={there.d_ffn})")
        ways.append(f"model.moe.d_expert={there.d_ffn}")
    if not found:
        return None
    text += f": the model has to begin as the one without experts, which it does not with {', '.join(found)}"
    return Problem("init.upcycle", f"{text}; set {' '.join(ways)}")


def _obstacles(case: Case) -> list[tuple[str, object, object]]:
    """(setting below model.moe, its value, the value that leaves the sum as it is): what makes copies of one layer,
    weighed and added, something else than the layer."""
    moe = case.moe
    router = moe.router
    found: list[tuple[str, object, object]] = []
    # weights have to sum to 1
    if not router.norm_top_k:
        found.append(("router.norm_top_k", False, True))
    if router.balancing != "top_k":
        found.append(("router.balancing", router.balancing, "top_k"))
    if router.scale != 1.0:
        found.append(("router.scale", router.scale, 1.0))
    # a layer is not linear in what it takes
    if moe.weights_on == "inputs":
        found.append(("weights_on", moe.weights_on, "outputs"))
    # a second summand
    if moe.d_shared is not None:
        found.append(("d_shared", moe.d_shared, None))
    # tokens without any expert
    if moe.capacity_factor is not None:
        found.append(("capacity_factor", moe.capacity_factor, None))
    return found


def without_experts(model: ModelSpec) -> ModelSpec:
    """The model of which a model with experts can begin as copies: a feed-forward layer wherever it has some."""
    changes: dict[str, object] = {"moe": None}
    if isinstance(model.layer, FlatLayers):
        mixers = tuple("mlp" if mixer == "moe" else mixer for mixer in model.layer.mixers)
        changes["layer"] = model.layer.model_copy(update={"mixers": mixers})
    if not any("mlp" in mixers for mixers in model.mixers):
        # no layer has the width that is said of them
        changes["d_ffn"] = model.moe.d_expert
    return model.model_copy(update=changes)
