"""What settings cost without a word: attention dropout, and tensor parallel across nodes."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from megaspec.core.units import bytes_in_words, seconds_in_words
from megaspec.estimate.attention_rates import AttentionRate
from megaspec.estimate.hardware import HARDWARE
from megaspec.estimate.throughput import MeasuredThroughput, throughput_of
from megaspec.plan.report import print_whole_plan
from tests.plan import test_plan
from tests.plan.test_plan import planned

GIB = 2**30
WHOLE_SEQUENCES = "parallelism.context.kind=all_to_all"
FLEX = ("kernels.attention=flex", "data.document_mask=true", WHOLE_SEQUENCES)
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def hint_of(plan, key):
    found = [hint for hint in plan.hints if hint.key == key]
    assert len(found) == len(plan.hints) == 1
    return found[0]


def test_attention_dropout_tells_what_its_kernel_costs():
    """GPT-3 on 128 H100: 123 GiB instead of 68."""
    plan, without = (planned("gpt3_175b", *words, gpus=128) for words in (("model.attention.dropout=0.1",), ()))
    hint = hint_of(plan, "model.attention.dropout")
    assert plan.memory.total > 1.7 * without.memory.total
    assert not plan.memory.fits
    assert f"{plan.memory.total / GIB:.1f} GiB on the fullest rank and {plan.step_time.seconds:.2f} s" in hint.text
    assert f"{without.memory.total / GIB:.1f} GiB and {without.step_time.seconds:.2f} s a step with" in hint.text
    assert hint.overrides == ("model.attention.dropout=0",)
    assert without.hints == ()
    console = Console(width=80, force_terminal=False)
    with console.capture() as captured:
        print_whole_plan(plan, console)
    assert f"hint: {hint.text}" in " ".join(captured.get().split())
    assert json.loads(json.dumps(plan.as_json()))["hints"][0]["overrides"] == ["model.attention.dropout=0"]


def test_a_kernel_that_was_set_is_part_of_the_way_out():
    words = ("model.attention.dropout=0.1", "kernels.attention=reference")
    hint = hint_of(planned("gpt3_175b", *words, gpus=128), "model.attention.dropout")
    assert hint.overrides == ("model.attention.dropout=0", "kernels.attention=sdpa")
    assert planned("gpt3_175b", *hint.overrides, gpus=128).hints == ()
    # without dropout it is a choice, which the change that saves most names where it is worth a word
    assert planned("gpt3_175b", words[1], gpus=128).hints == ()


def test_weights_of_attention_can_be_computed_again_instead():
    words = ("model.attention.dropout=0.1", "parallelism.recompute={kind: none, parts: null}")
    hint = hint_of(planned("gpt2_124m", *words, gpus=8), "model.attention.dropout")
    again = planned("gpt2_124m", words[0], "parallelism.recompute={kind: selective, parts: null}", gpus=8)
    assert hint.text.endswith(" a step with parallelism.recompute.kind=selective")
    assert f"; {again.memory.total / GIB:.1f} GiB and " in hint.text


@pytest.mark.parametrize(
    ("recipe", "words", "gpus"),
    [
        ("gpt3_175b_128gpu", ("parallelism.tp=16",), 128),
        ("llama3_70b", ("parallelism.tp=16", "parallelism.pp=2", "parallelism.cp=1"), 64),
    ],
)
def test_tensor_parallel_across_nodes_tells_what_it_waits_for(recipe, words, gpus):
    plan = planned(recipe, *words, gpus=gpus)
    hint = hint_of(plan, "parallelism.tp")
    waits = sum(one.exposed_seconds for one in plan.communication if one.group == "tp")
    assert waits > 0.3 * plan.step_time.seconds
    told = f"{waits:.2f} s ({waits / plan.step_time.seconds:.0%} of it) for its messages over the network"
    assert f"parallelism.tp=16 reaches across nodes of 8 GPUs: a step waits {told}" in hint.text
    # the way out can be pasted, takes what is told, and fits
    given = {word.partition("=")[0] for word in hint.overrides}
    kept = [word for word in words if word.partition("=")[0] not in given]
    narrow = planned(recipe, *kept, *hint.overrides, gpus=gpus)
    assert narrow.mesh["tp"] <= 8
    assert narrow.hints == ()
    assert narrow.memory.total <= HARDWARE["H100"].room
    told = f"{narrow.memory.total / GIB:.1f} GiB and {narrow.step_time.seconds:.2f} s a step"
    assert told in hint.text
    assert narrow.step_time.seconds < plan.step_time.seconds


def test_no_word_about_tensor_parallel_inside_a_node():
    assert planned("gpt3_175b_128gpu", gpus=128).hints == ()
    assert planned("gpt3_175b_128gpu", gpus=128, name="GB200").hints == ()
    # 72 GPUs are no multiple of 16
    across = planned("gpt3_175b_128gpu", "parallelism.tp=16", gpus=128, name="GB200")
    assert "reaches across nodes of 72 GPUs" in hint_of(across, "parallelism.tp").text


def test_where_no_narrower_layout_fits_the_search_is_named():
    words = ("launcher.ranks=16", "parallelism.tp=16", "parallelism.pp=1", "parallelism.cp=1")
    hint = hint_of(planned("llama3_70b", *words, gpus=16, name="A100-40"), "parallelism.tp")
    assert hint.overrides == ()
    assert hint.text.endswith("megaspec tune searches")


# Milliseconds of attention in one order of sums, of heads of 128: by implementation, kind and what a query sees.
IN_ONE_ORDER = {
    ("sdpa", "causal", 8192): 7.0,
    ("flex", "causal", 8192): 4.9,
    ("flex", "documents", 256): 1.3,
    ("flex", "documents", 4096): 4.6,
    ("flash_attn", "causal", 8192): 3.06,
    ("flash_attn", "window", 128): 0.6,
    ("flash_attn", "window", 1024): 1.2,
}
# The same in any.
IN_ANY_ORDER = {
    ("sdpa", "causal", 8192): 3.5,
    ("flex", "causal", 8192): 3.5,
    ("flex", "documents", 256): 1.3,
    ("flex", "documents", 4096): 4.6,
    ("flash_attn", "causal", 8192): 3.0,
    ("flash_attn", "window", 128): 0.5,
    ("flash_attn", "window", 1024): 1.0,
    ("flash_attn", "documents", 256): 0.7,
}


@pytest.fixture
def rates(monkeypatch):
    """H200 has these alone, other GPUs none."""
    found = []
    for deterministic, takes in ((False, IN_ANY_ORDER), (True, IN_ONE_ORDER)):
        for (name, kind, seen), milliseconds in takes.items():
            found.append(
                AttentionRate(
                    implementation=name,
                    kind=kind,
                    head_size=128,
                    tokens=8192,
                    seen=seen,
                    seconds=1e-3 * milliseconds,
                    deterministic=deterministic,
                )
            )
    table = throughput_of(HARDWARE["H200"]).table.model_copy(update={"attention_rates": tuple(found)})
    monkeypatch.setattr(test_plan, "throughput_of", lambda hardware: MeasuredThroughput(table, hardware))


def in_both_orders(*words, name="H200"):
    """Plans of 8B with sums in one order and in any, by the same kernels."""
    exact = planned("llama3_8b", "train.deterministic=true", *words, name=name, packages=["flash-attn-4"])
    plain = planned("llama3_8b", *words, name=name, packages=["flash-attn-4"])
    return exact, plain


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("kernels.attention=sdpa",), "attention through FlashAttention-2 takes 2.00 times as long as cuDNN, 1.60"),
        (("kernels.attention=flex", WHOLE_SEQUENCES), "flex's own kernel takes 1.40 times as long as cuDNN, 1.24"),
        (
            ("kernels.attention=flash_attn", "model.attention.mask={kind: window, size: 1024}", WHOLE_SEQUENCES),
            "attention through flash_attn takes 1.20 times as long as in any order, 1.12",
        ),
    ],
)
def test_sums_in_one_order_tell_what_the_plan_reckons_with(words, told, rates):
    """The step with them is the plan's, the one without them that of the plan without."""
    exact, plain = in_both_orders(*words)
    hint = hint_of(exact, "train.deterministic")
    assert f"{told} times in a step at the limit of power (measured on H200), " in hint.text
    with_it = seconds_in_words(exact.step_time.seconds)
    assert f"{with_it} a step for {seconds_in_words(plain.step_time.seconds)} without it;" in hint.text
    assert exact.step_time.seconds > plain.step_time.seconds
    assert "not measured" not in hint.text
    assert hint.overrides == ("train.deterministic=false",)


@pytest.mark.parametrize(
    "words",
    [
        # 2 % are within what measurements differ by
        ("kernels.attention=flash_attn",),
        FLEX,
    ],
)
def test_what_takes_as_long_in_one_order(words, rates):
    exact, plain = in_both_orders(*words)
    assert "takes as long as in any order (measured on H200), " in hint_of(exact, "train.deterministic").text
    assert exact.step_time.seconds == pytest.approx(plain.step_time.seconds, rel=0.005)


@pytest.mark.parametrize(
    ("words", "kind", "told"),
    [
        (("kernels.attention=flash_attn_3", WHOLE_SEQUENCES), "H200", "attention with kernels.attention=flash_attn_3"),
        (
            ("kernels.attention=flash_attn", "data.document_mask=true", WHOLE_SEQUENCES),
            "H200",
            "attention with documents and kernels.attention=flash_attn",
        ),
        (
            ("kernels.attention=flex", "model.attention.mask={kind: window, size: 1024}", WHOLE_SEQUENCES),
            "H200",
            "attention with windows and kernels.attention=flex",
        ),
        ((*FLEX, "model.d_head=64"), "H200", "attention with heads of 64"),
        (
            (*FLEX, "model.attention.mask={kind: window, size: 1024}"),
            "H200",
            "attention with chunks, capped scores, windows inside documents, or windows or documents that ranks share",
        ),
        (("kernels.attention=sdpa", "model.d_head=192"), "H200", "attention with heads of 192"),
        (("kernels.attention=sdpa",), "H100", "attention on H100"),
        (("kernels.attention=sdpa",), "B200", "attention on B200"),
    ],
)
def test_what_was_not_measured_in_one_order_is_told_without_a_factor(words, kind, told, rates):
    packages = ["flash-attn-4", "flash-attn-3"]
    exact = planned("llama3_8b", "train.deterministic=true", *words, name=kind, packages=packages)
    plain = planned("llama3_8b", *words, name=kind, packages=packages)
    (text,) = (hint.text for hint in exact.hints if hint.key == "train.deterministic")
    assert f"not measured with it: {told}, reckoned as with sums in any order;" in text
    assert "times as long" not in text
    assert exact.step_time.seconds == pytest.approx(plain.step_time.seconds)


def test_flex_that_was_not_measured_in_one_order_is_reckoned_by_its_own_kernel(rates):
    """It goes through sdpa in any."""
    exact, plain = in_both_orders("kernels.attention=flex", WHOLE_SEQUENCES, name="H100")
    told = "not measured with it: attention on H100, through flex's own kernel, reckoned as with sums in any order;"
    assert told in hint_of(exact, "train.deterministic").text
    assert exact.step_time.seconds > plain.step_time.seconds


@pytest.mark.parametrize("name", ["flash_attn_2", "flash_attn_3"])
def test_times_of_attention_that_are_those_of_another_are_told(name):
    """Figures of the tables are of other implementations."""
    own = planned("llama3_8b", f"kernels.attention={name}", WHOLE_SEQUENCES, packages=["flash-attn", "flash-attn-3"])
    plain = planned("llama3_8b", "kernels.attention=sdpa", WHOLE_SEQUENCES)
    assert f"kernels.attention={name} was not measured on H100" in hint_of(own, "kernels.attention").text
    assert own.step_time.seconds == pytest.approx(plain.step_time.seconds)
    assert all(hint.key != "kernels.attention" for hint in plain.hints)


def test_attention_without_a_figure_of_any_is_no_exception():
    words = ("kernels.attention=flash_attn_2", WHOLE_SEQUENCES)
    assert planned("llama3_8b", *words, name="B200", packages=["flash-attn"]).hints == ()


def test_experts_in_one_order_were_not_measured(rates):
    words = ("train.deterministic=true", "kernels.attention=sdpa")
    hint = hint_of(planned("mixtral_8x7b", *words, gpus=64, name="H200"), "train.deterministic")
    assert "2.00 times as long as cuDNN" in hint.text
    assert "not measured with it: experts, reckoned" in hint.text


def test_looking_for_bad_hardware_tells_what_it_costs():
    """Bytes of the largest rank: weights, master weights and moments, as memory counts them."""
    both = planned("llama3_8b", "train.checks={replicas_every: 100, state: 0.5}")
    hint = hint_of(both, "train.checks")
    (stage,) = {one.memory["weights"] + one.memory["optimizer"] for one in both.stages}
    assert f"reads {bytes_in_words(1.5 * stage)} of weights and optimizer state a step" in hint.text
    assert hint.text.endswith("gathers 8 bytes for each set of ranks that hold the same every 100 steps")
    assert hint.overrides == ("train.checks.replicas_every=0", "train.checks.state=0")
    state = hint_of(planned("llama3_8b", "train.checks.state=0.25"), "train.checks")
    assert f"reads {bytes_in_words(0.5 * stage)} of" in state.text
    hints = planned("llama3_8b", "train.deterministic=true", "train.checks.recompute=0.01").hints
    (twice,) = [hint for hint in hints if hint.key == "train.checks"]
    assert twice.text.startswith("train.checks computes 1.00% of the steps twice (")
