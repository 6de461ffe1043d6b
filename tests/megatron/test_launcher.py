"""The world size is what the launcher starts; where that can't be known it is asked for, never guessed."""

import pytest
from torch.distributed.run import get_args_parser

from megaspec.cli import main
from megaspec.megatron.command import read_command
from megaspec.megatron.launch_options import OPTIONS
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
        # abbreviations, as argparse takes them
        ("torchrun --nproc 8 --nnode 2 p.py", 16),
        ("torchrun --nnodes 4:4 --nproc_per_node 8 p.py", 32),
        ("torchrun -r3 -t 3 --log-dir x.py --nproc_per_node 8 p.py", 8),
        ("torchrun --no-python --nproc_per_node 8 nsys profile -o x python -u p.py", 8),
        ("torchrun -m --nproc_per_node 8 pretrain_gpt", 8),
        ("torchrun --nproc_per_node 8 -- p.py", 8),
        ("python -u -mtorch.distributed.launch --use_env --nproc_per_node 8 p.py", 8),
        ("ft_launcher --ft-cfg-path a.yaml --nproc_per_node 8 p.py", 8),
        # a value of an option is no launcher, and no option that counts
        ("srun -J torchrun -N 4 --ntasks-per-node 8 python p.py", 32),
        ("srun --comment -n4 -ln8 -K0 python p.py", 8),
        ("srun --foo bar -n 8 -- python p.py", 8),
        ("mpirun -mca btl self -np 8 -x A=$B python p.py", 8),
        ("mpirun -np 16 --map-by ppr:8:node -H a:8,b:8 python p.py", 16),
        ("srun torchrun --nproc_per_node 8 --nnodes 4 p.py", 32),
        ("srun -n 1 torchrun --nproc_per_node 8 p.py", 8),
        ("deepspeed --include a:0,1@b:0,1,1 p.py", 4),
        ("deepspeed --num_gpus 8 --num_nodes 2 --master_port 29500 --module pretrain_gpt", 16),
        # variables of torch.distributed.run and srun; words win
        ("PET_NNODES=4 PET_NPROC_PER_NODE=8 torchrun p.py", 32),
        ("PET_NNODES=4 PET_NPROC_PER_NODE=8 torchrun --nnodes 2 p.py", 16),
        ("PET_NNODES=4 srun -N 4 torchrun --nproc_per_node 8 p.py", 32),
        ("srun --export=ALL,PET_NNODES=4,A=1 -N 4 torchrun --nproc_per_node 8 p.py", 32),
        ("env PET_NPROC_PER_NODE=8 torchrun p.py", 8),
        ("PET_NNODES=4 SLURM_NTASKS=16 srun python p.py", 16),
        ("PET_NNODES=4 mpirun -np 2 python p.py", 2),
        ("PET_NNODES=4 env -u PET_NNODES torchrun --nproc_per_node 8 p.py", 8),
        ("PET_NNODES=4 env --unset=PET_NNODES torchrun --nproc_per_node 8 p.py", 8),
        ("mpiexec -n8 python p.py", 8),
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
        ("mpirun python p.py", "it does not say -np"),
        ("mpirun -np $N python p.py", "$N is not a number"),
        ("srun python p.py", "it does not say --nodes and --ntasks-per-node"),
        ("srun -N 4 python p.py", "it does not say --nodes and --ntasks-per-node"),
        ("srun -N 4 --gres=gpu:8 python p.py", "its GPUs, gpu:8, are no ranks"),
        ("srun -N 2-4 --ntasks-per-node=8 python p.py", "2-4 is not a number"),
        ("srun -n $SLURM_NTASKS python p.py", "$SLURM_NTASKS is not a number"),
        ("srun -N 4 --ntasks-per-node=1 torchrun --nproc_per_node 8 p.py", "4 separate trainings of 8 ranks; give"),
        ("srun -N 4 torchrun --nproc_per_node 8 p.py", "srun starts 4 times torchrun, each for 1 node"),
        ("srun -N 4 -n 32 torchrun --nproc_per_node 8 --nnodes 4 p.py", "32 times torchrun, which is for 4 nodes"),
        ("srun torchrun --nproc_per_node 8 p.py", "each would train alone; give --nnodes to torchrun"),
        ("pdsh -w n[1-4] torchrun --nproc_per_node 8 p.py", "how often pdsh starts torchrun can't be known"),
        ("mpirun -H a,b torchrun --nproc_per_node 8 p.py", "how often mpirun starts torchrun can't be known"),
        ("$SRUN torchrun --nproc_per_node 8 p.py", "$SRUN is not set, and may start torchrun several times"),
        ("torchrun --nnodes=2:4 --nproc_per_node 8 p.py", "--nnodes=2:4 is not a number that can be known (nodes may"),
        ("torchrun --nproc-per-node gpu p.py", "gpu is not a number that can be known (as many as the machine has)"),
        ("torchrun --n 8 p.py", "--n can mean --no-python,"),
        ("PET_NNODES=2:4 torchrun p.py", "PET_NNODES=2:4 is not a number"),
        ("PET_NPROC_PER_NODE=gpu torchrun --nnodes 2 p.py", "PET_NPROC_PER_NODE=gpu is not a number"),
        ("srun --ntask 8 python p.py", "--ntask can mean"),
        ("srun -N 4 --ntasks-per-gpu=1 --gpus-per-node=8 python p.py", "--ntasks-per-gpu=1 depends on its GPUs"),
        ("srun -n 8 --het-group=0,1 python p.py", "several parts of the job"),
        ("mpirun --map-by ppr:8:node python p.py", "--map-by ppr:8:node is a number for each node"),
        ("mpirun -H a:8,b:8 python p.py", "-H a:8,b:8 names hosts"),
        ("mpirun --host a:8,b:8 python p.py", "--host a:8,b:8 names hosts"),
        ("mpiexec -hostfile h python p.py", "-hostfile h names hosts"),
        ("mpirun -np 8 --app jobs python p.py", "--app jobs names programs that are not read"),
        ("deepspeed --include a@b p.py", "--include a@b does not list the GPUs"),
        ("deepspeed --exclude a:0 p.py", "--exclude a:0 depends on its hosts"),
        ("deepspeed --num_gpus 8 --include a:0 p.py", "--num_gpus 8 excludes --include a:0"),
        ("$LAUNCHER p.py", "$LAUNCHER is not set, and may start several ranks"),
        ("./launch.sh p.py", "./launch.sh: how many ranks it starts can't be known"),
        ("numactl ./bind.sh python p.py", "./bind.sh: how many ranks it starts can't be known"),
        ("mylauncher -n 8 p.py", "mylauncher: how many ranks it starts can't be known"),
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


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--", "torchrun", "--nproc_per_node", "8", "p.py"], "ranks: 8  # GPUs of the command"),
        (["--gpus", "8", "--", "python", "p.py"], "ranks: 8  # GPUs, from --gpus"),
        (["--gpus", "8", "--", "torchrun", "--nproc_per_node", "8", "p.py"], "ranks: 8  # GPUs of the command"),
        (
            ["--", "python", "p.py", "--tensor-model-parallel-size", "4"],
            "ranks: 4  # GPUs: the fewest that its degrees",
        ),
    ],
)
def test_the_recipe_says_who_says_the_count(words, line, capsys):
    assert main(["from-megatron", *words, *FLAGS.split()]) == 0
    out = capsys.readouterr().out
    assert line in out
    gpus = line.split()[1]
    assert f"command, for {gpus} GPUs." in out


def test_a_count_that_is_known_is_kept_against_gpus(capsys):
    assert main(["from-megatron", "--gpus", "4", "--", "mpirun", "-np", "8", "p.py", *FLAGS.split()]) == 64
    assert "--gpus 4: mpirun starts 8; drop --gpus, or mpirun's numbers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("torchrun --foo eval.py p.py", "torchrun: --foo is no option of it that is known here, and eval.py could be"),
        ("torchrun -n 8 p.py", "torchrun: -n is no option of it that is known here, and 8 could be"),
        ("deepspeed --foo 8 p.py", "write --foo=8, or leave it out"),
        ("srun --foo torchrun -n 8 python p.py", "srun: --foo is no option of it"),
        ("mpirun -np 1 hostname : -np 8 python p.py", "mpirun: `:` begins another program in the same world"),
        ("mpirun -np 8 python p.py --bf16 : -np 2 python q.py", "`:` begins another program"),
    ],
)
def test_a_program_that_can_not_be_known_is_refused_with_or_without_gpus(line, why, capsys):
    for gpus in ([], ["--gpus", "8"]):
        assert main(["from-megatron", *gpus, "--", *line.split(), *FLAGS.split()]) == 64
        assert why in capsys.readouterr().err


def test_the_options_of_torchrun_are_those_that_it_has():
    """The table against the parser of the torch that is installed: names, and which of them take a value."""
    for action in get_args_parser()._actions:
        for name in action.option_strings:
            option = OPTIONS["torchrun"][name.lstrip("-").replace("_", "-")]
            assert option.n_values == (0 if action.nargs == 0 else 1), name


SETTINGS = [
    ("export PET_NNODES=4\nexport PET_NPROC_PER_NODE=8\ntorchrun", 32),
    ("PET_NNODES=4\nexport PET_NPROC_PER_NODE=8 PET_NNODES\ntorchrun", 32),
    ("declare -x PET_NNODES=4\ntorchrun", 4),
    ("set -a\nPET_NNODES=4\nset +a\ntorchrun", 4),
    ("PET_NNODES=4 torchrun --nproc_per_node 8", 32),
    ("export PET_NNODES=4\nPET_NNODES=2 torchrun", 2),
    ("export PET_NNODES=4\ntorchrun --nnodes 3", 3),
    ("export PET_NNODES=4\nPET_NNODES=2\ntorchrun", 2),
    ("PET_NNODES=4 bash -c 'torchrun p.py --bf16'; :", 4),
    # not exported, for another command, or unset
    ("PET_NNODES=4\ntorchrun", 1),
    ("PET_NNODES=4 echo\ntorchrun", 1),
    ("export PET_NNODES=4\nunset PET_NNODES\ntorchrun", 1),
    # what is done perhaps
    ("if [ $A ]; then export PET_NNODES=4; fi\ntorchrun", None),
    ("export PET_NNODES=$SLURM_NNODES\ntorchrun", None),
]


@pytest.mark.parametrize(("text", "count"), SETTINGS)
def test_variables_of_a_script_are_torchruns_where_it_sees_them(text, count, tmp_path):
    (tmp_path / "job.sh").write_text(f"{text} p.py --bf16\n")
    ranks = read_command([f"@{tmp_path / 'job.sh'}"]).ranks
    assert ranks.count == count
    assert bool(ranks.why) == (count is None)


def test_variables_in_front_of_a_script_are_exported_to_it(tmp_path):
    (tmp_path / "job.sh").write_text("torchrun --nproc_per_node 8 p.py --bf16\n")
    assert read_command(["PET_NNODES=2", f"@{tmp_path / 'job.sh'}"]).gpus == 16


HEADS = [
    ("#SBATCH -N 4\n#SBATCH -n 32\n", "srun python", 32),
    ("#SBATCH -N4 --ntasks-per-node=8\n", "srun python", 32),
    ("#SBATCH --comment='a -n 2' --nodes=4\n#SBATCH --ntasks 8\n", "srun python", 8),
    ("#SBATCH -N 2 --requeue -a 0-3 --ntasks-per-node 4\n", "srun python", 8),
    # comments and empty lines end nothing, a command does
    ("\n# a job\n  \n#SBATCH -n 8\n", "srun python", 8),
    ("#SBATCH -n 8\nset -e\n#SBATCH -n 16\n", "srun python", 8),
    ("set -e\n#SBATCH -n 16\n", "srun python", None),
    # sbatch knows them at the beginning of a line only, and takes the rest behind a # for a comment
    (" #SBATCH -n 16\n", "srun python", None),
    ("##SBATCH -n 16\n", "srun python", None),
    ("#SBATCH -N 2 # -n 16\n", "srun python", None),
    ("#SBATCH --container-image=a#b -n 16\n", "srun python", None),
    ("#SBATCH -n 8\n#SBATCH hetjob\n#SBATCH -n 16\n", "srun python", 8),
    # one agent on each of the job's nodes
    ("#SBATCH -N 4\n#SBATCH --gpus-per-node=8\n", "srun torchrun --nproc_per_node 8", None),
    ("#SBATCH -N 4\n", "srun torchrun --nproc_per_node 8 --nnodes 4", 32),
    ("#SBATCH -N 4\n", "srun -N 1 torchrun --nproc_per_node 8", 8),
    ("#SBATCH -N 4\n#SBATCH --ntasks-per-node=8\n", "srun torchrun --nproc_per_node 8 --nnodes 4", None),
    # srun's, and nobody else's
    ("#SBATCH -n 32\n", "mpirun python", None),
    ("#SBATCH -N 4\n#SBATCH --ntasks-per-node=8\n", "torchrun", 1),
]


@pytest.mark.parametrize(("head", "line", "count"), HEADS)
def test_lines_of_a_batch_script_are_read_as_sbatch_reads_them(head, line, count, tmp_path):
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\n{head}{line} p.py --bf16\n")
    ranks = read_command([f"@{tmp_path / 'job.sh'}"]).ranks
    assert ranks.count == count
    assert bool(ranks.why) == (count is None)


def test_a_batch_script_that_sbatch_refuses_is_refused_with_its_line(tmp_path, capsys):
    (tmp_path / "job.sh").write_text("#!/bin/bash\n#SBATCH --comment='a\nsrun -n 8 python p.py --bf16\n")
    assert main(["from-megatron", f"@{tmp_path / 'job.sh'}"]) == 64
    assert "job.sh:2: `#SBATCH --comment='a`: a quote is missing" in capsys.readouterr().err


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
