r"""Read lines of text files in blocks of bounded memory.

A line ends with `\n`, `\r\n` or `\r`. A line longer than `MAX_ROW_BYTES` is skipped.
"""

from __future__ import annotations

import codecs
import re
from typing import BinaryIO

import pyarrow as pa

from pipelines.sources.listing import first_line, is_transient

MAX_ROW_BYTES = 16 << 20
"""Maximum bytes of a row with its line end; longer ones are rejected as malformed."""

SHOWN_BYTES = 4000
"""Maximum bytes of a row that are copied into its reject."""

LINE_END = re.compile(rb"\r\n?|\n")

_READ_BYTES = 1 << 20


class TextStream:
    """A stream of text that records read errors instead of raising them.

    Attributes:
        final: whether the end has been reached.
        problem: why reading failed; empty if it has not.
    """

    def __init__(self, file: BinaryIO, num_bytes: int | None) -> None:
        """Read from the file's current position.

        Args:
            file: decompressed.
            num_bytes: expected number of bytes; None to read to the end.
        """
        self.final = False
        self.problem = ""
        self._file = file
        self._bytes_left = num_bytes

    def read(self, size: int) -> bytes:
        """Return `size` bytes; fewer only at the end or after a read error."""
        chunks: list[bytes] = []
        while size > 0 and not self.final and not self.problem:
            chunks.append(self._read_chunk(size))
            size -= len(chunks[-1])
        return b"".join(chunks)

    def _read_chunk(self, size: int) -> bytes:
        size = min(size, _READ_BYTES)
        try:
            data = self._file.read(
                size if self._bytes_left is None else min(size, self._bytes_left)
            )
        except (OSError, pa.ArrowException) as error:
            if is_transient(error):
                raise
            self.problem = first_line(error)
            return b""
        if self._bytes_left is not None:
            self._bytes_left -= len(data)
            if not data and self._bytes_left:
                self.problem = f"the file is {self._bytes_left} bytes shorter than when listed"
        self.final = not data and not self.problem
        return data

    def skip_line(self, data: bytes) -> tuple[int, bytes]:
        r"""Read to the end of a line without keeping it.

        Args:
            data: start of the line, without a line end; a last `\r` may be half of one.

        Returns:
            The length of the line in bytes without its end, and the data read after it.
        """
        size = 0
        while True:
            split_end = data.endswith(b"\r") and not self.final and not self.problem
            if not split_end or len(data) > 1:
                match = LINE_END.search(data, 0, len(data) - split_end)
                if match:
                    return size + match.start(), data[match.end() :]
            size += len(data) - split_end
            if self.final or self.problem:
                return size, b""
            data = data[len(data) - split_end :] + self._read_chunk(_READ_BYTES)


def last_line_end(data: bytes, final: bool) -> int:
    r"""Return the end offset of the last complete line; a trailing `\r` may be half a line end."""
    if final:
        return len(data)
    limit = len(data) - data.endswith(b"\r")
    return max(data.rfind(b"\n", 0, limit), data.rfind(b"\r", 0, limit)) + 1


def num_line_ends(data: bytes, start: int = 0, end: int | None = None) -> int:
    """Count the line ends in a byte range."""
    end = len(data) if end is None else end
    count = data.count(b"\n", start, end)
    if data.find(b"\r", start, end) >= 0:
        count += data.count(b"\r", start, end) - data.count(b"\r\n", start, end)
    return count


def num_lines(data: bytes, start: int, end: int) -> int:
    """Count the lines in a byte range that are not empty."""
    if start == end:
        return 0
    if data[start] in b"\r\n" or any(
        data.find(pair, start, end) >= 0 for pair in (b"\n\n", b"\n\r", b"\r\r")
    ):
        return sum(map(bool, data[start:end].splitlines()))
    return num_line_ends(data, start, end) + (data[end - 1] not in b"\r\n")


def long_line_reason(num_bytes: int) -> str:
    """Return the reject reason of a line that was skipped for its length."""
    return f"row must be at most {MAX_ROW_BYTES >> 20} MiB, got a line of {num_bytes} bytes"


def utf16_reason(data: bytes) -> str:
    """Return the reject reason of a text with a UTF-16 byte order mark; empty for others."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "file must be UTF-8, got the byte order mark of UTF-16; convert it: iconv -f UTF-16"
    return ""
