"""A process that numbers and indexes a large table with few open files; prints its memory."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow.parquet as pq

from presage.pipelines.clustering.part import lookups_table
from presage.pipelines.exchange import keep_freed_memory
from presage.pipelines.oracle.index import index_table
from presage.pipelines.oracle.numbering import number_table
from presage.schemas.arrays import Jagged, offsets_of
from presage.schemas.config.job import OrderConfig
from presage.schemas.dataset.checked_files import CheckedFile
from presage.schemas.dataset.files import describe_file
from presage.schemas.dataset.order import Order
from presage.schemas.layout import FILE_SHIFT, part_path
from presage.schemas.storage.location import Location

NUM_PARTS, BLOCKS_PER_PART, ROWS_PER_BLOCK = 80, 20, 5_000
MAX_OPEN_FILES = 64


def write_lookups(root: Path, num_rows: int) -> np.ndarray:
    """Write look-ups, half of them of rows that hardly come back; return the blocks' ids.

    Args:
        root: directory of the segment.
        num_rows: rows of the table.
    """
    rng = np.random.default_rng(0)
    (root / "lookups" / "items").mkdir(parents=True)
    for part in range(NUM_PARTS):
        lists = [
            np.unique(rng.integers(0, num_rows if block % 2 else (1 << 20), ROWS_PER_BLOCK))
            for block in range(BLOCKS_PER_PART)
        ]
        offsets = offsets_of(np.array([len(rows) for rows in lists]))
        path = root / "lookups" / "items" / part_path(part)
        pq.write_table(lookups_table(Jagged(np.concatenate(lists), offsets)), path)
    window, block = np.divmod(np.arange(NUM_PARTS * BLOCKS_PER_PART), 2 * NUM_PARTS)
    return (block // 2 << FILE_SHIFT) + 2 * window + block % 2  # two blocks of each part, in turn


def segment_of(root: Path, num_rows: int) -> Any:
    """Return a segment with what an index reads."""
    paths = sorted((root / "access" / "items").iterdir())
    files = [CheckedFile(root, describe_file(p, f"access/items/{p.name}")) for p in paths]
    tables = {"items": SimpleNamespace(num_unique_rows=num_rows)}
    return SimpleNamespace(manifest=SimpleNamespace(tables=tables), access_files=lambda _: files)


def peak_bytes() -> int:
    """Return the most memory that this process has had, what it maps counted too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10


def main(root: Path, num_rows: int) -> None:
    """Number and link the table; print one JSON object."""
    keep_freed_memory()
    blocks = write_lookups(root, num_rows)
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_OPEN_FILES, MAX_OPEN_FILES))
    start = time.perf_counter()
    count = number_table(Location.parse(root), "items", blocks).num_rows
    numbered = time.perf_counter()
    order = Order((len(blocks),), 2, 2, OrderConfig(shuffle="blocks", seed=3))
    totals = index_table(
        Location.parse(root / "index"), cast(Any, segment_of(root, count)), "items", order
    )
    found = {
        "num_rows": count,
        "num_entries": sum(totals.num_entries),
        "peak_bytes": peak_bytes(),
        "numbering_sec": numbered - start,
        "index_sec": time.perf_counter() - numbered,
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
