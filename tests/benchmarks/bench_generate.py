"""Tokens a second of texts that are written with keys and values kept, and with whole forward passes: a JSON line each.

  python tests/benchmarks/bench_generate.py --model gpt2_124m --texts 1 --prompt 512 --tokens 16

On one device, with random weights and prompts: what is written says nothing, and takes as long. The first token, whose
pass computes the whole prompt in both ways, is timed apart; rates are of those behind it, of all texts together.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from megaspec.compose.compose import compose
from megaspec.data.tokenizer import ByteTokenizer
from megaspec.estimate.target import detect_target
from megaspec.nn.init import start_weights
from megaspec.parallelism.mesh import Mesh
from megaspec.resolve.fill import plainly_filled
from megaspec.rules.run_facts import Facts
from megaspec.runtime.build import build_split_model
from megaspec.runtime.draw import Draw, Sampling
from megaspec.runtime.generate import Limits, Prompt, for_one_device, generate, longest_text
from megaspec.runtime.text_passes import ModelOnRanks, Passes, cached_passes, whole_passes
from megaspec.spec import Spec


class Clocked(Passes):
    """Seconds of each pass, on the clock and of the CPU: other work on the machine changes the latter little."""

    def __init__(self, passes: Passes, device: torch.device):
        self._passes = passes
        self._device = device
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []

    def next_tokens(self, texts: Sequence) -> list[int]:
        begun = time.perf_counter()
        cpu_begun = time.process_time()
        # which the host reads: the device is done then
        tokens = self._passes.next_tokens(texts)
        self.seconds.append(time.perf_counter() - begun)
        self.cpu_seconds.append(time.process_time() - cpu_begun)
        return tokens


def spec_of(recipe: str, *, cuda: bool) -> Spec:
    """The model of a recipe on one device."""
    composed = compose(recipe, ["data=random", "~data.blend", "train.sample=null"])
    filled = plainly_filled(composed.recipe, detect_target(), Facts(run_dir="runs/bench"))
    fields = filled.model_dump(mode="json") | {"world_size": 1, "device": "cpu", "segments": [1]}
    return for_one_device(Spec.model_validate_json(json.dumps(fields)), cuda=cuda)


def measure(model: ModelOnRanks, *, texts: int, prompt: int, tokens: int, cache: bool) -> Clocked:
    """Writes the texts."""
    source = torch.Generator().manual_seed(1)
    vocab_size = model.spec.model.vocab_size
    prompts = []
    for _ in range(texts):
        prompts.append(Prompt(torch.randint(vocab_size, (prompt,), generator=source).tolist()))
    limits = Limits(tokens=tokens, max_seq_len=model.spec.model.max_seq_len)
    draw = Draw(Sampling())
    how = whole_passes(model, draw)
    if cache:
        how = cached_passes(model, draw, rows=texts, length=longest_text(prompts, limits))
    with how as passes:
        clocked = Clocked(passes, model.mesh.device)
        generate(clocked, prompts, tokenizer=ByteTokenizer(), limits=limits, rows=texts, seed=0)
    return clocked


def main() -> int:
    """Measures, and writes a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt2_124m", help="recipe whose model it is")
    parser.add_argument("--texts", type=int, default=1, help="written at a time")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of each text")
    parser.add_argument("--out", type=Path, help="file that the line is added to")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    load_before = os.getloadavg()[0]
    spec = spec_of(args.model, cuda=cuda)
    mesh = Mesh({}, rank=0, device=device)
    split = build_split_model(spec, mesh=mesh)
    start_weights(split.chunks[0], std=spec.model.init_std, seed=1)
    split.chunks[0].eval()
    model = ModelOnRanks.of_weights(spec, mesh, split)
    line: dict[str, object] = {
        "benchmark": "generate",
        "name": f"{args.model}, {args.texts}, {args.prompt}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": torch.cuda.get_device_name() if cuda else f"{os.cpu_count()} cores, {platform.machine()}",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "load_before": load_before,
        "texts": args.texts,
        "prompt": args.prompt,
        "tokens": args.tokens,
    }
    for name, cache in (("cached", True), ("whole", False)):
        # once before, so that nothing is warmed up on the clock
        measure(model, texts=args.texts, prompt=args.prompt, tokens=2, cache=cache)
        clocked = measure(model, texts=args.texts, prompt=args.prompt, tokens=args.tokens, cache=cache)
        n_tokens = args.texts * (args.tokens - 1)
        line[f"{name}_first_seconds"] = clocked.seconds[0]
        line[f"{name}_tokens_per_s"] = n_tokens / sum(clocked.seconds[1:])
        line[f"{name}_cpu_ms_per_token"] = 1e3 * sum(clocked.cpu_seconds[1:]) / n_tokens
    line["cpu_ratio"] = line["whole_cpu_ms_per_token"] / line["cached_cpu_ms_per_token"]
    text = json.dumps(line)
    print(text)
    if args.out is not None:
        with open(args.out, "a") as file:
            file.write(f"{text}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
