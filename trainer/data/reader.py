"""From a dataset to batches in training order, cut from decoded row groups."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import TypeVar

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from schemas.dataset import Dataset, Segment, absent_columns, read_with_absent
from schemas.files import CheckedFile
from schemas.group_files import read_group
from schemas.layout import EVALUATION, TRAIN, samples_path
from schemas.order import Order, Step
from trainer.data.collate import Batch, Piece, collate
from trainer.data.decode import SAMPLES, BatchSpec, BlockCounts, RowGroup, decode
from trainer.data.lookup import Transpose, transpose
from trainer.data.microbatches import Leaves, leaves_of

CACHE_BYTES = 512 << 20
"""Decoded row groups that are kept; training order reads each row group from start to end."""

T = TypeVar("T")
R = TypeVar("R")


class _SegmentBlocks:
    """Where the blocks of one segment lie: arrays over positions in `blocks.parquet`."""

    def __init__(self, segment: Segment, groups: Sequence[str]) -> None:
        self.segment = segment
        self.file = segment.column("file")
        self.row_group = segment.column("row_group")
        self._blocks = segment.block_names
        self._samples = segment.column("num_samples")
        self._uniques = {group: segment.num_unique(group) for group in groups}
        place = self.file << 32 | self.row_group
        self._by_place = np.lexsort((self._blocks, place))
        self._places = place[self._by_place]
        self.index = np.empty(len(place), np.int64)
        first = np.searchsorted(self._places, self._places)
        self.index[self._by_place] = np.arange(len(place)) - first

    def counts(self, file: int, row_group: int) -> BlockCounts:
        """Return the blocks of a row group, in file order."""
        place = file << 32 | row_group
        start, end = np.searchsorted(self._places, [place, place + 1])
        chosen = self._by_place[start:end]
        return BlockCounts(
            blocks=self._blocks[chosen],
            samples=self._samples[chosen],
            uniques={group: counts[chosen] for group, counts in self._uniques.items()},
        )


class Reader:
    """Reads the batch of any step; what it returns depends on the step alone.

    Not safe for several threads at once.
    """

    def __init__(
        self,
        dataset: Dataset,
        order: Order,
        spec: BatchSpec,
        *,
        expanded: bool = False,
        sides: bool = False,
        transpose: Transpose = transpose,
    ) -> None:
        """Find out where the blocks lie; no data file is opened yet.

        Args:
            dataset: open dataset.
            order: global order of the run.
            spec: what a batch is made of.
            expanded: undo the deduplication, for comparison.
            sides: find what samples share, for models that compute it once.
            transpose: how look-ups are sorted.
        """
        self._transpose = transpose
        self._spec = spec
        self._order = order
        self._expanded = expanded
        self._sides = sides
        self._segments = [_SegmentBlocks(s, spec.groups) for s in dataset.segments]
        self._absent = [absent_columns(dataset, s) for s in dataset.segments]
        self._files: dict[tuple[int, str], CheckedFile] = {}
        self._decoded: OrderedDict[tuple[int, int, int], RowGroup] = OrderedDict()

    def read(self, train_step: int) -> Batch:
        """Return the batch of a step.

        Raises:
            SchemaError: a file is missing, a byte of it has changed, or its content does not fit.
        """
        step = self._order.step(train_step)
        train = self._segments[step.segment].segment.positions(TRAIN)
        return self._assemble(step, train[step.positions])

    def leaves(
        self,
        train_step: int,
        run: slice = slice(None),
        rows: Mapping[str, NDArray[np.int64]] | None = None,
    ) -> Leaves:
        """Return the blocks of a step, each by itself.

        Args:
            train_step: position in the run.
            run: which of its blocks, none only where rows are given; all when left out.
            rows: by table, all rows that the step looks up; None: those of the chosen blocks.

        Raises:
            SchemaError: a file is missing, a byte of it has changed, or its content does not fit.
        """
        step = self._order.step(train_step)
        train = self._segments[step.segment].segment.positions(TRAIN)
        chosen = range(len(step.positions))[run]
        batches = [self._assemble(step, train[step.positions[i : i + 1]]) for i in chosen]
        return leaves_of(step, chosen.start, batches, rows, self._transpose)

    def evaluation_batches(self) -> Iterator[Batch]:
        """Yield the samples of the evaluation split once, in stored order."""
        count = 0
        for index, segment in enumerate(self._segments):
            positions = segment.segment.positions(EVALUATION)
            for start in range(0, len(positions), self._order.blocks_per_batch):
                chosen = positions[start : start + self._order.blocks_per_batch]
                yield self._assemble(Step(count, 0, index, chosen), chosen)
                count += 1

    def blocks_of(self, step: Step) -> NDArray[np.int64]:
        """Return the ids of a training step's blocks, in batch order."""
        segment = self._segments[step.segment].segment
        return segment.block_names[segment.positions(TRAIN)[step.positions]]

    def _assemble(self, step: Step, positions: NDArray[np.int64]) -> Batch:
        blocks = self._segments[step.segment]
        pieces: list[Piece] = []
        for position in positions.tolist():
            place = (step.segment, int(blocks.file[position]), int(blocks.row_group[position]))
            index = int(blocks.index[position])
            row_group = self._row_group(*place)
            if pieces and pieces[-1].row_group is row_group and pieces[-1].end == index:
                pieces[-1] = Piece(row_group, pieces[-1].start, index + 1)
            else:
                pieces.append(Piece(row_group, index, index + 1))
        return collate(
            self._spec,
            step,
            pieces,
            expanded=self._expanded,
            sides=self._sides,
            transpose=self._transpose,
        )

    def _row_group(self, segment: int, file: int, row_group: int) -> RowGroup:
        place = (segment, file, row_group)
        if place in self._decoded:
            self._decoded.move_to_end(place)
            return self._decoded[place]

        open_file = partial(self._file, segment)

        def read(owner: str, columns: list[str]) -> pa.Table:
            def stored(present: list[str]) -> pa.Table:
                if owner == SAMPLES:
                    return open_file(samples_path(file)).read_row_group(row_group, present)
                return read_group(open_file, owner, file, row_group, present)

            return read_with_absent(stored, columns, self._absent[segment])

        blocks = self._segments[segment]
        decoded = decode(self._spec, blocks.counts(file, row_group), read)
        decoded = decoded.without(blocks.segment.forgotten_rows(file, row_group))
        self._decoded[place] = decoded
        while len(self._decoded) > 1 and (
            sum(d.num_bytes for d in self._decoded.values()) > CACHE_BYTES
        ):
            self._decoded.popitem(last=False)
        return decoded

    def _file(self, segment: int, path: str) -> CheckedFile:
        if (segment, path) not in self._files:
            file = self._segments[segment].segment.file(path, texts_as_codes=True)
            self._files[segment, path] = file
        return self._files[segment, path]


def prefetched(
    function: Callable[[T], R], items: Iterable[T], depth: int
) -> Generator[R, None, None]:
    """Yield function(item) of each item in order, computed up to `depth` ahead in one thread.

    It takes no other thread to help it: they would wait for its small pieces of work, spinning.
    """
    remaining = iter(items)
    alone = {"initializer": torch.set_num_threads, "initargs": (1,)}
    with ThreadPoolExecutor(1, "reader", **alone) as pool:
        ahead: list[Future[R]] = [pool.submit(function, i) for i in islice(remaining, depth)]
        try:
            while ahead:
                result = ahead.pop(0).result()
                ahead.extend(pool.submit(function, i) for i in islice(remaining, 1))
                yield result
        finally:
            for future in ahead:
                future.cancel()
