"""Rows in any order, given back ascending in bounded memory: an external merge sort.

Rows are collected until they are `RUN_BYTES`, sorted and written to a file of
their own, a run. They come back by merging runs, a piece of each in memory at a
time. All I/O is sequential but for the step from run to run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from schemas.jagged import Array
from trainer.stores.bucket_file import BucketFiles, Entries, joined

RUN_BYTES = 32 << 20
"""Rows that are sorted in memory at once."""
PIECE_BYTES = 256 << 10
"""Of each run, what is in memory while runs are merged."""
Part = tuple[NDArray[np.int64], Array]
"""(rows, (len(rows), width) records)."""


def merged(streams: Sequence[Iterator[Part]]) -> Iterator[Part]:
    """Merge ascending streams of rows; no row is in two of them, no part is empty.

    In memory is one part of each stream.

    Example:
        >>> one = iter([(np.array([1, 4]), np.array([[10], [40]]))])
        >>> other = iter([(np.array([2]), np.array([[20]])), (np.array([9]), np.array([[90]]))])
        >>> [rows.tolist() for rows, _ in merged([one, other])]
        [[1, 2], [4], [9]]
    """
    heads = [(part, stream) for stream in streams if (part := next(stream, None)) is not None]
    while heads:
        bound = min(int(rows[-1]) for (rows, _), _ in heads)
        taken: list[Part] = []
        left: list[tuple[Part, Iterator[Part]]] = []
        for (rows, block), stream in heads:
            cut = int(np.searchsorted(rows, bound, side="right"))
            taken.append((rows[:cut], block[:cut]))
            rest = (rows[cut:], block[cut:]) if cut < len(rows) else next(stream, None)
            if rest is not None:
                left.append((rest, stream))
        heads = left
        found = np.concatenate([rows for rows, _ in taken])
        order = np.argsort(found)
        yield found[order], np.concatenate([block for _, block in taken])[order]


class SortedRuns:
    """Takes the rows of some tables, then gives those of each table ascending."""

    def __init__(self, files: BucketFiles, num_tables: int, *, run_bytes: int = RUN_BYTES) -> None:
        """Start empty.

        Args:
            files: where runs are written; rows that are fewer than a run stay in memory.
            num_tables: tables are numbers below it.
            run_bytes: rows that are sorted in memory at once.
        """
        self._files = files
        self._num_tables = num_tables
        self._run_bytes = run_bytes
        self._waiting: list[Entries] = []
        self._pieces: list[list[int]] = []  # of each run, the first piece of each table, and an end
        self._rest: list[Entries] = []  # by table, what was not written

    def add(self, parts: Iterable[Entries]) -> None:
        """Take rows, each row of a table once; the arrays must not change any more."""
        for entries in parts:
            self._waiting.append(entries)
            if sum(e.num_bytes for e in self._waiting) >= self._run_bytes:
                self._write_run()

    def table(self, number: int) -> Iterator[Part]:
        """Yield the rows of a table, ascending, and their records, after all were added."""
        if not self._rest:
            self._rest = self._sorted()
        rest = self._rest[number]
        streams = [self._part(run, number) for run in range(len(self._pieces))]
        if len(rest):
            streams.append(iter([(rest.rows, rest.block)]))
        return merged(streams)

    def remove(self) -> None:
        """Forget all rows, and give the space of files back."""
        for run in range(len(self._pieces)):
            self._files.remove(_run_name(run))
        self._pieces, self._rest, self._waiting = [], [], []

    def _sorted(self) -> list[Entries]:
        """Return what waits, the rows of each table ascending, and wait for others."""
        entries = joined(self._waiting, self._files.width, self._files.dtype)
        self._waiting = []
        entries = entries.take(np.lexsort((entries.rows, entries.tables)))
        cuts = np.searchsorted(entries.tables, np.arange(self._num_tables + 1)).tolist()
        return [entries.take(slice(a, b)) for a, b in pairwise(cuts)]

    def _write_run(self) -> None:
        name = _run_name(len(self._pieces))
        pieces = [0]
        for entries in self._sorted():
            self._files.append(name, [entries])
            pieces.append(self._files.num_pieces(name))
        self._pieces.append(pieces)

    def _part(self, run: int, number: int) -> Iterator[Part]:
        first, end = self._pieces[run][number : number + 2]
        for entries in self._files.read(_run_name(run), first, end):
            yield entries.rows, entries.block


def _run_name(run: int) -> str:
    return f"run-{run:05d}.bin"
