"""What rotary positions say of themselves."""

from typing import TYPE_CHECKING

from megaspec.core.part_facts import PartFacts

if TYPE_CHECKING:
    from megaspec.nn.rope.spec import RotarySpec


def rope_facts(spec: "RotarySpec", d_rotary: int, *, n_heads: int, n_kv_heads: int, name: str) -> PartFacts:
    """The rotation of query and key heads, of which `d_rotary` features turn. `name`: of the module in attention.

    It has no parameters; what it moves is a part of attention's own, since it runs in one kernel with what is around.
    """
    return PartFacts()
