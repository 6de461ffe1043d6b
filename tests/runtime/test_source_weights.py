"""A run starts with weights of another vocabulary, or with experts that are copies of a model without any."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from megaspec import cli
from megaspec.checkpoint.spec import InitSpec
from megaspec.core.errors import RecipeError
from megaspec.hf.table import FAMILIES
from megaspec.plan.report import print_plan
from megaspec.resolve.resume import fork, resume
from megaspec.rules.initial_weights import Reading, Span, initial_weights, weight_shapes
from megaspec.rules.run_facts import Facts
from megaspec.runtime import source_weights
from megaspec.runtime.initial_weights import start_from_source
from megaspec.runtime.source_weights import SourceWeights
from megaspec.spec import Spec
from tests.hf.folders import random_folder, small_folder
from tests.hf.models import InMemory
from tests.runtime import lives
from tests.runtime.specs import TARGET, recipe
from tests.runtime.test_initial_weights import FP32, run_of, spec_of, started

ONE = {"parallelism.tp": 1}
PP = {"parallelism.pp": 2, "parallelism.pipeline": {"schedule": "1f1b"}}
LAYOUTS = {
    "one": ONE,
    "tp2": {"parallelism.tp": 2, "model.vocab_pad_to": 16},
    "pp2": PP,
    "dp2 zero1": {"parallelism.dp_shard": 2, "parallelism.dp_strategy": "zero1"},
    "dp2 fsdp": {"parallelism.dp_shard": 2, "parallelism.dp_strategy": "fsdp"},
}
RESIZE = {"init.vocab": "resize"}
MEAN = RESIZE | {"init.new_rows": "mean"}
THERE = 37
TABLES = ("embed.weight", "head.weight", "head.bias")
# Of weights of a run of one step: biases that are not zero, and a head with one.
BIASED = {"model.head_bias": True, "model.mlp": {"kind": "gated", "bias": True}}


def vocabulary(size: int) -> dict[str, Any]:
    return {"model.vocab_size": size, "data.vocab_size": size}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Llama of Hugging Face's, its head apart."""
    path = tmp_path_factory.mktemp("hf") / "model"
    random_folder(path, spec_of({}).model, "llama")
    return path


@pytest.fixture(scope="module")
def tied_run(tmp_path_factory, pool) -> Path:
    """A run whose rows of the vocabulary were padded over two ranks, with a bias of the head."""
    path = tmp_path_factory.mktemp("runs") / "tied"
    run_of(path, {**LAYOUTS["tp2"], **BIASED, "model.tied_embeddings": True}, pool, steps=2)
    return path


@pytest.fixture(scope="module")
def untied_run(tmp_path_factory, pool) -> Path:
    path = tmp_path_factory.mktemp("runs") / "untied"
    run_of(path, {**LAYOUTS["tp2"], **BIASED}, pool, steps=2)
    return path


@pytest.fixture(scope="module")
def sources(folder, tied_run, untied_run) -> dict[str, dict[str, Any]]:
    """What a recipe says that begins with each."""
    return {
        "folder": {"init.from_hf": str(folder)},
        "tied": {**BIASED, "model.tied_embeddings": True, "init.load": str(tied_run)},
        "untied": {**BIASED, "init.load": str(untied_run)},
    }


@pytest.mark.parametrize("what", ["folder", "tied", "untied"])
@pytest.mark.parametrize(("size", "settings"), [(41, RESIZE), (41, MEAN), (29, RESIZE), (THERE, RESIZE)])
def test_rows_that_both_have_are_taken_on_every_layout(what, size, settings, sources, pool) -> None:
    common = sources[what]
    there = started(pool, spec_of({**common, **ONE}))
    changes = {**common, **settings, **vocabulary(size)}
    drawn_changes = {name: value for name, value in changes.items() if not name.startswith("init.")}
    drawn = started(pool, spec_of({**drawn_changes, **ONE}))
    kept = min(size, THERE)
    layouts = LAYOUTS if size == 41 else {name: LAYOUTS[name] for name in ("one", "tp2")}
    for layout in layouts.values():
        found = started(pool, spec_of({**changes, **layout}))
        assert found.keys() == there.keys()
        for name, value in found.items():
            if name not in TABLES:
                assert np.array_equal(value, there[name]), name
                continue
            assert value.shape[0] == size
            assert np.array_equal(value[:kept], there[name][:kept]), name
            new = drawn[name][kept:]
            if settings is MEAN:
                mean = there[name].astype(np.float64).sum(axis=0) / THERE
                new = np.broadcast_to(mean.astype(np.float32), new.shape)
            assert np.array_equal(value[kept:], new), name
    assert np.any(there["embed.weight"][:kept] != drawn["embed.weight"][:kept])


def test_new_rows_are_also_those_of_a_part(tied_run, pool) -> None:
    """Of which the rest is drawn."""
    changes = {**BIASED, "model.tied_embeddings": True, **vocabulary(41), "init.load": str(tied_run), **ONE}
    part = {"init.include": ["embed.*"], "init.missing": "initialise"}
    with pytest.raises(RecipeError, match=r"embed.weight has shape \[41, 32\], there \[37, 32\].*init.vocab=resize"):
        spec_of(changes | part)
    found = started(pool, spec_of(changes | part | MEAN))
    whole = started(pool, spec_of(changes | MEAN))
    drawn = started(pool, spec_of({**BIASED, "model.tied_embeddings": True, **vocabulary(41), **ONE}))
    for name, value in found.items():
        assert np.array_equal(value, (whole if name == "embed.weight" else drawn)[name]), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"has another vocabulary: model.vocab_size=41 \(there 37\); set init.vocab=resize"),
        ({"init.new_rows": "mean"}, "init.new_rows=mean says what new rows start from, and init.vocab=same has none"),
        ({**RESIZE, "model.d_ffn": 64}, r"is of another model: model.d_ffn=64 \(there 48\);"),
        ({"init.from_hf": None, **RESIZE}, "init.vocab says what is read of a folder, and there is none"),
    ],
)
def test_another_vocabulary_is_taken_where_that_is_said(changes, message, folder) -> None:
    with pytest.raises(RecipeError, match=message):
        spec_of({"init.from_hf": str(folder), **vocabulary(41), **changes})


# 4 experts, of which every token takes 2, in each layer or in the second alone
EVERYWHERE = {"n_experts": 4, "top_k": 2}
SECOND = {**EVERYWHERE, "first_dense": 1}
UPCYCLED = {"init.upcycle": "copies"}
EP = {"parallelism.ep": 2, "parallelism.dp_replicate": 2, "parallelism.dp_strategy": "replicate"}
OF_EXPERTS = {
    **LAYOUTS,
    "ep2": EP,
    "ep2 zero1": {**LAYOUTS["dp2 zero1"], "parallelism.ep": 2},
    "tp2 etp2": {"parallelism.tp": 2, "parallelism.etp": 2},
}


@pytest.mark.parametrize("what", ["folder", "untied"])
@pytest.mark.parametrize("moe", [EVERYWHERE, SECOND], ids=["everywhere", "second"])
def test_experts_are_copies_on_every_layout(what, moe, sources, pool) -> None:
    there = started(pool, spec_of({**sources[what], **ONE}))
    changes = {**sources[what], **UPCYCLED, "model.moe": moe}
    drawn_changes = {name: value for name, value in changes.items() if not name.startswith("init.")}
    drawn = started(pool, spec_of({**drawn_changes, **ONE}))
    n_copied = 0
    for layout in OF_EXPERTS.values():
        found = started(pool, spec_of({**changes, **layout}))
        assert found.keys() == drawn.keys()
        for name, value in found.items():
            dense = name.replace("moe.experts", "mlp")
            expected = drawn[name] if "router" in name else there[dense]
            if dense != name:
                assert value.shape[0] == 4 * expected.shape[0]
                expected = np.concatenate([expected] * 4)
                n_copied += 1
            assert np.array_equal(value, expected), name
    assert n_copied


def test_experts_in_another_layer_with_another_vocabulary(untied_run, pool) -> None:
    """All that init says holds beside each other."""
    changes = {
        **BIASED,
        **ONE,
        **vocabulary(41),
        **MEAN,
        **UPCYCLED,
        "model.moe": EVERYWHERE,
        "init.load": str(untied_run),
        "init.rename": [{"name": "layers.0.", "source": "layers.1."}],
    }
    found = started(pool, spec_of(changes))
    there = started(pool, spec_of({**BIASED, **ONE, "init.load": str(untied_run)}))
    for part in ("w_down", "w_gate_up"):
        expected = np.concatenate([there[f"layers.1.mlp.{part}.bias"]] * 4)
        assert np.any(expected)
        for layer in (0, 1):
            assert np.array_equal(found[f"layers.{layer}.moe.experts.{part}.bias"], expected)
    assert np.array_equal(found["head.bias"][:37], there["head.bias"])


def logits(rank: int, text: str) -> np.ndarray:
    """With the weights that a run starts with, of all tokens, in evaluation."""
    spec = Spec.model_validate_json(text)
    built = lives.build_here(spec, rank)
    start_from_source(built, lives.comm_of(spec, rank))
    tokens = torch.arange(2 * 16).view(2, 16) * 7 % 37
    with torch.no_grad():
        return built.model(tokens).numpy()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"router": {"score": "sigmoid", "expert_bias": True, "bias_rate": 0.1}},
        {"router": {"score": "sqrt_softplus", "logit_bias": True, "n_groups": 2, "group_top_k": 1}},
        {"top_k": 4, "router": {"losses": [{"kind": "aux", "coefficient": 0.1}]}},
    ],
    ids=["softmax", "sigmoid", "groups", "all"],
)
def test_the_copies_add_up_to_the_dense_model(settings, untied_run, pool) -> None:
    fp64 = {**ONE, **BIASED, "precision": {"kind": "fp64"}, "init.load": str(untied_run)}
    (dense,) = pool.run(logits, spec_of(fp64).model_dump_json(), ranks=1)
    sparse = {**fp64, **UPCYCLED, "model.moe": EVERYWHERE | settings}
    (found,) = pool.run(logits, spec_of(sparse).model_dump_json(), ranks=1)
    assert np.abs(found - dense).max() <= 1e-12 * np.abs(dense).max()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.moe": None}, "makes experts, and model.moe=null has none; set model.moe, or drop it"),
        ({"model.moe": {**EVERYWHERE, "d_expert": 24}}, r"model.moe.d_expert=24 \(there model.d_ffn=48\); set"),
        (
            {"model.moe": {**EVERYWHERE, "d_shared": 16, "capacity_factor": 1.0, "router": {"norm_top_k": False}}},
            "norm_top_k=true model.moe.d_shared=null model.moe.capacity_factor=null",
        ),
        ({"model.moe": {**EVERYWHERE, "router": {"scale": 2.5}}}, "set model.moe.router.scale=1.0"),
        ({"model.moe": {**EVERYWHERE, "router": {"balancing": "sinkhorn"}}}, "set model.moe.router.balancing=top_k"),
        ({"model.moe": {**EVERYWHERE, "weights_on": "inputs"}}, "set model.moe.weights_on=outputs"),
        ({"model.moe": SECOND, "model.d_ffn": 64, "model.moe.d_expert": 48}, r"model.d_ffn=64 \(there 48\)"),
        ({"init.upcycle": "none"}, "is of another model: model.moe="),
        ({"init.from_hf": None}, "init.upcycle says what is read of a folder, and there is none"),
    ],
)
def test_what_is_no_copy_of_the_dense_model_is_refused(changes, message, folder) -> None:
    with pytest.raises(RecipeError, match=message):
        spec_of({"init.from_hf": str(folder), **UPCYCLED, "model.moe": EVERYWHERE, **changes})


def test_experts_are_no_copies_of_experts(tmp_path) -> None:
    moe = {**EVERYWHERE, "d_expert": 48, "router": {"norm_top_k": True}}
    assert "mixtral" in FAMILIES
    random_folder(tmp_path / "model", spec_of({"model.moe": moe}).model, "mixtral")
    with pytest.raises(RecipeError, match=r"begins with a model without experts, and .* has 4; drop it"):
        spec_of({"init.from_hf": str(tmp_path / "model"), **UPCYCLED, "model.moe": moe})


def test_a_fork_may_drop_tokens(folder) -> None:
    """It begins with the weights of its checkpoint, which are no copies any more."""
    changes = {"init.from_hf": str(folder), **UPCYCLED, "model.moe": EVERYWHERE}
    old = spec_of(changes)
    changes["model.moe"] = {**EVERYWHERE, "capacity_factor": 1.0, "router": {"norm_top_k": False}}
    new = fork(old, recipe(FP32 | changes), TARGET, Facts(run_dir="new"), done_steps=1)
    assert new.model.moe.capacity_factor == 1.0
    assert resume(old, recipe(FP32 | changes | {"model.moe": EVERYWHERE}), TARGET, Facts(run_dir="run")) == old


class Watched(InMemory):
    """Tensors that note which rectangles are read."""

    def __init__(self, values: dict[str, torch.Tensor]):
        super().__init__(values)
        self.reads: list[tuple[str, tuple[int, ...]]] = []

    def read(self, name, start=None, shape=None) -> torch.Tensor:
        value = super().read(name, start, shape)
        self.reads.append((name, tuple(value.shape)))
        return value


def test_a_rank_reads_what_it_owns(monkeypatch) -> None:
    """Of experts the rows of one, once; of a mean slabs of bounded size, the same sum whatever is asked for."""
    monkeypatch.setattr(source_weights, "_SLAB", 8 * 3)
    generator = torch.Generator().manual_seed(0)
    there = Watched({"model/mlp": torch.randn(6, 3, generator=generator), "model/embed": torch.randn(37, 3)})
    readings = {
        "model/experts": Reading("model/mlp", (24, 3), tuple(Span(6 * one, 6) for one in range(4))),
        "model/embed": Reading("model/embed", (41, 3), (Span(0, 37),)),
    }
    starts = spec_of({}).model.facts.initial_values(std=1.0)
    ours = SourceWeights(there, readings, new_rows="mean", starts=starts, seed=0, wide=torch.float32)
    # rows 2, 3 of the first expert, all of the second and rows 0 to 3 of the third, without the first column
    found = ours.read("model/experts", (2, 1), (14, 2))
    assert torch.equal(found, torch.cat([there.read("model/mlp")] * 4)[2:16, 1:])
    there.reads.clear()
    ours.read("model/experts", (0, 0), (24, 3))
    assert there.reads == [("model/mlp", (6, 3))]
    there.reads.clear()
    one = ours.read("model/embed", (30, 0), (11, 3))
    assert torch.equal(one[7:], ours.read("model/embed", (37, 0), (4, 3)))
    assert torch.equal(one[:, 2:], ours.read("model/embed", (30, 2), (11, 1)))
    assert max(shape[0] for _, shape in there.reads) <= 8
    there.reads.clear()
    ours.read("model/embed", (0, 0), (12, 3))
    assert there.reads == [("model/embed", (12, 3))]


def test_every_row_is_taken_or_new() -> None:
    """Of a tied model's tables alike, and of nothing but tables of tokens."""
    small = recipe({"model.tied_embeddings": True, "model.positions": {"kind": "learned"}, "model.max_seq_len": 37})
    large = recipe({"model.tied_embeddings": True, "model.positions": {"kind": "learned"}, "model.max_seq_len": 41})
    theirs = weight_shapes(spec_model(small).facts)
    found = initial_weights(InitSpec(load="run", vocab="resize"), spec_model(large).facts, theirs=theirs)
    assert [text.split()[0] for text in found.misfits] == ["positions.weight"]


def spec_model(made) -> Any:
    """The model of a recipe that says all that is needed."""
    return made.model.model_copy(update={"d_head": 8})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({**vocabulary(41), **MEAN}, "vocabulary: 37 rows taken, 4 new (mean), 0 dropped"),
        ({**vocabulary(29), **RESIZE}, "vocabulary: 29 rows taken, 0 new, 8 dropped"),
        (RESIZE, "vocabulary: all 37 rows taken, none new, none dropped"),
        (
            {**UPCYCLED, "model.moe": SECOND},
            "experts of 1 layer: copies of the feed-forward layer there; routers are drawn",
        ),
    ],
)
def test_a_plan_says_what_is_taken(changes, told, folder) -> None:
    spec = spec_of({"init.from_hf": str(folder), **changes, **ONE})
    out = io.StringIO()
    print_plan(spec, TARGET, Console(file=out, width=300))
    assert told in out.getvalue()
    assert f"those of {folder}" in out.getvalue()


@pytest.mark.usefixtures("warm_launches")
def test_a_run_keeps_the_tokenizer_of_its_own_vocabulary(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    small_folder(tmp_path / "model")
    assert cli.main(["hf", "recipe", "model", "--out", "recipes/mine.yaml"]) == 0
    words = ["train", "recipe=mine", "init.from_hf=model", "launcher.ranks=1", "train.steps=1", "data.seq_len=16"]
    words += ["train.global_batch=1", "optim.schedule.warmup_steps=0"]
    assert cli.main([*words, "run_dir=same"]) == 0
    assert (tmp_path / "same" / "tokenizer" / "tokenizer.json").exists()
    # the tokenizer has ids that this model has no row for
    assert cli.main([*words, "run_dir=other", "model.vocab_size=260"]) == 64
    assert "set init.vocab=resize" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    assert cli.main([*words, "run_dir=other", "model.vocab_size=260", "init.vocab=resize"]) == 0
    assert not (tmp_path / "other" / "tokenizer").exists()
    assert "260 rows taken, 0 new, 40 dropped" in capsys.readouterr().out
