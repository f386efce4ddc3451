"""Names, paths and Arrow schemas of the files of a dataset; `formats/dataset.md` explains each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import Literal

import pyarrow as pa

FORMAT_VERSION = 1
MANIFEST = "MANIFEST.json"
SCHEMA = "schema.pbtxt"
JOB = "job.yaml"
SEGMENTS = "segments"
BLOCKS = "blocks.parquet"
FILES = "files.parquet"
STATISTICS = "statistics.pbtxt.zst"
ANOMALIES = "anomalies.pbtxt"
EVENTS = "events.parquet"
TOMBSTONES = "tombstones"
BUILDS = "builds"
"""Directory of the durations of builds, one file each; not part of the dataset."""
BLOCK = "block"
UNIQUE_INDEX = "unique_index"
TUPLE_INDEX = "tuple_index"
BUFFER_INDEX = "buffer_index"
SAMPLE_WEIGHT = "sample_weight"
SECONDS, MICROSECONDS = "seconds", "microseconds"
"""Fields of a time that is stored in two parts."""
SPLIT_TIME = pa.struct([(SECONDS, pa.int64()), (MICROSECONDS, pa.int32())])
"""Type of a time that is stored in two parts."""
TRAIN, EVALUATION = "train", "evaluation"

DATA_DIRECTORIES = ("samples/", "groups/", "tuples/", "buffers/")
"""Directories of samples and groups in a segment."""
FILE_SHIFT = 20
"""A block's id is `file_index << FILE_SHIFT | index_of_block_in_file`."""
HISTORIES = "histories"
EVENT_GAP, HISTORY_KEY, NUM_EVENTS = "_gap", "key", "num_events"
"""Columns of events beside those of the job, and of their keys."""
NUMBER_SHIFT = 32
"""A tuple's or buffer's index is `file_index << NUMBER_SHIFT | number_in_file`."""
REJECTS_SCHEMA = pa.schema(
    [
        pa.field("file", pa.string()),  # relative to the input directory
        # row in the file from 0; null if the file, or the rest of it, is unreadable
        pa.field("position", pa.int64()),
        pa.field("reason", pa.string()),
        pa.field("value", pa.string()),  # the row as text, cut at 1,000 characters
    ]
)
FILES_SCHEMA = pa.schema(
    [
        pa.field("path", pa.string()),  # relative to the directory of files.parquet
        pa.field("num_bytes", pa.int64()),
        pa.field("sha256", pa.string()),
        pa.field("region_offsets", pa.list_(pa.int64())),  # regions + 1 entries, 0 to num_bytes
        pa.field("region_crc32", pa.list_(pa.int64())),  # one per region
    ]
)
EDGES_SCHEMA = pa.schema([pa.field("row", pa.int64())])

TOMBSTONES_SCHEMA = pa.schema(
    [
        pa.field("segment", pa.string()),
        pa.field("block", pa.int64()),
        pa.field("sample_index", pa.int32()),  # index in the block
        pa.field("file_row", pa.int64()),  # row of the block's file in samples/
        pa.field("reason", pa.string()),  # column whose value was to be erased
        pa.field("erased_at", pa.timestamp("us")),  # UTC
    ]
)
"""Deleted samples: one row each, sorted by segment, block and index in the block."""


def inverse_column(group: str) -> str:
    """Return the name of a group's inverse indices in `samples`."""
    return f"{group}_inverse"


def count_column(history: str) -> str:
    """Return the name of the number of own events that a sample sees, in `samples`."""
    return f"{history}_count"


def internal_columns(groups: Iterable[str], histories: Iterable[str]) -> set[str]:
    """Return the columns of samples and groups that are not the job's."""
    return {BLOCK, UNIQUE_INDEX, *map(inverse_column, groups), *map(count_column, histories)}


def weights_column(feature: str) -> str:
    """Return the name of the column that holds the weights of a list's entries."""
    return f"{feature}_weights"


def num_unique_column(group: str) -> str:
    """Return the name of a group's unique tuples per block in `blocks.parquet`."""
    return f"{group}_num_unique"


def part_path(file_index: int, *folders: str) -> str:
    """Return a file of a part below some folders; its name is the same in all of them.

    Example:
        >>> part_path(7, "groups", "user")
        'groups/user/00007.parquet'
    """
    return str(PurePosixPath(*folders, f"{file_index:05d}.parquet"))


def pending_path(history: str, file_index: int) -> str:
    """Return the path of a part's events that are available after the segment's day."""
    return part_path(file_index, HISTORIES, history, "pending")


def history_paths(history: str, file_index: int) -> tuple[str, str]:
    """Return the paths of the events of a part, and of their keys.

    Example:
        >>> history_paths("plays", 7)
        ('histories/plays/events/00007.parquet', 'histories/plays/keys/00007.parquet')
    """
    events, keys = (part_path(file_index, HISTORIES, history, f) for f in ("events", "keys"))
    return events, keys


WINDOW_SUFFIXES = ("_window_buffer", "_window_start", "_window_length")
"""Suffixes of the columns that replace a windowed list feature."""


def window_columns(feature: str) -> tuple[str, str, str]:
    """Return the columns that replace a windowed list feature: buffer, start, length."""
    buffer, start, length = (feature + suffix for suffix in WINDOW_SUFFIXES)
    return buffer, start, length


def blocks_schema(groups: Iterable[str]) -> pa.Schema:
    """Return the columns of `blocks.parquet`: one row per block, in training order."""
    return pa.schema(
        [
            pa.field(BLOCK, pa.int64()),
            pa.field("split", pa.string()),
            pa.field("window", pa.int32()),
            pa.field("file", pa.int32()),
            pa.field("row_group", pa.int32()),
            pa.field("num_samples", pa.int32()),
            pa.field("num_sessions", pa.int32()),  # sessions that start in the block
            pa.field("weight", pa.float64()),  # sum of the weights of its samples
            pa.field("num_lookups", pa.int64()),  # entries of sparse features, of each sample
            pa.field("num_lookups_dedup", pa.int64()),  # the same, of each unique tuple
            *(pa.field(num_unique_column(group), pa.int32()) for group in groups),
        ]
    )


def access_schema() -> pa.Schema:
    """Return the columns of an access list: one row per training block, in training order."""
    return pa.schema([pa.field(BLOCK, pa.int64()), pa.field("gaps", pa.large_list(pa.int64()))])


USES_SCHEMA = pa.schema(
    [
        pa.field("first_step", pa.int32()),  # of the segment in the epoch
        pa.field("last_step", pa.int32()),
    ]
)


def index_schema() -> pa.Schema:
    """Return the columns of an index file: one row per step of the stored epochs.

    `distances` has one next-use distance per entry of the step, in ascending order of the segment's
    row numbers; 0 means not used again in this segment and epoch.
    """
    return pa.schema(
        [pa.field("step", pa.int64()), pa.field("distances", pa.large_list(pa.int32()))]
    )


def reuse_schema(bounds: Sequence[int]) -> pa.Schema:
    """Return the columns of a file of reuse: one row per step of the stored epochs.

    `next_D` is the number of rows whose next use in the segment and epoch is at most D steps later,
    and further than the bound before D; `previous_D` the same of the previous use.
    """
    names = ["num_rows", *reuse_columns("next", bounds), *reuse_columns("previous", bounds)]
    return pa.schema([pa.field(name, pa.int32()) for name in names])


def reuse_columns(kind: Literal["next", "previous"], bounds: Sequence[int]) -> list[str]:
    """Return the names of the columns of reuse at distances up to some bounds."""
    return [f"{kind}_{bound}" for bound in bounds]


def tombstones_path(sha256: str) -> str:
    """Return the path of a file of deleted samples, relative to the dataset.

    Example:
        >>> tombstones_path("0123456789abcdef")
        'tombstones/0123456789ab.parquet'
    """
    return str(PurePosixPath(TOMBSTONES, f"{sha256[:12]}.parquet"))
