"""Text from a model, one token at a time."""

# S tokens of the whole sequence, T of this rank, V vocabulary

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import lcm
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megaspec.checkpoint.comm import SoloComm
from megaspec.checkpoint.store import Store
from megaspec.core.errors import CheckpointError, DataError
from megaspec.data.provenance import tokenizer_of
from megaspec.data.spec import DataSource, IndexedSpec, StreamSpec
from megaspec.data.stream_files import stream_tokenizer
from megaspec.data.tokenizer import Tokenizer
from megaspec.nn.decoder import Decoder
from megaspec.parallelism.mesh import Mesh
from megaspec.rules.belonging import objections
from megaspec.rules.kernel_use import use_of
from megaspec.runtime.build import TrainState, build_split_model
from megaspec.runtime.state import load_buffers, load_weights, tell_passed_over
from megaspec.runtime.step import activations_size
from megaspec.spec import Spec
from megaspec_kernels.catalog import choose

Follow = Callable[[Tensor, int], int]
"""(token ids int64 [1, S] on the CPU, the place of the last one that counts) -> the token that follows it"""


def generate_text(
    run_dir: Path, trained: Spec, prompt: str, *, tokens: int, temperature: float, seed: int, cuda: bool
) -> str:
    """What the newest good checkpoint of a run writes after `prompt`, on one device whatever layout trained it.

    On a CPU in fp32, on CUDA in the run's precision. Raises CheckpointError, DataError.
    """
    tokenizer = run_tokenizer(trained.data)
    # no repair: another process may train the run meanwhile and holds its lock
    reader = Store(run_dir).newest_good(SoloComm(), repair=False, inspect=partial(objections, run=trained))
    if reader is None:
        raise CheckpointError(f"{run_dir}: no checkpoint was saved there yet; megaspec resume {run_dir} trains it")
    device = torch.device("cuda" if cuda else "cpu")
    spec = for_one_device(trained, cuda=cuda)
    split = build_split_model(spec, mesh=Mesh({}, rank=0, device=device))
    model = split.chunks[0]
    tell_passed_over(reader)
    with reader:
        load_weights(model.global_parameters(), split.strategies.tensor.layouts, reader)
        load_buffers(split.chunks, reader)
    written = generate(
        on_one_device(model, Draw(temperature, seed), device=device),
        encode(tokenizer, prompt),
        tokens=tokens,
        max_seq_len=spec.model.max_seq_len,
        end=tokenizer.eod,
    )
    return tokenizer.decode(written)


def for_one_device(spec: Spec, *, cuda: bool) -> Spec:
    """The same model without parallelism, compilation or, on a CPU, low precision."""
    fields = spec.model_dump(mode="json")
    fields["parallelism"] = {
        "tp": 1,
        "dp_replicate": 1,
        "dp_shard": 1,
        "sequence_parallel": False,
        "pipeline": {"schedule": "1f1b", "micro_batch_group": 1},
    }
    fields["kernels"] |= {"compile": "none", "cross_entropy": "chunked"}
    fields |= {"world_size": 1, "device": "cuda"}
    if not cuda:
        fields["device"] = "cpu"
        # text is written without dropout
        use = replace(use_of(spec), attention_dropout=False)
        fields["kernels"] |= {"attention": choose("attention", device="cpu", sm=0, use=use), "grouped": "reference"}
        if spec.precision.kind != "fp64":
            fields["precision"] = {"kind": "fp32"}
    return Spec.model_validate_json(json.dumps(fields))


def run_tokenizer(data: DataSource) -> Tokenizer:
    """The tokenizer that made a run's data. Raises DataError where the data was not made from text."""
    if isinstance(data, StreamSpec):
        return stream_tokenizer(data)
    if not isinstance(data, IndexedSpec):
        raise DataError(f"data.kind={data.kind} has no tokenizer, so there is no text to write; use data.kind=indexed")
    return tokenizer_of(data.blend[0].prefix)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of one text; at least one, the end-of-document token where the text is empty."""
    ids = [int(i) for i in tokenizer.encode_batch([text])[0]]
    if not ids and tokenizer.eod is None:
        raise DataError("the prompt is empty and the tokenizer has no end-of-document token to start from")
    return ids or [tokenizer.eod]


class Draw:
    """Draws a token from softmax(logits / temperature), the likeliest one at temperature 0."""

    def __init__(self, temperature: float, seed: int):
        self._temperature = temperature
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, logits_V: Tensor) -> int:
        # on the CPU, so that the same seed writes the same text on every device
        logits_V = logits_V.to("cpu", torch.float64)
        if self._temperature == 0:
            return int(logits_V.argmax())
        probabilities_V = (logits_V / self._temperature).softmax(0)
        return int(torch.multinomial(probabilities_V, 1, generator=self._generator))


def on_one_device(model: Decoder, draw: Draw, *, device: torch.device) -> Follow:
    """A whole model goes on."""
    return lambda tokens_1S, last: draw(model(tokens_1S.to(device))[0, last])


def on_all_ranks(built: TrainState, draw: Draw) -> Follow:
    """A run's model goes on, however it is divided. All ranks call it together; one draws, and tells the others."""
    mesh = built.mesh
    device = built.device
    # these hold the same logits over dp and tp: one of them draws
    may_draw = mesh.index("dp") == 0 and mesh.index("tp") == 0

    def follow(tokens_1S: Tensor, last: int) -> int:
        S = tokens_1S.shape[1]
        # [T]: places in the sequence of this rank's tokens; the last one is on one context-parallel rank
        index = built.context_parallel.index(S)
        here = (index == last).nonzero().flatten().tolist()
        # 0 but on the rank that draws, so that the sum over all ranks is what it drew
        drawn = torch.zeros((), dtype=torch.int64, device=device)

        def forward(chunk: int, micro: int, x: Tensor | None) -> Tensor:
            model = built.chunks[chunk]
            context = model.context(index, length=S, way=built.context_parallel.way)
            if x is None:
                x = tokens_1S.to(device)[:, index]
            y = model.body(x, context)
            if model.head is None:
                return y
            logits_1TV = model.finish(y, model.head)
            if may_draw and here:
                drawn.fill_(draw(logits_1TV[0, here[0]]))
            return logits_1TV

        built.pipeline.forward_only(1, size=activations_size(built, 1, S), forward=forward)
        built.pipeline.finish()
        if mesh.world_size > 1:
            dist.all_reduce(drawn)
        return int(drawn)

    return follow


def length_multiple(spec: Spec) -> int:
    """What the length of a sequence must be a multiple of, so that ranks can split it."""
    parallelism = spec.parallelism
    # a ring gives each rank a chunk from the front and one from the back, so that all have as much to attend to
    chunks_per_rank = 2
    if parallelism.cp == 1 or parallelism.context.kind == "all_to_all":
        chunks_per_rank = 1
    multiple = chunks_per_rank * parallelism.cp
    if parallelism.sequence_parallel:
        multiple = lcm(multiple, parallelism.cp * parallelism.tp)
    return multiple


@torch.no_grad()
def generate(
    follow: Follow, prompt: Sequence[int], *, tokens: int, max_seq_len: int, end: int | None = None, multiple: int = 1
) -> list[int]:
    """Token ids that go on from `prompt`; stops after `tokens` of them or before the token `end`.

    The model sees the last `max_seq_len` tokens. Sequences are padded on the right to a multiple of `multiple` and to
    powers of two from 64 on, so that shapes repeat; a causal model does not see the padding.
    """
    written = list(prompt)
    for _ in range(tokens):
        seen = written[-max_seq_len:]
        power_of_two = 1 << (len(seen) - 1).bit_length()
        length = min(max_seq_len, max(64, power_of_two))
        # up to a multiple
        length = -(-length // multiple) * multiple
        padded = torch.zeros(1, length, dtype=torch.int64)
        padded[0, : len(seen)] = torch.tensor(seen)
        token = follow(padded, len(seen) - 1)
        if token == end:
            break
        written.append(token)
    return written[len(prompt) :]
