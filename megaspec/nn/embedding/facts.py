"""What the embedding says of itself."""

from megaspec.core.part_facts import PartFacts, Table


def embedding_facts(*, vocab_size: int, d_model: int, learned_positions: int = 0) -> PartFacts:
    """The table of tokens, one of so many learned positions where there are any, and dropout."""
    tables = [Table("embed", vocab_size, d_model, "embedding")]
    if learned_positions:
        tables.append(Table("positions", learned_positions, d_model, "positions", split="sequence"))
    return PartFacts(tables=tuple(tables), sites=("embed_dropout",))
