"""Every setting is read by the code that it is for: fields are watched while runs are resolved, built and trained."""

import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, get_args
from unittest.mock import MagicMock

import pytest

from megaspec import cli
from megaspec.commands import starting, supervised
from megaspec.core.fields import kinds_below
from megaspec.core.frozen import Frozen
from megaspec.estimate import target
from megaspec.launcher.rendezvous import FileRendezvous
from megaspec.log.remote import SERVICE_FOLDERS
from megaspec.recipe import SECTIONS, Recipe
from megaspec.rules.examples import SERVICES
from megaspec.rules.unbuilt import UNBUILT
from megaspec.runtime.rank import RankInfo, run_rank
from megaspec.spec import Spec
from megaspec_launchers.attempt_process import AttemptResult

# Who decides and who types; what they read is not yet put to use.
BEFORE_A_RUN = (
    "megaspec.estimate",
    "megaspec.rules",
    "megaspec.resolve",
    "megaspec.plan",
    "megaspec.search",
    "megaspec.compose",
    "megaspec.spec",
    "megaspec.recipe",
    "pydantic",
    __name__,
)
# Fields that no rank reads, and what does.
NOT_FOR_RANKS = {
    "Spec.name": "megaspec.resolve.gather",
    "Spec.decisions": "megaspec.plan.plan",
    "Spec.data_fingerprint": "megaspec.resolve.resume",
    "Decision.key": "megaspec.plan.report",
    "Decision.value": "megaspec.plan.report",
    "Decision.reason": "megaspec.plan.report",
    "Spec.run_dir": "megaspec.commands.starting",
    "AboutSpec.purpose": "megaspec.plan.plan",
    "AboutSpec.source": "megaspec.plan.plan",
    "AboutSpec.hardware": "megaspec.plan.plan",
    # what ranks ask before they load a checkpoint: one place says whose it is, for them and for commands
    **{f"ForkPoint.{name}": "megaspec.rules.belonging" for name in ("source", "manifest", "step", "tokens")},
    # the rates of ranks stay behind the last piece either way
    "ScheduleSpec.after_pieces": "megaspec.rules.schedule_rules",
    # one place says which weights are read, for rules and for ranks
    **{f"InitSpec.{name}": "megaspec.rules.initial_weights" for name in ("include", "exclude")},
    **{f"Renaming.{name}": "megaspec.rules.initial_weights" for name in ("name", "source")},
    "TakenWeights.imported": "megaspec.rules.belonging",
    "InitSpec.missing": "megaspec.rules.init_rules",
    "InitSpec.vocab": "megaspec.rules.init_rules",
    "InitSpec.upcycle": "megaspec.rules.upcycle_rules",
    "InitSpec.step": "megaspec.resolve.gather",
    "LocalLauncher.ranks": "megaspec.rules.mesh_rules",
    "LocalLauncher.max_restarts": "megaspec.commands.starting",
    "LocalLauncher.layouts": "megaspec.commands.layouts",
    "RestartsSpec.look_seconds": "megaspec.commands.supervised",
    **{
        f"RestartsSpec.{name}": "megaspec_launchers.restarts"
        for name in ("most", "window_hours", "without_progress", "first_wait_seconds", "longest_wait_seconds")
    },
    "LocalLauncher.grace_seconds": "megaspec.commands.starting",
    "LocalLauncher.timeout_seconds": "megaspec.commands.starting",
    # the text of a job says nodes and ranks of a node
    "SlurmLauncher.ranks": "megaspec.rules.cluster_rules",
    "KubernetesLauncher.ranks": "megaspec.rules.cluster_rules",
}
# Jobs that are printed: together they set every key of their launchers.
JOBS = (
    (
        "launcher=slurm",
        "launcher.hardware=H100",
        "launcher.nodes=2",
        "launcher.ranks=auto",
        "train.global_batch=16",
        "launcher.container={image: x.sqsh, mounts: [{source: /data}]}",
    ),
    (
        "launcher=kubernetes",
        "launcher.hardware=H100",
        "launcher.ranks=auto",
        "train.global_batch=8",
        "launcher.image=x",
        "launcher.volumes=[{claim: runs, path: /workspace}]",
        "launcher.tolerations=[{key: a, value: b, effect: NoExecute}]",
        "launcher.topology=rack",
    ),
)
TINY = """
defaults:
  - hello
model: {n_layers: 1, d_model: 16, n_heads: 2, n_kv_heads: 1, d_ffn: 64}
data: {seq_len: 8, blend: [{prefix: text}], split: [9, 1, 0]}
train: {steps: 3, global_batch: 4, eval_every: 2, eval_samples: 2, sample: {prompt: a, tokens: 2}}
optim: {schedule: {warmup_steps: 1}}
launcher: {ranks: 1}
log: {console: plain, tensorboard: false}
"""
MADE_UP = ("~data.blend", "~data.split", "train.sample=null")
# Together they choose every class that a recipe can name.
RUNS = {
    "llama": (
        "model.positions.scaling={kind: llama3}",
        "model.attention.mask={kind: chunk, size: 3}",
        "precision=fp16",
        "train.batch_ramp={start: 2, increment: 2, samples: 4}",
        "parallelism.recompute={kind: full, method: block, layers: 1}",
        "log.sinks=[{kind: wandb}, {kind: mlflow}, {kind: trackio}]",
        "log.alerts=[{metric: loss, comparison: below, value: 100, action: webhook}]",
        "log.webhook={url_variable: TEST_WEBHOOK_URL, events: []}",
        "log.report={every_seconds: 1}",
    ),
    "loaded": (
        "model.positions.scaling={kind: llama3}",
        "model.attention.mask={kind: chunk, size: 3}",
        "init={load: runs/llama, step: 3, rename: [{name: norm., source: norm.}]}",
    ),
    "gpt": (
        "model=gpt2_124m",
        "~model.n_kv_heads",
        "model.attention.dropout=0.1",
        "data=synthetic",
        "optim={kind: sgd, lr: 0.1}",
        "precision=fp32",
        "optim.schedule={kind: wsd, warmup_steps: 1, wsd_decay_steps: 1}",
        "optim.weight_decay_ramp={kind: linear, end: 0.2, steps: 3}",
        "parallelism.recompute={kind: selective, parts: [norm]}",
        "parallelism.offload={layers: 1, optimizer: 0.5}",
        *MADE_UP,
    ),
    "fp8": (
        "model.n_layers=4",
        "model.n_kv_heads=2",
        "data.seq_len=16",
        "precision={kind: fp8, recipe: delayed}",
    ),
    "fp4": (
        "model={n_layers: 4, n_kv_heads: 2, d_model: 64}",
        "data.seq_len=32",
        "precision={kind: fp8, recipe: nvfp4}",
    ),
    "random": (
        "data=random",
        "data.vocab_size=64",
        "data.document_mask=true",
        "data.document_length=3",
        "model.vocab_size=64",
        "model.n_layers=3",
        "model.layer={kind: flat, mixers: [attention, mlp, moe]}",
        "model.positions={kind: none}",
        "model.attention={kind: gqa, mask: {kind: window, size: 3}, temperature: {kind: log}, sinks: true}",
        "model.moe={n_experts: 2, top_k: 1, "
        "router: {score: sigmoid, norm_top_k: false, expert_bias: true, bias_rate: 0.1}}",
        "optim={kind: muon, lr: 0.1}",
        "optim.schedule={kind: piecewise, warmup_steps: 0, min_lr: 0, pieces: [{shape: linear, steps: 1, factor: 0.5}, "
        "{shape: cosine, until: 2, start_lr: 0.02, lr: 0.01}, {shape: constant, steps: 9, start_factor: 0.2}]}",
        *MADE_UP,
    ),
    "stream": (
        "data=stream",
        "data.files=[{path: '*.jsonl', weight: 1}]",
        "data.tokenizer=byte",
        "data.window=100",
        "data.key=text",
        "train.eval_every=0",
        "train.sample.tokens=1",
        "~data.blend",
        "~data.split",
    ),
    "far": (
        "data=stream",
        "data.files=[{path: 'file://text.jsonl'}]",
        "data.tokenizer=byte",
        "data.workers=0",
        "train.eval_every=0",
        "train.sample.tokens=0",
        "~data.blend",
        "~data.split",
    ),
    "experts": (
        "model.layer={kind: parallel}",
        "model.n_layers=5",
        "model.d_head=8",
        "model.layer_types.a.mask={kind: chunk, size: 3}",
        "model.layer_types.a.positions={kind: rotary, scaling: {kind: linear, factor: 2}}",
        "model.layer_types.b.positions={kind: rotary, scaling: {kind: dynamic, factor: 2, original_max_seq_len: 4}}",
        "model.layer_types.c.positions={kind: rotary, scaling: {kind: yarn, factor: 2, original_max_seq_len: 4, "
        "mscale: 0.7, mscale_all_dim: 0.6}}",
        "model.layer_types.d.positions={kind: rotary, scaling: {kind: proportional, fraction: 0.5}}",
        "model.layer_types.e.positions={kind: rotary, fraction: 0.5, scaling: {kind: longrope, "
        "short_factor: [1, 1], long_factor: [2, 2], original_max_seq_len: 4, factor: 2}}",
        "model.layer_pattern=[a, b, c, d, e]",
        "~model.mlp.activation",
        "model.mlp={kind: clamped}",
        "model.attention.qk_norm=per_head",
        "model.moe={n_experts: 4, every: 2, d_shared: 16, drop: position, capacity_factor: 2, "
        "router: {score: sigmoid, n_groups: 2, group_top_k: 1, expert_bias: true, bias_rate: 0.1, "
        "losses: [{kind: aux, coefficient: 0.1}], z_loss: 0.1}}",
        "precision=bf16",
        "optim.formats={exp_avg: bf16}",
        "parallelism.dp_strategy=zero1",
        "train.sample=null",
    ),
}


def classes_in(annotation: Any) -> Iterator[type[Frozen]]:
    """The spec classes that an annotation names, however deep in it."""
    if isinstance(annotation, type) and issubclass(annotation, Frozen):
        yield annotation
    for part in get_args(annotation):
        yield from classes_in(part)


def reachable(root: type[Frozen], found: dict[type[Frozen], None] | None = None) -> dict[type[Frozen], None]:
    """`root` and every class of its fields, in the order of the fields."""
    if found is None:
        found = {}
    found[root] = None
    for field in root.model_fields.values():
        for one in classes_in(field.annotation):
            if one not in found:
                reachable(one, found)
    return found


def leaves() -> list[str]:
    """`Class.field` of every field of a Spec that is no section of its own, without names that only choose a class."""
    return ["Spec.decisions"] + [
        f"{one.__name__}.{name}"
        for one in reachable(Spec)
        for name, field in one.model_fields.items()
        if not list(classes_in(field.annotation)) and not (name == "kind" and len(get_args(field.annotation)) == 1)
    ]


def pretend_services(patch: pytest.MonkeyPatch) -> None:
    """Packages of services that take everything: what our sinks read is the same whether they are installed or not."""
    installed = target._versions() | SERVICES
    patch.setattr(target, "_versions", lambda: installed)
    for name in ("wandb", "mlflow", "mlflow.entities", "mlflow.tracking", "trackio"):
        patch.setitem(sys.modules, name, MagicMock())
    for name in SERVICE_FOLDERS:
        # ours are imported anew, now and after this
        patch.setitem(sys.modules, f"megaspec.log.{name}", None)
        del sys.modules[f"megaspec.log.{name}"]
    patch.setenv("TRACKIO_DIR", "")
    patch.setenv("TEST_WEBHOOK_URL", "http://127.0.0.1:9")


class NoProcess:
    """In place of the process that makes a supervised run's attempts: what they come to is said beforehand."""

    def __init__(self, command: list[str], environment: dict[str, str]):
        self.environment = environment

    def is_alive(self) -> bool:
        return True

    def send(self, job: dict[str, Any]) -> bool:
        return True

    def close(self) -> None:
        """There is nothing to end."""


def pretend_attempts(patch: pytest.MonkeyPatch) -> None:
    """A supervisor whose first attempt is killed, and whose second does all."""
    results = iter([AttemptResult(74, "killed"), AttemptResult(0, "")])
    patch.setattr(supervised, "AttemptProcess", NoProcess)
    patch.setattr(supervised, "adopt_orphans", lambda: None)
    patch.setattr(supervised, "end_orphans", lambda: None)
    patch.setattr(supervised, "watch_attempt", lambda process, stop, **_: next(results))


@pytest.fixture(scope="module")
def readers(tmp_path_factory) -> dict[str, set[str]]:
    """`Class.field` -> modules that read it, in runs from the command line to their end."""
    found: dict[str, set[str]] = defaultdict(set)
    plain = Frozen.__getattribute__

    def watched(self: Frozen, name: str) -> Any:
        if name in type(self).model_fields:
            found[f"{type(self).__name__}.{name}"].add(sys._getframe(1).f_globals["__name__"])
        return plain(self, name)

    def launch(run_dir: str, *, arguments: dict[str, Any], **_: Any) -> int:
        run_rank(Path(run_dir), RankInfo(0, 1, 0, 0, FileRendezvous(""), 20.0), arguments["lock_token"])
        return 0

    folder = tmp_path_factory.mktemp("rooms")
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": f"text {i} and more"}) for i in range(20)))
    (folder / "recipes").mkdir()
    (folder / "recipes" / "tiny.yaml").write_text(TINY)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("RANK", raising=False)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setattr(starting, "launch", launch)
        pretend_services(patch)
        assert cli.main(["data", "prepare", "text.jsonl", "--out", "text", "--workers", "1"]) == 0
        patch.setattr(Frozen, "__getattribute__", watched)
        for name, words in RUNS.items():
            assert cli.main(["train", "recipe=tiny", f"name={name}", *words]) == 0, name
            assert cli.main(["resume", f"runs/{name}", "train.steps=4"]) == 0, name
        for words in JOBS:
            assert cli.main(["train", "recipe=tiny", *words, "--print"]) == 0
        # of which family a run's weights were is asked when it is exported; none has chunks and this scaling
        assert cli.main(["hf", "export", "runs/loaded", "exported"]) == 64
        # what weights alone are from, and whether a run has trained them
        for number, words in enumerate((["average", "runs/random", "--steps", "3,4"], ["save", "runs/0"])):
            assert cli.main(["checkpoint", *words, "--out", f"runs/{number}"]) == 0
        assert cli.main(["checkpoint", "inspect", "runs/1"]) == 0
        # with what data is made is told where there is none
        assert cli.main(["train", "recipe=tiny", "name=gone", "data.blend=[{prefix: gone}]"]) == 65
        # what is done about a spike is asked where there is one: what is above the median counts as such
        guarded = ["train.numbers={skips: 1, rollbacks: 1, before: 1, spikes: {window: 8, threshold: 1e-6}}"]
        guarded += ["train.skip_steps=[{first: 2, last: 3}]", "train.steps=40", "checkpoint.every=2"]
        assert cli.main(["train", "recipe=tiny", "name=guarded", "train.checks.state=0.5", *guarded]) == 76
        pretend_attempts(patch)
        kept_alive = ["--supervise", "launcher.restarts.first_wait_seconds=0.01", "train.steps=4"]
        assert cli.main(["train", "recipe=tiny", "name=kept", *kept_alive]) == 0
        assert cli.main(["resume", "runs/gpt", "--fork", "forked", "train.steps=5"]) == 0
        # whose a checkpoint is that is not the fork's own is asked only where there is one
        shutil.copytree("runs/gpt/checkpoints/step-00000003", "runs/forked/checkpoints/step-00000003")
        assert cli.main(["checkpoint", "verify", "runs/forked"]) == 66
    return found


def test_runs_choose_every_class(readers):
    chosen = {key.partition(".")[0] for key in readers}
    unbuilt = {key.partition(".")[0] for key in listed_as_unbuilt()}
    missed = {one.__name__ for one in reachable(Spec)} - chosen - unbuilt - {"Spec"}
    assert missed == set(), "no run in RUNS chooses them: add one"


def owners_of(path: str) -> Iterator[str]:
    """`Class.field` of a dotted path of a recipe and of everything below it, for every class that may stand there."""
    here, (*above, last) = [Spec], path.split(".")
    for part in above:
        here = [one for c in here if part in c.model_fields for one in classes_in(c.model_fields[part].annotation)]
    for owner in here:
        if last in owner.model_fields:
            below = [one for c in classes_in(owner.model_fields[last].annotation) for one in reachable(c)]
            yield from (f"{c.__name__}.{name}" for c in below for name in c.model_fields)
            yield f"{owner.__name__}.{last}"


def listed_as_unbuilt() -> set[str]:
    """`Class.field` of all that can be planned only. Where a kind is, its whole class is, with fields whose names other
    kinds have too."""
    found: set[str] = set()
    for one in UNBUILT:
        for path in one.fields:
            found |= set(owners_of(path))
        section, _, name = one.switch.rpartition(".")
        if name == "kind":
            classes = kinds_below(Recipe, section.partition(".")[0])[section]
            for kind, owner in classes.items():
                if kind != one.off:
                    found |= {f"{owner.__name__}.{field}" for field in owner.model_fields}
    return found


def test_every_field_is_read_where_it_is_put_to_use_or_listed_as_unbuilt(readers):
    unread = {
        key
        for key in leaves()
        if key not in NOT_FOR_RANKS and not any(not r.startswith(BEFORE_A_RUN) for r in readers[key])
    }
    listed = listed_as_unbuilt() & set(leaves())
    assert unread == listed, (unread - listed, listed - unread)


@pytest.mark.parametrize("key", NOT_FOR_RANKS)
def test_what_no_rank_reads_is_read_where_the_list_says(key, readers):
    assert key in leaves()
    by = readers[key] | (readers[key.replace("Spec.", "Recipe.")] if key.startswith("Spec.") else set())
    assert NOT_FOR_RANKS[key] in by


def test_every_class_of_a_section_has_a_builder():
    """Where the table names a dictionary by class, no class is left out."""
    checked = 0
    for name, section in SECTIONS.items():
        module, _, attribute = section.built.partition(":")
        built = getattr(import_module(module), attribute)
        classes = set(classes_in(Recipe.model_fields[name].annotation))
        if isinstance(built, dict) and classes & set(built):
            assert set(built) == classes, f"{section.built} and the classes of Recipe.{name} differ"
            checked += 1
    assert checked >= 2
