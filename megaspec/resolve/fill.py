"""Every default that depends on something else: fills what a recipe leaves to us, and says why.

Each function fills what it is named after, in the order of FILLS: later ones read what earlier ones filled. A value
that breaks a rule is filled all the same; the rules say so with everything else that is wrong.
"""

import json
from collections.abc import Callable
from math import gcd
from pathlib import PurePath
from typing import Any

from pydantic import ValidationError

from megaspec.core.axes import fewest_gpus
from megaspec.core.divisors import divisors
from megaspec.core.document_lengths import Lengths, mean_length, share_hidden
from megaspec.core.errors import Problem
from megaspec.core.frozen import AUTO
from megaspec.core.problems import value_at
from megaspec.core.remote_files import is_url
from megaspec.data.spec import IndexedSpec
from megaspec.estimate.attention_choice import attention_rates, fastest_attention, one_order_measured_on
from megaspec.estimate.attention_rates import HEAD_SIZES, faster_ones, kind_of
from megaspec.estimate.hardware import LEFT_FREE, Hardware, hardware_of
from megaspec.estimate.target import Target
from megaspec.estimate.throughput import throughput_of
from megaspec.nn.layer.spec import norms_before_mixers
from megaspec.nn.mlp.spec import ClampedMlpSpec, GatedMlpSpec
from megaspec.optim.spec import has_narrow_states
from megaspec.parallelism.spec import attends_to_blocks
from megaspec.precision.spec import Fp8Precision, fp8_recipe, may_write_fp8, model_format
from megaspec.recipe import Recipe
from megaspec.rules.case import can_split_sequences
from megaspec.rules.run_facts import Facts
from megaspec.rules.unbuilt import unbuilt_problems
from megaspec.search.tune import DIVIDES, SEARCHED, Grid, shards_of_a_replica, tune
from megaspec.spec import Decision
from megaspec_kernels.catalog import CATALOG, HALF, IDLE_BESIDE_LINEAR, PACKAGES, Use, casts_itself, choose, unmet

MICRO_BATCH_TOKENS = 8192
# Tokens of a micro batch · d_model², from which on a GPU takes longer for a compiled layer than the host does for
# starting what lies between its products one by one. Not of a rank's part: layouts of one batch are weighed alike.
# Measured on an H200 (2026-11-25): with norms and gates in kernels of their own 1B is faster at 16,384 tokens (7e10),
# and takes 79 ms in place of 57 at 2,048 (9e9).
SMALL_LAYER = 2e10
# A rank holds data.window bytes of text for each lane that it reads.
MOST_LANES = 256
CPU_RANKS = 2
_UNKNOWN_LENGTHS = "not known: rows are weighed as one document each, the most that attention can cost"
NODE_RANKS = 8
# What only a search decides, and what stands there without one.
PLAIN = {
    "parallelism.pp": 1,
    "parallelism.pipeline.virtual_stages": 1,
    "parallelism.pipeline.layout": None,
    "parallelism.cp": 1,
    "parallelism.ep": 1,
    "parallelism.dp_strategy": "replicate",
    "parallelism.recompute.kind": "none",
}


class ResolverDraft:
    """A recipe as plain data while the resolver fills it."""

    def __init__(self, recipe: Recipe, target: Target, facts: Facts):
        self.content: dict[str, Any] = recipe.model_dump(mode="json")
        self.recipe = recipe
        self.target = target
        self.facts = facts
        self.decisions: list[Decision] = []
        self.problems: list[Problem] = []

    def __getitem__(self, key: str) -> Any:
        return value_at(self.content, key)

    @property
    def filled(self) -> Recipe:
        """Once all that is open is filled."""
        return Recipe.model_validate_json(json.dumps(self.content))

    def is_open(self, key: str) -> bool:
        return self[key] == AUTO

    def given(self, key: str) -> Any:
        """The value at a path, None while it is open."""
        if self.is_open(key):
            return None
        return self[key]

    @property
    def decided(self) -> frozenset[str]:
        """Paths that were open and are filled."""
        return frozenset(decision.key for decision in self.decisions)

    def fill(self, key: str, value: Any, reason: str) -> None:
        """Decides an open field; a field that was set stays."""
        if not self.is_open(key):
            return
        path, _, name = key.rpartition(".")
        section = self.content
        if path:
            section = value_at(self.content, path)
        section[name] = value
        self.decisions.append(Decision(key=key, value=value, reason=reason))


def beginnings(draft: ResolverDraft) -> None:
    """The step from which schedules are counted, and the rate from which a warm-up starts."""
    start = draft.facts.start
    reason = "the run is no fork: it begins with step 0"
    rate = "the run is no fork: no rate to start from"
    if start.step:
        reason = "the step of the checkpoint with which the fork begins"
        rate = "the rate of the run that this is a fork of, at the step with which the fork begins"
    draft.fill("optim.schedule.first_step", start.step, reason)
    draft.fill("optim.schedule.init_lr", start.lr, rate)
    draft.fill("optim.weight_decay_ramp.first_step", start.step, reason)
    if draft["train.batch_ramp"]:
        draft.fill("train.batch_ramp.first_step", start.step, reason)


def run_folder(draft: ResolverDraft) -> None:
    draft.fill("run_dir", draft.facts.run_dir, "runs/<name>, with a number where that exists")


def seeds(draft: ResolverDraft) -> None:
    draft.fill("data.seed", draft["train.seed"], "train.seed")


def model_shape(draft: ResolverDraft) -> None:
    d_model = draft["model.d_model"]
    n_heads = draft["model.n_heads"]
    draft.fill("model.n_kv_heads", n_heads, "model.n_heads: no grouped-query attention")
    attention = draft.recipe.model.attention
    if attention.kind == "mla":
        d_head = attention.d_nope + attention.d_rope
        draft.fill("model.d_head", d_head, "model.attention.d_nope + model.attention.d_rope")
    draft.fill("model.d_head", max(1, d_model // n_heads), "model.d_model / model.n_heads")
    d_ffn, reason = draft.recipe.model.mlp.automatic_width(d_model)
    draft.fill("model.d_ffn", d_ffn, reason)
    draft.fill("model.max_seq_len", draft["data.seq_len"], "data.seq_len")
    if draft["model.moe"]:
        draft.fill("model.moe.d_expert", draft["model.d_ffn"], "model.d_ffn")


def vocabulary(draft: ResolverDraft) -> None:
    if draft.facts.vocab_size is not None:
        draft.fill("model.vocab_size", draft.facts.vocab_size, "the data's tokenizer")
    elif draft.is_open("model.vocab_size"):
        text = "model.vocab_size=auto takes the data's vocabulary, which is not known; prepare the data or set it"
        draft.problems.append(Problem("model.vocab_size", text, code="vocab-unknown"))
        draft.content["model"]["vocab_size"] = 1


def data_cache(draft: ResolverDraft) -> None:
    if draft["data.kind"] == "indexed":
        folder, reason = _index_folder(draft["data.blend"][0]["prefix"], draft["data.download_dir"])
        draft.fill("data.cache", folder, reason)
    for name, source in draft.recipe.data.valid.items():
        if isinstance(source, IndexedSpec):
            folder, reason = _index_folder(source.blend[0].prefix, source.download_dir)
            draft.fill(f"data.valid.{name}.cache", folder, reason)


def _index_folder(first: str, download_dir: str) -> tuple[str, str]:
    """Where index files of a blend are kept, and why there. `first`: the prefix of its first data set."""
    if is_url(first):
        return str(PurePath(download_dir, "index-cache")), "data.download_dir, since the first data set is a URL"
    return str(PurePath(first).parent / "index-cache"), "beside the first data set"


def data_lanes(draft: ResolverDraft) -> None:
    if draft["data.kind"] != "stream":
        return
    sizes = [draft["train.global_batch"]]
    ramp = draft["train.batch_ramp"]
    if ramp:
        sizes += [ramp["start"], ramp["increment"]]
    most = max(one for one in divisors(gcd(*sizes)) if one <= MOST_LANES)
    reason = f"the largest divisor of every global batch that is at most {MOST_LANES}"
    draft.fill("data.lanes", most, reason)


def document_lengths(draft: ResolverDraft) -> None:
    """What attention is weighed by where documents are packed."""
    data = draft.recipe.data
    if not data.document_mask:
        # nothing asks for them
        if draft.is_open("data.document_lengths"):
            draft.content["data"]["document_lengths"] = None
        return
    lengths = data.made_lengths
    source = "the settings of the data"
    if not lengths:
        lengths = draft.facts.document_lengths
        source = draft.facts.how_lengths
    if not lengths:
        reason = _UNKNOWN_LENGTHS
        if source:
            reason += f"; {source}"
        draft.fill("data.document_lengths", None, reason)
        return
    reason = _weighed_by(lengths, data.seq_len, source)
    draft.fill("data.document_lengths", [one.model_dump(mode="json") for one in lengths], reason)


def _weighed_by(lengths: Lengths, seq_len: int, source: str) -> str:
    """How long documents are, and what of attention that leaves out."""
    hidden = share_hidden(lengths, seq_len)
    text = f"documents of {mean_length(lengths):,.1f} tokens on average: rows of {seq_len:,} hide {hidden:.1%} "
    return f"{text}of the pairs of causal attention ({source})"


def documents_in_words(draft: ResolverDraft) -> str:
    """By which lengths of documents attention is weighed in a draft that is filled; "" without a document mask."""
    data = draft.recipe.data
    if not data.document_mask:
        return ""
    for decision in draft.decisions:
        if decision.key == "data.document_lengths":
            return decision.reason
    if data.document_lengths is None:
        return f"{_UNKNOWN_LENGTHS}; data.document_lengths=null"
    return _weighed_by(data.document_lengths, data.seq_len, "data.document_lengths")


def searched(draft: ResolverDraft) -> None:
    """Degrees that only a search decides; on a machine that nothing is known about, the plain choice."""
    if any(draft[key] for key in DIVIDES):
        draft.fill("parallelism.pipeline.layout", None, "another setting says how layers are divided")
    if not any(draft.is_open(key) for key in PLAIN):
        return
    hardware = None
    if draft.target.device == "cuda":
        hardware = hardware_of(draft.target)
    reason = "no GPU that is known: nothing to search with"
    grid = None
    if hardware is not None:
        grid = _grid(draft, hardware)
    if grid is not None:
        reason = _take_fastest(draft, grid)
    # what the search found no value for
    for key, plain in PLAIN.items():
        draft.fill(key, plain, reason)


def _take_fastest(draft: ResolverDraft, grid: Grid) -> str:
    """Fills what the search decides with the fastest layout. Returns why nothing is filled where there is no layout."""
    found = tune(grid, most=1)
    if not found.best:
        if grid.is_for_training:
            return "no layout that can be trained keeps every rule"
        return "no layout keeps every rule"
    fastest = found.best[0]
    fate = "fastest that fits"
    if not fastest.fits:
        fate = f"nothing leaves {100 * LEFT_FREE:.0f} % of the memory free; it needs least"
    content = fastest.recipe.model_dump(mode="json")
    reason = f"{fate}, {found.considered:,} considered (megaspec tune)"
    for key in SEARCHED:
        draft.fill(key, value_at(content, key), reason)
    return reason


def _grid(draft: ResolverDraft, hardware: Hardware) -> Grid | None:
    """What is searched: what is set stays as it is. Of what can be trained in a plain layout only layouts that can be
    trained count, of all else every layout. None: what was filled so far is out of bounds, which `settle` tells."""
    open_keys = frozenset(key for key in SEARCHED if draft.is_open(key))
    try:
        recipe = Recipe.model_validate_json(json.dumps(draft.content))
    except ValidationError:
        return None
    plain = plainly_drafted(recipe, draft.target, draft.facts)
    base = plain.filled
    can_train = not unbuilt_problems(base)
    return Grid(
        base,
        draft.target,
        draft.facts,
        hardware,
        throughput_of(hardware),
        open_keys,
        is_for_training=can_train,
        decided=draft.decided | plain.decided,
    )


def plainly_filled(recipe: Recipe, target: Target, facts: Facts) -> Recipe:
    """The recipe with every auto filled, without a search: what a search starts from."""
    return plainly_drafted(recipe, target, facts).filled


def plainly_drafted(recipe: Recipe, target: Target, facts: Facts) -> ResolverDraft:
    """The draft of a recipe that is filled without a search."""
    draft = ResolverDraft(recipe, target, facts)
    for key, plain in PLAIN.items():
        draft.fill(key, plain, "")
    for fill in FILLS:
        fill(draft)
    return draft


def ranks(draft: ResolverDraft) -> None:
    target = draft.target
    tp = draft.given("parallelism.tp")
    dp = _known_dp(draft)
    fewest = _fewest_ranks(draft)
    if target.world_size is not None:
        draft.fill("launcher.ranks", target.world_size, "torchrun started them")
    elif draft["launcher.kind"] != "local":
        world = draft["launcher.nodes"] * draft["launcher.ranks_per_node"]
        draft.fill("launcher.ranks", world, "launcher.nodes · launcher.ranks_per_node")
    elif tp is not None and dp is not None:
        inner = tp * draft["parallelism.pp"] * draft["parallelism.cp"]
        draft.fill("launcher.ranks", inner * dp, "the product of the parallel degrees")
    elif target.device == "cuda":
        _rank_for_each_gpu(draft, tp=tp, dp=dp, fewest=fewest)
    elif target.places is not None:
        _rank_for_each_place(draft, tp=tp, multiple_of=max(fewest, dp or 1))
    else:
        _rank_for_each_core(draft, multiple_of=max(fewest, dp or 1))


def _known_dp(draft: ResolverDraft) -> int | None:
    """Data-parallel ranks, where what is set says how many."""
    strategy = draft["parallelism.dp_strategy"]
    replicas = draft.given("parallelism.dp_replicate")
    shards = draft.given("parallelism.dp_shard")
    # which of the two has to be set: the other one is 1 unless it is set as well
    if strategy == "replicate":
        is_known = replicas is not None
    elif strategy == "hsdp":
        is_known = replicas is not None and shards is not None
    else:
        is_known = shards is not None
    if not is_known:
        return None
    return (replicas or 1) * (shards or 1)


def _fewest_ranks(draft: ResolverDraft) -> int:
    """Ranks that the degrees that are set need at least, data parallel left out."""
    degrees = {}
    for axis in ("tp", "cp", "pp", "ep", "etp"):
        degrees[axis] = draft.given(f"parallelism.{axis}") or 1
    return fewest_gpus(**degrees)


def _rank_for_each_gpu(draft: ResolverDraft, *, tp: int | None, dp: int | None, fewest: int) -> None:
    """Every GPU; where dp is open, as many as data-parallel ranks divide every global batch over."""
    gpus = draft.target.gpus
    most = _most_that_divide_the_batch(draft, gpus, tp=tp, multiple_of=fewest)
    reason = f"one per GPU ({draft.target.gpu})"
    if dp is None and most < gpus:
        draft.fill("launcher.ranks", most, f"{reason}, as many of the {gpus} as divide the global batch")
    else:
        draft.fill("launcher.ranks", gpus, reason)


def _most_that_divide_the_batch(draft: ResolverDraft, devices: int, *, tp: int | None, multiple_of: int) -> int:
    """The most ranks, a multiple, over which data parallel divides every global batch; all where none do."""
    inner = (tp or 1) * draft["parallelism.pp"] * draft["parallelism.cp"]
    batch_unit = _batch_unit(draft)
    most = devices
    for n_ranks in range(multiple_of, devices + 1, multiple_of):
        if batch_unit % max(1, n_ranks // inner) == 0:
            most = n_ranks
    return most


def _rank_for_each_core(draft: ResolverDraft, *, multiple_of: int) -> None:
    """Without a GPU: the largest multiple that the cores have room for, and one multiple at least."""
    most = min(CPU_RANKS, draft.target.cores)
    n_ranks = max(multiple_of, most // multiple_of * multiple_of)
    reason = f"no GPU: one per core up to {CPU_RANKS}, a multiple of the degrees that are set"
    draft.fill("launcher.ranks", n_ranks, reason)


def _rank_for_each_place(draft: ResolverDraft, *, tp: int | None, multiple_of: int) -> None:
    """On a CPU of which a supervisor says how many ranks it has room for: as on as many GPUs."""
    places = draft.target.places
    assert places is not None, "nothing says how many"
    most = _most_that_divide_the_batch(draft, places, tp=tp, multiple_of=multiple_of)
    n_ranks = max(multiple_of, most // multiple_of * multiple_of)
    reason = f"as many of the {places} devices that may be used as divide the global batch"
    draft.fill("launcher.ranks", n_ranks, reason)


def layout(draft: ResolverDraft) -> None:
    pp_cp = draft["parallelism.pp"] * draft["parallelism.cp"]
    # ranks that tensor and data parallel share
    tp_dp = max(1, draft["launcher.ranks"] // pp_cp)
    dp = _known_dp(draft)
    of_ranks = "launcher.ranks"
    if pp_cp > 1:
        of_ranks = f"launcher.ranks / (pp · cp) = {tp_dp},"
    if dp is not None:
        draft.fill("parallelism.tp", max(1, tp_dp // dp), f"{of_ranks} / data-parallel ranks")
    elif draft.target.device == "cuda":
        draft.fill("parallelism.tp", 1, "data parallel communicates least; raise it when a model does not fit")
    else:
        draft.fill("parallelism.tp", _widest_tp(draft, tp_dp), "no GPU: as many ranks as heads and widths divide by")
    _data_parallel(draft, max(1, tp_dp // draft["parallelism.tp"]), of_ranks)
    _sequence_parallel(draft)


def _data_parallel(draft: ResolverDraft, dp: int, of_ranks: str) -> None:
    """Replicas and shards of `dp` ranks. `of_ranks`: what these are a quotient of, in words."""
    strategy = draft["parallelism.dp_strategy"]
    replicas = draft.given("parallelism.dp_replicate")
    shards = draft.given("parallelism.dp_shard")
    # zero1, zero2 and fsdp have one replica; of the others the strategy says which number follows from the other
    if strategy == "replicate":
        draft.fill("parallelism.dp_shard", 1, "dp_strategy=replicate shards nothing")
        draft.fill("parallelism.dp_replicate", max(1, dp // (shards or 1)), f"{of_ranks} / tp")
    elif strategy == "hsdp":
        tp_cp = draft["parallelism.tp"] * draft["parallelism.cp"]
        expert_grid = draft["parallelism.ep"] * draft["parallelism.etp"]
        shard, reason = shards_of_a_replica(dp, tp_cp, node=NODE_RANKS, grid=expert_grid)
        if replicas:
            shard = max(1, dp // replicas)
        draft.fill("parallelism.dp_shard", shard, reason)
        replicas = max(1, dp // draft["parallelism.dp_shard"])
        draft.fill("parallelism.dp_replicate", replicas, f"{of_ranks} / tp / dp_shard")
    else:
        replicas = 1
        if shards:
            replicas = max(1, dp // shards)
        draft.fill("parallelism.dp_replicate", replicas, f"dp_strategy={strategy}")
        draft.fill("parallelism.dp_shard", max(1, dp // draft["parallelism.dp_replicate"]), f"{of_ranks} / tp")


def _sequence_parallel(draft: ResolverDraft) -> None:
    tp = draft["parallelism.tp"]
    splits = can_split_sequences(
        tp=tp,
        cp=draft["parallelism.cp"],
        seq_len=draft["data.seq_len"],
        max_seq_len=draft["model.max_seq_len"],
    )
    if tp == 1:
        draft.fill("parallelism.sequence_parallel", False, "tp is 1")
    elif splits:
        reason = "tp > 1: norms and dropout then work on a part of the tokens"
        draft.fill("parallelism.sequence_parallel", True, reason)
    else:
        draft.fill("parallelism.sequence_parallel", False, f"the sequence length is no multiple of tp={tp}")


def pipeline(draft: ResolverDraft) -> None:
    chunks = draft["parallelism.pipeline.virtual_stages"]
    if chunks > 1:
        draft.fill("parallelism.pipeline.schedule", "interleaved", f"virtual_stages={chunks}")
    else:
        draft.fill("parallelism.pipeline.schedule", "1f1b", "one chunk per rank")
    draft.fill("parallelism.pipeline.micro_batch_group", draft["parallelism.pp"], "parallelism.pp")


def _widest_tp(draft: ResolverDraft, ranks: int) -> int:
    """The largest divisor of `ranks` that divides heads and widths; 1 always does."""
    heads = draft["model.n_heads"]
    kv_heads = draft["model.n_kv_heads"]
    d_ffn = draft["model.d_ffn"]
    for tp in reversed(divisors(ranks)):
        # a key and value head may be held by several ranks, each with other queries
        fits_kv_heads = kv_heads % tp == 0 or tp % kv_heads == 0
        if heads % tp == 0 and d_ffn % tp == 0 and fits_kv_heads:
            return tp
    return 1


def _batch_unit(draft: ResolverDraft) -> int:
    """What every global batch that occurs is a multiple of, in sequences."""
    ramp = draft["train.batch_ramp"]
    if not ramp:
        return draft["train.global_batch"]
    return gcd(draft["train.global_batch"], ramp["start"], ramp["increment"])


def micro_batch(draft: ResolverDraft) -> None:
    dp = draft["parallelism.dp_replicate"] * draft["parallelism.dp_shard"]
    # sequences of a rank in the smallest step
    share, rest = divmod(_batch_unit(draft), dp)
    if rest:
        share = 1  # what the ranks don't divide is refused: with 1, for their number alone
    pp = draft["parallelism.pp"]
    # a pipeline needs a micro batch for each stage
    most_for_stages = share // pp
    most_for_tokens = max(1, MICRO_BATCH_TOKENS * draft["parallelism.cp"] // draft["data.seq_len"])
    most = max(1, min(most_for_stages, most_for_tokens))
    largest = max(m for m in divisors(share) if m <= most)
    stages = ""
    if pp > 1:
        stages = f" that leaves {pp} micro batches, one a stage,"
    reason = f"the largest divisor of a rank's {share}{stages} with at most 8,192 tokens"
    draft.fill("train.micro_batch", largest, reason)


def kernels(draft: ResolverDraft) -> None:
    device = draft.target.device
    use = _kernel_use(draft)
    where = f"the best that runs on {draft.target.gpu or device}"
    # what decides beside the device, where something does
    reasons = {"grouped": f"{where} in {use.precision}"}
    if use.narrow_states:
        reasons["adamw"] = f"{where} with the states of optim.formats"
    packages = draft.target.versions
    for operation in CATALOG:
        best = choose(operation, device=device, sm=draft.target.sm, use=use, packages=packages)
        reason = reasons.get(operation, where)
        if operation in use.small and operation not in use.writes_fp8:
            reason += " in layers so small that they wait for the host"
        if operation == "attention":
            measured = fastest_attention(draft.target, use)
            if measured is not None:
                best = measured
                reason = _fastest_measured(draft.target, use)
            elif device == "cuda":
                reason = _first_of_the_catalog(use)
            if best == "sdpa" and device == "cuda" and use.deterministic:
                reason += ", FlashAttention-2 with train.deterministic=true"
        if operation in IDLE_BESIDE_LINEAR and casts_itself(draft["kernels.linear"], use.fp8_recipe):
            reason = f"not used: kernels.linear={draft['kernels.linear']} casts and multiplies itself"
        chosen = CATALOG[operation].implementations[best]
        if chosen.skips_hidden:
            reason += ", leaves out what windows, chunks or documents hide"
        if chosen.writes_fp8 and operation in use.writes_fp8:
            reason += ", writes fp8 itself by delayed scales"
        if operation == "attention" and device == "cuda":
            if measured is None:
                reason += _not_measured(draft.target, use)
            reason += _faster_but_left_out(best, draft.target, use)
        draft.fill(f"kernels.{operation}", best, reason)
    if device == "cuda":
        draft.fill("kernels.compile", "block", "fuses what lies between matrix products")
    else:
        draft.fill("kernels.compile", "none", "no GPU")


def _fastest_measured(target: Target, use: Use) -> str:
    """Why an implementation of attention is taken that was measured, and in what the use differs from that."""
    where = target.gpu
    if use.deterministic:
        # where this kind of GPU was not measured so
        where = one_order_measured_on(target) or target.gpu
    reason = f"the fastest that was measured on {where} for heads of {use.head_size}"
    if use.blocks:
        reason += " and whole sequences"
    if use.score_cap:
        reason += " without a cap of scores"
    if use.deterministic:
        reason += " with sums in one order"
    return reason


def _first_of_the_catalog(use: Use) -> str:
    """Why an implementation of attention is taken where no two were measured for the use."""
    reason = "first of the catalog that runs"
    if use.attention_dropout:
        return f"{reason} with attention dropout"
    if use.score_cap:
        return f"{reason} with capped attention scores"
    if use.blocks:
        return f"{reason} on parts of sequences"
    return reason


def _not_measured(target: Target, use: Use) -> str:
    """That nothing compares implementations of attention for the use, with the command that would measure them."""
    if use.attention_dropout:
        # nothing else runs
        return ""
    if use.score_cap:
        return "; not measured with capped scores"
    can_be_measured = hardware_of(target) is not None and use.head_size in HEAD_SIZES and use.precision in HALF
    rates = [rate for rate in attention_rates(target) if rate.deterministic == use.deterministic]
    if can_be_measured and use.blocks and rates:
        return f"; only whole sequences were measured on {target.gpu}"
    if can_be_measured and not rates:
        order = " with sums in one order" if use.deterministic else ""
        return f"; not measured on {target.gpu}{order}: megaspec bench throughput measures it"
    return f"; not measured on {target.gpu} for heads of {use.head_size} in {use.precision}"


def _faster_but_left_out(best: str, target: Target, use: Use) -> str:
    """What was measured to be faster than what is taken, in the order of sums that is asked for, and why it is not
    taken; "" where nothing was. With capped scores nothing was measured."""
    if use.head_size is None or use.score_cap:
        return ""
    kind = kind_of(documents=use.documents, window=use.window)
    shares = faster_ones(
        attention_rates(target), best, kind=kind, head_size=use.head_size, deterministic=use.deterministic
    )
    left_out = []
    for name, share in shares.items():
        left_out.append(f"{name} takes {1 - share:.0%} less, {_why_not(name, target, use)}")
    if not left_out:
        return ""
    return f"; left out: {'; '.join(left_out)}"


def _why_not(name: str, target: Target, use: Use) -> str:
    """Why an implementation of attention is not taken: what installing its package does not change comes first."""
    need = CATALOG["attention"].implementations[name]
    unmet_anyway = unmet("attention", name, device=target.device, sm=target.sm, use=use, packages=PACKAGES)
    if unmet_anyway is not None:
        return unmet_anyway
    return f"not installed here: {need.install}"


def _kernel_use(draft: ResolverDraft) -> Use:
    """What the recipe asks of its kernels, in the catalog's words."""
    moe = draft["model"].get("moe")
    # both sides of the experts' products on a rank
    widths: tuple[int, ...] = ()
    if moe:
        widths = (draft["model.d_model"], moe["d_expert"] // draft["parallelism.etp"])
    return Use(
        attention_dropout=draft["model.attention.dropout"] > 0,
        score_cap=draft.recipe.model.caps_scores,
        hides_keys=draft.recipe.data.document_mask or draft.recipe.model.hides_keys(draft["data.seq_len"]),
        documents=draft.recipe.data.document_mask,
        window=draft.recipe.model.hides_keys(draft["data.seq_len"]),
        blocks=attends_to_blocks(draft["parallelism.context.kind"], cp=draft["parallelism.cp"]),
        deterministic=draft["train.deterministic"],
        head_size=draft["model.d_head"],
        precision=model_format(draft.recipe.precision),
        fp8_recipe=fp8_recipe(draft.recipe.precision),
        writes_fp8=_writers_of_fp8(draft),
        small=_in_small_layers(draft),
        widths=widths,
        narrow_states=has_narrow_states(draft.recipe.optim),
    )


def _in_small_layers(draft: ResolverDraft) -> frozenset[str]:
    """Operations whose kernels, started one by one, would keep a GPU waiting; see SMALL_LAYER."""
    if draft.target.device != "cuda":
        return frozenset()
    tokens = draft["train.micro_batch"] * draft["data.seq_len"]
    if tokens * draft["model.d_model"] ** 2 >= SMALL_LAYER:
        return frozenset()
    if any("mlp" in mixers for mixers in draft.recipe.model.mixers):
        return frozenset({"norm", "gated"})
    # experts' gates are in no compiled layer
    return frozenset({"norm"})


def _writers_of_fp8(draft: ResolverDraft) -> frozenset[str]:
    """Operations that may write fp8 themselves, where some layer has what takes it; see parallelism/fp8.py."""
    precision = draft.recipe.precision
    recompute = draft.recipe.parallelism.recompute
    may = may_write_fp8(
        precision,
        recomputed=recompute.model_copy(update={"kind": draft["parallelism.recompute.kind"]}).alone,
        linear=draft.recipe.kernels.linear,
    )
    if not may:
        return may
    model = draft.recipe.model
    layers = precision.layers(model.n_layers)
    takers = set()
    for mixers in model.mixers[layers.start : layers.stop]:
        takers.update(mixers)
    # experts quantise their rows themselves
    takers.discard("moe")
    found = set()
    if takers and norms_before_mixers(model.layer):
        found.add("norm")
    has_gate = isinstance(model.mlp, GatedMlpSpec | ClampedMlpSpec) and not model.mlp.bias
    if "mlp" in takers and has_gate:
        found.add("gated")
    if "attention" in takers and model.rotation_writes_gradient:
        found.add("rope")
    return may & found


def number_format(draft: ResolverDraft) -> None:
    precision = draft.recipe.precision
    if not isinstance(precision, Fp8Precision):
        return
    if precision.recipe in ("tensorwise", "delayed"):
        draft.fill("precision.format", "hybrid", "gradients of a whole tensor need the range of e5m2")
    else:
        draft.fill("precision.format", "e4m3", "scales of parts of a tensor leave it range enough")


def schedule(draft: ResolverDraft) -> None:
    steps = draft["train.steps"]
    first = draft["optim.schedule.first_step"]
    if first == 0:
        draft.fill("optim.schedule.decay_steps", steps, "train.steps")
    # a schedule that would begin behind the run is refused
    draft.fill("optim.schedule.decay_steps", max(1, steps - first), "train.steps - optim.schedule.first_step")


def logging(draft: ResolverDraft) -> None:
    if "tensorboard" in draft.target.versions:
        draft.fill("log.tensorboard", True, "tensorboard is installed")
    else:
        draft.fill("log.tensorboard", False, "tensorboard is not installed")


FILLS: tuple[Callable[[ResolverDraft], None], ...] = (
    # first: what the batch grows by is read by all that divides it
    beginnings,
    run_folder,
    seeds,
    model_shape,
    vocabulary,
    data_cache,
    data_lanes,
    # before layouts are weighed by them
    document_lengths,
    searched,
    # ranks before the layout that divides them, the layout before the batch that it divides
    ranks,
    layout,
    pipeline,
    micro_batch,
    number_format,
    kernels,
    schedule,
    logging,
)
