"""What READMEs show runs, what they point to exists, and every measured figure has its raw line.

A command in a ```bash block is run, in a folder of its own, unless its comment says `needs a GPU` (or 4 GPUs, or a
cluster), `takes half a minute` or `takes minutes`: then it is parsed by what would read it. A ```console block is run,
and prints what it shows.
"""

import json
import os
import re
import shlex
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

from megaspec.cli import main, parse
from megaspec.commands.planned import plan_words
from megaspec.compose.compose import compose
from megaspec.core.errors import RecipeError
from megaspec.plugins import take_flags
from megaspec.recipe import SECTIONS
from megaspec.sweep.words import read_words
from tests.benchmarks import tables
from tests.hf.folders import small_folder
from tests.short_corpus import shorten
from tests.test_sources import tracked
from tests.warm import warm_command, warm_script

ROOT = Path(__file__).parents[1]
TOPS = ("conf", "recipes", "megaspec", "kernels", "launchers", "tests")
READMES = [ROOT / "README.md", *sorted(path for top in TOPS for path in (ROOT / top).rglob("README.md"))]
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
# Its commands build on each other and need a shell: tests/test_first_hour.py runs them.
FIRST_HOUR = ROOT / "recipes/FIRST_HOUR.md"
PAGES = [*READMES, CONTRIBUTING, FIRST_HOUR]
MOST_LINES = 200
# Hydra's namespace package: a file of ours in it would lie where other packages install theirs.
NAMESPACES = ("launchers/hydra_plugins",)
MARK = re.compile(r"#.*\b(needs (?:a|\d+) GPUs?|needs a cluster|takes (?:half a minute|minutes))\b")
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join(str(ROOT / source) for source in ("", "kernels", "launchers")),
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
# Not run as a part of a page, and what holds it.
HELD_ELSEWHERE = {"make", "pytest", "python", "srun", "torchrun"}


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


@dataclass(frozen=True)
class Command:
    """A line of a block, and what it prints where that is shown."""

    line: str
    shown: tuple[str, ...] | None = None

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line, comments=True)

    @property
    def is_parsed_only(self) -> bool:
        return MARK.search(self.line) is not None


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    fenced = re.findall(r"^```([\w-]*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [body for found, body in fenced if found == language]


def commands(page: Path) -> Iterator[Command]:
    """Every command that a page shows, in order."""
    fenced = re.findall(r"^```(bash|console)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    for language, body in fenced:
        if language == "bash":
            yield from (Command(line) for line in body.splitlines() if line.strip())
            continue
        for example in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
            line, *shown = example.splitlines()
            yield Command(line, tuple(shown))


def without_code(page: Path) -> str:
    """The text of a page outside of fenced and indented blocks."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^    .*$", "", text, flags=re.MULTILINE)


def sections(page: Path) -> dict[str, str]:
    """Anchor, as GitHub makes it of a heading, -> the text below it."""
    found: dict[str, str] = {}
    for part in re.split(r"^#+ ", without_code(page), flags=re.MULTILINE)[1:]:
        title, _, text = part.partition("\n")
        anchor = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
        assert anchor not in found, f"{label(page)} has two headings #{anchor}"
        found[anchor] = text
    return found


def links(page: Path) -> list[tuple[Path, str]]:
    """The files of relative links, and their anchors."""
    targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", without_code(page)))
    found = []
    for target in targets:
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        found.append(((page.parent / path).resolve() if path else page, anchor))
    return found


def folders() -> list[str]:
    """The folders of the top two levels that git knows, but for hidden ones."""
    found = set()
    for top in TOPS:
        for path in tracked(ROOT, top):
            above = path.relative_to(ROOT).parent.parts
            found |= {"/".join(above[:depth]) for depth in (1, 2) if len(above) >= depth}
    return sorted(found)


# ---- commands


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The token files that every page's commands find in data/."""
    folder = tmp_path_factory.mktemp("corpus")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        shorten(patch)
        assert main(["data", "prepare", "python", "--out", "data/hello", "--tokenizer", "byte"]) == 0
    return folder / "data"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Hugging Face's that every page's commands find in models/small."""
    folder = tmp_path_factory.mktemp("models")
    small_folder(folder / "small")
    return folder


@pytest.fixture
def workplace(corpus: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run a page's commands in: token files, a text, prompts, a checkpoint of Megatron's, and the
    examples of plug-ins."""
    (tmp_path / "data").symlink_to(corpus)
    (tmp_path / "models").symlink_to(models)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    (tmp_path / "recipes").mkdir()
    with tarfile.open(ROOT / "tests/golden/megatron_checkpoints/dist_dense/checkpoint.tar.xz") as archive:
        archive.extractall(tmp_path / "ckpt", filter="data")
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"text": tables.README.read_text()}) + "\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "The ", "id": 7}\n{"prompt": "A list"}\n')
    monkeypatch.chdir(tmp_path)
    shorten(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path


@pytest.mark.parametrize("page", READMES, ids=label)
def test_commands_run_and_print_what_is_shown(page, workplace, warm_launches, capfd):
    # a line that a page shows again does what it did
    for command in dict.fromkeys(commands(page)):
        if command.is_parsed_only:
            hold_parsed(command)
            continue
        program, *words = command.words
        if program in HELD_ELSEWHERE:
            hold_named(command)
            continue
        assert program == "megaspec", f"{command.line}: what is {program}?"
        capfd.readouterr()
        code = run(words)
        printed = capfd.readouterr()
        if command.shown is None:
            assert code == 0, f"{command.line}\n{printed.out}\n{printed.err}"
        else:
            assert_shown(command, printed.out + printed.err)


def run(words: list[str]) -> int:
    """The exit code of a command. What a plug-in adds to the language stays, so it runs in a process of its own."""
    if "--plugin" not in words:
        return main(words)
    done = warm_command(words, cwd=Path.cwd(), env=ENVIRONMENT)
    print(done.stdout, end="", flush=True)
    print(done.stderr, end="", file=sys.stderr, flush=True)
    return done.returncode


def assert_shown(command: Command, printed: str) -> None:
    """Every line that is shown is printed, in order; `...` stands for any number of others."""
    lines = [line.rstrip() for line in printed.splitlines()]
    position, is_gap = 0, False
    for shown in [line.rstrip() for line in command.shown or ()]:
        if shown == "...":
            is_gap = True
            continue
        where = lines.index(shown, position) if shown in lines[position:] else None
        assert where is not None, f"{command.line}: does not print {shown!r}\n{printed}"
        assert is_gap or where == position, f"{command.line}: prints more before {shown!r}\n{printed}"
        position, is_gap = where + 1, False
    assert is_gap or position == len(lines), f"{command.line}: prints more\n{printed}"


def hold_parsed(command: Command) -> None:
    """A command that is not run is parsed by what would read it."""
    program, *words = command.words
    if program in HELD_ELSEWHERE:
        hold_named(command)
        return
    assert program == "megaspec", f"{command.line}: what is {program}?"
    hold_words(words)


def hold_words(words: list[str]) -> None:
    """megaspec's own parser takes the words, and the recipe that they make composes."""
    packages, rest = take_flags(words)
    args = parse(rest)
    if packages or "@train.sh" in rest:
        return
    if args.command == "train" and args.multirun:
        read_words(args.words, args.config_dir)
    elif args.command in ("train", "plan", "tune", "verify"):
        not_of_the_recipe = ("resume=", "memory=")
        plan_words([word for word in args.words if not word.startswith(not_of_the_recipe)], args.config_dir)


def hold_named(command: Command) -> None:
    """Targets of the Makefile exist, and so do test folders, scripts and their options."""
    program, *words = command.words
    if program == "make":
        assert words[0] in make_targets(), command.line
        return
    if program in ("srun", "torchrun") and "megaspec.cli" in words:
        hold_words(words[words.index("megaspec.cli") + 1 :])
        return
    paths = [word for word in words if word == "tests" or word.startswith("tests/")]
    assert paths, f"{command.line}: names no file"
    assert all((ROOT / path).exists() for path in paths), command.line
    if program != "pytest":
        (script,) = paths
        given = {word.partition("=")[0] for word in words[words.index(script) :] if word.startswith("--")}
        assert given <= script_options(ROOT / script), f"{command.line}: {given - script_options(ROOT / script)}"


def script_options(script: Path) -> set[str]:
    """The options of a benchmark, with those of the one whose parser it extends."""
    text = script.read_text()
    found = set(re.findall(r"add_argument\(\s*\"(--[\w-]+)", text))
    if "bench_train.parser()" in text:
        found |= script_options(script.parent / "bench_train.py")
    return found


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_marked_commands_are_parsed_by_what_would_read_them():
    hold_parsed(Command("megaspec train recipe=hello optim.lr=1e-3    # takes minutes"))
    with pytest.raises(RecipeError, match="lrr is no key"):
        hold_parsed(Command("megaspec train recipe=hello optim.lrr=1e-3    # takes minutes"))
    with pytest.raises(RecipeError, match="unknown"):
        hold_parsed(Command("megaspec plan recipe=hello --jsn    # needs a GPU"))
    with pytest.raises(AssertionError, match="--mb"):
        hold_parsed(Command("python tests/benchmarks/bench_train.py --mb 2    # needs a GPU"))
    with pytest.raises(AssertionError, match="nothing"):
        hold_parsed(Command("make nothing    # takes minutes"))
    assert not Command("megaspec recipes    # what needs a GPU says so").words[2:]


def test_what_is_shown_is_held_to_what_is_printed():
    assert_shown(Command("x", ("a", "...", "c")), "a\nb\nc\n")
    for shown in (("a", "c"), ("b", "..."), ("a", "...", "d"), ("a", "b")):
        with pytest.raises(AssertionError):
            assert_shown(Command("x", shown), "a\nb\nc\n")


def test_every_command_is_listed():
    with pytest.raises(RecipeError, match="choose from") as caught:
        parse(["nothing"])
    known = set(re.findall(r"'([a-z-]+)'", str(caught.value).partition("choose from")[2]))
    rows = re.findall(r"^\| (`[^|]*) \|", (ROOT / "megaspec/commands/README.md").read_text(), re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`([a-z-]+)`", row)}
    assert listed == known


def test_targets_of_the_makefile_exist():
    text = "".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE))
    assert {"train", "test", "lint"} <= named <= make_targets()


# ---- programs and recipes


def test_the_loop_of_ones_own_is_short_and_trains(tmp_path):
    loop, weights = blocks(ROOT / "megaspec/README.md", "python")
    assert len(loop.splitlines()) <= 40
    done = warm_script(loop + weights, cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 20
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("page", [page for page in READMES if blocks(page, "yaml")], ids=label)
def test_recipes_that_are_shown_compose(page, tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    monkeypatch.chdir(tmp_path)
    for number, text in enumerate(blocks(page, "yaml")):
        (tmp_path / "recipes" / f"mine{number}.yaml").write_text(text)
        assert compose(f"mine{number}").recipe.name == f"mine{number}"


# ---- what is pointed to


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_links_lead_somewhere(page):
    for path, anchor in links(page):
        assert path.exists(), f"{label(page)}: {path}"
        if anchor:
            assert anchor in sections(path), f"{label(page)}: {label(path)} has no heading #{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_files_that_are_named_exist(page):
    text = without_code(page)
    for path in re.findall(r"`((?:megaspec|conf|kernels|launchers|tests|recipes)/[\w/.*-]+)`", text):
        if "*" in path:
            assert list(ROOT.glob(path)), f"{label(page)}: {path}"
        else:
            assert (ROOT / path).exists(), f"{label(page)}: {path}"
    for row in re.findall(r"^\| (`[^|]*?\.(?:py|html|json|yaml)`[^|]*) \|", text, re.MULTILINE):
        for name in re.findall(r"`([\w/.*-]+\.\w+)`", row):
            near = list(page.parent.glob(name)) or list(ROOT.glob(name))
            assert near or name in RUN_FILES, f"{label(page)}: {name}"


# What lies in a run's folder, which megaspec/README.md lists.
RUN_FILES = {
    "recipe.json",
    "target.json",
    "environment.json",
    "spec.json",
    "prediction.json",
    "exit_code.json",
    "forking.json",
    "remote_runs.json",
    "report.html",
    "attempts.jsonl",
}


@pytest.mark.parametrize("package", sorted((ROOT / "megaspec").glob("*/")), ids=label)
def test_every_file_of_a_package_is_in_its_readme(package):
    if not (package / "__init__.py").exists() or package.name == "commands":  # commands are listed as they are typed
        return
    named = re.findall(r"`([\w*]+\.py)`", without_code(package / "README.md"))
    files = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    missing = {name for name in files if not any(fnmatch(name, pattern) for pattern in named)}
    assert missing == set(), f"{label(package)}/README.md does not say what they are"


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_names_in_files_are_there(page):
    """`MODELS` in `megaspec/runtime/build.py`."""
    names_in_a_file = r"((?:`\w+`(?:, | and )?)+) in `((?:megaspec|kernels|launchers|tests)/[\w/]+\.py)`"
    for names, path in re.findall(names_in_a_file, without_code(page)):
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"\b{name}\b", (ROOT / path).read_text()), f"{label(page)}: {name} in {path}"


# ---- folders


def test_the_readme_at_the_top_is_a_map():
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_LINES


def test_every_folder_has_its_readme():
    missing = [one for one in folders() if one not in NAMESPACES and not (ROOT / one / "README.md").exists()]
    assert missing == []
    for one in NAMESPACES:
        assert list((ROOT / one).glob("*/README.md")), one


def test_the_tree_lists_every_folder():
    """That of the top those of the top and every package; those of the second level their own."""
    for one in folders():
        top = one.partition("/")[0]
        lists = ROOT / "README.md" if one == top or top == "megaspec" else ROOT / top / "README.md"
        linked = {path.relative_to(ROOT).as_posix() for path, _ in links(lists) if path.is_relative_to(ROOT)}
        assert any(path.startswith(f"{one}/") for path in linked), f"{label(lists)} does not list {one}"


def test_every_recipe_is_in_the_table_of_recipes():
    shipped = [path.stem for path in tracked(ROOT, "recipes") if path.suffix == ".yaml"]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", (ROOT / "recipes/README.md").read_text(), re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted(shipped)


def test_every_group_is_in_the_table_of_the_language():
    text = (ROOT / "conf/README.md").read_text()
    for name, section in SECTIONS.items():
        (row,) = re.findall(rf"^\| \[{name}\]\({name}/README\.md\) .*$", text, re.MULTILINE)
        choices = {path.stem for path in (ROOT / "conf" / name).glob("*.yaml")}
        if name not in ("model", "parallelism"):
            assert set(re.findall(r"`(\w+)`", row)) == choices, name
        typed = re.findall(r"`([\w/]+(?:\.py|/))`", row)[0]
        for module in section.typed:
            path = module.replace(".", "/") + ".py"
            assert path.startswith(typed) or typed.endswith(path), f"{name}: {module}"


# ---- measured


@pytest.mark.parametrize("table", list(tables.tables_of(tables.README.read_text())), ids=lambda table: table.rows[0][0])
def test_every_figure_has_its_raw_line(table):
    assert table.files, f"{table.section} names no raw lines"
    assert tables.problems_of(table) == []


def test_a_figure_without_a_raw_line_is_found():
    table = next(one for one in tables.tables_of(tables.README.read_text()) if one.section == "Checkpoints")
    (row,) = table.rows
    wrong = tables.Table(table.section, table.files, table.header, ((row[0], "1,981", *row[2:]),))
    assert tables.problems_of(table) == []
    assert "plain write and fsync=1,981" in " ".join(tables.problems_of(wrong))


def test_a_prediction_of_another_run_is_found():
    """Of two runs of one layout, whose steps the plan misses by different parts."""
    every = tables.tables_of(tables.README.read_text())
    name = "experts, fp8, second machine"
    table = next(one for one in every if any(row[0] == name for row in one.rows))
    rows = {row[0]: row for row in table.rows}
    column = table.header.index("step predicted")
    first = rows[name]
    again = rows[f"{name}, again"]
    assert first[column] != again[column]
    swapped = (*first[:column], again[column], *first[column + 1 :])
    wrong = tables.Table(table.section, table.files, table.header, (swapped,))
    assert "today's code computes" in " ".join(tables.problems_of(wrong))


def test_every_file_of_results_is_named():
    linked = {path for path, _ in links(tables.README)}
    assert {path for path in tables.RESULTS.iterdir() if path.suffix != ".md"} <= linked


def test_the_results_at_the_top_are_those_of_the_tables():
    row = r"^\| \[[^|]*?\]\((tests/[\w/]+\.md)#([\w-]+)\)[^|]* \| ([^|]*) \| ([^|]*) \|$"
    found = re.findall(row, (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(found) >= 5
    for path, anchor, *cells in found:
        there = {number.text for number in tables.numbers_of(sections(ROOT / path)[anchor])}
        for number in (number for cell in cells for number in tables.numbers_of(cell)):
            assert number.text in there, f"{number.text} is not in {path}#{anchor}"
