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
from trainer.stores.claims import Ranges
from trainer.stores.control import Control, control_from
from trainer.stores.redo_log import Buffer, replay
from trainer.stores.store import TableLayout
from trainer.stores.wire import layouts_from, record_width


@dataclass(frozen=True, slots=True)
class OpenEntry:
    """From here on rows are of these tables; the first record of a log.

    Attributes:
        layouts: tables by name, all of one shape.
    """

    layouts: Mapping[str, TableLayout]

    def parts(self) -> list[Buffer]:
        """Return the payload in parts."""
        return _parts({"op": "open", "layouts": [asdict(each) for each in self.layouts.values()]})


@dataclass(frozen=True, slots=True)
class ControlEntry:
    """What the store is from here on.

    Attributes:
        control: whose rows it holds, and of which slots.
        dropped: slots whose rows are forgotten.
    """

    control: Control
    dropped: Ranges = ()

    def parts(self) -> list[Buffer]:
        """Return the payload in parts."""
        return _parts({"op": "control", "dropped": self.dropped, **self.control.to_json()})


@dataclass(frozen=True, slots=True)
class RowsEntry:
    """Rows as steps left them.

    Attributes:
        tables: table to its rows, one table after the other below.
        steps: (n,) int64, the step that made each record.
        block: (n, record_width).
        counted: whether this is a message of a trainer, which `Control.sequence` counts.
    """

    tables: Mapping[str, NDArray[np.int64]]
    steps: NDArray[np.int64]
    block: Array
    counted: bool = False

    def parts(self) -> list[Buffer]:
        """Return the payload in parts."""
        counts = [[table, len(rows)] for table, rows in self.tables.items()]
        rows = np.concatenate([*self.tables.values()])
        header = {"op": "rows", "tables": counts, "counted": self.counted}
        return _parts(header, rows, self.steps, self.block)


Entry = OpenEntry | ControlEntry | RowsEntry


def read_entries(path: Path) -> Iterator[Entry]:
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
            yield OpenEntry(layouts)
        elif header["op"] == "control":
            dropped = tuple((int(first), int(end)) for first, end in header["dropped"])
            yield ControlEntry(control_from(header), dropped)
        else:
            yield _rows_entry(header, payload, size, next(iter(layouts.values())))


def _rows_entry(
    header: Mapping[str, Any], payload: memoryview, start: int, layout: TableLayout
) -> RowsEntry:
    counts = header["tables"]
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
    block = block.reshape(count, width)
    return RowsEntry(tables, numbers[count:], block, bool(header["counted"]))


def _parts(header: dict[str, Any], *arrays: Array) -> list[Buffer]:
    text = json.dumps(header, sort_keys=True).encode()
    flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
    return [len(text).to_bytes(4, "little") + text, *(a.view(np.uint8).data for a in flat)]
