"""Scripts are followed as a shell would follow them, never run; what can't be known is refused with its line."""

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from megaspec.cli import main
from megaspec.core.errors import RecipeError
from megaspec.megatron import script as following
from megaspec.megatron.command import Command, read_command
from megaspec.megatron.script import script_words

BASH = shutil.which("bash")
MODEL = """
MODEL_ARGS=(
    --num-layers 2      # two
    # --num-layers 3
    --hidden-size 64
    --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32
)
TRAINING_ARGS=" \\
    --micro-batch-size 1 \\
    --global-batch-size 16 \\
    --train-iters 100 --lr 1e-3 --vocab-size 256 \\
"
"""
# Arguments, a blend in one of them, arrays without quotes.
POSITIONAL = f"""#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=2
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
CHECKPOINT_PATH=$1 #<where>
DATA_PATH=$2
{MODEL}
DISTRIBUTED_ARGS=(--nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES --master_addr $MASTER_ADDR)
torchrun ${{DISTRIBUTED_ARGS[@]}} pretrain_gpt.py \\
    ${{MODEL_ARGS[@]}} \\
    $TRAINING_ARGS --save $CHECKPOINT_PATH --data-path $DATA_PATH
"""
# Defaults of arguments, a chain of conditions, elements of two words, a guard that looks for a file.
GUARDED = f"""
SAVE=${{1:-"checkpoints/small"}}
TOKENIZER=${{2:-"MOCK"}}
DATA=${{3:-"MOCK"}}
mkdir -p "$(dirname "$SAVE")" || exit 1
PROGRAM="pretrain_gpt.py"
CACHE="${{PWD}}/cache"
DTYPE="fp8"
{MODEL}
DATA_ARGS=()
if [[ "$TOKENIZER" == "MOCK" ]] || [[ "$DATA" == "MOCK" ]] || [[ -z "$TOKENIZER" ]]; then
    DATA_ARGS+=("--mock-data" "--tokenizer-type NullTokenizer")
else
    DATA_ARGS+=(
        "--data-path $DATA"
        "--data-cache-path ${{CACHE}}"
        # a remark
        "--split '99,1,0'"
    )
fi
DTYPE_ARGS=()
if [[ "$DTYPE" == "bf16" ]]; then
    DTYPE_ARGS+=(--bf16)
fi
if [ ! -f "$PROGRAM" ]; then
    echo "there is no $PROGRAM"
    exit 1
fi
python -m torch.distributed.run --nproc_per_node 4 --nnodes ${{NODES:-2}} \\
    "$PROGRAM" ${{MODEL_ARGS[@]}} $TRAINING_ARGS ${{DATA_ARGS[@]}} "${{DTYPE_ARGS[@]}}" \\
    --save "$SAVE" 2>&1 | tee log.txt

set +x"""
# A condition that only decides what is logged.
LOGGED = f"""
NNODES=${{SLURM_NNODES:-"1"}}
{MODEL}
LOGGING_ARGS=(--log-interval 1 --save-interval 10)
if [ -n "${{WANDB_API_KEY}}" ]; then
    LOGGING_ARGS+=(--wandb-project ${{WANDB_PROJECT:-"small"}} --wandb-exp-name run)
fi
torchrun --nproc_per_node 8 --nnodes $NNODES pretrain_gpt.py ${{MODEL_ARGS[@]}} $TRAINING_ARGS ${{LOGGING_ARGS[@]}} \\
    --data-path $1
"""
# Options of its own, read in a loop.
OPTIONS = f"""
DATA=""
TP=1
while [[ $# -gt 0 ]]; do
    case $1 in
        --data)
            DATA="$2"
            shift 2
            ;;
        -t|--tp) TP=$2; shift 2 ;;
        *)
            echo "unknown: $1"
            exit 1
            ;;
    esac
done
if [ ! -d "$DATA" ]; then
    echo "no $DATA"; mkdir -p "$DATA"
fi
if [ -n "$EXTRA" ]; then
    if [ ! -f "$EXTRA" ]; then echo none; fi
fi
{MODEL}
python -m torch.distributed.run --nproc_per_node=$(( TP * 4 )) pretrain_gpt.py "${{MODEL_ARGS[@]}}" $TRAINING_ARGS \\
    --tensor-model-parallel-size $TP --data-path "$DATA"
"""
# A choice among constants, and a command in a string.
CHOICE = f"""
SCALE="small" # or "large"
case "${{SCALE}}" in
    "large") GLOBAL=32 ;;
    "small")
        GLOBAL=48
        ;;
    *) exit 1 ;;
esac
{MODEL}
RUN="python -u pretrain_gpt.py ${{MODEL_ARGS[@]}} $TRAINING_ARGS --global-batch-size $GLOBAL --data-path $1"
srun -l --ntasks=16 --output=logs/%x_$(date +%F).log sh -c "cd /work && ${{RUN}}"
"""


@pytest.fixture
def read(tmp_path):
    def of(text: str, *arguments: str, **environment: str) -> Command:
        file = tmp_path / "train.sh"
        file.write_text(text)
        return read_command([*(f"{k}={v}" for k, v in environment.items()), f"@{file}", *arguments])

    return of


@pytest.fixture
def refused(read):
    def of(text: str, *arguments: str, **environment: str) -> str:
        with pytest.raises(RecipeError) as caught:
            read(text, *arguments, **environment)
        return str(caught.value)

    return of


def words(line: str, *arguments: str, before: str = "") -> list[str]:
    """The flags of a program, behind some lines."""
    return script_words(f"{before}\npython p.py {line}", label="s", arguments=arguments).words[2:]


def test_arguments_and_unquoted_variables_become_words(read):
    command = read(POSITIONAL, "out/ckpt", "30 data/a 70 data/b")
    assert command.gpus == 16
    assert command.values["--data-path"] == ["30", "data/a", "70", "data/b"]
    assert command.values["--save"] == "out/ckpt"
    assert (command.values["--num-layers"], command.values["--global-batch-size"]) == (2, 16)


def test_an_argument_that_is_not_given_is_asked_for(refused):
    assert "--data-path $2: a shell variable, and nothing sets it; give NAME=VALUE in front of @FILE" in refused(
        POSITIONAL, "out"
    )


def test_conditions_over_constants_are_decided(read):
    mock = read(GUARDED)
    assert (mock.values["--mock-data"], mock.values["--tokenizer-type"], mock.gpus) == (True, "NullTokenizer", 8)
    assert mock.values["--save"] == "checkpoints/small"
    assert "--bf16" not in mock.values
    real = read(GUARDED, "out", "tok", "data/a")
    assert (real.values["--data-path"], real.values["--data-cache-path"]) == (["data/a"], "./cache")
    assert "--mock-data" not in real.values
    assert read(GUARDED, NODES="3").gpus == 12


def test_defaults_that_are_taken_are_told(read, tmp_path):
    assert read(GUARDED).notes == (f"{tmp_path}/train.sh: not set, so that its own defaults are taken: NODES=2",)
    assert read(GUARDED, NODES="2").notes == ()


def test_a_condition_that_guards_logging_is_passed_over_and_told(read):
    command = read(LOGGED, "d", SLURM_NNODES="4")
    assert command.gpus == 32
    assert (command.values["--save-interval"], "--wandb-project" in command.values) == (10, False)
    assert (
        'train.sh:18: `if [ -n "${WANDB_API_KEY}" ]; then` can\'t be known; without --wandb-project' in command.notes[0]
    )
    known = read(LOGGED, "d", SLURM_NNODES="4", WANDB_API_KEY="x")
    assert known.values["--wandb-project"] == "small"
    assert "--wandb-project" not in read(LOGGED, "d", WANDB_API_KEY="").values


def test_a_default_behind_what_a_scheduler_sets_is_no_world_size(read):
    ranks = read(LOGGED, "d").ranks
    assert ranks.count is None
    assert '--nnodes ${SLURM_NNODES:-"1"} is not a number that can be known; give --gpus N' in ranks.why


def test_options_of_a_script(read, refused):
    command = read(OPTIONS, "--data", "d/x", "-t", "2")
    assert (command.values["--data-path"], command.values["--tensor-model-parallel-size"]) == (["d/x"], 2)
    assert command.gpus == 8
    assert "train.sh:13: `exit 1`: it ends here, before it trains" in refused(OPTIONS, "--date", "d")


def test_a_choice_among_constants_and_a_command_in_a_string(read):
    command = read(CHOICE, "5 a 6 b")
    assert (command.values["--global-batch-size"], command.gpus) == (48, 16)
    assert command.values["--data-path"] == ["5", "a", "6", "b"]
    assert read("CMD='torchrun --nproc_per_node 2 p.py --bf16'; eval $CMD").gpus == 2


@pytest.mark.parametrize(
    ("line", "becomes"),
    [
        ("$A", ["1", "x", "y"]),
        ('"$A"', ["1 x y"]),
        ("'$A'", ["$A"]),
        ("${L[@]}", ["a", "b", "c"]),
        ('"${L[@]}"', ["a b", "c"]),
        ('"${L[*]}"', ["a b c"]),
        ("p${L[@]}s", ["pa", "b", "cs"]),
        ('${L[0]} "${L[1]}" $L ${#L[@]} ${#A}', ["a", "b", "c", "a", "b", "2", "5"]),
        ('${E:-d "e f"} "${E:-d}" ${A:+set} ${E-unset}', ["d", "e f", "d", "set"]),
        ('$E "$E" end', ["", "end"]),
        ("--lr=$A", ["--lr=1", "x", "y"]),
        ("$((3*N+1)) $(( ${N} / 2 )) $((2**10 - 7%4))", ["13", "2", "1021"]),
        ("a\\ b \"c\\\"d\" 'e'f $'g'", ["a b", 'c"d', "ef", "g"]),
        ('"$@" $# ${10} $1', ["one", "two words", "10", "ten", "one"]),
        ("--bf16 # --fp16", ["--bf16"]),
        ("--bf16 > log 2>&1 &", ["--bf16"]),
        ("$UNSET ${UNSET} $(date) `date` ${A%y}", ["$UNSET", "${UNSET}", "$(date)", "$(date)", "${A%y}"]),
        ("$((UNSET+1)) $((1/0)) $((9223372036854775807+1))",
         ["$((UNSET+1))", "$((1/0))", "$((9223372036854775807+1))"]),
    ],
)  # fmt: skip
def test_words_are_those_of_a_shell(line, becomes):
    before = "A='1 x y'; L=('a b' c); E=; N=4"
    arguments = ["one", "two words", *"345678", "nine", "ten"]
    found = words(line, *arguments, before=before)
    if line.startswith('"$@"'):
        found = [*found[:2], *found[10:]]
    assert found == becomes


def test_a_shell_reads_the_same_words():
    """Random scripts of our own, made of the constructs that are followed, beside what bash makes of them."""
    assert BASH is not None, "bash is what the reading is compared with"
    draw = random.Random(15)
    values = ("a", "a b", " a  b ", "", "x\ty", "1", "08", "*q", '"q"', "$V1")

    def word() -> str:
        v, a = f"V{draw.randrange(3)}", f"L{draw.randrange(2)}"
        quoted = (
            f'"${v}"',
            f'"x${{{v}}} y"',
            f'"${{{a}[@]}}"',
            f'"p${{{a}[@]}}s"',
            f'"${{{a}[*]}}"',
            f'"${{{v}:-d  e}}"',
        )
        plain = (
            "lit",
            "'s q'",
            f"${v}",
            f"x${{{v}}}y",
            f"${{{a}[@]}}",
            f"p${{{a}[*]}}s",
            f"${{{a}[1]}}",
            f"${{#{v}}}",
            "$#",
        )
        more = (f"${{{v}:+yes no}}", f'${{{v}:-d "e f"}}', f"${{#{a}[@]}}", f"$(( 3 + ${{#{v}}} * 2 ))")
        return draw.choice((*quoted, *plain, *more))

    def statement() -> str:
        v, a = f"V{draw.randrange(3)}", f"L{draw.randrange(2)}"
        return draw.choice((
            f"{v}={word()}",
            f"{v}+={word()}",
            f"{a}+=({word()} {word()})",
            f"if [ {word()} {draw.choice(('=', '!=', '-eq', '-gt'))} {word()} ]; then {v}=then; else {v}=else; fi",
            f"if [ ! {word()} ]; then {v}=if; elif [[ {word()} == {word()} && -n {word()} ]]; then {v}=elif; fi",
            f"case {word()} in a|lit) {v}=c1;; 'a b') {v}=c2;; *) {v}=c3;; esac",
            f"[ -z {word()} ] && {v}=and || {v}=or",
            f"while [ $# -gt 1 ]; do {v}+=$1; shift; done",
            f"( {v}=inside; {a}=() ); {{ V2=group; }}",
            f"export V0={word()} V1={word()}",
            f"if (( ${{#{v}}} > 3 )); then unset {v}; fi",
            f"cat <<END\n${v} (\nEND",
        ))  # fmt: skip

    n_compared = 0
    for _ in range(150):
        lines = ["L0=(); L1=()", *(f"V{n}='{draw.choice(values)}'" for n in range(3))]
        lines += [f"L{n}=({word()} {word()})" for n in range(2)] + [statement() for _ in range(draw.randrange(6))]
        asked = " ".join(word() for _ in range(4))
        arguments = [draw.choice(("one", "two words", "")) for _ in range(draw.randrange(4))]
        # files are not looked for
        text = "\n".join(["set -f", *lines])
        command = [BASH, "-c", f"{text}\nprintf '%s\\0' begin {asked}", "bash", *arguments]
        shell = subprocess.run(command, capture_output=True, text=True, env={}, timeout=60)
        ours = words(asked, *arguments, before=text)
        # a variable that is unset is empty in bash; here it is shown, since it could come from outside
        if shell.returncode == 0 and not any("${" in one or "$V" in one for one in ours):
            n_compared += 1
            assert ours == shell.stdout.rpartition("begin\0")[2].split("\0")[:-1], text
    assert n_compared > 80


# What is refused, the line that is named, and a part of the reason.
REFUSED = [
    ('if [ -n "$X" ]; then\n A=(--swiglu)\nfi\npython p.py ${A[@]}', ":1: `if [ -n", "it decides what is trained"),
    ('A=()\nif [ -f x ]; then A+=(--wandb-project a --bf16); fi\npython p.py', ":2: `if [ -f x ]", "give NAME=VALUE"),
    ('if [ "$X" = 1 ]; then\n python p.py --bf16\nfi', ":1: `if", "it decides"),
    ('[ -n "$X" ] && A=(--bf16)\npython p.py ${A[@]}', ":1: `[ -n", "it decides"),
    ("ls ckpt && A=(--bf16)\npython p.py ${A[@]}", ":1: `ls ckpt", "it decides"),
    ("X=$(grep a b) && A=(--bf16)\npython p.py ${A[@]}", ":1: `X=$(grep", "it decides"),
    ("for i in 1 2; do\n A+=$i\ndone\npython p.py", ":1: `for i in 1 2; do`", "a loop over a list"),
    ('true\nwhile [ -f x ]; do :; done', ":2: `while", "end can't be known"),
    ("f() {\n  python p.py --bf16\n}\nf", ":4: `f`", "it calls the function f"),
    ("\n\n. ./env.sh", ":3: `. ./env.sh`", "another file is read"),
    ("source env.sh", ":1: `source env.sh`", "another file is read"),
    ("sbatch <<END\npython p.py\nEND", ":1: `sbatch <<END`", "give that text as a file of its own"),
    ("IFS=,\npython p.py", ":1: `IFS=,`", "can't be followed"),
    ("A[3]=x", ":1: `A[3]=x`", "can't be followed"),
    ("declare -A M=()", ":1: `declare -A", "can't be followed"),
    ("((A=3))", ":1: `((A=3))`", "sets a variable"),
    ("set -- a b", ":1: `set -- a b`", "arguments that are set anew"),
    ("read X", ":1: `read X`", "input is read"),
    ("DATA=<where it is>\npython p.py", ":1: `DATA=<where it is>`", "place holder"),
    ("python p.py --data-path d/{a,b}", ":1:", "brace expansion"),
    ("if true; then\n python p.py --bf16", ":1: `if true; then`", "its `fi` is missing"),
    ("A=(a\npython p.py", ":1: `A=(a`", "its `)` is missing"),
    ("true\npython 'p.py --bf16", ":2:", "a quote is missing"),
    ("fi", ":1: `fi`", "belongs to nothing"),
    ("A=((a b) (c d))", ":1:", "its `)` is missing"),
    ("torchrun p.py --bf16 \\ \n --swiglu", ":2: `--swiglu`", "a backslash with a blank behind it"),
    ("torchrun p.py --bf16 \\\n # --fp16 \\\n --swiglu", ":3: `--swiglu`", "a comment"),
    ("torchrun a.py --bf16\ntorchrun b.py --fp16", ":2: `torchrun b.py --fp16`", "another training starts in line 1"),
    ("echo one\nexit 0\ntorchrun p.py --bf16", ":2: `exit 0`", "before it trains"),
    ("torchrun --nproc_per_node 8 $PROGRAM --bf16", ":1:", "its program can't be known"),
    ("echo torchrun p.py --bf16", ".sh: no command in it", "pretrain_gpt.py"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line", "why"), REFUSED)
def test_what_can_not_be_followed_is_refused_with_its_line(text, line, why, refused):
    told = refused(text)
    assert line in told
    assert why in told


@pytest.mark.parametrize(
    "text",
    [
        "python tools/preprocess_data.py --input a\ntorchrun --nproc_per_node 8 pretrain_gpt.py --bf16",
        "cd /work && torchrun --nproc_per_node 8 pretrain_gpt.py --bf16 || exit 1",
        "pip install -r r.txt && torchrun --nproc_per_node 8 pretrain_gpt.py --bf16",
        "usage() {\n cat <<END\n$0 (a\nEND\n exit 1\n}\ntorchrun --nproc_per_node 8 pretrain_gpt.py --bf16",
        'if [ "$1" = "-d" ]; then\n python p.py --fp16\nelse\n torchrun --nproc_per_node 8 p.py --bf16\nfi',
        'N=$1\nif [ -z "$N" ]; then N=8; fi\ntorchrun --nproc_per_node $N p.py --bf16',
        'if [[ -z $KEY ]]; then echo "set KEY"; exit 1; fi\ntorchrun --nproc_per_node 8 p.py --bf16\nexit 0',
        'if [ -z "$NAME" ]; then NAME=run; fi\ntorchrun --nproc_per_node 8 p.py --bf16 --wandb-exp-name $NAME',
        "(cd /work; N=4; true)\nN=${N:-8}; exec torchrun --nproc_per_node $N p.py --bf16",
        "C='nsys profile -o x'\n$C torchrun --nproc_per_node 8 p.py --bf16 | tee log\nif [ $? -ne 0 ]; then exit 1; fi",
        "torchrun --nproc_per_node 8 p.py \\\r\n  --bf16\r\n",
    ],
)
def test_what_stands_around_a_training_is_passed_over(text, read):
    command = read(text)
    assert command.values.pop("--wandb-exp-name", "$NAME") == "$NAME"
    assert (command.values, command.gpus) == ({"--bf16": True}, 8)


def test_a_variable_that_may_hold_flags_is_asked_for(refused):
    for line in ("--bf16 $MORE", "--data-path a $MORE", "--cuda-graph-modules attn $MORE", "$MORE --bf16"):
        told = refused(f"python p.py {line}")
        assert "$MORE" in told
        assert "nothing sets it" in told


def test_a_script_is_never_run(tmp_path, read, monkeypatch):
    def never(*_args, **_more):
        raise AssertionError("a process was started")

    for name in ("system", "popen", "posix_spawn", "fork", "execv"):
        monkeypatch.setattr(os, name, never)
    monkeypatch.setattr(subprocess.Popen, "__init__", never)
    marker = tmp_path / "ran"
    text = f"A=$(touch {marker}); eval touch {marker}; `touch {marker}`; touch {marker}; bash -c 'touch {marker}'\n"
    assert read(f"{text}torchrun --nproc_per_node 2 p.py --bf16 >{marker}").gpus == 2
    assert not marker.exists()


ONE = "torchrun p.py --bf16\n"
BOMBS = {
    "doubling": ("A=xxxxxxxxxx\n" + "A=$A$A$A$A$A$A$A$A$A$A\n" * 10 + "torchrun p.py $A", "33,554,432 characters"),
    "doubling what is unknown": ("A=$X\n" + "A=$A$A$A$A$A$A$A$A$A$A\n" * 10 + ONE, "33,554,432 characters"),
    "doubling arrays": ("A=(x x)\n" + 'A=("${A[@]}" "${A[@]}" "${A[@]}")\n' * 40 + ONE, "33,554,432 characters"),
    "defaults": ("A=" + "y" * 999 + "\n" + "A=$A${B:-$A$A}\n" * 30 + ONE, "33,554,432 characters"),
    "a loop without an end": ("while true; do A+=x; done", "10,000 commands"),
    "a loop with much text": (f"while true; do A='{'y' * 200_000}'; done", "33,554,432 characters"),
    "words": (f"A='{'a ' * 100_000}'\ntorchrun p.py $A", "65,536 words"),
    "blocks": ("if true; then " * 5_000, "30 blocks or brackets"),
    "defaults inside each other": ("A=" + "${A:-" * 5_000, "30 blocks or brackets"),
    "arithmetic inside each other": ("A=" + "$((" * 50 + "))" * 50, "can't be read as arithmetic"),
    "strings inside each other": ('A=\'eval "$A"\'\neval "$A"', "30 blocks and commands"),
    "brackets": ("[[ " + "( " * 5_000 + "a" + " )" * 5_000 + " ]]", "30 brackets"),
    "size": ("#" * 300_000, "at most 262,144 bytes"),
    "many wrong flags": (ONE[:-1] + "".join(f" --f{n}" for n in range(30_000)), "more are wrong; mend these first"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_end_in_an_error_that_says_the_limit(name, refused):
    text, limit = BOMBS[name]
    told = refused(text)
    assert limit in told
    assert len(told) < 20_000


def test_brackets_in_arithmetic_are_bounded():
    assert words(f"$(({'(' * 30}1{')' * 30}))") == [f"$(({'(' * 30}1{')' * 30}))"]
    assert words(f"$(({'-' * 300}1))")[0].startswith("$((")
    assert words(f"$(({'1+' * 300}1))") == ["301"]


def test_limits_are_generous_for_scripts_that_are_written_by_hand(read):
    blend = "".join(f'DATA="$DATA 1.0 /data/corpus/part_{n:05}_text_document"\n' for n in range(500))
    assert len(read(f'DATA=""\n{blend}python p.py --data-path $DATA').values["--data-path"]) == 1000
    assert following.MOST_STATEMENTS >= 10_000


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "gone", "loop"])
def test_only_regular_files_are_read(kind, tmp_path):
    path = tmp_path / "train.sh"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    with pytest.raises(RecipeError, match="can't be read"):
        read_command([f"@{path}"])


def test_a_link_that_the_user_names_is_followed(tmp_path):
    (tmp_path / "real.sh").write_text("torchrun --nproc_per_node 2 p.py --bf16")
    (tmp_path / "train.sh").symlink_to("real.sh")
    assert read_command([f"@{tmp_path / 'train.sh'}"]).gpus == 2


def test_arbitrary_bytes_end_in_a_command_or_in_a_typed_error(tmp_path):
    draw = random.Random(8)
    pieces = [
        "$",
        "{",
        "}",
        "(",
        ")",
        "[",
        "]",
        '"',
        "'",
        "`",
        "\\",
        "\n",
        " ",
        ";",
        "&",
        "|",
        "<",
        ">",
        "=",
        "#",
        "!",
        "A",
    ]
    pieces += [
        "if ",
        "then ",
        "fi ",
        "case ",
        " in ",
        "esac",
        "while ",
        "do ",
        "done ",
        "[[ ",
        " ]]",
        "((",
        "))",
        "$((",
        "${A:-",
    ]
    pieces += [
        "<<E\n",
        "--bf16 ",
        "p.py ",
        "A=(",
        "+=",
        "eval ",
        "\x00",
        "\ue000",
        "é",
        "\ud7ff",
        "1",
        "-",
        "*",
        "unset A",
        "shift",
    ]
    n_read = 0
    for _ in range(3_000):
        text = "".join(draw.choice(pieces) for _ in range(draw.randrange(40)))
        try:
            script_words(f"{text}\ntorchrun p.py --bf16", label="s", arguments=["a"])
            n_read += 1
        except RecipeError:
            pass
    assert n_read > 100


def test_the_recipe_and_the_terminal_say_how_the_script_was_read(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.sh").write_text(LOGGED)
    command = ["from-megatron", "--partial", "--", "SLURM_NNODES=2", "@train.sh", "d"]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert "# How the command was read:\n#   train.sh:18: `if [ -n" in out
    assert "note: train.sh:18: `if [ -n" in err
    assert "ranks: 16" in out
    assert main(["from-megatron", "--partial", "@train.sh", "d"]) == 64
    assert "give --gpus N" in capsys.readouterr().err
    assert main(["from-megatron", "--partial", "--gpus", "16", "@train.sh", "d"]) == 0
    assert "ranks: 16" in capsys.readouterr().out
