"""Training orders of earlier versions of the rules, in the words of today's."""

from megaspec.data.spec import DataSpec, IndexedSpec


def as_now(spec: DataSpec) -> DataSpec | None:
    """What makes today the order that version 1 made of a spec; None where nothing does.

    Version 1 divided weights by their sum once, and read a single data set without surplus whatever its weight was.
    """
    if not isinstance(spec, IndexedSpec):
        return spec
    if len(spec.blend) == 1:
        bare = spec.blend[0].model_copy(update={"weight": None})
        return spec.model_copy(update={"blend": (bare,)})
    from megaspec.data.indices import normalized  # numpy, only for the runs that need it

    # version 1 counted a data set without a weight as one of weight 1
    given = []
    for part in spec.blend:
        given.append(1.0 if part.weight is None else part.weight)
    once = normalized(given)
    # today's order divides twice, and reads a blend without weights otherwise
    if normalized(once) != once or spec.weights is None:
        return None
    return spec
