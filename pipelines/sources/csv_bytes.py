"""Bytes of a CSV file as the parser wants them: valid UTF-8, with a mark at the end.

pyarrow decodes a line with a wrong number of fields before it asks what to do
with it, and gives up the file when that fails. So each byte that is no UTF-8
reaches it as a mark, from which it can be told and given back.
"""

from __future__ import annotations

import codecs
import io
import re
from typing import BinaryIO

from schemas.job_sources import SourceConfig

END = b"\x03\x04"
"""Each field of a line that is read after the last one: a quote that is left open swallows it."""

MARK = b"\x03\xf4\x8f"
"""What stands before the last two bytes of a mark: U+0003, and U+10FF00 with the byte added."""

_PLANE = 0x10FF00
_READ_BYTES = 1 << 20


class ValidText(io.RawIOBase):
    """A file whose bytes that are no UTF-8 are marked, with one more line, the mark of its end."""

    def __init__(self, file: BinaryIO, config: SourceConfig) -> None:
        """Start at the beginning of a file whose `columns` are given."""
        assert config.columns, "csv sources declare their columns"
        self._file = file
        self._end = b"\n" + config.delimiter.encode().join([END] * len(config.columns)) + b"\n"
        self._rest = b""
        self._ready = b""
        self._ended = False

    def readable(self) -> bool:
        """Return True."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Return at most `size` bytes, none after the end."""
        while not self._ended and (size < 0 or len(self._ready) < size):
            data = self._file.read(_READ_BYTES if size < 0 else max(1, size - len(self._ready)))
            self._ended = not data
            text, self._rest = valid_text(self._rest + data, self._ended)
            self._ready += text + (self._end if self._ended else b"")
        size = len(self._ready) if size < 0 else size
        found, self._ready = self._ready[:size], self._ready[size:]
        return found


def valid_text(data: bytes, final: bool) -> tuple[bytes, bytes]:
    r"""Return bytes with what is no UTF-8 marked, and the start of a character at their end.

    Args:
        data: some bytes of a file.
        final: whether nothing follows.

    Example:
        >>> valid_text("x\u00e9".encode()[:2], False)
        (b'x', b'\xc3')
        >>> bytes_meant(valid_text(b"x\xff", True)[0])
        b'x\xff'
    """
    try:
        used = codecs.utf_8_decode(data, "strict", final)[1]
        return data[:used], data[used:]
    except UnicodeDecodeError:
        text, used = codecs.utf_8_decode(data, "surrogateescape", final)
        marked = re.sub("[\udc80-\udcff]", lambda m: _mark(ord(m[0]) - 0xDC00), text)
        return marked.encode(), data[used:]


def _mark(byte: int) -> str:
    return "\x03" + chr(_PLANE + byte)


def bytes_meant(data: bytes) -> bytes:
    """Return the bytes of the file that a text from `ValidText` stands for."""
    if MARK not in data:
        return data
    pattern = "\x03([\U0010ff80-\U0010ffff])"
    text = re.sub(pattern, lambda m: chr(ord(m[1]) - _PLANE + 0xDC00), data.decode())
    return text.encode(errors="surrogateescape")
