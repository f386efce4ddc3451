"""Hints are read back as written, and other files are refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from presage.schemas.dataset.hints import TableHints, read_hints, write_hints
from presage.schemas.errors import SchemaError

HINTS = {
    name: TableHints(
        feature_names=("item", "history"),
        pooling_factors=(1.0, 12.5),
        num_poolings=(0.8, 0.1),
        batch_sizes=(512, 512),
        num_rows=2**63,
        num_unique_rows=20_000,
        unique_rows_per_step=900.25,
        hot_rows=((0.01, 0.5),),
        lru_misses=((0.0, 1.0), (0.1, 1 / 3)),
    )
    for name in ("items", "brands")
}


def test_hints_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_hints(tmp_path / "hints.json", HINTS)
    assert read_hints(tmp_path / "hints.json") == HINTS
    before = (tmp_path / "hints.json").read_bytes()
    write_hints(tmp_path / "hints.json", dict(reversed(HINTS.items())))
    assert (tmp_path / "hints.json").read_bytes() == before


def changed(body: Any, change: str) -> str:
    table = body["tables"]["items"]
    if change == "unknown":
        table["pooling_factor"] = 1
    elif change == "lacking":
        del table["num_rows"]
    elif change == "format":
        body["format"] = 2
    return json.dumps(body)


REFUSALS = {
    "unknown": "unknown key: items.pooling_factor",
    "lacking": "missing key: items.num_rows",
    "format": "format must be 1, got 2",
}


@pytest.mark.parametrize("change", REFUSALS)
def test_read_hints_of_other_files_raises(change: str, tmp_path: Path) -> None:
    path = tmp_path / "hints.json"
    write_hints(path, HINTS)
    path.write_text(changed(json.loads(path.read_text()), change))
    message = (
        f"file does not hold sharding hints: {REFUSALS[change]} in {path}; write it with "
        "`python -m presage.pipelines oracle DATASET --hints FILE`"
    )
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        read_hints(path)


def test_read_hints_of_no_json_raises(tmp_path: Path) -> None:
    (tmp_path / "hints.json").write_text("{")
    with pytest.raises(
        SchemaError, match=r"file does not hold sharding hints: Expecting .*; write it"
    ):
        read_hints(tmp_path / "hints.json")
