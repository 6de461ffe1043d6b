"""On which smaller numbers of nodes a job can go on: the layouts that it holds, and what is refused before it waits."""

import json

import pytest
import yaml

from megaspec.cli import main
from megaspec.commands.fewer_nodes import OnFewer, for_fewer_nodes
from megaspec.commands.planned import cluster_target
from megaspec.core.errors import RecipeError
from megaspec.spec import Spec
from tests.launchers.jobs import HERE, spec_of

SLURM = ("launcher=slurm", "launcher.hardware=cpu", "launcher.ranks_per_node=2", "parallelism.tp=1")
TWELVE = ("launcher.nodes=6", "train.global_batch=12")
NO_DATA = ("data=synthetic", "data.vocab_size=64", "data.seq_len=8", "model.vocab_size=64", "train.sample=null")


def on_fewer(spec: Spec, *, memory: str = "check") -> tuple[Spec, list[OnFewer]]:
    return for_fewer_nodes(spec, cluster_target(spec, spec.launcher, HERE), memory=memory)


def layouts_of(*words: str, memory: str = "check") -> dict[int, tuple[str, ...]]:
    """Nodes -> words, of the layouts that a job holds."""
    spec, found = on_fewer(spec_of(*SLURM, *words), memory=memory)
    assert spec.launcher.layouts == tuple(one.words for one in found)
    for one in found:
        assert one.spec.world_size == 2 * one.nodes
        # the experiment is the same
        assert one.spec.train.global_batch == spec.train.global_batch
        for section in ("model", "data", "optim", "precision", "kernels", "checkpoint"):
            assert getattr(one.spec, section) == getattr(spec, section)
    return {one.nodes: one.words for one in found}


def test_without_a_list_the_degrees_that_are_open_are_decided_anew():
    """Only where they make a batch: 12 samples are no multiple of the 10 ranks of 5 nodes, nor of 8."""
    assert layouts_of(*TWELVE, "launcher.min_nodes=1", "train.micro_batch=1") == {
        3: ("parallelism.dp_replicate=6", "launcher.ranks=6"),
        2: ("parallelism.dp_replicate=4", "launcher.ranks=4"),
        1: ("parallelism.dp_replicate=2", "launcher.ranks=2"),
    }


def test_no_more_is_decided_anew_than_has_to_be():
    """Degrees that divide the model stay; a micro batch does where it still divides a rank's samples."""
    words = ("launcher.nodes=3", "launcher.min_nodes=2", "train.global_batch=12")
    assert layouts_of(*words) == {2: ("parallelism.dp_replicate=4", "train.micro_batch=3", "launcher.ranks=4")}
    words = ("launcher.nodes=2", "launcher.min_nodes=1", "train.global_batch=8", "parallelism.tp=auto")
    spec = spec_of(*(word for word in SLURM if "tp" not in word), *words)
    assert spec.parallelism.tp == 4
    made, (found,) = on_fewer(spec, memory="check")
    # tp alone makes the world: it has to be another one
    assert found.spec.parallelism.tp == 2
    assert made.launcher.layouts[0][0] == "parallelism.tp=2"


def test_a_list_is_taken_as_it_stands():
    own = ("parallelism.dp_replicate=12", "train.micro_batch=1")
    two = "['parallelism.dp_replicate=4','launcher.ranks=4']"
    three = "['parallelism.tp=2','parallelism.dp_replicate=3']"
    assert layouts_of(*TWELVE, *own, f"launcher.layouts=[{two},{three}]", "launcher.min_nodes=2") == {
        3: ("parallelism.tp=2", "parallelism.dp_replicate=3", "launcher.ranks=6"),
        2: ("parallelism.dp_replicate=4", "launcher.ranks=4"),
    }


def test_a_search_is_done_before_the_job_is_written():
    found = layouts_of("launcher.nodes=2", "launcher.min_nodes=1", "train.global_batch=8", "launcher.layouts=search")
    assert list(found) == [1]
    assert found[1][-1] == "launcher.ranks=2"


def test_memory_that_fewer_nodes_do_not_have():
    """Weights that are shared out take more of each GPU where there are fewer."""
    words = ("launcher=slurm", "launcher.hardware=H100", "launcher.nodes=4", "launcher.min_nodes=1")
    words += ("parallelism.dp_strategy=fsdp", "parallelism.tp=1", "precision=bf16", "train.global_batch=64")
    words += ("model={n_layers: 48, d_model: 8192, n_heads: 64, n_kv_heads: 8, d_ffn: 28672}", "train.micro_batch=1")
    spec = spec_of(*words)
    with pytest.raises(RecipeError) as raised:
        on_fewer(spec, memory="check")
    first, *why = [problem.message for problem in raised.value.problems]
    assert "none fits their 8 ranks; set launcher.min_nodes=2, or add a layout" in first
    assert any("GiB" in message for message in why)
    _, found = on_fewer(spec, memory="ignore")
    assert [one.nodes for one in found] == [2, 1]


def test_a_job_that_needs_all_its_nodes_stays_as_it_is():
    for words in ((), ("launcher.min_nodes=6",)):
        spec = spec_of(*SLURM, *TWELVE, *words)
        assert on_fewer(spec, memory="check") == (spec, [])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["launcher.min_nodes=0"], "launcher.min_nodes=0 must be greater than 0"),
        (["launcher.min_nodes=7"], "launcher.min_nodes=7 must be at most launcher.nodes=6"),
        # batches: 10 and 8 ranks make none of 12 samples
        (
            ["launcher.min_nodes=5"],
            "none fits their 10 ranks; set launcher.min_nodes=3, or add a layout for 10 ranks to",
        ),
        (
            ["launcher.min_nodes=2", "parallelism.dp_replicate=12"],
            "launcher.min_nodes=2 must be a number of nodes that a layout fits, and none fits their 4 ranks; drop",
        ),
        (
            [
                "launcher.min_nodes=1",
                "parallelism.dp_replicate=12",
                "launcher.layouts=[['parallelism.dp_replicate=4']]",
            ],
            "none fits their 2 ranks; set launcher.min_nodes=2, or add a layout for 2 ranks to launcher.layouts",
        ),
        (
            ["launcher.min_nodes=1", "launcher.layouts=[['parallelism.dp_replicate=2'],['parallelism.tp=3']]"],
            "launcher.layouts.1: parallelism.tp=3 must divide model.n_heads=4",
        ),
        (["launcher.min_nodes=1", "launcher.layouts=[['optim.lr=1']]"], "launcher.layouts.0: optim.lr=1 is no layout"),
        (
            [
                "launcher.min_nodes=1",
                "launcher.layouts=[['parallelism.dp_replicate=2'],['parallelism.dp_replicate=3']]",
            ],
            "launcher.layouts.1 (parallelism.dp_replicate=3) must fit a number of nodes from launcher.min_nodes=1 to "
            "launcher.nodes=6, of 2 ranks each, and fits none; change its degrees, or drop it",
        ),
        (
            ["launcher.layouts=[['parallelism.dp_replicate=4']]"],
            "drop launcher.layouts, or set launcher.min_nodes below launcher.nodes",
        ),
        (["launcher.min_nodes=1", "launcher.restarts.most=3"], "launcher.restarts is read where a job has one node"),
    ],
)
@pytest.mark.parametrize("first", [["train"], ["train", "-m", "optim.lr=1e-3,2e-3"]])
def test_what_is_wrong_is_told_before_anything_is_submitted(first, words, text, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    submitted = []
    monkeypatch.setattr("megaspec_launchers.slurm.submit", lambda *said: submitted.append(said))
    monkeypatch.setattr("megaspec_launchers.slurm.refuse_missing", lambda: None)
    assert main([*first, "recipe=hello", *SLURM, *TWELVE, *NO_DATA, *words]) == 64
    assert text in capsys.readouterr().err
    assert submitted == []
    assert list(tmp_path.iterdir()) == []


def test_only_slurm_has_fewer_nodes(capsys):
    assert main(["train", "recipe=hello", "launcher.min_nodes=1"]) == 64
    assert "launcher.min_nodes" in capsys.readouterr().err


def test_what_is_submitted_says_what_fewer_nodes_take(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    submitted = []
    monkeypatch.setattr("megaspec_launchers.slurm.submit", lambda text, specs: submitted.append(text) or "4711")
    monkeypatch.setattr("megaspec_launchers.slurm.refuse_missing", lambda: None)
    words = ["recipe=hello", *SLURM, *TWELVE, *NO_DATA, "launcher.min_nodes=2"]
    assert main(["train", *words]) == 0
    said = capsys.readouterr().out
    assert "Layouts of launcher.min_nodes" in said
    for line in ("dp_replicate 12: 6 nodes", "dp_replicate 6: 3 nodes", "dp_replicate 4: 2 nodes"):
        assert line in said
    (text,) = submitted
    assert "#SBATCH --nodes=2-6\n" in text
    assert "\nfor count in 6 3 2; do\n" in text
    recipe = yaml.safe_load(text.partition("<<'END-OF-RECIPE' || exit 73\n")[2].partition("END-OF-RECIPE")[0])
    assert [words[-1] for words in recipe["launcher"]["layouts"]] == ["launcher.ranks=6", "launcher.ranks=4"]


def test_plan_shows_what_fewer_nodes_take(capsys):
    words = ["plan", "recipe=hello", *SLURM, *TWELVE, "launcher.min_nodes=2"]
    assert main(words) == 0
    assert "Layouts of launcher.min_nodes" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    assert [(one["words"], one["ranks"]) for one in layouts] == [("6 nodes", 12), ("3 nodes", 6), ("2 nodes", 4)]
    assert {one["micro_batch"] * one["accumulation"] * one["ranks"] for one in layouts} == {12}
    assert main(["plan", *words[1:-1], "launcher.min_nodes=5"]) == 64
    assert "set launcher.min_nodes=3" in capsys.readouterr().err


@pytest.mark.parametrize(
    "layouts",
    [
        [["parallelism.cp=2", "parallelism.dp_shard=8"]],
        [["parallelism.cp=2", "parallelism.dp_shard=8", "kernels.attention=reference"]],
    ],
)
def test_attention_that_auto_took_for_all_nodes_is_decided_anew(layouts):
    """Of kernels that cap scores flex alone is fused, and attends to whole sequences: four nodes have those, two have
    parts."""
    words = ("launcher=slurm", "launcher.hardware=H100", "launcher.nodes=4", "~launcher.ranks")
    spec = spec_of(*words, "launcher.min_nodes=2", f"launcher.layouts={json.dumps(layouts)}", recipe="gemma2_2b")
    assert spec.kernels.attention == "flex"
    made, (found,) = on_fewer(spec)
    assert found.spec.kernels.attention == "reference"
    assert found.spec.parallelism.cp == 2
    named = [word for word in made.launcher.layouts[0] if word.startswith("kernels.attention=")]
    assert [word.replace("'", "") for word in named] == ["kernels.attention=reference"]
