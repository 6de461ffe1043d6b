"""The image: what is written in its Dockerfile, since nothing here builds one on NVIDIA's."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "launchers/docker/Dockerfile").read_text()


def instructions() -> list[tuple[str, str]]:
    """(instruction, its words) in order, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", TEXT, flags=re.MULTILINE)
    text = text.replace("\\\n", " ")
    found = []
    for line in text.splitlines():
        if line.strip():
            name, _, words = line.strip().partition(" ")
            found.append((name, words.strip()))
    return found


def of(name: str) -> list[str]:
    return [words for one, words in instructions() if one == name]


def test_the_base_is_nvidias_and_pinned():
    (base,) = of("ARG")
    # a month; `latest` does not exist there and would move
    assert re.fullmatch(r"BASE=nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3", base)
    assert of("FROM") == ["${BASE} AS wheel", "${BASE}"]
    # before anything else: an ARG behind FROM is unknown to it
    assert [name for name, _ in instructions()[:2]] == ["ARG", "FROM"]


def test_nobody_is_root():
    """A number, which runAsNonRoot can check."""
    (user,) = of("USER")
    uid, _, gid = user.partition(":")
    assert int(uid) > 0
    assert int(gid) > 0
    order = [name for name, _ in instructions()]
    assert order.index("USER") > max(place for place, name in enumerate(order) if name == "RUN")
    assert f"launcher.user={uid}" in (ROOT / "launchers/docker/README.md").read_text()


def test_torch_stays_nvidias():
    (install,) = [words for words in of("RUN") if "--constraint" in words]
    order = ["pip list --format=freeze", "pip install", "now.txt", "exit 1"]
    places = [install.index(words) for words in order]
    assert places == sorted(places)
    assert "--constraint /wheels/there.txt /wheels/megaspec-*.whl" in install
    # what is built without an index, and what pip would bring itself
    assert "--no-deps" in next(words for words in of("RUN") if "pip wheel" in words)
    assert "--upgrade" not in install
    assert "torch==" not in install


def test_a_package_that_changed_ends_the_build(tmp_path):
    """The shell of the build, with lists in place of an image."""
    (install,) = [words for words in of("RUN") if "--constraint" in words]
    check = install[install.index("grep -E -i") : install.index("&& python3 -P -m megaspec.cli --version")]
    check = check.replace("/wheels/", f"{shlex.quote(str(tmp_path))}/")
    (tmp_path / "there.txt").write_text("numpy==2.0\ntorch==2.12.0a0+nv26.04\ntriton==3.6.0\nnvidia-nccl-cu13==2.28\n")
    for now, code in (
        ("torch==2.12.0a0+nv26.04\ntriton==3.6.0\nnvidia-nccl-cu13==2.28\nnumpy==2.1\n", 0),
        ("torch==2.13.0\ntriton==3.6.0\nnvidia-nccl-cu13==2.28\n", 1),
        ("torch==2.12.0a0+nv26.04\ntriton==3.7.1\nnvidia-nccl-cu13==2.28\n", 1),
        ("torch==2.12.0a0+nv26.04x\ntriton==3.6.0\nnvidia-nccl-cu13==2.28\n", 1),
    ):
        (tmp_path / "now.txt").write_text(now)
        done = subprocess.run(["bash", "-o", "pipefail", "-c", check], capture_output=True, text=True)
        assert done.returncode == code, now


@pytest.mark.parametrize("words", [words for name, words in instructions() if name == "RUN"])
def test_the_shell_takes_what_it_runs(words):
    subprocess.run(["bash", "-n", "-c", words], check=True)


def test_what_it_copies_is_there():
    assert of("COPY") == [". .", "--from=wheel /wheels /wheels"]
    ignored = (ROOT / "launchers/docker/Dockerfile.dockerignore").read_text().split()
    assert {".git", ".venv", "runs", "data", "sweeps"} <= set(ignored)
    # what the wheel is made of
    assert not {"megaspec", "kernels", "launchers", "conf", "recipes", "pyproject.toml", "README.md"} & set(ignored)
