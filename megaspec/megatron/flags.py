"""Every flag of Megatron's pretrain_gpt.py, by each of its names."""

from megaspec.megatron import dead, idle, lost, translated
from megaspec.megatron.flag import Flag

FLAGS: tuple[Flag, ...] = tuple(
    flag for table in (translated, idle, lost, dead) for group in table.GROUPS for flag in group.flags()
)
BY_NAME: dict[str, Flag] = {name: flag for flag in FLAGS for name in flag.names}
