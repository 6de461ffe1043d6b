"""Runs with Transformer Engine's kernels, by one that computes on a CPU in its place; what is told where it is not."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megaspec.core.errors import RecipeError
from megaspec.nn.fp4 import Fp4Form
from megaspec.parallelism.fp8 import Fp8
from megaspec.parallelism.mesh import Mesh
from megaspec.runtime import build
from megaspec_kernels import te_package
from megaspec_kernels.registry import REGISTRY
from tests.gpu.test_fp8 import fp8, losses
from tests.kernels.te import Fake, fake_transformer_engine
from tests.parity.tasks import without_cpp
from tests.parity.test_te import IN_ITS_PLACE
from tests.ranks import RankPool
from tests.runtime import lives
from tests.runtime.specs import spec
from tests.source_patch import Patch, planted

TE = {"linear": "te", "norm": "te", "attention": "te"}
CUDA = torch.device("cuda")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return fake_transformer_engine(monkeypatch)


def learned(recipe: str, *, te: bool, compile: str = "none") -> list[float]:
    precision = {"kind": "bf16"} if recipe == "bf16" else fp8(recipe)
    others = TE if te else None
    return losses(precision, compile=compile, fast=False, steps=4, device="cpu", others=others, length=128)


# of one recipe whole models, of the others layers: tests/nn/test_fp8_te.py, and layouts: tests/parity/test_te.py
@pytest.mark.parametrize(
    "recipe",
    ["bf16", "delayed", *(pytest.param(one, marks=pytest.mark.slow) for one in ("tensorwise", "blockwise"))],
)
def test_a_model_learns_as_by_ours(recipe: str, fake: Fake) -> None:
    plain = learned(recipe, te=False)
    found = learned(recipe, te=True)
    assert found == pytest.approx(plain, rel=2e-2)
    assert found[0] == pytest.approx(plain[0], rel=1e-3)
    assert found != plain
    layers, linears, passes = 4, 4, 4 * 2
    # three products of each layer in each micro batch, and nothing but Transformer Engine has made one
    assert len(fake.products) == 3 * layers * linears * passes
    in_fp8 = [call for call in fake.products if call.in_fp8]
    assert len(in_fp8) == (0 if recipe == "bf16" else len(fake.products) // 2)
    sums = [call for call in fake.products if call.layout == "NT"]
    assert all(call.out is not None and call.out.dtype == torch.float32 for call in sums)
    # of two micro batches the second adds
    assert sum(call.accumulate for call in sums) == len(sums) // 2
    assert len(fake.attentions) == layers * passes
    assert len(fake.norms) == 2 * (2 * layers + 1) * passes


def test_weights_are_cast_once_an_update(fake: Fake) -> None:
    learned("tensorwise", te=True)
    layers, linears, steps, micro_batches = 2, 4, 4, 2
    # input and gradient in each micro batch, the weight once a step
    assert len(fake.casts) == layers * linears * steps * (2 * micro_batches + 1)


# layers are compiled in tests/nn/test_fp8_te.py
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_compiled_model_makes_the_same(recipe: str, fake: Fake) -> None:
    plain = learned(recipe, te=True)
    with without_cpp():
        found = learned(recipe, te=True, compile="block")
    # what is compiled rounds less often; Adam's first steps make much of it (1 % in step 3 without Transformer Engine)
    assert found[0] == pytest.approx(plain[0], rel=1e-4)
    assert found == pytest.approx(plain, rel=3e-2)


# layers are held to the definition in tests/nn, layouts in tests/parity/test_te.py
@pytest.mark.slow
@pytest.mark.parametrize("compile", ["none", "block"])
@pytest.mark.parametrize(("recipe", "quantizer"), [("mxfp8", "MXFP8Quantizer"), ("nvfp4", "NVFP4Quantizer")])
def test_a_model_learns_as_by_the_definition(recipe: str, quantizer: str, compile: str, fake: Fake) -> None:
    plain = learned(recipe, te=False, compile=compile)
    assert not fake.products, "of the package nothing was asked"
    found = learned(recipe, te=True, compile=compile)
    # norms and attention are its own; other draws make other steps
    assert found[0] == pytest.approx(plain[0], rel=1e-3 if recipe == "mxfp8" else 5e-3)
    assert found == pytest.approx(plain, rel=2e-2 if recipe == "mxfp8" else 0.1)
    assert found[-1] < found[0]
    assert fake.casts.count(quantizer) > 2 * 4 * 4
    wide = learned("bf16", te=False, compile=compile)
    assert plain != wide
    assert plain[0] == pytest.approx(wide[0], rel=2e-2)


def test_a_step_is_rounded_by_the_same_draws_again_and_another_by_others() -> None:
    """So that a step that is computed twice, and one behind a checkpoint, is the same."""
    device = torch.device("cpu")
    mesh = Mesh({"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1}, rank=0, device=device, ep=1, etp=1)
    form = Fp4Form("stochastic", REGISTRY["linear"]["reference"].nvfp4)

    def draws(step: int, *, seed: int = 3) -> list[float]:
        strategy = Fp8(mesh, form, names={}, history=1, grouped=None, seed=seed)
        strategy.start_step(step)
        return torch.rand(4).tolist()

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)
    assert draws(1) != draws(1, seed=4)
    # steps that nobody counts differ
    strategy = Fp8(mesh, form, names={}, history=1, grouped=None)
    found = []
    for _ in range(2):
        strategy.start_step()
        found.append(torch.rand(4).tolist())
    assert found[0] != found[1]
    # what rounds to nearest leaves torch's generator alone
    torch.manual_seed(0)
    before = torch.get_rng_state()
    Fp8(mesh, replace(form, rounding="nearest"), names={}, history=1, grouped=None).start_step(1)
    assert torch.equal(torch.get_rng_state(), before)


# What a package makes that is wrong, and what a run says of it before it trains.
WRONG = {
    "a cast": (
        Patch(
            "tests.kernels.te",
            "scale = _e8m0(found * torch.tensor(1 / LARGEST[self.form]))",
            "scale = _e8m0(found * torch.tensor(1 / LARGEST[self.form])) - 1",
        ),
        "360 of 360 scales of rows in e4m3 of (72, 160)",
    ),
    "a product": (
        Patch(
            "tests.kernels.te",
            "each = each[:, :inner].repeat_interleave(MX_LINE, 0)[:rows]",
            "each = each[:, :inner].roll(1, 1).repeat_interleave(MX_LINE, 0)[:rows]",
        ),
        "numbers of the product input gradient (NN)",
    ),
}


def test_another_nvfp4_is_refused_before_it_trains(fake: Fake) -> None:
    patch = Patch("tests.kernels.te", "            if self.rotates:\n", "            if False:\n")
    with planted(patch), pytest.raises(RecipeError) as raised:
        learned("nvfp4", te=True)
    (problem,) = raised.value.problems
    assert problem.message.startswith(
        "precision.recipe=nvfp4: Transformer Engine on cpu does not compute what kernels/"
    )
    assert "of columns of an input of (72, 160); set precision.recipe=tensorwise" in problem.message


@pytest.mark.parametrize("name", WRONG)
def test_a_package_that_computes_something_else_is_refused_before_it_trains(name: str, fake: Fake) -> None:
    patch, said = WRONG[name]
    with planted(patch), pytest.raises(RecipeError) as raised:
        learned("mxfp8", te=True)
    (problem,) = raised.value.problems
    assert problem.key == "precision.recipe"
    assert problem.message.startswith("precision.recipe=mxfp8: Transformer Engine on cpu does not compute what ")
    assert said in problem.message
    assert problem.message.endswith("; set precision.recipe=tensorwise with kernels.linear=torch, or precision=bf16")
    # its other recipes are not asked
    with planted(patch):
        learned("tensorwise", te=True)


STEPS = 6


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(patches=(IN_ITS_PLACE,)) as pool:
        yield pool


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8", "nvfp4"])
def test_a_run_that_is_stopped_goes_on_to_the_bit(recipe: str, tmp_path: Path, ranks: RankPool) -> None:
    """With what delayed scales are made of; of mxfp8 there is nothing, and of nvfp4 a step's draws."""
    precision = {"kind": "fp8", "recipe": recipe, "first_layers_bf16": 0, "last_layers_bf16": 1}
    if recipe == "delayed":
        precision["amax_history"] = 3
    changes = {
        "train.steps": STEPS,
        "train.deterministic": True,
        "precision": precision,
        "model": {
            "kind": "decoder",
            "n_layers": 2,
            "d_model": 64,
            "n_heads": 2,
            "n_kv_heads": 2,
            "d_ffn": 96,
            "vocab_size": 37,
        },
        "kernels.compile": "none",
    }
    made = spec(changes)
    # no target of a CPU has it
    kernels = made.kernels.model_copy(update={"linear": "te", "norm": "te"})
    text = made.model_copy(update={"kernels": kernels}).model_dump_json()
    undisturbed = ranks.run(lives.live, text, str(tmp_path / "whole"), ranks=1)[0]
    stopped = ranks.run(lives.lives, text, str(tmp_path / "stopped"), stops=2, ranks=1)[0]
    assert [e["step"] for e in undisturbed if "samples" in e] == list(range(1, STEPS + 1))
    assert stopped == undisturbed
    whole = lives.read_all(tmp_path / "whole")[STEPS]
    assert lives.read_all(tmp_path / "stopped")[STEPS] == whole


def te_spec() -> object:
    made = spec({"precision": {"kind": "bf16"}})
    return made.model_copy(update={"kernels": made.kernels.model_copy(update=TE)})


def test_a_package_that_is_missing_is_told_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "needs the package transformer-engine: pip install 'megaspec[te]'"
    monkeypatch.setattr(te_package, "missing", lambda: why)
    with pytest.raises(RecipeError) as raised:
        build._refuse_missing(te_spec(), device=CUDA)
    found = {problem.key: problem.message for problem in raised.value.problems}
    assert set(found) == {"kernels.linear", "kernels.norm", "kernels.attention"}
    assert found["kernels.linear"] == f"kernels.linear=te {why}, or set kernels.linear=torch"


def test_without_it_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> str:
        raise AssertionError("the package was looked for")

    monkeypatch.setattr(te_package, "missing", fails)
    build._refuse_missing(spec({"precision": {"kind": "bf16"}}), device=CUDA)


def test_what_cudnn_does_not_take_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def refused(**sizes: object) -> str:
        asked.update(sizes)
        return "no backend for heads of 260"

    monkeypatch.setattr(build.te_attention, "is_refused", refused)
    with pytest.raises(RecipeError, match="Transformer Engine takes no such attention here: no backend for heads"):
        build._refuse_attention(te_spec(), device=CUDA)
    assert (asked["n_heads"], asked["n_kv_heads"], asked["d_head"], asked["documents"]) == (4, 2, 8, False)
