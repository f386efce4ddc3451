"""The files and functions that `docs/architecture.md` walks through exist, and are called."""

import ast
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from tests.pipelines import logs
from tests.traces import APART, traces
from tests.trainer.make_dataset import write_job
from tests.trainer.runs import run_job, small_dataset

PLACE = re.compile(r"`([\w/]+\.py)` \(([^)]*)\)")
NAME = re.compile(r"`([A-Za-z_.]+)`")
ROOMS = ("schemas", "pipelines", "trainer", "scheduler", "presage")
ROW = re.compile(r"^\| `([a-z_/]+\.py)` \| `([A-Za-z_.]+)` \|", re.MULTILINE)
TRACED_FILES = {"One sample": 23, "One batch": 48, "One decision": 18}
"""Files that a row, a batch and a decision enter in the steady state (`tests/traces.py`)."""
OF_A_RUN = {
    ("pipelines/build.py", "build_segment"),
    ("pipelines/table/commit.py", "commit_segment"),
}
"""Functions of the page that are called once a build."""
MOST_FILES = {"One sample": 10, "One batch": 8, "One decision": 6}


def walks(repository: Path) -> dict[str, list[tuple[str, str]]]:
    """Map each walk of the page to its (file, function) rows."""
    text = (repository / "docs" / "architecture.md").read_text(encoding="utf-8")
    sections = (part.split("\n", 1) for part in text.split("\n## ")[1:])
    return {title.split(",")[0]: ROW.findall(body) for title, body in sections}


def defines(tree: ast.AST, name: str) -> bool:
    """Return whether a module defines a function, a class, or `Class.method`."""
    first, _, rest = name.partition(".")
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == first:
            return not rest or defines(node, rest)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == first:
            return not rest
    return False


@pytest.mark.parametrize("walk", MOST_FILES)
def test_walk_names_functions_that_exist_in_few_files(walk: str, repository: Path) -> None:
    rows = walks(repository)[walk]
    assert 0 < len({file for file, _ in rows}) <= MOST_FILES[walk]
    for file, name in rows:
        assert defines(ast.parse((repository / file).read_text()), name), f"{file}: {name}"


def test_places_of_changes_exist(repository: Path) -> None:
    text = (repository / "docs" / "architecture.md").read_text(encoding="utf-8")
    places = PLACE.findall(text.partition("## Where to change what")[2])
    assert len(places) > 20
    for file, names in places:
        tree = ast.parse((repository / file).read_text())
        assert [n for n in NAME.findall(names) if not defines(tree, n)] == [], file


def module_named(name: str, readme: Path, repository: Path) -> Path | None:
    """Return the file of a name: beside the README, below the root, or one below the README."""
    for base in (readme.parent, repository):
        if (base / name).is_file():
            return (base / name).resolve()
    found = [p for p in readme.parent.rglob(Path(name).name) if p.as_posix().endswith(f"/{name}")]
    return found[0].resolve() if len(found) == 1 else None


def test_readmes_name_each_module_and_no_other(repository: Path) -> None:
    named, missing = set[Path | None](), list[str]()
    for readme in [path for room in ROOMS for path in (repository / room).rglob("README.md")]:
        for name in re.findall(r"`([\w./]+\.py)`", readme.read_text(encoding="utf-8")):
            named.add(module := module_named(name, readme, repository))
            if module is None:
                missing.append(f"{readme.relative_to(repository)}: {name}")
    assert missing == []
    modules = [path for room in ROOMS for path in (repository / room).rglob("*.py")]
    own = [path for path in modules if not path.stem.startswith("__")]
    assert [str(p.relative_to(repository)) for p in own if p.resolve() not in named] == []


def called_by(run: Callable[[], object], repository: Path) -> set[tuple[str, str]]:
    """Return the (file, function) of all functions of ours that are called, in any thread."""
    found, root = set[tuple[str, str]](), f"{repository}/"

    def note(frame: FrameType, event: str, argument: object) -> None:
        file, name = frame.f_code.co_filename, frame.f_code.co_qualname
        if event == "call" and file.startswith(root):
            file = file.removeprefix(root)
            found.update({(file, name), (file, name.partition(".")[0])})

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


@pytest.mark.nightly
def test_steady_ways_are_no_longer_than_they_were_and_pass_what_the_page_shows(
    repository: Path, tmp_path: Path
) -> None:
    for walk, trace in traces(tmp_path).items():
        called = {(file, name) for file, names in trace.files.items() for name in names}
        called |= {(file, name.partition(".")[0]) for file, name in called}
        shown = {*walks(repository)[walk]} - OF_A_RUN
        assert shown <= called, walk
        files = [file for file in trace.files if not file.startswith(APART)]
        assert len(files) <= TRACED_FILES[walk], walk


@pytest.mark.slow
def test_build_and_training_call_each_function_of_their_walk(
    repository: Path, tmp_path: Path
) -> None:
    job, dataset = write_job(tmp_path / "job"), small_dataset()
    runs: dict[str, Callable[[], object]] = {
        "One sample": lambda: logs.built(tmp_path / "built"),
        "One batch": lambda: run_job(job, dataset, tmp_path / "run", steps=2, embedding="cached"),
    }
    for walk, run in runs.items():
        assert {*walks(repository)[walk]} <= called_by(run, repository), walk
