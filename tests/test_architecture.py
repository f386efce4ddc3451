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
from tests.trainer.make_dataset import write_job
from tests.trainer.runs import run_job, small_dataset

ROW = re.compile(r"^\| `([a-z_/]+\.py)` \| `([A-Za-z_.]+)` \|", re.MULTILINE)
MOST_FILES = {"One sample": 10, "One batch": 8, "One decision": 6}


def walks(repository: Path) -> dict[str, list[tuple[str, str]]]:
    """Map each walk of the page to its (file, function) rows."""
    text = (repository / "docs" / "architecture.md").read_text(encoding="utf-8")
    sections = (part.split("\n", 1) for part in text.split("\n## ")[1:])
    return {title.split(",")[0]: ROW.findall(body) for title, body in sections}


def defines(tree: ast.AST, name: str) -> bool:
    """Return whether a module defines a function, a class, or `Class.method`."""
    first, _, rest = name.partition(".")
    return any(
        isinstance(node, ast.FunctionDef | ast.ClassDef)
        and node.name == first
        and (not rest or defines(node, rest))
        for node in ast.iter_child_nodes(tree)
    )


@pytest.mark.parametrize("walk", MOST_FILES)
def test_walk_names_functions_that_exist_in_few_files(walk: str, repository: Path) -> None:
    rows = walks(repository)[walk]
    assert 0 < len({file for file, _ in rows}) <= MOST_FILES[walk]
    for file, name in rows:
        assert defines(ast.parse((repository / file).read_text()), name), f"{file}: {name}"


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
