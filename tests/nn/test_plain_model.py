"""A model that is built without a layout around it: it computes, trains, and never reads memory that holds anything."""

from collections.abc import Iterator

import pytest
import torch

from megaspec.core.errors import UsageError
from megaspec.model.builders import MODELS
from megaspec.nn.decoder import Decoder
from megaspec.nn.init import start_weights
from megaspec.parallelism.mesh import Mesh
from megaspec.runtime.build import build, build_model, initialise, plain_model
from megaspec.spec import Spec
from megaspec_kernels.registry import kernels_of
from tests.parity.cases import Case, batches_of, spec_of

CPU = torch.device("cpu")
CASES = {
    "llama": Case(pad=8),
    "tied": Case(tied=True),
    "gpt": Case(family="gpt", pad=8),
    "experts": Case(router="sigmoid", shared="gate"),
}


@pytest.fixture(params=CASES)
def spec(request: pytest.FixtureRequest) -> Spec:
    return spec_of(CASES[request.param])


@pytest.fixture(autouse=True)
def dirty_memory() -> Iterator[None]:
    """What `empty` makes holds NaN, or the largest number where it holds whole ones."""
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills


def weights_of(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def logits_of(spec: Spec) -> torch.Tensor:
    """Of the model that a layout of one rank trains."""
    built = build(spec, mesh=Mesh({}, rank=0, device=CPU))
    initialise(built)
    with torch.no_grad():
        return built.model(tokens())


def tokens() -> torch.Tensor:
    return batches_of(Case(), [], 1)[0].tokens


def test_it_is_what_a_layout_of_one_rank_starts_from(spec: Spec) -> None:
    model = plain_model(spec, device=CPU)
    assert torch.equal(model(tokens()), logits_of(spec))


def test_it_trains_as_a_module_of_torch(spec: Spec) -> None:
    model = plain_model(spec, device=CPU, dtype=torch.float32)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = batches_of(Case(), [], 1)[0]
    losses = []
    for _ in range(5):
        loss = model.loss(batch.tokens, batch.labels, batch.mask / batch.mask.sum())
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]


def test_the_class_itself_starts_its_weights(spec: Spec) -> None:
    model = MODELS[type(spec.model)](spec.model, kernels_of(spec.kernels)).double()
    again = plain_model(spec, device=CPU, dtype=torch.float32).double()
    start_weights(again, std=spec.model.init_std, seed=0)
    values = weights_of(again)
    # the class starts in fp32
    assert all(torch.equal(value, values[name].float()) for name, value in weights_of(model).items())
    assert model(tokens()).isfinite().all()


@pytest.mark.parametrize("way", ["to_empty", "load_state_dict"])
def test_a_model_from_the_meta_device_computes_what_it_keeps_beside_its_weights(spec: Spec, way: str) -> None:
    expected = plain_model(spec, device=CPU)
    model = build_model(spec.model, kernels_of(spec.kernels), dtype=torch.float64)
    if way == "to_empty":
        model.to_empty(device="cpu").double()
        model.load_state_dict(expected.state_dict())
    else:
        model.to_empty(device="cpu")
        model.double().load_state_dict(expected.state_dict(), assign=True)
    for name, buffer in expected.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    assert torch.equal(model(tokens()), expected(tokens()))


def test_a_model_on_the_meta_device_says_so(spec: Spec) -> None:
    model = build_model(spec.model, kernels_of(spec.kernels), dtype=torch.float64)
    with pytest.raises(UsageError, match=r"meta device.*megaspec\.plain_model"):
        model(tokens())


def test_shapes_may_be_computed_on_the_meta_device(spec: Spec) -> None:
    model = build_model(spec.model, kernels_of(spec.kernels), dtype=torch.float64)
    if spec.model.positions.kind == "rotary" and spec.model.moe is None:
        assert model(tokens().to("meta")).shape == (*tokens().shape, spec.model.vocab_size)


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16, torch.float64])
def test_angles_are_not_rounded_with_the_weights(cast: torch.dtype) -> None:
    spec = spec_of(CASES["llama"])
    wide = torch.promote_types(cast, torch.float32)
    model = plain_model(spec, device=CPU, dtype=torch.float32).to(cast)
    expected = plain_model(spec, device=CPU, dtype=wide)
    assert torch.equal(model.ropes[0].cos_TH, expected.ropes[0].cos_TH)
    assert torch.equal(model.ropes[0].sin_TH, expected.ropes[0].sin_TH)
