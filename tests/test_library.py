"""The public names: what a loop of one's own needs is among them, and they load nothing before they are used."""

import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import megaspec
from megaspec.core.frozen import Frozen

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "megaspec/README.md").read_text()
NAMED = sorted(
    set(re.findall(r"\bmegaspec\.([A-Za-z_]\w*)", GUIDE.partition("## Plug-ins")[0])) & set(megaspec.__all__)
)


def test_every_public_name_is_there() -> None:
    for name in megaspec.__all__:
        assert getattr(megaspec, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = megaspec.nothing


def classes_in(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and not get_args(hint):
        yield hint
    for argument in get_args(hint):
        yield from classes_in(argument)


def parameters_of(called: Callable[..., Any]) -> dict[str, Any]:
    of = called.__init__ if isinstance(called, type) else called
    hints = get_type_hints(of)
    hints.pop("return", None)
    return hints


def given_by_hand(one: type) -> bool:
    """No section of a Spec, and no protocol: what is to be made of the class itself."""
    return (
        one.__module__.startswith("megaspec")
        and not issubclass(one, Frozen)
        and not getattr(one, "_is_protocol", False)
    )


@pytest.mark.parametrize("name", NAMED)
def test_what_the_guide_calls_takes_public_things_alone(name: str) -> None:
    called = getattr(megaspec, name)
    if not callable(called):
        return
    public = {getattr(megaspec, one) for one in megaspec.__all__ if inspect.isclass(getattr(megaspec, one))}
    for parameter, hint in parameters_of(called).items():
        for one in classes_in(hint):
            # folders serve as well
            if given_by_hand(one) and one.__name__ != "SearchPath":
                assert one in public, f"megaspec.{name}({parameter}=...) takes a {one.__module__}.{one.__name__}"


def test_the_guide_names_what_a_loop_is_made_of() -> None:
    assert {"Batch", "build", "train_step", "weights", "set_weights", "gradients", "plain_model", "spec_from"} <= set(
        NAMED
    )


def test_settings_are_made_without_torch() -> None:
    program = (
        "import sys, megaspec;"
        "megaspec.spec_from({'data': {'kind': 'synthetic', 'seq_len': 8}, 'train': {'sample': None}},"
        " start='hello', target=megaspec.Target(cores=1)); assert 'torch' not in sys.modules"
    )
    sources = {"PYTHONPATH": ":".join(str(ROOT / source) for source in ("", "kernels", "launchers"))}
    subprocess.run([sys.executable, "-P", "-c", program], check=True, env=sources)
