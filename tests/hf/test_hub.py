"""A model by its name on the hub: a server that speaks the hub's language stands in for it."""

import hashlib
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.hf.folders import save_model, save_tokenizer
from tests.warm import warm_command

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "org/small"
# what a model's repository holds beside what a command reads
OTHERS = {"modeling_small.py": b"raise SystemExit(3)", "pytorch_model.bin": b"\x80\x04.", "README.md": b"# small"}


class Hub:
    """Serves one folder as org/small, and remembers which files were asked for."""

    def __init__(self, folder: Path):
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()} | OTHERS
        self.fetched: set[str] = set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.answer(with_body=False)

            def do_GET(self) -> None:
                self.answer(with_body=True)

            def log_message(self, *_: object) -> None:
                pass

            def answer(self, *, with_body: bool) -> None:
                revisions = {f"/api/models/{NAME}/revision/{name}" for name in ("main", "v1", COMMIT)}
                file = self.path.removeprefix(f"/{NAME}/resolve/{COMMIT}/")
                if self.path.partition("?")[0] in revisions:
                    siblings = [{"rfilename": name} for name in hub.files]
                    self.send(json.dumps({"id": NAME, "sha": COMMIT, "siblings": siblings}).encode(), with_body)
                elif self.path.startswith(f"/api/models/{NAME}/tree/{COMMIT}?"):
                    tree = []
                    for name, content in hub.files.items():
                        tree.append({"type": "file", "path": name, "size": len(content), "oid": name})
                    self.send(json.dumps(tree).encode(), with_body)
                elif file in hub.files:
                    if with_body:
                        hub.fetched.add(file)
                    self.send(hub.files[file], with_body)
                else:
                    self.send_response(404)
                    self.send_header("X-Error-Code", "RepoNotFound")
                    self.send_header("Content-Length", "0")
                    self.end_headers()

            def send(self, body: bytes, with_body: bool) -> None:
                self.send_response(200)
                self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if with_body:
                    self.wfile.write(body)

        return Handler


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = save_model("llama 3.1", tmp_path_factory.mktemp("hub") / "small")
    save_tokenizer(folder)
    served = Hub(folder)
    yield served
    served.close()


def megaspec(hub: Hub, tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command that reaches this hub alone, with a cache of its own."""
    environment = os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
    return warm_command(words, cwd=tmp_path, env=environment)


def test_a_model_is_imported_by_its_name(hub: Hub, tmp_path: Path) -> None:
    hub.fetched.clear()
    done = megaspec(hub, tmp_path, "hf", "import", NAME, "--out", "runs/start", "--revision", "v1")
    assert done.returncode == 0, done.stderr
    assert "runs/start: a llama of" in done.stdout
    assert hub.fetched == hub.files.keys() - OTHERS.keys()
    recipe = json.loads((tmp_path / "runs" / "start" / "recipe.json").read_text())
    assert recipe["about"]["source"] == f"{NAME} at {COMMIT}"
    done = megaspec(hub, tmp_path, "hf", "export", "runs/start", "out")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == hub.files["tokenizer.json"]
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 0


def test_a_recipe_needs_the_configuration_alone(hub: Hub, tmp_path: Path) -> None:
    hub.fetched.clear()
    done = megaspec(hub, tmp_path, "hf", "recipe", NAME, "--out", "recipes/mine.yaml")
    assert done.returncode == 0, done.stderr
    assert hub.fetched == {"config.json"}
    assert f"{NAME} at {COMMIT}" in (tmp_path / "recipes" / "mine.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (["org/none", "--out", "x"], 66, "org/none: no such folder, and the hub gave none ("),
        (["./none", "--out", "x"], 66, "none is no folder; name one with"),
        (["cache", "--out", "x", "--revision", "v1"], 66, "--revision v1 chooses among what the hub has"),
        ([NAME, "--out", "taken"], 73, "taken exists; name one that does not"),
    ],
)
def test_what_is_wrong_with_a_name_is_told(words, code, problem, hub: Hub, tmp_path: Path) -> None:
    hub.fetched.clear()
    (tmp_path / "taken").mkdir()
    (tmp_path / "cache").mkdir()
    done = megaspec(hub, tmp_path, "hf", "import", *words)
    assert done.returncode == code, done.stderr
    assert problem in done.stderr
    assert not (tmp_path / "x").exists()
    assert not hub.fetched
