"""Files behind a URL, through Beam's filesystems."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import BinaryIO, cast

from apache_beam.io.filesystem import BeamIOError, CompressionTypes
from apache_beam.io.filesystems import FileSystems

from pipelines.beam.runner import pipeline_options
from schemas.errors import SchemaError


def use_options(beam_args: list[str]) -> None:
    """Tell Beam's filesystems the options of a command.

    Raises:
        SchemaError: an option is unknown to Beam.
    """
    FileSystems.set_options(pipeline_options(beam_args))


_NOT_INSTALLED = ("Missing boto3", "Failed to import")
"""How Beam says that a filesystem of its extras, S3 or HDFS, is not installed."""


def files(root: str) -> Iterator[tuple[str, int]]:
    """Yield the files below a URL, at any depth, with their sizes.

    Raises:
        SchemaError: it cannot be listed.
    """
    top = root.rstrip("/") + "/"
    try:
        (match,) = FileSystems.match([f"{top}**"])
    except (ValueError, BeamIOError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, ValueError) or any(word in reason for word in _NOT_INSTALLED):
            scheme = root.partition("://")[0]
            raise SchemaError(
                f"input must lie where Beam reaches, got {scheme}://; install Beam with its extra",
                file=root,
            ) from error
        raise SchemaError(
            f"input must be readable, got {reason}; check --input", file=root
        ) from error
    if not match.metadata_list:
        raise SchemaError("input must be a directory, got none; check --input", file=root)
    for entry in match.metadata_list:
        yield entry.path.removeprefix(top), entry.size_in_bytes


def size(place: str, path: str) -> int:
    """Return the bytes of a file.

    Args:
        place: its URL.
        path: its name in errors.

    Raises:
        OSError: it is not there.
    """
    if not FileSystems.exists(place):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    (match,) = FileSystems.match([place])
    return match.metadata_list[0].size_in_bytes


def open_stored(place: str) -> BinaryIO:
    """Return a file to read from anywhere; bytes as they are stored."""
    stored = CompressionTypes.UNCOMPRESSED
    return cast(BinaryIO, FileSystems.open(place, compression_type=stored))
