"""The cases that layouts are tested on. What the matrix in README.md shows is counted here."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from itertools import combinations, cycle, islice, product
from typing import Any

from tests.parity.cases import DROPS, SEQUENCES, SHARED, Case, Settings
from tests.parity.covering import covering, dressed, full_product

# The ways of each dimension over two ranks. Those of experts lie over the ranks of the others.
AXES: dict[str, dict[str, dict[str, Any]]] = {
    "tensor": {"tp": {"tp": 2}, "sp": {"tp": 2, "sequence": True}},
    "pipeline": {
        "1f1b": {"pp": 2},
        "gpipe": {"pp": 2, "schedule": "gpipe"},
        "interleaved": {"pp": 2, "schedule": "interleaved", "virtual": 2, "n_layers": 4},
        "zb_h1": {"pp": 2, "schedule": "zb_h1"},
        "zb_v": {"pp": 2, "schedule": "zb_v", "virtual": 2, "n_layers": 4},
    },
    "context": {kind: {"cp": 2, "context": kind} for kind in ("ring", "all_gather", "all_to_all")},
    "data": {strategy: {"dp": 2, "strategy": strategy} for strategy in ("replicate", "zero1", "zero2", "fsdp")},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "ep": {"ep": 2},
    "ep all_gather": {"ep": 2, "dispatch": "all_gather"},
    "etp": {"etp": 2},
}
ROUTERS_IN_TURN = ("softmax", "first", "sigmoid", "root", "sinkhorn")
"""Those that meet everything else; of the others, see _experts."""
# What a batch, a model or a kernel can do to a layout.
FEATURES: dict[str, tuple] = {
    "accumulate": (1, 2, 3, 4),
    "mask": ("uneven", "empty_rank", "empty_micro", "empty_part", "full"),
    "tied": (False, True),
    "pad": (1, 8),
    "kv_heads": (2, 4, 1),
    "documents": (False, True),
    "dropout": (False, True),
    "family": ("llama", "gpt"),
    "optimizer": ("adamw", "sgd"),
    "attention": ("sdpa", "reference"),
    "cross_entropy": ("chunked", "reference"),
    "scale": (1.0, 4096.0),
    "qk_norm": (False, True),
    "router": ("", *ROUTERS_IN_TURN),
    "drop": tuple(DROPS),
    "shared": tuple(SHARED),
    "every": (1, 2),
}
PLAIN: dict[str, tuple] = {
    "accumulate": (1, 3),
    "mask": ("uneven", "empty_micro"),
    "tied": (False, True),
    "pad": (1,),
    "kv_heads": (2,),
    "documents": (False, True),
    "dropout": (False, True),
    "family": ("llama", "gpt"),
    "optimizer": ("adamw",),
    "attention": ("reference",),
    "cross_entropy": ("chunked",),
    "scale": (1.0,),
    "qk_norm": (False,),
    "router": ("", "softmax", "root"),
    "drop": ("none", "probs"),
    "shared": ("none", "gate"),
    "every": (1,),
}


def fits(layout: Case, chosen: Mapping[str, Any]) -> bool:
    """Whether a layout can go with a (possibly partial) choice of features."""
    micro_batches = chosen.get("accumulate")
    heads = max(chosen.get("kv_heads", 4) // layout.tp, 1)
    swapped = {"all_to_all": layout.cp, "hierarchical": 2}.get(layout.context, 1) if layout.cp > 1 else 1
    has_experts = layout.ep * layout.etp > 1
    router = chosen.get("router", "softmax" if has_experts else "")
    return not (
        (micro_batches is not None and SEQUENCES % (layout.dp * micro_batches))
        or (micro_batches is not None and layout.schedule == "interleaved" and micro_batches < layout.pp)
        or heads % swapped
        or (chosen.get("dropout") and chosen.get("attention") == "sdpa")
        or has_experts != bool(router)
        or (chosen.get("family") == "gpt" and (has_experts or chosen.get("qk_norm")))
        or (chosen.get("drop", "none") != "none" and router in ("", "sinkhorn"))
        or (not has_experts and (chosen.get("shared", "none") != "none" or chosen.get("every", 1) > 1))
    )


def names_of(layout: Case) -> dict[str, object]:
    """What a layout is made of."""
    return {
        "tensor": (layout.tp, layout.sequence),
        "pipeline": (layout.pp, layout.schedule),
        "context": (layout.cp, layout.context),
        "data": (layout.dp, layout.strategy),
        "experts": (layout.ep, layout.etp, layout.dispatch),
        "also": layout.also,
    }


def dress(layouts: Iterable[Case], features: Mapping[str, tuple] = FEATURES) -> list[Case]:
    """Layouts with features that fit them, so chosen that all meet each other."""
    return dressed(list(layouts), names_of, features, fits)


def _of(*ways: Mapping[str, Any]) -> Case:
    fields: dict[str, Any] = {}
    for way in ways:
        fields |= way
    return Case(**fields)


def _turns(*axes: Mapping[str, dict]) -> list[tuple[dict, ...]]:
    """Each way of each axis at least once, as few together as can be."""
    most = max(len(ways) for ways in axes)
    return list(zip(*(islice(cycle(ways.values()), most) for ways in axes), strict=True))


def _with_experts(layout: Case, turn: int) -> Case:
    ways = list(EXPERTS.values())
    # experts beside tensor parallel want the sequence split
    return replace(layout, sequence=layout.tp > 1, **ways[turn % len(ways)])


def _alone() -> list[Case]:
    """Each way of each axis on two ranks."""
    layouts = [_of(way) for ways in AXES.values() for way in ways.values()]
    return layouts + [_of(way, {"dp": 2}) for way in EXPERTS.values()]


def _on_four() -> list[Case]:
    """Each axis alone on four ranks."""
    pipelines: list[dict[str, Any]] = [
        {},
        {"schedule": "gpipe"},
        {"schedule": "zb_h1"},
        {"schedule": "interleaved", "virtual": 2, "also": _layout("Et|t|||t||t|L")},
        {"schedule": "zb_v", "virtual": 2, "also": _layout("E|t||t|t||t|L")},
    ]
    return [
        *(Case(tp=4, sequence=sequence) for sequence in (False, True)),
        *(Case(pp=4, n_layers=4, **fields) for fields in pipelines),
        *(Case(cp=4, context=kind) for kind in ("ring", "all_gather", "all_to_all", "hierarchical")),
        *(Case(dp=4, strategy=strategy) for strategy in ("replicate", "zero1", "zero2", "fsdp")),
        *(Case(dp=4, strategy=strategy, replicas=2) for strategy in ("zero1", "zero2", "hsdp")),
        Case(dp=4, ep=4),
        Case(dp=4, ep=4, dispatch="all_gather"),
        Case(dp=4, ep=2, etp=2),
        Case(tp=4, sequence=True, ep=4),
        Case(cp=4, ep=2, etp=2, dispatch="all_gather"),
        Case(dp=4, strategy="hsdp", replicas=2, ep=2),
        Case(dp=4, strategy="fsdp", ep=2, etp=2),
        *(Case(dp=2, strategy=strategy, ep=2) for strategy in ("zero1", "zero2", "fsdp")),
    ]


def _layout(text: str) -> Settings:
    return (("parallelism.pipeline.layout", text),)


def _pairs(*, whole: bool) -> list[Case]:
    """Two axes at once, every way of each beside the other, on four ranks; in turn with experts and without, where
    `whole` with both."""
    layouts, turn = [], 0
    for one, other in combinations(AXES, 2):
        for number, (a, b) in enumerate(_turns(AXES[one], AXES[other])):
            has_experts = number % 2 == 0
            if whole:
                has_experts = number < len(EXPERTS)
            if whole or not has_experts:
                layouts.append(_of(a, b))
            if has_experts:
                layouts.append(_with_experts(_of(a, b), turn))
                turn += 1
    return layouts


def _all_pairs() -> list[Case]:
    layouts = []
    for one, other in combinations(AXES, 2):
        for a, b in product(AXES[one].values(), AXES[other].values()):
            layouts += [_of(a, b), *(_with_experts(_of(a, b), n) for n in range(len(EXPERTS)))]
    return layouts


def _triples(*, whole: bool) -> list[Case]:
    """Three axes at once on eight ranks; in turn with experts over them and without, where `whole` with both."""
    layouts = []
    for number, three in enumerate(combinations(AXES, 3)):
        ways = [number % 2 == 0]
        if whole:
            ways = [False, True]
        for experts in ways:
            turn = 2 * number + experts + 1
            layout = _of(*(list(AXES[axis].values())[turn % len(AXES[axis])] for axis in three))
            layouts.append(_with_experts(layout, turn) if experts else layout)
    whole = {"dp": 4, "strategy": "hsdp", "replicas": 2}
    more = [{"pp": 2, "schedule": "zb_h1"}, {"cp": 2, "ep": 4}, {"tp": 2, "sequence": True, "etp": 2}]
    four = Case(tp=2, sequence=True, pp=2, cp=2, ep=2)
    return [*layouts, *(Case(**way, **whole) for way in more), four, *_hierarchies()[:2]]


def _hierarchies() -> list[Case]:
    """An all-to-all inside a ring, whose tokens lie in an order of their own, beside each other axis."""
    beside: list[dict[str, Any]] = [
        {"ep": 4},
        {"tp": 2, "sequence": True},
        {"pp": 2},
        {"ep": 2, "etp": 2, "dispatch": "all_gather"},
        {"dp": 2, "strategy": "fsdp", "ep": 2},
    ]
    return [Case(cp=4, context="hierarchical", **way) for way in beside]


def _all_triples() -> list[Case]:
    layouts = []
    for three in combinations(AXES, 3):
        for number, ways in enumerate(product(*(AXES[axis].values() for axis in three))):
            layouts += [_of(*ways), _with_experts(_of(*ways), number)]
    whole = {"dp": 4, "strategy": "hsdp", "replicas": 2}
    for number, way in enumerate(way for axis, ways in AXES.items() if axis != "data" for way in ways.values()):
        layouts += [_of(way, whole), _with_experts(_of(way, whole), number)]
    return layouts


# How layers are divided -> settings, and the layers that go with them by the number of stages.
DIVISIONS: dict[str, tuple[Settings, dict[int, int]]] = {
    "even": ((), {2: 2, 4: 4, 6: 6, 8: 8}),
    "uneven": ((("parallelism.pipeline.first_layers", 1),), {2: 3, 4: 7}),
    "counted": (
        (("parallelism.pipeline.count_embedding", True), ("parallelism.pipeline.count_loss", True)),
        {2: 4, 4: 6},
    ),
    "layout": ((), {2: 3, 4: 3, 6: 3, 8: 3}),
}
_LAYOUTS = {2: "E|ttt L", 4: "Et||tt|L", 6: "E|t||t|t|L", 8: "E||t|t||t||L"}
PASSES: dict[str, tuple] = {
    "schedule": ("1f1b", "gpipe", "interleaved", "interleaved x3", "zb_h1", "zb_v"),
    "pp": (2, 4),
    "accumulate": (1, 3, 4, 6),
    "division": tuple(DIVISIONS),
    "tied": (False, True),
}


def _stages(chosen: Mapping[str, Any]) -> int:
    virtual = {"interleaved": 2, "interleaved x3": 3, "zb_v": 2}.get(chosen["schedule"], 1)
    return chosen["pp"] * virtual


def _passes_fit(chosen: Mapping[str, Any]) -> bool:
    schedule, division = chosen.get("schedule", "1f1b"), chosen.get("division", "even")
    has_chunks = schedule in ("zb_v", "interleaved", "interleaved x3")
    return not (
        (schedule.startswith("interleaved") and chosen.get("accumulate", 6) < chosen.get("pp", 2))
        or (schedule.endswith("x3") and chosen.get("pp") == 4)
        or (has_chunks and division in ("uneven", "counted"))
    )


def _pipelines() -> list[Case]:
    """Schedules x stages x chunks x micro batches x ways to divide layers."""
    cases = []
    for chosen in covering(PASSES, _passes_fit):
        stages, (also, layers) = _stages(chosen), DIVISIONS[chosen["division"]]
        if chosen["division"] == "layout":
            also = _layout(_LAYOUTS[stages])
        schedule = chosen["schedule"].split()[0]
        cases.append(
            Case(
                pp=chosen["pp"],
                schedule=schedule,
                virtual=stages // chosen["pp"],
                accumulate=chosen["accumulate"],
                tied=chosen["tied"],
                n_layers=layers[stages],
                also=also,
                mask="uneven",
            )
        )
    groups = Case(pp=2, schedule="interleaved", virtual=2, n_layers=4, mask="uneven")
    return [*cases, replace(groups, accumulate=6, group=4), replace(groups, accumulate=6, group=3)]


def _contexts() -> list[Case]:
    """Kinds x documents x grouped heads x dropout x masks."""
    factors = {
        "kind": (("ring", 2), ("ring", 4), ("all_gather", 4), ("all_to_all", 2), ("hierarchical", 4)),
        "kv_heads": (4, 2, 1),
        "documents": (False, True),
        "dropout": (False, True),
        "mask": ("uneven", "empty_part"),
    }

    def legal(chosen: Mapping[str, Any]) -> bool:
        swaps = chosen.get("kind", ("ring",))[0] in ("all_to_all", "hierarchical")
        return not (swaps and chosen.get("kv_heads") == 1)

    cases = []
    for chosen in covering(factors, legal):
        kind, cp = chosen.pop("kind")
        attention = "reference" if chosen["dropout"] else "sdpa"
        cases.append(Case(cp=cp, context=kind, attention=attention, accumulate=2, **chosen))
    return cases


def _dispatch() -> list[Case]:
    """Grids x dispatchers x routers x drops x shared experts."""
    factors = {
        "grid": ("ep", "etp", "both"),
        "dispatch": ("all_to_all", "all_gather"),
        "router": ROUTERS_IN_TURN,
        "drop": tuple(DROPS),
        "shared": tuple(SHARED),
        "accumulate": (1, 3),
    }
    grids: dict[str, dict[str, Any]] = {
        "ep": {"dp": 2, "ep": 2},
        "etp": {"dp": 2, "etp": 2},
        "both": {"dp": 4, "ep": 2, "etp": 2},
    }

    def legal(chosen: Mapping[str, Any]) -> bool:
        return not (chosen.get("router") == "sinkhorn" and chosen.get("drop", "none") != "none")

    return [
        Case(mask="uneven", optimizer="sgd", **grids[chosen.pop("grid")], **chosen)
        for chosen in covering(factors, legal)
    ]


def _all_schedules() -> list[Case]:
    """Each schedule x stages x micro batches."""
    cases = []
    for schedule, pp, accumulate in product(*(PASSES[name] for name in ("schedule", "pp", "accumulate"))):
        chosen = {"schedule": schedule, "pp": pp, "accumulate": accumulate}
        if _passes_fit(chosen):
            stages = _stages(chosen)
            one = Case(pp=pp, schedule=schedule.split()[0], virtual=stages // pp, accumulate=accumulate)
            cases.append(replace(one, n_layers=DIVISIONS["even"][1][stages], mask="uneven"))
    return cases


def _all_contexts() -> list[Case]:
    """Each kind x documents x grouped heads."""
    kinds = (("ring", 2), ("ring", 4), ("all_gather", 2), ("all_gather", 4), ("all_to_all", 2), ("hierarchical", 4))
    found = product(kinds, (4, 2, 1), (False, True))
    return [
        Case(cp=cp, context=kind, kv_heads=kv_heads, documents=documents, mask="uneven")
        for (kind, cp), kv_heads, documents in found
        if kind not in ("all_to_all", "hierarchical") or kv_heads > 1
    ]


def _all_dispatches() -> list[Case]:
    """Each dispatcher x router x drop policy x etp."""
    return [
        Case(dp=2, dispatch=dispatch, router=router, drop=drop, mask="uneven", optimizer="sgd", **grid)
        for dispatch, router, drop, grid in product(
            ("all_to_all", "all_gather"), ROUTERS_IN_TURN, DROPS, ({"ep": 2}, {"etp": 2})
        )
        if router != "sinkhorn" or drop == "none"
    ]


def _recompute(kind: str, **more: Any) -> Settings:
    path = "parallelism.recompute."
    return ((f"{path}kind", kind), *((f"{path}{name}", value) for name, value in more.items()))


RECOMPUTES: dict[str, Settings] = {
    "uniform 1": _recompute("full"),
    "uniform 2": _recompute("full", method="uniform", layers=2),
    "block 1": _recompute("full", method="block", layers=1),
    "core_attention": _recompute("selective", parts=("core_attention",)),
    "norm activation": _recompute("selective", parts=("norm", "activation")),
    "mlp": _recompute("selective", parts=("mlp",)),
    "moe": _recompute("selective", parts=("moe",)),
    "shared_experts": _recompute("selective", parts=("shared_experts", "core_attention")),
}


def _recomputes() -> list[Case]:
    """What is recomputed x what it is recomputed beside."""
    beside: list[dict[str, Any]] = [
        {"tp": 2, "sequence": True},
        {"pp": 2},
        {"pp": 2, "schedule": "zb_h1"},
        {"cp": 2},
        {"dp": 2, "strategy": "fsdp"},
        {"dp": 2, "strategy": "zero2"},
        {"dp": 2, "ep": 2},
        {"tp": 2, "sequence": True, "ep": 2},
    ]
    layouts = []
    names = list(RECOMPUTES)
    for number, way in enumerate(beside):
        possible = names if "ep" in way else [n for n in names if n not in ("moe", "shared_experts")]
        if "ep" in way:
            possible = [n for n in names if n != "mlp"]
        for turn in (0, 3):
            name = possible[(number + turn) % len(possible)]
            layouts.append(Case(**{"n_layers": 4, **way}, also=RECOMPUTES[name]))
    with_shared = PLAIN | {"shared": ("none", "gate"), "dropout": (True, False)}
    return [
        replace(case, shared="gate") if case.ep > 1 and case.also == RECOMPUTES["shared_experts"] else case
        for case in dress(layouts, with_shared)
    ]


def _optimizers() -> list[Case]:
    """Muon, whose matrices are whole, beside everything that cuts them."""
    layouts = [
        Case(tp=2, sequence=True),
        Case(dp=2),
        Case(dp=2, strategy="zero1"),
        Case(dp=2, strategy="fsdp"),
        Case(dp=2, strategy="zero2"),
        Case(dp=4, strategy="hsdp", replicas=2),
        Case(pp=2),
        Case(cp=2, ep=2),
        Case(tp=2, sequence=True, dp=2, strategy="zero1", etp=2),
    ]
    return dress(layouts, PLAIN | {"optimizer": ("muon",), "family": ("llama",), "qk_norm": (False, True)})


def _under(path: str, **values: Any) -> Settings:
    return tuple((f"parallelism.{path}.{name}", value) for name, value in values.items())


def _switches() -> list[Case]:
    """What overlaps run one after the other, what can wait on the CPU does, and a stage that shares out no weights."""
    alone = {"grad_reduce": False, "param_gather": False}
    layouts = [
        Case(tp=2, sequence=True, also=_under("overlap", tp=False)),
        Case(dp=2, strategy="zero1", also=_under("overlap", **alone)),
        Case(dp=2, strategy="fsdp", also=_under("overlap", **alone)),
        Case(pp=2, schedule="zb_v", virtual=2, n_layers=4, also=_under("overlap", p2p=False)),
        Case(pp=2, schedule="zb_h1", dp=2, strategy="zero2", also=_under("overlap", p2p=False, grad_reduce=False)),
        Case(tp=2, sequence=True, ep=2, shared="gate", also=_under("overlap", shared_experts=False)),
        Case(dp=2, strategy="zero1", also=_under("offload", layers=1, optimizer=0.5)),
        Case(pp=2, dp=2, strategy="fsdp", n_layers=4, also=_under("offload", layers=1, optimizer=1.0)),
        Case(tp=2, sequence=True, dp=2, ep=2, shared="gate", also=_under("offload", layers=2, optimizer=0.5)),
        Case(pp=2, dp=2, strategy="fsdp", also=_layout("Ett|L")),
    ]
    dressed = dress(layouts, PLAIN | {"shared": ("none",)})
    return [replace(case, shared="gate") if case.ep > 1 else case for case in dressed]


_TRAINED = ("norms", "head", "upper", "lower", "down", "into")


def _frozen(*, beside: int) -> list[Case]:
    """What is trained in turns, `beside` of it at each way in which parameters, their gradients and passes are
    divided."""
    ways: list[dict[str, Any]] = [
        {},
        {"tp": 2, "kv_heads": 1},
        {"tp": 2, "sequence": True, "pad": 8},
        {"pp": 2, "accumulate": 3},
        {"pp": 2, "schedule": "gpipe"},
        {"pp": 2, "schedule": "interleaved", "virtual": 2},
        {"pp": 2, "schedule": "zb_h1", "accumulate": 3},
        {"pp": 2, "schedule": "zb_v", "virtual": 2, "accumulate": 3},
        {"cp": 2, "documents": True},
        {"dp": 2, "accumulate": 3},
        {"dp": 2, "strategy": "zero1"},
        {"dp": 2, "strategy": "zero2", "accumulate": 3},
        {"dp": 2, "strategy": "fsdp", "accumulate": 3},
        {"dp": 2, "ep": 2, "router": "sigmoid", "shared": "gate"},
        {"dp": 2, "ep": 2, "router": "root", "strategy": "fsdp", "experts": "bias"},
        {"dp": 2, "etp": 2, "router": "logit bias", "experts": "bias"},
    ]
    cases = []
    for number, way in enumerate(ways):
        # the next way begins one further on, so that each meets ways of every kind
        for turn in range(number, number + beside):
            trainable = _TRAINED[turn % len(_TRAINED)]
            cases.append(Case(n_layers=4, mask="uneven", trainable=trainable, **{"accumulate": 2, **way}))
        if "router" in way:
            cases.append(Case(n_layers=4, trainable="router", **way))
        if way.get("router") in ("sigmoid", "root"):
            cases.append(Case(n_layers=4, trainable="norms and routers' biases", **way))
    more = [
        *(Case(n_layers=4, tied=True, trainable="embedding", **{"accumulate": 2, **way}) for way in ways[:13]),
        *(Case(n_layers=4, family="gpt", trainable="norms and biases", **way) for way in ways[1:4]),
        *(Case(n_layers=4, trainable="upper", dp=2, optimizer="muon", strategy=one) for one in ("zero1", "fsdp")),
        Case(n_layers=4, trainable="head", pp=2, optimizer="muon"),
        Case(n_layers=4, trainable="upper", tp=2, optimizer="muon"),
        Case(n_layers=4, trainable="upper", pp=2, optimizer="sgd"),
        Case(n_layers=4, trainable="upper", pp=2, dp=2, schedule="zb_h1", strategy="fsdp", accumulate=3),
        Case(n_layers=4, trainable="upper", dp=4, replicas=2, strategy="hsdp"),
        Case(n_layers=4, trainable="upper", scale=4096.0, also=_under("offload", layers=2, optimizer=0.5)),
    ]
    for name in ("uniform 2", "block 1", "norm activation"):
        for trainable in ("upper", "down"):
            more.append(Case(n_layers=4, trainable=trainable, dp=2, also=RECOMPUTES[name]))
    for trainable in ("upper", "down", "norms"):
        again = RECOMPUTES["uniform 2"]
        more.append(Case(n_layers=4, trainable=trainable, dp=2, ep=2, router="sigmoid", also=again))
    return [*cases, *more]


def _layers(*, whole: bool) -> list[Case]:
    """Each kind of layer beside everything that cuts or repeats one; where not `whole`, beside every second of it."""
    ways: list[dict[str, Any]] = [
        {"tp": 2, "sequence": True, "accumulate": 3, "mask": "uneven"},
        {"tp": 2, "dropout": True, "attention": "reference"},
        {"cp": 2, "documents": True, "kv_heads": 2},
        {"pp": 2, "schedule": "zb_h1", "accumulate": 3, "tied": True},
        {"dp": 2, "strategy": "fsdp", "also": RECOMPUTES["norm activation"]},
        {"dp": 2, "strategy": "zero2", "also": RECOMPUTES["block 1"]},
        # every other layer alone has experts, so that the family's own feed-forward part is there too
        {"dp": 2, "ep": 2, "router": "sigmoid", "every": 2, "shared": "gate", "qk_norm": True},
        {"tp": 2, "sequence": True, "ep": 2, "router": "softmax", "every": 2, "also": RECOMPUTES["moe"]},
    ]
    cases = [Case(n_layers=4, family=family, **way) for family in LAYERS for way in ways]
    if whole:
        return cases
    # each way beside two families, each family beside four ways that no neighbour has
    return [case for i, case in enumerate(cases) if (i + i // len(ways)) % 2 == 0]


def _options() -> list[Case]:
    """Layers that differ and the ends of a model, beside everything that splits a sequence, a model or a head."""
    mixed: list[dict[str, Any]] = [
        {"tp": 2, "sequence": True, "mask": "uneven"},
        {"cp": 2, "context": "ring", "documents": True},
        {"cp": 2, "context": "all_to_all"},
        {"pp": 2, "schedule": "zb_v", "virtual": 2, "accumulate": 3},
        {"dp": 2, "strategy": "fsdp", "also": RECOMPUTES["block 1"]},
    ]
    ends: list[dict[str, Any]] = [
        {"tp": 2, "sequence": True, "mask": "uneven", "pad": 8},
        {"tp": 2, "cross_entropy": "reference", "tied": True, "pad": 64},
        {"pp": 2, "tied": True, "accumulate": 3},
        {"dp": 2, "strategy": "fsdp", "router": "sigmoid", "every": 2},
    ]
    cases = [Case(n_layers=4, family="mixed", **way) for way in mixed]
    return cases + [Case(family="ends", **way) for way in ends]


def _attentions() -> list[Case]:
    """Options of attention beside everything that cuts heads, sequences or layers, or computes attention again."""
    again = RECOMPUTES["core_attention"]
    ways: list[dict[str, Any]] = [
        {"tp": 2, "sequence": True, "options": "whole", "mask": "uneven"},
        {"tp": 4, "kv_heads": 2, "options": "chunk"},
        {"tp": 2, "options": "chunk", "documents": True, "kv_heads": 1},
        {"tp": 2, "sequence": True, "options": "all", "attention": "reference", "accumulate": 3},
        {"tp": 2, "options": "gate", "dropout": True, "attention": "reference"},
        {"tp": 2, "family": "flat", "n_layers": 4, "options": "temperature", "documents": True},
        {"cp": 2, "options": "sinks", "kv_heads": 2, "mask": "uneven"},
        {"cp": 2, "context": "all_gather", "options": "sinks", "documents": True},
        {"cp": 2, "context": "all_to_all", "options": "sinks", "kv_heads": 2},
        {"cp": 4, "context": "hierarchical", "options": "sinks", "documents": True},
        {"cp": 2, "options": "chunk", "documents": True},
        {"cp": 4, "context": "all_gather", "options": "window"},
        {"cp": 4, "options": "all", "attention": "reference", "kv_heads": 2},
        {"cp": 2, "context": "all_to_all", "options": "cap", "documents": True, "attention": "reference"},
        {"cp": 4, "options": "cap", "dropout": True, "attention": "reference"},
        {"cp": 2, "family": "flat", "n_layers": 4, "options": "temperature", "also": again},
        {"tp": 2, "sequence": True, "cp": 2, "options": "all", "attention": "reference", "documents": True},
        {"pp": 2, "schedule": "zb_h1", "options": "gate", "accumulate": 3},
        {"pp": 2, "options": "window", "documents": True, "accumulate": 2},
        {"dp": 2, "strategy": "fsdp", "options": "sinks", "also": again},
        {"dp": 2, "strategy": "zero2", "options": "all", "attention": "reference", "also": RECOMPUTES["uniform 1"]},
    ]
    return [Case(**way) for way in ways]


def _experts() -> list[Case]:
    """Routers as published, biases of experts, their activations and where their weights enter, beside everything that
    cuts experts or sends their rows, or computes them again."""
    split = {"tp": 2, "sequence": True}
    gathered = {"dispatch": "all_gather"}
    ways: list[dict[str, Any]] = [
        {"dp": 2, "ep": 2, "router": "best of group", "experts": "bias", "mask": "uneven"},
        {"dp": 2, "ep": 2, **gathered, "router": "best two of group", "experts": "plain", "shared": "gate"},
        {"dp": 2, "ep": 2, "router": "scores", "experts": "inputs, bias", "drop": "padded", "shared": "plain"},
        {"dp": 2, "etp": 2, "router": "logit bias", "experts": "bias", "accumulate": 3},
        {"dp": 2, "etp": 2, **gathered, "router": "scores", "experts": "inputs, bias", "drop": "probs"},
        {"dp": 2, "etp": 2, "router": "best of group", "experts": "gelu", "drop": "padded"},
        {"dp": 4, "ep": 2, "etp": 2, "router": "best two of group", "experts": "bias", "drop": "position"},
        {"dp": 4, "ep": 2, "etp": 2, **gathered, "router": "logit bias", "experts": "plain", "mask": "empty_rank"},
        {**split, "ep": 2, "router": "logit bias", "experts": "gelu", "shared": "plain", "documents": True},
        {**split, "ep": 2, **gathered, "router": "best of group", "experts": "inputs", "shared": "gate"},
        {**split, "etp": 2, "router": "best two of group", "experts": "bias", "mask": "uneven"},
        {"cp": 2, "ep": 2, "router": "logit bias", "experts": "bias", "drop": "probs"},
        {"cp": 2, "etp": 2, **gathered, "router": "best of group", "experts": "inputs, bias"},
        {"pp": 2, "schedule": "zb_h1", "router": "logit bias", "experts": "bias", "accumulate": 3},
        {"pp": 2, "dp": 2, "etp": 2, "router": "scores", "experts": "inputs, bias", "accumulate": 3},
        {"dp": 2, "strategy": "fsdp", "ep": 2, "router": "best two of group", "experts": "bias"},
        {"dp": 2, "strategy": "fsdp", "etp": 2, "router": "logit bias", "experts": "inputs, bias", "every": 2},
        {"dp": 2, "strategy": "zero1", "etp": 2, "router": "logit bias", "experts": "plain"},
        {"dp": 2, "strategy": "zero2", "ep": 2, "router": "scores", "experts": "inputs", "accumulate": 3},
        {"dp": 2, "ep": 2, "router": "logit bias", "experts": "clamped", "mask": "uneven"},
        {**split, "etp": 2, "router": "logit bias", "experts": "clamped", "options": "sinks"},
        {"dp": 2, "ep": 2, "router": "logit bias", "experts": "bias", "also": RECOMPUTES["moe"]},
        {**split, "ep": 2, "router": "scores", "experts": "inputs, bias", "also": RECOMPUTES["norm activation"]},
        {"dp": 2, "etp": 2, "router": "logit bias", "experts": "bias", "optimizer": "muon"},
    ]
    return [Case(**way) for way in ways]


LAYERS = ("post", "sandwich", "parallel", "flat")
"""Families of tests/families.py whose layers are no pre-norm pairs."""

# The factors of a product that is run in whole, at one step: a layout, and what a batch or a model can do to it.
PRODUCT: dict[str, tuple] = {
    "tp": (1, 2, 4),
    "dp": (1, 2),
    "sequence": (False, True),
    "accumulate": (1, 3),
    "mask": ("full", "uneven", "empty_rank", "empty_micro"),
    "tied": (False, True),
    "pad": (1, 8, 64),
    "family": ("llama", "gpt"),
    "optimizer": ("sgd", "adamw"),
}
REST: dict[str, tuple] = {
    "kv_heads": (4, 2, 1),
    "documents": (False, True),
    "dropout": (False, True),
    "attention": ("reference", "sdpa"),
    "cross_entropy": ("reference", "chunked"),
    "scale": (1.0, 4096.0),
}
"""What the cases of the product go through in turn."""


def _product() -> list[Case]:
    rest = [
        Case(**chosen)
        for chosen in covering(REST, lambda one: not (one.get("dropout") and one.get("attention") == "sdpa"))
    ]
    return [case for case in full_product(PRODUCT, rest) if case.tp > 1 or not case.sequence]


# Long runs, in which small differences would grow.
LONG = [
    Case(tp=2, sequence=True, pp=2, n_layers=4, accumulate=3, mask="uneven", tied=True, pad=8, kv_heads=1),
    Case(dp=2, ep=2, accumulate=2, mask="uneven", router="sigmoid", drop="probs", shared="gate"),
    Case(dp=2, strategy="fsdp", mask="uneven", kv_heads=2, scale=4096.0),
]
LONG_TOO = [
    Case(tp=2, cp=2, accumulate=3, mask="empty_part", documents=True, dropout=True, attention="reference"),
    Case(dp=2, strategy="zero1", accumulate=3, mask="empty_rank", family="gpt", optimizer="sgd", tied=True),
    Case(cp=2, ep=2, accumulate=2, mask="uneven", router="root", dispatch="all_gather"),
    Case(pp=2, schedule="zb_v", virtual=2, n_layers=4, accumulate=6, mask="empty_micro", tied=True),
]

# Those of which every second runs by default: what they hold is looked at in tests/parallelism, too.
_HALVED: dict[str, Callable[[], list[Case]]] = {
    "pipelines": _pipelines,
    "contexts": _contexts,
    "dispatch": _dispatch,
}


def _first_of_two(name: str) -> list[Case]:
    return _HALVED[name]()[::2]


def _second_of_two() -> list[Case]:
    return [case for cases in _HALVED.values() for case in cases()[1::2]]


SETS: dict[str, Callable[[], list[Case]]] = {
    "alone": lambda: dress(_alone()),
    "on four": lambda: dress(_on_four()),
    "pairs": lambda: dress(_pairs(whole=False)),
    "triples": lambda: dress(_triples(whole=False)),
    **{name: partial(_first_of_two, name) for name in _HALVED},
    "recompute": _recomputes,
    "optimizers": _optimizers,
    "switches": _switches,
    "frozen": lambda: _frozen(beside=1),
    "layers": lambda: _layers(whole=False),
    "options": _options,
    "attention": _attentions,
    "experts": _experts,
    "long": lambda: LONG,
    "long too": lambda: LONG_TOO,
    "second of two": _second_of_two,
    "both pairs": lambda: dress(_pairs(whole=True)),
    "both triples": lambda: dress(_triples(whole=True)),
    "all frozen": lambda: _frozen(beside=len(_TRAINED)),
    "all layers": lambda: _layers(whole=True),
    "all pairs": lambda: dress(_all_pairs()),
    "all triples": lambda: dress(_all_triples()),
    "product": _product,
    "hierarchies": lambda: dress(_hierarchies()),
    "all schedules": _all_schedules,
    "all contexts": _all_contexts,
    "all dispatches": _all_dispatches,
}
SLOW = (
    "second of two", "both pairs", "both triples", "all frozen", "all layers", "all pairs", "all triples", "product",
    "long too", "hierarchies", "all schedules", "all contexts", "all dispatches",
)  # fmt: skip
DEFAULT = tuple(name for name in SETS if name not in SLOW)


@cache
def cases_of(name: str) -> tuple[Case, ...]:
    """The cases of a set, by its name in SETS."""
    return tuple(dict.fromkeys(SETS[name]()))
