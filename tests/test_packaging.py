"""Wheel and editable install both work from another folder."""

import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK")} | {"CUDA_VISIBLE_DEVICES": ""}
QUIET = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")


def run(*command, cwd):
    return subprocess.run(
        [str(c) for c in command], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=True
    ).stdout


def new_venv(folder):
    """An environment that sees the dependencies of this one, but no megaspec."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def checkout(folder):
    """The files of a commit, without what is only on this machine."""
    names = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


def assert_works(python, tmp_path, expected):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert Path(run(python, "-c", "import megaspec; print(megaspec.__file__)", cwd=elsewhere).strip()) == expected
    out = run(python.parent / "megaspec", "plan", "recipe=hello", cwd=elsewhere)
    assert "world" in out
    assert "Memory of the fullest rank" in out
    modules = "megaspec_kernels.catalog, megaspec_launchers.local, megaspec.runtime.build, "
    modules += "hydra_plugins.megaspec_launcher.launcher"
    run(python, "-P", "-c", f"import {modules}", cwd=elsewhere)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = checkout(folder / "source")
    run(sys.executable, "-m", "pip", "wheel", *QUIET, "--wheel-dir", folder, source, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_what_runs_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {n.partition("/")[0] for n in names if ".dist-info" not in n}
    assert tops == {"megaspec", "megaspec_kernels", "megaspec_launchers", "hydra_plugins"}
    assert "hydra_plugins/__init__.py" not in names  # Hydra looks for plugins in a namespace package
    assert {"hydra_plugins/megaspec_launcher/launcher.py", "megaspec/sweep/page.html"} <= set(names)
    assert {"megaspec/report/look.css", "megaspec/report/page.css"} <= set(names)
    for room in ("conf", "recipes"):
        # what is composed, and the READMEs that explain it
        shipped = {str(p.relative_to(ROOT)) for ending in ("yaml", "md") for p in (ROOT / room).rglob(f"*.{ending}")}
        assert shipped == {n.removeprefix("megaspec/_data/") for n in names if n.startswith(f"megaspec/_data/{room}/")}
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "megaspec").rglob("*.*") if p.suffix != ".pyc"}
    assert any(name.endswith(".html") for name in sources)
    assert any(name.endswith(".json") for name in sources)
    assert sources <= set(names)


def test_wheel_works_from_another_folder(wheel, tmp_path):
    python = new_venv(tmp_path / "venv")
    run(sys.executable, "-m", "pip", "--python", python, "install", *QUIET, wheel, cwd=tmp_path)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    assert_works(python, tmp_path, site / "megaspec" / "__init__.py")


def test_editable_install_works_from_another_folder(tmp_path):
    source = checkout(tmp_path / "source")
    python = new_venv(tmp_path / "venv")
    run(sys.executable, "-m", "pip", "--python", python, "install", *QUIET, "--editable", source, cwd=tmp_path)
    assert_works(python, tmp_path, source / "megaspec" / "__init__.py")
    # Hydra's plugin too comes from the source tree: an installed copy would hide what is changed here
    plugin = source / "launchers" / "hydra_plugins" / "megaspec_launcher" / "launcher.py"
    program = "from hydra_plugins.megaspec_launcher import launcher; print(launcher.__file__)"
    found = run(python, "-P", "-c", program, cwd=tmp_path).strip()
    assert Path(found) == plugin
    plugin.write_text(plugin.read_text() + "\nCHANGED = 1\n")
    run(python, "-P", "-c", "from hydra_plugins.megaspec_launcher.launcher import CHANGED", cwd=tmp_path)


TRAINING, DEVELOPMENT = ROOT / "requirements.txt", ROOT / "requirements-dev.txt"
WITHOUT_HASHES = {TRAINING: ROOT / "requirements-torch.txt", DEVELOPMENT: ROOT / "requirements-triton.txt"}
"""What depends on the index that pip reads, beside the file that everything else of its kind stands in."""
TRAINING_EXTRAS = ("gpu", "hf", "tensorboard")
DEVELOPMENT_EXTRAS = ("dev", "parquet", "s3", "sentencepiece", "sweep", "wandb")
SERVICE_EXTRAS = ("mlflow", "trackio")
"""Extras of services that are too heavy for every test run, or need other versions than ours: pinned by nobody."""
GPU_EXTRAS = ("te", "fa", "cudnn", "dali")
"""Extras that install on machines with CUDA only; nothing pins them."""


def pins_in(file: Path) -> dict[str, Requirement]:
    """The pinned requirements of a file, by canonical name; each must be exact and stand there once."""
    pins: dict[str, Requirement] = {}
    for line in (file.read_text() + WITHOUT_HASHES[file].read_text()).splitlines():
        if line.startswith(("#", "-r ")) or line.strip().startswith("--hash="):
            continue
        pin = Requirement(line.rstrip("\\ "))
        name = canonicalize_name(pin.name)
        assert [one.operator for one in pin.specifier] == ["=="], line
        assert name not in pins, line
        pins[name] = pin
    return pins


def required_by(extras: tuple[str, ...]) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines: list[str] = []
    for extra in extras:
        lines += project["project"]["optional-dependencies"][extra]
    if extras == TRAINING_EXTRAS:
        lines += project["project"]["dependencies"] + project["build-system"]["requires"]
    return [Requirement(line) for line in lines]


def installed_closure(roots: list[Requirement]) -> set[str]:
    """Names of the roots and of whatever these need here, as the metadata of installed packages says."""
    found: set[str] = set()
    waiting = [(root.name, frozenset(root.extras)) for root in roots]
    seen = set(waiting)
    while waiting:
        name, extras = waiting.pop()
        found.add(canonicalize_name(name))
        for line in importlib.metadata.requires(name) or []:
            needed = Requirement(line)
            environments = [{"extra": extra} for extra in ("", *extras)]
            if needed.marker is not None and not any(needed.marker.evaluate(one) for one in environments):
                continue
            if name == "torch" and needed.name.startswith(("nvidia-", "cuda-", "triton")):
                continue  # a wheel with CUDA names their exact versions itself
            step = (needed.name, frozenset(needed.extras))
            if step not in seen:
                seen.add(step)
                waiting.append(step)
    return found


@pytest.mark.parametrize(
    ("file", "extras"),
    [(TRAINING, TRAINING_EXTRAS), (DEVELOPMENT, DEVELOPMENT_EXTRAS)],
    ids=["training", "development"],
)
def test_every_dependency_is_pinned_inside_its_range(file: Path, extras: tuple[str, ...]):
    pins = pins_in(TRAINING) | pins_in(file)
    for needed in required_by(extras):
        (pinned,) = pins[canonicalize_name(needed.name)].specifier
        assert needed.specifier.contains(pinned.version, prereleases=True), f"{needed} and {pinned}"


def test_every_extra_is_pinned_in_one_of_the_files():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["optional-dependencies"]) == {
        *TRAINING_EXTRAS,
        *DEVELOPMENT_EXTRAS,
        *SERVICE_EXTRAS,
        *GPU_EXTRAS,
    }


def test_training_installs_what_it_needs_and_nothing_else():
    assert set(pins_in(TRAINING)) == installed_closure(required_by(TRAINING_EXTRAS))


def test_development_pins_only_what_training_has_not():
    training, development = set(pins_in(TRAINING)), set(pins_in(DEVELOPMENT))
    assert not training & development
    assert training | development == installed_closure(required_by(TRAINING_EXTRAS) + required_by(DEVELOPMENT_EXTRAS))


@pytest.mark.parametrize("file", [TRAINING, DEVELOPMENT], ids=["training", "development"])
def test_every_pin_has_the_hashes_of_its_files(file: Path):
    """pip installs nothing of a file in which one pin has none, and `make` says that it has to look."""
    entries = re.split(
        r"^(?=[A-Za-z])", re.sub(r"^(#|-r ).*\n", "", file.read_text(), flags=re.MULTILINE), flags=re.MULTILINE
    )
    entries = [entry for entry in entries if entry.strip()]
    assert len(entries) > 40
    for entry in entries:
        assert re.fullmatch(r"[\w.-]+==\S+( ; [^\\]+)?( \\\n    --hash=sha256:[0-9a-f]{64})+\n", entry), entry
    apart = set()
    for line in WITHOUT_HASHES[file].read_text().splitlines():
        if not line.startswith("#"):
            apart.add(Requirement(line).name)
    assert apart == {"torch" if file == TRAINING else "triton"}


@pytest.mark.parametrize("name", ["transformers", "sentencepiece", "pytest", "ruff", "pyarrow"])
def test_who_trains_does_not_install_it(name: str):
    assert name in pins_in(DEVELOPMENT)
    assert name not in pins_in(TRAINING)


def commands_of(target: str) -> str:
    """What make would do for a target in a folder where nothing is installed yet."""
    command = ["make", "--dry-run", "--always-make", "--directory", ROOT, target, "PYTHON=python3"]
    return run(*command, cwd=ROOT)


@pytest.mark.parametrize(("target", "is_development"), [("train", False), ("test", True), ("lint", True)])
def test_make_installs_what_a_target_needs(target: str, is_development: bool):
    commands = commands_of(target)
    assert commands.count("--require-hashes --requirement requirements.txt") == 1
    # behind what has hashes, so that nothing of its needs is taken without one
    assert commands.index("requirements.txt") < commands.index("--requirement requirements-torch.txt")
    assert ("requirements-dev.txt" in commands) == is_development
