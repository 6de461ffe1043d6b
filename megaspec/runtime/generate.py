"""Text from a model, one token at a time."""

# B sequences, T tokens, V vocabulary

from collections.abc import Sequence

import torch
from torch import Tensor

from megaspec.nn.decoder import Decoder


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
