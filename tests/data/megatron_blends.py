"""Orders of blends as megatron-core makes them: the cases, and what writes tests/golden/blends_megatron_core.json.

    python -m tests.data.megatron_blends FOLDER

FOLDER holds megatron-core 0.16.1 (`pip install megatron-core==0.16.1 --no-deps --target FOLDER`). Its own builder
reads the data sets that `write_datasets` makes; what is kept of each case are hashes of the data sets and of the tokens
in the order in which training would read them.
"""

import hashlib
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tests.data.helpers import write_dataset

GOLDEN = Path(__file__).parents[1] / "golden" / "blends_megatron_core.json"
VERSION = "0.16.1"
SEQ_LEN = 8
N_DATASETS = 9
_FIRST = 12


@dataclass(frozen=True)
class Case:
    """What `--data-path` or `--train-data-path` is given, and how many samples are asked for."""

    words: tuple[str, ...]
    """Weights and names of data sets in turn, or names only; the names are d0, d1, ..."""
    samples: int
    seed: int = 1234
    of_train_only: bool = False
    """As --train-data-path, not --data-path."""


def write_datasets(folder: Path) -> None:
    """d0 to d8: 320 to 3,840 tokens each, documents of 1 to 40."""
    for number in range(N_DATASETS):
        lengths = np.random.RandomState(100 + number).randint(1, 41, 16 * (1 + number)).tolist()
        write_dataset(folder / f"d{number}", lengths, seed=200 + number, manifest=False)


def passes(folder: Path) -> list[int]:
    """Whole sequences in one pass over each data set."""
    sizes = [(folder / f"d{number}.bin").stat().st_size // 2 for number in range(N_DATASETS)]
    return [(size - 1) // SEQ_LEN for size in sizes]


def cases(in_a_pass: list[int]) -> list[Case]:
    """Weights known to differ, 200 random ones in four forms, one weighted data set, none weighted, ends of epochs."""
    named = [weighted(words, 400) for words in (("0.7", "0.2", "0.1"), ("7", "2", "1"), ("0.59", "0.8", "0.5"))]
    return [*named, *_random_weights(), *_single(in_a_pass), *_ends(in_a_pass), *_without_weights(in_a_pass)]


def weighted(weights: tuple[str, ...], samples: int, **more) -> Case:
    words = []
    for number, weight in enumerate(weights):
        words += [weight, f"d{number}"]
    return Case(tuple(words), samples, **more)


FORMS: dict[str, Callable[[np.random.RandomState], float]] = {
    "fractions": lambda random: round(random.uniform(0.01, 1), 2),
    "whole": lambda random: int(random.randint(1, 101)),
    "tiny": lambda random: float(f"{random.uniform(1, 10) * 10.0 ** random.randint(-12, -6):.3g}"),
    "huge": lambda random: float(f"{random.uniform(1, 10) * 10.0 ** random.randint(12, 15):.6g}"),
}


def _random_weights() -> list[Case]:
    random = np.random.RandomState(7)
    made = []
    for number in range(200):
        draw = list(FORMS.values())[number % len(FORMS)]
        weights = tuple(repr(draw(random)) for _ in range(random.randint(2, N_DATASETS + 1)))
        made.append(weighted(weights, int(random.randint(100, 500)), seed=int(random.randint(1, 10_000))))
    return made


def _near_ends(in_a_pass: int) -> list[int]:
    """Numbers of samples about the end of an epoch, and about where 0.5 % more of them would reach it."""
    wanted = []
    for epochs in (1, 2, 3):
        end = epochs * in_a_pass
        wanted += [end - 1, end, end + 1, round(end / 1.005) - 1, round(end / 1.005), round(end / 1.005) + 1]
    return wanted


def _single(in_a_pass: list[int]) -> list[Case]:
    """One data set with a weight, and bare; both flags."""
    made = []
    for samples in _near_ends(in_a_pass[8]):
        made += [Case(("1.0", "d8"), samples), Case(("d8",), samples)]
    made += [Case(("0.3", "d8"), in_a_pass[8]), Case(("0.3", "d8"), in_a_pass[8], of_train_only=True)]
    return made


def _ends(in_a_pass: list[int]) -> list[Case]:
    """The first data set of a blend comes to the end of an epoch."""
    return [weighted(("3", "1"), round(samples / 0.75)) for samples in _near_ends(in_a_pass[0])]


def _without_weights(in_a_pass: list[int]) -> list[Case]:
    made = []
    for count in (2, 3, 5, 9):
        names = tuple(f"d{number}" for number in range(count))
        total = sum(in_a_pass[:count])
        made += [Case(names, samples) for samples in (total // 3, total - 1, total)]
    made.append(Case(("d3", "d1", "d4"), 200, of_train_only=True))
    return made


def kept(datasets: list[int], tokens: list[np.ndarray]) -> dict[str, str]:
    """What the golden file says of an order. tokens: int64 [SEQ_LEN + 1] for every sample."""
    ids = np.array(datasets, dtype=np.int64)
    rows = np.array(tokens, dtype=np.int64)
    return {
        "first": "".join(str(number) for number in datasets[:_FIRST]),
        "datasets": hashlib.sha256(ids.tobytes()).hexdigest()[:16],
        "tokens": hashlib.sha256(rows.tobytes()).hexdigest()[:16],
    }


class _NoTokenizer:
    """The configuration asks for one; only its eod is read, to find masks that are not used here."""

    eod = -1
    pad = -1
    vocab_size = None
    unique_identifiers = ""


def by_megatron(folder: Path, case: Case, cache: Path) -> dict[str, str]:
    """The order of a case by megatron-core, which has to be importable."""
    from megatron.core.datasets.blended_dataset import BlendedDataset
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import get_blend_from_list

    words = [str(folder / word) if word.startswith("d") else word for word in case.words]
    blend = get_blend_from_list(words)
    given = {"blend_per_split": [blend, None, None]} if case.of_train_only else {"blend": blend, "split": "1,0,0"}
    config = GPTDatasetConfig(
        random_seed=case.seed,
        sequence_length=SEQ_LEN,
        path_to_cache=str(cache),
        tokenizer=_NoTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        **given,
    )
    train = BlendedMegatronDatasetBuilder(GPTDataset, [case.samples, 0, 0], lambda: True, config).build()[0]
    is_blend = isinstance(train, BlendedDataset)
    datasets = train.dataset_index[: case.samples].tolist() if is_blend else [0] * case.samples
    tokens = []
    for position in range(case.samples):
        sample = train[position]
        tokens.append(np.append(sample["tokens"].numpy(), sample["labels"].numpy()[-1]))
    return kept(datasets, tokens)


def main(target: str) -> None:
    sys.path.insert(0, target)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import torch.distributed
    from megatron.core.package_info import __version__

    assert __version__ == VERSION, f"megatron-core {__version__}, the golden file is of {VERSION}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        write_datasets(folder)
        lines = []
        for case in cases(passes(folder)):
            lines.append(json.dumps(asdict(case) | by_megatron(folder, case, folder / "cache")))
        torch.distributed.destroy_process_group()
    source = f"megatron-core {__version__}: BlendedMegatronDatasetBuilder of GPTDataset, sequences of {SEQ_LEN}"
    text = '{"source": ' + json.dumps(source) + ',\n"cases": [\n' + ",\n".join(lines) + "\n]}\n"
    GOLDEN.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1])
