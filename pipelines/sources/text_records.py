r"""Lines and CSV records of text files in blocks of bounded memory, and copies of first lines.

A line ends with `\n`, `\r\n` or `\r`. A line longer than `MAX_ROW_BYTES` is skipped.

A CSV record is one line, or several lines if a quoted field contains line ends. So that an unclosed
quote does not swallow the lines after it, a record may span lines only if all of this holds:

- each quoted field that contains a line end is closed by a quote followed by a delimiter, a line
  end or the end of the file, at most `MAX_QUOTED_BYTES` after its opening quote;
- the record has the declared number of fields;
- it is at most `MAX_ROW_BYTES` long.

Otherwise the line with the opening quote is rejected, and reading continues at the next line; so is
a line with text after a closing quote. A quote within an unquoted field is text. Within quotes two
quotes are one, as are an escape character and the quote or escape character after it. Line ends are
`\n`, `\r\n` and `\r`; empty lines are skipped.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import lzma
import re
import zlib
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.pipelines.sources import limits
from presage.pipelines.sources.raw_rows import MAX_COPIED_BYTES, Folder, first_line, is_transient
from presage.schemas.config.sources import SourceConfig

# Lines.

SHOWN_BYTES = 4000
"""Maximum bytes of a row that are copied into its reject."""
LINE_END = re.compile(rb"\r\n?|\n")

_READ_BYTES = 1 << 20


def _zstd(stored: BinaryIO) -> BinaryIO:
    return cast(BinaryIO, pa.CompressedInputStream(pa.PythonFile(stored, mode="r"), "zstd"))


_CODECS: Mapping[bytes, Callable[[BinaryIO], Any]] = {
    rb"\x1f\x8b\x08": gzip.open,
    rb"\x28\xb5\x2f\xfd": _zstd,
    rb"BZh[1-9](1AY&SY|\x17rE8P\x90)": bz2.BZ2File,
    rb"\xfd7zXZ\0": lzma.LZMAFile,
}
"""Readers of compressed texts by their first bytes, at most 10."""
_CODEC_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, pa.ArrowException)


def decompressed(stored: BinaryIO) -> BinaryIO:
    """Return a stream of the text of an open file: the file itself if it is not compressed.

    Its first bytes decide, since many writers leave out the suffix, and some servers decompress
    what they send.
    """
    start = stored.read(10)
    stored.seek(0)
    codec = next((codec for magic, codec in _CODECS.items() if re.match(magic, start)), None)
    return stored if codec is None else cast(BinaryIO, codec(stored))


class TextStream:
    """A stream of text that records read errors instead of raising them.

    `final` tells whether the end has been reached, `problem` why reading failed.
    """

    def __init__(self, file: BinaryIO, num_bytes: int | None) -> None:
        """Read from the file's current position.

        `num_bytes` are expected; None to read to the end.
        """
        self.final = False
        self.problem = ""
        self._barren_bytes = 0
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
        except _CODEC_ERRORS as error:
            if is_transient(error):
                raise
            self.problem = first_line(error)
            return b""
        self._barren_bytes += len(data)
        if self._barren_bytes > limits.MAX_BARREN_BYTES:
            size = limits.MAX_BARREN_BYTES >> 20
            self.problem = f"{size} MiB without the end of a row; remove long and empty lines"
            return b""
        if self._bytes_left is not None:
            self._bytes_left -= len(data)
            if not data and self._bytes_left:
                self.problem = f"the file is {self._bytes_left} bytes shorter than when listed"
        self.final = not data and not self.problem
        return data

    def found_rows(self) -> None:
        """Note that what was read so far has rows."""
        self._barren_bytes = 0

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
    return f"row must be at most {limits.MAX_ROW_BYTES >> 20} MiB, got a line of {num_bytes} bytes"


def utf16_reason(data: bytes) -> str:
    """Return the reject reason of a text with a UTF-16 byte order mark; empty for others."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "file is UTF-16 by its byte order mark, not UTF-8; convert it: iconv -f UTF-16"
    return ""


# CSV records.

MAX_QUOTED_BYTES = 1 << 20
"""Maximum length of a quoted field with line ends."""

_UTF8_WINDOW = 1 << 16
_SHOWN_TEXT = 20


class Dialect:
    """Regular expressions of the fields and records of one source."""

    def __init__(self, config: SourceConfig, num_fields: int) -> None:
        self.delimiter = config.delimiter.encode()
        self.quote = config.quote.encode() if config.quote is not None else None
        self.escape = None if config.escape in (None, config.quote) else config.escape.encode()
        self.num_fields = num_fields
        filler = next(c for c in "012" if c not in (config.delimiter, config.quote)).encode()
        self.sentinel = self.delimiter.join([filler] * num_fields) + b"\n"
        d = re.escape(self.delimiter)
        fields = b"[^%b\\r\\n]*+" % d
        if self.quote is not None:
            q = re.escape(self.quote)
            e = re.escape(self.escape) if self.escape is not None else b""
            escaped = b"|%b[%b%b]?+" % (e, q, e) if e else b""
            body = b"%b(?:[^%b%b]++|%b%b%b)*+" % (q, q, e, q, q, escaped)
            strict = b"%b%b(?=[%b\\r\\n]|\\Z)" % (body, q, d)
            plain = b"[^%b%b\\r\\n][^%b\\r\\n]*+" % (d, q, d)
            fields = b"(?>%b|%b|)" % (strict, plain)
            self.quoted_body = re.compile(body)
            self._quoted = re.compile(b"(?:(?<=[%b\\r\\n])|\\A)%b" % (d, strict))
            self.escaped = re.compile(b"%b([%b%b])" % (e, q, e))
        end = rb"(?:\r\n?|\n|\Z)"
        self.field = re.compile(fields)
        self.record = re.compile(b"%b(?:%b%b)*+%b" % (fields, d, fields, end))

    def has_quoted(self, records: bytes) -> bool:
        """Return whether a field begins with a quote."""
        return self.quote is not None and (
            records.startswith(self.quote)
            or any(end + self.quote in records for end in (self.delimiter, b"\n", b"\r"))
        )

    def without_escapes(self, records: bytes) -> bytes:
        """Return complete records with their quotes doubled instead of escaped."""
        if self.quote is None or self.escape is None or self.escape not in records:
            return records
        texts = {self.quote: self.quote * 2, self.escape: self.escape}
        return self._quoted.sub(lambda f: self.escaped.sub(lambda m: texts[m[1]], f[0]), records)


@dataclass(frozen=True, slots=True)
class Fault:
    """A range of bytes that is rejected as one row.

    `row` is its index in the buffer, `reason` is empty for bytes that are not UTF-8.
    """

    row: int
    start: int
    end: int
    reason: str


@dataclass(slots=True)
class TextRecords:
    """The complete records at the start of a buffer.

    `num_rows` counts the rejected ones, too; `good_ranges` are byte ranges.
    """

    num_bytes: int = 0
    num_rows: int = 0
    good_ranges: list[tuple[int, int]] = field(default_factory=list)
    num_good: int = 0
    faults: list[Fault] = field(default_factory=list)

    def add(self, start: int, end: int, count: int) -> None:
        """Append good records."""
        self.num_rows += count
        self.num_good += count
        self.num_bytes = end
        if self.good_ranges and self.good_ranges[-1][1] == start:
            start = self.good_ranges.pop()[0]
        self.good_ranges.append((start, end))

    def reject(self, start: int, end: int, reason: str) -> None:
        """Append a rejected row."""
        self.faults.append(Fault(self.num_rows, start, end, reason))
        self.num_rows += 1
        self.num_bytes = end


def scan_well_formed(data: bytes, final: bool, dialect: Dialect) -> TextRecords | None:
    """Return the records of a buffer whose quotes follow RFC 4180, without escape characters.

    A vectorized `scan`: opening and closing quotes alternate, so that a line end is outside of
    fields if the number of quotes before it is even. Fields are not counted.

    Returns:
        None if a quote is elsewhere, or a field is too long.
    """
    assert dialect.quote is not None, "needed for dialects with quotes only"
    if dialect.escape is not None and dialect.escape in data:
        return None
    array = np.frombuffer(data, np.uint8)
    quotes = np.flatnonzero(array == dialect.quote[0])
    opening, closing = quotes[0::2], quotes[1::2]
    separators = np.zeros(256, bool)
    separators[[dialect.delimiter[0], 10, 13]] = True
    valid_opening = np.where(opening > 0, separators[array[opening - 1]], True)
    valid_closing = np.where(
        closing + 1 < len(array), separators[array[np.minimum(closing + 1, len(array) - 1)]], True
    )
    escaped = closing[: len(opening) - 1] + 1 == opening[1:]  # a doubled quote within a field
    valid_opening[1:] |= escaped
    valid_closing[: len(escaped)] |= escaped
    if not (valid_opening.all() and valid_closing.all()):
        return None
    first = opening[np.append(True, ~escaped)[: len(opening)]]
    last = np.append(closing[: len(escaped)][~escaped], closing[len(escaped) :])
    if len(opening) > len(closing):  # the last field is not closed within the buffer
        last = np.append(last, len(data))
    if (last - first >= MAX_QUOTED_BYTES).any():
        return None
    line_ends = _line_ends(array, final)
    line_ends = line_ends[np.searchsorted(quotes, line_ends) % 2 == 0]
    if final and len(opening) > len(closing):
        return None
    num_bytes = len(data) if final else (int(line_ends[-1]) + 1 if len(line_ends) else 0)
    records = TextRecords()
    records.add(0, num_bytes, _num_records(array, line_ends, num_bytes))
    return records


def _line_ends(array: NDArray[np.uint8], final: bool) -> NDArray[np.intp]:
    """Return the last byte of each line end."""
    is_end = array == 10
    returns = np.flatnonzero(array == 13)
    if len(returns):
        last = len(array) - 1
        alone = np.where(returns < last, array[np.minimum(returns + 1, last)] != 10, final)
        is_end[returns[alone]] = True
    return np.flatnonzero(is_end)


def _num_records(array: NDArray[np.uint8], line_ends: NDArray[np.intp], num_bytes: int) -> int:
    """Count the lines in the first `num_bytes` that are not empty."""
    starts = np.append(0, line_ends + 1)
    lengths = line_ends - starts[:-1]
    pairs = (array[line_ends] == 10) & (lengths > 0) & (array[line_ends - 1] == 13)
    return int((lengths - pairs > 0).sum()) + int(starts[-1] < num_bytes)


def scan(data: bytes, final: bool, full: bool, dialect: Dialect) -> TextRecords:
    """Return the records of a buffer; lines with quotes or invalid UTF-8 are checked one by one.

    Args:
        data: starts with a record and contains at least one line end, unless final.
        final: whether no data follows.
        full: whether the buffer has its maximum size.
        dialect: of the source.
    """
    return _Scan(data, final, full, dialect).run()


def lines_not_utf8(data: bytes, final: bool) -> list[int]:
    """Return one offset for each line that is not valid UTF-8, ascending.

    Unless `final`, data follows, and the last line may end within a character.
    """
    if data.isascii():
        return []
    positions: list[int] = []
    view, position = memoryview(data), 0
    while position < len(data):
        end = min(len(data), position + _UTF8_WINDOW)
        try:
            used = codecs.utf_8_decode(view[position:end], "strict", final and end == len(data))[1]
            position += used
            if not used:
                break  # an incomplete character
        except UnicodeDecodeError as error:
            positions.append(position + error.start)
            line_end = LINE_END.search(data, positions[-1])
            position = line_end.end() if line_end else len(data)
    return positions


class _Scan:
    """State of `scan`."""

    def __init__(self, data: bytes, final: bool, full: bool, dialect: Dialect) -> None:
        self.data = data
        self.final = final
        self.full = full
        self.dialect = dialect
        self.not_utf8 = lines_not_utf8(data, final)
        self.records = TextRecords()

    def run(self) -> TextRecords:
        data, records = self.data, self.records
        while (position := records.num_bytes) < len(data):
            special = self._next_special(position)
            if special < 0:
                end = last_line_end(data, self.final)
                if end > position:
                    records.add(position, end, num_lines(data, position, end))
                break
            start = max(data.rfind(end, position, special) for end in (b"\n", b"\r")) + 1
            if start > position:
                records.add(position, start, num_lines(data, position, start))
            start = max(start, position)
            self._one_record(start)
            if records.num_bytes == start:
                break  # its end has not been read
        return records

    def _next_special(self, position: int) -> int:
        """Return the offset of the next quote or invalid UTF-8, -1 if there is none."""
        index = bisect_left(self.not_utf8, position)
        invalid = self.not_utf8[index] if index < len(self.not_utf8) else -1
        if self.dialect.quote is None:
            return invalid
        quote = self.data.find(self.dialect.quote, position, invalid if invalid >= 0 else None)
        return quote if quote >= 0 else invalid

    def _one_record(self, start: int) -> None:
        """Add or reject the record at the start of a line, unless its end has not been read."""
        match = self.dialect.record.match(self.data, start)
        line_end = self._line_end(start)
        if match is not None and match.end() <= line_end:
            self._accept(start, line_end)
        elif self.dialect.quote is not None:
            self._record_by_fields(start, self.dialect.quote)

    def _line_end(self, start: int) -> int:
        """Return the end offset of a line, -1 if its end has not been read."""
        match = LINE_END.search(self.data, start)
        if self.final:
            return match.end() if match else len(self.data)
        split_end = match is not None and match[0] == b"\r" and match.end() == len(self.data)
        return match.end() if match and not split_end else -1

    def _accept(self, start: int, end: int) -> None:
        index = bisect_left(self.not_utf8, start)
        if index < len(self.not_utf8) and self.not_utf8[index] < end:
            self.records.reject(start, end, "")
        else:
            self.records.add(start, end, 1)

    def _record_by_fields(self, start: int, quote: bytes) -> None:
        """Add a record that may span lines, or reject its first line, field by field."""
        data, dialect = self.data, self.dialect
        position, count, spanning = start, 0, -1
        while True:
            end = self._match_end(dialect.field, position)
            if end == position and data.startswith(quote, position):
                closing = self._match_end(dialect.quoted_body, position)
                if closing < len(data) or self.final or closing - position >= MAX_QUOTED_BYTES:
                    return self._reject_line(
                        start, position, self._quote_reason(quote, position, closing)
                    )
                return self._wait(start, spanning if spanning >= 0 else position)
            if LINE_END.search(data, position, end):
                if end - position > MAX_QUOTED_BYTES:
                    return self._reject_line(start, position, _unclosed_reason(quote))
                spanning = position if spanning < 0 else spanning
            count += 1
            if not data.startswith(dialect.delimiter, end):
                break
            position = end + 1
        line_end = self._line_end(end)
        if line_end < 0:
            return self._wait(start, spanning)
        if count == dialect.num_fields:
            return self._accept(start, line_end)
        reason = (
            f"row that spans lines must have {dialect.num_fields} fields, got {count}; "
            f"check the quote {quote.decode()!r} in its first line"
        )
        return self._reject_line(start, spanning, reason)

    def _quote_reason(self, quote: bytes, position: int, closing: int) -> str:
        text = self.data[closing : closing + _SHOWN_TEXT].splitlines()
        if closing == len(self.data) or LINE_END.search(self.data, position, closing):
            return _unclosed_reason(quote)
        return (
            f"quote {quote.decode()!r} must be followed by a delimiter or line end, or be doubled "
            f"or escaped, got {text[0].decode(errors='replace')!r}; see the key escape"
        )

    def _match_end(self, pattern: re.Pattern[bytes], position: int) -> int:
        match = pattern.match(self.data, position)
        assert match is not None, "a field may be empty, and a quoted one starts with a quote"
        return match.end()

    def _wait(self, start: int, field_start: int) -> None:
        """Keep an incomplete record until more is read; reject its line if the buffer is full."""
        if self.full and start == 0:
            reason = f"row does not end within {limits.MAX_ROW_BYTES >> 20} MiB"
            self._reject_line(start, field_start, reason)

    def _reject_line(self, start: int, field_start: int, reason: str) -> None:
        """Reject from the start of a record to the end of the line in which a field starts."""
        end = self._line_end(field_start)
        if end < 0 and self.full and start == 0:
            end = self._line_end(start)
        if end >= 0:
            self.records.reject(start, end, reason)


def _unclosed_reason(quote: bytes) -> str:
    limit = f"{MAX_QUOTED_BYTES >> 10} KiB"
    return f"quote {quote.decode()!r} is not closed before a delimiter or line end within {limit}"


# Copies of first lines.

_COPY_BLOCK_BYTES = 256 << 10
_TRIES = 1000
"""Number of line ends to try for one outside quotes."""


def copy_first_lines(
    folder: Folder, path: str, config: SourceConfig, copy: Path, rows: int
) -> tuple[int, bool]:
    """Copy the first lines of a text; see `Format.copy_rows`."""
    lines = rows + (config.format == "csv" and config.header)
    blocks, num_lines, whole = list[bytes](), 0, False
    with folder.open(path) as stored:
        file = decompressed(stored)
        while num_lines <= lines and sum(map(len, blocks)) < MAX_COPIED_BYTES:
            block = file.read(_COPY_BLOCK_BYTES)
            if not block:
                whole = True
                break
            blocks.append(block)
            num_lines += block.count(b"\n")
    text = b"".join(blocks)
    if not whole:
        dialect = Dialect(config, 1) if config.format == "csv" else None
        text = text[: _end_of_lines(text, lines, dialect)]
    copy.write_bytes(text)
    return max(0, min(num_lines, lines) - (lines - rows)), whole


def _end_of_lines(text: bytes, lines: int, dialect: Dialect | None) -> int:
    r"""Return the index of the end of the first lines: the last line end outside quotes.

    Example:
        >>> csv = Dialect(SourceConfig(files="*", format="csv", columns={"a": "string"}), 1)
        >>> [_end_of_lines(b'a\n"b\nc"\nd\n', lines, csv) for lines in (2, 3)]
        [2, 8]
    """
    content = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(content == ord("\n"))[:lines]
    if not len(ends):
        return len(text)
    if dialect is not None and dialect.quote is not None:
        quotes = content == dialect.quote[0]
        if dialect.escape is not None:
            for pair in dialect.escaped.finditer(text):
                quotes[pair.end() - 1] = False
        inside = np.cumsum(quotes)[ends[-_TRIES:]] % 2
        outside = ends[-_TRIES:][inside == 0]
        ends = outside if len(outside) else ends
    return int(ends[-1]) + 1
