"""Text from a model, one token at a time."""

# B sequences, T tokens, V vocabulary

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megaspec.checkpoint.comm import SoloComm
from megaspec.checkpoint.store import Store
from megaspec.core.errors import CheckpointError, DataError
from megaspec.data.provenance import tokenizer_of
from megaspec.data.spec import DataSource, IndexedSpec
from megaspec.data.tokenizer import Tokenizer
from megaspec.nn.decoder import Decoder
from megaspec.parallelism.mesh import Mesh
from megaspec.runtime.build import build_split_model
from megaspec.runtime.plugins import connect
from megaspec.runtime.state import load_weights, tell_passed_over
from megaspec.spec import Spec


def generate_text(run_dir: Path, prompt: str, *, tokens: int, temperature: float, seed: int, cuda: bool) -> str:
    """What the newest good checkpoint of a run writes after `prompt`, on one device whatever layout trained it.

    On a CPU in fp32, on CUDA in the run's precision. Raises CheckpointError, DataError.
    """
    connect()
    trained = Spec.model_validate_json((run_dir / "spec.json").read_text())
    tokenizer = run_tokenizer(trained.data)
    reader = Store(run_dir).newest_good(SoloComm(), repair=False)
    if reader is None:
        raise CheckpointError(f"{run_dir}: no checkpoint was saved there yet; megaspec resume {run_dir} trains it")
    device = torch.device("cuda" if cuda else "cpu")
    spec = for_one_device(trained, cuda=cuda)
    split = build_split_model(spec, mesh=Mesh({}, rank=0, device=device))
    model = split.chunks[0]
    tell_passed_over(reader)
    with reader:
        load_weights(model.global_parameters(), split.tensor_parallel.layouts, reader)
    written = generate(
        model,
        encode(tokenizer, prompt),
        tokens=tokens,
        temperature=temperature,
        seed=seed,
        max_seq_len=spec.model.max_seq_len,
        device=device,
        end=tokenizer.eod,
    )
    return tokenizer.decode(written)


def for_one_device(spec: Spec, *, cuda: bool) -> Spec:
    """The same model without parallelism, compilation or, on a CPU, low precision."""
    fields = spec.model_dump(mode="json")
    fields["parallelism"] |= {"tp": 1, "dp_replicate": 1, "sequence_parallel": False}
    fields["kernels"] |= {"compile": "none", "attention": "sdpa", "cross_entropy": "chunked"}
    if not cuda:
        fields["kernels"]["grouped"] = "reference"
    fields |= {"world_size": 1, "device": "cuda" if cuda else "cpu"}
    if not cuda and spec.precision.kind != "fp64":
        fields["precision"] = {"kind": "fp32"}
    return Spec.model_validate_json(json.dumps(fields))


def run_tokenizer(data: DataSource) -> Tokenizer:
    """The tokenizer that made a run's data. Raises DataError where the data was not made from text."""
    if not isinstance(data, IndexedSpec):
        raise DataError(f"data.kind={data.kind} has no tokenizer, so there is no text to write; use data.kind=indexed")
    return tokenizer_of(data.blend[0].prefix)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of one text; at least one, the end-of-document token where the text is empty."""
    ids = [int(i) for i in tokenizer.encode_batch([text])[0]]
    if not ids and tokenizer.eod is None:
        raise DataError("the prompt is empty and the tokenizer has no end-of-document token to start from")
    return ids or [tokenizer.eod]


@torch.no_grad()
def generate(
    model: Decoder,
    prompt: Sequence[int],
    *,
    tokens: int,
    temperature: float,
    seed: int,
    max_seq_len: int,
    device: torch.device,
    end: int | None = None,
    multiple: int = 1,
) -> list[int]:
    """Token ids that go on from `prompt`; stops after `tokens` of them or before the token `end`.

    Each token is drawn from softmax(logits / temperature), the likeliest one at temperature 0, with a generator of
    its own, so that all ranks of a parallel model draw the same. The model sees the last `max_seq_len` tokens.
    Sequences are padded on the right to a multiple of `multiple` (tensor-parallel ranks that split the sequence) and to
    powers of two from 64 on, so that shapes repeat; a causal model does not see the padding.
    """
    generator = torch.Generator().manual_seed(seed)
    written = list(prompt)
    for _ in range(tokens):
        seen = written[-max_seq_len:]
        length = min(max_seq_len, max(64, 1 << (len(seen) - 1).bit_length()))
        length = -(-length // multiple) * multiple
        padded = torch.zeros(1, length, dtype=torch.int64)
        padded[0, : len(seen)] = torch.tensor(seen)
        logits = model(padded.to(device))[0, len(seen) - 1]
        token = draw(logits.to("cpu", torch.float64), temperature, generator)
        if token == end:
            break
        written.append(token)
    return written[len(prompt) :]


def draw(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    """One token id."""
    if temperature == 0:
        return int(logits_V.argmax())
    return int(torch.multinomial((logits_V / temperature).softmax(0), 1, generator=generator))
