"""What builds the chosen kinds: ours, and those of the plug-ins of this process. Only who builds a model comes here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from megaspec.core.errors import RecipeError
from megaspec.core.frozen import Frozen
from megaspec.data.loader import SOURCES
from megaspec.data.source import Source
from megaspec.data.spec import DataSpec
from megaspec.log.sinks import SERVICES, SinkBuilder
from megaspec.log.spec import ReportSpec
from megaspec.model.builders import MODELS, ModelBuilder
from megaspec.model.part_builders import PARTS, PartBuilders
from megaspec.model.spec import TransformerSpec
from megaspec.optim.optimizer import OPTIMIZERS, OptimizerBuilder
from megaspec.optim.spec import OptimizerSpec
from megaspec.plugins import Kind, added_kinds, import_failure
from megaspec.report.sink import ReportSink
from megaspec_kernels.registry import CrossEntropyKernel


@dataclass(frozen=True)
class Builders:
    """By the class of what is chosen: what is called with it."""

    models: Mapping[type[TransformerSpec], ModelBuilder]
    parts: PartBuilders
    sources: Mapping[type[DataSpec], Callable[..., Source]]
    optimizers: Mapping[type[OptimizerSpec], OptimizerBuilder]
    losses: Mapping[type[Frozen], Callable[[Any], CrossEntropyKernel]]
    sinks: Mapping[type[Frozen], SinkBuilder]


def loaded_builders() -> Builders:
    """Ours, and those of every plug-in that is loaded, imported. RecipeError: one is not there."""

    def builders_of(place: str) -> dict[type[Frozen], Callable[..., Any]]:
        return {kind.spec: _imported(kind) for kind in added_kinds(place)}

    parts = PartBuilders(
        norms={**PARTS.norms, **builders_of("norms")},
        mlps={**PARTS.mlps, **builders_of("mlps")},
        attentions={**PARTS.attentions, **builders_of("attentions")},
        positions={**PARTS.positions, **builders_of("positions")},
    )
    return Builders(
        models={**MODELS, **builders_of("models")},
        parts=parts,
        sources={**SOURCES, **builders_of("sources")},
        optimizers={**OPTIMIZERS, **builders_of("optimizers")},
        losses=builders_of("losses"),
        sinks={**SERVICES, ReportSpec: ReportSink, **builders_of("sinks")},
    )


@cache
def _imported(kind: Kind) -> Callable[..., Any]:
    name, _, builder = kind.build.partition(":")
    label = f"--plugin: {kind.build} of {kind.spec.__name__}"
    try:
        module = import_module(name)
    # A package may raise anything while it is imported, as in megaspec/plugins.py.
    except (Exception, SystemExit) as error:
        raise RecipeError(f"{label} can't be imported: {import_failure(error, name)}") from None
    if not hasattr(module, builder):
        raise RecipeError(f"{label}: {name} has no {builder} once it is imported; define it there")
    return getattr(module, builder)
