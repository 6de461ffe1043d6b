"""The guide's plug-ins (megaspec/README.md) run as they stand there, and do what they say."""

import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.warm import warm_command, warm_script

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "megaspec" / "README.md"
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join(str(ROOT / p) for p in ("", "kernels", "launchers")),
    "OMP_NUM_THREADS": "1",
}
PACKAGES = ("my_loss", "my_optimizer", "my_source", "my_sink", "my_mlp", "my_family")
WORDS = (
    "recipe=hello",
    "data={kind: npy, file: tokens.npy, vocab_size: 16, seq_len: 8}",
    "~data.blend",
    "~data.prepare",
    "model={n_layers: 2, d_model: 16, n_heads: 2, n_kv_heads: 2, d_ffn: 32, vocab_size: 16}",
    "model.mlp={kind: power, power: 3}",
    "~model.mlp.activation",
    "optim={kind: sign, lr: 1e-3, schedule: {warmup_steps: 0, min_lr: 1e-4}}",
    "train={global_batch: 4, eval_every: 2, eval_samples: 4, sample: null, loss: {kind: less_of_one, label: 3}}",
    "launcher.ranks=2",
    "parallelism.tp=2",
    "log={console: quiet, tensorboard: false, sinks: [{kind: slow_steps, seconds: 0}]}",
)


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder with the plug-ins of the guide, word for word, and the tokens that one of them reads."""
    files = dict(re.findall(r"^```py\n# (\S+\.py)\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL))
    assert {name.partition("/")[0] for name in files} == set(PACKAGES), "a plug-in of the guide that no test runs"
    for name, body in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(body)
    np.save(tmp_path / "tokens.npy", (np.arange(1000) * 7 % 16).astype(np.uint16))
    return tmp_path


def megaspec(*words: str, cwd: Path) -> subprocess.CompletedProcess:
    flags = [f"--plugin=./{name}" for name in PACKAGES]
    return warm_command([*words, *flags], cwd=cwd, env=ENVIRONMENT)


def test_the_plugins_of_the_guide_train_and_go_on(workplace: Path):
    trained = megaspec("train", *WORDS, "train.steps=3", cwd=workplace)
    assert trained.returncode == 0, trained.stderr
    more = megaspec("resume", "runs/hello", "train.steps=4", "parallelism.tp=1", cwd=workplace)
    assert more.returncode == 0, more.stderr
    told = (workplace / "runs" / "hello" / "slow_steps.txt").read_text().splitlines()
    lines = [json.loads(line) for line in (workplace / "runs" / "hello" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "grad_norm" in line]
    valid = [line["loss"] for line in lines if line["event"] == "eval"]
    assert [re.sub(r"[\d.]+ s", "S", line) for line in told] == [
        "from step 0",
        f"step 1: S, loss {losses[0]:.4f}",
        f"step 2: S, loss {losses[1]:.4f}",
        f"evaluation after step 2: loss {valid[0]:.4f}",
        f"step 3: S, loss {losses[2]:.4f}",
        f"evaluation after step 3: loss {valid[1]:.4f}",
        "done after step 3",
        "from step 3",
        f"step 4: S, loss {losses[3]:.4f}",
        f"evaluation after step 4: loss {valid[2]:.4f}",
        "done after step 4",
    ]


def test_two_ranks_train_the_plugins_of_the_guide_as_one_does(workplace: Path):
    words = [word for word in WORDS if not word.startswith(("train=", "log="))]
    loss = "train={steps: 2, global_batch: 4, eval_every: 0, sample: null, loss: {kind: less_of_one, label: 3}}"
    verified = megaspec("verify", *words, loss, "--cpu", cwd=workplace)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "equal:" in verified.stdout


CHECKED = """
import sys
from megaspec.plugins import load
load([f"./{name}" for name in sys.argv[1:]])
import numpy as np, torch
from tests.nn.random_specs import VOCABULARY
from tests.nn.test_random_specs import check_flops, check_kept, check_parameters

sizes = {"n_layers": 2, "d_model": 16, "n_heads": 2, "vocab_size": VOCABULARY, "vocab_pad_to": 1}
for check in (check_parameters, check_flops, check_kept):
    check(sizes | {"kind": "decoder", "mlp": {"kind": "power", "power": 3}})

# the loss: one label's part counts a tenth
from my_loss import LessOfOneSpec
from my_loss.loss import less_of_one
from megaspec_kernels.cross_entropy.reference import VocabShard
x, weight = torch.randn(5, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
labels, weights = torch.tensor([0, 3, 3, 5, 1]), torch.rand(5, dtype=torch.float64)
each = torch.nn.functional.cross_entropy(x @ weight.t(), labels, reduction="none")
expected = (weights * each * torch.tensor([1, 0.1, 0.1, 1, 1], dtype=torch.float64)).sum()
found = less_of_one(LessOfOneSpec(kind="less_of_one", label=3))(x, weight, labels, weights, VocabShard(0, 6))
torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)

# the optimizer: two steps by hand, then one that is skipped
from my_optimizer import SignSpec
from my_optimizer.sign import Sign
w, b = torch.full((1, 2), 1.0), torch.full((2,), 1.0)
made = Sign({"w": w, "b": b}, SignSpec(kind="sign", lr=0.1, momentum=0.5))
for gradient, skip in ((1.0, 0), (-4.0, 0), (9.0, 1)):
    gradients = {"w": torch.full((1, 2), gradient), "b": torch.full((2,), gradient)}
    made.update(gradients, lr=0.1, weight_decay=0.5, divide_by=torch.tensor(2.0), skip=torch.tensor(skip))
# v = 0.25, then -0.875; w = 1 - 0.1 (1 + 0.5) = 0.85, then 0.85 - 0.1 (-1 + 0.425)
torch.testing.assert_close(w, torch.full((1, 2), 0.9075))
torch.testing.assert_close(b, torch.full((2,), 1.0))
torch.testing.assert_close(made.state()["average"]["w"], torch.full((1, 2), -0.875))
assert made.updates == 2

# the source: every sequence once an epoch, none of them in validation
from my_source import NpySpec
from my_source.npy import Npy
np.save("long.npy", np.arange(8 * 40 + 1))
spec = NpySpec(kind="npy", file="long.npy", vocab_size=1000, seq_len=8)
train = Npy(spec, split="train", seed=1, segments=(50, 26), vocab_size=1000)
valid = Npy(spec, split="valid", seed=1, segments=(50, 26), vocab_size=1000)
assert (len(train), len(valid)) == (76, 2)
epochs = [[int(train.read(38 * epoch + p).tokens[0]) for p in range(38)] for epoch in range(2)]
assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1]) == list(range(0, 304, 8))
assert [int(valid.read(p).tokens[0]) for p in range(2)] == [304, 312]
"""


def test_the_plugins_of_the_guide_compute_what_they_say(workplace: Path):
    paths = {"PYTHONPATH": f"{ENVIRONMENT['PYTHONPATH']}{os.pathsep}{ROOT}"}
    made = warm_script(CHECKED, PACKAGES, cwd=workplace, env=ENVIRONMENT | paths)
    assert made.returncode == 0, made.stderr


FAMILY = """
import os
os.environ["HF_HUB_OFFLINE"] = "1"
from transformers import AutoModelForCausalLM, SeedOssConfig
import torch
from megaspec import cli
from tests.hf.folders import assert_same_tensors

torch.manual_seed(0)
sizes = dict(vocab_size=96, hidden_size=32, intermediate_size=40, num_hidden_layers=2, head_dim=12)
heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
model = AutoModelForCausalLM.from_config(SeedOssConfig(**sizes, **heads, pad_token_id=None))
with torch.no_grad():
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter += torch.randn(parameter.shape)
model.save_pretrained("seed")
flag = "--plugin=./my_family"
assert cli.main(["hf", "import", "seed", "--out", "start", flag]) == 0
assert cli.main(["hf", "export", "start", "out", flag]) == 0
for folder in ("seed", "out"):
    assert cli.main(["hf", "verify", "start", folder, flag]) == 0
from pathlib import Path
assert_same_tensors(Path("seed"), Path("out"))
assert cli.main(["hf", "families", "seed_oss", flag]) == 0
"""


def test_the_family_of_the_guide_is_imported_exported_and_proven(workplace: Path):
    paths = {"PYTHONPATH": f"{ENVIRONMENT['PYTHONPATH']}{os.pathsep}{ROOT}"}
    made = warm_script(FAMILY, cwd=workplace, env=ENVIRONMENT | paths)
    assert made.returncode == 0, made.stderr
    config = json.loads((workplace / "out" / "config.json").read_text())
    assert (config["model_type"], config["attention_bias"], config["attention_out_bias"]) == ("seed_oss", True, False)
    assert "start: a seed_oss of " in made.stdout
    assert "seed_oss" in json.loads((workplace / "start" / "spec.json").read_text())["weights_from"]["family"]
    assert made.stdout.count("are equal to the bit") == made.stdout.count("with transformers in fp32") == 2
    assert "attention_out_bias       true or false" in made.stdout
    # what was made with the family is read with it
    refused = warm_command(["hf", "export", "start", "other"], cwd=workplace, env=ENVIRONMENT)
    assert refused.returncode == 64
    assert "add --plugin ./my_family" in refused.stderr
    refused = warm_command(["hf", "import", "seed", "--out", "other"], cwd=workplace, env=ENVIRONMENT)
    assert refused.returncode == 66
    assert "model_type=seed_oss can't be said" in refused.stderr


def test_data_that_is_not_there_is_a_line(workplace: Path):
    (workplace / "tokens.npy").unlink()
    trained = megaspec("train", *WORDS, "train.steps=3", cwd=workplace)
    assert trained.returncode == 65
    assert "data.file=tokens.npy can't be read" in trained.stderr
    assert "Traceback" not in trained.stderr


def test_the_guide_names_every_place_and_every_event():
    from dataclasses import fields

    from megaspec.log.events import NAMES
    from megaspec.plugins import Plugin

    text = GUIDE.read_text()
    for place in fields(Plugin):
        assert f"\n| {place.name} | " in text, place.name
    for event in NAMES:
        assert f"\n| `{event.__name__}` | " in text, event.__name__
