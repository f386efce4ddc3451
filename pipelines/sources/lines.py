r"""Lines of text files: where they end, and how they are read in blocks of bounded memory.

A line ends with `\n`, `\r\n` or `\r`. A line longer than `MAX_ROW_BYTES` is skipped, not kept.
"""

from __future__ import annotations

import codecs
import re
from typing import BinaryIO

import pyarrow as pa

from pipelines.sources.listing import first_line, is_transient

MAX_ROW_BYTES = 16 << 20
"""A longer row, its line end included, is rejected: it is more likely no row at all."""

SHOWN_BYTES = 4000
"""Most bytes of a row that a reject shows."""

LINE_END = re.compile(rb"\r\n?|\n")

_READ_BYTES = 1 << 20


class TextStream:
    """Text that is read in pieces, and why it ended before its end, if it did.

    Attributes:
        final: whether all has been read.
        problem: why no more can be read, empty while it can.
    """

    def __init__(self, file: BinaryIO, num_bytes: int | None) -> None:
        """Start where a file stands.

        Args:
            file: decompressed.
            num_bytes: what it must hold from there on; None to its end.
        """
        self.final = False
        self.problem = ""
        self._file = file
        self._left = num_bytes

    def read(self, size: int) -> bytes:
        """Return `size` bytes, fewer only at the end or where no more can be read."""
        pieces: list[bytes] = []
        while size > 0 and not self.final and not self.problem:
            pieces.append(self._piece(size))
            size -= len(pieces[-1])
        return b"".join(pieces)

    def _piece(self, size: int) -> bytes:
        size = min(size, _READ_BYTES)
        try:
            data = self._file.read(size if self._left is None else min(size, self._left))
        except (OSError, pa.ArrowException) as error:
            if is_transient(error):
                raise
            self.problem = first_line(error)
            return b""
        if self._left is not None:
            self._left -= len(data)
            if not data and self._left:
                self.problem = f"the file became {self._left} bytes shorter since it was listed"
        self.final = not data and not self.problem
        return data

    def skip_line(self, data: bytes) -> tuple[int, bytes]:
        """Read to the end of a line without keeping it.

        Args:
            data: its beginning, without an end, but maybe with a return that is half of one.

        Returns:
            The bytes of the line without its end, and what was read behind it.
        """
        size = 0
        while True:
            half = data.endswith(b"\r") and not self.final and not self.problem
            if not half or len(data) > 1:
                match = LINE_END.search(data, 0, len(data) - half)
                if match:
                    return size + match.start(), data[match.end() :]
            size += len(data) - half
            if self.final or self.problem:
                return size, b""
            data = data[len(data) - half :] + self._piece(_READ_BYTES)


def last_line_end(data: bytes, final: bool) -> int:
    r"""Return the byte behind the last line that is whole; a `\r` at the end may be half an end."""
    if final:
        return len(data)
    limit = len(data) - data.endswith(b"\r")
    return max(data.rfind(b"\n", 0, limit), data.rfind(b"\r", 0, limit)) + 1


def num_line_ends(data: bytes, start: int = 0, end: int | None = None) -> int:
    """Return the line ends in a range of bytes."""
    end = len(data) if end is None else end
    count = data.count(b"\n", start, end)
    if data.find(b"\r", start, end) >= 0:
        count += data.count(b"\r", start, end) - data.count(b"\r\n", start, end)
    return count


def num_lines(data: bytes, start: int, end: int) -> int:
    """Return the lines in a range of bytes that are not empty."""
    if start == end:
        return 0
    if data[start] in b"\r\n" or any(
        data.find(pair, start, end) >= 0 for pair in (b"\n\n", b"\n\r", b"\r\r")
    ):
        return sum(map(bool, data[start:end].splitlines()))
    return num_line_ends(data, start, end) + (data[end - 1] not in b"\r\n")


def too_long(num_bytes: int) -> str:
    """Return why a line is rejected that was skipped."""
    return f"row must be at most {MAX_ROW_BYTES >> 20} MiB, got a line of {num_bytes} bytes"


def utf16_reason(data: bytes) -> str:
    """Return why a text that begins with these bytes cannot be read, empty when it can."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "file must be UTF-8, got the byte order mark of UTF-16; convert it: iconv -f UTF-16"
    return ""
