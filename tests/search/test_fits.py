"""Runs that can't fit are refused before they start."""

import pytest

from megaspec import cli
from megaspec.commands import starting, verify
from megaspec.compose.compose import compose
from megaspec.core.units import GIB
from megaspec.estimate.hardware import HARDWARE
from megaspec.estimate.memory import fullest, memory_of
from megaspec.estimate.target import Target
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from megaspec.search.fits import memory_problem, memory_warning, need_here
from megaspec.search.remedies import remedies_on_cpu
from tests.resolve.planned import RANDOM

# with plain norms and gates a micro batch of 4 does not fit
PLAIN = ("kernels.norm=reference", "kernels.gated=reference")
WORDS = ("model=llama3_8b_half", "precision=bf16", "data.seq_len=8192", *RANDOM, *PLAIN, "train.global_batch=8")


def machine(memory):
    return Target(gpus=1, gpu="NVIDIA H200", sm=90, gpu_memory=memory, cores=16, versions={"torch": "2.13.0"})


def spec_for(target, *overrides):
    composed = compose("hello", (*WORDS, "train.micro_batch=4", *overrides))
    facts = Facts(run_dir="runs/x", train_tokens=10**9, valid_tokens=10**9)
    return resolve(composed.recipe, target, facts, composed.origins)


def test_refused_warned_and_left_alone():
    needed = fullest(memory_of(spec_for(machine(2**40)))).total
    for share, is_refused, is_told in (
        (1.2, True, False),
        (1.05, False, True),
        (0.98, False, True),
        (0.9, False, False),
    ):
        target = machine(int(needed / share))
        problem = memory_problem(spec_for(target), target)
        assert (problem is not None) == is_refused
        assert bool(memory_warning(spec_for(target), target)) == is_told
    target = machine(HARDWARE["H200"].memory)
    problem = memory_problem(spec_for(target), target, {"train.micro_batch": "mine.yaml:4"})
    assert problem.code == "memory"
    assert str(problem).startswith(f"train.micro_batch=4: the fullest rank needs {needed / GIB:,.1f} GiB as predicted")
    assert "try " in problem.message
    assert "memory=ignore" in problem.message
    assert problem.origin == "mine.yaml:4"


def cpu(memory):
    return Target(cores=2, memory=memory, versions={"torch": "2.13.0+cpu"})


def test_ranks_on_a_cpu_are_weighed_against_what_the_machine_has_available():
    words = ("data.seq_len=256", "train.micro_batch=4")
    spec = spec_for(cpu(0), *words)
    needed = need_here(spec, cpu(0)).total
    assert needed > 20 * GIB
    for share, is_refused, is_told in (
        (1.01, True, False),
        (0.99, False, True),
        (0.85, False, True),
        (0.8, False, False),
    ):
        target = cpu(int(needed / share))
        assert (memory_problem(spec, target) is not None) == is_refused
        assert bool(memory_warning(spec, target)) == is_told
    problem = memory_problem(spec, cpu(16 * GIB), {"train.micro_batch": "mine.yaml:4"})
    assert (problem.code, problem.origin) == ("memory", "mine.yaml:4")
    assert f"ranks need {needed / GIB:,.1f} GiB as predicted" in problem.message
    assert "16.0 GiB of this machine's memory are available" in problem.message
    assert "smaller model (model=hello) or a larger machine, or memory=ignore" in problem.message
    # where nobody knows, nobody is refused
    assert memory_problem(spec, cpu(0)) is None
    assert memory_warning(spec, cpu(0)) == ""


def test_what_is_offered_on_a_cpu_fits():
    words = ("data.seq_len=8192", "model.n_layers=2", "launcher.ranks=1", "model.vocab_size=257")
    spec = spec_for(cpu(0), *words)
    needed = need_here(spec, cpu(0)).total
    target = cpu(int(0.9 * needed))
    ways = remedies_on_cpu(spec, target)
    assert ways
    assert f"try {ways[0].words} ({ways[0].total / GIB:,.1f} GiB)" in memory_problem(spec, target).message
    for way in ways:
        taken = [word for word in way.overrides if word.partition("=")[0] != "train.micro_batch"]
        batch = next((word for word in way.overrides if word.startswith("train.micro_batch=")), "train.micro_batch=4")
        changed = resolve(
            compose("hello", (*WORDS, *words, batch, *taken)).recipe,
            target,
            Facts(run_dir="runs/x", train_tokens=10**9, valid_tokens=10**9),
        )
        assert need_here(changed, target).total == way.total <= target.memory


@pytest.mark.parametrize("word", ["", "memory=ignore"])
def test_train_on_a_cpu_asks_before_it_makes_a_folder(word, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(starting, "detect_target", lambda: cpu(16 * GIB))
    started = []
    monkeypatch.setattr(starting, "launch", lambda folder, **_: started.append(folder) or 0)
    code = cli.main(["train", "recipe=hello", *WORDS[:2], *WORDS[3:], *filter(None, [word])])
    assert (code, len(started)) == ((0, 1) if word else (64, 0))
    assert (tmp_path / "runs").exists() == bool(word)
    out, err = capsys.readouterr()
    if word:
        assert "does NOT fit" in " ".join(out.split())
    else:
        assert "of this machine's memory are available" in err


def test_verify_asks_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(verify, "detect_target", lambda: cpu(GIB // 4))
    monkeypatch.setattr(verify, "compare", lambda *_, **__: (0, None))
    words = ["verify", "recipe=hello", "hardware=cpu", "parallelism.tp=2"]
    assert cli.main(words) == 64
    assert "of this machine's memory are available" in capsys.readouterr().err
    assert cli.main([*words, "memory=ignore"]) == 0


@pytest.mark.parametrize("word", ["", "memory=ignore"])
def test_train_asks_before_it_makes_a_folder(word, tmp_path, monkeypatch, capsys):
    target = machine(HARDWARE["H200"].memory)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(starting, "detect_target", lambda: target)
    started = []
    monkeypatch.setattr(starting, "launch", lambda folder, **_: started.append(folder) or 0)
    code = cli.main(["train", "recipe=hello", *WORDS, "train.micro_batch=8", *filter(None, [word])])
    assert (code, len(started)) == ((0, 1) if word else (64, 0))
    assert (tmp_path / "runs").exists() == bool(word)
    if not word:
        assert "the fullest rank needs" in capsys.readouterr().err
