"""A whole plan, against groups listed rank by rank and figures of other modules."""

import json
from dataclasses import replace

import pytest
from rich.console import Console

from megaspec.compose.compose import compose
from megaspec.core.axes import DENSE_AXES, EXPERT_AXES, rank_groups
from megaspec.estimate.hardware import HARDWARE
from megaspec.estimate.target import Target
from megaspec.estimate.throughput import throughput_of
from megaspec.plan.plan import make_plan, rank_view
from megaspec.plan.report import print_plan, print_ranks, print_whole_plan
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from megaspec.search.tune import SEARCHED

CPU = Target(cores=2, versions={"torch": "2.13.0+cpu"})


def machine(gpus, name="H100"):
    kind = HARDWARE[name]
    versions = {"torch": "2.13.0", "transformer-engine": "2.20.2"}
    return Target(gpus=gpus, gpu=name, sm=kind.sm, gpu_memory=kind.memory, cores=16, versions=versions)


def resolved(recipe, *overrides, target):
    composed = compose(recipe, overrides)
    vocab = 257 if recipe == "hello" else None
    facts = Facts(run_dir="runs/x", vocab_size=vocab, train_tokens=10**13, valid_tokens=10**9)
    return resolve(composed.recipe, target, facts, composed.origins)


def planned(recipe, *overrides, gpus=8, name="H100", packages=()):
    target, hardware = machine(gpus, name), HARDWARE[name]
    target = target.model_copy(update={"versions": target.versions | dict.fromkeys(packages, "1.0")})
    spec = resolved(recipe, *overrides, target=target)
    return make_plan(spec, target, hardware=hardware, throughput=throughput_of(hardware))


@pytest.fixture(scope="module")
def llama():
    return planned("llama3_70b", gpus=64)


def text_of(print_it, *arguments, width=80):
    console = Console(width=width, record=True, file=None, force_terminal=False, quiet=False)
    with console.capture() as captured:
        print_it(*arguments, console)
    return captured.get()


def test_json_has_what_programs_read(llama):
    content = json.loads(json.dumps(llama.as_json()))
    mesh = content["mesh"]
    assert mesh["world"] == 64 == mesh["pp"] * mesh["edp"] * mesh["ep"] * mesh["etp"]
    assert (mesh["tp"], mesh["cp"], mesh["pp"], mesh["dp_replicate"] * mesh["dp_shard"]) == (4, 2, 4, 2)
    assert content["parameters"]["total"] == content["parameters"]["active"] == 70_553_706_496
    assert len(content["parameters"]["per_stage"]) == len(content["memory"]["per_stage"]) == 4
    kinds = ("weights", "gradients", "optimizer", "activations", "logits", "expert_buffers", "communication", "reserve")
    assert content["memory"]["total"] == sum(content["memory"][kind] for kind in kinds)
    assert content["memory"]["total"] == max(stage["total"] for stage in content["memory"]["per_stage"])
    assert content["memory"]["fits"] == (content["memory"]["total"] <= content["memory"]["capacity"])
    assert content["step_time"]["seconds"] == pytest.approx(sum(content["step_time"]["parts"].values()))
    tokens = content["batch"]["tokens_per_step"] / content["step_time"]["seconds"]
    assert content["tokens_per_second"] == pytest.approx(tokens)
    flops = content["flops_per_token"]["full"] * tokens
    assert content["mfu"]["full"] == pytest.approx(flops / (64 * 989e12))
    assert content["bubble"]["formula"] == pytest.approx(3 / content["batch"]["accumulation"])
    assert {"name", "hardware", "communication", "decisions", "days", "groups"} <= set(content)


def test_messages_say_what_a_step_waits_for(llama):
    content = json.loads(json.dumps(llama.as_json()))
    over_tp = [one["exposed_seconds"] for one in content["communication"] if one["group"] == "tp"]
    assert sum(over_tp) == pytest.approx(content["step_time"]["parts"]["tensor parallel"])
    shown = text_of(print_whole_plan, llama, width=120)
    assert f"{sum(over_tp) * 1e3:,.1f}" in next(line for line in shown.splitlines() if line.startswith("tp (4)"))


@pytest.mark.parametrize(
    ("name", "measured_on", "told"),
    [
        ("H200", "H200", "speeds: measured on NVIDIA H200"),
        ("A100-80", "H200", "speeds: A100-80's data sheet: of its matrix products as much as others measured"),
    ],
)
def test_it_says_from_what_its_speeds_come(name, measured_on, told):
    plan = planned("llama2_7b", gpus=8, name=name)
    assert told in " ".join(text_of(print_whole_plan, plan).split())
    hardware = plan.as_json()["hardware"]
    assert hardware["measured_on"] == measured_on
    assert told == f"speeds: {hardware['throughput']}"[: len(told)]


def test_groups_are_those_of_the_mesh(llama):
    for group in llama.groups:
        listed = rank_groups((group.axis,), llama.mesh, DENSE_AXES)
        assert (list(group.first), len(listed)) == (listed[0], group.count)
        assert group.within_node == all(ranks[0] // 8 == ranks[-1] // 8 for ranks in listed)
    assert [g.axis for g in llama.groups] == ["tp", "cp", "dp_shard", "pp"]


def test_experts_have_groups_of_their_own():
    plan = planned("mixtral_8x7b", gpus=64)
    listed = {g.axis: g for g in plan.groups}
    assert list(listed["ep"].first) == rank_groups(("ep",), plan.mesh, EXPERT_AXES)[0]
    assert plan.parameters["active"] < plan.parameters["total"] / 3
    assert plan.unbuilt == ()


def test_what_can_only_be_planned_is_named():
    assert "model.attention.kind" in planned("deepseek_v3", gpus=256).unbuilt


def test_a_rank_sees_its_own_place(llama):
    view = rank_view(llama, 43)
    assert view.dense == {"pp": 2, "dp_replicate": 0, "dp_shard": 1, "cp": 0, "tp": 3}
    assert view.groups["tp"] == (40, 41, 42, 43)
    assert view.groups["pp"] == (11, 27, 43, 59)
    assert view.layers == ("40-59",)
    assert view.parameters == llama.parameters["per_stage"][2]
    for axis, ranks in view.groups.items():
        axes = DENSE_AXES if axis in DENSE_AXES else EXPERT_AXES
        assert list(ranks) in rank_groups((axis,), llama.mesh, axes)


def test_what_does_not_fit_says_so_and_what_would():
    plan = planned("llama3_8b", "parallelism.dp_strategy=replicate", gpus=8)
    assert plan.memory.fits is False
    assert plan.memory.fits_on == ("B200", "GB200")
    shown = text_of(print_whole_plan, plan)
    assert "does NOT fit H100's 79.6 GiB" in shown
    assert "fits B200 or GB200" in " ".join(shown.split())


def test_the_source_names_other_hardware():
    plan = planned("llama2_7b", gpus=8, name="H200")
    assert plan.source_fit == "it fits A100-80, which its source names"


def test_everything_fits_eighty_columns(llama):
    for plan in (llama, planned("deepseek_v3", gpus=256), planned("hello", "train.global_batch=64")):
        shown = text_of(print_whole_plan, plan)
        assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80
        for heading in (
            "mesh",
            "Memory of the fullest rank",
            "What a rank sends",
            "A step takes about",
            "Decided for you",
        ):
            assert heading in shown


def test_pipelines_are_drawn(llama):
    shown = text_of(print_whole_plan, llama)
    assert "   0 0123......aa4bb5" in shown
    assert "1f1b, 256 micro batches: bubble 1.2% of the busy time" in " ".join(shown.split())


def test_what_is_left_as_it_is_is_named_in_full_and_is_nothing_that_was_searched():
    def left(*overrides):
        shown = text_of(print_whole_plan, planned("hello", "train.global_batch=64", *overrides, name="H200"), width=400)
        (line,) = [line for line in shown.splitlines() if line.startswith("left as they are: ")]
        return line.rstrip().partition(": ")[2].split(", "), shown

    plain, _ = left()
    assert plain == [
        "parallelism.tp=1",
        "parallelism.dp_shard=1",
        "parallelism.sequence_parallel=false",
        "parallelism.pipeline.micro_batch_group=1",
    ]
    searched, shown = left("parallelism=auto")
    assert "parallelism.dp_shard=1" in searched
    assert not {key.partition("=")[0] for key in searched} & set(SEARCHED)
    assert "parallelism.recompute.kind" in shown


def test_before_train_there_is_one_screen():
    composed = compose("hello", ("train.global_batch=16",))
    facts = Facts(run_dir="runs/x", vocab_size=257, train_tokens=10**6, valid_tokens=10**5)
    for target in (CPU, machine(4, "H200"), replace_name(machine(4, "H200"), "Unheard-of GPU")):
        spec = resolve(composed.recipe, target, facts, composed.origins)
        shown = text_of(print_plan, spec, target, width=120)
        assert shown.count("\n") <= 20
        assert "16 sequences = micro" in shown
        assert "on the fullest rank" in shown
        assert ("a step predicted" in shown) == (target.gpu == "H200")


def on_cpu(*words, memory=16 * 2**30, width=80):
    """`train`'s screen and the whole plan of hello with changes, on a machine with so much memory left."""
    target = CPU.model_copy(update={"memory": memory})
    composed = compose("hello", words)
    facts = Facts(run_dir="runs/x", vocab_size=257, train_tokens=10**6, valid_tokens=10**5)
    spec = resolve(composed.recipe, target, facts, composed.origins)
    plan = make_plan(spec, target, hardware=None, throughput=None)
    return plan, text_of(print_plan, spec, target, width=width), text_of(print_whole_plan, plan, width=width)


@pytest.mark.parametrize("width", [80, 200])
def test_a_dense_model_hears_nothing_of_experts_and_a_cpu_nothing_of_gpus(width):
    zero1 = ("parallelism.tp=1", "parallelism.dp_strategy=zero1", "parallelism.dp_shard=2")
    for words in ((), zero1, ("parallelism.pp=2", "parallelism.tp=1")):
        plan, first, whole = on_cpu(*words, width=width)
        for shown in (first, whole, text_of(print_ranks, [rank_view(plan, 0)], width=width)):
            for word in ("edp", "etp", "expert", "nvlink", "in a node", "exposed", "None", "of a machine whose"):
                assert word not in shown, (word, words)
            assert max(len(line.rstrip()) for line in shown.splitlines()) <= width


def test_a_model_with_experts_has_both_equations():
    words = ("model=mixtral_8x7b", "model.n_layers=2", "parallelism.ep=2", "parallelism.tp=1")
    _, first, whole = on_cpu(*words)
    assert "layout      2 ranks = ep 2 (expert parallel)" in first
    assert "ep 2 · etp 1 (the same ranks, as experts" in whole


def test_a_plan_for_a_cpu_has_a_verdict():
    plan, first, whole = on_cpu()
    assert (plan.memory.fits, plan.memory.machine.ranks, plan.communication[0].link) == (True, 2, "machine")
    for shown in (first, whole):
        assert "which fits the 16.0 GiB that this machine has available" in " ".join(shown.split())
    plan, first, whole = on_cpu("model=llama3_8b")
    assert plan.memory.fits is False
    assert plan.memory.machine.needed > 100 * 2**30
    for shown in (first, whole):
        assert "which does NOT fit the 16.0 GiB that this machine has available" in " ".join(shown.split())
    assert on_cpu(memory=0)[0].memory.fits is None


def test_before_train_the_decisions_are_told_that_say_how_it_runs():
    plan, first, whole = on_cpu(width=200)
    lines = first[first.index("\ndecided") :].split("\n")[1:-1]
    assert len(lines) == 5
    assert lines[0].split()[1].startswith("launcher.ranks=2:")
    told = "attention sdpa, cross_entropy chunked, linear torch, norm reference, gated reference, rope reference"
    assert f"kernels: {told}, adamw torch, compile none" in lines[3]
    # every decision is either told or counted
    counted = int(lines[-1].split()[1])
    assert len(plan.decisions) == 3 + 8 + counted
    assert "megaspec show runs/x --origins" in lines[-1]
    for decision in plan.decisions:
        assert decision.key in whole


@pytest.mark.parametrize(
    ("words", "is_asked"),
    [
        (("precision.kind=fp8",), True),
        (("precision.kind=fp8", "kernels.linear=te"), False),
        (("precision.kind=bf16",), False),
    ],
    ids=str,
)
def test_casts_and_products_in_fp8_are_told_where_something_asks_for_them(words, is_asked):
    batch = ("train.micro_batch=1", "train.global_batch=8")
    plan = planned("hello", *batch, *words)
    spec = resolved("hello", *batch, *words, target=machine(8))
    first = " ".join(text_of(print_plan, spec, machine(8), width=200).split())
    _, _, told = first.partition(" kernels: ")
    assert ("fp8_cast triton" in told) == ("scaled_product cublaslt" in told) == is_asked
    assert ("fp8_cast" in told) == ("scaled_product" in told) == is_asked
    whole = " ".join(text_of(print_whole_plan, plan, width=200).split())
    is_te = "kernels.linear=te" in words
    for key in ("kernels.fp8_cast", "kernels.scaled_product"):
        _, _, reason = whole.partition(f"{key} ")
        said = reason.partition(" kernels.")[0]
        assert ("not used" in said) == is_te, said
    assert plan.as_json()["kernels"]["linear"] == ("te" if is_te else "torch")


def test_what_no_gpu_has_run_is_said():
    """With its times, which are of other products and of bytes; and that a run asks before it trains."""
    words = ("precision.kind=fp8", "precision.recipe=mxfp8", "train.micro_batch=1", "train.global_batch=8")
    target = machine(8, "B200")
    spec = resolved("hello", *words, target=target)
    assert spec.kernels.linear == "te"
    said = " ".join(text_of(print_plan, spec, target, width=200).split())
    assert (
        "precision.recipe=mxfp8 was tested on CPUs and has run on no GPU: its times are those of fp8's products" in said
    )
    plan = planned("hello", *words, name="B200")
    assert plan.unbuilt == ()
    (hint,) = [one for one in plan.hints if one.key == "precision.recipe"]
    assert hint.overrides == ("precision.recipe=tensorwise",)


def replace_name(target, name):
    return target.model_copy(update={"gpu": name})


def test_hardware_that_is_not_in_the_table_is_planned_without_times():
    target = replace_name(machine(4), "Unheard-of GPU")
    composed = compose("hello", ("train.global_batch=16",))
    facts = replace(Facts(run_dir="runs/x"), vocab_size=257, train_tokens=10**6, valid_tokens=10**5)
    spec = resolve(composed.recipe, target, facts, composed.origins)
    plan = make_plan(spec, target, hardware=None, throughput=None)
    assert plan.step_time is None
    assert plan.hardware.name == "Unheard-of GPU"
    assert "A step takes" not in text_of(print_whole_plan, plan)


@pytest.mark.parametrize("length", [1, 8])
def test_a_histogram_is_told_by_how_fine_it_is(length):
    words = ("data=random", "data.vocab_size=257", "data.document_mask=true", f"data.document_length={length}")
    recipe = compose("hello", (*words, "train.eval_every=0", "train.sample=null")).recipe
    spec = resolve(recipe, CPU, Facts(run_dir="runs/x"))
    n_bins = len(spec.data.document_lengths)
    assert (n_bins == 1) == (length == 1)
    said = "1 bin" if length == 1 else f"{n_bins} bins"
    text = text_of(print_plan, spec, CPU, width=300)
    assert f"data.document_lengths={said}: documents of {length}.0 tokens" in text
