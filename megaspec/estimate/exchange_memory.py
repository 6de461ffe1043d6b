"""Memory of what ranks send each other: gathered weights, gradients that are made or on their way, blocks of keys and
values, what stages send. At the moments at which a rank's memory may be at its peak.

Sizes are numbers of weights, with what pads their buffers, until they are multiplied with the bytes of one: run.width
of a weight in the model's format, run.wide of a gradient in at least fp32.
"""

from dataclasses import dataclass
from functools import cached_property

from megaspec.estimate.buckets import StageBuckets
from megaspec.estimate.layer_run import LayerRun
from megaspec.nn.layer.facts import LayerFacts
from megaspec.nn.model_facts import ModelFacts
from megaspec.recipe import Recipe


@dataclass(frozen=True)
class StageContents:
    """What lies on a pipeline rank."""

    chunks: tuple[tuple[LayerFacts, ...], ...]
    """Layers, by chunk."""
    has_embedding: bool
    has_head: bool

    @property
    def kinds(self) -> tuple[LayerFacts, ...]:
        """Layers that differ, each once."""
        return tuple(dict.fromkeys(layer for chunk in self.chunks for layer in chunk))


@dataclass(frozen=True)
class ExchangeMemory:
    """Bytes of messages on a rank of one pipeline stage."""

    recipe: Recipe
    run: LayerRun
    facts: ModelFacts
    contents: StageContents
    messages: int
    """Of stages to each other that it holds."""
    buckets: StageBuckets

    @cached_property
    def before(self) -> int:
        """The last gradients of the micro batch before, of the embedding or of a layer whose own were deferred, where
        they are not kept and not waited for."""
        if not self._reduces_each or not self.recipe.parallelism.overlap.grad_reduce or not self._follows_another:
            return 0
        if self._waits_to_the_end:
            if self.contents.has_head and not self.facts.is_tied:
                return self.run.wide * self.buckets.head.trained.largest
            return 0
        if self._trained_table and self.contents.has_embedding and not self._defers:
            return self.run.wide * self._trained_table
        # a layer's experts come before the rest of it
        dense = max((unit.trained.whole.dense for unit in self.buckets.units.values()), default=0)
        return self.run.wide * dense

    def at_head(self) -> int:
        """At the output head, or behind a stage's last layer; beside what is there of the micro batch before."""
        total = self._between_stages
        if self._shares_weights:
            # the output head's, or those of the layer that runs
            gathered = self._gathered_layers(1)
            if self.contents.has_head:
                gathered = self.buckets.head.whole.total * self.run.width
            total += gathered
        if self._reduces_each and self._waits_to_the_end and self._follows_another:
            total += sum(self._layers) * self.run.wide
        return total

    def at_layer(self, before: int) -> int:
        """While the first layer runs backward: its gradients are made while those before them are on their way, the
        output head's or, `before`, those of the micro batch before."""
        total = self._between_stages + self._context_blocks
        if self._shares_weights:
            layers = 1
            if self._gathers_ahead:
                layers = 2
            total += self._gathered_layers(layers)
        if not self._reduces_each:
            return total
        made = self._made_by_layers
        if self.contents.has_head:
            # the head's gradient is gone when the second layer's is made, but where the layers' are all deferred
            head = self._head_on_its_way
            beside_first_layer = self._most_trained + head
            beside_all = made
            if self._waits_to_the_end:
                beside_all += head
            return total + max(beside_all, beside_first_layer) * self.run.wide
        total += made * self.run.wide
        # the only layer of a chunk has waited for its own
        if self._has_several or (self.contents.has_embedding and not self._defers):
            total += before
        return total

    def at_table(self) -> int:
        """While the embedding runs backward: its sum has memory, the layers' last ones are on their way."""
        if not self._reduces_each:
            return self._between_stages
        layers = 0
        if self._defers:
            layers = max(self._layers)
        elif self.recipe.parallelism.overlap.grad_reduce:
            layers = self._most_trained
        return self._between_stages + (self._trained_table + layers) * self.run.wide

    @cached_property
    def _made_by_layers(self) -> int:
        """Weights of layers whose gradients have memory at once: one layer's, but what is deferred is not reduced."""
        if not self._defers:
            return self._most_trained
        if self._waits_to_the_end:
            return sum(self._layers)
        # the first stage of a V is at its peak while one chunk runs backward alone
        return max(self._layers)

    @cached_property
    def _head_on_its_way(self) -> int:
        """Weights of the output head whose gradient is being reduced while the first layer runs backward. Of a tied
        table none: the norm's gradient is the last one."""
        if self.recipe.parallelism.overlap.grad_reduce and not self.facts.is_tied:
            return self.buckets.head.trained.largest
        return 0

    @cached_property
    def _follows_another(self) -> bool:
        """A step has more than one micro batch."""
        train = self.recipe.train
        replicas = self.recipe.parallelism.dp_replicate * self.recipe.parallelism.dp_shard
        return train.global_batch > train.micro_batch * replicas

    @cached_property
    def _shares_weights(self) -> bool:
        """Weights are gathered for each pass."""
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
        return max(map(len, self.contents.chunks)) > 1

    @cached_property
    def _reduces_each(self) -> bool:
        """Gradients of every micro batch are reduced, and whole ones not kept."""
        return self._shares_weights or self.recipe.parallelism.dp_strategy == "zero2"

    @cached_property
    def _defers(self) -> bool:
        """Weight gradients are made later than those of inputs."""
        return self.recipe.parallelism.pipeline.schedule in ("zb_h1", "zb_v")

    @cached_property
    def _waits_to_the_end(self) -> bool:
        """Some weight gradient of the layers is deferred at any time of a step, so that none of theirs is reduced."""
        return self._defers and not self.contents.has_embedding

    @cached_property
    def _layers(self) -> list[int]:
        """Trained weights of each chunk's layers."""
        return [chunk.trained.whole.total for chunk in self.buckets.chunks]

    def _gathered_layers(self, layers: int) -> int:
        """Bytes of the gathered weights of the layer that runs and of `layers` - 1 ahead of it, each the one that has
        most. What is gathered in fp8 is a byte, of the layer that runs counted with its copies in fp8."""
        most = 0
        for unit in self.buckets.units.values():
            narrow = unit.in_fp8.whole.total
            wide = (unit.whole.total - narrow) * self.run.width
            most = max(most, layers * wide + (layers - 1) * narrow)
        return most

    @cached_property
    def _most_trained(self) -> int:
        """Trained weights of the layer that has most."""
        return max((unit.trained.whole.total for unit in self.buckets.units.values()), default=0)

    @cached_property
    def _trained_table(self) -> int:
        """Weights of the embedding that have a gradient."""
        return self.buckets.embedding.trained.whole.total

    @cached_property
    def _between_stages(self) -> int:
        """Bytes of the residual stream of a micro batch, in each message."""
        return self.messages * self.run.tokens.stream * self.facts.d_model * self.run.width

    @cached_property
    def _context_blocks(self) -> int:
        """A ring holds a block of keys and values and receives the next, with their gradients; a gather holds all."""
        parallelism = self.recipe.parallelism
        if parallelism.cp == 1:
            return 0
        # two blocks and their gradients
        blocks = 4
        if parallelism.context.kind == "all_gather":
            blocks = 2 * parallelism.cp
        return blocks * max((self._keys_and_values(kind) for kind in self.contents.kinds), default=0)

    def _keys_and_values(self, layer: LayerFacts) -> int:
        """Bytes of a layer's keys and values of this rank's tokens, values as large as keys."""
        if layer.attention is None:
            return 0
        return 2 * layer.attention.keys.on(self.run.degrees) * self.run.tokens.all * self.run.width
