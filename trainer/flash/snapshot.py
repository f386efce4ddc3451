"""What lies in memory between the step boundary that it was copied at and the disk.

8 bytes, little-endian: length of the header
header: JSON; which arrays, where each lies, and what the checkpoint's manifest will say
arrays, each begun at a multiple of 64 bytes
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.jagged import Array
from trainer.arrays import Spec, spec_of_array
from trainer.flash.changes import Changed
from trainer.flash.memory import COMMITTED, FILLING, CopyMemory
from trainer.stores.store import Records, TableLayout

_ALIGNED = 64
DENSE, PLAN, ROWS = "dense/", "plan/", "rows/"
"""What the names of arrays begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a copy is."""

    train_step: int
    """The next step to train."""
    since: int | None
    """The checkpoint that it adds to; None: it is all there is."""
    made_of: Mapping[str, Any]
    """Of the manifest."""
    layouts: Mapping[str, TableLayout]
    """Tables by name."""


def copy_to(
    memory: CopyMemory,
    about: About,
    dense: Mapping[str, Array],
    plan: Mapping[str, Array],
    changed: Mapping[str, Sequence[Changed]],
) -> int:
    """Copy a state into memory and commit it; return its bytes.

    Args:
        memory: nothing in it is needed any more.
        about: what it is.
        dense: arrays by name.
        plan: arrays by name.
        changed: by table, rows and where they lie.

    Raises:
        OSError: there is no room.
    """
    whole = {f"{DENSE}{name}": array for name, array in dense.items()}
    whole |= {f"{PLAN}{name}": array for name, array in plan.items()}
    specs = {name: spec_of_array(array) for name, array in whole.items()}
    for table, parts in changed.items():
        specs |= _row_specs(table, about.layouts[table], sum(len(part.rows) for part in parts))
    header, places, end = _header(about, specs)
    memory.reserve(end)
    memory.state = FILLING
    data = memory.bytes
    data[: len(header)] = np.frombuffer(header, np.uint8)
    for name, array in whole.items():
        _view(data, places[name], specs[name])[...] = array
    for table, parts in changed.items():
        names = [f"{ROWS}{table}/{kind}" for kind in ("rows", "values", "state")]
        rows, values, state = (_view(data, places[name], specs[name]) for name in names)
        start = 0
        for part in parts:
            stop = start + len(part.rows)
            rows[start:stop] = part.rows
            _gather(part.lent.records.values, part.lent.places, values[start:stop])
            _gather(part.lent.records.state, part.lent.places, state[start:stop])
            start = stop
    memory.state = COMMITTED
    return end


class Snapshot:
    """A committed copy, read where it lies."""

    def __init__(self, memory: CopyMemory) -> None:
        """Read the header."""
        self._data = memory.bytes
        size = int.from_bytes(self._data[:8].tobytes(), "little")
        body = json.loads(self._data[8 : 8 + size].tobytes())
        layouts = {table: TableLayout(**each) for table, each in body["layouts"].items()}
        self.about = About(
            train_step=body["train_step"],
            since=body["since"],
            made_of=body["made_of"],
            layouts=layouts,
        )
        self._specs = {
            name: (Spec(np.dtype(dtype), tuple(shape)), place)
            for name, (dtype, shape, place) in body["arrays"].items()
        }

    def arrays(self, prefix: str) -> dict[str, Array]:
        """Return the arrays whose names begin with a prefix, without it."""
        return {
            name.removeprefix(prefix): _view(self._data, place, spec)
            for name, (spec, place) in self._specs.items()
            if name.startswith(prefix)
        }

    def rows(self, table: str) -> tuple[NDArray[np.int64], Records]:
        """Return a table's rows, in no order, and their records."""
        found = self.arrays(f"{ROWS}{table}/")
        return found["rows"], Records(found["values"], found["state"])


def _row_specs(table: str, layout: TableLayout, count: int) -> dict[str, Spec]:
    dtype = np.dtype(layout.dtype)
    return {
        f"{ROWS}{table}/rows": Spec(np.dtype(np.int64), (count,)),
        f"{ROWS}{table}/values": Spec(dtype, (count, layout.dim)),
        f"{ROWS}{table}/state": Spec(dtype, (count, layout.state_width)),
    }


def _header(about: About, specs: Mapping[str, Spec]) -> tuple[bytes, dict[str, int], int]:
    """Return the first bytes of a copy, where each array begins, and where the last one ends."""
    offsets: dict[str, int] = {}
    end = 0
    for name, spec in specs.items():
        offsets[name] = end
        end += -(-spec.num_bytes // _ALIGNED) * _ALIGNED
    room = 0
    while True:  # places have more digits the longer the header is
        places = {name: room + offset for name, offset in offsets.items()}
        body = {
            "train_step": about.train_step,
            "since": about.since,
            "made_of": about.made_of,
            "layouts": {table: asdict(layout) for table, layout in about.layouts.items()},
            "arrays": {n: [str(s.dtype), s.shape, places[n]] for n, s in specs.items()},
        }
        text = json.dumps(body).encode()
        if 8 + len(text) <= room:
            return len(text).to_bytes(8, "little") + text, places, room + end
        room = -(-(8 + len(text) + 16 * len(specs)) // _ALIGNED) * _ALIGNED


def _view(data: NDArray[np.uint8], place: int, spec: Spec) -> Array:
    return data[place : place + spec.num_bytes].view(spec.dtype).reshape(spec.shape)


def _gather(source: Array, places: NDArray[np.int32] | None, out: Array) -> None:
    if not out.size:
        return
    if places is None:
        out[...] = source
    else:
        np.take(source, places, axis=0, out=out, mode="clip")  # `raise` would copy twice
