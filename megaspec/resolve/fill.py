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
from megaspec.core.errors import Problem
from megaspec.core.frozen import AUTO
from megaspec.core.problems import value_at
from megaspec.estimate.ceilings import ceilings_of
from megaspec.estimate.hardware import LEFT_FREE, Hardware, hardware_of
from megaspec.estimate.target import Target
from megaspec.model.gpt.spec import GptSpec
from megaspec.optim.spec import has_narrow_states
from megaspec.recipe import Recipe
from megaspec.rules.case import can_split_sequences
from megaspec.rules.run_facts import Facts
from megaspec.rules.unbuilt import unbuilt_problems
from megaspec.search.tune import DIVIDES, SEARCHED, Grid, shards_of_a_replica, tune
from megaspec.spec import Decision
from megaspec_kernels.catalog import CATALOG, Use, choose

MICRO_BATCH_TOKENS = 8192
CPU_RANKS = 2
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


class Draft:
    """A recipe as plain data while it is filled."""

    def __init__(self, recipe: Recipe, target: Target, facts: Facts):
        self.content: dict[str, Any] = recipe.model_dump(mode="json")
        self.recipe, self.target, self.facts = recipe, target, facts
        self.decisions: list[Decision] = []
        self.problems: list[Problem] = []

    def __getitem__(self, key: str) -> Any:
        return value_at(self.content, key)

    def is_open(self, key: str) -> bool:
        return self[key] == AUTO

    def given(self, key: str) -> Any:
        """The value at a path, None while it is open."""
        return None if self.is_open(key) else self[key]

    def fill(self, key: str, value: Any, reason: str) -> None:
        """Decides an open field; a field that was set stays."""
        if self.is_open(key):
            section, _, name = key.rpartition(".")
            (value_at(self.content, section) if section else self.content)[name] = value
            self.decisions.append(Decision(key=key, value=value, reason=reason))


def run_folder(draft: Draft) -> None:
    draft.fill("run_dir", draft.facts.run_dir, "runs/<name>, with a number where that exists")


def seeds(draft: Draft) -> None:
    draft.fill("data.seed", draft["train.seed"], "train.seed")


def model_shape(draft: Draft) -> None:
    d_model, n_heads = draft["model.d_model"], draft["model.n_heads"]
    draft.fill("model.n_kv_heads", n_heads, "model.n_heads: no grouped-query attention")
    latent = draft["model.mla"]
    if latent:
        draft.fill("model.d_head", latent["d_nope"] + latent["d_rope"], "model.mla.d_nope + model.mla.d_rope")
    draft.fill("model.d_head", max(1, d_model // n_heads), "model.d_model / model.n_heads")
    if isinstance(draft.recipe.model, GptSpec):
        draft.fill("model.d_ffn", 4 * d_model, "4 model.d_model")
    else:
        draft.fill("model.d_ffn", max(64, 8 * d_model // 3 // 64 * 64), "8/3 model.d_model, rounded down to 64")
    draft.fill("model.max_seq_len", draft["data.seq_len"], "data.seq_len")
    if draft["model.moe"]:
        draft.fill("model.moe.d_expert", draft["model.d_ffn"], "model.d_ffn")


def vocabulary(draft: Draft) -> None:
    if draft.facts.vocab_size is not None:
        draft.fill("model.vocab_size", draft.facts.vocab_size, "the data's tokenizer")
    elif draft.is_open("model.vocab_size"):
        text = "model.vocab_size=auto takes the data's vocabulary, which is not known; prepare the data or set it"
        draft.problems.append(Problem("model.vocab_size", text, code="vocab-unknown"))
        draft.content["model"]["vocab_size"] = 1


def data_cache(draft: Draft) -> None:
    if draft["data.kind"] == "indexed":
        folder = PurePath(draft["data.blend"][0]["prefix"]).parent / "index-cache"
        draft.fill("data.cache", str(folder), "beside the first data set")


def searched(draft: Draft) -> None:
    """Degrees that only a search decides; on a machine that nothing is known about, the plain choice."""
    if any(draft[key] for key in DIVIDES):
        draft.fill("parallelism.pipeline.layout", None, "another setting says how layers are divided")
    if not any(draft.is_open(key) for key in PLAIN):
        return
    hardware = hardware_of(draft.target) if draft.target.device == "cuda" else None
    why = "no GPU that is known: nothing to search with"
    grid = None if hardware is None else _grid(draft, hardware)
    if grid is not None:
        found = tune(grid, most=1)
        why = f"no layout {'that can be trained ' if grid.is_for_training else ''}keeps every rule"
        if found.best:
            best = found.best[0].recipe.model_dump(mode="json")
            too_full = f"nothing leaves {100 * LEFT_FREE:.0f} % of the memory free; it needs least"
            fate = "fastest that fits" if found.best[0].fits else too_full
            for key in SEARCHED:
                draft.fill(key, value_at(best, key), f"{fate}, {found.considered:,} considered (megaspec tune)")
    for key, plain in PLAIN.items():
        draft.fill(key, plain, why)


def _grid(draft: Draft, hardware: Hardware) -> Grid | None:
    """What is searched: what is set stays as it is. Of what can be trained in a plain layout only layouts that can be
    trained count, of all else every layout. None: what was filled so far is out of bounds, which `settle` tells."""
    open_keys = frozenset(key for key in SEARCHED if draft.is_open(key))
    try:
        recipe = Recipe.model_validate_json(json.dumps(draft.content))
    except ValidationError:
        return None
    base = plainly_filled(recipe, draft.target, draft.facts)
    can_train = not unbuilt_problems(base)
    return Grid(base, draft.target, draft.facts, hardware, ceilings_of(hardware), open_keys, is_for_training=can_train)


def plainly_filled(recipe: Recipe, target: Target, facts: Facts) -> Recipe:
    """The recipe with every auto filled, without a search: what a search starts from."""
    return Recipe.model_validate_json(json.dumps(plainly_drafted(recipe, target, facts).content))


def plainly_drafted(recipe: Recipe, target: Target, facts: Facts) -> Draft:
    """The draft of a recipe that is filled without a search."""
    draft = Draft(recipe, target, facts)
    for key, plain in PLAIN.items():
        draft.fill(key, plain, "")
    for fill in FILLS:
        fill(draft)
    return draft


def _unit(draft: Draft) -> int:
    """Ranks that the degrees that are set need at least, data parallel left out."""
    degrees = {axis: draft.given(f"parallelism.{axis}") or 1 for axis in ("tp", "cp", "pp", "ep", "etp")}
    return fewest_gpus(**degrees)


def ranks(draft: Draft) -> None:
    target, tp = draft.target, draft.given("parallelism.tp")
    replicas, shards = draft.given("parallelism.dp_replicate"), draft.given("parallelism.dp_shard")
    dp = _known_dp(draft["parallelism.dp_strategy"], replicas, shards)
    unit = _unit(draft)
    if target.world_size is not None:
        draft.fill("launcher.ranks", target.world_size, "torchrun started them")
    elif tp is not None and dp is not None:
        inner = tp * draft["parallelism.pp"] * draft["parallelism.cp"]
        draft.fill("launcher.ranks", inner * dp, "the product of the parallel degrees")
    elif target.device == "cuda":
        inner = (tp or 1) * draft["parallelism.pp"] * draft["parallelism.cp"]
        legal = [n for n in range(unit, target.gpus + 1, unit) if _smallest_share(draft) % max(1, n // inner) == 0]
        most = max(legal, default=target.gpus)
        why = f"one per GPU ({target.gpu})"
        if dp is None and most < target.gpus:
            draft.fill("launcher.ranks", most, f"{why}, as many of the {target.gpus} as divide the global batch")
        else:
            draft.fill("launcher.ranks", target.gpus, why)
    else:
        most = min(CPU_RANKS, target.cores)
        least = max(unit, dp or 1)
        reason = f"no GPU: one per core up to {CPU_RANKS}, a multiple of the degrees that are set"
        draft.fill("launcher.ranks", max(least, most // least * least), reason)


def _known_dp(strategy: str, replicas: int | None, shards: int | None) -> int | None:
    """Data-parallel ranks, where what is set says how many."""
    if strategy == "replicate":
        return None if replicas is None else replicas * (shards or 1)
    if strategy == "hsdp":
        return None if replicas is None or shards is None else replicas * shards
    return None if shards is None else shards * (replicas or 1)


def layout(draft: Draft) -> None:
    strategy = draft["parallelism.dp_strategy"]
    inner = draft["parallelism.pp"] * draft["parallelism.cp"]
    n = max(1, draft["launcher.ranks"] // inner)
    dp = _known_dp(strategy, draft.given("parallelism.dp_replicate"), draft.given("parallelism.dp_shard"))
    over = "launcher.ranks" if inner == 1 else f"launcher.ranks / (pp · cp) = {n},"
    if dp is not None:
        draft.fill("parallelism.tp", max(1, n // dp), f"{over} / data-parallel ranks")
    elif draft.target.device == "cuda":
        draft.fill("parallelism.tp", 1, "data parallel communicates least; raise it when a model does not fit")
    else:
        draft.fill("parallelism.tp", _widest_tp(draft, n), "no GPU: as many ranks as heads and widths divide by")
    _data_parallel(draft, strategy, max(1, n // draft["parallelism.tp"]), over)
    tp, lengths = draft["parallelism.tp"], {"seq_len": draft["data.seq_len"], "max_seq_len": draft["model.max_seq_len"]}
    if tp > 1 and not can_split_sequences(tp=tp, cp=draft["parallelism.cp"], **lengths):
        draft.fill("parallelism.sequence_parallel", False, f"the sequence length is no multiple of tp={tp}")
    else:
        reason = "tp > 1: norms and dropout then work on a part of the tokens" if tp > 1 else "tp is 1"
        draft.fill("parallelism.sequence_parallel", tp > 1, reason)


def _data_parallel(draft: Draft, strategy: str, dp: int, over: str) -> None:
    replicas, shards = draft.given("parallelism.dp_replicate"), draft.given("parallelism.dp_shard")
    if strategy == "replicate":
        draft.fill("parallelism.dp_shard", 1, "dp_strategy=replicate shards nothing")
        draft.fill("parallelism.dp_replicate", max(1, dp // (shards or 1)), f"{over} / tp")
    elif strategy == "hsdp":
        inner, grid = (
            draft["parallelism.tp"] * draft["parallelism.cp"],
            draft["parallelism.ep"] * draft["parallelism.etp"],
        )
        shard, why = shards_of_a_replica(dp, inner, node=NODE_RANKS, grid=grid)
        draft.fill("parallelism.dp_shard", max(1, dp // replicas) if replicas else shard, why)
        draft.fill("parallelism.dp_replicate", max(1, dp // draft["parallelism.dp_shard"]), f"{over} / tp / dp_shard")
    else:
        draft.fill("parallelism.dp_replicate", max(1, dp // shards) if shards else 1, f"dp_strategy={strategy}")
        draft.fill("parallelism.dp_shard", max(1, dp // draft["parallelism.dp_replicate"]), f"{over} / tp")


def pipeline(draft: Draft) -> None:
    chunks = draft["parallelism.pipeline.virtual_stages"]
    if chunks > 1:
        draft.fill("parallelism.pipeline.schedule", "interleaved", f"virtual_stages={chunks}")
    else:
        draft.fill("parallelism.pipeline.schedule", "1f1b", "one chunk per rank")
    draft.fill("parallelism.pipeline.micro_batch_group", draft["parallelism.pp"], "parallelism.pp")


def _widest_tp(draft: Draft, n: int) -> int:
    heads, kv, ffn = draft["model.n_heads"], draft["model.n_kv_heads"], draft["model.d_ffn"]
    fits = (t for t in reversed(divisors(n)) if not (heads % t or ffn % t) and (kv % t == 0 or t % kv == 0))
    return next(fits)


def _smallest_share(draft: Draft) -> int:
    """What every global batch that occurs is a multiple of, in sequences."""
    ramp = draft["train.batch_ramp"]
    return gcd(draft["train.global_batch"], *([ramp["start"], ramp["increment"]] if ramp else []))


def micro_batch(draft: Draft) -> None:
    dp = draft["parallelism.dp_replicate"] * draft["parallelism.dp_shard"]
    whole, rest = divmod(_smallest_share(draft), dp)
    share = 1 if rest else whole  # what the ranks don't divide is refused: with 1, for their number alone
    most = max(1, MICRO_BATCH_TOKENS * draft["parallelism.cp"] // draft["data.seq_len"])
    pp = draft["parallelism.pp"]
    largest = max(m for m in divisors(share) if m <= max(1, min(share // pp, most)))
    stages = f" that leaves {pp} micro batches, one a stage," if pp > 1 else ""
    draft.fill(
        "train.micro_batch", largest, f"the largest divisor of a rank's {share}{stages} with at most 8,192 tokens"
    )


def kernels(draft: Draft) -> None:
    device, sm = draft.target.device, draft.target.sm
    drops = draft["model.attention_dropout"] > 0
    where = f"the best that runs on {draft.target.gpu or device}"
    moe, precision = draft["model"].get("moe"), draft["precision.kind"]
    narrow = has_narrow_states(draft.recipe.optim)
    use = Use(
        attention_dropout=drops,
        precision=precision,
        widths=(draft["model.d_model"], moe["d_expert"] // draft["parallelism.etp"]) if moe else (),
        narrow_states=narrow,
    )
    reasons = {
        "attention": f"{where}{' with attention dropout' if drops else ''}",
        "grouped": f"{where} in {precision}",
        "adamw": f"{where}{' with the states of optim.formats' if narrow else ''}",
    }
    for operation in CATALOG:
        best = choose(operation, device=device, sm=sm, use=use)
        draft.fill(f"kernels.{operation}", best, reasons.get(operation, where))
    if device == "cuda":
        draft.fill("kernels.compile", "block", "fuses what lies between matrix products")
    else:
        draft.fill("kernels.compile", "none", "no GPU")


def schedule(draft: Draft) -> None:
    draft.fill("optim.schedule.decay_steps", draft["train.steps"], "train.steps")


def logging(draft: Draft) -> None:
    installed = "tensorboard" in draft.target.versions
    draft.fill("log.tensorboard", installed, f"tensorboard is {'installed' if installed else 'not installed'}")


FILLS: tuple[Callable[[Draft], None], ...] = (
    run_folder,
    seeds,
    model_shape,
    vocabulary,
    data_cache,
    searched,
    # ranks before the layout that divides them, the layout before the batch that it divides
    ranks,
    layout,
    pipeline,
    micro_batch,
    kernels,
    schedule,
    logging,
)
