"""What the records of a store's log say: whose rows follow, and rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.jagged import Array
from trainer.stores.redo_log import Buffer, replay
from trainer.stores.store import TableLayout
from trainer.stores.wire import layouts_from, record_width


@dataclass(frozen=True, slots=True)
class OpenEntry:
    """From here on rows are of this run.

    Attributes:
        owner: names the run.
        session: names the training process.
        slots: first slot and the one after the last.
        layouts: tables by name, all of one shape.
    """

    owner: str
    session: str
    slots: tuple[int, int]
    layouts: Mapping[str, TableLayout]

    def parts(self) -> list[Buffer]:
        """Return the payload in parts."""
        layouts = [asdict(layout) for layout in self.layouts.values()]
        return _parts({**asdict(self), "op": "open", "layouts": layouts})


@dataclass(frozen=True, slots=True)
class RowsEntry:
    """Rows as steps left them.

    Attributes:
        tables: table to its rows, one table after the other below.
        steps: (n,) int64, the step that made each record.
        block: (n, record_width).
    """

    tables: Mapping[str, NDArray[np.int64]]
    steps: NDArray[np.int64]
    block: Array

    def parts(self) -> list[Buffer]:
        """Return the payload in parts."""
        counts = [[table, len(rows)] for table, rows in self.tables.items()]
        rows = np.concatenate([*self.tables.values()])
        return _parts({"op": "rows", "tables": counts}, rows, self.steps, self.block)


def read_entries(path: Path) -> Iterator[OpenEntry | RowsEntry]:
    """Yield what a log says, in order; a torn last record is cut off.

    Raises:
        SchemaError: a record before a good one is damaged.
    """
    layouts: Mapping[str, TableLayout] = {}
    for payload in replay(path):
        size = 4 + int.from_bytes(payload[:4], "little")
        header = json.loads(bytes(payload[4:size]))
        if header["op"] == "open":
            layouts = layouts_from(header["layouts"])
            slots = (header["slots"][0], header["slots"][1])
            yield OpenEntry(header["owner"], header["session"], slots, layouts)
        else:
            yield _rows_entry(header["tables"], payload, size, next(iter(layouts.values())))


def _rows_entry(
    counts: list[tuple[str, int]], payload: memoryview, start: int, layout: TableLayout
) -> RowsEntry:
    count = sum(n for _, n in counts)
    # copies: the file is unmapped after the replay
    numbers = np.frombuffer(payload, np.int64, 2 * count, start).copy()
    width = record_width(layout)
    block = np.frombuffer(payload, layout.dtype, count * width, start + 16 * count).copy()
    tables: dict[str, NDArray[np.int64]] = {}
    end = 0
    for table, n in counts:
        tables[table] = numbers[end : end + n]
        end += n
    return RowsEntry(tables, numbers[count:], block.reshape(count, width))


def _parts(header: dict[str, Any], *arrays: Array) -> list[Buffer]:
    text = json.dumps(header, sort_keys=True).encode()
    flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
    return [len(text).to_bytes(4, "little") + text, *(a.view(np.uint8).data for a in flat)]
