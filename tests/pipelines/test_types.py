"""Every Arrow type in every role of a job: built with another reader's values, or refused."""

import re
from itertools import product
from pathlib import Path

import pyarrow as pa
import pytest

from presage.pipelines.sources.types import arrow_type
from tests.pipelines.type_matrix import BUILT, COLUMNS, NUM_ROWS, ROLES, outcome

DOCUMENT = Path(__file__).parents[2] / "docs" / "types.md"


def check(kind: str, role: str, folder: Path) -> None:
    """Compare a build with its cell in the document."""
    lines = (line.strip("| ").split(" | ") for line in DOCUMENT.read_text().splitlines())
    (cells,) = [cells for cells in lines if cells[0] == kind]
    cell = cells[1 + list(ROLES).index(role)]
    assert (outcome(kind, role, folder) == BUILT) == (cell == "yes")


@pytest.mark.slow
@pytest.mark.parametrize("kind", COLUMNS)
def test_type_in_one_role_is_read_as_by_another_reader_or_refused(
    kind: str, tmp_path: Path
) -> None:
    check(kind, list(ROLES)[5 * list(COLUMNS).index(kind) % len(ROLES)], tmp_path)


def test_sessions_of_both_zeros_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COLUMNS, "zeros", pa.array([0.0, -0.0, 1.0, -0.0] * (NUM_ROWS // 4)))
    assert outcome("zeros", "session key", tmp_path) == BUILT


@pytest.mark.chaos
@pytest.mark.parametrize(("kind", "role"), list(product(COLUMNS, ROLES)))
def test_type_in_a_role_is_read_as_by_another_reader_or_refused(
    kind: str, role: str, tmp_path: Path
) -> None:
    check(kind, role, tmp_path)


@pytest.mark.parametrize("text", ["struct<a: int64", "struct a: int64>", "list<int64", "int64>"])
def test_type_with_one_bracket_is_unknown(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"unknown type {text!r}")):
        arrow_type(text)
