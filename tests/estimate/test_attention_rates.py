"""Which implementation of attention `auto` takes: the fastest that was measured for the use."""

from dataclasses import replace

import pytest

from megaspec.commands.planned import planned_target
from megaspec.compose.compose import compose
from megaspec.core.errors import RecipeError
from megaspec.estimate import attention_choice, one_order
from megaspec.estimate import throughput as throughput_module
from megaspec.estimate.attention_rates import (
    AttentionRate,
    against_any_order,
    against_causal,
    faster_ones,
    fastest,
    kind_of,
    one_order_as_on,
)
from megaspec.estimate.hardware import HARDWARE
from megaspec.estimate.layer_time import LayerTimes
from megaspec.estimate.throughput import MeasuredThroughput, ThroughputTable, throughput_of
from megaspec.estimate.topology import topology_of
from megaspec.estimate.trained import facts_of
from megaspec.estimate.work import FLEX_COST, layer_parts
from tests.resolve.test_fill import FACTS, H200, spec_of


def rate(
    implementation: str, kind: str, seen: int, seconds: float, head_size: int = 128, *, deterministic: bool = False
) -> AttentionRate:
    return AttentionRate(
        implementation=implementation,
        kind=kind,
        head_size=head_size,
        tokens=8192,
        seen=seen,
        seconds=seconds,
        deterministic=deterministic,
    )


RATES = (
    rate("sdpa", "causal", 8192, 4e-3),
    rate("flash_attn", "causal", 8192, 3e-3),
    rate("sdpa", "documents", 256, 2e-3),
    rate("sdpa", "documents", 1024, 3e-3),
    rate("cudnn", "documents", 256, 1.9e-3),
    rate("cudnn", "documents", 1024, 1e-3),
    # shorter documents alone would speak for it
    rate("flex", "documents", 256, 1.5e-3),
    rate("flex", "documents", 1024, 2.5e-3),
    rate("flex", "window", 128, 1e-3),
    rate("cudnn", "window", 1024, 1e-3),
    rate("sdpa", "causal", 8192, 1e-3, head_size=64),
)
EVERY = ("sdpa", "flex", "cudnn", "flash_attn", "reference")
IN_ONE_ORDER = (
    rate("sdpa", "causal", 8192, 8e-3, deterministic=True),
    rate("flex", "causal", 8192, 5e-3, deterministic=True),
    rate("flash_attn", "causal", 8192, 4e-3, deterministic=True),
    rate("sdpa", "documents", 256, 2.1e-3, deterministic=True),
    rate("sdpa", "documents", 1024, 3.1e-3, deterministic=True),
    rate("flex", "documents", 256, 3e-3, deterministic=True),
    rate("flex", "documents", 1024, 4e-3, deterministic=True),
)
BOTH = (*RATES, rate("flex", "causal", 8192, 4e-3), *IN_ONE_ORDER)


def test_the_least_time_over_shared_points_wins() -> None:
    assert fastest(RATES, among=EVERY, kind="documents", head_size=128) == "cudnn"
    assert fastest(RATES, among=("sdpa", "flex"), kind="documents", head_size=128) == "flex"
    assert fastest(RATES, among=EVERY, kind="causal", head_size=128) == "flash_attn"


def test_what_differs_by_noise_is_taken_in_the_order_of_the_catalog() -> None:
    rates = (rate("sdpa", "causal", 8192, 1.019e-3), rate("flex", "causal", 8192, 1e-3))
    assert fastest(rates, among=EVERY, kind="causal", head_size=128) == "sdpa"
    slower = (rate("sdpa", "causal", 8192, 1.021e-3), rates[1])
    assert fastest(slower, among=EVERY, kind="causal", head_size=128) == "flex"


def test_what_can_not_be_compared_is_not() -> None:
    """One of them alone, none, and others in other points."""
    assert fastest(RATES, among=EVERY, kind="causal", head_size=64) is None
    assert fastest(RATES, among=("reference",), kind="causal", head_size=128) is None
    assert fastest(RATES, among=EVERY, kind="window", head_size=128) is None
    assert fastest(RATES, among=EVERY, kind="documents", head_size=96) is None


def test_what_is_faster_is_compared_where_both_were_measured() -> None:
    """5 ms of sdpa over both lengths of documents, 2.9 of cudnn, 4 of flex."""
    found = faster_ones(RATES, "sdpa", kind="documents", head_size=128)
    assert list(found.items()) == [("cudnn", pytest.approx(2.9 / 5)), ("flex", pytest.approx(4 / 5))]
    assert faster_ones(RATES, "cudnn", kind="documents", head_size=128) == {}
    # in other points, of another size, and within what measurements differ by
    assert faster_ones(RATES, "flex", kind="window", head_size=128) == {}
    assert faster_ones(RATES, "sdpa", kind="causal", head_size=64) == {}
    alike = (rate("sdpa", "causal", 8192, 1.019e-3), rate("flex", "causal", 8192, 1e-3))
    assert faster_ones(alike, "sdpa", kind="causal", head_size=128) == {}


def test_nothing_is_compared_with_what_was_measured_in_another_order_of_sums() -> None:
    def found(rates: tuple[AttentionRate, ...], kind: str, *, among: tuple[str, ...] = EVERY) -> str | None:
        return fastest(rates, among=among, kind=kind, head_size=128, deterministic=True)

    assert found(BOTH, "causal") == "flash_attn"
    assert found(BOTH, "causal", among=("sdpa", "flex")) == "flex"
    # flex and cudnn are faster in any
    assert found(BOTH, "documents") == "sdpa"
    assert found(RATES, "causal") is None
    assert found(RATES, "documents") is None
    assert found((*RATES, IN_ONE_ORDER[0]), "causal") is None
    # and the other way round
    assert fastest(BOTH, among=EVERY, kind="documents", head_size=128) == "cudnn"
    assert fastest(IN_ONE_ORDER, among=EVERY, kind="causal", head_size=128) is None
    shares = faster_ones(BOTH, "sdpa", kind="causal", head_size=128, deterministic=True)
    assert list(shares.items()) == [("flash_attn", pytest.approx(4 / 8)), ("flex", pytest.approx(5 / 8))]
    assert faster_ones(RATES, "sdpa", kind="causal", head_size=128, deterministic=True) == {}
    assert faster_ones(BOTH, "sdpa", kind="causal", head_size=128) == {"flash_attn": pytest.approx(3 / 4)}


def test_what_one_order_costs_beside_any() -> None:
    def cost(name: str, kind: str, seen: float) -> float | None:
        return against_any_order(BOTH, name, kind=kind, head_size=128, seen=seen)

    assert cost("sdpa", "causal", 8192) == pytest.approx(8 / 4)
    assert cost("flex", "causal", 8192) == pytest.approx(5 / 4)
    assert cost("flash_attn", "causal", 4096) == pytest.approx(4 / 3)
    assert cost("flex", "documents", 256) == pytest.approx(3 / 1.5)
    assert cost("flex", "documents", 1024) == pytest.approx(4 / 2.5)
    # between two points the means by logarithms, beyond them as at the last
    assert cost("flex", "documents", 512) == pytest.approx((3 * 4) ** 0.5 / (1.5 * 2.5) ** 0.5)
    assert cost("flex", "documents", 8192) == pytest.approx(4 / 2.5)
    # in one order alone, in any alone, of another kind, of another size
    assert cost("cudnn", "documents", 1024) is None
    assert cost("flex", "window", 128) is None
    assert against_any_order(IN_ONE_ORDER, "sdpa", kind="causal", head_size=128, seen=8192) is None
    assert against_any_order(BOTH, "sdpa", kind="causal", head_size=64, seen=8192) is None


def test_documents_decide_before_windows() -> None:
    assert kind_of(documents=True, window=True) == "documents"
    assert kind_of(documents=False, window=True) == "window"
    assert kind_of(documents=False, window=False) == "causal"


def put_in_place(rates: tuple[AttentionRate, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 whose table has these."""
    table = throughput_of(HARDWARE["H200"]).table.model_copy(update={"attention_rates": rates})
    monkeypatch.setattr(attention_choice, "throughput_of", lambda hardware: MeasuredThroughput(table, hardware))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order of sums."""
    put_in_place(RATES, monkeypatch)


@pytest.fixture
def measured_in_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one order, too."""
    put_in_place(BOTH, monkeypatch)


WITH = H200.model_copy(update={"gpus": 1, "versions": H200.versions | {"nvidia-cudnn-frontend": "1.18.0"}})
INSTALLED = H200.model_copy(update={"gpus": 1, "versions": H200.versions | {"flash-attn-4": "4.0.0"}})
WIDE = ("model.d_head=128", "precision.kind=bf16")
DOCUMENTS = (*WIDE, "data.document_mask=true")


def attention_of(*overrides: str, target: object) -> tuple[str, str]:
    spec = spec_of(*overrides, target=target)
    reason = next(one.reason for one in spec.decisions if one.key == "kernels.attention")
    return spec.kernels.attention, reason


def test_auto_takes_the_fastest_that_is_installed(measured: None) -> None:
    name, reason = attention_of(*DOCUMENTS, target=WITH)
    assert name == "cudnn"
    assert "the fastest that was measured on NVIDIA H200 for heads of 128" in reason
    # not installed
    assert attention_of(*DOCUMENTS, target=H200.model_copy(update={"gpus": 1}))[0] == "flex"
    # it adds gradients in no fixed order
    assert attention_of(*DOCUMENTS, "train.deterministic=true", target=WITH)[0] == "flex"
    # nothing measured of such heads: the catalog's order
    assert attention_of("precision.kind=bf16", "data.document_mask=true", target=WITH)[0] == "flex"


@pytest.mark.parametrize(
    ("kind", "words", "told"),
    [
        ("B200", WIDE, "first of the catalog that runs; not measured on B200: megaspec bench throughput measures it"),
        # what the command does not measure
        ("H100", ("model.d_head=96", "precision.kind=bf16"), "not measured on H100 for heads of 96 in bf16"),
        ("H100", ("model.d_head=128",), "not measured on H100 for heads of 128 in fp32"),
        ("H200", ("model.d_head=96", "precision.kind=bf16"), "not measured on H200 for heads of 96 in bf16"),
        ("H200", (*WIDE, "model.attention.score_cap=30.0"), "capped attention scores, leaves out what windows, chunks"),
        ("H200", (*WIDE, "model.attention.score_cap=30.0"), "; not measured with capped scores"),
    ],
)
def test_what_nobody_measured_is_not_called_the_best(kind: str, words: tuple[str, ...], told: str) -> None:
    target = H200.model_copy(update={"gpus": 1, "gpu": kind, "gpu_memory": HARDWARE[kind].memory})
    reason = attention_of(*words, target=target)[1]
    assert told in reason
    assert "best" not in reason
    assert ("bench throughput" in reason) == ("bench throughput" in told)


def test_what_was_measured_otherwise_than_it_is_used_is_told() -> None:
    """Figures, here those that ship, are of whole sequences, and of scores without a cap."""
    capped = attention_of(*WIDE, "model.attention.score_cap=30.0", target=INSTALLED)
    assert capped[0] == "flash_attn"
    assert "was measured on NVIDIA H200 for heads of 128 without a cap of scores" in capped[1]
    parts = ("launcher.ranks=2", "parallelism.cp=2")
    of_parts = attention_of(*DOCUMENTS, *parts, target=INSTALLED.model_copy(update={"gpus": 2}))
    assert of_parts[0] == "flash_attn"
    assert "was measured on NVIDIA H200 for heads of 128 and whole sequences" in of_parts[1]


def test_with_dropout_nothing_is_left_to_compare() -> None:
    reason = attention_of(*WIDE, "model.attention.dropout=0.1", target=H200.model_copy(update={"gpus": 1}))[1]
    assert reason == "first of the catalog that runs with attention dropout"


def test_what_is_faster_and_left_out_is_named_with_the_reason(measured: None) -> None:
    bare = H200.model_copy(update={"gpus": 1})
    fa = "left out: flash_attn takes 25% less, not installed here: pip install 'megaspec[fa]'"
    cudnn = "left out: cudnn takes 28% less, not installed here: pip install 'megaspec[cudnn]'"
    assert attention_of(*WIDE, target=bare)[1].endswith(f"in bf16; {fa}")
    assert attention_of(*DOCUMENTS, target=bare)[1].endswith(f"documents hide; {cudnn}")
    # nothing is faster, was set by nobody, or measured with such scores
    assert "left out" not in attention_of(*WIDE, target=INSTALLED)[1]
    assert "left out" not in attention_of(*DOCUMENTS, target=WITH)[1]
    assert "left out" not in attention_of(*WIDE, "model.attention.score_cap=30.0", target=bare)[1]


def test_what_is_left_out_was_measured_in_the_order_that_is_asked_for(measured_in_both: None) -> None:
    bare = H200.model_copy(update={"gpus": 1})
    name, reason = attention_of(*WIDE, "train.deterministic=true", target=bare)
    assert name == "flex"
    assert "the fastest that was measured on NVIDIA H200 for heads of 128 with sums in one order" in reason
    assert reason.endswith("left out: flash_attn takes 20% less, not installed here: pip install 'megaspec[fa]'")
    # cudnn is faster in any order alone, and can't in one
    name, reason = attention_of(*DOCUMENTS, "train.deterministic=true", target=WITH)
    assert name == "sdpa"
    assert "left out" not in reason
    assert attention_of(*DOCUMENTS, target=WITH)[0] == "cudnn"


def test_auto_takes_the_fastest_in_one_order_where_that_is_asked_for(measured_in_both: None) -> None:
    exact = attention_of(*WIDE, "train.deterministic=true", target=INSTALLED)
    assert exact[0] == "flash_attn"
    assert "sums in one order" in exact[1]
    # in any order flex is sdpa
    assert attention_of(*WIDE, target=H200.model_copy(update={"gpus": 1}))[0] == "sdpa"


@pytest.fixture
def none_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """No table that ships has rates in one order."""
    shipped = throughput_module._shipped

    def without(name: str) -> ThroughputTable:
        table = shipped(name)
        in_any = tuple(rate for rate in table.attention_rates if not rate.deterministic)
        return table.model_copy(update={"attention_rates": in_any})

    monkeypatch.setattr(throughput_module, "_shipped", without)


def test_what_was_measured_in_any_order_alone_decides_nothing_in_one(none_in_one_order: None, measured: None) -> None:
    for words, expected in ((WIDE, "sdpa"), (DOCUMENTS, "flex")):
        name, reason = attention_of(*words, "train.deterministic=true", target=INSTALLED)
        assert name == expected
        assert reason.startswith("first of the catalog that runs")
        told = "not measured on NVIDIA H200 with sums in one order: megaspec bench throughput measures it"
        assert reason.endswith(f"; {told}")


def test_rates_in_one_order_are_those_of_another_gpu_over_what_sdpa_takes_there() -> None:
    """Of each size of heads by itself; one that was not measured has none."""
    elsewhere = (
        *BOTH,
        rate("sdpa", "causal", 8192, 1e-3, head_size=64),
        rate("flex", "causal", 8192, 2e-3, head_size=64, deterministic=True),
    )
    own = (
        rate("sdpa", "causal", 8192, 6e-3),
        # whose host was late, say: what flex takes in any order decides nothing
        rate("flex", "causal", 8192, 9e-3),
        rate("sdpa", "documents", 256, 9e-3),
    )
    found = list(one_order_as_on(elsewhere, own))
    # sdpa's causal attention takes 4 ms there
    assert [one.seconds for one in found] == pytest.approx([6 / 4 * one.seconds for one in IN_ONE_ORDER])
    assert [one.model_copy(update={"seconds": 1.0}) for one in found] == [
        one.model_copy(update={"seconds": 1.0}) for one in IN_ONE_ORDER
    ]


def test_a_gpu_of_the_same_architecture_decides_by_what_was_measured_in_one_order_there() -> None:
    """H100 was measured in any order, H200 in both; B200, of another architecture, in none."""
    assert throughput_of(HARDWARE["H100"]).one_order_measured_on == "H200"
    assert throughput_of(HARDWARE["H200"]).one_order_measured_on == "H200"
    assert throughput_of(HARDWARE["B200"]).attention_rates == ()
    here = H200.model_copy(update={"gpus": 1, "gpu": "NVIDIA H100 80GB HBM3"})
    exact = "train.deterministic=true"
    window = "model.attention.mask={kind: window, size: 8}"
    for words in ((), ("data.document_mask=true",), (window,)):
        name, reason = attention_of(*WIDE, *words, exact, target=here)
        assert name == attention_of(*WIDE, *words, exact, target=H200.model_copy(update={"gpus": 1}))[0] == "flex"
        assert "the fastest that was measured on H200 for heads of 128 with sums in one order" in reason
        assert "measured on NVIDIA H100" in attention_of(*WIDE, *words, target=here)[1]


@pytest.mark.parametrize(("kind", "name"), [("ring", "sdpa"), ("all_gather", "sdpa"), ("all_to_all", "flex")])
def test_what_attends_to_whole_sequences_is_not_taken_for_parts_of_them(measured: None, kind: str, name: str) -> None:
    two = H200.model_copy(update={"gpus": 2})
    words = ("launcher.ranks=2", "parallelism.cp=2", f"parallelism.context.kind={kind}")
    assert attention_of(*DOCUMENTS, *words, target=two)[0] == name
    if name == "flex":
        return
    told = rf"parallelism\.cp=2 with parallelism\.context\.kind={kind} gives ranks parts; set "
    told += r"kernels\.attention=sdpa, or parallelism\.context\.kind=all_to_all"
    with pytest.raises(RecipeError, match=told):
        spec_of(*DOCUMENTS, *words, "kernels.attention=flex", target=two)


def test_without_figures_auto_takes_the_catalogs_order() -> None:
    assert throughput_of(HARDWARE["B200"]).attention_rates == ()
    if throughput_module.throughput_of(HARDWARE["H200"]).attention_rates:
        pytest.skip("the shipped table has figures")
    assert attention_of(*DOCUMENTS, target=WITH)[0] == "flex"
    assert attention_of(*WIDE, target=WITH)[0] == "sdpa"


@pytest.mark.parametrize(
    ("overrides", "versions", "told"),
    [
        (
            ("kernels.attention=flash_attn",),
            {},
            r"kernels\.attention=flash_attn needs the package flash-attn-4, which is not installed \(pip install "
            r"'megaspec\[fa\]'\); set kernels\.attention=sdpa",
        ),
        (
            ("kernels.attention=cudnn", "train.deterministic=true"),
            {"nvidia-cudnn-frontend": "1.18.0"},
            r"kernels\.attention=cudnn adds gradients in no fixed order, train\.deterministic=true asks for one; set "
            r"kernels\.attention=sdpa",
        ),
        (
            ("kernels.attention=te", "train.deterministic=true", "data.document_mask=true"),
            {"transformer-engine": "2.20.2"},
            r"kernels\.attention=te adds gradients of documents in no fixed order, train\.deterministic=true and "
            r"data\.document_mask=true ask for one; set kernels\.attention=",
        ),
        (
            ("kernels.attention=cudnn", "model.d_head=192"),
            {"nvidia-cudnn-frontend": "1.18.0"},
            r"needs heads of at most 128, the model's have 192",
        ),
        (
            ("kernels.attention=flash_attn_2", "model.attention.score_cap=30.0", "model.attention.dropout=0.1"),
            {"flash-attn": "2.8.3"},
            r"has no attention dropout",
        ),
    ],
)
def test_what_an_implementation_lacks_is_said_before_the_run(
    overrides: tuple[str, ...], versions: dict[str, str], told: str
) -> None:
    target = H200.model_copy(update={"gpus": 1, "versions": H200.versions | versions})
    with pytest.raises(RecipeError, match=told):
        spec_of(*overrides, "precision.kind=bf16", target=target, facts=replace(FACTS))


def test_transformer_engine_keeps_an_order_of_whole_sequences() -> None:
    target = H200.model_copy(update={"gpus": 1, "versions": H200.versions | {"transformer-engine": "2.20.2"}})
    words = ("kernels.attention=te", "precision.kind=bf16")
    assert spec_of(*words, "train.deterministic=true", target=target).kernels.attention == "te"
    assert spec_of(*words, "data.document_mask=true", target=target).kernels.attention == "te"


def test_who_plans_for_another_machine_takes_its_packages_to_be_there() -> None:
    """Those that the recipe names; auto knows of none."""
    here = H200.model_copy(update={"gpus": 0, "gpu": None, "sm": 0, "versions": {"torch": "2.13.0+cpu"}})
    recipe = compose("hello", ["kernels.attention=cudnn"]).recipe
    assert "nvidia-cudnn-frontend" in planned_target(HARDWARE["H200"], 8, here, recipe).versions
    kernels = recipe.kernels.model_copy(update={"attention": "auto"})
    other = planned_target(HARDWARE["H200"], 8, here, recipe.model_copy(update={"kernels": kernels}))
    assert set(other.versions) == {"torch"}


WINDOWS = (
    rate("sdpa", "causal", 8192, 4e-3),
    rate("flash_attn", "causal", 8192, 3e-3),
    rate("flash_attn", "window", 128, 1e-4),
    rate("flash_attn", "window", 2048, 4e-4),
)


def test_what_an_implementation_costs_beside_causal_attention() -> None:
    def cost(window: int | None, *, name: str = "flash_attn", seq_len: int = 8192, head_size: int = 128):
        return against_causal(WINDOWS, name, head_size=head_size, seq_len=seq_len, window=window)

    assert cost(None) == pytest.approx(0.75)
    assert cost(None, name="sdpa") == 1.0
    assert cost(128) == pytest.approx(1e-4 / 4e-3)
    # the mean by logarithms, twice the keys of the last point, and fewer than of the first
    assert cost(512) == pytest.approx(2e-4 / 4e-3)
    assert cost(4096) == pytest.approx(8e-4 / 4e-3)
    assert cost(16) == cost(128)
    # half as long a sequence: a window's share is twice as large
    assert cost(128, seq_len=4096) == pytest.approx(2e-4 / 4e-3)
    assert cost(None, head_size=64) is None
    assert cost(128, name="sdpa") is None
    assert cost(None, name="flex") is None


def test_the_plan_reckons_with_the_figures() -> None:
    """As much of sdpa's causal time as was measured; packed documents have no figures of their own."""
    base = ("kernels.attention=flash_attn", *WIDE)
    shipped = throughput_of(HARDWARE["H200"]).table.model_copy(update={"attention_rates": ()})
    hardware = HARDWARE["H200"]
    for more, expected in (((), 0.75), (("data.document_mask=true",), 1.0)):
        spec = spec_of(*base, *more, target=INSTALLED)
        (layer,) = set(facts_of(spec).layers)
        part = next(one for one in layer_parts(spec, layer, in_fp8=False) if one.attention is not None)
        seconds = []
        for rates in ((), WINDOWS):
            throughput = MeasuredThroughput(shipped.model_copy(update={"attention_rates": rates}), hardware)
            times = LayerTimes(spec, hardware, topology_of(spec, hardware), throughput)
            seconds.append(times._attention(part, "forward"))
        assert seconds[1] == pytest.approx(expected * seconds[0])


def seconds_of_attention(*words: str, rates: tuple[AttentionRate, ...] = BOTH) -> list[float]:
    """Forward and backward pass of a layer."""
    hardware = HARDWARE["H200"]
    spec = spec_of(*WIDE, *words, target=INSTALLED)
    (layer,) = set(facts_of(spec).layers)
    part = next(one for one in layer_parts(spec, layer, in_fp8=False) if one.attention is not None)
    table = throughput_of(hardware).table.model_copy(update={"attention_rates": rates})
    times = LayerTimes(spec, hardware, topology_of(spec, hardware), MeasuredThroughput(table, hardware))
    return [times._attention(part, direction) for direction in ("forward", "backward")]


@pytest.mark.parametrize(
    ("name", "words", "measured"),
    [
        ("sdpa", (), 8 / 4),
        ("flex", (), 5 / 4),
        ("flash_attn", (), 4 / 3),
        # rows of 256 tokens, one document each
        ("flex", ("data.document_mask=true", "data.seq_len=256"), 3 / 1.5),
        ("sdpa", ("data.document_mask=true", "data.seq_len=256"), 2.1 / 2),
    ],
)
def test_the_plan_reckons_with_the_figures_of_one_order(
    name: str, words: tuple[str, ...], measured: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both passes as much longer, and of what they take longer the share that shows where power is limited."""
    words = (f"kernels.attention={name}", *words)
    any_order = seconds_of_attention(*words)
    for shown in (1.0, 0.5):
        monkeypatch.setattr(one_order, "SHOWN", shown)
        exact = seconds_of_attention(*words, "train.deterministic=true")
        for seconds, other in zip(exact, any_order, strict=True):
            assert seconds == pytest.approx((1 + shown * (measured - 1)) * other)


def test_nothing_gains_by_one_order() -> None:
    """Times of one kernel differ by noise."""
    rates = (*RATES, rate("flash_attn", "causal", 8192, 2.9e-3, deterministic=True))
    words = ("kernels.attention=flash_attn",)
    exact = seconds_of_attention(*words, "train.deterministic=true", rates=rates)
    assert exact == seconds_of_attention(*words, rates=rates)


def test_what_was_not_measured_in_one_order_is_reckoned_as_in_any(none_in_one_order: None) -> None:
    """But for flex where nothing is hidden: there it was sdpa that was measured, and its own kernel is slower."""
    rates = (*RATES, rate("flex", "causal", 8192, 4e-3))
    for name, words, longer in (
        ("sdpa", (), 1.0),
        ("flash_attn", (), 1.0),
        ("flex", ("data.document_mask=true",), 1.0),
        ("flex", (), FLEX_COST),
    ):
        words = (f"kernels.attention={name}", *words)
        exact = seconds_of_attention(*words, "train.deterministic=true", rates=rates)
        in_any = seconds_of_attention(*words, rates=rates)
        assert exact == pytest.approx([longer * seconds for seconds in in_any]), words
