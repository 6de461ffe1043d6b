"""The world size is what the launcher starts; where that can't be known it is asked for, never guessed."""

import pytest

from megaspec.cli import main
from megaspec.megatron.command import read_command
from tests.megatron.commands import LLAMA, SMALL

FLAGS = f"{SMALL} {LLAMA}"


def ranks_of(line: str):
    return read_command([*line.split(), "--bf16"]).ranks


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("torchrun --nproc_per_node 8 --nnodes 16 p.py", 128),
        ("torchrun --nproc-per-node=8 --nnodes=16 p.py", 128),
        ("python -m torch.distributed.run --nproc_per_node 4 p.py", 4),
        ("python3 -m torch.distributed.launch --nproc_per_node=4 --nnodes 2 p.py", 8),
        # torchrun's own defaults are one node and one process
        ("torchrun p.py", 1),
        ("torchrun --nnodes 4 p.py", 4),
        ("torchrun --rdzv_endpoint $HOST:$PORT --node_rank $RANK --nproc_per_node 8 p.py", 8),
        ("torchrun --nproc_per_node 2 -m pretrain_gpt", 2),
        ("ft_launcher --nproc_per_node 8 --nnodes 2 p.py", 16),
        ("mpirun -np 128 python p.py", 128),
        ("/usr/bin/mpirun --allow-run-as-root -n 16 -x PATH --hostfile h python p.py", 16),
        ("mpiexec -n 4 python p.py", 4),
        ("mpirun --np 8 nsys profile -n 3 python p.py", 8),
        ("srun -n 64 python p.py", 64),
        ("srun -n64 -l python p.py", 64),
        ("srun --ntasks=32 --gres=gpu:8 -A $ACCOUNT python -u p.py", 32),
        ("srun -N 4 --ntasks-per-node=8 --gres=gpu:8 python p.py", 32),
        ("srun --nodes=4 --ntasks-per-node 4 --container-image a#b bash -x run p.py", 16),
        ("srun -N4 -n 16 --ntasks-per-node=8 python p.py", 16),
        # one agent on each node
        ("srun -N 4 --ntasks-per-node=1 torchrun --nproc_per_node 8 --nnodes 4 p.py", 32),
        ("srun -N 4 torchrun --nproc_per_node 8 --nnodes 4 p.py", 32),
        ("mpirun -np 2 torchrun --nproc_per_node 4 --nnodes 2 p.py", 8),
        ("deepspeed --num_gpus 8 --num_nodes 2 p.py", 16),
        ("python p.py", None),
        ("env A=1 numactl -N 0 python p.py", None),
    ],
)
def test_launchers_that_count(line, count):
    ranks = ranks_of(line)
    assert (ranks.count, ranks.why) == (count, "")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("torchrun --nproc_per_node 8 --nnodes $NNODES p.py", "known: --nnodes $NNODES is not a number"),
        ("torchrun --nproc_per_node $GPUS p.py", "$GPUS is not a number"),
        ("torchrun --nproc_per_node 8 --nnodes ${SLURM_NNODES:-1} p.py", "${SLURM_NNODES:-1} is not a number"),
        ("torchrun --nproc_per_node=auto p.py", "auto is not a number"),
        ("torchrun --nnodes 1:4 --nproc_per_node 8 p.py", "1:4 is not a number"),
        ("torchrun --nproc_per_node 0 p.py", "0 is not a number"),
        ("torchrun $DISTRIBUTED_ARGS p.py", "$DISTRIBUTED_ARGS is not set, and may hold options"),
        ("torchrun --standalone ${ARGS[@]} p.py", "${ARGS[@]} is not set"),
        ("mpirun python p.py", "it does not say -c"),
        ("mpirun -np $N python p.py", "$N is not a number"),
        ("srun python p.py", "it does not say --nodes and --ntasks-per-node"),
        ("srun -N 4 python p.py", "it does not say --nodes and --ntasks-per-node"),
        ("srun -N 4 --gres=gpu:8 python p.py", "its GPUs, gpu:8, are no ranks"),
        ("srun -N 2-4 --ntasks-per-node=8 python p.py", "2-4 is not a number"),
        ("srun -n $SLURM_NTASKS python p.py", "$SLURM_NTASKS is not a number"),
        ("srun -N 4 --ntasks-per-node=1 torchrun --nproc_per_node 8 p.py", "4 times torchrun, which is for 1 nodes"),
        ("deepspeed --num_gpus 8 p.py", "it does not say"),
        ("accelerate launch --num_processes 8 p.py", "not counted here"),
    ],
)  # fmt: skip
def test_a_count_that_can_not_be_known_is_asked_for(line, why, capsys):
    ranks = ranks_of(line)
    assert ranks.count is None
    assert why in ranks.why
    assert ranks.why.endswith("give --gpus N")
    words = f"{line} {FLAGS}".split()
    assert main(["from-megatron", "--", *words]) == 64
    assert ranks.why in capsys.readouterr().err
    assert main(["from-megatron", "--gpus", "2", "--", *words]) == 0
    assert "ranks: 2" in capsys.readouterr().out


def test_a_count_that_is_known_is_kept_against_gpus(capsys):
    assert main(["from-megatron", "--gpus", "4", "--", "mpirun", "-np", "8", "p.py", *FLAGS.split()]) == 64
    assert "--gpus 4: mpirun starts 8; drop --gpus, or mpirun's numbers" in capsys.readouterr().err


def test_lines_of_a_batch_script_are_what_srun_takes_where_it_says_nothing(tmp_path):
    head = "#!/bin/bash\n#SBATCH --nodes=4   # four\n#SBATCH --ntasks-per-node=8\n#SBATCH --gres gpu:8\n"

    def count(line: str) -> int | None:
        (tmp_path / "job.sh").write_text(f"{head}{line} p.py --bf16\n")
        return read_command([f"@{tmp_path / 'job.sh'}"]).gpus

    assert count("srun python") == 32
    assert count("srun -N 2 python") == 16
    assert count("srun -n 6 python") == 6
    # not srun's: a batch script itself runs on one node
    assert count("torchrun --nproc_per_node 8 --nnodes 2") == 16
    assert count("python") is None
