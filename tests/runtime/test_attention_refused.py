"""A GPU without a fused kernel for a run's attention: an error before anything is built."""

import pytest
import torch

from megaspec.core.errors import RecipeError
from megaspec.runtime import build
from megaspec_kernels.attention import sdpa
from tests.runtime.specs import spec

CUDA = torch.device("cuda")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """What torch is asked, which refuses everything."""
    calls: list[dict] = []
    monkeypatch.setattr(sdpa, "is_refused", lambda **sizes: calls.append(sizes) or True)
    return calls


def test_what_torch_refuses_is_an_error_with_the_way_out(asked: list[dict]) -> None:
    made = spec({"precision.kind": "bf16", "kernels.attention": "sdpa"})
    with pytest.raises(RecipeError, match=r"set kernels\.attention=reference, which keeps all scores") as error:
        build._refuse_attention(made, device=CUDA)
    model = made.model
    assert asked == [
        {
            "n_heads": model.n_heads,
            "n_kv_heads": model.n_kv_heads,
            "d_head": model.d_head,
            "tokens": made.data.seq_len,
            "dtype": torch.bfloat16,
            "device": CUDA,
        }
    ]
    for word in ("kernels.attention=sdpa", "train.deterministic=false", torch.__version__):
        assert word in str(error.value)


def test_nothing_is_asked_on_a_cpu_nor_of_the_reference(asked: list[dict]) -> None:
    build._refuse_attention(spec({"kernels.attention": "sdpa"}), device=torch.device("cpu"))
    build._refuse_attention(spec({"kernels.attention": "reference"}), device=CUDA)
    assert asked == []


def test_blocks_of_odd_heads_are_refused_too(asked: list[dict]) -> None:
    ring = {"launcher.ranks": 2, "parallelism.cp": 2, "precision.kind": "bf16", "kernels.attention": "sdpa"}
    build._refuse_attention(spec(ring | {"model.d_head": 16}), device=CUDA)
    with pytest.raises(RecipeError, match="takes heads of 6 in bf16"):
        build._refuse_attention(spec(ring | {"model.d_head": 6}), device=CUDA)
    assert asked == []


def test_what_hides_keys_goes_as_a_block(asked: list[dict]) -> None:
    """Documents, and windows that a sequence is longer than; in flex they go another way."""
    window = {"model.attention": {"kind": "gqa", "mask": {"kind": "window", "size": 2}}}
    for hidden in ({"data.document_mask": True}, window):
        given = {"kernels.attention": "sdpa", "precision.kind": "bf16"} | hidden
        build._refuse_attention(spec(given | {"model.d_head": 16}), device=CUDA)
        with pytest.raises(RecipeError, match="takes heads of 6 in bf16"):
            build._refuse_attention(spec(given | {"model.d_head": 6}), device=CUDA)
        assert asked == []
    longer = {"model.attention": {"kind": "gqa", "mask": {"kind": "window", "size": 10**6}}}
    with pytest.raises(RecipeError):
        build._refuse_attention(spec({"kernels.attention": "sdpa"} | longer), device=CUDA)
    assert len(asked) == 1


def test_sinks_go_around_blocks(asked: list[dict]) -> None:
    sinks = {"kernels.attention": "sdpa", "precision.kind": "bf16", "model.attention": {"kind": "gqa", "sinks": True}}
    build._refuse_attention(spec(sinks | {"model.d_head": 16}), device=CUDA)
    with pytest.raises(RecipeError, match="takes heads of 6 in bf16"):
        build._refuse_attention(spec(sinks | {"model.d_head": 6}), device=CUDA)
    assert asked == []


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """A GPU of sm90 on which torch takes what the test says."""
    says: dict[str, object] = {"taken": "cudnn"}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(sdpa, "served_by", lambda **sizes: says["taken"])
    return says


def test_another_kernel_than_the_plans_is_an_error(on_hopper: dict[str, object]) -> None:
    made = spec({"precision.kind": "bf16", "kernels.attention": "sdpa", "model.d_head": 64})
    build._refuse_attention(made, device=CUDA)
    on_hopper["taken"] = "efficient"
    with pytest.raises(
        RecipeError, match=r"takes memory-efficient attention for .* the plan's times are of cuDNN"
    ) as it:
        build._refuse_attention(made, device=CUDA)
    for word in ("kernels.attention=sdpa", "set kernels.attention=flash_attn"):
        assert word in str(it.value)
    # heads that cuDNN is not expected to take, and formats
    build._refuse_attention(
        spec({"precision.kind": "bf16", "kernels.attention": "sdpa", "model.d_head": 192}), device=CUDA
    )
    build._refuse_attention(
        spec({"precision.kind": "fp32", "kernels.attention": "sdpa", "model.d_head": 64}), device=CUDA
    )


def test_with_gradients_in_order_the_kernel_is_named(on_hopper: dict[str, object]) -> None:
    given = {"precision.kind": "bf16", "kernels.attention": "sdpa", "model.d_head": 64, "train.deterministic": True}
    on_hopper["taken"] = "flash"
    build._refuse_attention(spec(given), device=CUDA)
    on_hopper["taken"] = "efficient"
    with pytest.raises(
        RecipeError, match=r"the plan's times are of FlashAttention-2; set kernels\.attention=reference"
    ):
        build._refuse_attention(spec(given), device=CUDA)


@pytest.mark.parametrize("sinks", [False, True])
def test_of_what_flex_computes_in_order_torchs_sdpa_is_not_asked(asked: list[dict], sinks: bool) -> None:
    """In any order it goes through it."""
    given = {"precision.kind": "bf16", "kernels.attention": "sdpa", "model.d_head": 6}
    given["model.attention"] = {"kind": "gqa", "sinks": sinks}
    for deterministic in (False, True):
        base = spec(given | {"train.deterministic": deterministic})
        made = base.model_copy(update={"kernels": base.kernels.model_copy(update={"attention": "flex"})})
        if deterministic:
            build._refuse_attention(made, device=CUDA)
            continue
        with pytest.raises(RecipeError, match=r"kernels\.attention=flex"):
            build._refuse_attention(made, device=CUDA)
    # sinks go around a block, which is refused before
    assert len(asked) == (not sinks)


@pytest.mark.parametrize("name", ["cudnn", "flash_attn"])
def test_layers_that_hide_nothing_are_torchs_but_for_flash_attention(
    name: str, on_hopper: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "require", lambda module: None)
    on_hopper["taken"] = "efficient"
    base = spec({"precision.kind": "bf16", "kernels.attention": "sdpa", "model.d_head": 64})
    named = base.model_copy(update={"kernels": base.kernels.model_copy(update={"attention": name})})
    hidden = named.model_copy(update={"data": named.data.model_copy(update={"document_mask": True})})
    build._refuse_attention(hidden, device=CUDA)
    if name == "flash_attn":
        build._refuse_attention(named, device=CUDA)
    else:
        with pytest.raises(RecipeError, match="memory-efficient"):
            build._refuse_attention(named, device=CUDA)


def test_a_package_that_does_not_load_is_an_error_with_the_extra() -> None:
    base = spec({"precision.kind": "bf16", "kernels.attention": "sdpa", "model.d_head": 64})
    named = base.model_copy(update={"kernels": base.kernels.model_copy(update={"attention": "flash_attn_3"})})
    with pytest.raises(RecipeError, match=r"flash_attn_interface can't be imported .* or set kernels\.attention=sdpa"):
        build._refuse_attention(named, device=CUDA)
