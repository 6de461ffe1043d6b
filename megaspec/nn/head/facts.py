"""What the output head says of itself."""

from megaspec.core.part_facts import PartFacts, Table


def head_facts(*, vocab_size: int, d_model: int, bias: bool = False) -> PartFacts:
    """The table that logits are made with, the embedding's own where they are tied, and the bias of logits."""
    return PartFacts(tables=(Table("head", vocab_size, d_model, "head", bias=bias),))
