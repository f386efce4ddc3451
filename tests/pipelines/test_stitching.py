"""Numberings that are joined file by file are those that are joined in memory."""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
import pytest

from pipelines.oracle import index as stitching
from pipelines.oracle.index import merge_numberings
from schemas.accesses import merge_dictionaries
from schemas.files import CheckedFile


@dataclass
class InMemory:
    """A file of edges."""

    rows: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    def read(self, columns: list[str]) -> pa.Table:
        assert columns == ["row"]
        return pa.table({"row": self.rows})


@pytest.mark.parametrize("window", [3, 1 << 21])
@pytest.mark.parametrize("seed", range(5))
def test_maps_by_ranges_of_slots_are_those_made_in_memory(
    seed: int, window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stitching, "WINDOW", window)
    rng = np.random.default_rng(seed)
    universe = rng.integers(0, 2**62, 60)
    segments = [rng.permutation(universe)[: rng.integers(1, 50)] for _ in range(3)]
    files = [
        [InMemory(part) for part in np.array_split(rows, rng.integers(1, 4))] for rows in segments
    ]
    files.insert(1, [])  # a segment from before the table was declared
    maps = [tmp_path / "maps" / str(segment) for segment in range(4)]
    edges = cast("list[list[CheckedFile]]", files)
    numbers, rows = merge_dictionaries(segments)
    assert merge_numberings(edges, maps, worker_rows=7) == len(rows)
    for path, expected in zip([maps[0], *maps[2:]], numbers, strict=True):
        assert np.load(path).tolist() == expected.tolist()
    assert sorted(path.name for path in (tmp_path / "maps").iterdir()) == ["0", "2", "3"]
