"""Bugs planted in the documents that a package is told of: each is felt, whichever package attends to them.

Packages that compute on a CPU stand in the place of those that need a GPU. sdpa's bugs: test_attention_documents.py;
those of the mask that flex makes of documents: test_attention_flex.py.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megaspec_kernels.attention import cudnn, flash_attn, te
from megaspec_kernels.attention.documents import Documents
from tests.kernels import cudnn_frontend
from tests.kernels.flash_attn_packages import PACKAGES
from tests.kernels.te import fake_transformer_engine
from tests.kernels.test_attention_documents import PACKED, Packed, hold
from tests.kernels.test_attention_documents import _one_token_late as one_token_late
from tests.kernels.test_attention_documents import _without_the_second as without_the_second

CPU = torch.device("cpu")
MODULES = {
    "cudnn": cudnn,
    "flash_attn": flash_attn,
    "flash_attn_2": flash_attn,
    "flash_attn_3": flash_attn,
    "te": te,
}
ROWS = Packed(((20, 5, 30), (25, 5, 25)))


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all implementations, on a CPU."""
    cudnn_frontend.put_in_place(monkeypatch)
    fake_transformer_engine(monkeypatch)
    monkeypatch.setattr(flash_attn, "require", PACKAGES.__getitem__)
    monkeypatch.setattr(flash_attn, "_takes", lambda q, mask: True)


@pytest.mark.parametrize("packed", PACKED, ids=str)
def test_transformer_engine_attends_to_a_document_as_if_it_were_alone(packed: Packed, packages: None) -> None:
    """Empty documents, those of one token, and one that is the row."""
    hold("te", packed, torch.bfloat16, CPU)


@pytest.mark.parametrize("change", [one_token_late, without_the_second])
@pytest.mark.parametrize("name", MODULES)
def test_planted_bugs_are_caught(
    name: str, change: Callable[[Tensor], Tensor], packages: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A boundary off by one, and a document that leaks into the next."""
    hold(name, ROWS, torch.bfloat16, CPU)
    module = MODULES[name]
    original = module.attention_as_one_block

    def planted(*tensors: Tensor, documents: Documents, **rest: object) -> Tensor:
        return original(*tensors, documents=replace(documents, starts=change(documents.starts)), **rest)

    monkeypatch.setattr(module, "attention_as_one_block", planted)
    with pytest.raises(AssertionError, match="from the truth"):
        hold(name, ROWS, torch.bfloat16, CPU)
