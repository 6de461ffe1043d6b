"""`megaspec generate` with folders of Hugging Face's and with runs, as a user types it."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megaspec import cli
from tests.hf.folders import config_of, save_model, save_tokenizer

NAMES = ("llama 3.1", "gpt2", "qwen3 with experts", "gemma3")
PROMPT = "a cat"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """As transformers writes them, with a tokenizer."""
    found = {}
    for name in NAMES:
        found[name] = save_model(name, tmp_path_factory.mktemp("hf") / "model")
        save_tokenizer(found[name])
    return found


def copied(folder: Path, place: Path) -> Path:
    return shutil.copytree(folder, place / "model")


def lines_of(capfd: pytest.CaptureFixture[str], *words: object) -> list[dict[str, Any]]:
    capfd.readouterr()
    assert cli.main(["generate", *map(str, words), "--json"]) == 0, capfd.readouterr().err
    return [json.loads(line) for line in capfd.readouterr().out.splitlines()]


def refused(capfd: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    capfd.readouterr()
    code = cli.main(["generate", *map(str, words)])
    said = capfd.readouterr().err
    assert "Traceback" not in said
    return code, said


def their_texts(folder: Path, prompts: list[str], *, tokens: int) -> list[tuple[list[int], str]]:
    """Transformers' likeliest tokens, up to one that ends a text, and what they are in text."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for prompt in prompts:
        asked = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**asked, do_sample=False, max_new_tokens=tokens, pad_token_id=0)[0].tolist()
        before = tokenizer.decode(ids[: asked["input_ids"].shape[1]])
        new = ids[asked["input_ids"].shape[1] :]
        if new[-1] in _as_list(model.generation_config.eos_token_id):
            ids = ids[:-1]
            new = new[:-1]
        found.append((new, tokenizer.decode(ids).removeprefix(before)))
    return found


def _as_list(ids: int | list[int]) -> list[int]:
    return ids if isinstance(ids, list) else [ids]


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_writes_what_transformers_writes(name: str, folders: dict[str, Path], capfd: Any) -> None:
    prompts = [PROMPT, "the dog said: nothing at all", "x"]
    found = lines_of(capfd, f"hf:{folders[name]}", *prompts, "--tokens", 20, "--temperature", 0)
    for line, (ids, text) in zip(found, their_texts(folders[name], prompts, tokens=20), strict=True):
        assert (line["text"], line["tokens"]) == (text, len(ids))
        assert line["end"] == ("tokens" if len(ids) == 20 else "end_of_text")


def test_every_token_that_ends_texts_does(folders: dict[str, Path], tmp_path: Path, capfd: Any) -> None:
    folder = copied(folders["gpt2"], tmp_path)
    asked = (f"hf:{folder}", PROMPT, "--tokens", 12, "--temperature", 0)
    (whole,) = lines_of(capfd, *asked)
    assert whole["end"] == "tokens"
    ((ids, _),) = their_texts(folder, [PROMPT], tokens=12)
    last = max(n for n in range(1, 12) if ids[n] not in ids[:n])
    generation = config_of(folder) | {"eos_token_id": [90, ids[last]]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (cut,) = lines_of(capfd, *asked)
    assert (cut["end"], cut["tokens"]) == ("end_of_text", last)
    assert whole["text"].startswith(cut["text"])
    assert their_texts(folder, [PROMPT], tokens=12)[0][0] == ids[:last]
    (ignored,) = lines_of(capfd, *asked, "--ignore-eos")
    assert ignored["text"] == whole["text"]
    # without one, config.json says; without that, the tokenizer
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": ids[last]}))
    assert lines_of(capfd, *asked)[0]["tokens"] == last
    for bad in ("two", [], [True], -1, 1.5):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": bad}))
        code, said = refused(capfd, *asked)
        assert code == 66
        assert "generation_config.json: eos_token_id=" in said


def test_a_tokenizer_puts_its_own_first_token_in_front(folders: dict[str, Path], tmp_path: Path, capfd: Any) -> None:
    folder = copied(folders["llama 3.1"], tmp_path)
    asked = (f"hf:{folder}", PROMPT, "--tokens", 8, "--temperature", 0)
    (without,) = lines_of(capfd, *asked)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (found,) = lines_of(capfd, *asked)
    assert found["prompt_tokens"] == without["prompt_tokens"] + 1
    assert found["text"] != without["text"]
    ((_, text),) = their_texts(folder, [PROMPT], tokens=8)
    assert found["text"] == text
    # an imported run does the same
    run = tmp_path / "run"
    assert cli.main(["hf", "import", str(folder), "--out", str(run)]) == 0
    assert lines_of(capfd, run, *asked[1:])[0]["text"] == text


@pytest.mark.usefixtures("warm_launches")
def test_ranks_write_what_one_process_does(folders: dict[str, Path], tmp_path: Path, capfd: Any) -> None:
    asked = (f"hf:{folders['qwen3 with experts']}", PROMPT, "dog", "--tokens", 8, "--top-p", 0.9, "--seed", 3)
    alone = lines_of(capfd, *asked)
    assert lines_of(capfd, *asked, "parallelism.tp=2", "parallelism.ep=2") == alone
    assert lines_of(capfd, *asked, "--gpus", 2) == alone
    out = tmp_path / "texts.jsonl"
    assert cli.main(["generate", *map(str, asked), "parallelism.pp=2", "--out", str(out)]) == 0
    assert [json.loads(line) for line in out.read_text().splitlines()] == alone
    assert lines_of(capfd, *asked, "--cache", "none", "--batch", 1) == alone


def test_prompts_of_files(folders: dict[str, Path], tmp_path: Path, capfd: Any) -> None:
    folder = f"hf:{folders['gpt2']}"
    objects = tmp_path / "prompts.jsonl"
    objects.write_text('{"prompt": "a cat", "id": 7}\n\n{"prompt": "dog"}\n')
    texts = tmp_path / "prompts.txt"
    texts.write_text("one\r\n\ntwo \n")
    asked = ("--tokens", 5, "--samples", 2, "--temperature", 5)
    found = lines_of(capfd, folder, "first", "--prompts", objects, "--prompts", texts, *asked)
    prompts = [line["prompt"] for line in found]
    assert prompts[::2] == prompts[1::2] == ["first", "a cat", "dog", "one", "two "]
    assert [line["sample"] for line in found] == [0, 1] * 5
    assert [line.get("id") for line in found] == [None, None, 7, 7] + [None] * 6
    assert found[2]["text"] != found[3]["text"]
    assert lines_of(capfd, folder, "two ", *asked) == found[-2:]
    objects.write_text('{"prompt": 1}\nno\n{"prompt": "a", "text": "b"}\n[]\n{"prompt": "\\ud800"}\n')
    code, said = refused(capfd, folder, "--prompts", objects)
    assert code == 65
    for number, why in (
        (1, 'must be an object with a text under "prompt"'),
        (2, "is no JSON"),
        (3, "has the key text"),
    ):
        assert f"prompts.jsonl:{number}: {why}" in said
    assert "prompts.jsonl:4: must be an object" in said
    assert "prompts.jsonl:5: its prompt is not valid Unicode" in said
    objects.write_text("\n")
    texts.write_bytes(b"\xff")
    for path, why in (
        (objects, "holds no line"),
        (texts, "is no UTF-8"),
        (tmp_path / "none.txt", "can't be read: No such file"),
        (tmp_path / "prompts.csv", "must end with .jsonl"),
    ):
        code, said = refused(capfd, folder, "--prompts", path)
        assert code == 65
        assert why in said


def test_a_terminal_shows_prompt_and_text(folders: dict[str, Path], capfd: Any) -> None:
    asked = [f"hf:{folders['gpt2']}", "a cat", "dog", "--temperature", "0", "--tokens"]
    found = lines_of(capfd, *asked, 6)
    capfd.readouterr()
    assert cli.main(["generate", *asked, "6"]) == 0
    told = capfd.readouterr()
    assert told.out == f"a cat{found[0]['text']}\n\ndog{found[1]['text']}\n"
    assert told.err == ""
    assert cli.main(["generate", *asked, "100", "--batch", "1", "--ignore-eos"]) == 0
    told = capfd.readouterr()
    assert told.err == "megaspec: the text ends where the model's positions do: model.max_seq_len=64\n" * 2
    assert cli.main(["generate", *asked, "0"]) == 0
    assert capfd.readouterr().out == "a cat\n\ndog\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("parallelism.cp=2",), "parallelism.cp=2 divides a text among ranks, none of which could keep its keys"),
        (("parallelism.dp_strategy=fsdp",), "parallelism.dp_strategy=fsdp shares out what only training has"),
        (("parallelism.tp=3",), "parallelism.tp=3 must divide model.n_heads=4"),
        (("parallelism.ep=2",), "parallelism.ep=2"),
        (
            ("paralelism.tp=2",),
            "paralelism is nothing that can be set here; it must be parallelism, kernels, precision",
        ),
        (("train.steps=3",), "train is nothing that can be set here"),
        (("parallelism.tpp=2",), "did you mean tp, pp or etp?"),
        (("kernels.compile=block",), "set kernels.compile=none"),
        (("precision=fp8",), "set precision=bf16"),
        (("parallelism.tp=2", "parallelism.tp=4"), "parallelism.tp is set twice"),
        (("--gpus", "3", "parallelism.tp=2"), "parallelism.tp=2 must divide launcher.ranks=3"),
        (("--gpus", "3", "launcher.ranks=2"), "launcher.ranks=2 and --gpus 3 say the same thing differently"),
        (("--step", "4"), "has no steps; leave it out"),
    ],
)
def test_layouts_that_make_no_sense_are_refused(words: Any, said: str, folders: dict[str, Path], capfd: Any) -> None:
    code, told = refused(capfd, f"hf:{folders['gpt2']}", PROMPT, *words)
    assert code == 64, told
    assert said in told


def test_a_text_with_an_equals_sign_is_a_text(folders: dict[str, Path], capfd: Any) -> None:
    texts = ["x=1", "f(a.b=2)", "A.b=2", "a. b=2"]
    found = lines_of(capfd, f"hf:{folders['gpt2']}", *texts, "--tokens", 1)
    assert [line["prompt"] for line in found] == texts


def test_folders_that_are_damaged(folders: dict[str, Path], tmp_path: Path, capfd: Any) -> None:
    code, said = refused(capfd, f"hf:{tmp_path / 'none'}", PROMPT)
    assert code == 66, said
    folder = copied(folders["gpt2"], tmp_path)
    (folder / "tokenizer.json").unlink()
    code, said = refused(capfd, f"hf:{folder}", PROMPT)
    assert code == 65
    assert "holds no tokenizer, which text needs" in said
    shutil.copy(folders["gpt2"] / "tokenizer.json", folder)
    code, said = refused(capfd, f"hf:{folder}", "cat" * 40)
    assert code == 65
    assert "prompt 1 has 120 tokens, which leaves no room: model.max_seq_len=64" in said
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 90}))
    code, said = refused(capfd, f"hf:{folder}", PROMPT)
    assert code == 66
    (folder / "config.json").write_text(json.dumps(config | {"n_layer": 3}))
    code, said = refused(capfd, f"hf:{folder}", PROMPT)
    assert code == 66
    assert "transformer.h.2.ln_1.weight is missing" in said
    (folder / "config.json").write_text(json.dumps(config | {"made_up": 3}))
    code, said = refused(capfd, f"hf:{folder}", PROMPT)
    assert code == 66
    assert "made_up" in said


def test_a_file_that_is_there_is_not_written_over(folders: dict[str, Path], tmp_path: Path, capfd: Any) -> None:
    out = tmp_path / "texts.jsonl"
    out.write_text("mine")
    code, said = refused(capfd, f"hf:{folders['gpt2']}", PROMPT, "--out", out)
    assert code == 64
    assert f"--out {out} is there already; name another file, or remove it" in said
    assert out.read_text() == "mine"
