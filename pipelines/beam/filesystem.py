"""Input files at URLs, through Beam's filesystems."""

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
    """Configure Beam's filesystems with the options of a command.

    Raises:
        SchemaError: an option is unknown to Beam.
    """
    FileSystems.set_options(pipeline_options(beam_args))


_NOT_INSTALLED = ("Missing boto3", "Failed to import")
"""Parts of Beam's errors for a filesystem, S3 or HDFS, whose extra is not installed."""


def files(root: str) -> Iterator[tuple[str, int]]:
    """Yield the files below a URL, at any depth, with their sizes.

    Raises:
        SchemaError: the URL cannot be listed.
    """
    base = root.rstrip("/") + "/"
    try:
        (match,) = FileSystems.match([f"{base}**"])
    except (ValueError, BeamIOError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, ValueError) or any(word in reason for word in _NOT_INSTALLED):
            scheme = root.partition("://")[0]
            raise SchemaError(
                f"Beam has no filesystem for {scheme}://; install Beam with its extra",
                file=root,
            ) from error
        raise SchemaError(f"input cannot be listed: {reason}; check --input", file=root) from error
    if not match.metadata_list:
        raise SchemaError("input must be a directory, got none; check --input", file=root)
    for entry in match.metadata_list:
        yield entry.path.removeprefix(base), entry.size_in_bytes


def size(url: str, path: str) -> int:
    """Return the bytes of a file.

    Args:
        url: of the file.
        path: its name in errors.

    Raises:
        FileNotFoundError: the file does not exist.
    """
    if not FileSystems.exists(url):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    (match,) = FileSystems.match([url])
    return match.metadata_list[0].size_in_bytes


def open_stored(url: str) -> BinaryIO:
    """Open a file for reading and seeking, without decompression."""
    stored = CompressionTypes.UNCOMPRESSED
    return cast(BinaryIO, FileSystems.open(url, compression_type=stored))
