"""The statistics of a segment as a file: text, compressed."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from google.protobuf import text_format
from tensorflow_metadata.proto.v0 import statistics_pb2

from pipelines.statistics.text import parsed_statistics
from schemas.dataset import Segment, verified
from schemas.errors import SchemaError
from schemas.layout import PLAIN_STATISTICS, STATISTICS

COMPRESSION_LEVEL = 9
"""Of zstd. The text of 17 columns, 541 kB: 35 kB in 11 ms, 44 kB in 2 ms at level 3, 34 kB in 49 ms
at 15 and 29 kB in 293 ms at 19 (benchmarks/storage.md, 2026-11-23)."""


def write_statistics(segment: Path, text: str) -> None:
    """Write the text of a DatasetFeatureStatisticsList into a segment's directory."""
    codec = pa.Codec("zstd", compression_level=COMPRESSION_LEVEL)
    (segment / STATISTICS).write_bytes(codec.compress(text.encode(), asbytes=True))


def statistics_in(segment: Path) -> Path:
    """Return the file of a segment's statistics; before 2026-11-23 they were not compressed."""
    plain = segment / PLAIN_STATISTICS
    return plain if plain.exists() else segment / STATISTICS


def read_statistics(path: Path) -> statistics_pb2.DatasetFeatureStatisticsList:
    """Return the statistics in a file of either name.

    Raises:
        SchemaError: the file is damaged.
    """
    try:
        data = path.read_bytes()
        if path.name == STATISTICS:
            data = pa.CompressedInputStream(pa.py_buffer(data), "zstd").read()
        return parsed_statistics(data.decode())
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise SchemaError(
            f"statistics cannot be read: {error}; restore the file or rebuild the dataset",
            file=str(path),
        ) from error


def segment_statistics(segment: Segment) -> statistics_pb2.DatasetFeatureStatisticsList:
    """Return the statistics of an open segment.

    Raises:
        SchemaError: the file is missing or changed.
    """
    name = PLAIN_STATISTICS if PLAIN_STATISTICS in segment.files else STATISTICS
    path = segment.directory / name
    return read_statistics(verified(path, segment.files[name].sha256))
