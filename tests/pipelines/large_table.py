"""A process that takes a table of eight million entries through all rounds; prints its memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from pipelines.clustering.part import lookups_table
from pipelines.oracle.files import run_stages
from pipelines.oracle.index import LINKING_STAGES, LinkingPlan, totals_of
from pipelines.oracle.numbering import (
    NUMBERING_STAGES,
    WORKER_ENTRIES,
    NumberingPlan,
    lookups_path,
    number_table,
)
from pipelines.workers import keep_freed_memory
from schemas.arrays import Jagged, offsets_of
from schemas.config.job import OrderConfig
from schemas.files import CheckedFile, describe_file
from schemas.layout import FILE_SHIFT, access_path
from schemas.order import Order
from schemas.storage import Location

NUM_PARTS, BLOCKS_PER_PART, ROWS_PER_BLOCK = 8, 200, 5_000


def write_lookups(root: Path) -> np.ndarray:
    """Write look-ups, half of them of rows that hardly come back; return the blocks' ids."""
    rng = np.random.default_rng(0)
    for part in range(NUM_PARTS):
        lists = [
            np.unique(rng.integers(0, (1 << 40) if block % 2 else (1 << 20), ROWS_PER_BLOCK))
            for block in range(BLOCKS_PER_PART)
        ]
        offsets = offsets_of(np.array([len(rows) for rows in lists]))
        path = lookups_path(root, "items", part)
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(lookups_table(Jagged(np.concatenate(lists), offsets)), path)
    file_index, block = np.divmod(np.arange(NUM_PARTS * BLOCKS_PER_PART), BLOCKS_PER_PART)
    return (file_index << FILE_SHIFT) + block


def peak_bytes() -> int:
    """Return the most memory that this process has had, what it maps counted too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10


def main(root: Path) -> None:
    """Number and link the table; print one JSON object."""
    keep_freed_memory()
    blocks = write_lookups(root)
    numbering = number_table(Location.parse(root), "items", blocks, WORKER_ENTRIES)
    assert isinstance(numbering, NumberingPlan), "the table does not fit a worker"
    num_rows = sum(run_stages(numbering, NUMBERING_STAGES))
    paths = [access_path("items", f) for f in range(numbering.num_files)]
    order = Order((len(blocks),), 2, 2, OrderConfig(shuffle="blocks", seed=3))
    linking = LinkingPlan(
        root=root / "index",
        scratch=root / "scratch",
        order=order,
        table="items",
        num_numbers=num_rows,
        files=tuple(CheckedFile(root, describe_file(root, path)) for path in paths),
    )
    entries = sum(totals_of(linking, run_stages(linking, LINKING_STAGES)).num_entries)
    found = {"num_rows": num_rows, "num_entries": entries, "peak_bytes": peak_bytes()}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
