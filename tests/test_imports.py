"""Who may import whom: `schemas` nobody, the others `schemas` and never each other."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGES = ("schemas", "pipelines", "trainer", "scheduler")
OURS = {*PACKAGES, "benchmarks", "tests"}
BEAM = {"apache_beam"}
TORCH = {"fbgemm_gpu", "torch", "torchft", "torchmetrics", "torchrec"}
OF_SCHEMAS = {"google", "numpy", "obstore", "pyarrow", "tensorflow_metadata", "yaml"}
FORBIDDEN = {"pipelines": TORCH, "trainer": BEAM, "scheduler": BEAM | TORCH}
ABOVE_TABLE = {
    f"presage.pipelines.{name}" for name in (
        "autogroup", "beam", "build", "exchange", "executor", "prepare", "stages",
    )
}  # fmt: skip
"""What modules of `pipelines/table/` must not import: a dataset knows no build."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def imported_modules(node: ast.AST) -> Iterator[str]:
    """Yield the dotted names that one node imports, none if it is no import."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        origin = "." * node.level + (node.module or "")
        yield from (f"{origin}.{alias.name}" for alias in node.names)


def may_import(package: str, name: str) -> bool:
    """Tell whether a module of `package` may import the module `name`."""
    root, _, rest = name.partition(".")
    if root == "presage":
        return rest.split(".")[0] in {"ROOT", package, "schemas"}
    if root in OURS:  # by the names of their folders they would be imported twice
        return False
    if package == "schemas":
        return root in OF_SCHEMAS or root in sys.stdlib_module_names
    return bool(root) and root not in FORBIDDEN[package]


def is_above_table(place: str, name: str) -> bool:
    """Tell whether a module of `pipelines/table/` imports what is above it."""
    is_above = ".".join(name.split(".")[:3]) in ABOVE_TABLE
    return is_above and place.startswith("pipelines/table/")


def violations(place: str, source: str) -> list[str]:
    """List what a module imports and should not.

    Args:
        place: path relative to the repository, its first part is the package.
        source: text of the module.
    """
    package = place.split("/")[0]
    tree = ast.parse(source)
    found = [
        f"{place} must not import {name}"
        for node in ast.walk(tree)
        for name in imported_modules(node)
        if not may_import(package, name)
        or (name.split(".")[0] in BEAM and not place.startswith("pipelines/beam/"))
        or is_above_table(place, name)
    ]
    # A driver or a main module may load a heavy part only when it is asked for.
    if "/drivers/" not in place and not place.endswith("/__main__.py"):
        found += [
            f"{place} must import {name} at its top, not in {function.name}"
            for function in ast.walk(tree)
            if isinstance(function, FUNCTIONS)
            for node in ast.walk(function)
            for name in imported_modules(node)
        ]
    return found


def modules(repository: Path) -> dict[str, Path]:
    """Map dotted names of the packages' modules to their files."""
    files = (path for name in PACKAGES for path in sorted((repository / name).rglob("*.py")))
    return {
        ".".join(("presage", *path.relative_to(repository).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): path
        for path in files
    }


@pytest.mark.slow
def test_modules_of_each_package_import_only_what_they_may(repository: Path) -> None:
    found = [
        problem
        for path in modules(repository).values()
        for problem in violations(path.relative_to(repository).as_posix(), path.read_text())
    ]
    assert not found, "\n".join(found)


@cache
def import_graph(repository: Path) -> dict[str, set[str]]:
    """Map each module to the modules of ours that it imports."""
    existing = modules(repository)
    return {
        name: {
            target
            for node in ast.walk(ast.parse(path.read_text()))
            for target_name in imported_modules(node)
            for target in (target_name, target_name.rpartition(".")[0])
            if target in existing and target != name
        }
        for name, path in existing.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("depth", [3, None], ids=["rooms", "modules"])
def test_imports_form_no_cycle(depth: int | None, repository: Path) -> None:
    graph: dict[str, set[str]] = {}
    for name, targets in import_graph(repository).items():
        room = ".".join(name.split(".")[:depth])
        rooms = {".".join(target.split(".")[:depth]) for target in targets}
        graph.setdefault(room, set()).update(rooms - {room})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imports form a cycle: {' <- '.join(error.args[1])}")


FAULTS = {
    "schemas imports a sibling": ("schemas/a.py", "import presage.trainer.data.reader"),
    "schemas imports a heavy library": ("schemas/a.py", "from torch import nn"),
    "pipelines imports the trainer": ("pipelines/a.py", "from presage.trainer import reader"),
    "pipelines imports torch": ("pipelines/a.py", "import torch.nn as nn"),
    "scoring imports torch": ("schemas/run/scoring.py", "import torch"),
    "pipelines imports Beam outside its room": ("pipelines/a.py", "import apache_beam as beam"),
    "a table imports the build": (
        "pipelines/table/a.py",
        "from presage.pipelines.build import build",
    ),
    "a table imports the executor": (
        "pipelines/table/a.py",
        "from presage.pipelines import executor",
    ),
    "trainer imports Beam": ("trainer/a.py", "import apache_beam as beam"),
    "scheduler imports torchrec": ("scheduler/drivers/a.py", "import torchrec"),
    "a package imports tests": ("trainer/a.py", "from tests import conftest"),
    "a package by the name of its folder": ("trainer/a.py", "from schemas import arrays"),
    "a package imports the front door": ("trainer/a.py", "from presage.dataset import Dataset"),
    "a relative import": ("trainer/a.py", "from .reader import Reader"),
    "an import in a function": ("trainer/a.py", "def f():\n    import json\n"),
}


@pytest.mark.parametrize(("place", "source"), FAULTS.values(), ids=FAULTS.keys())
def test_violations_of_a_wrong_import_names_it(place: str, source: str) -> None:
    assert len(violations(place, source)) == 1


ALLOWED = {
    "schemas imports its libraries": ("schemas/a.py", "import numpy as np, json, yaml"),
    "trainer imports schemas": ("trainer/a.py", "from presage.schemas.arrays import Jagged"),
    "a table imports options": ("pipelines/table/a.py", "import presage.pipelines.runner_options"),
    "a build imports a table": ("pipelines/build.py", "import presage.pipelines.table.commit"),
    "a room imports Beam": ("pipelines/beam/a.py", "import apache_beam as beam"),
    "a driver imports when asked": ("scheduler/drivers/a.py", "def f():\n    import json\n"),
}


@pytest.mark.parametrize(("place", "source"), ALLOWED.values(), ids=ALLOWED.keys())
def test_violations_of_a_right_import_is_empty(place: str, source: str) -> None:
    assert violations(place, source) == []
