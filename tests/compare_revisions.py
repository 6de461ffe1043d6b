"""Holds two revisions of this repository against each other: what they decide, plan and find, and their syntax trees.

    python -m tests.compare_revisions REVISION [OTHER] [--trees] [--only WORD]

For moves and renames, which may change nothing that a user sees. Without OTHER the working tree is compared. From each
revision, byte for byte: the golden Specs, `plan --json` of every recipe on four kinds of machine, `tune --json` of
three recipes. --trees compares the syntax trees of all Python files as well, except their imports, with the module
paths of moved files brought to the new ones. --only takes the outputs whose name contains WORD.

Exit code 0 when everything is equal, else 1, and a line for each difference. What ends with a traceback on either side,
or was not compared at all, is no equal output. About six minutes on two cores.
"""

import argparse
import ast
import filecmp
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
MACHINES = ("h100", "h200", "a100-80", "cpu")
TUNED = {
    "llama3_8b": ("hardware=h100", "gpus=16"),
    "llama3_70b": ("hardware=h100", "gpus=64"),
    "mixtral_8x7b": ("hardware=h200", "gpus=32"),
}
SOURCES = ("megaspec", "kernels", "launchers", "tests")


def main() -> int:
    """Compares what the command line names."""
    arguments = parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        sides = []
        for name, revision in (("before", arguments.before), ("after", arguments.after)):
            tree = ROOT if revision is None else checked_out(revision, Path(folder, name))
            sides.append((tree, Path(folder, f"{name}-outputs")))
        differences = []
        if arguments.trees:
            differences += different_trees(sides[0][0], sides[1][0])
        for tree, outputs in sides:
            write_outputs(tree, outputs, only=arguments.only)
        differences += different_files(sides[0][1], sides[1][1])
        differences += failed(sides[0][1], sides[1][1])
        for difference in differences:
            print(difference)
        count = sum(1 for _ in sides[1][1].rglob("*.json"))
        if count == 0:
            differences.append(f"nothing was compared: no output has {arguments.only} in its name")
            print(differences[-1])
        print(f"{count} outputs compared, {len(differences)} differences")
        for tree, _ in sides:
            if tree != ROOT:
                git("worktree", "remove", "--force", str(tree))
    return 1 if differences else 0


def parser() -> argparse.ArgumentParser:
    """The words of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", metavar="REVISION")
    parser.add_argument("after", metavar="OTHER", nargs="?", help="another revision (default: the working tree)")
    parser.add_argument("--trees", action="store_true", help="compare syntax trees as well")
    parser.add_argument("--only", default="", metavar="WORD", help="only outputs whose name contains this")
    return parser


def git(*words: str) -> str:
    """What git prints."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def checked_out(revision: str, folder: Path) -> Path:
    """A checkout of a revision in a new folder."""
    git("worktree", "add", "--detach", str(folder), revision)
    return folder


def write_outputs(tree: Path, outputs: Path, *, only: str) -> None:
    """Runs what is compared in a checkout, two commands at a time, and keeps what each prints.

    A command that fails is kept as well: its exit code and its errors are what is compared.
    """
    outputs.mkdir()
    commands = {}
    for recipe in sorted((tree / "recipes").glob("*.yaml")):
        for machine in MACHINES:
            words = ["plan", f"recipe={recipe.stem}", f"hardware={machine}", "--json"]
            commands[f"plan-{recipe.stem}-{machine}.json"] = words
    for recipe, words in TUNED.items():
        commands[f"tune-{recipe}.json"] = ["tune", f"recipe={recipe}", *words, "--json"]
    with ThreadPoolExecutor(2) as pool:
        under_way = []
        for name, words in commands.items():
            if only in name:
                under_way.append(pool.submit(keep, tree, ["megaspec", *words], outputs / name))
        if only in "specs":
            under_way.append(pool.submit(write_specs, tree, outputs / "specs"))
        for one in under_way:
            # raises what it met
            one.result()


def keep(tree: Path, words: list[str], output: Path) -> None:
    """What a module of a checkout prints, and how it ended."""
    ended = run(tree, words)
    output.write_text(f"{ended.stdout}\nexit code {ended.returncode}\n{ended.stderr}")


def write_specs(tree: Path, folder: Path) -> None:
    """The golden Specs as a checkout's own code resolves them."""
    folder.mkdir()
    code = (
        "import json, sys, pathlib; from tests.golden_specs import resolved\n"
        "for name, spec in resolved().items():\n"
        "    pathlib.Path(sys.argv[1], name).write_text(json.dumps(spec, indent=1))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=tree, env=environment(tree), capture_output=True, text=True
    )
    (folder / "end.json").write_text(f"exit code {ended.returncode}\n{ended.stderr}")


def run(tree: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs `python -m WORDS` with the packages of a checkout."""
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=tree, env=environment(tree), capture_output=True, text=True
    )


def environment(tree: Path) -> dict[str, str]:
    """Imports come from the checkout, whatever is installed."""
    path = os.pathsep.join(str(tree / part) for part in (".", "kernels", "launchers"))
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def different_files(before: Path, after: Path) -> list[str]:
    """Outputs that are not equal, and those that only one side has."""
    found = []
    names = {str(f.relative_to(side)) for side in (before, after) for f in side.rglob("*.json")}
    for name in sorted(names):
        one, other = before / name, after / name
        if not one.exists() or not other.exists():
            found.append(f"{name}: only {'after' if other.exists() else 'before'}")
        elif not filecmp.cmp(one, other, shallow=False):
            found.append(f"{name}: differs")
    return found


def failed(*sides: Path) -> list[str]:
    """Outputs of commands that broke: two that break alike say nothing about what they would have printed."""
    found = []
    for side in sides:
        for output in sorted(side.rglob("*.json")):
            text = output.read_text()
            if "Traceback (most recent call last)" in text or "No module named" in text:
                found.append(f"{output.relative_to(side)}: broke {side.name.removesuffix('-outputs')}")
    return found


def different_trees(before: Path, after: Path) -> list[str]:
    """Python files whose syntax trees are not equal but for imports and the module paths of moved files."""
    moved = moved_files(before, after)
    names = dotted_moves(moved)
    found = []
    for old in python_files(before):
        new = moved.get(old, old)
        if not (after / new).exists():
            found.append(f"{old}: gone")
        elif essence(before / old, names) != essence(after / new, names):
            found.append(f"{new}: another syntax tree than {old} had")
    appeared = set(python_files(after)) - {moved.get(old, old) for old in python_files(before)}
    return found + [f"{new}: new" for new in sorted(appeared)]


def python_files(tree: Path) -> list[str]:
    """Paths of all Python files, but empty package files."""
    paths = [p for room in SOURCES for p in (tree / room).rglob("*.py") if p.stat().st_size]
    return sorted(str(p.relative_to(tree)) for p in paths)


def moved_files(before: Path, after: Path) -> dict[str, str]:
    """Old path -> new path of files that only one side has, as git pairs them by their content."""
    words = ["git", "diff", "--no-index", "--name-status", "-M50%", "-l0", "--diff-filter=R"]
    moved = {}
    for room in SOURCES:
        ended = subprocess.run([*words, str(before / room), str(after / room)], capture_output=True, text=True)
        for line in ended.stdout.splitlines():
            _, old, new = line.split("\t")
            moved[str(Path("/", old.lstrip("/")).relative_to(before))] = str(
                Path("/", new.lstrip("/")).relative_to(after)
            )
    return {old: new for old, new in moved.items() if old.endswith(".py")}


def dotted_moves(moved: dict[str, str]) -> dict[str, str]:
    """Old dotted name -> new dotted name of moved modules, and the same for their paths."""
    names = {}
    for old, new in moved.items():
        names[old] = new
        names[dotted(old)] = dotted(new)
    return names


def dotted(path: str) -> str:
    """The import name of a file."""
    without_roots = path.removeprefix("kernels/").removeprefix("launchers/")
    return without_roots.removesuffix(".py").replace("/", ".")


class _Essence(ast.NodeTransformer):
    """A tree without imports, with the names of moved modules replaced in its texts."""

    def __init__(self, names: dict[str, str]):
        self._names = sorted(names.items(), key=lambda pair: -len(pair[0]))

    def visit_Import(self, node: ast.Import) -> None:
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if not isinstance(node.value, str):
            return node
        text = node.value
        for old, new in self._names:
            text = text.replace(old, new)
        return ast.copy_location(ast.Constant(text), node)


def essence(path: Path, names: dict[str, str]) -> str:
    """A file's syntax tree as text, in which what a move may change is left out."""
    return ast.dump(_Essence(names).visit(ast.parse(path.read_text())))


if __name__ == "__main__":
    sys.exit(main())
