"""The files and functions that `docs/architecture.md` walks through exist."""

import ast
import re
from pathlib import Path

import pytest

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
