"""What services have kept of a run on this machine, read without their help where they offer none."""

import json
import sqlite3
import struct
from pathlib import Path

_HEADER_BYTES = 7
_BLOCK_BYTES = 32768
_WHOLE, _LAST = 1, 4


def wandb_records(path: Path):
    """Records of a .wandb file: LevelDB's log format behind a header of the file, protobuf inside."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    at = _HEADER_BYTES
    parts = b""
    while at + _HEADER_BYTES <= len(data):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _HEADER_BYTES:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + _HEADER_BYTES])
        at += _HEADER_BYTES
        parts += data[at : at + length]
        at += length
        if kind in (_WHOLE, _LAST):
            yield Record.FromString(parts)
            parts = b""


def wandb_runs(folder: Path) -> list[dict]:
    """What each start of a run has left in `folder`, the first first."""
    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        kept = {"history": [], "config": {}, "summary": {}, "code": None}
        for record in wandb_records(path):
            match record.WhichOneof("record_type"):
                case "run":
                    kept |= {"id": record.run.run_id, "name": record.run.display_name, "group": record.run.run_group}
                    kept["config"] |= _wandb_values(record.run.config.update)
                case "config":
                    kept["config"] |= _wandb_values(record.config.update)
                case "history":
                    kept["history"].append(_wandb_values(record.history.item))
                case "summary":
                    kept["summary"] |= _wandb_values(record.summary.update)
                case "exit":
                    kept["code"] = record.exit.exit_code
                case "preempting":
                    kept["is_preempting"] = True
        found.append(kept)
    return found


def _wandb_values(items) -> dict:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def trackio_rows(database: Path) -> list[tuple[str, int, dict]]:
    """(run, step, numbers), in the order in which they came."""
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    return [(name, step, json.loads(text)) for name, step, text in rows]
