"""What a case is an instance of: the rows and columns of the matrix in README.md."""

from collections.abc import Callable
from typing import Any

from tests.parity.cases import ATTENTIONS, EXPERTS, ROUTERS, Case
from tests.parity.sets import RECOMPUTES

Has = Callable[[Case], bool]


def _losses(case: Case) -> set[str]:
    router = ROUTERS[case.router]["router"] if case.router else {}
    return {loss["kind"] for loss in router.get("losses", ())} | ({"z"} if router.get("z_loss") else set())


def _router(case: Case, name: str, value: object) -> bool:
    return bool(case.router) and ROUTERS[case.router]["router"].get(name) == value


def _also(case: Case, start: str) -> bool:
    return any(path.startswith(start) for path, _ in case.also)


AXES: dict[str, Has] = {
    "tp": lambda c: c.tp > 1,
    "sp": lambda c: c.sequence,
    "pp": lambda c: c.pp > 1,
    "cp": lambda c: c.cp > 1,
    "ep": lambda c: c.ep > 1,
    "etp": lambda c: c.etp > 1,
    "dp": lambda c: c.dp > 1 and c.strategy == "replicate",
    "zero1": lambda c: c.strategy == "zero1",
    "zero2": lambda c: c.strategy == "zero2",
    "fsdp": lambda c: c.strategy == "fsdp",
    "hsdp": lambda c: c.strategy == "hsdp",
}
MORE: dict[str, Has] = {
    "gpipe": lambda c: c.pp > 1 and c.schedule == "gpipe",
    "1f1b": lambda c: c.pp > 1 and c.schedule == "1f1b",
    "interleaved 1f1b": lambda c: c.pp > 1 and c.schedule == "interleaved",
    "zero bubble H1": lambda c: c.pp > 1 and c.schedule == "zb_h1",
    "zero bubble V": lambda c: c.pp > 1 and c.schedule == "zb_v",
    "uneven, counted or empty stages": lambda c: _also(c, "parallelism.pipeline."),
    "micro batches that stages don't divide": lambda c: c.accumulate % c.pp > 0,
    "ring": lambda c: c.cp > 1 and c.context == "ring",
    "all-gather of keys and values": lambda c: c.cp > 1 and c.context == "all_gather",
    "all-to-all over heads": lambda c: c.cp > 1 and c.context == "all_to_all",
    "all-to-all inside a ring": lambda c: c.cp > 1 and c.context == "hierarchical",
    "dispatch by all-to-all": lambda c: c.ep * c.etp > 1 and c.dispatch == "all_to_all",
    "dispatch by all-gather": lambda c: c.ep * c.etp > 1 and c.dispatch == "all_gather",
    "softmax after or before the choice": lambda c: c.router in ("softmax", "first"),
    "sigmoid, groups of experts": lambda c: c.router == "sigmoid",
    "root of softplus, jitter": lambda c: c.router == "root",
    "sinkhorn": lambda c: c.router == "sinkhorn",
    "groups by their best expert or two": lambda c: c.router in ("best of group", "best two of group"),
    "sigmoid alone as the weight": lambda c: c.router == "scores",
    "bias on the router's logits": lambda c: _router(c, "logit_bias", True),
    "experts with biases": lambda c: bool(_mlp(c).get("bias")),
    "experts with other activations": lambda c: c.experts in ("gelu", "plain", "clamped", "inputs, bias"),
    "weights on the experts' inputs": lambda c: EXPERTS[c.experts].get("weights_on") == "inputs",
    "loss-free bias": lambda c: _router(c, "bias_rate", 0.02),
    "auxiliary loss": lambda c: "aux" in _losses(c),
    "sequence-auxiliary loss": lambda c: "seq_aux" in _losses(c),
    "global-auxiliary loss": lambda c: "global_aux" in _losses(c),
    "z-loss": lambda c: "z" in _losses(c),
    "drop by weight": lambda c: c.drop == "probs",
    "drop by position": lambda c: c.drop == "position",
    "padded to capacity": lambda c: c.drop == "padded",
    "shared experts": lambda c: c.shared == "plain",
    "shared experts with a gate": lambda c: c.shared == "gate",
    "full recompute": lambda c: c.also in (RECOMPUTES[n] for n in ("uniform 1", "uniform 2", "block 1")),
    "selective recompute": lambda c: _also(c, "parallelism.recompute.") and c.also[0][1] == "selective",
    "overlaps switched off": lambda c: _also(c, "parallelism.overlap."),
    "activations and optimizer on the CPU": lambda c: _also(c, "parallelism.offload."),
    "frozen parameters": lambda c: bool(c.trainable),
    "nothing trained on the first stage": lambda c: c.pp > 1 and c.trainable == "head",
    "packed documents": lambda c: c.documents,
    "grouped key/value heads": lambda c: c.kv_heads < 4,
    "norms of queries and keys": lambda c: c.qk_norm,
    "norms over all heads": lambda c: _attention(c).get("qk_norm") == "whole",
    "norms behind rotary positions": lambda c: _attention(c).get("qk_norm") == "l2",
    "windows": lambda c: _attention(c).get("mask", {}).get("kind") == "window",
    "chunks of attention": lambda c: _attention(c).get("mask", {}).get("kind") == "chunk",
    "attention sinks": lambda c: "sinks" in _attention(c),
    "capped scores": lambda c: "score_cap" in _attention(c),
    "clamped queries, keys and values": lambda c: "clip_qkv" in _attention(c),
    "gated output of attention": lambda c: "output_gate" in _attention(c),
    "temperature of queries": lambda c: "temperature" in _attention(c),
    "tied embeddings": lambda c: c.tied,
    "vocabulary padded further": lambda c: c.pad > 1,
    "dropout": lambda c: c.dropout,
    "uneven masks": lambda c: c.mask == "uneven",
    "a data rank without valid tokens": lambda c: c.mask == "empty_rank",
    "a micro batch without valid tokens": lambda c: c.mask == "empty_micro",
    "a part of the sequence without valid tokens": lambda c: c.mask == "empty_part",
    "SGD": lambda c: c.optimizer == "sgd",
    "AdamW with clipping": lambda c: c.optimizer == "adamw",
    "Muon": lambda c: c.optimizer == "muon",
    "Llama": lambda c: c.family == "llama",
    "GPT-2": lambda c: c.family == "gpt",
    "norms behind": lambda c: c.family == "post",
    "norms before and behind": lambda c: c.family == "sandwich",
    "sub-layers side by side": lambda c: c.family == "parallel",
    "one sub-layer a layer": lambda c: c.family == "flat",
    "layers that turn differently": lambda c: c.family == "mixed",
    "scaled branches, shaped logits, head bias": lambda c: c.family == "ends",
}


def _mlp(case: Case) -> dict[str, Any]:
    """The options of an expert."""
    return EXPERTS[case.experts].get("mlp", {})


def _attention(case: Case) -> dict[str, Any]:
    """The options of its attention."""
    return ATTENTIONS[case.options]


def is_alone(case: Case) -> bool:
    """Whether it has one axis alone; experts lie over the ranks of another one."""
    has = {name for name, has in AXES.items() if has(case)}
    return len(has - {"sp"}) == 1 or (len(has - {"ep", "etp"}) == 1 and bool(has & {"ep", "etp"}) and case.dp > 1)
