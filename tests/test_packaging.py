"""Wheel and editable install both work from another folder."""

import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

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


def test_every_dependency_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(
        line.partition(";")[0].strip().lower().replace("_", "-").split("==")
        for line in (ROOT / "requirements.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(d for e in ("dev", "tensorboard", "parquet", "sweep") for d in extras[e])]
    for one in wanted:
        name = one.partition(";")[0].split("=")[0].split(">")[0].split("<")[0].split("[")[0].strip().lower()
        assert name in pins, name
