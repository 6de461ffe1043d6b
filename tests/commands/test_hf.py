"""`megaspec hf`: a folder becomes a run and a folder again; what is wrong with one is told before a file is written."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaspec import cli
from megaspec.commands.hf_families import keys_of
from megaspec.compose.compose import compose
from megaspec.hf.table import FAMILIES, read_model
from megaspec.resolve.resolver import resolve
from megaspec.rules.belonging import is_imported
from megaspec.rules.run_facts import Facts
from megaspec.run_folder import read_run
from tests.hf.folders import TEMPLATE, assert_same_tensors, config_of, save_model, save_tokenizer, tensors_of
from tests.hf.tiny import TINY
from tests.runtime.specs import TARGET

NAMES = ("gpt2", "llama 3.1", "qwen3 with experts", "gpt_oss", "glm4 with experts", "llama4")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A folder of each family; Llama's in bfloat16, with a tokenizer."""
    root = tmp_path_factory.mktemp("folders")
    found = {}
    for name in NAMES:
        dtype = torch.bfloat16 if name.startswith("llama") else torch.float32
        found[name] = save_model(name, root / name.replace(" ", "-"), dtype=dtype)
    save_tokenizer(found["llama 3.1"])
    return found


@pytest.fixture
def llama(folders, tmp_path) -> Path:
    """One's own copy, to be changed."""
    return shutil.copytree(folders["llama 3.1"], tmp_path / "model")


def hf(*words: str | Path) -> int:
    return cli.main(["hf", *map(str, words)])


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_comes_back_to_the_bit(name, folders, tmp_path, capsys) -> None:
    run, out = tmp_path / "start", tmp_path / "out"
    assert hf("import", folders[name], "--out", run) == 0
    assert hf("export", run, out, "--shard-size", "40KB") == 0
    assert_same_tensors(folders[name], out)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors_of(out).values())
    before = config_of(folders[name])
    now = config_of(out)
    assert now["architectures"] == before["architectures"]
    assert now["torch_dtype"] == before["dtype"]
    assert (now["bos_token_id"], now["eos_token_id"]) == (1, 2)
    assert "rope_parameters" not in now
    assert (out / "generation_config.json").read_bytes() == (folders[name] / "generation_config.json").read_bytes()
    capsys.readouterr()
    assert hf("verify", run, out) == 0
    told = capsys.readouterr().out
    n_tensors = len(tensors_of(out))
    assert f"tensors: {n_tensors} of {n_tensors} are equal to the bit\n" in told
    assert "with transformers in fp32" in told
    # which reports what is missing or left over, and goes on without it
    from transformers import AutoModelForCausalLM

    _, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info


def test_layers_that_predict_further_tokens_are_left_out_and_named(folders, tmp_path, capsys) -> None:
    source = shutil.copytree(folders["glm4 with experts"], tmp_path / "model")
    values = load_file(source / "model.safetensors")
    values |= {"model.layers.3.eh_proj.weight": torch.ones(32, 64), "model.layers.3.enorm.weight": torch.ones(32)}
    save_file(values, source / "model.safetensors")
    assert hf("import", source, "--out", tmp_path / "start") == 0
    assert "left out: 2 tensors, of layers that predict further tokens" in capsys.readouterr().out
    hf("export", tmp_path / "start", tmp_path / "out")
    assert config_of(tmp_path / "out")["num_nextn_predict_layers"] == 0
    assert_same_tensors(folders["glm4 with experts"], tmp_path / "out")
    # a layer that is neither the model's nor the next one is a mistake
    values["model.layers.4.enorm.weight"] = torch.ones(32)
    save_file(values, source / "model.safetensors")
    assert hf("import", source, "--out", tmp_path / "other") == 66
    assert "model.layers.4.enorm.weight is left over" in capsys.readouterr().err


def test_a_tokenizer_stays_byte_for_byte_and_its_template_stands_in_both_places(folders, tmp_path) -> None:
    source, run, out = folders["llama 3.1"], tmp_path / "start", tmp_path / "out"
    hf("import", source, "--out", run)
    hf("export", run, out)
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert (out / "chat_template.jinja").read_text() == TEMPLATE
    there = json.loads((source / "tokenizer_config.json").read_text())
    assert json.loads((out / "tokenizer_config.json").read_text()) == there | {"chat_template": TEMPLATE}
    assert cli.main(["generate", str(run), "abc", "--tokens", "3"]) == 0
    from transformers import AutoTokenizer

    told = AutoTokenizer.from_pretrained(out).apply_chat_template([{"role": "u", "content": "x"}], tokenize=False)
    assert told == "<|u|>x"


def test_an_imported_run_is_a_run_of_weights_alone(folders, tmp_path, capsys) -> None:
    run = tmp_path / "start"
    hf("import", folders["gpt2"], "--out", run)
    assert cli.main(["checkpoint", "verify", str(run)]) == 0
    assert json.loads((run / "spec.json").read_text())["weights_from"]["family"] == "gpt2"
    capsys.readouterr()
    for words in (["resume", str(run)], ["resume", str(run), "--fork", "new"]):
        assert cli.main(words) == 64
        assert f"init.load={run}" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    # and is still one that no run has trained when its weights are rounded
    words = ["checkpoint", "save", str(run), "--out", str(tmp_path / "rounded"), "--dtype", "bf16"]
    assert cli.main(words) == 0
    assert is_imported(read_run(tmp_path / "rounded").spec)
    assert json.loads((tmp_path / "rounded/spec.json").read_text())["weights_from"]["family"] == "gpt2"


def test_names_without_the_first_word_are_read(folders, tmp_path) -> None:
    """GPT-2 on the hub was saved without its head, which is tied."""
    bare = shutil.copytree(folders["gpt2"], tmp_path / "bare")
    values = load_file(bare / "model.safetensors")
    values = {name.removeprefix("transformer."): value for name, value in values.items()}
    values["h.0.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.uint8)
    save_file(values, bare / "model.safetensors")
    assert hf("import", bare, "--out", tmp_path / "start") == 0
    assert hf("export", tmp_path / "start", tmp_path / "out") == 0
    assert_same_tensors(folders["gpt2"], tmp_path / "out")
    # some with it and some without are two halves of something
    values["transformer.ln_f.weight"] = values.pop("ln_f.weight")
    save_file(values, bare / "model.safetensors")
    assert hf("import", bare, "--out", tmp_path / "again") == 66
    assert not (tmp_path / "again").exists()


def test_weights_are_rounded_where_that_is_asked_for(folders, tmp_path, capsys) -> None:
    run, out = tmp_path / "start", tmp_path / "out"
    hf("import", folders["gpt2"], "--out", run)
    assert hf("export", run, out, "--dtype", "bf16") == 0
    assert {value.dtype for value in tensors_of(out).values()} == {torch.bfloat16}
    assert config_of(out)["torch_dtype"] == "bfloat16"
    assert hf("verify", run, out) == 0
    told = capsys.readouterr().out
    assert "the run's rounded to bfloat16" in told
    # rounding is no difference between the two computations
    assert re.search(r"the largest difference is [0-9.]+e-0[5-9]", told), told


def change(folder: Path, name: str, value: torch.Tensor | None) -> None:
    values = load_file(folder / "model.safetensors")
    values.pop(name, None)
    if value is not None:
        values[name] = value
    save_file(values, folder / "model.safetensors")


def configure(folder: Path, **keys: object) -> None:
    config = config_of(folder) | keys
    (folder / "config.json").write_text(json.dumps(config))


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def header_length(folder: Path, length: int) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(length.to_bytes(8, "little") + content[8:])


def two_shards(folder: Path, second: str) -> None:
    """An index that has every tensor but the first in `second`."""
    names = list(load_file(folder / "model.safetensors"))
    weight_map = dict.fromkeys(names, second) | {names[0]: "model.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def link(folder: Path) -> None:
    blob = folder / "blob"
    (folder / "model.safetensors").rename(blob)
    (folder / "model.safetensors").symlink_to(blob)


def retokenize(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["more"] = 100_000
    path.write_text(json.dumps(content))


def other_dtype(folder: Path) -> None:
    """The header says four bytes for what has two."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"dtype":"BF16"', b'"dtype":"F32" ', 1))


NORM = "model.norm.weight"
BAD_FOLDERS = {
    "no such folder": (lambda folder: shutil.rmtree(folder), "is no folder"),
    "a family that is not said": (lambda folder: configure(folder, model_type="mamba"), "model_type=mamba can't be"),
    "a key that is mapped to nothing": (lambda folder: configure(folder, router_secret=3), "router_secret=3 is mapped"),
    "a missing tensor": (lambda folder: change(folder, NORM, None), "model.norm.weight is missing"),
    "a tensor too many": (lambda folder: change(folder, "model.x", torch.ones(2)), "model.x is left over"),
    "NaN": (lambda folder: change(folder, NORM, torch.full((32,), torch.nan)), "model.norm.weight holds NaN"),
    "Inf": (lambda folder: change(folder, NORM, torch.full((32,), torch.inf)), "model.norm.weight holds NaN or inf"),
    "eight bits": (
        lambda folder: change(folder, NORM, torch.ones(32, dtype=torch.float8_e4m3fn)),
        "quantised weights are not read",
    ),
    "cut": (cut, "it is cut or damaged"),
    "a header that is longer than the file": (lambda folder: header_length(folder, 1 << 20), "its header says that it"),
    "a header of 10 GB": (lambda folder: header_length(folder, 10**10), "has 10,000,000,000 bytes, expected at most"),
    "a header that ends early": (lambda folder: header_length(folder, 40), "is no JSON that can be read"),
    "another dtype": (other_dtype, "where dtype=F32 and shape="),
    "a missing shard": (lambda folder: two_shards(folder, "model-2.safetensors"), "is missing, and model.safetensors"),
    "a file outside": (lambda folder: two_shards(folder, "../x.safetensors"), "must be a .safetensors file of this"),
    "a link": (link, "model.safetensors"),
    "more layers": (
        lambda folder: configure(folder, num_hidden_layers=9),
        "self_attn.q_proj.weight is missing",
    ),
    "fewer layers": (lambda folder: configure(folder, num_hidden_layers=1), "is left over: the configuration has no"),
    "another tokenizer": (retokenize, "it is the tokenizer of another model"),
    "pickle": (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "are never read"),
}


@pytest.mark.parametrize("what", BAD_FOLDERS)
def test_what_is_wrong_with_a_folder_is_told_and_nothing_is_written(what, llama, tmp_path, capsys) -> None:
    spoil, message = BAD_FOLDERS[what]
    spoil(llama)
    assert hf("import", llama, "--out", tmp_path / "start") == 66
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir() if path != llama] == []


@pytest.mark.parametrize("what", ["cut", "NaN", "another tokenizer", "a missing tensor"])
def test_no_run_is_made_of_such_a_folder_either(what, llama, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hf("recipe", llama, "--out", "recipes/mine.yaml") == 0
    spoil, message = BAD_FOLDERS[what]
    spoil(llama)
    words = ["recipe=mine", f"init.from_hf={llama}", "launcher.ranks=1", "train.steps=1", "run_dir=run"]
    words += ["data.seq_len=16", "train.global_batch=1", "optim.schedule.warmup_steps=0"]
    code = cli.main(["train", *words])
    assert code in (64, 66)
    error = capsys.readouterr().err
    assert "Traceback" not in error
    if what == "NaN":
        # found by the rank that reads it
        log = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
        error += log
    assert message in error


def test_nothing_that_exists_is_written_over(folders, tmp_path, capsys) -> None:
    run, out = tmp_path / "start", tmp_path / "out"
    hf("import", folders["gpt2"], "--out", run)
    assert hf("import", folders["gpt2"], "--out", run) == 73
    assert hf("export", run, out) == 0
    assert hf("export", run, out) == 73
    assert capsys.readouterr().err.count("exists; name one") == 2


def test_what_differs_is_told_by_name(folders, llama, tmp_path, capsys) -> None:
    run = tmp_path / "start"
    hf("import", folders["llama 3.1"], "--out", run)
    change(llama, NORM, load_file(llama / "model.safetensors")[NORM] + 0.5)
    capsys.readouterr()
    assert hf("verify", run, llama, "--tensors-only") == 70
    told = capsys.readouterr().out
    assert "tensors: 20 of 21 are equal to the bit" in told
    assert "model.norm.weight: the largest difference is 5.0" in told
    configure(llama, rms_norm_eps=0.5)
    assert hf("verify", run, llama) == 70
    assert "model.norm.eps=0.02, config.json says 0.5" in capsys.readouterr().out
    change(llama, NORM, None)
    assert hf("verify", run, llama) == 70
    assert "model.norm.weight is missing" in capsys.readouterr().out
    # one tensor's weights are right and the configuration turns them another way
    fresh = shutil.copytree(folders["llama 3.1"], tmp_path / "fresh")
    config = config_of(fresh)
    config["rope_parameters"]["rope_theta"] = 20000.0
    configure(fresh, **config)
    assert hf("verify", run, fresh) == 70
    assert "model.positions.base=10000.0, config.json says 20000.0" in capsys.readouterr().out


def test_a_model_is_said_by_the_family_that_it_is_from_or_one_that_is_asked_for(folders, tmp_path, capsys) -> None:
    run = tmp_path / "start"
    hf("import", folders["llama 3.1"], "--out", run)
    assert hf("export", run, tmp_path / "mistral", "--family", "mistral") == 0
    assert hf("import", tmp_path / "mistral", "--out", tmp_path / "again") == 0
    # Llama is the first that says it, and Mistral the one that it is from
    assert hf("export", tmp_path / "again", tmp_path / "back") == 0
    assert config_of(tmp_path / "back")["model_type"] == "mistral"
    assert_same_tensors(folders["llama 3.1"], tmp_path / "back")
    capsys.readouterr()
    assert hf("export", run, tmp_path / "x", "--family", "qwen2") == 64
    error = capsys.readouterr().err
    assert "--family qwen2 can't say this model: model.attention.qkv_bias=False, where qwen2 has True" in error
    assert "--family llama, mistral or smollm3 can" in error
    assert hf("export", run, tmp_path / "x", "--family", "lama") == 64
    assert "did you mean llama?" in capsys.readouterr().err
    assert hf("export", run, tmp_path / "x", "--shard-size", "5") == 64
    assert not (tmp_path / "x").exists()


def test_a_model_that_no_family_says_is_refused_with_each_reason(folders, tmp_path, capsys) -> None:
    run = tmp_path / "start"
    hf("import", folders["gpt2"], "--out", run)
    spec = json.loads((run / "spec.json").read_text())
    spec["model"]["embedding_scale"] = 2.0
    (run / "spec.json").write_text(json.dumps(spec))
    assert hf("export", run, tmp_path / "out") == 64
    error = capsys.readouterr().err
    assert "gpt2: model.embedding_scale=2.0, where gpt2 has 1.0" in error
    assert all(f"\n{name}: " in error for name in FAMILIES)


@pytest.mark.parametrize("name", TINY)
def test_a_recipe_of_a_folder_has_its_model(name, tmp_path, capsys, monkeypatch) -> None:
    from transformers import AutoConfig

    model_type, keys = TINY[name]
    config = AutoConfig.for_model(model_type, **keys)
    config.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert hf("recipe", "model", "--out", "recipes/mine.yaml") == 0
    assert capsys.readouterr().out == "recipes/mine.yaml: megaspec train recipe=mine init.from_hf=model\n"
    composed = compose("mine")
    spec = resolve(composed.recipe, TARGET, Facts(run_dir="run"), composed.origins)
    assert spec.model == read_model(config_of(tmp_path / "model"), name)
    # what every one has is left out
    text = (tmp_path / "recipes" / "mine.yaml").read_text()
    assert "vocab_pad_to" not in text
    assert hf("recipe", "model", "--out", "recipes/mine.yaml") == 73


def test_families_and_their_keys_are_listed(capsys) -> None:
    assert hf("families") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(FAMILIES)
    assert hf("families", "qwen3_moe") == 0
    told = capsys.readouterr().out
    assert "norm_topk_prob" in told
    assert hf("families", "qwen") == 64
    for name, (model_type, _) in TINY.items():
        from transformers import AutoConfig

        theirs = AutoConfig.for_model(model_type, **TINY[name][1]).to_dict()
        asked = keys_of(FAMILIES[model_type])
        from megaspec.hf.config import ABOUT, PLAIN

        assert not [key for key in theirs if key not in asked and key not in ABOUT and key not in PLAIN], name


def test_logits_that_need_more_memory_than_there_is_are_refused_before_anything_is_read(
    folders, tmp_path, capsys, monkeypatch
) -> None:
    run, out = tmp_path / "start", tmp_path / "out"
    hf("import", folders["gpt2"], "--out", run)
    hf("export", run, out)
    monkeypatch.setattr("megaspec.commands.hf_verify.available_memory", lambda: 10_000)
    capsys.readouterr()
    assert hf("verify", run, out) == 64
    told = capsys.readouterr()
    assert "0.0 GiB are free; compare tensors alone with --tensors-only" in told.err
    assert told.out == ""
    assert hf("verify", run, out, "--tensors-only") == 0
