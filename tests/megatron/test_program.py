"""Only pretrain_gpt.py trains what a recipe says: what trains something else is refused by its name."""

import pytest

from megaspec.cli import main
from megaspec.megatron.command import read_command
from megaspec.megatron.program import find_program
from tests.megatron.commands import LLAMA, SMALL

FLAGS = f"{SMALL} {LLAMA}".split()
TOLD = "is taken for pretrain_gpt.py: flags and changes of its own are not known here"


@pytest.mark.parametrize(
    ("program", "trains"),
    [
        ("pretrain_bert.py", "a BERT"),
        ("/opt/megatron/pretrain_bert.py", "a BERT"),
        ("-m pretrain_bert", "a BERT"),
        ("-m megatron.examples.pretrain_t5", "an encoder-decoder"),
        ("examples/t5/pretrain_t5.py", "an encoder-decoder"),
        ("pretrain_vlm.py", "a vision-language model"),
        ("pretrain_mamba.py", "a hybrid"),
        ("../../pretrain_hybrid.py", "a hybrid"),
        ("megatron/elastification/pretrain_hybrid_flex.py", "a hybrid"),
        ("pretrain_ict.py", "a retriever"),
        ("pretrain_retro.py", "a model with retrieval"),
        ("pretrain_vision_classify.py", "a vision model"),
        ("pretrain_vision_dino.py", "a vision model"),
        ("pretrain_vision_inpaint.py", "a vision model"),
        ("examples/mimo/pretrain_mimo.py", "a multimodal model"),
        ("examples/mimo/train.py", "a multimodal model"),
        ("examples/multimodal/train.py", "a multimodal model"),
        ("train_rl.py", "by reinforcement learning"),
        ("tasks/main.py", "trained already"),
        ("tasks/glue/finetune.py", "trained already"),
        ("examples/detxoify_lm/finetune_gpt.py", "trained already"),
        ("examples/post_training/modelopt/finetune.py", "trained already"),
        ("tasks/vision/segmentation/finetune_segformer.py", "model"),
        ("examples/export/knowledge_distillation/pretrain_gpt_modelopt.py", "distilled"),
        ("Pretrain-BERT.py", "a BERT"),
    ],
)
def test_programs_that_train_something_else_are_refused_by_name(program, trains, capsys):
    words = program.split()
    for launcher in (["torchrun", "--nproc_per_node", "1"], ["python"]):
        assert main(["from-megatron", "--partial", "--", *launcher, *words, *FLAGS]) == 64
        out, err = capsys.readouterr()
        assert out == ""
        assert f"{words[-1]}: by its name it trains " in err
        assert trains in err


@pytest.mark.parametrize("program", ["pretrain_gpt.py", "/opt/Megatron-LM/pretrain_gpt.py", "-m pretrain_gpt", ""])
def test_pretrain_gpt_is_taken(program, capsys):
    words = ["python", *program.split()] if program else []
    assert main(["from-megatron", "--", *words, *FLAGS]) == 0
    out, err = capsys.readouterr()
    assert TOLD not in out
    assert TOLD not in err


@pytest.mark.parametrize(
    "program",
    ["train.py", "pretrain_gpt_core.py", "-m mine.trainer", "tools/albert_run.py", "/opt/bert-base/train_lm.py"],
)
def test_another_name_is_taken_for_it_and_told(program, capsys):
    words = program.split()
    assert main(["from-megatron", "--", "torchrun", *words, *FLAGS]) == 0
    out, err = capsys.readouterr()
    assert f"# How the command was read:\n#   {words[-1]} {TOLD}\n" in out
    assert f"note: {words[-1]} {TOLD}" in err


def test_what_launchers_call_m_is_no_module():
    command = read_command(["srun", "-n", "4", "-m", "block:cyclic", "python", "pretrain_gpt.py", "--bf16"])
    assert (command.values, command.notes, command.gpus) == ({"--bf16": True}, (), 4)
    words = ["python", "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "pretrain_gpt", "--bf16"]
    assert read_command(words).gpus == 2


@pytest.mark.parametrize(
    "program",
    [
        "tools/preprocess_data.py",
        "/opt/Megatron-LM/tools/preprocess_data.py",
        "-m tools.preprocess_data",
        "tools/run_text_generation_server.py",
        "tools/run_inference_performance_test.py",
        "tools/checkpoint/convert.py",
        "-m tools.checkpoint.convert",
        "tools/merge_datasets.py",
        "tools/report_theoretical_memory.py",
        "tools/build_sequences_per_dataset.py",
        "examples/inference/gpt/gpt_static_inference.py",
    ],
)
def test_tools_that_train_nothing_are_refused_by_name(program, capsys):
    words = program.split()
    for launcher in (["torchrun"], ["python"], ["srun", "-n", "8", "python", "-u"]):
        assert main(["from-megatron", "--", *launcher, *words, *FLAGS]) == 64
        assert f"{words[-1]}: by its name it trains nothing; give pretrain_gpt.py" in capsys.readouterr().err


@pytest.mark.parametrize("program", ["train_server.py", "pretrain_convert.py"])
def test_a_training_is_no_tool(program):
    assert f"{program} {TOLD}" in read_command(["python", program, "--bf16"]).notes


VALUES_OF_OPTIONS = [
    ("torchrun --log-dir pretrain_bert.py pretrain_gpt.py", "pretrain_gpt.py"),
    ("srun --prolog setup.py -n 8 python pretrain_gpt.py", "pretrain_gpt.py"),
    ("env HOOK=setup.py python pretrain_gpt.py", "pretrain_gpt.py"),
    ("nsys profile --output=a.py python pretrain_gpt.py", "pretrain_gpt.py"),
    ("python -X importtime -W ignore -um pretrain_gpt", "pretrain_gpt"),
    ("python -mpretrain_gpt", "pretrain_gpt"),
    ("python -m cProfile -o out pretrain_gpt.py", "pretrain_gpt.py"),
    ("python -m torch.distributed.run -m --nproc_per_node 8 pretrain_gpt", "pretrain_gpt"),
    ("torchrun --no-python nsys profile python -m pretrain_gpt", "pretrain_gpt"),
    ("torchrun --nproc_per_node 8 pretrain_gpt", "pretrain_gpt"),
    ("torchrun $ARGS pretrain_gpt.py", "pretrain_gpt.py"),
]


@pytest.mark.parametrize(("line", "name"), VALUES_OF_OPTIONS)
def test_the_value_of_an_option_is_no_program(line, name):
    words = [*line.split(), "--bf16"]
    program = find_program(words)
    assert program is not None
    assert (program.name, words[program.end :]) == (name, ["--bf16"])


def test_a_script_that_starts_such_a_program_is_refused(tmp_path, capsys):
    (tmp_path / "train.sh").write_text("M=pretrain_bert\nARGS=(--num-layers 2)\ntorchrun $M.py ${ARGS[@]}\n")
    assert main(["from-megatron", f"@{tmp_path / 'train.sh'}"]) == 64
    assert "pretrain_bert.py: by its name it trains a BERT" in capsys.readouterr().err
