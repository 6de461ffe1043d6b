"""`megaspec tune`: what it prints and writes."""

import json

import pytest

from megaspec.cli import main
from megaspec.commands.planned import plan_words
from megaspec.core.errors import RecipeError
from megaspec.estimate.memory import fullest, memory_of
from megaspec.parallelism.stages import parse_layout
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts

WORDS = ("recipe=llama3_8b", "gpus=8", "hardware=H100", "train.global_batch=32")
# with which a search is a short one
FEW = (*WORDS, "parallelism.tp=2")


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_json_holds_layouts_that_resolve_to_what_it_says(capsys):
    assert main(["tune", *FEW, "--json", "--top", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["gpus"], found["hardware"], len(found["best"])) == (8, "H100", 3)
    for one in found["best"]:
        words = [w for w in one["overrides"] if not w.startswith("launcher")]
        planned = plan_words([*FEW, *words])
        spec = resolve(planned.composed.recipe, planned.target, Facts(run_dir="runs/x"))
        assert fullest(memory_of(spec)).total == one["memory"]


def test_one_is_written_as_a_recipe_that_is_that_layout(tmp_path, capsys):
    out = tmp_path / "recipes" / "mine.yaml"
    words = (*FEW, "optim.lr=1e-4", "train.micro_batch=1", "--top", "2")
    assert main(["tune", *words, "--out", str(out), "--take", "2"]) == 0
    assert "limited by" in capsys.readouterr().out
    assert main(["tune", *words, "--json"]) == 0
    second = json.loads(capsys.readouterr().out)["best"][1]
    planned = plan_words(["recipe=mine", "hardware=H100"])
    spec = resolve(planned.composed.recipe, planned.target, Facts(run_dir="runs/x"))
    assert (spec.world_size, spec.parallelism.tp, spec.optim.lr, spec.train.global_batch) == (8, 2, 1e-4, 32)
    assert fullest(memory_of(spec)).total == second["memory"]
    assert "defaults:\n- llama3_8b" in out.read_text()


FOUR = ("recipe=llama3_8b", "gpus=4", "hardware=H200", "train.global_batch=8", "train.batch_ramp=null")


def test_pipelines_are_searched_by_schedule_chunks_and_how_layers_are_divided(tmp_path, capsys):
    """Of 32 layers and a head that takes two of them, over four ranks."""
    words = (*FOUR, "parallelism.pp=4", "train.micro_batch=1")
    out = tmp_path / "recipes" / "mine.yaml"
    assert main(["tune", *words, "--out", str(out)]) == 0
    table = capsys.readouterr().out
    assert "pp4:zb_v/7-9" in table
    assert "ranks have 6 to 9 layers, as is fastest" in table
    planned = plan_words(["recipe=mine", "hardware=H200"])
    own = resolve(planned.composed.recipe, planned.target, Facts(run_dir="runs/x")).parallelism.pipeline
    assert (own.schedule, own.virtual_stages, len(parse_layout(own.layout))) == ("zb_v", 2, 8)


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (("schedule=1f1b",), ("1f1b", 1, "Et")),
        (("virtual_stages=2", "layout=null"), ("zb_v", 2, "null")),
        (("schedule=zb_h1", "last_layers=5"), ("zb_h1", 1, "null")),
    ],
    ids=str,
)
def test_what_is_said_of_a_pipeline_stays(said, kept, capsys):
    words = [f"parallelism.pipeline.{word}" for word in said]
    assert main(["tune", *FOUR, "parallelism.pp=4", "train.micro_batch=1", *words, "--json", "--top", "1"]) == 0
    found = dict(word.split("=", 1) for word in json.loads(capsys.readouterr().out)["best"][0]["overrides"])
    schedule, chunks, layout = (found[f"parallelism.pipeline.{x}"] for x in ("schedule", "virtual_stages", "layout"))
    assert (schedule, int(chunks)) == kept[:2]
    assert layout.strip("'").startswith(kept[2])


def test_what_can_be_trained_today(capsys):
    assert main(["tune", "recipe=llama3_2_1b", "gpus=4", "hardware=H200", "--trainable", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert best
    assert all(one["trainable"] for one in best)


def test_gpus_and_ranks_of_the_command_line_are_one_number(capsys):
    """The ranks of a file are another recipe's choice: gpus= goes before them."""
    own = ("hardware=H100", "train.global_batch=32", "parallelism.tp=2", "--json", "--top", "1")
    for words, world in ((["gpus=16"], 16), (["launcher.ranks=16"], 16), (["gpus=8", "launcher.ranks=8"], 8), ([], 8)):
        assert main(["tune", "recipe=llama3_8b", *words, *own]) == 0
        assert json.loads(capsys.readouterr().out)["gpus"] == world, words


@pytest.mark.parametrize("command", ["plan", "tune"])
def test_help_says_what_gpus_means(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert "gpus=N: how many" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("recipe=llama3_1_405b", "gpus=4"), "no layout fits: the smallest needs"),
        (("recipe=llama3_8b", "gpus=7", "parallelism.tp=2"), "no layout of 7 GPUs keeps the rules"),
        (("recipe=llama3_8b", "gpus=0"), "gpus=0 must be a whole number from 1"),
        (("recipe=llama3_8b", "hardware=H300"), "hardware=H300 is not known"),
        (("recipe=llama3_8b", "hardware=cpu"), "hardware=cpu has nothing to search with"),
        ((*WORDS, "--take", "0"), "must be at least 1"),
        ((*WORDS, "launcher.ranks=16"), "launcher.ranks=16 differs from gpus=8, for which tune searches; keep one"),
        # what no layout mends is told by itself
        (
            (*WORDS, "precision=fp8", "precision.recipe=rowwise", "kernels.linear=te", "precision.margin=2"),
            "kernels.linear=te needs precision.recipe=tensorwise, delayed, blockwise, mxfp8 or nvfp4, it is rowwise; "
            "set kernels.linear=torch   (command line)\nprecision.margin=2 is not read: precision.recipe=rowwise",
        ),
        (
            ("recipe=gemma2_2b", "hardware=h100", "gpus=16", "parallelism.cp=2", "kernels.attention=flex"),
            "kernels.attention=flex attends to whole sequences, parallelism.cp=2 with parallelism.context.kind=ring",
        ),
        ((*WORDS, "model.n_kv_heads=5"), "model.n_kv_heads=5 must divide model.n_heads"),
        (
            (
                "recipe=llama3_8b",
                "gpus=8",
                "hardware=B200",
                "model.n_kv_heads=32",
                "model.d_head=128",
                "model.attention={kind: mla, kv_rank: 64, d_nope: 64, d_rope: 64, d_value: 64}",
                "--trainable",
            ),
            "model.attention.kind=mla: latent attention can be planned, not trained",
        ),
    ],
)
def test_what_can_not_be_found_is_said(words, said, capsys):
    assert main(["tune", *words]) == RecipeError.exit_code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "pipeline",
    ["first_layers: 5", "layout: 'Et*17|t*15L'", pytest.param("virtual_stages: 2", marks=pytest.mark.slow)],
)
def test_what_a_file_says_of_stages_leaves_layouts_without_them(pipeline, tmp_path, capsys):
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    text = f"defaults: [llama3_8b]\nparallelism: {{pp: 2, cp: 1, pipeline: {{{pipeline}}}}}\n"
    (recipes / "mine.yaml").write_text(text + "train: {global_batch: 8, micro_batch: 1, batch_ramp: null}\n")
    words = ("recipe=mine", "gpus=2", "hardware=H200", "--json", "--top", "1")
    assert main(["tune", *words]) == 0
    assert "parallelism.pp=1" in json.loads(capsys.readouterr().out)["best"][0]["overrides"]
    # among those with stages, what is written stays
    assert main(["tune", *words, "parallelism.pp=2"]) == 0
    words = json.loads(capsys.readouterr().out)["best"][0]["overrides"]
    key, _, value = pipeline.partition(": ")
    assert key == "virtual_stages" or f"parallelism.pipeline.{key}={value}" in words


@pytest.mark.parametrize(
    "recipe", [pytest.param("llama3_1_405b", marks=pytest.mark.slow), "qwen3_30b_a3b", "mixtral_8x7b"]
)
def test_what_is_written_can_be_planned(recipe, tmp_path, capsys):
    """Settings of a file that go with another choice, such as what is recomputed, go with it."""
    size = {"llama3_1_405b": ("gpus=256", "parallelism.tp=8")}.get(recipe, ("gpus=8",))
    own = (f"recipe={recipe}", "hardware=H200", *size, "train.micro_batch=1", "parallelism.cp=1")
    out = tmp_path / "recipes" / "mine.yaml"
    assert main(["tune", *own, "--json", "--top", "3", "--out", str(out)]) == 0
    found = json.loads(capsys.readouterr().out)
    planned = plan_words(["recipe=mine", "hardware=H200"])
    spec = resolve(planned.composed.recipe, planned.target, Facts(run_dir="runs/x"))
    assert fullest(memory_of(spec)).total == found["best"][0]["memory"]


def planned_speed(recipe: str, capsys) -> dict:
    """What `megaspec plan` says of a shipped recipe on the GPUs that it states."""
    assert main(["plan", f"recipe={recipe}", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    return {"seconds": plan["step_time"]["seconds"], "mfu": plan["mfu"]["causal"]}


def test_deepseek_v3_is_not_shipped_in_the_layout_that_takes_years(capsys):
    """Articles' layout, kept as a recipe of its own, gathers its weights for each micro batch over the network."""
    shipped, articles = planned_speed("deepseek_v3", capsys), planned_speed("deepseek_v3_tp8_ep32", capsys)
    assert articles["seconds"] > 5 * shipped["seconds"]
    assert articles["mfu"] < 0.05
    assert shipped["mfu"] > 0.25


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_deepseek_v3_is_shipped_as_the_fastest_layout_that_is_found(capsys):
    assert main(["tune", "recipe=deepseek_v3", "hardware=H100", "gpus=256", "--json", "--top", "1"]) == 0
    (best,) = json.loads(capsys.readouterr().out)["best"]
    assert planned_speed("deepseek_v3", capsys)["seconds"] <= 1.01 * best["seconds"]


def documents_line(capsys, *words) -> tuple[str, str | None]:
    """The line of `tune` on documents, "" where there is none, and what it says as JSON."""
    words = (*WORDS, "data=random", "data.vocab_size=128256", "parallelism.tp=8", "train.micro_batch=1", *words)
    assert main(["tune", *words]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert main(["tune", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["documents"]
    if "documents: " not in text:
        return "", found
    return text.partition("documents: ")[2].partition(" step tok/s")[0], found


@pytest.mark.parametrize("lengths", ["data.document_length=1000", "data.document_length=null"])
def test_it_says_by_which_documents_layouts_are_weighed(capsys, lengths):
    line, found = documents_line(capsys, "data.document_mask=true", lengths)
    assert line == found
    words = (*WORDS, "data=random", "data.vocab_size=128256", "data.document_mask=true", lengths)
    planned = plan_words([*words, "parallelism.tp=8", "parallelism.cp=1"])
    spec = resolve(planned.composed.recipe, planned.target, Facts(run_dir="runs/x"))
    (decision,) = [one for one in spec.decisions if one.key == "data.document_lengths"]
    assert line == decision.reason
    assert ("1,000.0 tokens on average" in line) == lengths.endswith("1000")
    assert ("one document each" in line) == lengths.endswith("null")


def test_lengths_that_were_given_are_said(capsys):
    words = "data.document_lengths=[{documents: 10, tokens: 10000, squares: 1e7}]"
    line, _ = documents_line(capsys, "data.document_mask=true", words)
    assert line.startswith("documents of 1,000.0 tokens on average: rows of 8,192 hide")
    assert line.endswith("(data.document_lengths)")


def test_without_a_mask_it_says_nothing_of_documents(capsys):
    assert documents_line(capsys) == ("", None)
