"""A run on a stream of text is stopped, and goes on with other ranks and workers: the same samples, the same place."""

import pytest

from megaspec.checkpoint.comm import SoloComm
from megaspec.checkpoint.store import Store
from megaspec.core.errors import DataError
from megaspec.data.facts import data_facts
from megaspec.runtime.data_place import PLACE
from megaspec.runtime.loop import Run
from megaspec.train.batch_schedule import BatchSchedule
from tests.data.helpers import write_texts
from tests.runtime import lives
from tests.runtime.specs import spec

STEPS = 6
STOPS = 3
# Measured of other layouts in test_reshard.py: at most 5e-16 of a loss.
CLOSE = 1e-12


def stream_run(folder, **changes):
    data = {"kind": "stream", "files": [{"path": f"{folder}/*.jsonl"}], "tokenizer": "byte", "seq_len": 16}
    model = {"model.vocab_size": 257, "data": data | {"lanes": 4, "workers": changes.pop("workers", 0)}}
    return spec({**model, "train.steps": STEPS, "train.global_batch": 4, "train.micro_batch": 2, **changes})


def place_in(folder) -> list:
    with Store(folder).newest_good(SoloComm(), repair=False) as reader:
        return reader.read(PLACE).tolist()


def test_another_layout_goes_on_with_the_same_samples(tmp_path, pool):
    write_texts(tmp_path / "a.jsonl", 40)
    whole = stream_run(tmp_path)
    undisturbed = pool.run(lives.live, whole.model_dump_json(), str(tmp_path / "whole"), ranks=1)[0]
    events = []
    apart = stream_run(tmp_path, workers=1, **{"parallelism.dp_replicate": 2})
    for _ in range(STOPS):
        arguments = (apart.model_dump_json(), str(tmp_path / "moved"))
        events += pool.run(lives.live, *arguments, ranks=2, stop_after=1)[0]
    across = stream_run(tmp_path, **{"parallelism.tp": 2})
    events += pool.run(lives.live, across.model_dump_json(), str(tmp_path / "moved"), ranks=2)[0]
    assert [event["first_sample"] for event in events] == [4 * step for step in range(STEPS)]
    assert [event["loss"] for event in events] == pytest.approx([e["loss"] for e in undisturbed], rel=CLOSE, abs=0)
    assert place_in(tmp_path / "moved") == place_in(tmp_path / "whole")
    assert [row[0] for row in place_in(tmp_path / "whole")] == [STEPS] * 4


def test_files_that_changed_are_told_by_the_ranks(tmp_path):
    path = write_texts(tmp_path / "a.jsonl", 40)
    made = stream_run(tmp_path)
    made = made.model_copy(update={"data_fingerprint": data_facts(made.data).fingerprint})
    write_texts(path, 41)
    with pytest.raises(DataError, match="so its samples would be others; put the old files back with their times"):
        lives.live(0, made.model_dump_json(), str(tmp_path / "run"))


def test_a_fork_that_goes_back_to_where_it_began_reads_its_stream_from_the_beginning(tmp_path):
    """It has no place in its own stream there, and must not keep the one that it had reached."""
    write_texts(tmp_path / "a.jsonl", 40)
    made = stream_run(tmp_path)
    lives.live(0, made.model_dump_json(), str(tmp_path / "run"))
    run = Run(lives.build_here(made, 0), tmp_path / "run", Store(tmp_path / "run"), SoloComm())
    run.start()
    assert run.place is not None
    run.schedule = BatchSchedule(made.train, moved=-run.schedule.consumed(STEPS))
    with Store(tmp_path / "run").newest_good(SoloComm(), repair=False) as reader:
        run._load(reader)
    run.saver.close()
    assert run.place is None
