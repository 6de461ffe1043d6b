"""Planted bugs: each is one line of shipped source, and a case that it touches."""

from dataclasses import dataclass, replace

from tests.parity.cases import Case
from tests.parity.sets import RECOMPUTES
from tests.source_patch import Patch

TENSOR = "megaspec.parallelism.tensor"
SUMS = "megaspec.parallelism.reductions"


@dataclass(frozen=True)
class Bug:
    """A planted bug, a case that it touches, and whether the loss of the first step shows nothing of it."""

    name: str
    patch: Patch
    case: Case
    invisible: bool = False

    def __str__(self) -> str:
        return self.name


GENERAL = [
    Bug(
        "norm gradients not summed under sequence parallel",
        Patch(
            TENSOR,
            'self.sums.append(GradientSum(name, None, self.mesh.group("tp")))',
            "pass",
        ),
        Case(tp=2, sequence=True),
        invisible=True,
    ),
    Bug(
        "gradients doubled",
        Patch(SUMS, "into.copy_(grad)", "into.copy_(grad * 2)"),
        Case(dp=2),
        invisible=True,
    ),
    Bug(
        "last bucket not reduced",
        Patch(
            "megaspec.parallelism.bucket",
            "if self.shard_group.sum is None:",
            'if self.shard_group.sum is None or "embed.weight" in self.names:',
        ),
        Case(dp=2, mask="uneven"),
        invisible=True,
    ),
    Bug(
        "bucket not overwritten by the first micro batch",
        Patch(
            SUMS, "_put(grad, self.main_grads[name], name in bucket.fresh)", "_put(grad, self.main_grads[name], False)"
        ),
        Case(dp=2, accumulate=3, mask="uneven"),
        invisible=True,
    ),
    Bug(
        "a table's sum begins with that of the step before",
        Patch(
            "megaspec.nn.linear",
            "self._sum.add_part(product)",
            "self._sum.add_part(lambda into, overwrite: product(into, False))",
        ),
        Case(dp=2, accumulate=3, mask="uneven"),
        invisible=True,
    ),
    Bug(
        "a tied table is reduced before the embedding has added to it",
        Patch(
            "megaspec.parallelism.data_parallel",
            "ends_pass = isinstance(one.module, Embedding) or not has_embedding",
            "ends_pass = not isinstance(one.module, Embedding)",
        ),
        Case(dp=2, strategy="zero1", tied=True, mask="uneven"),
        invisible=True,
    ),
    Bug(
        "norms taken before tensor-parallel ranks have added up their parts",
        Patch(
            "megaspec.runtime.build",
            "changed_later=strategies.tensor.summed_later | strategies.pipeline.shared",
            "changed_later=strategies.pipeline.shared",
        ),
        Case(tp=2, sequence=True),
        invisible=True,
    ),
    Bug(
        "only the last micro batch of a matrix counts",
        Patch("megaspec.nn.linear", "self._is_fresh = False", "pass"),
        Case(dp=2, accumulate=3, mask="uneven"),
        invisible=True,
    ),
    Bug(
        "bucket reduced before the last micro batch",
        Patch(SUMS, "if last:", "if True:"),
        Case(dp=2, accumulate=3, mask="uneven"),
        invisible=True,
    ),
    Bug(
        "gradient of a shared key and value head not summed",
        Patch(TENSOR, "self.sums += [GradientSum(weight, held, group), GradientSum(bias, held, group)]", "pass"),
        Case(tp=4, kv_heads=2),
        invisible=True,
    ),
    Bug(
        "input gradient of a column-split layer not summed",
        Patch(
            TENSOR,
            "reducing = reduce(products.input_gradient(grad_out, weight), ctx.group)",
            "reducing = products.input_gradient(grad_out, weight)",
        ),
        Case(tp=2),
        invisible=True,
    ),
    Bug(
        "bias of a row-split layer added on every rank",
        Patch(
            TENSOR,
            "partial = self.product(x, None)",
            "partial = self.product(x, self.bias)",
        ),
        Case(tp=2, family="gpt", optimizer="sgd"),
        invisible=True,
    ),
    Bug(
        "norm counts copies twice",
        Patch("megaspec.optim.norm", "if piece.replica == 0]", "if piece.replica >= 0]"),
        Case(tp=2),
        invisible=True,
    ),
    Bug(
        "vectors decay too",
        Patch("megaspec.optim.master", "return parameter.dim() >= 2", "return parameter.dim() >= 1"),
        Case(tp=2),
        invisible=True,
    ),
    Bug(
        "same sequences on both data ranks",
        Patch("megaspec.verify.parity", "first = (j * dp + rank) * micro_batch", "first = (j * dp) * micro_batch"),
        Case(dp=2, accumulate=3),
    ),
    Bug(
        "loss divided by this rank's tokens",
        Patch("megaspec.runtime.step", "if built.mesh.world_size > 1:", "if built.mesh.world_size > 99:"),
        Case(dp=2, mask="uneven"),
    ),
    Bug(
        "mask shifted by one token",
        Patch(
            "megaspec.runtime.step", "split_batch(batch.mask) * weight", "split_batch(batch.mask.roll(1, 1)) * weight"
        ),
        Case(dp=2, mask="uneven"),
    ),
    Bug(
        "positions run on across documents",
        Patch(
            "megaspec.nn.decoder",
            "positions = index_T if documents is None else document_positions(documents.number)[:, index_T]",
            "positions = index_T",
        ),
        Case(tp=2, documents=True, family="gpt"),
    ),
    Bug(
        "same dropout mask on every part of the sequence",
        Patch(
            "megaspec.nn.dropout",
            "position = self.places_here(noise.index, T)",
            "position = noise.index[:T]",
        ),
        Case(tp=2, sequence=True, dropout=True, attention="reference"),
    ),
    Bug(
        "same attention dropout on every rank's heads",
        Patch(TENSOR, 'module.core.first_head = self.mesh.index("tp")', "module.core.first_head = 0"),
        Case(tp=2, dropout=True, attention="reference"),
    ),
    Bug(
        "vocabulary offset off by one",
        Patch(TENSOR, "VocabRows(first, count)", "VocabRows(first - (rank > 0), count)"),
        Case(tp=2, pad=1),
    ),
    Bug(
        "a padding column counted as a token",
        Patch(
            TENSOR,
            "valid = min(max(self.vocab_size - self.first, 0), self.weight.shape[0])",
            "valid = min(max(self.vocab_size + 1 - self.first, 0), self.weight.shape[0])",
        ),
        Case(tp=2, pad=8, tied=True),
    ),
    Bug(
        "positions of the first part on every part of the sequence",
        Patch(
            "megaspec.nn.embedding.module",
            "self.places_here(positions, x_BTD.shape[1])",
            "positions[..., : x_BTD.shape[1]]",
        ),
        Case(tp=2, sequence=True, family="gpt"),
    ),
]

CONTEXT = "megaspec.parallelism.context"
MERGE = "megaspec_kernels.attention_merge.reference"
RING = Case(cp=2, mask="uneven", kv_heads=2)
CONTEXTS = [
    Bug(
        "chunks one behind the other where they should be early and late",
        Patch(
            CONTEXT,
            "starts = (rank * chunk, (2 * cp - 1 - rank) * chunk)",
            "starts = (2 * rank * chunk, (2 * rank + 1) * chunk)",
        ),
        RING,
    ),
    Bug(
        "documents that begin where they end",
        Patch(
            "megaspec_kernels.attention.documents",
            "torch.searchsorted(number, every, out_int32=True)",
            "torch.searchsorted(number, every, out_int32=True, right=True)",
        ),
        Case(cp=2, documents=True),
    ),
    Bug(
        "keys out of reach by a document's bound that is too low",
        Patch(CONTEXT, "bounds.append(self.documents.longest)", "bounds.append(self.documents.longest // 8)"),
        Case(cp=2, context="all_gather", documents=True),
    ),
    Bug(
        "documents of the queries taken for those of the keys",
        Patch(CONTEXT, "keys[block.keys]", "queries[block.keys]"),
        Case(cp=2, documents=True),
    ),
    Bug(
        "tokens counted once for each context-parallel rank",
        Patch("megaspec.runtime.step", 'for axis in ("tp", "cp", "pp"))', 'for axis in ("tp", "pp"))'),
        RING,
    ),
    Bug(
        "log-sum-exp of the own block kept for the merged rows",
        Patch(MERGE, "torch.logaddexp(lse_BNT, new_lse_BNT, out=lse_BNT)", "pass"),
        RING,
        invisible=True,
    ),
    Bug(
        "gradients of keys and values lost on one hop",
        Patch(
            CONTEXT,
            "d_kv = torch.zeros_like(d_own_kv) if d_kv is None else arrived[-1]",
            "d_kv = torch.zeros_like(d_own_kv)",
        ),
        Case(cp=4, mask="uneven"),
        invisible=True,
    ),
    Bug(
        "gradients of keys and values that came home lost",
        Patch(CONTEXT, "d_own_kv += handle.wait()[0]", "handle.wait()"),
        RING,
        invisible=True,
    ),
    Bug(
        "gathered chunks in the order of ranks",
        Patch(CONTEXT, "torch.cat((*early, *reversed(late.unbind())), dim=2)", "torch.cat((*early, *late), dim=2)"),
        Case(cp=2, context="all_gather", mask="uneven"),
    ),
    Bug(
        "same dropout on every rank's heads after an exchange",
        Patch(CONTEXT, "first_head += first_here", "pass"),
        Case(cp=2, context="all_to_all", dropout=True, attention="reference"),
    ),
    Bug(
        "gradients not summed over context-parallel ranks",
        Patch(
            "megaspec.parallelism.bucket", 'name = "edp" if experts else "dp-cp"', 'name = "edp" if experts else "dp"'
        ),
        Case(cp=2, context="all_to_all", mask="uneven"),
        invisible=True,
    ),
]

PIPELINE = "megaspec.parallelism.pipeline"
PIPELINES = [
    Bug(
        "gradient of a tied embedding not summed over its two stages",
        Patch(PIPELINE, "[gradients[name] for name in shared]", "[]"),
        Case(pp=2, tied=True, accumulate=2),
        invisible=True,
    ),
    Bug(
        "norm counts a tied embedding on both stages",
        Patch(PIPELINE, "index = 0 if self._links.index == 0 else 1", "index = 0"),
        Case(pp=2, tied=True, accumulate=2),
        invisible=True,
    ),
    Bug(
        "weight gradients of the last micro batch lost",
        Patch(PIPELINE, "queues.pop(key).run()", "one.micro < micro_batches - 1 and queues.pop(key).run()"),
        Case(pp=2, schedule="zb_h1", accumulate=3, mask="uneven"),
        invisible=True,
    ),
    Bug(
        "activations of the micro batch before",
        Patch(
            PIPELINE,
            "self._links.send(target, x)",
            "self._links.send(target, self.__dict__.get('last', x)); self.last = x",
        ),
        Case(pp=2, schedule="gpipe", accumulate=6, mask="uneven"),
    ),
    Bug(
        "labels of another micro batch",
        Patch(
            PIPELINE,
            "y = forward(one.chunk, one.micro, x)",
            "y = forward(one.chunk, one.micro if x is None else 0, x)",
        ),
        Case(pp=2, accumulate=3, mask="uneven"),
    ),
    Bug(
        "gradient of another micro batch handed back",
        Patch(
            PIPELINE,
            "held.returned.append(grad)",
            "held.returned.append(self.__dict__.setdefault('first', grad))",
        ),
        Case(pp=2, accumulate=3, mask="uneven"),
        invisible=True,
    ),
    Bug(
        "stages of the way back numbered as those of the way there",
        Patch(
            PIPELINE,
            "model.part(stage.layers, embedding=stage.embedding, head=stage.head)",
            "model.part(sorted(stage.layers, reverse=True), embedding=stage.embedding, head=stage.head)",
        ),
        Case(pp=2, n_layers=4, mask="uneven"),
    ),
    Bug(
        "evaluation counts the tokens of one micro batch",
        Patch(
            "megaspec.runtime.step",
            "[batch.mask.sum() for batch in window]",
            "[batch.mask.sum() for batch in window[:1]]",
        ),
        Case(pp=2, accumulate=2, mask="uneven"),
        invisible=True,
    ),
]

BUCKET = "megaspec.parallelism.bucket"
ZERO = Case(dp=2, strategy="zero1", mask="uneven")
SHARDS = [
    Bug(
        "shards begin a row further than they are said to",
        Patch(
            "megaspec.parallelism.flat",
            "return own[first : first + count * row]",
            "first += row * (first + (count + 1) * row <= own.numel()); return own[first : first + count * row]",
        ),
        ZERO,
    ),
    Bug(
        "weights not gathered after the update",
        Patch("megaspec.runtime.step", "data.gather_weights()", "pass"),
        ZERO,
        invisible=True,
    ),
    Bug(
        "one bucket of gradients not scattered",
        Patch(
            BUCKET,
            "if self.shard_group.scatter is not None:",
            'if self.shard_group.scatter is not None and "norm.weight" not in self.names:',
        ),
        ZERO,
        invisible=True,
    ),
    Bug(
        "shards keep the gradient of the last micro batch alone",
        Patch(SUMS, "bucket.scatter(self._form, add=bucket.reduced > 0)", "bucket.scatter(self._form, add=False)"),
        Case(dp=2, strategy="zero2", accumulate=3, mask="uneven"),
        invisible=True,
    ),
    Bug(
        "replicas of shards not summed",
        Patch(BUCKET, "counted.all_reduce(own, group=self.shard_group.sum)", "pass"),
        Case(dp=4, strategy="hsdp", replicas=2, mask="uneven"),
        invisible=True,
    ),
    Bug(
        "memory that comes back holds what it held",
        Patch(
            SUMS,
            "bucket.is_collecting = True\n        bucket.fresh = set(bucket.names)",
            "bucket.is_collecting = True",
        ),
        Case(dp=2, strategy="fsdp", accumulate=2, mask="uneven"),
        invisible=True,
    ),
    Bug(
        "clipping by the norm of a rank's own shards",
        Patch("megaspec.optim.norm", "if world_size > 1:", "if world_size > 99:"),
        ZERO,
        invisible=True,
    ),
]

IN_BACKWARD = "torch._C._current_graph_task_id() != -1"
RECOMPUTE = [
    Bug(
        "dropout drawn anew for what is computed again",
        Patch(
            "megaspec.nn.dropout",
            "keep = keep_mask(noise.key(self.site_key), counters",
            f"keep = keep_mask(noise.key(self.site_key) + ({IN_BACKWARD}), counters",
        ),
        Case(dp=2, dropout=True, attention="reference", also=RECOMPUTES["uniform 1"]),
        invisible=True,
    ),
    Bug(
        "attention made again without its documents",
        Patch(
            "megaspec.parallelism.recompute",
            "self._remade(lambda *tensors: _attended(core, context, *tensors), (), ",
            "self._remade(lambda *tensors: _attended(core, type(context)(**vars(context) | "
            f"({{'documents': None}} if {IN_BACKWARD} else {{}})), *tensors), (), ",
        ),
        Case(dp=2, documents=True, also=RECOMPUTES["core_attention"]),
        invisible=True,
    ),
]

DISPATCH = "megaspec.parallelism.dispatch"
EXPERT = "megaspec.parallelism.expert"
ROUTER = "megaspec.nn.moe.router"
EP = Case(dp=2, ep=2, router="softmax", mask="uneven", optimizer="sgd")
EXPERTS = [
    Bug(
        "gradients of experts summed over ranks that hold others",
        Patch(BUCKET, 'name = "edp" if experts else "dp-cp"', 'name = "dp-cp"'),
        EP,
        invisible=True,
    ),
    Bug(
        "norm without experts",
        Patch(
            "megaspec.optim.norm",
            "counted.append(float(is_whole))",
            'counted.append(float(is_whole and "experts" not in name))',
        ),
        EP,
        invisible=True,
    ),
    Bug(
        "capacity of a rank's own tokens",
        Patch(
            ROUTER,
            "capacity=self.moe.capacity(experts_BSk.shape[0] * context.length)",
            "capacity=self.moe.capacity(experts_BTk.shape[0] * experts_BTk.shape[1])",
        ),
        Case(cp=2, ep=2, router="softmax", drop="probs", optimizer="sgd"),
    ),
    Bug(
        "drops in the order of ranks",
        Patch(EXPERT, "torch.cat(places).argsort()", "torch.cat(places).sort().values"),
        Case(cp=2, ep=2, router="softmax", drop="position", optimizer="sgd"),
    ),
    Bug(
        "auxiliary loss over a rank's own tokens",
        Patch(ROUTER, "whole_BE = self.tokens.sum(plain_BE)", "whole_BE = (plain_BE * 2)"),
        Case(cp=2, ep=2, router="softmax", optimizer="sgd"),
        invisible=True,
    ),
    Bug(
        "auxiliary loss once for each data-parallel rank",
        Patch(
            "megaspec.runtime.step",
            'aux_weight = loss_scale / (len(batches) * built.mesh.size("dp"))',
            "aux_weight = loss_scale / len(batches)",
        ),
        EP,
        invisible=True,
    ),
    Bug(
        "experts' outputs not weighted after an exchange",
        Patch(DISPATCH, "reorder(weights_R, order, inverse), ends_E", "torch.ones_like(weights_R), ends_E"),
        EP,
    ),
    Bug(
        "rows of another rank's tokens come back",
        Patch(
            DISPATCH,
            "order, inverse, ends_E = _by_expert(loads)",
            "order, inverse, ends_E = _by_expert(loads); inverse = order",
        ),
        EP,
    ),
    Bug(
        "bias moved by a rank's own loads",
        Patch(
            EXPERT,
            "if group is not None:\n            counted.all_reduce(sums, group=group)",
            "if False:\n            pass",
        ),
        Case(dp=2, ep=2, router="sigmoid", mask="uneven", optimizer="sgd"),
        invisible=True,
    ),
    Bug(
        "router's gradient not summed under sequence parallel",
        Patch(
            TENSOR,
            "if in_part:",
            'if in_part and "router" not in name:',
        ),
        Case(tp=2, sequence=True, ep=2, router="softmax", optimizer="sgd"),
        invisible=True,
    ),
    Bug(
        "part of an expert's output lost",
        Patch(DISPATCH, "torch.stack(blocks[i : i + self.etp]).sum(0)", "blocks[i]"),
        Case(dp=2, etp=2, router="softmax", mask="uneven", optimizer="sgd"),
    ),
    Bug(
        "parts of an expert's output counted twice",
        Patch(
            DISPATCH, "torch.stack(blocks[i : i + self.etp]).sum(0)", "torch.stack(blocks[i : i + self.etp]).sum(0) * 2"
        ),
        Case(dp=2, etp=2, router="softmax", mask="uneven", optimizer="sgd"),
    ),
    Bug(
        "halves of gate and up mixed between parts of an expert",
        Patch(
            TENSOR,
            "start = global_first + grid.etp_index * share",
            "start = global_first + (grid.etp - 1 - grid.etp_index) * share",
        ),
        Case(dp=2, etp=2, router="softmax", dispatch="all_gather", optimizer="sgd"),
    ),
    Bug(
        "bias of an expert added by every rank that holds a part of it",
        Patch(TENSOR, "module.adds_bias = grid.etp_index == 0", "module.adds_bias = True"),
        Case(dp=2, etp=2, router="logit bias", experts="bias", optimizer="sgd"),
        invisible=True,
    ),
    Bug(
        "biases of gate and up mixed between parts of an expert",
        Patch(
            TENSOR,
            "bias_pieces.append(Piece((start,), (local_first,), (share,)))",
            "bias_pieces.append(Piece((2 * global_first + part - share - start,), (local_first,), (share,)))",
        ),
        Case(dp=2, etp=2, router="logit bias", experts="bias", optimizer="sgd"),
        invisible=True,
    ),
    Bug(
        "biases of another rank's experts",
        Patch(
            TENSOR,
            "bias_pieces = [Piece((grid.first * sum(parts),), (0,), (local_first,))]",
            "bias_pieces = [Piece((sum(module.parts) - local_first - grid.first * sum(parts),), (0,), (local_first,))]",
        ),
        Case(dp=2, ep=2, router="best of group", experts="bias", optimizer="sgd"),
        invisible=True,
    ),
    Bug(
        "the weight of an expert on its output as well as on its input",
        Patch("megaspec.nn.moe.module", "weights_R = weights_R.new_ones(()).expand(weights_R.shape)", "pass"),
        Case(dp=2, ep=2, router="scores", experts="inputs", optimizer="sgd"),
    ),
    Bug(
        "weights of other ranks' tokens",
        Patch(
            DISPATCH,
            "weights_Nk = moved(routing.weights, Gather(self.group))",
            "weights_Nk = moved(routing.weights, Gather(self.group)).flip(0)",
        ),
        Case(dp=2, ep=2, dispatch="all_gather", router="softmax", optimizer="sgd"),
    ),
    Bug(
        "gradient of a norm of queries not summed over heads",
        Patch(TENSOR, 'in_part=self.mesh.size("tp") > 1)', "in_part=False)"),
        Case(tp=2, qk_norm=True),
        invisible=True,
    ),
]

ATTENTION = "megaspec.nn.attention.module"
ATTENTIONS = [
    Bug(
        "a window of one key more",
        Patch(CONTEXT, "keys[None, :] < self.window", "keys[None, :] <= self.window"),
        Case(cp=2, options="window"),
    ),
    Bug(
        "a block at the edge of the window skipped",
        Patch(CONTEXT, "between + 1 >= reach", "between + 2 >= reach"),
        Case(cp=4, options="edge"),
    ),
    Bug(
        "the first key that a gathered block sees left out",
        Patch(CONTEXT, "start - reach + 1", "start - reach + 2"),
        Case(cp=2, context="all_gather", options="window"),
    ),
    Bug(
        "chunks from the start of the sequence",
        Patch(
            ATTENTION,
            "positions_BT = document_positions(documents.number)",
            "positions_BT = torch.arange(length, device=device).expand_as(documents.number)",
        ),
        Case(tp=2, options="chunk", documents=True),
    ),
    Bug(
        "sinks of other heads after an exchange",
        Patch(CONTEXT, "sinks_N[first_here : first_here + heads_here]", "sinks_N[:heads_here]"),
        Case(cp=2, context="all_to_all", options="sinks"),
        invisible=True,
    ),
    Bug(
        "log-sum-exp kept without the sinks",
        Patch(
            CONTEXT,
            "out_BTNH, lse_BNT = with_sinks(self.out_BTNH, self.lse_BNT, sinks_N)",
            "(out_BTNH, _), lse_BNT = with_sinks(self.out_BTNH, self.lse_BNT, sinks_N), self.lse_BNT",
        ),
        Case(cp=2, options="sinks"),
        invisible=True,
    ),
    Bug(
        "sinks of another rank's heads",
        Patch(TENSOR, "piece = Piece((rank // copies * share,)", "piece = Piece(((tp - 1 - rank) // copies * share,)"),
        Case(tp=2, options="sinks"),
        invisible=True,
    ),
    Bug(
        "norm of all heads by a rank's own",
        Patch(
            TENSOR,
            "sums = reduce_forward(torch.stack((q_sum, k_sum), dim=-1), self.group)",
            "sums = torch.stack((q_sum, k_sum), dim=-1)",
        ),
        Case(tp=2, options="whole"),
    ),
    Bug(
        "gradient of the sum over heads left on each rank",
        Patch(TENSOR, "reduce_backward(sums, self.group).split(1, dim=-1)", "sums.split(1, dim=-1)"),
        Case(tp=2, options="whole"),
        invisible=True,
    ),
    Bug(
        "key heads that two ranks hold counted twice in a norm",
        Patch(
            TENSOR,
            "k_sum = k_BTI.square().sum(dim=-1) / self.copies",
            "k_sum = k_BTI.square().sum(dim=-1)",
        ),
        Case(tp=4, kv_heads=2, options="whole"),
    ),
    Bug(
        "gradient of a norm of shared key heads not summed",
        Patch(TENSOR, 'self.sums.append(GradientSum(path, None, self.mesh.neighbours("tp", copies)))', "pass"),
        Case(tp=4, kv_heads=2, options="whole"),
        invisible=True,
    ),
    Bug(
        "temperature by places among a rank's tokens",
        Patch(ATTENTION, "positions_BT = positions.expand", "positions_BT = torch.arange(q_BTNH.shape[1]).expand"),
        Case(cp=2, family="flat", options="temperature"),
    ),
]

FROZEN = [
    Bug(
        "weight decay of what is frozen",
        Patch(
            "megaspec.optim.freeze",
            "self._trained.update(gradients, lr=lr,",
            "[w.mul_(1 - lr * weight_decay) for w in self._frozen.values()]; self._trained.update(gradients, lr=lr,",
        ),
        Case(dp=2, strategy="zero1", n_layers=4, trainable="upper"),
        invisible=True,
    ),
    Bug(
        "no gradient sent to a stage that trains",
        Patch(
            "megaspec.parallelism.stages",
            "first = min(first, stage_of_layer[one.layer])",
            "first = max(first, stage_of_layer[one.layer])",
        ),
        Case(pp=2, n_layers=4, trainable="upper", accumulate=2),
        invisible=True,
    ),
    Bug(
        "a frozen bias of a router moves",
        Patch("megaspec.nn.moe.router", "if self.expert_bias is not None and self.moves_bias:", "if True:"),
        Case(dp=2, ep=2, router="sigmoid", n_layers=4, trainable="upper"),
        invisible=True,
    ),
]

FP8_LAYER = "megaspec.nn.fp8"
FP8_LINEAR = "megaspec.parallelism.fp8_linear"
FP8_ROWS = Case(tp=2, precision="fp8 rowwise", accumulate=2)
FP8_TENSORS = Case(tp=2, sequence=True, precision="fp8 tensorwise", accumulate=2)
FP8_STEPS = Case(dp=2, precision="fp8 delayed", accumulate=2, mask="uneven")
FP8_EXPERTS = Case(tp=2, sequence=True, router="softmax", etp=2, precision="fp8 tensorwise", accumulate=2)
# Every rank has all experts: rows are quantised while they are gathered.
FP8_EXPERTS_WRITTEN = Case(dp=2, strategy="fsdp", router="softmax", precision="fp8 delayed", accumulate=2)
FP8_GATHERED = Case(
    dp=2, strategy="fsdp", precision="fp8 tensorwise", accumulate=2, also=(("precision.gather_fp8", True),)
)
FP8_GATHER = "megaspec.parallelism.fp8_gather"
EXPERTS_FP8 = "megaspec.nn.moe.fp8"
# Their own tests run them, with more steps than one: see test_fp8.py.
FP8 = [
    Bug(
        "largest elements of a rank's own part",
        Patch(FP8_LAYER, "amax = self.largest(cast.amax(", "amax = (cast.amax("),
        FP8_TENSORS,
    ),
    Bug(
        "largest elements of a rank's own features of a token",
        Patch(FP8_LAYER, "row_amax = self.largest(row_amax)", "pass"),
        FP8_ROWS,
    ),
    Bug(
        "scales of columns twice as large",
        Patch(
            FP8_LAYER,
            "in_columns = Fp8Tensor(both.columns, scale_in_columns(both.column_scale,",
            "in_columns = Fp8Tensor(both.columns, scale_in_columns(2 * both.column_scale,",
        ),
        FP8_ROWS,
        invisible=True,
    ),
    Bug(
        "scales of short columns twice as large",
        Patch(
            "megaspec_kernels.fp8_cast.reference",
            "return Quantised(rows, by_parts(row_scale), turned, column_scale)",
            "return Quantised(rows, by_parts(row_scale), turned, 2 * column_scale)",
        ),
        replace(FP8_ROWS, precision="fp8 blockwise", wide=True),
        invisible=True,
    ),
    Bug(
        "weights of the step before",
        Patch("megaspec.parallelism.fp8", "self._shared.version += 1", "self._shared.version = 1"),
        FP8_TENSORS,
        invisible=True,
    ),
    Bug(
        "scale of another role",
        Patch(FP8_LAYER, "place = REMEMBERED.index(role)", "place = 0"),
        FP8_STEPS,
        invisible=True,
    ),
    Bug(
        "a scale twice as large",
        Patch(
            FP8_LAYER,
            "in_columns = Fp8Tensor(by_columns, scale_in_columns(scale, block))",
            "in_columns = Fp8Tensor(by_columns, 2 * scale_in_columns(scale, block))",
        ),
        FP8_TENSORS,
        invisible=True,
    ),
    Bug(
        "columns as they lie in rows",
        Patch(
            "megaspec_kernels.fp8_cast.reference",
            "cut.t().contiguous() if columns else None",
            "cut.reshape(cut.shape[::-1]) if columns else None",
        ),
        FP8_TENSORS,
        invisible=True,
    ),
    Bug(
        "gathered tokens of an input in the order of ranks",
        Patch(FP8_LINEAR, "columns_of_tokens(wait_sequence(gathering)", "columns_of_tokens(wait(gathering)"),
        FP8_TENSORS,
        invisible=True,
    ),
    Bug(
        "inputs by the largest element of a rank's own tokens",
        Patch(FP8_LAYER, "if role in self.of_tokens:", 'if role in self.of_tokens and role != "input":'),
        FP8_TENSORS,
    ),
    Bug(
        "gradients by the largest element of a rank's own tokens",
        Patch(FP8_LAYER, "if role in self.of_tokens:", 'if role in self.of_tokens and role != "gradient":'),
        FP8_TENSORS,
        invisible=True,
    ),
    Bug(
        "features by the largest element of a rank's own tokens",
        Patch(FP8_LAYER, "if role in self.of_tokens:", "if False:"),
        replace(FP8_TENSORS, precision="fp8 rowwise"),
        invisible=True,
    ),
    Bug(
        "gathered tokens by the scales of their neighbours",
        Patch(
            FP8_LINEAR, "gather_sequence(scale, group)).flatten", "gather_sequence(scale, group)).roll(1, 1).flatten"
        ),
        replace(FP8_TENSORS, precision="fp8 rowwise"),
    ),
    Bug(
        "gathered tokens of a gradient in the order of ranks",
        Patch(FP8_LINEAR, "fp8_columns(whole.values_BTK,", "fp8_columns(whole.values_BTK.roll(1, 1),"),
        FP8_TENSORS,
        invisible=True,
    ),
    Bug(
        "steps remembered by each rank for itself",
        Patch("megaspec.parallelism.fp8", "counted.all_reduce(self._seen, dist.ReduceOp.MAX, group=group)", "pass"),
        FP8_STEPS,
        invisible=True,
    ),
    Bug(
        "only the last micro batch remembered",
        Patch("megaspec_kernels.fp8_cast.reference", "torch.maximum(seen,", "torch.maximum(0 * seen,"),
        Case(dp=2, precision="fp8 delayed", accumulate=6, mask="uneven"),
        invisible=True,
    ),
    Bug(
        "largest elements of a part of an expert",
        Patch(
            EXPERTS_FP8,
            "self._own_scale(self.form.cast.group_amax(x, groups.ends), role, _TENSOR)",
            "self.form.cast.scale_of(self.form.cast.group_amax(x, groups.ends), self.form.dtype(role))",
        ),
        FP8_EXPERTS,
    ),
    Bug(
        "largest elements of a part of an expert's token",
        Patch(
            EXPERTS_FP8,
            "self._own_scale(self.form.cast.amax(x_RI, block=ROW), role, ROW)",
            "self.form.cast.scale_of(self.form.cast.amax(x_RI, block=ROW), self.form.dtype(role))",
        ),
        replace(FP8_EXPERTS, precision="fp8 rowwise"),
    ),
    Bug(
        "scales of an expert's neighbour",
        Patch(EXPERTS_FP8, "scale_of_rows(x.scale,", "scale_of_rows(x.scale.roll(1, 0),"),
        FP8_EXPERTS,
        invisible=True,
    ),
    Bug(
        "an expert's features by the scales of their neighbours",
        Patch(
            EXPERTS_FP8,
            "in_columns = Fp8Tensor(values, scale_EI)",
            "in_columns = Fp8Tensor(values, scale_EI.roll(1, 1))",
        ),
        replace(FP8_EXPERTS, precision="fp8 rowwise"),
        invisible=True,
    ),
    Bug(
        "columns of an expert behind the padding of another",
        Patch(
            "megaspec_kernels.fp8_cast.reference_groups",
            "padded=(last_unit_E * UNIT).to(torch.int32)",
            "padded=((last_unit_E + 1) * UNIT).to(torch.int32)",
        ),
        FP8_EXPERTS_WRITTEN,
        invisible=True,
    ),
    Bug(
        "rows that are gathered on the way there in the order of choices",
        Patch("megaspec.nn.moe.rows", "(self.choice // self.place.shape[1])", "(self.choice % self.place.shape[0])"),
        FP8_EXPERTS_WRITTEN,
    ),
    Bug(
        "rows of gradients by the scale of inputs",
        Patch(EXPERTS_FP8, "known = self.known(role)", 'known = self.known("input")'),
        FP8_EXPERTS_WRITTEN,
        invisible=True,
    ),
    Bug(
        "weights of experts of the step before",
        Patch(EXPERTS_FP8, "self._weight_version != self.shared.version", "False"),
        FP8_EXPERTS,
        invisible=True,
    ),
    Bug(
        "experts' gradients by the scale of another format",
        Patch("megaspec.parallelism.fp8", "scale_of(mine, EXPERTS_GRADIENT,", "scale_of(mine, torch.float8_e5m2,"),
        replace(FP8_EXPERTS, precision="fp8 delayed"),
        invisible=True,
    ),
    Bug(
        "bytes by the largest element of a rank's own rows",
        Patch(FP8_GATHER, "if group is not None:", "if False:"),
        FP8_GATHERED,
    ),
    Bug(
        "bytes of the weights of the step before",
        Patch("megaspec.parallelism.data_parallel", "if self._in_fp8 is not None:", "if not self._in_fp8._scales:"),
        FP8_GATHERED,
        invisible=True,
    ),
    Bug(
        "gathered bytes turned into columns as they lie",
        Patch(
            FP8_LAYER, "Fp8Tensor(self.columns(values), scale)", "Fp8Tensor(values.reshape(values.shape[::-1]), scale)"
        ),
        FP8_GATHERED,
        invisible=True,
    ),
    Bug(
        "gradients in the format of inputs",
        Patch(FP8_LAYER, 'self.gradient_format if role == "gradient" else "e4m3"', '"e4m3"'),
        FP8_TENSORS,
        invisible=True,
    ),
]

STATE = "megaspec.runtime.state"
FP8_STRATEGY = "megaspec.parallelism.fp8"
FP8_STAGES = Case(pp=2, precision="fp8 delayed", accumulate=2, mask="uneven")
# What loads or saves the steps that delayed scales are made of. Tests of checkpoints run them: see test_checkpoints.py.
# `invisible`: to the loss of the step that comes after loading.
LOADED = [
    Bug(
        "what is remembered moved on by a step",
        Patch(
            STATE, "state[name][:, :steps] = found[:, :steps]", "state[name][:, :steps] = found[:, :steps].roll(1, 1)"
        ),
        FP8_STAGES,
        # scales are made of the largest of both steps
        invisible=True,
    ),
    Bug(
        "scales of the tensors themselves after loading",
        Patch(
            FP8_STRATEGY,
            "mine.copy_(state[name])\n        self._find_fresh()",
            "mine.copy_(state[name])",
        ),
        FP8_STAGES,
    ),
    Bug(
        "what is remembered left behind",
        Patch(STATE, "load_largest(built, reader)", "pass"),
        FP8_STAGES,
    ),
    Bug(
        "gradients remembered as inputs",
        Patch(STATE, 'reader.read(f"{FP8}{name}").to(largest)', 'reader.read(f"{FP8}{name}").to(largest).flip(0)'),
        FP8_STAGES,
    ),
    Bug(
        "each layer remembers what the first of a rank's does",
        Patch(STATE, 'reader.read(f"{FP8}{name}")', 'reader.read(f"{FP8}{min(mine)}")'),
        FP8_STAGES,
    ),
    Bug(
        "only the first stage saves what it remembers",
        Patch(
            STATE,
            "for name, largest in built.fp8.state().items():",
            'for name, largest in () if built.mesh.index("pp") else built.fp8.state().items():',
        ),
        FP8_STAGES,
    ),
]

BUGS = [*FROZEN, *GENERAL, *CONTEXTS, *PIPELINES, *SHARDS, *RECOMPUTE, *EXPERTS, *ATTENTIONS]
