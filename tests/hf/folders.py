"""Folders of Hugging Face's on the disk, as transformers writes them, and the tensors in them."""

import inspect
import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from megaspec.data.tokenizer import BPE_EOD, train_bpe
from megaspec.hf.companions import TOKENIZER, TOKENIZER_CONFIG
from megaspec.hf.family import typed
from megaspec.hf.names import weight_table
from megaspec.hf.table import FAMILIES
from megaspec.hf.writing import out_tensors, write_folder
from megaspec.model.decoder.spec import DecoderSpec
from tests.hf.models import InMemory, their_model

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"


def save_model(name: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """A random model of a tiny configuration (tiny.py)."""
    model = their_model(name).to(dtype)
    model.save_pretrained(folder)
    return folder


def random_folder(folder: Path, model: DecoderSpec, family: str, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """A folder that we write, in fp32. -> its values by our stored names"""
    table = weight_table(model.facts, FAMILIES[family].names(model))
    generator = torch.Generator().manual_seed(seed)
    values = {name: torch.randn(ours.shape, generator=generator) / 8 for name, ours in table.ours.items()}
    weights = InMemory(values)
    config = {"model_type": family, **FAMILIES[family].write(model)}
    write_folder(folder, weights, out_tensors(table, weights, None), config=config, others={}, shard_bytes=1 << 30)
    return values


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of 96 tokens with a chat template, beside a model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?'-()[]{}<>|/+*=_#@%&$Ġ"
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for letter in letters:
        vocab[letter] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=TEMPLATE
    )
    wrapped.save_pretrained(folder)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor, by name."""
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def config_of(folder: Path) -> dict[str, object]:
    return json.loads((folder / "config.json").read_text())


def assert_same_tensors(one: Path, other: Path) -> None:
    """To the bit, in the same formats."""
    a = tensors_of(one)
    b = tensors_of(other)
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert value.dtype == b[name].dtype, name
        assert torch.equal(value.view(torch.uint8), b[name].view(torch.uint8)), name


def small_folder(folder: Path) -> None:
    """A Llama with random weights and a tokenizer of 300 tokens, as the README's commands find it."""
    section = {
        "kind": "decoder",
        "n_layers": 2,
        "d_model": 32,
        "n_heads": 4,
        "n_kv_heads": 2,
        "d_head": 8,
        "d_ffn": 48,
        "vocab_size": 300,
        "max_seq_len": 64,
    }
    random_folder(folder, typed(section), "llama")
    tokenizer = train_bpe([inspect.getsource(inspect)], 300)
    (folder / TOKENIZER).write_bytes(tokenizer.text)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": BPE_EOD, "chat_template": TEMPLATE}
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(config))
