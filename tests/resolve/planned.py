"""Filled recipes for GPUs that are not here."""

from dataclasses import replace

from megaspec.compose.compose import compose
from megaspec.estimate.hardware import HARDWARE
from megaspec.estimate.target import Target
from megaspec.resolve.resolver import settle
from megaspec.rules.run_facts import Facts

FACTS = Facts(run_dir="runs/x", vocab_size=257, train_tokens=10**12, valid_tokens=10**9)
RANDOM = ("data=random", "~data.blend", "train.sample=null", "train.eval_every=0")


def filled(recipe, *overrides, gpus=8, hardware="H200"):
    """A recipe that is resolved for so many GPUs."""
    kind = HARDWARE[hardware]
    target = Target(
        gpus=gpus, gpu=kind.name, sm=kind.sm, gpu_memory=kind.memory, cores=16, versions={"torch": "2.13.0"}
    )
    composed = compose(recipe, overrides)
    facts = replace(FACTS, vocab_size=None) if recipe != "hello" else FACTS
    return settle(composed.recipe, target, facts, composed.origins).recipe


def shaped(model, *overrides, gpus=1, micro_batch=1, global_batch=1, seq_len=8192, precision="bf16"):
    """A model of conf/model/ on random tokens."""
    words = (f"model={model}", f"precision={precision}", f"data.seq_len={seq_len}", *RANDOM)
    batch = (f"train.micro_batch={micro_batch}", f"train.global_batch={global_batch}")
    return filled("hello", *words, *batch, *overrides, gpus=gpus)
