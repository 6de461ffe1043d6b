"""A run folder that holds weights alone: what is imported, taken out of a run or averaged, to be used as a run is."""

from collections.abc import Mapping
from math import prod
from pathlib import Path

from megaspec.checkpoint.comm import SoloComm
from megaspec.checkpoint.files import free_bytes, published_whole
from megaspec.checkpoint.reader import Weights
from megaspec.checkpoint.store import Store
from megaspec.checkpoint.streamed import streamed_pieces
from megaspec.core.errors import WriteError
from megaspec.estimate.target import Target
from megaspec.recipe import Recipe
from megaspec.rules.belonging import WEIGHTS_ALONE
from megaspec.run_folder import keep_companions, write_run
from megaspec.spec import Spec


def write_weights_run(
    out: Path,
    weights: Weights,
    *,
    recipe: Recipe,
    target: Target,
    spec: Spec,
    companions: Mapping[str, bytes],
) -> None:
    """Writes a run folder of weights alone, whole or not at all: `init.load=OUT`, `hf export OUT`, `generate OUT` and
    `checkpoint inspect OUT` take it as any run, `resume` refuses it.

    `weights`: under the names of checkpoints, `model/...` and `router/...`, each of at least one dimension. They are
    read a few rows at a time, as they are written: memory holds a few pieces of streamed.PIECE_BYTES, whatever the
    model's size. `recipe`, `target`, `spec`: of the run; of the Spec `run_dir` and `holds` are set here. `companions`:
    the tokenizer's files and what belongs to them, by name.

    WriteError: `out` is there, or there is no room. What reading raises goes through. Nothing is left of it then; a
    kill leaves a hidden folder beside `out`, never `out` itself.
    """
    spec = spec.model_copy(update={"holds": "weights", "run_dir": str(out)})
    with published_whole(out) as saving:
        need = bytes_of(weights)
        free = free_bytes(saving)
        if need > free:
            text = f"cannot write {out}: need {need:,} bytes, {free:,} bytes are free; make room there, or name another"
            raise WriteError(f"{text} folder")
        Store(saving).save(
            0,
            streamed_pieces(weights),
            spec=spec.model_dump(mode="json"),
            state=WEIGHTS_ALONE,
            comm=SoloComm(),
        )
        keep_companions(saving, companions)
        write_run(saving, recipe, target, spec)


def bytes_of(weights: Weights) -> int:
    """What a source takes as it is read."""
    return sum(prod(weights.shape(name)) * weights.dtype(name).itemsize for name in weights.names())
