"""A stream of measurements, kept as the latest ones of each setting.

What is measured again at one setting takes the place of its own past, never that of
another setting, so that a job which ran for long at one size remembers the others.
Memory is bounded, and old settings fade. When a setting takes another time than it did,
nothing that is older says anything of the job, and only the later measurements stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from scheduler.model import Floats, Setting

LATEST = 32
"""Measurements that a cell keeps: their median outlives a straggler."""
MAX_CELLS = 1024
"""Settings that are kept, the latest ones."""
HALF_LIFE = 900.0
"""Seconds after which a setting counts half, if nothing newer was measured at it: a job that
becomes lighter is not held back for long by what it took before."""
DRIFT = 0.3
"""Log ratio of the later half of a cell's measurements to the earlier one, above which the job has
become another: a third more, or a quarter less."""
FORGOTTEN = 5.0
"""Half lives after which a setting is forgotten."""

Key = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """Measurements of one setting.

    Attributes:
        columns: the setting, mean of those that fell into the cell.
        seconds: the latest measurements, oldest first.
        tick: when the latest one was taken.
    """

    columns: tuple[float, ...]
    seconds: tuple[float, ...]
    tick: float


@dataclass(frozen=True, slots=True)
class Window:
    """All cells, by their rounded settings."""

    cells: Mapping[Key, Cell] = field(default_factory=lambda: MappingProxyType(dict[Key, Cell]()))

    def __len__(self) -> int:
        """Return the number of cells."""
        return len(self.cells)

    @property
    def num_measurements(self) -> int:
        """Measurements that are kept."""
        return sum(len(cell.seconds) for cell in self.cells.values())

    def columns(self) -> Floats:
        """Return (cells, fields) settings, in order of their keys."""
        return np.array([self.cells[key].columns for key in sorted(self.cells)], np.float64)

    def medians(self) -> Floats:
        """Return (cells,) median seconds."""
        return np.array([np.median(self.cells[key].seconds) for key in sorted(self.cells)])

    def weights(self) -> Floats:
        """Return (cells,) weights, 1 for what was measured last."""
        ticks = np.array([self.cells[key].tick for key in sorted(self.cells)], np.float64)
        return np.exp2((ticks - ticks.max(initial=-np.inf)) / HALF_LIFE)


def observe(window: Window, setting: Setting, seconds: Iterable[float], tick: float) -> Window:
    """Return the window with measurements added; those that are not positive are left out.

    Args:
        window: what was measured before.
        setting: n settings.
        seconds: (n,) measurements.
        tick: seconds on a clock that grows, of all of them.
    """
    cells = dict(window.cells)
    rows, keys = setting.columns().tolist(), setting.rounded().tolist()
    for row, exact, taken in zip(rows, keys, seconds, strict=True):
        if not 0.0 < taken < np.inf:
            continue
        key = tuple(exact)
        old = cells.pop(key, None)  # put back at the end: the order is that of the last use
        if old is None:
            cells[key] = Cell(tuple(row), (taken,), tick)
            continue
        count = len(old.seconds)
        mean = tuple((a * count + b) / (count + 1) for a, b in zip(old.columns, row, strict=True))
        cells[key] = Cell(mean, (*old.seconds, taken)[-LATEST:], max(tick, old.tick))
        if drifted(cells[key]):
            cells = {key: Cell(tuple(row), cells[key].seconds[LATEST // 2 :], tick)}
    for key in list(cells)[: max(0, len(cells) - MAX_CELLS)]:
        del cells[key]
    oldest = tick - FORGOTTEN * HALF_LIFE
    cells = {key: cell for key, cell in cells.items() if cell.tick >= oldest}
    return Window(MappingProxyType(cells))


def over(older: Window, newer: Window) -> Window:
    """Return the cells of both; where both measured a setting, those of the newer one."""
    return Window(MappingProxyType({**older.cells, **newer.cells}))


def drifted(cell: Cell) -> bool:
    """Tell whether a full cell's later measurements are of another job than its earlier ones.

    The middle halves of both must lie apart, so that neither noise nor stragglers count.
    """
    if len(cell.seconds) < LATEST:
        return False
    earlier, later = np.sort(np.log(cell.seconds).reshape(2, -1), axis=1)
    quarter = LATEST // 8
    rise, fall = later[quarter] - earlier[~quarter], earlier[quarter] - later[~quarter]
    return bool(max(rise, fall) > DRIFT)
