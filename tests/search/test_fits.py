"""Runs that can't fit are refused before they start."""

import pytest

from megaspec import cli
from megaspec.commands import starting
from megaspec.compose.compose import compose
from megaspec.core.units import GIB
from megaspec.estimate.hardware import HARDWARE
from megaspec.estimate.memory import fullest, memory_of
from megaspec.estimate.target import Target
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from megaspec.search.fits import memory_problem, memory_warning
from tests.resolve.planned import RANDOM

WORDS = ("model=llama3_8b_half", "precision=bf16", "data.seq_len=8192", *RANDOM, "train.global_batch=8")


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


def test_a_cpu_is_not_asked():
    target = Target(cores=2, versions={"torch": "2.13.0+cpu"})
    spec = spec_for(target)
    assert memory_problem(spec, target) is None
    assert memory_warning(spec, target) == ""


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
