"""Command lines are read as shells and Megatron's parser read them, and what is wrong is told at once."""

import pytest

from megaspec.core.errors import RecipeError
from megaspec.megatron.command import read_command
from tests.megatron.commands import GPT3_175B, LLAMA3_8B

SCRIPT = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NODES=${NODES:-2}
WORLD_SIZE=$(($GPUS_PER_NODE*$NODES))
CHECKPOINTS=$1 #<where>
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NODES
)
MODEL_ARGS=(
    --num-layers 2   # two
    # --hidden-size 1
    --hidden-size 64
)
MODEL_ARGS+=(--swiglu "--split '99,1,0'")
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    ${MODEL_ARGS[@]} \\
    --save $CHECKPOINTS
"""


def values(*words: str) -> dict:
    return read_command(words).values


def told(*words: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        read_command(words)
    return [str(p) for p in caught.value.problems]


def test_both_ways_to_write_a_value():
    assert values("--num-layers=3", "--lr", "1e-3", "--bf16") == {"--num-layers": 3, "--lr": 1e-3, "--bf16": True}
    assert values("--cp-comm-type", "a2a+p2p", "p2p")["--cp-comm-type"] == ["a2a+p2p", "p2p"]
    assert values("--persistent-save-interval", "5") == {"--save-interval": 5}
    assert values("--null-tokenizer-pad-id", "-1") == {"--null-tokenizer-pad-id": "-1"}


def test_what_stands_before_the_script_is_passed_over():
    llama, gpt = read_command(LLAMA3_8B.split()), read_command(GPT3_175B.split())
    assert (llama.gpus, llama.values["--num-layers"]) == (8, 32)
    assert (gpt.gpus, gpt.values["--eval-iters"]) == (128, 10)
    assert read_command(["A=b", "--num-layers", "\\", "3"]).values == {"--num-layers": 3}
    assert read_command(["srun", "-N", "4", "python", "pretrain_gpt.py", "--bf16"]).gpus is None


def test_a_command_in_a_string_is_read_as_in_a_script():
    inner = "torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --lr '1e-3' --bf16"
    command = read_command(["srun", "-N", "2", "bash", "-c", inner])
    assert (command.gpus, command.values) == (16, {"--lr": 1e-3, "--bf16": True})
    assert told("bash", "-c", "exit 1; python pretrain_gpt.py --bf16")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("bash", "train.sh", "3"), "train.sh: is a script, which is not run; to have it read give @train.sh with its"),
        (("sbatch", "-N", "2", "run/job.slurm"), "run/job.slurm: is a script, which is not run"),
        (("srun", "-N", "2", "--lr", "3"), "srun: starts no Python file; give the flags alone, or the command with"),
        (("pretrain_gpt", "--lr", "3"), "pretrain_gpt: starts no Python file"),
    ],
)
def test_words_that_are_no_command_are_told_as_one(words, problem):
    [line] = told(*words)
    assert line.startswith(problem)


def test_the_last_of_several_counts():
    command = read_command(["--lr", "1", "--lr", "2"])
    assert (command.values["--lr"], command.repeated) == (2.0, ("--lr",))


def test_a_command_in_one_word_or_in_a_file(tmp_path):
    line = "torchrun --nproc_per_node 4 pretrain_gpt.py --num-layers 2 \\\n --data-path '0.5' a"
    (tmp_path / "train.sh").write_text(SCRIPT)
    assert read_command([line]).values == {"--num-layers": 2, "--data-path": ["0.5", "a"]}
    for word in (f"@{tmp_path / 'train.sh'}", str(tmp_path / "train.sh")):
        command = read_command([word])
        assert command.gpus == 16
        assert command.values.pop("--split").strip("'") == "99,1,0"
        assert command.values == {"--num-layers": 2, "--hidden-size": 64, "--swiglu": True, "--save": "$1"}


def test_everything_that_is_wrong_is_told_at_once():
    words = "--tensor-parallel-size 2 --num-layers x --bf16=1 --swiglu 3 --hidden-size $H --seed -x --lr"
    problems = "\n".join(told(*words.split()))
    assert "--tensor-parallel-size: no flag of pretrain_gpt.py; did you mean --tensor-model-parallel-size" in problems
    assert "--num-layers x: must be a whole number" in problems
    assert "--bf16=1: takes no value" in problems
    assert "3: belongs to no flag: --swiglu takes none" in problems
    assert "--hidden-size $H: a shell variable" in problems
    assert "-x: is no value of --seed" in problems
    assert "--lr: its value is missing" in problems
    assert len(problems.splitlines()) == 7
    assert told("--optimizer", "adan") == [
        "--optimizer adan: must be adam, sgd, muon, dist_muon, lion, soap or adaptive_muon"
    ]


def test_a_word_is_named_as_it_was_written():
    assert told("--num-layers=x", "--hidden-size=$H", "--optimizer=adan")[0] == "--num-layers=x: must be a whole number"
    assert told("--num-layers=x", "--hidden-size=$H")[1].startswith("--hidden-size=$H: a shell variable")
    command = read_command(["--num-layers=3", "--lr", "1e-3", "--bf16", "--data-path", "1", "a"])
    assert list(command.written.values()) == ["--num-layers=3", "--lr 1e-3", "--bf16", "--data-path 1 a"]


@pytest.mark.parametrize("words", [[], ["torchrun", "pretrain_gpt.py"], ["A=b"]])
def test_a_command_without_flags(words):
    assert "no flags" in told(*words)[0]


@pytest.mark.parametrize(
    ("text", "what"),
    [("for a in b; do\n torchrun a.py --bf16\ndone", "a loop over"), ("torchrun 'a.py --bf16", "a quote is missing")],
)
def test_a_script_that_can_not_be_read(tmp_path, text, what):
    (tmp_path / "a.sh").write_text(text)
    assert what in told(f"@{tmp_path / 'a.sh'}")[0]
    assert "can't be read" in told("@nowhere.sh")[0]
