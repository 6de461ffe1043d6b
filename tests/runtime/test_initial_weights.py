"""A run starts with the weights of a Hugging Face folder or of another run, whatever its layout."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megaspec import cli
from megaspec.core.errors import RecipeError
from megaspec.hf.names import weight_table
from megaspec.hf.short import short_section
from megaspec.hf.table import FAMILIES, read_model
from megaspec.hf.weights import their_tensor
from megaspec.resolve.gather import gather_facts, with_digest
from megaspec.resolve.resolver import resolve
from megaspec.run_folder import make_folder, write_run
from megaspec.spec import Spec
from tests.hf.folders import assert_same_tensors, config_of, random_folder
from tests.hf.models import InMemory
from tests.hf.quantised import fp8_folder, mxfp4_folder
from tests.runtime import lives
from tests.runtime.specs import TARGET, recipe

ONE = {"parallelism.tp": 1}
TP = {"parallelism.tp": 2, "model.vocab_pad_to": 16}
DP = {"parallelism.dp_shard": 2, "parallelism.dp_strategy": "zero1"}
LAYOUTS = {"one": ONE, "tp2": TP, "dp2 zero1": DP}
FP32 = {"precision": {"kind": "fp32"}}


def spec_of(changes: dict[str, Any], run_dir: str = "run") -> Spec:
    """As `train` resolves it: with what is found in the folder that it begins with."""
    made = recipe(FP32 | changes)
    facts = replace(with_digest(gather_facts(made)), run_dir=run_dir)
    return resolve(made, TARGET, facts)


def started(pool, spec: Spec) -> Any:
    """What rank 0 starts with; all ranks tell the same error."""
    found = pool.run(lives.starting_weights, spec.model_dump_json(), ranks=spec.world_size)
    if isinstance(found[0], str):
        assert len(set(found)) == 1, found
    return found[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    path = tmp_path_factory.mktemp("hf") / "model"
    return path, random_folder(path, spec_of({}).model, "llama")


def run_of(path: Path, changes: dict[str, Any], pool, steps: int = 2) -> Spec:
    """Trains a run in a folder of its own."""
    made = recipe(FP32 | changes | {"train.steps": steps, "optim.schedule.warmup_steps": 1})
    spec = resolve(made, TARGET, replace(with_digest(gather_facts(made)), run_dir=str(path)))
    make_folder(path)
    write_run(path, made, TARGET, spec)
    pool.run(lives.live, spec.model_dump_json(), str(path), ranks=spec.world_size)
    return spec


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_starts_with_the_folders_weights(layout, folder, pool) -> None:
    path, values = folder
    found = started(pool, spec_of({**LAYOUTS[layout], "init.from_hf": str(path)}))
    assert {f"model/{name}" for name in found} == values.keys()
    for name, value in found.items():
        assert np.array_equal(value, values[f"model/{name}"].numpy()), name


QUANTISED = {
    "fp8, tp2": (fp8_folder, {"parallelism.tp": 2}),
    "mxfp4, tp2": (mxfp4_folder, {"parallelism.tp": 2}),
    "mxfp4, ep2": (mxfp4_folder, {**DP, "parallelism.ep": 2}),
}


@pytest.mark.parametrize("what", QUANTISED)
def test_a_layout_starts_with_what_a_quantised_folder_stands_for(what, tmp_path, pool) -> None:
    write, layout = QUANTISED[what]
    meant = write(tmp_path / "model")
    config = config_of(tmp_path / "model")
    model = read_model(config, "config.json")
    # layers by names of the user's own
    section = json.loads(json.dumps(short_section(model)).replace("sliding_attention", "near"))
    found = started(pool, spec_of({"model": section, **layout, "init.from_hf": str(tmp_path / "model")}))
    table = weight_table(model.facts, FAMILIES[config["model_type"]].names(model))
    source = InMemory({f"model/{name}": torch.from_numpy(value) for name, value in found.items()})
    for name, theirs in table.theirs.items():
        assert torch.equal(their_tensor(theirs, source, torch.float32), meant[name].to(torch.float32)), name


def test_trained_on_one_layout_and_saved_on_another_the_export_is_the_same(folder, tmp_path, pool) -> None:
    path, _ = folder
    spec = run_of(tmp_path / "trained", {**TP, "init.from_hf": str(path)}, pool)
    exports = []
    for name, layout in {"trained": None, **LAYOUTS}.items():
        run = tmp_path / name
        if layout is not None:
            other = spec_of({**layout, "init.from_hf": str(path), "train.steps": 2, "optim.schedule.warmup_steps": 1})
            make_folder(run)
            write_run(run, recipe(), TARGET, other)
            arguments = (other.model_dump_json(), str(tmp_path / "trained"), str(run))
            pool.run(lives.save_anew, *arguments, ranks=other.world_size)
        assert cli.main(["hf", "export", str(run), str(tmp_path / f"{name} out"), "--family", "llama"]) == 0
        exports.append(tmp_path / f"{name} out")
    for export in exports[1:]:
        assert_same_tensors(exports[0], export)
    # nor is the padding of the vocabulary there, and steps were taken
    weight = load_file(exports[0] / "model.safetensors")["model.embed_tokens.weight"]
    assert weight.shape[0] == spec.model.vocab_size == 37
    assert not torch.equal(weight, load_file(path / "model.safetensors")["model.embed_tokens.weight"])


def test_a_run_gives_its_weights_alone(tmp_path, pool) -> None:
    run_of(tmp_path / "old", {**TP, "checkpoint": {"every": 1, "keep": 5}}, pool, steps=3)
    before = started(pool, spec_of(ONE))
    last = started(pool, spec_of({**ONE, "init.load": str(tmp_path / "old")}))
    first = started(pool, spec_of({**DP, "init.load": str(tmp_path / "old"), "init.step": 1}))
    for name in before:
        assert not np.array_equal(last[name], first[name]), name
    # layers 0 and 1 stand in other places, the rest of the new model is drawn from the seed
    partly = {
        **ONE,
        "model.n_layers": 3,
        "init.load": str(tmp_path / "old"),
        "init.include": ["layers.*", "norm.*"],
        "init.exclude": ["*.norm2.weight"],
        "init.rename": [{"name": "layers.2.", "source": "layers.0."}, {"name": "layers.0.", "source": "layers.9."}],
    }
    with pytest.raises(RecipeError, match=r"gives no embed.weight, .*set init.missing=initialise"):
        spec_of(partly)
    found = started(pool, spec_of({**partly, "init.missing": "initialise"}))
    drawn = started(pool, spec_of({**ONE, "model.n_layers": 3}))
    for name, value in found.items():
        source = name.replace("layers.2.", "layers.0.")
        is_read = name.startswith(("layers.1.", "layers.2.", "norm.")) and "norm2" not in name
        expected = last[source] if is_read else drawn[name]
        assert np.array_equal(value, expected), name


@pytest.mark.parametrize("layout", ["one", "tp2"])
def test_all_ranks_tell_what_is_wrong_with_a_folder_now(layout, folder, tmp_path, pool) -> None:
    path, _ = folder
    copy = tmp_path / "model"
    copy.mkdir()
    (copy / "config.json").write_bytes((path / "config.json").read_bytes())
    tensors = load_file(path / "model.safetensors")
    # on the second of two ranks alone
    tensors["model.layers.1.self_attn.q_proj.weight"][-1, -1] = torch.nan
    save_file(tensors, copy / "model.safetensors")
    spec = spec_of({**LAYOUTS[layout], "init.from_hf": str(copy)})
    assert "q_proj.weight holds NaN or infinities" in started(pool, spec)
    tensors["model.norm.weight"] += 1
    save_file(tensors, copy / "model.safetensors")
    assert "has changed since the run was made" in started(pool, spec)


def test_another_model_is_refused_with_what_differs(folder, tmp_path) -> None:
    path, _ = folder
    with pytest.raises(RecipeError, match=r"model.d_ffn=64 \(there 48\).*megaspec hf recipe"):
        spec_of({"init.from_hf": str(path), "model.d_ffn": 64})
    with pytest.raises(RecipeError, match="is no folder"):
        spec_of({"init.from_hf": str(tmp_path / "none")})
    with pytest.raises(RecipeError, match="weights begin in one folder"):
        spec_of({"init.from_hf": str(path), "init.load": str(path)})
    with pytest.raises(RecipeError, match="holds no checkpoint"):
        spec_of({"init.load": str(tmp_path)})
    with pytest.raises(RecipeError, match=r"init.exclude: layers.7.\* fits no weight"):
        spec_of({"init.from_hf": str(path), "init.exclude": ["layers.7.*"], "init.missing": "initialise"})


def test_a_damaged_run_is_no_source(tmp_path, pool) -> None:
    run_of(tmp_path / "old", ONE, pool)
    spec = spec_of({**ONE, "init.load": str(tmp_path / "old")})
    [shard] = (tmp_path / "old" / "checkpoints" / "step-00000002").glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-9] ^= 1
    shard.write_bytes(content)
    assert "CheckpointError" in started(pool, spec)
    assert json.loads(spec.model_dump_json())["weights_from"]["step"] == 2
