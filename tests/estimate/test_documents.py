"""Attention of packed documents: what is predicted from a histogram beside what kernels compute of real rows."""

import json
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from megaspec.compose.compose import compose
from megaspec.core.document_lengths import share_hidden
from megaspec.core.part_facts import ALL_OF_THE_PAST, Sight
from megaspec.data.indexed_source import IndexedSource
from megaspec.data.inspect import inspect
from megaspec.data.lengths import write_lengths
from megaspec.data.random import RandomSource
from megaspec.data.spec import IndexedSpec
from megaspec.data.synthetic import SyntheticSource
from megaspec.estimate.hardware import HARDWARE
from megaspec.estimate.layer_time import ATTENTION_HOT
from megaspec.estimate.step_kinds import rank_work
from megaspec.estimate.step_time import step_time
from megaspec.estimate.target import Target
from megaspec.estimate.throughput import throughput_of
from megaspec.estimate.work import FLASH_COST, layer_parts
from megaspec.nn.attention.module import CausalCore, SequenceContext
from megaspec.parallelism.context import gathered_blocks, ring_block, token_index
from megaspec.resolve.gather import gather_facts
from megaspec.resolve.resolver import resolve
from megaspec.spec import Spec
from megaspec_kernels.attention import varlen
from megaspec_kernels.attention.documents import Documents, documents_of
from megaspec_kernels.registry import REGISTRY
from tests.data.helpers import write_dataset

H200 = HARDWARE["H200"]
VERSIONS = {"torch": "2.13.0", "flash-attn": "2.8.3"}
ROW = 512
# Rows are of one pass over 4,000 documents that are shuffled and cut anew; their pairs are counted whole, and the mean
# of some 600 rows spreads by 1 %.
SAMPLED = 0.03


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Token files of many short documents and some that are longer than a row."""
    prefix = tmp_path_factory.mktemp("packed") / "d"
    draw = np.random.RandomState(3)
    lengths = np.concatenate([draw.geometric(1 / 40, 3900), draw.randint(300, 3000, 100)])
    draw.shuffle(lengths)
    write_dataset(prefix, [int(length) for length in lengths], vocab_size=257)
    write_lengths(prefix, inspect(prefix).lengths)
    return prefix


def spec_of(*words: str, gpus: int = 1, micro_batch: int = 1) -> Spec:
    words = ("model=llama3_8b", "model.n_layers=2", f"data.seq_len={ROW}", f"train.micro_batch={micro_batch}", *words)
    composed = compose(
        "hello",
        [
            *words,
            "train.global_batch=16",
            "train.sample=null",
            "train.eval_every=0",
            "precision=bf16",
            f"launcher.ranks={gpus}",
            "data.document_mask=true",
        ],
    )
    target = Target(gpus=gpus, gpu="NVIDIA H200", sm=90, gpu_memory=H200.memory, cores=64, versions=VERSIONS)
    return resolve(composed.recipe, target, gather_facts(composed.recipe), composed.origins)


def blend(prefix) -> tuple[str, ...]:
    return "data=indexed", f"data.blend=[{{prefix: {prefix}}}]", "data.split=[1,0,0]", "model.vocab_size=257"


def rows_of(spec: Spec) -> Iterator[Documents]:
    """The documents of each row of a pass, in the order of a run."""
    arguments = {"split": "train", "seed": 5}
    if isinstance(spec.data, IndexedSpec):
        tokens = gather_facts(spec).train_samples
        source = IndexedSource(spec.data, segments=(tokens,), vocab_size=257, **arguments)
    else:
        kind = {"synthetic": SyntheticSource, "random": RandomSource}[spec.data.kind]
        source = kind(spec.data, segments=(600,), **arguments)
    for position in range(len(source)):
        yield documents_of(torch.from_numpy(source.read(position).documents)[None])


class _Counted:
    """Stands for a kernel's blocks, and counts the pairs that they are given."""

    def __init__(self) -> None:
        self.twice_the_pairs = 0

    def __call__(self, q_BTNH, k_BSKH, v_BSKH, *, causal, **options):
        pairs = q_BTNH.shape[1] * k_BSKH.shape[1]
        # causal ones are squares, of which half is seen
        self.twice_the_pairs += pairs if causal else 2 * pairs
        return torch.zeros_like(q_BTNH), q_BTNH.new_zeros(q_BTNH.shape[0], q_BTNH.shape[2], q_BTNH.shape[1])


def counted_pairs(spec: Spec, monkeypatch, sight: Sight = ALL_OF_THE_PAST) -> float:
    """Twice the pairs of a row that the kernel for documents computes in a pass, as a mean."""
    core = CausalCore(REGISTRY["attention"]["sdpa"], 0.0, "core", sight=sight)
    counted = _Counted()
    monkeypatch.setattr(varlen.reference_block, "block_forward", counted)
    n_rows = 0
    for documents in rows_of(spec):
        x = torch.zeros(1, ROW, 1, 8)
        core(x, x, x, SequenceContext(torch.arange(ROW), documents=documents, length=ROW))
        n_rows += 1
    return counted.twice_the_pairs / n_rows


def predicted_pairs(spec: Spec) -> float:
    """Twice the pairs of a row and a layer that the plan's FLOPs are of: forward, and twice that backward."""
    model = spec.model
    per_pair = 3 * 2 * model.n_heads * 2 * model.d_head * model.n_layers
    return 2 * rank_work(spec, 0).attention_flops / per_pair / spec.train.micro_batch


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("model.attention.mask={kind: chunk, size: 96}",),
    ],
    ids=["causal", "chunks"],
)
def test_flops_of_token_files_are_those_of_their_rows(packed, words, monkeypatch):
    spec = spec_of(*blend(packed), *words, micro_batch=2)
    sight = spec.model.facts.layers[0].attention.sight
    found = counted_pairs(spec, monkeypatch, sight)
    assert predicted_pairs(spec) == pytest.approx(found, rel=SAMPLED)
    # as whole rows they would be so many
    assert sight.twice_the_pairs(ROW) > 1.15 * found


def test_a_window_counts_within_documents(packed):
    spec = spec_of(*blend(packed), "model.attention.mask={kind: window, size: 100}")
    sight = Sight(window=100)
    pairs = [sum(map(sight.twice_the_pairs, documents.starts.diff().tolist())) for documents in rows_of(spec)]
    assert predicted_pairs(spec) == pytest.approx(np.mean(pairs), rel=SAMPLED)


@pytest.mark.parametrize(
    "words", [("data=synthetic",), ("data=random", "data.document_length=100", "data.vocab_size=9")]
)
def test_made_data_have_their_own_formula(words, monkeypatch):
    spec = spec_of(*words)
    assert predicted_pairs(spec) == pytest.approx(counted_pairs(spec, monkeypatch), rel=SAMPLED)


def by_blocks(documents: Documents, kind: str, rank: int, ranks: int) -> int:
    """Twice the pairs that a rank's blocks have, by the numbers of each document's queries and keys in them."""
    here = ROW // ranks
    places = token_index(kind, ROW, ranks, rank)
    found = 0
    if kind == "all_gather":
        blocks = [(block, torch.arange(ROW)) for block in gathered_blocks(rank, ranks, here, documents.longest)]
    else:
        blocks = []
        for source in range(ranks):
            block = ring_block(rank, source, here, documents.longest)
            if block is not None:
                blocks.append((block, token_index(kind, ROW, ranks, source)))
    for block, keys in blocks:
        queries = documents.at(places[block.queries]).starts.diff()
        of_keys = documents.at(keys[block.keys]).starts.diff()
        found += int((queries * of_keys).sum()) * (1 if block.causal else 2)
    return found


@pytest.mark.parametrize("kind", ["ring", "all_gather"])
def test_the_busiest_of_context_parallel_ranks(packed, kind):
    cp = ("parallelism.cp=4", f"parallelism.context.kind={kind}")
    spec = spec_of(*blend(packed), *cp, gpus=4)
    ranks = np.zeros(4)
    n_rows = 0
    for documents in rows_of(spec):
        ranks += [by_blocks(documents, kind, rank, 4) for rank in range(4)]
        n_rows += 1
    ranks /= n_rows
    # the plan's factor is of causal attention on all four
    (part,) = [one for one in layer_parts(spec, spec.model.facts.layers[0], in_fp8=False) if one.attention is not None]
    predicted = part.attention.pairs / FLASH_COST * ROW**2 / 4
    assert predicted == pytest.approx(ranks.max(), rel=SAMPLED)
    # ranks don't have as many as each other: by how much is predicted more exactly than how many
    assert predicted / predicted_pairs(spec) == pytest.approx(ranks.max() / ranks.mean(), abs=0.01)
    assert ranks.max() > 1.02 * ranks.mean()
    # together they have each pair once, and FLOPs are those of the mean
    assert predicted_pairs(spec) == pytest.approx(ranks.mean(), rel=SAMPLED)


def test_all_to_all_attends_whole_rows(packed):
    alone = spec_of(*blend(packed), "kernels.attention=sdpa")
    words = ("parallelism.cp=4", "parallelism.context.kind=all_to_all", "kernels.attention=sdpa")
    spread = spec_of(*blend(packed), *words, gpus=4)
    works = []
    for spec in (alone, spread):
        parts = layer_parts(spec, spec.model.facts.layers[0], in_fp8=False)
        works += [one.attention for one in parts if one.attention is not None]
    assert works[1].pairs == works[0].pairs < 0.6 * FLASH_COST
    # each of four ranks has a quarter of the heads
    assert 4 * works[1].heads == works[0].heads


def test_a_plan_says_what_it_knows(packed):
    spec = spec_of(*blend(packed))
    (decision,) = [one for one in spec.decisions if one.key == "data.document_lengths"]
    hidden = share_hidden(spec.data.document_lengths, ROW)
    assert f"rows of {ROW} hide {hidden:.1%} of the pairs" in decision.reason
    assert "d.lengths.json" in decision.reason
    whole = spec_of("data=random", "data.vocab_size=9")
    assert "one document each" in next(one for one in whole.decisions if one.key == "data.document_lengths").reason
    seconds = []
    for one in (spec, whole):
        seconds.append(step_time(one, H200, throughput_of(H200)).parts["attention"])
    # the same kernel takes less time for less pairs, by their share
    assert seconds[0] == pytest.approx((1 - hidden) * seconds[1], rel=0.02)


def test_lengths_of_other_files_are_told_and_a_plan_is_made(tmp_path):
    prefix = tmp_path / "d"
    write_dataset(prefix, [100] * 40, vocab_size=257)
    write_lengths(prefix, inspect(prefix).lengths)
    write_dataset(prefix, [40] * 100, vocab_size=257)
    (decision,) = [one for one in spec_of(*blend(prefix)).decisions if one.key == "data.document_lengths"]
    assert decision.value is None
    assert "one document each" in decision.reason
    assert f"{prefix}.lengths.json is not used: it has the lengths of other files" in decision.reason
    assert f"`megaspec data inspect {prefix}`" in decision.reason


def test_what_a_spec_says_of_lengths_comes_back(packed):
    for spec in (spec_of(*blend(packed)), spec_of("data=random", "data.vocab_size=9")):
        again = Spec.model_validate_json(spec.model_dump_json())
        assert again == spec
    # a Spec that says [] where nobody knows
    content = json.loads(spec_of("data=random", "data.vocab_size=9").model_dump_json())
    content["data"]["document_lengths"] = []
    assert Spec.model_validate_json(json.dumps(content)).data.document_lengths is None
    # a Spec from before they had a name
    content = json.loads(spec_of(*blend(packed)).model_dump_json())
    del content["data"]["document_lengths"]
    assert Spec.model_validate_json(json.dumps(content)).data.document_lengths is None


@pytest.mark.usefixtures("at_the_tables_clock")
@pytest.mark.parametrize(("mean", "length"), [(256, 512), (1024, 2048)])
def test_kernels_reach_less_of_short_documents(mean, length):
    """In long rows each token of documents that end anywhere sees as much as in sequences of twice their mean length,
    and is as slow as in those."""
    row = 16384
    words = (f"data.seq_len={row}", f"model.max_seq_len={row}", "data=random", "data.vocab_size=9")
    spec = spec_of(*words, f"data.document_length={mean}", "kernels.attention=flash_attn_2")
    throughput = throughput_of(H200)
    causal = 0.0
    for direction in ("forward", "backward"):
        causal += throughput.attention_seconds(
            tokens=row, seq_len=length, heads=32, kv_heads=8, head_size=128, direction=direction
        )
    found = step_time(spec, H200, throughput).parts["attention"]
    of_a_row = found / (spec.model.n_layers * spec.train.global_batch)
    assert of_a_row == pytest.approx(ATTENTION_HOT * causal, rel=0.05)
    # at the rate of whole rows it would take much less
    whole = spec_of(*words, "kernels.attention=flash_attn_2")
    pairs = length / row
    assert found > 1.2 * pairs * step_time(whole, H200, throughput).parts["attention"]
