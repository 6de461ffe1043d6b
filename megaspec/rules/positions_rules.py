"""Rules about rotary positions, and about layers that differ in theirs or in their masks."""

from collections.abc import Iterator

from megaspec.core.divisors import multiples
from megaspec.core.errors import Problem
from megaspec.core.problems import did_you_mean, one_of
from megaspec.core.units import counted
from megaspec.nn.rope.spec import RotarySpec
from megaspec.rules.case import Case
from megaspec.rules.ways import Way, way_out


def _rotary(case: Case) -> Iterator[tuple[str, RotarySpec]]:
    """Every section of rotary positions, by its dotted path."""
    model = case.recipe.model
    if model.positions.kind == "rotary":
        yield "model.positions", model.positions
    for name, layer_type in model.layer_types.items():
        positions = layer_type.positions
        if positions is not None and positions.kind == "rotary":
            yield f"model.layer_types.{name}.positions", positions


def rotary_heads_are_even(case: Case) -> Problem | None:
    """Rotary positions turn pairs of a head's numbers."""
    model = case.recipe.model
    if case.mla is not None:
        return None
    for key, positions in _rotary(case):
        # the dynamic base takes the root of the number of pairs but one
        least = 4 if positions.scaling.kind == "dynamic" else 2
        turned = int(positions.fraction * model.d_head)
        if turned % 2 == 0 and turned >= least:
            continue
        if positions.fraction == 1:
            return _odd_head(case, least)
        fits = [n / model.d_head for n in range(least, model.d_head + 1, 2)]
        fits = [fraction for fraction in fits if int(fraction * model.d_head) % 2 == 0]
        text = f"{key}.fraction={positions.fraction} of model.d_head={model.d_head} turns {turned} features"
        text += f" and must turn an even number of at least {least}"
        way = way_out(case, Way(f"{key}.fraction", fits, positions.fraction, most=2))
        return Problem(f"{key}.fraction", f"{text}; {way}")
    return None


def _odd_head(case: Case, least: int) -> Problem:
    """Of heads that turn as a whole."""
    model = case.recipe.model
    text = f"model.d_head={model.d_head} must be even for rotary positions"
    if least > 2:
        text = f"model.d_head={model.d_head} must be even and at least {least} for dynamic rotary positions"
    # widths of the model whose heads are even, where d_head follows from it
    unit = 2 * model.n_heads
    widths = []
    if "model.d_head" in case.decided:
        widths = multiples(model.d_model, unit)
    way = way_out(
        case,
        Way("model.d_head", [n for n in multiples(model.d_head, 2) if n >= least], model.d_head, most=2),
        Way("model.d_model", widths, model.d_model, most=2),
    )
    return Problem("model.d_head", f"{text}; {way}")


def rotary_scaling_is_ordered(case: Case) -> Problem | None:
    """Rotary scaling goes from one end of the frequencies to the other."""
    for key, positions in _rotary(case):
        scaling = positions.scaling
        # equal, as in Llama 4 Scout, all wavelengths beyond one are stretched in full
        if scaling.kind == "llama3" and scaling.low_freq_factor > scaling.high_freq_factor:
            name = f"{key}.scaling.low_freq_factor"
            text = f"{name}={scaling.low_freq_factor} must be at most {key}.scaling.high_freq_factor="
            return Problem(name, f"{text}{scaling.high_freq_factor}; Llama 3 has 1 and 4")
        if scaling.kind == "yarn" and scaling.beta_slow >= scaling.beta_fast:
            name = f"{key}.scaling.beta_slow"
            text = f"{name}={scaling.beta_slow} must be below {key}.scaling.beta_fast={scaling.beta_fast}"
            return Problem(name, f"{text}; set them to 1 and 32, as YaRN has them")
    return None


def yarn_has_growing_wavelengths(case: Case) -> Problem | None:
    """YaRN asks which frequency turns how often, which a base of 1 or less does not say."""
    for key, positions in _rotary(case):
        if positions.scaling.kind == "yarn" and positions.base <= 1:
            text = f"{key}.base={positions.base} must be above 1 with {key}.scaling.kind=yarn"
            return Problem(f"{key}.base", f"{text}; most models have 10000, set that")
    return None


def longrope_has_a_factor_for_each_frequency(case: Case) -> Problem | None:
    """LongRoPE has as many factors as there are frequencies, half the features that turn."""
    model = case.recipe.model
    for key, positions in _rotary(case):
        if positions.scaling.kind != "longrope":
            continue
        n_frequencies = positions.turned(model.attention.rotated(model.d_head)) // 2
        for name in ("short_factor", "long_factor"):
            count = len(getattr(positions.scaling, name))
            if count != n_frequencies:
                text = f"{key}.scaling.{name} has {counted(count, 'entry')} and must have {n_frequencies}"
                text += (
                    f", one for each pair of features that turn of model.d_head={model.d_head}; write {n_frequencies}"
                )
                return Problem(f"{key}.scaling.{name}", text)
    return None


def attention_factor_is_said_once(case: Case) -> Problem | None:
    """One setting says what cosine and sine are multiplied by."""
    for key, positions in _rotary(case):
        scaling = positions.scaling
        path = f"{key}.scaling"
        if scaling.kind == "yarn":
            pair = {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
            given = [f"{path}.{name}" for name, value in pair.items() if value is not None]
            if len(given) == 1:
                text = f"{given[0]} says nothing without its fellow: YaRN takes mscale and mscale_all_dim together"
                return Problem(given[0], f"{text}; set both, or drop it")
            if given and scaling.attention_factor is not None:
                text = f"{path}.attention_factor={scaling.attention_factor} leaves nothing to mscale and mscale_all_dim"
                return Problem(f"{path}.attention_factor", f"{text}; drop it, or both of them")
        if scaling.kind == "longrope":
            if scaling.factor is None and scaling.attention_factor is None:
                text = f"{path} says neither factor nor attention_factor, what cosine and sine are multiplied by"
                return Problem(f"{path}.factor", f"{text}; set {path}.factor, how much longer sequences may be")
            if scaling.factor is not None and scaling.attention_factor is not None:
                text = f"{path}.factor={scaling.factor} says nothing beside {path}.attention_factor="
                return Problem(f"{path}.factor", f"{text}{scaling.attention_factor}; drop one of them")
    return None


def layer_pattern_names_layer_types(case: Case) -> Problem | None:
    """The pattern of layers names types that there are."""
    model = case.recipe.model
    unknown = next((name for name in model.layer_pattern if name not in model.layer_types), None)
    if unknown is None:
        return None
    text = f"model.layer_pattern names {unknown}, which model.layer_types does not have"
    near = did_you_mean(unknown, model.layer_types)
    known = f"it has {one_of(list(model.layer_types))}" if model.layer_types else "it is empty"
    return Problem("model.layer_pattern", f"{text}; {near or known}, or set model.layer_types.{unknown}={{}}")


def layer_types_are_used(case: Case) -> Problem | None:
    """Each type of layer is that of a layer with attention."""
    model = case.recipe.model
    pattern = model.layer_pattern
    used = set()
    for number, mixers in enumerate(model.mixers):
        if pattern and "attention" in mixers:
            used.add(pattern[number % len(pattern)])
    idle = next((name for name in model.layer_types if name not in used), None)
    if idle is None:
        return None
    named = f"model.layer_types.{idle}"
    text = f"{named} is the type of no layer with attention among model.n_layers={model.n_layers}"
    way = f"move {idle} forward in model.layer_pattern, or drop it"
    if idle not in pattern:
        text = f"{named} is in no place of model.layer_pattern"
        way = "name it there, or drop it"
    return Problem("model.layer_types", f"{text}; {way}")


def layers_turn_where_nothing_is_added(case: Case) -> Problem | None:
    """Layers differ in what turns their heads, not in what is added to the embedding for all of them."""
    model = case.recipe.model
    if model.positions.kind in ("rotary", "none"):
        return None
    for name, layer_type in model.layer_types.items():
        if layer_type.positions is not None:
            key = f"model.layer_types.{name}.positions"
            text = f"{key} needs model.positions.kind=rotary or none, it is {model.positions.kind}"
            return Problem(key, f"{text}; set that to none, or drop {key}")
    return None


def layers_have_masks_where_attention_has(case: Case) -> Problem | None:
    """Layers differ in their masks where attention has more than one."""
    model = case.recipe.model
    if model.has_masks:
        return None
    for name, layer_type in model.layer_types.items():
        if layer_type.mask is not None:
            key = f"model.layer_types.{name}.mask"
            text = f"{key}.kind={layer_type.mask.kind} needs model.attention.kind=gqa, it is {model.attention.kind}"
            return Problem(key, f"{text}; set that to gqa, or drop {key}")
    return None


def _kinds_in_layers(case: Case) -> frozenset[str]:
    """Kinds of positions that layers with attention have."""
    model = case.recipe.model
    pattern = model.layer_pattern
    kinds = set()
    for number, mixers in enumerate(model.mixers):
        if "attention" not in mixers:
            continue
        positions = model.positions
        layer_type = None
        if pattern:
            layer_type = model.layer_types.get(pattern[number % len(pattern)])
        if layer_type is not None and layer_type.positions is not None:
            positions = layer_type.positions
        kinds.add(positions.kind)
    return frozenset(kinds)


def l2_norms_have_positions_before_them(case: Case) -> Problem | None:
    """The norm behind rotary positions is in layers that have them."""
    model = case.recipe.model
    if model.attention.kind != "gqa" or model.attention.qk_norm != "l2" or "rotary" in _kinds_in_layers(case):
        return None
    text = "model.attention.qk_norm=l2 does nothing in layers without rotary positions, which all are"
    text += f" with model.positions.kind={model.positions.kind}"
    text += "; set model.attention.qk_norm=none or per_head, or model.positions={kind: rotary}"
    return Problem("model.attention.qk_norm", text)


def temperature_is_for_layers_without_rotary_positions(case: Case) -> Problem | None:
    """Queries grow with their position in layers without rotary positions."""
    model = case.recipe.model
    if model.attention.kind != "gqa" or model.attention.temperature.kind == "none":
        return None
    if _kinds_in_layers(case) != {"rotary"}:
        return None
    text = f"model.attention.temperature={model.attention.temperature.kind} does nothing with rotary positions"
    text += ", which all layers have; set model.attention.temperature={kind: none}, or model.positions={kind: none}"
    return Problem("model.attention.temperature", text)
