"""Nothing that stands in a recipe, a file or on the command line steers the terminal or begins a line of its own."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaspec.checkpoint.folders import CHECKPOINTS
from megaspec.cli import main
from megaspec.commands import starting
from megaspec.core.errors import printable
from megaspec.data.prepare import prepare
from megaspec.data.tokenizer import ByteTokenizer
from megaspec.sweep.state import SweepFolder
from tests.sweep.conftest import stubbed as stubbed
from tests.sweep.conftest import sweep
from tests.test_cli import tiny

ROOT = Path(__file__).parents[1]
# A screen that is cleared, a window's title, text that runs backwards, C1's form of ESC [, a carriage return, a line.
HOSTILE = "a\x1b[2J\x1b]0;owned\x07\u202eb\x9b31m\rc\nFORGED [bold]d[/] :bomb:"
STEERS = "\x1b\x07\u202e\x9b\r"
IN_YAML = r"a\e[2J\e]0;owned\a\u202Eb\x9B31m\rc\nFORGED [bold]d[/] :bomb:"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """A working folder with a recipe whose every free text is hostile. Runs are made, and no rank is started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(starting, "launch", lambda *_, **__: 0)
    Path("recipes").mkdir()
    write("hostile")
    return tmp_path


def write(name: str, *lines: str) -> None:
    """A tiny recipe with hostile texts, and more lines."""
    body = [
        "defaults: [override /model: hello, override /data: synthetic, override /precision: fp32]",
        f'run_dir: "{IN_YAML}"',
        f'about: {{purpose: "{IN_YAML}", source: "{IN_YAML}"}}',
        "data: {seq_len: 8}",
        "train: {steps: 2, global_batch: 2}",
        "optim: {lr: 1e-3}",
        "launcher: {ranks: 1}",
        "log: {tensorboard: false, console: quiet}",
        *lines,
    ]
    Path("recipes", f"{name}.yaml").write_text("\n".join(body))


def clean(capsys: pytest.CaptureFixture[str], *, shows: bool = True) -> str:
    """What was printed, which is all of letters and lines of ours. `shows`: the hostile text is there, as escapes."""
    out, err = capsys.readouterr()
    text = out + err
    assert not set(STEERS) & set(text), repr(text)
    assert not any(line.strip().startswith("FORGED") for line in text.splitlines()), text
    assert all(c.isprintable() or c == "\n" for c in text), repr(text)
    if shows:
        assert r"\x1b[2J" in text, text
        assert r"\u202e" in text, text
        assert "[bold]d[" in text, text
        assert ":bomb:" in text, text
    return text


def test_escapes_keep_what_is_harmless() -> None:
    assert printable("größe 学 ok") == "größe 学 ok"
    assert printable(HOSTILE) == r"a\x1b[2J\x1b]0;owned\x07\u202eb\x9b31m\rc\nFORGED [bold]d[/] :bomb:"
    assert printable("a\n\tb\x1b", keep="\n\t") == "a\n\tb\\x1b"


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "recipe=hostile"),
        ("plan", "recipe=hostile", "hardware=h100", "gpus=1", "--ranks", "0"),
        ("explain", "about.purpose", "recipe=hostile"),
        ("explain", "run_dir", "recipe=hostile"),
        ("train", "recipe=hostile"),
        ("recipes",),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_a_recipe(capsys, words) -> None:
    assert main(list(words)) == 0
    clean(capsys)


@pytest.mark.parametrize("command", ["check", "tune"])
def test_a_recipe_whose_texts_a_command_does_not_show(capsys, command) -> None:
    write("quiet", "model: {n_layers: 1}")
    words = ["tune", "recipe=quiet", "hardware=h100", "gpus=1", "--top", "2"]
    assert main(["check", "hostile", "quiet"] if command == "check" else words) == 0
    clean(capsys, shows=False)


def test_json_stays_json(capsys) -> None:
    assert main(["plan", "recipe=hostile", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["about"]["purpose"] == HOSTILE
    assert main(["recipes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hostile"]["source"] == HOSTILE


@pytest.mark.parametrize("command", ["plan", "train", "check", "tune", "verify", "explain", "data"])
def test_what_is_wrong_with_a_hostile_text(capsys, command) -> None:
    """A name, a prefix of data that is not there, a word that is no number."""
    Path("recipes", "wrong.yaml").write_text(
        f'defaults: [hello]\nname: "{IN_YAML}"\n'
        f'data: {{blend: [{{prefix: "{IN_YAML}"}}]}}\n'
        f'train: {{steps: "{IN_YAML}"}}\n'
    )
    words = {
        "check": ["check", "wrong"],
        "explain": ["explain", "name", "recipe=wrong"],
        "data": ["data", "inspect", HOSTILE],
    }
    assert main(words.get(command, [command, "recipe=wrong"])) in (64, 65)
    clean(capsys)


def test_data_that_is_not_there(capsys) -> None:
    Path("recipes", "absent.yaml").write_text(f'defaults: [hello]\ndata: {{blend: [{{prefix: "{IN_YAML}"}}]}}\n')
    assert main(["plan", "recipe=absent", "hardware=cpu"]) == 0
    assert "not ready to train" in clean(capsys)
    assert main(["train", "recipe=absent"]) == 65
    clean(capsys)


def test_words_of_the_command_line(capsys) -> None:
    for words in (
        [HOSTILE],
        ["plan", f"recipe={HOSTILE}"],
        ["plan", "recipe=hello", f"optim.lr={HOSTILE}"],
        ["plan", "recipe=hello", f"--{HOSTILE}"],
        ["explain", HOSTILE],
        ["resume", HOSTILE],
        ["checkpoint", "list", HOSTILE],
        ["sweep", "show", HOSTILE],
        ["plan", "recipe=hello", f"optim={HOSTILE}"],
    ):
        assert main(words) in (64, 65, 66), words
        clean(capsys, shows=False)


def test_a_run_and_its_checkpoints(capsys) -> None:
    run = f"runs/{HOSTILE}"
    assert main(["train", *tiny(f"run_dir='{run}'")]) == 0
    clean(capsys)
    bad = Path(run, CHECKPOINTS, "step-00000001")
    bad.mkdir(parents=True)
    (bad / "manifest.json").write_text('{"a": "' + IN_YAML.replace("\\e", "\\u001b").replace("\\a", "") + '"')
    for words in (
        ["checkpoint", "list", run],
        ["checkpoint", "verify", run],
        ["resume", run],
        ["diff", run, "hostile"],
    ):
        assert main(words) in (0, 64, 66), words
        clean(capsys)


def test_the_description_of_token_files(capsys, tmp_path) -> None:
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"text": HOSTILE}) + "\n")
    prepare([str(tmp_path / "corpus.jsonl")], tmp_path / "plain", ByteTokenizer())
    manifest = json.loads((tmp_path / "plain.manifest.json").read_text())
    manifest["sources"][0]["name"] = HOSTILE
    (tmp_path / "plain.manifest.json").write_text(json.dumps(manifest))
    main(["data", "inspect", str(tmp_path / "plain")])
    clean(capsys, shows=False)
    prefix = tmp_path / HOSTILE.replace("/", "")
    assert main(["data", "prepare", str(tmp_path / "corpus.jsonl"), "--out", str(prefix)]) == 0
    clean(capsys)
    assert main(["data", "inspect", str(prefix)]) == 0
    clean(capsys)


def test_a_sweep(capsys, stubbed) -> None:
    assert sweep("model.dropout=0.0,0.1") == 0
    clean(capsys, shows=False)
    points = SweepFolder(Path("sweeps/s")).path / "points.jsonl"
    lines = [json.loads(line) for line in points.read_text().splitlines()]
    lines[-1] |= {"state": "failed", "code": 70, "reason": HOSTILE}
    points.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["sweep", "show", "sweeps/s"]) == 0
    clean(capsys)


def prints() -> Iterator[tuple[str, ast.expr]]:
    """(file:line, what is printed) of every call of print."""
    for folder in ("megaspec", "launchers", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                is_print = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
                if is_print and node.args:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node.args[0]


# Words of ours, a file that somebody asked for on stdout, and errors, whose problems are printable as they are made.
UNESCAPED = {
    "megaspec/__main__.py",
    "megaspec/commands/completion.py",
    # the text of a job, which a shell or a cluster reads as it is
    "megaspec/commands/submitting.py",
    "megaspec/commands/bench_throughput.py",
    "megaspec/commands/schema.py",
    "megaspec/commands/from_megatron.py",
    "megaspec/commands/verify.py",
    "megaspec/commands/plan.py",
    "megaspec/commands/tune.py",
    "megaspec/cli.py",
    "launchers/megaspec_launchers/rank_server.py",
}


def test_whatever_is_printed_is_made_printable() -> None:
    seen = 0
    for where, what in prints():
        seen += 1
        if isinstance(what, ast.Constant) or where.partition(":")[0] in UNESCAPED:
            continue
        called = ast.unparse(what.func) if isinstance(what, ast.Call) else ""
        assert called in ("printable", "json.dumps"), f"{where}: print(printable(...))"
    assert seen > 20


def test_there_is_one_console_and_one_escape() -> None:
    for folder in ("megaspec", "launchers"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            if path != ROOT / "megaspec/core/terminal.py":
                assert "rich.markup" not in text, f"{path}: escape of megaspec.core.terminal"
                assert " Console(" not in text, f"{path}: terminal() of megaspec.core.terminal"
