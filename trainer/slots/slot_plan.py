"""The plan of the slots of all tables, step by step, in files that the ranks of a machine share.

A table of slots has one part a shard: the whole table, or row-wise one part a rank. Each part has a
cache plan of its own, so row r of step s is in one slot, whatever the ranks do. What a step changes
is stored, not what it uses, and ranks follow these changes:

    slot-plan-<hash of the settings>/
      lock            held by the process that plans
      rows.npy        rows that the run uses, ascending by table: a key is a position in it
      plan.json       rows and slots of each table
      00000000.parquet  fetches and evictions of `CHUNK_STEPS` steps, by step, table and part
      error.json      why the plan ends

Keys and slots count through all tables: `key_starts` and `slot_starts` say where one begins.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from presage.schemas.arrays import Array, offsets_of
from presage.schemas.dataset.files import replace_bytes
from presage.schemas.dataset.manifest import canonical_json
from presage.schemas.dataset.opened import (
    OpenDataset,
    open_dataset,
    reading_histories,
    select_segments_by_hash,
)
from presage.schemas.dataset.order import Order
from presage.schemas.errors import PlanError, SchemaError
from presage.schemas.storage.locks import lock_file

CHUNK_STEPS = 32
"""Steps of a file."""
ROWS, HEADER, ERROR, LOCK = "rows.npy", "plan.json", "error.json", "lock"
PREFIX = "slot-plan-"
_PLANNER = "presage.trainer.slots"
"""Module of the process that plans."""
_POLL_SEC = 0.01
_KEPT_CHUNKS = 3
"""Decoded files: of the step that is trained, and of those that are read ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSettings:
    """What a plan depends on, beside the dataset and the order."""

    cache_rows: Mapping[str, int]
    """Slots of each table of the job, at most."""
    num_parts: int
    """Parts of each table: 1, or the number of ranks among which TorchRec divides rows."""
    prefetch_steps: int
    first_step: int

    def folder(self, directory: Path, dataset: OpenDataset, order: Order) -> Path:
        """Return the folder of the plan."""
        segments = [segment.reference.manifest_sha256 for segment in dataset.segments]
        parts = [segments, order.blocks_per_batch, order.epochs, asdict(order.config), asdict(self)]
        digest = hashlib.sha256(canonical_json(parts).encode()).hexdigest()
        return directory / f"{PREFIX}{digest[:16]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTable:
    """Size of one table's cache."""

    name: str
    num_keys: int
    """Distinct rows that the run uses."""
    part_slots: int
    """Slots of each part."""
    part_rows: int
    """Rows of each part of the full table: row r is in part r // part_rows."""

    def part_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the part of each row."""
        return (rows.view(np.uint64) // np.uint64(self.part_rows)).view(np.int64)


@dataclass(frozen=True)
class PlanHeader:
    """Sizes of all tables, in order."""

    tables: tuple[PlannedTable, ...]
    num_parts: int
    end_step: int

    @cached_property
    def key_starts(self) -> NDArray[np.int64]:
        """(tables + 1,) the first key of each table."""
        return offsets_of(np.array([table.num_keys for table in self.tables], np.int64))

    @cached_property
    def slot_starts(self) -> NDArray[np.int64]:
        """(tables + 1,) the first slot of each table."""
        sizes = [table.part_slots * self.num_parts for table in self.tables]
        return offsets_of(np.array(sizes, np.int64))

    def to_json(self) -> str:
        """Return the text of `plan.json`."""
        return canonical_json(asdict(self))

    @staticmethod
    def from_json(text: str) -> PlanHeader:
        """Return the inverse of `to_json`."""
        body = json.loads(text)
        tables = tuple(PlannedTable(**table) for table in body.pop("tables"))
        return PlanHeader(tables, **body)


# ---- Steps ----

_COLUMNS = {
    "fetched": pa.int64(),  # keys, ascending
    "slots": pa.int32(),  # of the fetched keys
    "evicted": pa.int32(),  # slots that are freed after the step
    "next_use": pa.int32(),  # step of the next use of their rows, `NEVER_AGAIN` without one
}


@dataclass(frozen=True, slots=True)
class SlotStep:
    """What one step changes in the slots of some tables and parts.

    Attributes:
        fetched: (n,) int64, keys of the rows that are put into slots before the step.
        slots: (n,) int32, their slots.
        evicted: (m,) int32, slots that are freed after the step.
        next_use: (m,) int32, step of the next use of their rows, or `NEVER_AGAIN`.
    """

    fetched: NDArray[np.int64]
    slots: NDArray[np.int32]
    evicted: NDArray[np.int32]
    next_use: NDArray[np.int32]


class PlanChunk:
    """Changes of some steps: of all parts, or of one of each table."""

    def __init__(self, columns: Mapping[str, tuple[Array, NDArray[np.int64]]]) -> None:
        """Keep the columns: values, and offsets by step."""
        self._columns = columns

    def step(self, index: int) -> SlotStep:
        """Return what a step of the chunk changes."""
        parts = {name: v[o[index] : o[index + 1]] for name, (v, o) in self._columns.items()}
        return SlotStep(**parts)


def encode_chunk(steps: Sequence[Sequence[SlotStep]]) -> pa.Table:
    """Return the changes of each table and part of some steps, one after the other."""
    units = [unit for step in steps for unit in step]
    columns: dict[str, pa.Array] = {}
    for name, kind in _COLUMNS.items():
        values = [getattr(unit, name) for unit in units]
        offsets = offsets_of(np.array(list(map(len, values)), np.int64)).astype(np.int32)
        flat = pa.array(np.concatenate(values) if values else [], kind)
        columns[name] = pa.ListArray.from_arrays(pa.array(offsets), flat)
    return pa.table(columns)


def write_chunk(path: Path, table: pa.Table) -> None:
    """Write the file of a chunk; readers see all of it or nothing."""
    partial = path.with_suffix(".partial")
    pq.write_table(
        table,
        partial,
        compression="zstd",
        use_dictionary=False,
        column_encoding={f"{name}.list.element": "DELTA_BINARY_PACKED" for name in _COLUMNS},
    )
    partial.rename(path)


def _decode_chunk(
    path: Path, num_units: int, own: NDArray[np.bool_] | None, shifts: NDArray[np.int64] | None
) -> PlanChunk:
    """Read a chunk; of some units, by table and part, with their slots shifted."""
    columns: dict[str, tuple[Array, NDArray[np.int64]]] = {}
    for name, column in zip(_COLUMNS, pq.read_table(path).columns, strict=True):
        lists = column.combine_chunks()
        values, offsets = lists.flatten().to_numpy(), lists.offsets.to_numpy().astype(np.int64)
        if own is not None:
            units = np.tile(own, (len(offsets) - 1) // num_units)
            lengths = np.diff(offsets)
            values = values[np.repeat(units, lengths)]
            lengths[~units] = 0
            offsets = offsets_of(lengths)
            if shifts is not None and name in ("slots", "evicted"):
                of_units = np.tile(shifts, (len(offsets) - 1) // num_units)
                values = (values - np.repeat(of_units, lengths)).astype(np.int32)
        columns[name] = values, offsets[::num_units]
    return PlanChunk(columns)


class SlotPlan:
    """The plan of a run, as the process that plans writes it; used by several threads."""

    def __init__(
        self, directory: Path, dataset: OpenDataset, order: Order, settings: SlotSettings
    ) -> None:
        """Wait for the sizes of all tables; the process that plans is started if none does.

        Raises:
            PlanError: `cache_rows` is too small for a table; the message names the size that works.
            SchemaError: the dataset has no index of this order; the message says how to build it.
        """
        self.settings = settings
        self.folder = settings.folder(directory, dataset, order)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / ERROR).unlink(missing_ok=True)
        self._job = dataset, order
        self._planner: subprocess.Popen[bytes] | None = None
        self._wait_for(HEADER)
        self.header = PlanHeader.from_json((self.folder / HEADER).read_text())
        self.rows: NDArray[np.int64] = np.load(
            self.folder / ROWS, mmap_mode="r", allow_pickle=False
        )
        """(keys,) int64, the row of each key; a mapped file."""

    @property
    def first_step(self) -> int:
        """The first step of the plan, before which no row is in a slot."""
        return self.settings.first_step

    def reader(
        self, own: NDArray[np.bool_] | None = None, shifts: NDArray[np.int64] | None = None
    ) -> PlanReader:
        """Return a reader of all tables and parts, or of some.

        Args:
            own: (tables * parts,) whether a part is read; None: all are.
            shifts: (tables * parts,) subtracted from the slots of each part.
        """
        return PlanReader(self, own, shifts)

    def chunk_path(self, train_step: int) -> Path:
        """Return the file of a step, once it is complete."""
        first = self.first_step + (train_step - self.first_step) // CHUNK_STEPS * CHUNK_STEPS
        return self._wait_for(f"{first:08}.parquet")

    def close(self) -> None:
        """End the process that plans, if this process has started it."""
        if self._planner is not None:
            assert self._planner.stdin is not None, "it was started with a pipe"
            self._planner.stdin.close()
            self._planner.wait()

    def _wait_for(self, name: str) -> Path:
        path = self.folder / name
        while not path.exists():
            if (self.folder / ERROR).exists():
                raise _error_in(self.folder / ERROR)
            self._start_planner(path)
            time.sleep(_POLL_SEC)
        return path

    def _start_planner(self, path: Path) -> None:
        """Start the process that plans, unless one holds the lock, or has just written a file."""
        with (self.folder / LOCK).open("a") as lock:
            if not lock_file(lock) or path.exists() or (self.folder / ERROR).exists():
                return
            if self._planner is not None and self._planner.poll() not in (None, 0):
                raise SchemaError(
                    f"process that plans the slots ended with status {self._planner.returncode}; "
                    "its message is above",
                    file=str(self.folder),
                )
            self._planner = subprocess.Popen(
                [sys.executable, "-m", _PLANNER, str(self.folder)],
                stdin=subprocess.PIPE,
                pass_fds=[lock.fileno()],  # the lock ends with both processes
            )
        assert self._planner.stdin is not None, "it was started with a pipe"
        self._planner.stdin.write(encode_job(*self._job, self.settings).encode() + b"\n")
        self._planner.stdin.flush()


class PlanReader:
    """Reads steps of a plan, some of whose files are kept; used by one thread at a time."""

    def __init__(
        self, plan: SlotPlan, own: NDArray[np.bool_] | None, shifts: NDArray[np.int64] | None
    ) -> None:
        self._plan, self._own, self._shifts = plan, own, shifts
        self._chunks = OrderedDict[Path, PlanChunk]()

    def step(self, train_step: int) -> SlotStep:
        """Return what a step changes; wait until it is planned."""
        path = self._plan.chunk_path(train_step)
        if path not in self._chunks:
            units = len(self._plan.header.tables) * self._plan.header.num_parts
            self._chunks[path] = _decode_chunk(path, units, self._own, self._shifts)
            while len(self._chunks) > _KEPT_CHUNKS:
                self._chunks.popitem(last=False)
        return self._chunks[path].step((train_step - self._plan.first_step) % CHUNK_STEPS)


def encode_job(dataset: OpenDataset, order: Order, settings: SlotSettings) -> str:
    """Return a line from which another process opens the same dataset and order."""
    job = {
        "dataset": str(dataset.directory),
        "segments": [segment.reference.manifest_sha256 for segment in dataset.segments],
        "order": {
            "batch_samples": order.blocks_per_batch * dataset.job.data.block_samples,
            "epochs": order.epochs,
            "shuffle": order.config.shuffle,
            "seed": order.config.seed,
        },
        "histories": dataset.histories,
        "settings": asdict(settings),
    }
    return canonical_json(job)


def decode_job(text: str) -> tuple[OpenDataset, Order, SlotSettings]:
    """Return what `encode_job` was given."""
    job = json.loads(text)
    dataset = select_segments_by_hash(open_dataset(job["dataset"]), job["segments"])
    windows = {name: tuple(window) for name, window in job["histories"].items()}
    dataset = reading_histories(dataset, windows)
    return dataset, dataset.order(**job["order"]), SlotSettings(**job["settings"])


def write_error(folder: Path, error: Exception) -> None:
    """Write why the plan ends."""
    required = error.required_rows if isinstance(error, PlanError) else None
    text = canonical_json({"message": str(error), "required_rows": required})
    replace_bytes(folder / ERROR, text.encode())


def _error_in(path: Path) -> SchemaError | PlanError:
    body = json.loads(path.read_text())
    message, required = body["message"], body["required_rows"]
    return SchemaError(message) if required is None else PlanError(message, required_rows=required)
