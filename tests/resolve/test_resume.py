"""What may change when a run goes on, what asks for a fork, and what stays as it was decided."""

import json
import math
from dataclasses import replace

import pytest

from megaspec.compose.compose import compose, recompose
from megaspec.core.errors import RecipeError
from megaspec.data.spec import ORDER_VERSION
from megaspec.estimate.target import Target
from megaspec.optim.schedule import learning_rate, weight_decay
from megaspec.resolve.resolver import resolve
from megaspec.resolve.resume import changes, fork, resume
from megaspec.rules.difference import FREE
from megaspec.rules.run_facts import Facts
from megaspec.run_folder import read_run
from megaspec.spec import ForkPoint
from megaspec.train.batch_schedule import BatchSchedule

CPU = Target(cores=2, versions={"torch": "2.13.0+cpu", "tensorboard": "2.21.0"})
ONE = CPU.model_copy(update={"cores": 1})
FACTS = Facts(run_dir="runs/hello", vocab_size=257, train_tokens=10**6, valid_tokens=10**5, fingerprint="a")

# What the cases below count on, whatever the recipe says.
BASE = ("train.steps=120", "train.global_batch=16", "optim.schedule.warmup_steps=10")


def start(*overrides):
    recipe = compose("hello", [*BASE, *overrides]).recipe
    return json.loads(recipe.model_dump_json()), resolve(recipe, CPU, FACTS)


def go_on(run, *overrides, target=CPU, facts=FACTS, done_steps=0):
    saved, old = run
    composed = recompose(saved, "runs/hello/recipe.json", overrides)
    return resume(old, composed.recipe, target, facts, composed.origins, done_steps=done_steps)


def test_the_same_spec_with_its_first_reasons_where_nothing_changes():
    run = start()
    assert go_on(run) == run[1]
    assert {d.key: d.reason for d in go_on(run).decisions}["optim.schedule.decay_steps"] == "train.steps"
    kept = {d.key for d in go_on(run, "checkpoint.every=5").decisions if d.reason.startswith("kept from the beginning")}
    assert kept == {"model.d_head", "model.d_ffn", "model.max_seq_len", "data.seed", "optim.schedule.decay_steps"}


def test_what_another_machine_decides_is_told_with_its_own_reasons():
    run = start("launcher.ranks=2", "parallelism.tp=2")
    without_tensorboard = CPU.model_copy(update={"versions": {"torch": "2.13.0+cpu"}})
    there = go_on(run, target=without_tensorboard)
    assert there != run[1]
    assert "not installed" in {d.key: d.reason for d in there.decisions}["log.tensorboard"]


def test_another_layout_and_another_world():
    run = start()
    spec = go_on(run, "parallelism.tp=1", "log.every=1", "checkpoint.every=5", "kernels=reference", "~train.sample")
    assert (spec.parallelism.tp, spec.parallelism.dp_replicate, spec.train.micro_batch) == (1, 2, 8)
    smaller = go_on(run, target=ONE)
    assert (smaller.world_size, smaller.parallelism.tp) == (1, 1)
    for one in (spec, smaller):
        assert (one.segments, one.data, one.optim, one.model) == tuple(
            getattr(run[1], name) for name in ("segments", "data", "optim", "model")
        )


def test_a_longer_run_appends_a_segment_and_keeps_its_schedule():
    run = start()
    longer = go_on(run, "train.steps=200")
    assert longer.segments == (120 * 16, 80 * 16)
    assert longer.optim.schedule.decay_steps == 120
    kept = {d.key: d.reason for d in longer.decisions}
    assert "a fork may stretch it" in kept["optim.schedule.decay_steps"]
    saved = json.loads(recompose(run[0], "r", ["train.steps=200"]).recipe.model_dump_json())
    longest = go_on((saved, longer), "train.steps=210")
    assert longest.segments == (120 * 16, 80 * 16, 10 * 16)
    assert go_on((saved, longest), "train.steps=150", done_steps=130).segments == longest.segments
    with pytest.raises(RecipeError, match=r"train\.steps=100 must be at least the 130 that are done"):
        go_on((saved, longest), "train.steps=100", done_steps=130)


@pytest.mark.parametrize(
    "override",
    [
        "optim.lr=1e-4",
        "optim.schedule.decay_steps=300",
        "model.n_layers=5",
        "model.dropout=0.1",
        "data.seq_len=128",
        "data.seed=3",
        "data.blend.0.prefix=other",
        "train.global_batch=32",
        "train.seed=3",
        "train.batch_ramp={start: 8, increment: 8, samples: 32}",
        "precision=bf16",
        "optim=sgd",
        "name=other",
    ],
)
def test_the_experiment_is_frozen(override):
    with pytest.raises(RecipeError) as caught:
        go_on(start(), override)
    assert {p.code for p in caught.value.problems} == {"resume-frozen"}
    assert "--fork NAME" in str(caught.value)
    assert caught.value.problems[0].key.startswith(override.partition("=")[0])


def test_all_changes_are_told_at_once():
    with pytest.raises(RecipeError) as caught:
        go_on(start(), "optim.lr=1e-4", "model.dropout=0.1", "parallelism.tp=1")
    assert [str(p) for p in caught.value.problems] == [
        "model.dropout=0.1 changes the experiment, the run has 0.0; give --fork NAME to start another run from its "
        "newest checkpoint   (command line)",
        "optim.lr=0.0001 changes the experiment, the run has 0.003; give --fork NAME to start another run from its "
        "newest checkpoint   (command line)",
    ]


def test_a_ramp_is_one_change():
    run = start("train.batch_ramp={start: 8, increment: 8, samples: 32}")
    recipe = recompose(run[0], "r", ["train.batch_ramp=null"]).recipe
    assert [key for key, _, _ in changes(run[1], recipe)] == ["train.batch_ramp"]


def test_the_experiment_is_not_decided_anew():
    run = start("model.vocab_size=auto")
    assert go_on(run, facts=replace(FACTS, vocab_size=200, fingerprint="")).model.vocab_size == 257
    saved, old = start("data.seed=auto")
    assert go_on((saved, old)).data.seed == old.data.seed == 1234


def test_other_data_under_the_same_name_is_refused():
    with pytest.raises(RecipeError, match=r"content has changed .* or a \.manifest\.json beside it has come or gone"):
        go_on(start(), facts=replace(FACTS, fingerprint="b"))


BLEND = "data.blend=[{{prefix: a, weight: {}}}, {{prefix: b, weight: {}}}, {{prefix: c, weight: {}}}]"


def of_the_earlier_order(folder, *overrides):
    """A run of the version that divided weights once: every data set has a weight, the Spec no version of the order."""
    saved, spec = start(*overrides)
    content = json.loads(spec.model_dump_json())
    del content["data_order"]
    for one in (saved, content):
        for part in one["data"]["blend"]:
            part["weight"] = part["weight"] or 1.0
    (folder / "recipe.json").write_text(json.dumps(saved))
    (folder / "spec.json").write_text(json.dumps(content))
    run = read_run(folder)
    return run.recipe, run.spec


def test_an_earlier_run_whose_order_is_made_as_it_was_goes_on(tmp_path):
    saved, old = of_the_earlier_order(tmp_path)
    assert [part.weight for part in old.data.blend] == [None]
    assert (old.data_order, go_on((saved, old))) == (ORDER_VERSION, old)
    # as a scheduler starts it: with the recipe, not with what the folder says
    assert resume(old, compose("hello", list(BASE)).recipe, CPU, FACTS) == old
    saved, old = of_the_earlier_order(tmp_path, BLEND.format(2, 1, 1))
    assert [part.weight for part in old.data.blend] == [2, 1, 1]
    assert (old.data_order, go_on((saved, old))) == (ORDER_VERSION, old)


@pytest.mark.parametrize("weights", [(0.7, 0.2, 0.1), (0.59, 0.8, 0.5)])
def test_an_earlier_run_whose_order_is_made_no_longer_is_refused(weights, tmp_path):
    saved, old = of_the_earlier_order(tmp_path, BLEND.format(*weights))
    assert old.data_order == 1
    with pytest.raises(RecipeError, match=r"would read other samples; end the run with .* --fork NAME") as caught:
        go_on((saved, old))
    assert [problem.code for problem in caught.value.problems] == ["resume-order"]
    new = fork(old, recompose(saved, "r", []).recipe, CPU, FACTS, done_steps=50, done_samples=800)
    assert (new.data_order, new.segments) == (ORDER_VERSION, (120 * 16,))
    longer = fork(old, recompose(saved, "r", ["train.steps=200"]).recipe, CPU, FACTS)
    assert longer.segments == (200 * 16,), "a new order, not the earlier one with a segment more"


def test_rules_are_asked_again():
    with pytest.raises(RecipeError, match=r"parallelism\.tp=3 must divide"):
        go_on(start(), "parallelism.tp=3")


def test_the_run_may_lie_in_another_folder():
    saved, old = start()
    moved = old.model_copy(update={"run_dir": "elsewhere/hello"})
    assert go_on((saved, moved)).run_dir == "elsewhere/hello"


def test_a_fork_may_change_everything():
    saved, old = start()
    composed = recompose(saved, "r", ["optim.lr=1e-3", "train.steps=200", "train.global_batch=32"])
    spec = fork(old, composed.recipe, CPU, replace(FACTS, run_dir="runs/new"), composed.origins)
    assert (spec.optim.lr, spec.optim.schedule.decay_steps, spec.run_dir) == (1e-3, 200, "runs/new")
    assert spec.segments == (120 * 16, 200 * 32 - 120 * 16)
    other = recompose(saved, "r", ["data.seq_len=128", "train.steps=200"]).recipe
    assert fork(old, other, CPU, FACTS).segments == (200 * 16,)
    assert fork(old, composed.recipe, CPU, replace(FACTS, fingerprint="b")).segments == (200 * 32,)


@pytest.mark.parametrize(("batch", "moved"), [(32, -50 * 16), (16, 0), (4, 50 * 12)])
def test_a_fork_takes_the_sample_after_the_last_one_that_was_taken(batch, moved):
    saved, old = start()
    recipe = recompose(saved, "r", ["train.steps=200", f"train.global_batch={batch}"]).recipe
    spec = fork(old, recipe, CPU, FACTS, done_steps=50, done_samples=50 * 16)
    assert spec.samples_moved == moved
    schedule = BatchSchedule(spec.train, moved=spec.samples_moved)
    assert (schedule.consumed(50), schedule.consumed(51)) == (50 * 16, 50 * 16 + batch)
    assert sum(spec.segments) == max(120 * 16, schedule.consumed(200))
    # it stays so when the fork itself goes on
    longer = recompose(json.loads(recipe.model_dump_json()), "r", ["train.steps=900"]).recipe
    longer = resume(spec, longer, CPU, FACTS, done_steps=200)
    assert (longer.samples_moved, sum(longer.segments)) == (moved, schedule.consumed(900))


def test_a_fork_can_not_end_before_it_begins():
    saved, old = start()
    composed = recompose(saved, "r", ["train.steps=49"])
    with pytest.raises(RecipeError, match=r"train.steps=49 must be at least the 50 that are done   \(command line\)"):
        fork(old, composed.recipe, CPU, FACTS, composed.origins, done_steps=50, done_samples=800)


AGAIN = "optim.schedule={first_step: auto, init_lr: auto, warmup_steps: 20}"


def forked(run, *overrides, done_steps=60):
    """The recipe of a fork, as saved, and its Spec."""
    saved, old = run
    composed = recompose(saved, "r", overrides)
    spec = fork(old, composed.recipe, CPU, FACTS, composed.origins, done_steps=done_steps, done_samples=done_steps * 16)
    point = ForkPoint(manifest="0" * 64, step=done_steps, tokens=1)
    return json.loads(composed.recipe.model_dump_json()), spec.model_copy(update={"forked_from": point})


def test_a_fork_warms_up_again_from_the_rate_at_which_it_begins():
    run = start("optim.lr=3e-3", "optim.schedule.min_lr=3e-4")
    _, spec = forked(run, AGAIN, "optim.lr=2e-3", "train.steps=200")
    schedule = spec.optim.schedule
    assert (schedule.first_step, schedule.decay_steps) == (60, 140)
    # the cosine of the first run: 50 of its 110 steps behind the warm-up
    there = 3e-4 + (1 + math.cos(math.pi * 50 / 110)) / 2 * (3e-3 - 3e-4)
    assert schedule.init_lr == pytest.approx(there, rel=1e-12)
    rates = [learning_rate(schedule, spec.optim.lr, step) for step in (60, 70, 80, 140, 200)]
    assert rates == pytest.approx([there, (there + 2e-3) / 2, 2e-3, 1.15e-3, 3e-4], rel=1e-12)
    reasons = {decision.key: decision.reason for decision in spec.decisions}
    assert reasons["optim.schedule.first_step"] == "the step of the checkpoint with which the fork begins"
    assert "at the step with which the fork begins" in reasons["optim.schedule.init_lr"]
    assert reasons["optim.schedule.decay_steps"] == "train.steps - optim.schedule.first_step"


def test_the_schedule_of_a_fork_survives_its_resumes():
    fork_of_a_run = forked(start(), AGAIN, "train.steps=200")
    _, spec = fork_of_a_run
    # no new decision, hence the very Spec
    assert go_on(fork_of_a_run, done_steps=90) == spec
    again = go_on(fork_of_a_run, "parallelism.tp=1", "train.steps=300", done_steps=90)
    assert again.optim == spec.optim
    for step in range(60, 301):
        assert learning_rate(again.optim.schedule, again.optim.lr, step) == learning_rate(
            spec.optim.schedule, spec.optim.lr, step
        )
    # a fork of the fork counts from itself; the number goes on with the first one's schedule
    _, child = forked(fork_of_a_run, "train.steps=300", done_steps=120)
    assert child.optim.schedule.first_step == 120
    _, child = forked(fork_of_a_run, "train.steps=300", "optim.schedule.first_step=60", done_steps=120)
    assert (child.optim.schedule.first_step, child.optim.schedule.decay_steps) == (60, 240)
    with pytest.raises(RecipeError, match=r"first_step=130 must be at most 120, the step with which the run begins"):
        forked(fork_of_a_run, "train.steps=300", "optim.schedule.first_step=130", done_steps=120)


@pytest.mark.parametrize("saved_at", [1, 5, 10, 50, 99])
@pytest.mark.parametrize(
    "schedule",
    [
        "{kind: cosine}",
        "{kind: wsd, wsd_decay_steps: 30}",
        "{kind: piecewise, min_lr: 0, pieces: [{shape: constant, until: 50}, {shape: linear, until: 120, lr: 0}]}",
    ],
)
def test_a_rate_at_a_step_is_the_same_with_a_stop_as_without(schedule, saved_at):
    run = start(f"optim.schedule={schedule}")
    spec = go_on(run, "parallelism.tp=1", "checkpoint.every=7", done_steps=saved_at)
    for step in range(121):
        before = learning_rate(run[1].optim.schedule, run[1].optim.lr, step)
        assert learning_rate(spec.optim.schedule, spec.optim.lr, step) == before


def test_a_run_that_is_no_fork_begins_with_step_0():
    _, spec = start(AGAIN)
    assert (spec.optim.schedule.first_step, spec.optim.schedule.init_lr) == (0, 0.0)
    reasons = {decision.key: decision.reason for decision in spec.decisions}
    assert reasons["optim.schedule.first_step"] == "the run is no fork: it begins with step 0"


def test_a_fork_without_a_word_stands_in_the_middle_of_its_schedule():
    run = start()
    _, spec = forked(run, "train.steps=120")
    assert spec.optim.schedule == run[1].optim.schedule


def test_a_fork_that_leaves_its_schedule_no_step_is_refused():
    with pytest.raises(RecipeError, match=r"first_step=120 leaves the schedule no step of train\.steps=120") as caught:
        forked(start(), AGAIN, done_steps=120)
    assert [problem.code for problem in caught.value.problems] == ["lr-steps"]


def test_weight_decay_and_batch_ramp_are_counted_from_the_fork_too():
    ramps = (
        "optim.weight_decay_ramp={kind: linear, end: 0.2, steps: 10, first_step: auto}",
        "train.batch_ramp={start: 4, increment: 4, samples: 48, first_step: auto}",
        "train.micro_batch=2",
    )
    run = forked(start(), *ramps, "train.steps=200")
    _, spec = run
    assert [weight_decay(spec.optim, step) for step in (60, 65, 70)] == pytest.approx([0.1, 0.15, 0.2])
    schedule = BatchSchedule(spec.train, moved=spec.samples_moved)
    assert [schedule.batch(step) for step in (60, 63, 64, 66, 68)] == [4, 4, 8, 12, 16]
    # the sample after the last one that was taken
    assert schedule.consumed(60) == 60 * 16
    longer = go_on(run, "train.steps=300", done_steps=100)
    assert (longer.optim, longer.train.batch_ramp) == (spec.optim, spec.train.batch_ramp)


def test_a_schedule_is_not_moved_without_a_fork():
    with pytest.raises(RecipeError, match=r"optim\.schedule\.first_step=50 changes the experiment"):
        go_on(start(), "optim.schedule.first_step=50", done_steps=50)


def test_free_keys_exist():
    from megaspec.core.problems import field_paths
    from megaspec.recipe import Recipe

    assert set(FREE) <= set(field_paths(Recipe))


MOE = "model.moe={{n_experts: 4, top_k: 2, {}}}"


@pytest.mark.parametrize(
    ("experts", "is_frozen"),
    [
        ("router: {losses: [{kind: aux, coefficient: 0.01}]}", True),
        ("router: {losses: [{kind: global_aux, coefficient: 0.01}, {kind: seq_aux, coefficient: 0.01}]}", False),
        ("router: {balancing: sinkhorn}", True),
        ("capacity_factor: 1.25", True),
        ("router: {expert_bias: true, bias_rate: 1e-3, score: sigmoid}", False),
    ],
)
def test_the_micro_batch_belongs_to_the_experiment_where_experts_are_balanced_within_it(experts, is_frozen):
    run = start(MOE.format(experts), "parallelism.tp=1")
    if not is_frozen:
        assert go_on(run, "train.micro_batch=2").train.micro_batch == 2
        return
    with pytest.raises(RecipeError, match=r"train\.micro_batch=2 changes the experiment: experts are balanced within"):
        go_on(run, "train.micro_batch=2")
    assert go_on(run, "launcher.ranks=1").train.micro_batch == run[1].train.micro_batch


def test_the_format_of_the_gradient_sum_belongs_to_the_experiment():
    with pytest.raises(RecipeError, match=r"parallelism\.grad_reduce=bf16 changes the experiment"):
        go_on(start(), "parallelism.grad_reduce=bf16")


def test_how_weights_travel_is_no_part_of_the_experiment():
    fp8 = ("precision=fp8", "parallelism.tp=1", "parallelism.dp_replicate=1", "parallelism.dp_shard=2")
    run = start(*fp8, "parallelism.dp_strategy=fsdp", "model.d_ffn=64", "model.d_head=16")
    assert go_on(run, "precision.gather_fp8=true").precision.gather_fp8
    with pytest.raises(RecipeError, match=r"precision\.recipe=delayed changes the experiment"):
        go_on(run, "precision.recipe=delayed")


def test_a_constant_rate_goes_on():
    run = start("optim.schedule={kind: constant, min_lr: 0}")
    assert go_on(run, "train.steps=240", done_steps=10).train.steps == 240


STREAM = (
    "data=stream",
    "~data.blend",
    "data.files=[{path: a.jsonl}]",
    "data.tokenizer=byte",
    "train.eval_every=0",
)


def test_a_stream_may_have_other_workers_and_a_fork_of_it_goes_on_or_begins_anew():
    saved, old = run = start(*STREAM)
    assert old.data.lanes == 16
    spec = go_on(run, "data.workers=2", done_steps=50)
    assert (spec.data.workers, spec.samples_moved) == (2, 0)
    # what a run is told to do that ended at a bad line
    assert go_on(run, "data.bad_lines=skip", done_steps=50).data.bad_lines == "skip"
    with pytest.raises(RecipeError, match=r"data\.window=5000 changes the experiment"):
        go_on(run, "data.window=5000")
    with pytest.raises(RecipeError, match="names, sizes or times of change of the files"):
        go_on(run, facts=replace(FACTS, fingerprint="b"))
    same = fork(
        old,
        recompose(saved, "r", ["data.workers=0", "data.bad_lines=skip"]).recipe,
        CPU,
        FACTS,
        done_steps=50,
        done_samples=800,
    )
    assert BatchSchedule(same.train, moved=same.samples_moved).consumed(50) == 800
    other = fork(old, recompose(saved, "r", ["data.seed=9"]).recipe, CPU, FACTS, done_steps=50, done_samples=800)
    assert BatchSchedule(other.train, moved=other.samples_moved).consumed(50) == 0


def test_a_stream_has_no_validation_split():
    with pytest.raises(
        RecipeError, match=r"train\.eval_every=5 needs validation data, data\.kind=stream trains on all"
    ):
        start(*STREAM[:-1], "train.eval_every=5")
    ramp = "train.batch_ramp={start: 4, increment: 6, samples: 40}"
    assert start(*STREAM, ramp, "train.micro_batch=2")[1].data.lanes == 2
