"""Quantised folders: dequantised to the bit as transformers does it, by slices; what is wrong with them."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from megaspec import cli
from megaspec.core.errors import CheckpointError
from megaspec.hf.fits import Stored
from megaspec.hf.folder import HfFolder, TheirEntry, open_hf_folder
from megaspec.hf.names import weight_table
from megaspec.hf.stored import read_whole
from megaspec.hf.table import FAMILIES, read_model
from megaspec.hf.weights import HfWeights
from tests.hf.folders import config_of, tensors_of
from tests.hf.quantised import by_hand_fp8, fp8_folder, mxfp4_folder, quantised_fp8, rewrite

FOLDERS: dict[str, Callable[[Path], dict[str, Tensor]]] = {"fp8": fp8_folder, "mxfp4": mxfp4_folder}


@pytest.fixture(params=FOLDERS)
def quantised(request: pytest.FixtureRequest, tmp_path: Path) -> SimpleNamespace:
    path = tmp_path / "model"
    return SimpleNamespace(form=request.param, path=path, meant=FOLDERS[request.param](path))


def weights_of(folder: HfFolder) -> HfWeights:
    model = read_model(folder.config, "config.json")
    family = FAMILIES[folder.config["model_type"]]
    return HfWeights(folder, weight_table(model.facts, family.names(model)))


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def test_every_tensor_is_what_it_stands_for(quantised: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_hf_folder(quantised.path) as folder:
        weights = weights_of(folder)
        assert {stored.form for stored in weights.tensors.values()} == {"plain", quantised.form}
        for slab_bytes in (64 << 20, 300):
            monkeypatch.setattr("megaspec.hf.stored.SLAB_BYTES", slab_bytes)
            for name, value in quantised.meant.items():
                assert_same_bits(read_whole(folder, weights.tensors[name]), value)
        assert {weights.dtype(name) for name in weights.names()} == {torch.bfloat16}


def test_any_rectangle_is_what_the_whole_has_there(quantised: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megaspec.hf.stored.SLAB_BYTES", 200)
    drawn = np.random.default_rng(5)
    with open_hf_folder(quantised.path) as folder:
        weights = weights_of(folder)
        for name in weights.names():
            whole = weights.read(name)
            for _ in range(6):
                start = [int(drawn.integers(0, size)) for size in whole.shape]
                shape = [int(drawn.integers(1, size - at + 1)) for at, size in zip(start, whole.shape, strict=True)]
                slices = tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))
                assert_same_bits(weights.read(name, start, shape), whole[slices])


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("fp8", "model/layers.1.attn.wo.weight"),
        ("mxfp4", "model/layers.1.moe.experts.w_down.weight"),
        # of which gate and up take turns
        ("mxfp4", "model/layers.1.moe.experts.w_gate_up.weight"),
    ],
)
def test_a_rank_reads_its_rows_and_their_scales(
    form: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FOLDERS[form](tmp_path / "model")
    read = []

    def counted(self: HfFolder, entry: TheirEntry, view: memoryview, offset: int) -> None:
        read.append(len(view))
        read_into(self, entry, view, offset)

    read_into = HfFolder.read_into
    with open_hf_folder(tmp_path / "model") as folder:
        weights = weights_of(folder)
        monkeypatch.setattr(HfFolder, "read_into", counted)
        rows, columns = weights.shape(name)
        weights.read(name, (rows // 2, 0), (rows // 2, columns))
        half = sum(read)
        read.clear()
        weights.read(name)
        names = {block.name for block in weights._table.ours[name].blocks}
        kept = [entry.bytes for one in names for entry in weights.tensors[one].entries]
    assert sum(read) == sum(kept)
    assert half == sum(read) // 2


def stored_in(path: Path, form: str, shape: tuple[int, ...], numbers: Tensor, scales: Tensor, block: tuple[int, int]):
    """One quantised tensor, opened."""
    path.mkdir()
    (path / "config.json").write_text("{}")
    rewrite(path, {"x": numbers, "s": scales})
    folder = open_hf_folder(path)
    return folder, Stored(shape, folder.tensors["x"], form, folder.tensors["s"], block)


def test_all_of_e4m3_in_blocks_of_128_is_as_transformers_has_it(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    numbers, scales = quantised_fp8(torch.randn(256, 384, generator=torch.Generator().manual_seed(1)), (128, 128))
    codes = torch.arange(256, dtype=torch.uint8)
    # all but both NaN
    numbers[0, :254] = codes[(codes & 127) != 127].view(torch.float8_e4m3fn)
    theirs = Fp8Dequantize(None)._dequantize_one(numbers, scales, output_dtype=torch.bfloat16)
    folder, stored = stored_in(tmp_path / "one", "fp8", (256, 384), numbers, scales, (128, 128))
    with folder:
        assert_same_bits(read_whole(folder, stored), theirs)
    assert_same_bits(by_hand_fp8(numbers[:2], scales, (128, 128)), theirs[:2])


def test_all_bytes_and_exponents_of_mxfp4_are_as_transformers_has_them(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    # 252 exponents, each with every byte: larger ones leave bfloat16
    codes = torch.arange(253, dtype=torch.uint8)
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 16).expand(1, 253, 16, 16).contiguous()
    scales = codes[None, :, None].expand(1, 253, 16).contiguous()
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert theirs.isfinite().all()
    folder, stored = stored_in(tmp_path / "one", "mxfp4", (1, 512, 253), blocks, scales, (1, 32))
    with folder:
        assert_same_bits(read_whole(folder, stored), theirs)


def hf(*words: str | Path) -> int:
    return cli.main(["hf", *map(str, words)])


def test_a_run_of_it_is_equal_to_it_and_is_exported_as_it_was_meant(
    quantised: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tmp_path / "start", tmp_path / "out"
    assert hf("import", quantised.path, "--out", run) == 0
    n_quantised = sum(value.dtype.itemsize == 1 for value in tensors_of(quantised.path).values())
    if quantised.form == "mxfp4":
        # numbers and scales
        n_quantised //= 2
    assert f"dequantised: {n_quantised} tensors in {quantised.form}, now in bf16" in capsys.readouterr().out
    assert hf("export", run, out) == 0
    exported = tensors_of(out)
    assert exported.keys() == quantised.meant.keys()
    for name, value in quantised.meant.items():
        assert_same_bits(exported[name], value)
    config = config_of(out)
    assert config["torch_dtype"] == "bfloat16"
    assert "quantization_config" not in config
    capsys.readouterr()
    for folder in (quantised.path, out):
        assert hf("verify", run, folder) == 0
        told = capsys.readouterr().out
        assert f"tensors: {len(exported)} of {len(exported)} are equal to the bit\n" in told
        assert "with transformers in fp32" in told


def test_a_number_that_differs_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, run = tmp_path / "model", tmp_path / "start"
    fp8_folder(path)
    hf("import", path, "--out", run)
    tensors = tensors_of(path)
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"][1, 1] *= 2
    rewrite(path, tensors)
    assert hf("verify", run, path, "--tensors-only") == 70
    assert "model.layers.0.mlp.up_proj.weight: the largest difference is" in capsys.readouterr().out


QUERY = "model.layers.0.self_attn.q_proj.weight"
DOWN = "model.layers.0.mlp.experts.down_proj"
Tensors = dict[str, Tensor]
# What is changed of the tensors and of quantization_config, and what is said then.
WRONG: dict[str, tuple[str, Callable[[Tensors, dict], object], str]] = {
    "another method": (
        "fp8",
        lambda t, q: q.update(quant_method="gptq", bits=4),
        'quantization_config.quant_method="gptq" is not read, only fp8 and mxfp4 are; dequantise the folder',
    ),
    "no method": ("fp8", lambda t, q: q.pop("quant_method"), "quantization_config.quant_method is missing"),
    "another key": ("fp8", lambda t, q: q.update(group_size=3), "quantization_config.group_size is mapped to nothing"),
    "another format": ("fp8", lambda t, q: q.update(fmt="e5m2"), 'quantization_config.fmt="e5m2": only "e4m3"'),
    "activations too": (
        "fp8",
        lambda t, q: q.update(activation_scheme="static"),
        'quantization_config.activation_scheme="static": only "dynamic"',
    ),
    "blocks of one size": ("fp8", lambda t, q: q.update(weight_block_size=[16]), "weight_block_size=[16] must be two"),
    "scales of larger blocks": (
        "fp8",
        lambda t, q: q.update(weight_block_size=[16, 16]),
        f"{QUERY}_scale_inv has shape [3, 4], expected [3, 2], one for each block of 16 x 16 of [48, 32]",
    ),
    "scales that are missing": (
        "fp8",
        lambda t, q: t.pop(f"{QUERY}_scale_inv"),
        f"{QUERY}_scale_inv is missing: {QUERY} is quantised, by fp8",
    ),
    "numbers that are missing": ("fp8", lambda t, q: t.pop(QUERY), f"{QUERY} is missing: {QUERY}_scale_inv is quant"),
    "numbers in bfloat16": (
        "fp8",
        lambda t, q: t.update({QUERY: t[QUERY].to(torch.bfloat16)}),
        f"{QUERY} has dtype BF16 and scales, where quant_method=fp8 has F8_E4M3",
    ),
    "numbers of the other eight bits": (
        "fp8",
        lambda t, q: (t.update({QUERY: t[QUERY].to(torch.float8_e5m2)}), t.pop(f"{QUERY}_scale_inv")),
        f"{QUERY} has dtype F8_E5M2: quant_method=fp8 has no such numbers",
    ),
    "scales in bytes": (
        "fp8",
        lambda t, q: t.update({f"{QUERY}_scale_inv": t[f"{QUERY}_scale_inv"].to(torch.uint8)}),
        f"{QUERY}_scale_inv has dtype U8, expected F32, BF16, F16",
    ),
    "numbers of another shape": (
        "fp8",
        lambda t, q: t.update({QUERY: t[QUERY][:40].contiguous()}),
        f"{QUERY} has shape [40, 32], the configuration makes it [48, 32]",
    ),
    "a vector": (
        "fp8",
        lambda t, q: t.update(
            {"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn), "model.norm.weight_scale_inv": torch.ones(4)}
        ),
        "model.norm.weight has dtype F8_E4M3 and shape [32]: only matrices have blocks",
    ),
    "a scale that is NaN": (
        "fp8",
        lambda t, q: t[f"{QUERY}_scale_inv"].fill_(torch.nan),
        f"{QUERY} holds NaN or infinities",
    ),
    "scales of nothing": (
        "fp8",
        lambda t, q: t.update({"model.x.weight_scale_inv": torch.ones(1, 1)}),
        "model.x.weight_scale_inv is left over",
    ),
    "experts' scales that are missing": (
        "mxfp4",
        lambda t, q: t.pop(f"{DOWN}_scales"),
        f"{DOWN}_scales is missing: {DOWN}_blocks is quantised, by mxfp4",
    ),
    "experts' numbers that are missing": (
        "mxfp4",
        lambda t, q: t.pop(f"{DOWN}_blocks"),
        f"{DOWN}_blocks is missing: {DOWN}_scales is quantised, by mxfp4",
    ),
    "experts' scales of another shape": (
        "mxfp4",
        lambda t, q: t.update({f"{DOWN}_scales": t[f"{DOWN}_scales"][..., :2].contiguous()}),
        f"{DOWN}_scales has shape [6, 64, 2], the configuration makes it [6, 64, 3]",
    ),
    "experts' numbers the other way round": (
        "mxfp4",
        lambda t, q: t.update({f"{DOWN}_blocks": t[f"{DOWN}_blocks"].transpose(1, 2).contiguous()}),
        f"{DOWN}_blocks has shape [6, 3, 64, 16], the configuration makes it [6, 64, 3, 16]",
    ),
    "experts' scales as numbers": (
        "mxfp4",
        lambda t, q: t.update({f"{DOWN}_scales": t[f"{DOWN}_scales"].to(torch.bfloat16)}),
        f"{DOWN}_scales has dtype BF16, where quant_method=mxfp4 has U8",
    ),
    "an exponent that is NaN": (
        "mxfp4",
        lambda t, q: t[f"{DOWN}_scales"].fill_(255),
        f"{DOWN} holds NaN or infinities",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_one_clear_error(what: str, tmp_path: Path) -> None:
    form, spoil, message = WRONG[what]
    path = tmp_path / "model"
    FOLDERS[form](path)
    tensors = tensors_of(path)
    quantization = dict(config_of(path)["quantization_config"])
    spoil(tensors, quantization)
    rewrite(path, tensors, quantization_config=quantization)
    with pytest.raises(CheckpointError) as caught:
        read_all(path)
    assert message in str(caught.value)


def read_all(path: Path) -> None:
    with open_hf_folder(path) as folder:
        weights = weights_of(folder)
        for name in weights.names():
            weights.read(name)


def test_quantised_tensors_need_a_word_of_how(tmp_path: Path) -> None:
    path = tmp_path / "model"
    fp8_folder(path)
    rewrite(path, tensors_of(path), quantization_config=None)
    with open_hf_folder(path) as folder, pytest.raises(CheckpointError, match="has no quantization_config that says"):
        weights_of(folder)
