"""Checkpoints that megatron-core wrote (make_checkpoints.py): values to the bit, logits, and what is refused."""

import hashlib
import json
import os
import random
import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megaspec.checkpoint.comm import SoloComm
from megaspec.checkpoint.store import Store
from megaspec.cli import main
from megaspec.spec import Spec
from tests.hf.models import our_model

GOLDEN = Path(__file__).parents[1] / "golden" / "megatron_checkpoints"
CASES = ("legacy_tp2", "legacy_pp2", "dist_dense", "dist_experts")
VOCAB = 50
PADDED = 64
# Megatron's own logits are fp32, and so are its rotary angles and its softmax: 16 roundings deep.
CLOSE = 1e-5


def unpacked(name: str, folder: Path) -> Path:
    """A checkpoint as --save leaves it."""
    with tarfile.open(GOLDEN / name / "checkpoint.tar.xz") as archive:
        archive.extractall(folder / name, filter="data")
    return folder / name


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Each of them as a run folder."""
    made = {}
    folder = tmp_path_factory.mktemp("megatron")
    for name in CASES:
        checkpoint = unpacked(name, folder)
        made[name] = folder / f"run-{name}"
        assert main(["from-megatron", "--checkpoint", str(checkpoint), "--out", str(made[name])]) == 0
    return made


def opened(run: Path) -> tuple[Spec, dict[str, Tensor]]:
    spec = Spec.model_validate_json((run / "spec.json").read_text())
    with Store(run).newest_good(SoloComm(), repair=False) as reader:
        return spec, {name: reader.read(name) for name in reader.names()}


def as_megatron(spec: Spec, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors under the names and in the order of a model of megatron-core on one rank: written here anew."""
    model = spec.model
    ends = {
        "model/embed.": "embedding.word_embeddings.",
        "model/positions.": "embedding.position_embeddings.",
        "model/norm.": "decoder.final_layernorm.",
        "model/head.": "output_layer.",
    }
    inner = {
        "norm1.": "input_layernorm.",
        "norm2.": "pre_mlp_layernorm.",
        "attn.wo.": "self_attention.linear_proj.",
        "attn.q_norm.": "self_attention.q_layernorm.",
        "attn.k_norm.": "self_attention.k_layernorm.",
        "mlp.w_gate_up.": "mlp.linear_fc1.",
        "mlp.w_up.": "mlp.linear_fc1.",
        "mlp.w_down.": "mlp.linear_fc2.",
        "moe.router.": "mlp.router.",
        "moe.shared.w_gate_up.": "mlp.shared_experts.linear_fc1.",
        "moe.shared.w_down.": "mlp.shared_experts.linear_fc2.",
    }
    found = {}
    for name, value in values.items():
        for ours, theirs in ends.items():
            if name.startswith(ours):
                found[theirs + name.removeprefix(ours)] = value
        if not name.startswith("model/layers."):
            continue
        _, number, local = name.split(".", 2)
        prefix = f"decoder.layers.{number}."
        last = local.rpartition(".")[2]
        if local.startswith("attn.wqkv."):
            groups = model.n_kv_heads
            q, k, v = value.split([model.n_heads * model.d_head, *[groups * model.d_head] * 2])
            parts = [part.reshape(groups, -1, *value.shape[1:]) for part in (q, k, v)]
            found[f"{prefix}self_attention.linear_qkv.{last}"] = torch.cat(parts, 1).flatten(0, 1)
        elif local.startswith("moe.experts."):
            product = "linear_fc2" if "w_down" in local else "linear_fc1"
            for number, expert in enumerate(value.chunk(model.moe.n_experts)):
                found[f"{prefix}mlp.experts.local_experts.{number}.{product}.{last}"] = expert
        else:
            [(ours, theirs)] = [pair for pair in inner.items() if local.startswith(pair[0])]
            found[prefix + theirs + local.removeprefix(ours)] = value
    return found


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_that_megatron_core_loads(name, runs):
    """It reshards them onto one rank itself; the digests are of its parameters."""
    expected = json.loads((GOLDEN / name / "expected.json").read_text())
    found = as_megatron(*opened(runs[name]))
    assert found.keys() == expected.keys()
    for key, value in found.items():
        if key in ("embedding.word_embeddings.weight", "output_layer.weight"):
            continue
        digest = hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
        assert digest == expected[key], key


def embedding_of(name: str, folder: Path, key: str) -> Tensor:
    """Padded rows, as torch itself reads them in the files of ranks."""
    parts = []
    if name.startswith("legacy"):
        for file in sorted(folder.glob("iter_*/mp_rank_*/model_optim_rng.pt")):
            state = torch.load(file, weights_only=False)
            weights = state["model"] if "model" in state else state["model0"]
            if key in weights:
                parts.append(weights[key])
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("name", "key", "ours"),
    [
        ("legacy_tp2", "embedding.word_embeddings.weight", "model/embed.weight"),
        ("legacy_tp2", "output_layer.weight", "model/head.weight"),
        ("legacy_pp2", "embedding.word_embeddings.weight", "model/embed.weight"),
    ],
)
def test_rows_of_padding_are_left_out_and_no_others(name, key, ours, runs, tmp_path):
    rows = embedding_of(name, unpacked(name, tmp_path), key)
    digest = hashlib.sha256(rows.contiguous().numpy().tobytes()).hexdigest()
    assert digest == json.loads((GOLDEN / name / "expected.json").read_text())[key]
    assert rows.shape[0] == PADDED
    _, values = opened(runs[name])
    assert torch.equal(values[ours], rows[:VOCAB])


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_megatron_core(name, runs):
    expected = load_file(GOLDEN / name / "expected.safetensors")
    spec, values = opened(runs[name])
    with torch.no_grad():
        logits = our_model(spec.model, values)(expected["tokens"])
    theirs = expected["logits"].double()
    difference = float((logits - theirs).abs().max())
    assert difference <= CLOSE * float(theirs.abs().max()), difference
    # another model of the same shape gives others
    values["model/norm.weight"] = values["model/norm.weight"].flip(0)
    with torch.no_grad():
        others = our_model(spec.model, values)(expected["tokens"])
    assert float((others - theirs).abs().max()) > 1000 * CLOSE * float(theirs.abs().max())


def test_names_of_transformer_engine_are_those_of_local_layers(runs, tmp_path):
    """It fuses norms with the products behind them, and wrappers put a word in front."""
    checkpoint = unpacked("legacy_tp2", tmp_path)
    for file in checkpoint.glob("iter_*/mp_rank_*/model_optim_rng.pt"):
        state = torch.load(file, weights_only=False)
        fused = {}
        for name, value in state["model"].items():
            name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
            fused["module." + name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")] = value
        state["model"] = fused
        torch.save(state, file)
    assert main(["from-megatron", "--checkpoint", str(checkpoint), "--out", str(tmp_path / "run")]) == 0
    assert_same(tmp_path / "run", runs["legacy_tp2"])


def assert_same(one: Path, other: Path) -> None:
    _, values = opened(one)
    _, expected = opened(other)
    assert values.keys() == expected.keys()
    for name, value in values.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("is_grouped", [False, True])
def test_legacy_files_of_expert_parallel_ranks(is_grouped, runs, tmp_path, capsys):
    """Made here of the tensors of dist_experts: each rank has two experts, and all of the rest."""
    weights = as_megatron(*opened(runs["dist_experts"]))
    common = torch.load(unpacked("dist_experts", tmp_path) / "iter_0000010" / "common.pt", weights_only=False)
    rows = torch.zeros(PADDED - VOCAB, weights["embedding.word_embeddings.weight"].shape[1])
    weights["embedding.word_embeddings.weight"] = torch.cat([weights["embedding.word_embeddings.weight"], rows])
    folder = tmp_path / "legacy" / "iter_0000010"
    for rank in range(2):
        mine = {}
        for name, value in weights.items():
            head, marker, rest = name.partition("local_experts.")
            if not marker:
                mine[name] = value
                continue
            number, _, product = rest.partition(".")
            if int(number) // 2 == rank:
                local = f"{head}local_experts.{int(number) % 2}.{product}"
                if is_grouped:
                    local = f"{head}{product}{int(number) % 2}"
                mine[local] = value
        (folder / f"mp_rank_00_{rank:03d}").mkdir(parents=True)
        torch.save(common | {"model": mine}, folder / f"mp_rank_00_{rank:03d}" / "model_optim_rng.pt")
    assert main(["from-megatron", "--checkpoint", str(folder), "--out", str(tmp_path / "run")]) == 0
    assert_same(tmp_path / "run", runs["dist_experts"])
    mine["decoder.layers.1.mlp.router.weight"] = mine["decoder.layers.1.mlp.router.weight"] + 1
    torch.save(common | {"model": mine}, folder / "mp_rank_00_001" / "model_optim_rng.pt")
    capsys.readouterr()
    code, err = refused(folder, tmp_path, capsys)
    assert code == 66
    assert "decoder.layers.1.mlp.router.weight holds other numbers in another rank" in err


def test_what_else_stands_in_a_legacy_file_is_passed_over(runs, tmp_path):
    """Weights that are views of one buffer, as a distributed optimizer has them, and states of all kinds beside."""
    checkpoint = unpacked("legacy_tp2", tmp_path)
    for file in checkpoint.glob("iter_*/mp_rank_*/model_optim_rng.pt"):
        state = torch.load(file, weights_only=False)
        weights = {name: value for name, value in state["model"].items() if isinstance(value, Tensor)}
        buffer = torch.cat([torch.full((3,), 7.0), *(value.flatten() for value in weights.values())])
        at = 3
        for name, value in weights.items():
            state["model"][name] = torch.nn.Parameter(buffer[at : at + value.numel()].view(value.shape))
            at += value.numel()
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([parameter])
        parameter.grad = torch.ones(3)
        optimizer.step()
        state["optimizer"] = {"optimizer": optimizer.state_dict(), "fp32_from_fp16_params": [[torch.ones(3)]]}
        state["opt_param_scheduler"] = {"max_lr": 1e-4, "num_steps": 10, "lr_decay_style": "cosine"}
        states = {"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state()}
        state["rng_state"] = [states | {"torch_rng_state": torch.get_rng_state(), "rng_tracker_states": {}}]
        state["num_floating_point_operations_so_far"] = np.float64(1e20)
        torch.save(state, file)
    assert main(["from-megatron", "--checkpoint", str(checkpoint), "--out", str(tmp_path / "run")]) == 0
    assert_same(tmp_path / "run", runs["legacy_tp2"])


def test_without_padding_known_all_rows_stay_and_it_is_said(tmp_path, capsys):
    def forget(args: dict) -> None:
        args["vocab_size"] = None

    checkpoint = rewritten("legacy_tp2", tmp_path, forget)
    assert main(["from-megatron", "--checkpoint", str(checkpoint), "--out", str(tmp_path / "run")]) == 0
    assert "all are kept; give -- --vocab-size N" in capsys.readouterr().out
    assert opened(tmp_path / "run")[1]["model/embed.weight"].shape[0] == PADDED
    words = [
        "from-megatron",
        "--checkpoint",
        str(checkpoint),
        "--out",
        str(tmp_path / "cut"),
        "--",
        "--vocab-size",
        "50",
    ]
    assert main(words) == 0
    assert opened(tmp_path / "cut")[1]["model/embed.weight"].shape[0] == VOCAB


def rewritten(name: str, folder: Path, change) -> Path:
    """A legacy checkpoint whose args, in every rank's file, are changed."""
    checkpoint = unpacked(name, folder)
    for file in checkpoint.glob("iter_*/mp_rank_*/model_optim_rng.pt"):
        state = torch.load(file, weights_only=False)
        change(vars(state["args"]))
        torch.save(state, file)
    return checkpoint


def refused(checkpoint: Path, folder: Path, capsys, *more: str) -> tuple[int, str]:
    """-> exit code and error, with nothing left behind"""
    run = folder / "refused" / "run"
    code = main(["from-megatron", "--checkpoint", str(checkpoint), "--out", str(run), *more])
    assert not run.parent.exists() or not list(run.parent.iterdir())
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"window_size": (127, 0)}, "args.window_size=127, 0"),
        (
            {"multi_latent_attention": True, "rope_type": "rope", "q_lora_rank": 8},
            "checkpoints of latent attention are not",
        ),
        ({"rotary_interleaved": True}, "args.rotary_interleaved=True: no such positions"),
        ({"position_embedding_type": "yarn"}, "args.position_embedding_type=yarn"),
        ({"openai_gelu": True}, "args.openai_gelu=True"),
        ({"of_a_fork": 7}, "args.of_a_fork=7: an arg of which nothing is known"),
        ({"num_layers": "two"}, "args.num_layers=two must be int"),
        ({"num_layers": 3}, "decoder.layers.2.input_layernorm.weight of shape [16] is missing"),
        ({"num_layers": 1}, "decoder.layers.1.input_layernorm.weight is of no part of the model"),
        ({"hidden_size": 32}, "has shape [32, 16], expected"),
        ({"qk_layernorm": False}, "self_attention.q_layernorm.weight is of no part"),
        ({"padded_vocab_size": 96}, "embedding.word_embeddings.weight has shape [64, 16], expected [96, 16]"),
        ({"vocab_size": 70}, "vocab_size=70 is more than padded_vocab_size=64"),
        ({"tensor_model_parallel_size": 4}, "mp_rank_02 is missing, where args say tp=4"),
        ({"tensor_model_parallel_size": 1}, "mp_rank_01 is of no rank"),
        ({"tensor_model_parallel_size": 0}, "must be a whole number of at least 1"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_args_that_say_another_model_are_refused(changed, told, tmp_path, capsys):
    checkpoint = rewritten("legacy_tp2", tmp_path, lambda args: args.update(changed))
    code, err = refused(checkpoint, tmp_path, capsys)
    assert code in (64, 66), err
    assert told in err


def file_of(checkpoint: Path, rank: str) -> Path:
    return checkpoint / "iter_0000010" / rank / "model_optim_rng.pt"


def test_a_missing_rank(tmp_path, capsys):
    checkpoint = unpacked("legacy_tp2", tmp_path)
    shutil.rmtree(file_of(checkpoint, "mp_rank_01").parent)
    code, err = refused(checkpoint, tmp_path, capsys)
    assert code == 66
    assert "mp_rank_01 is missing" in err
    file_of(unpacked("legacy_pp2", tmp_path), "mp_rank_00_001").unlink()
    code, err = refused(tmp_path / "legacy_pp2", tmp_path, capsys)
    assert code == 66
    assert "mp_rank_00_001/model_optim_rng.pt: missing" in err


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_file(part, tmp_path, capsys):
    checkpoint = unpacked("legacy_tp2", tmp_path)
    file = file_of(checkpoint, "mp_rank_01")
    os.truncate(file, int(file.stat().st_size * part))
    code, err = refused(checkpoint, tmp_path, capsys)
    assert code == 66
    assert "mp_rank_01/model_optim_rng.pt: no zip file of torch.save's" in err


@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_1.distcp", ".metadata", "common.pt", "metadata.json"])
def test_a_truncated_or_missing_file_of_torch_dist(file, tmp_path, capsys):
    checkpoint = unpacked("dist_dense", tmp_path)
    path = checkpoint / "iter_0000010" / file
    os.truncate(path, path.stat().st_size // 2)
    code, err = refused(checkpoint, tmp_path, capsys)
    assert code == 66, err
    path.unlink()
    code, err = refused(checkpoint, tmp_path, capsys)
    assert code == 66, err


def test_ranks_that_disagree(tmp_path, capsys):
    checkpoint = unpacked("legacy_tp2", tmp_path)
    file = file_of(checkpoint, "mp_rank_01")
    state = torch.load(file, weights_only=False)
    state["args"].num_query_groups = 4
    torch.save(state, file)
    code, err = refused(checkpoint, tmp_path, capsys)
    assert code == 66
    assert "args.num_query_groups=4, the first rank has 2: ranks of two trainings" in err
    state["args"].num_query_groups = 2
    state["model"]["decoder.final_layernorm.weight"] += 1
    torch.save(state, file)
    code, err = refused(checkpoint, tmp_path, capsys)
    assert code == 66
    assert "decoder.final_layernorm.weight holds other numbers in another rank" in err


def test_a_tied_table_that_differs(tmp_path, capsys):
    checkpoint = unpacked("legacy_pp2", tmp_path)
    file = file_of(checkpoint, "mp_rank_00_001")
    state = torch.load(file, weights_only=False)
    state["model1"]["output_layer.weight"] += 1
    torch.save(state, file)
    code, err = refused(checkpoint, tmp_path, capsys)
    assert code == 66
    assert "output_layer.weight differs from embedding.word_embeddings.weight" in err


@pytest.mark.parametrize("name", ["legacy_tp2", "dist_dense"])
def test_another_iteration_than_the_latest(name, tmp_path, capsys):
    checkpoint = unpacked(name, tmp_path)
    (checkpoint / "latest_checkpointed_iteration.txt").write_text("20")
    code, err = refused(checkpoint, tmp_path, capsys)
    assert code == 66
    assert "says 20, and iter_0000020 is missing; name one of them, iter_0000010" in err
    (checkpoint / "iter_0000010").rename(checkpoint / "iter_0000020")
    code, err = refused(checkpoint, tmp_path, capsys)
    assert code == 66
    assert "is of iteration 10, its folder of iteration 20" in err
    (checkpoint / "latest_checkpointed_iteration.txt").write_text("../../elsewhere")
    code, err = refused(checkpoint, tmp_path, capsys)
    assert code == 66
    assert "expected the number of an iteration" in err


def test_links_are_not_followed(tmp_path, capsys):
    checkpoint = unpacked("legacy_tp2", tmp_path)
    file = file_of(checkpoint, "mp_rank_01")
    file.rename(tmp_path / "elsewhere.pt")
    file.symlink_to(tmp_path / "elsewhere.pt")
    code, err = refused(checkpoint, tmp_path, capsys)
    assert code == 66
    assert "found a link" in err
    checkpoint = unpacked("dist_dense", tmp_path)
    for name in (".metadata", "__0_0.distcp"):
        path = checkpoint / "iter_0000010" / name
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        code, err = refused(checkpoint, tmp_path, capsys)
        assert code == 66
        assert "link" in err
        path.unlink()
        (tmp_path / "elsewhere").rename(path)


def test_damage_and_numbers_that_are_none(tmp_path, capsys):
    checkpoint = unpacked("legacy_tp2", tmp_path)
    file = file_of(checkpoint, "mp_rank_00")
    state = torch.load(file, weights_only=False)
    value = state["model"]["decoder.layers.0.mlp.linear_fc2.weight"]
    content = bytearray(file.read_bytes())
    at = content.find(value.numpy().tobytes())
    content[at + 5] ^= 4
    file.write_bytes(content)
    code, err = refused(checkpoint, tmp_path, capsys)
    assert code == 66
    assert "have another checksum" in err
    value[0, 0] = float("nan")
    torch.save(state, file)
    code, err = refused(checkpoint, tmp_path, capsys)
    assert code == 66
    assert "decoder.layers.0.mlp.linear_fc2.weight holds NaN" in err


def test_compressed_entries_are_refused(tmp_path, capsys):
    """A few kilobytes that would be gigabytes."""
    checkpoint = unpacked("legacy_tp2", tmp_path)
    file = file_of(checkpoint, "mp_rank_00")
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x00" * (1 << 24))
    code, err = refused(checkpoint, tmp_path, capsys)
    assert code == 66
    assert "archive/data.pkl is compressed or encrypted" in err


def test_what_can_and_can_not_be_combined(tmp_path, capsys):
    checkpoint = unpacked("legacy_tp2", tmp_path)
    assert main(["from-megatron", "--checkpoint", str(checkpoint)]) == 64
    assert "give --out RUN" in capsys.readouterr().err
    code, err = refused(checkpoint, tmp_path, capsys, "--gpus", "2")
    assert (code, "--gpus says nothing with --checkpoint" in err) == (64, True)
    code, err = refused(checkpoint, tmp_path, capsys, "--", "--num-layers", "9")
    assert (code, "contradicts args.num_layers=2" in err) == (64, True)
    code, err = refused(checkpoint, tmp_path, capsys, "--", "--lr", "1")
    assert (code, "--lr 1: says nothing of a model" in err) == (64, True)
    (tmp_path / "there").mkdir()
    assert main(["from-megatron", "--checkpoint", str(checkpoint), "--out", str(tmp_path / "there")]) == 73


def test_one_iteration_by_its_own_folder(tmp_path):
    checkpoint = unpacked("dist_experts", tmp_path) / "iter_0000010"
    assert main(["from-megatron", "--checkpoint", str(checkpoint), "--out", str(tmp_path / "run")]) == 0
