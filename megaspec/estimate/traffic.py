"""Memory of what ranks send each other: gathered weights, gradients that are made or on their way, blocks of keys and
values, what stages send. At the moments at which a rank's memory may be at its peak."""

from dataclasses import dataclass
from functools import cached_property
from math import ceil

from megaspec.estimate.parameters import layer_parameters, table_parameters
from megaspec.estimate.share import Share
from megaspec.recipe import Recipe


@dataclass(frozen=True)
class Contents:
    """What lies on a pipeline rank."""

    chunks: tuple[tuple[int, int], ...]
    """Layers without and with experts, by chunk."""
    has_embedding: bool
    has_head: bool


@dataclass(frozen=True)
class Traffic:
    """Bytes on a rank of one pipeline stage."""

    recipe: Recipe
    share: Share
    contents: Contents
    messages: int
    """Of stages to each other that it holds."""

    @cached_property
    def before(self) -> int:
        """The last gradients of the micro batch before, of the embedding or of a layer whose own were deferred, where
        they are not kept and not waited for."""
        if not self._reduces_each or not self.recipe.parallelism.overlap.grad_reduce or not self._follows_another:
            return 0
        if self._waits_to_the_end:
            return self.share.wide * self._table * (self.contents.has_head and not self.share.model.tied_embeddings)
        if self.contents.has_embedding and not self._defers:
            return self.share.wide * self._table
        # a layer's experts come before the rest of it
        dense = [
            dense for chunk in self.contents.chunks for n, (dense, _) in zip(chunk, self._of_a_layer, strict=True) if n
        ]
        return self.share.wide * max(dense, default=0)

    def at_head(self) -> int:
        """At the output head, or behind a stage's last layer; beside what is there of the micro batch before."""
        total = self._between_stages
        if self._shares_weights:
            total += (self._table if self.contents.has_head else self._largest_layer) * self.share.width
        if self._reduces_each and self._waits_to_the_end and self._follows_another:
            total += sum(self._layers) * self.share.wide
        return total

    def at_layer(self, before: int) -> int:
        """While the first layer runs backward: its gradients are made while those before them are on their way, the
        output head's or, `before`, those of the micro batch before."""
        total, wide = self._between_stages + self._context_blocks, self.share.wide
        if self._shares_weights:
            total += (1 + self._gathers_ahead) * self._largest_layer * self.share.width
        if not self._reduces_each:
            return total
        made = self._largest_layer
        if self._defers:
            # what is deferred is not reduced, and has its memory; the first stage of a V is at its peak while one chunk
            # runs backward alone
            made = sum(self._layers) if self._waits_to_the_end else max(self._layers)
        if self.contents.has_head:
            # of a tied table, the norm's gradient is the last one; the head's is gone when the second layer's is made
            overlaps = self.recipe.parallelism.overlap.grad_reduce
            head = self._table * (overlaps and not self.share.model.tied_embeddings)
            return total + max(made + head * self._waits_to_the_end, self._largest_layer + head) * wide
        # the only layer of a chunk has waited for its own
        is_other = self._has_several or (self.contents.has_embedding and not self._defers)
        return total + made * wide + before * is_other

    def at_table(self) -> int:
        """While the embedding runs backward: its sum has memory, the layers' last ones are on their way."""
        if not self._reduces_each:
            return self._between_stages
        overlaps = self.recipe.parallelism.overlap.grad_reduce
        layers = max(self._layers) if self._defers else overlaps * self._largest_layer
        return self._between_stages + (self._table + layers) * self.share.wide

    @cached_property
    def _follows_another(self) -> bool:
        """A step has more than one micro batch."""
        train, own = self.recipe.train, self.recipe.parallelism
        return train.global_batch > train.micro_batch * own.dp_replicate * own.dp_shard

    @cached_property
    def _shares_weights(self) -> bool:
        return self.recipe.parallelism.dp_strategy in ("fsdp", "hsdp")

    @cached_property
    def _gathers_ahead(self) -> bool:
        """The weights of another layer of its chunk are there while a layer runs backward. Not at the peak of the first
        stage where weight gradients are deferred: all of the chunk's are there when its first layer runs."""
        is_first = self._defers and self.contents.has_embedding and not self.contents.has_head
        return self.recipe.parallelism.overlap.param_gather and self._has_several and not is_first

    @cached_property
    def _has_several(self) -> bool:
        """Some chunk has more than one layer."""
        return max(map(sum, self.contents.chunks)) > 1

    @cached_property
    def _reduces_each(self) -> bool:
        """Gradients of every micro batch are reduced, and whole ones not kept."""
        return self._shares_weights or self.recipe.parallelism.dp_strategy == "zero2"

    @cached_property
    def _defers(self) -> bool:
        return self.recipe.parallelism.pipeline.schedule in ("zb_h1", "zb_v")

    @cached_property
    def _waits_to_the_end(self) -> bool:
        """Some weight gradient of the layers is deferred at any time of a step, so that none of theirs is reduced."""
        return self._defers and not self.contents.has_embedding

    @cached_property
    def _table(self) -> int:
        return table_parameters(self.share.model, tp=self.share.tp)

    @cached_property
    def _layers(self) -> list[int]:
        """Weights of each chunk's layers."""
        return [
            sum(n * sum(parts) for n, parts in zip(chunk, self._of_a_layer, strict=True))
            for chunk in self.contents.chunks
        ]

    @cached_property
    def _largest_layer(self) -> int:
        of_a_layer = [sum(parts) for parts in self._of_a_layer]
        return max((of_a_layer[kind] for chunk in self.contents.chunks for kind in (0, 1) if chunk[kind]), default=0)

    @cached_property
    def _of_a_layer(self) -> list[tuple[int, int]]:
        """Weights of a layer without and with experts: dense ones, and those of experts."""
        own = self.recipe.parallelism
        counts = [
            layer_parameters(self.share.model, with_experts=one, tp=own.tp, ep=own.ep, etp=own.etp)
            for one in (False, True)
        ]
        return [(one.dense, one.experts) for one in counts]

    @cached_property
    def _between_stages(self) -> int:
        return self.messages * self.share.split_tokens * self.share.model.d_model * self.share.width

    @cached_property
    def _context_blocks(self) -> int:
        """A ring holds a block of keys and values and receives the next, with their gradients; a gather holds all."""
        own, share = self.recipe.parallelism, self.share
        if own.cp == 1:
            return 0
        kv = 2 * ceil(share.model.n_kv_heads / own.tp) * share.model.d_head * share.tokens * share.width
        return kv * (2 * own.cp if own.context.kind == "all_gather" else 4)
