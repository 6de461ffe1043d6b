"""Operations: what torch.library.custom_op refuses is refused, and the compiler takes them whole."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from megaspec_kernels import operation as operation_file
from megaspec_kernels.operation import fake_of, operation


@operation("megaspec_tests::doubled")
def doubled(x: Tensor, times: int) -> Tensor:
    """Nothing that the compiler could trace: it branches by what is in memory."""
    if x.tolist()[0] < 0:
        return torch.zeros_like(x)
    return x * 2**times


@fake_of(doubled)
def _(x: Tensor, times: int) -> Tensor:
    return torch.empty_like(x)


@operation("megaspec_tests::put", mutates_args=("into",))
def put(into: Tensor, x: Tensor) -> None:
    into.copy_(x)


@fake_of(put)
def _(into: Tensor, x: Tensor) -> None:
    pass


@operation("megaspec_tests::itself")
def itself(x: Tensor) -> Tensor:
    return x.view(-1)


def test_the_compiler_takes_it_whole():
    def function(x: Tensor, into: Tensor) -> Tensor:
        put(into, x + 1)
        return doubled(into, times=1) + doubled(x, 2)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x = torch.arange(1.0, 4.0)
    into = torch.full((3,), float("nan"))
    assert torch.equal(compiled(x, into), (x + 1) * 2 + x * 4)
    assert torch.equal(into, x + 1)
    assert not compiled(-x, into)[0] > 0
    tags = torch._C.Tag
    assert tags.pt2_compliant_tag in doubled.tags


@pytest.mark.parametrize("one", [doubled, put])
def test_it_is_what_it_says(one):
    x = torch.arange(1.0, 4.0)
    args = (x, 1) if one is doubled else (torch.zeros(3), x)
    torch.library.opcheck(one, args, test_utils=("test_schema", "test_faketensor"))


def test_its_result_is_no_part_of_an_argument():
    with pytest.raises(RuntimeError, match=r"megaspec_tests::itself .*alias any inputs"):
        itself(torch.zeros(3))


def test_it_has_no_gradient():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"megaspec_tests::doubled has no gradient: call it in an autograd.Function"):
        doubled(x, 1)
    with torch.no_grad():
        assert torch.equal(doubled(x, 1), torch.full((3,), 2.0))


def test_it_is_made_anew_where_its_module_is_read_again():
    @operation("megaspec_tests::read_again")
    def first(x: Tensor) -> Tensor:
        return x + 1

    @operation("megaspec_tests::read_again")
    def second(x: Tensor) -> Tensor:
        return x + 2

    fake_of(second)(torch.empty_like)
    assert second(torch.zeros(1)).item() == 2


TURNED = """
import torch
from megaspec_kernels.operation import fake_of, operation

@operation("megaspec_tests::turned")
def turned(x: torch.Tensor) -> torch.Tensor:
    return {made}

@fake_of(turned)
def _(x: torch.Tensor) -> torch.Tensor:
    return {made}

x = torch.arange(6.0).view(2, 3)
print(torch.compile(lambda x: turned(x) + 1)(x).tolist())
"""


@pytest.mark.slow
def test_code_that_was_compiled_for_another_fake_is_not_taken(tmp_path):
    """It expects other strides, and would end with that."""
    for made in ("x.t().contiguous()", "x.t().clone(memory_format=torch.preserve_format)"):
        script = tmp_path / "script.py"
        script.write_text(TURNED.format(made=made))
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
        done = subprocess.run(
            [sys.executable, "-P", str(script)], env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == "[[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]\n"


def test_what_files_with_fakes_say_is_part_of_the_key_of_what_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(operation_file, "_source_of_file", {})
    monkeypatch.setattr(operation_file, "_tag_of_others", "others ")
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    first.write_text("one")
    second.write_text("two")

    def tag(*files) -> str:
        operation_file._source_of_file.clear()
        for file in files:
            operation_file._add_to_cache_key(str(file))
        return torch.compiler.config.cache_key_tag

    with torch.compiler.config.patch(cache_key_tag=""):
        both = tag(first, second)
        assert both.startswith("others megaspec ")
        assert tag(second, first) == both
        assert tag(first) != both
        second.write_text("three")
        assert tag(first, second) != both
