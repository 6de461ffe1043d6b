"""The one change that would save most: it is the best of its kind, keeps the rules, fits, and does what it says."""

import json

import pytest
from rich.console import Console

from megaspec.compose.compose import compose
from megaspec.core.problems import show, value_at
from megaspec.estimate.hardware import HARDWARE
from megaspec.estimate.memory import fullest, fullest_within, memory_of
from megaspec.estimate.step_time import step_time
from megaspec.estimate.throughput import throughput_of
from megaspec.plan import plan as plan_module
from megaspec.plan.plan import make_plan
from megaspec.plan.report import print_plan, print_whole_plan
from megaspec.resolve.resolver import resolve
from megaspec.rules.difference import differences
from megaspec.rules.run_facts import Facts
from megaspec.search import changes
from megaspec.search.changes import WORTH, best_change, trials
from megaspec.search.remedies import broken
from tests.plan.test_plan import machine, planned
from tests.resolve.planned import filled, shaped

H100, H200 = HARDWARE["H100"], HARDWARE["H200"]
# Llama 3.1 405B on 16,384 GPUs: 16 micro batches in 16 stages.
LARGE = ("llama3_1_405b", ("launcher.ranks=16384", "parallelism.pp=16", "parallelism.cp=1"), 16384)
CASES = [
    LARGE,
    ("llama3_8b", (), 8),
    ("mixtral_8x7b", (), 64),
    ("qwen3_30b_a3b", (), 16),
    ("llama3_70b", ("parallelism.recompute={kind: full, parts: null}",), 64),
    ("llama3_70b", ("parallelism.tp=8", "parallelism.overlap.tp=false"), 64),
    ("gpt3_175b", ("parallelism.dp_strategy=fsdp",), 128),
]
NAMES = [f"{recipe} {' '.join(words)}" for recipe, words, _ in CASES]


def change_of(recipe, hardware=H100):
    speeds = throughput_of(hardware)
    seconds = step_time(recipe, hardware, speeds).seconds
    return seconds, best_change(recipe, hardware, speeds, seconds=seconds)


def test_a_pipeline_with_too_few_micro_batches_is_told_to_interleave():
    """With one chunk a rank stages wait for about half of the time; with eight, of a layer each, for an eighth."""
    recipe, words, gpus = LARGE
    speeds = throughput_of(H100)
    layout = filled(recipe, *words, gpus=gpus, hardware="H100")
    assert step_time(layout, H100, speeds).bubble > 0.9
    seconds, change = change_of(layout)
    assert change.overrides == ("parallelism.pipeline.schedule=interleaved", "parallelism.pipeline.virtual_stages=8")
    assert seconds == pytest.approx(10.0, rel=0.05)
    assert change.seconds == pytest.approx(6.2, rel=0.05)
    assert change.saves == pytest.approx(1 - change.seconds / seconds)


@pytest.mark.parametrize(("recipe", "words", "gpus"), CASES, ids=NAMES)
def test_what_is_named_can_be_pasted(recipe, words, gpus):
    """As words of the command line: it resolves, takes the time and the memory that were told, and fits."""
    seconds, change = change_of(filled(recipe, *words, gpus=gpus, hardware="H100"))
    assert change is not None
    given = {word.partition("=")[0] for word in change.overrides}
    kept = [word for word in words if word.partition("=")[0] not in given]
    plan = planned(recipe, *kept, *change.overrides, gpus=gpus)
    assert plan.step_time.seconds == pytest.approx(change.seconds)
    assert plan.memory.total == change.total <= H100.memory
    assert change.seconds <= (1 - WORTH) * seconds


@pytest.mark.parametrize(("recipe", "words", "gpus"), [*CASES, ("llama3_70b", (), 64)], ids=[*NAMES, "llama3_70b"])
def test_it_is_the_best_of_all_that_may_be_tried(recipe, words, gpus):
    layout = filled(recipe, *words, gpus=gpus, hardware="H100")
    speeds, already = throughput_of(H100), broken(layout, H100)
    seconds, change = change_of(layout)
    best, tried = seconds, 0
    for one in trials(layout, H100, speeds):
        tried += 1
        is_offered = not broken(one, H100) - already and fullest(memory_of(one)).total <= H100.room
        if is_offered and not any(difference.is_experiment for difference in differences(layout, one)):
            best = min(best, step_time(one, H100, speeds).seconds)
    assert 5 < tried <= 50
    if change is None:
        assert best > (1 - WORTH) * seconds
    else:
        assert change.seconds == pytest.approx(best)


@pytest.mark.parametrize(("recipe", "words", "gpus"), CASES, ids=NAMES)
def test_few_are_weighed_in_full(monkeypatch, recipe, words, gpus):
    layout, weighed = filled(recipe, *words, gpus=gpus, hardware="H100"), []

    def counted(one, room):
        weighed.append(one)
        return fullest_within(one, room)

    monkeypatch.setattr(changes, "fullest_within", counted)
    change_of(layout)
    assert 0 < len(weighed) <= changes.MOST


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("parallelism.tp=8", "parallelism.overlap.tp=false"), "parallelism.overlap.tp=true"),
        (("kernels.compile=none",), "kernels.compile=block"),
        (("kernels.attention=reference",), "kernels.attention=sdpa"),
        (("parallelism.recompute.kind=full",), "parallelism.recompute.kind=none"),
        (("parallelism.offload.layers=16",), "parallelism.offload.layers=0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_was_switched_off_is_switched_on(words, expected):
    """8B at half depth on 8 H200: each is the dearest thing of its layout."""
    only = ("parallelism.tp=1",) if "parallelism.tp=8" not in words else ()
    layout = shaped("llama3_8b_half", *only, *words, gpus=8, micro_batch=1, global_batch=64, seq_len=2048)
    speeds = throughput_of(H200)
    seconds = step_time(layout, H200, speeds).seconds
    key, _, value = expected.partition("=")
    found = [one for one in trials(layout, H200, speeds) if show(value_at(one.model_dump(mode="json"), key)) == value]
    assert min(step_time(one, H200, speeds).seconds for one in found) < seconds


EXPERTS = "{n_experts: 8, top_k: 2, d_expert: 512, router: {losses: [{kind: %s, coefficient: 1e-2}]}}"


def test_what_is_trained_is_not_changed():
    """Twice the micro batch is tried where experts are balanced within a micro batch, too, and never named."""

    def named(loss):
        words = ("parallelism.tp=1", f"model.moe={EXPERTS % loss}", "parallelism.dp_strategy=zero1")
        layout = shaped("llama3_2_1b", *words, gpus=8, micro_batch=1, global_batch=64, seq_len=512)
        assert any(one.train.micro_batch == 2 for one in trials(layout, H200, throughput_of(H200)))
        return change_of(layout, H200)[1]

    assert named("global_aux").overrides == ("train.micro_batch=2",)
    other = named("aux")
    assert other is None or not any(word.startswith("train.") for word in other.overrides)


@pytest.mark.parametrize(
    ("recipe", "words", "gpus"),
    [
        ("llama3_8b", ("launcher.ranks=16", "parallelism.tp=16", "parallelism.cp=1", "model.n_kv_heads=16"), 16),
        ("llama3_8b", ("launcher.ranks=64", "parallelism.tp=16", "parallelism.cp=1", "model.n_kv_heads=16"), 64),
        ("llama3_70b", ("parallelism.tp=16", "parallelism.pp=2", "parallelism.cp=1", "model.n_kv_heads=16"), 64),
        ("gpt3_175b_128gpu", ("parallelism.tp=16",), 128),
    ],
)
def test_it_saves_as_much_as_the_hint_below_it(recipe, words, gpus):
    """Of tensor parallel that reaches across nodes a hint says what fits inside one."""
    spec, target = spec_of(recipe, *words, gpus=gpus)
    plan = make_plan(spec, target, hardware=H100, throughput=throughput_of(H100), weigh_changes=True)
    [hint] = plan.hints
    given = {word.partition("=")[0] for word in hint.overrides}
    kept = [word for word in words if word.partition("=")[0] not in given]
    narrow, _ = spec_of(recipe, *kept, *hint.overrides, gpus=gpus)
    assert plan.change.seconds <= step_time(narrow, H100, throughput_of(H100)).seconds * (1 + 1e-9)


def test_it_stands_in_the_plan_and_not_before_training(monkeypatch):
    recipe, words, gpus = LARGE
    spec, target = spec_of(recipe, *words, gpus=gpus)
    speeds = throughput_of(H100)
    plan = make_plan(spec, target, hardware=H100, throughput=speeds, weigh_changes=True)
    content = json.loads(json.dumps(plan.as_json()))["change"]
    assert content["seconds"] == pytest.approx(plan.change.seconds)
    assert content["overrides"] == list(plan.change.overrides)
    shown = text_of(print_whole_plan, plan)
    assert "The one change that would save most: 5,9" in shown
    assert "\n  parallelism.pipeline.schedule=interleaved parallelism.pipeline.virtual_stages=8\n" in shown

    def never(*arguments, **named):
        raise AssertionError("train weighs no changes")

    monkeypatch.setattr(plan_module, "best_change", never)
    assert make_plan(spec, target, hardware=H100, throughput=speeds).change is None
    assert "save most" not in text_of(print_plan, spec, target)


def text_of(print_it, *arguments):
    console = Console(width=80, force_terminal=False)
    with console.capture() as captured:
        print_it(*arguments, console)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def spec_of(recipe, *words, gpus):
    target = machine(gpus)
    composed = compose(recipe, words)
    facts = Facts(run_dir="runs/x", train_tokens=10**14, valid_tokens=10**10)
    return resolve(composed.recipe, target, facts, composed.origins), target
