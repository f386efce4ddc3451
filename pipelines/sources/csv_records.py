r"""Where the records of a CSV file begin and end, decided before any field is parsed.

A record is one line, or several when a quoted field holds line ends. A quote that nobody closes
must not swallow the lines behind it, so a record may span lines only when all of this holds:

- each quoted field that holds a line end is closed by a quote that stands before a delimiter, a
  line end or the end of the file, at most `MAX_QUOTED_BYTES` behind its opening quote;
- the record has the declared number of fields;
- it is at most `MAX_ROW_BYTES` long.

Else the line in which the field opens is rejected, and reading continues at the next line. A
record of one line follows pyarrow's looser grammar: a quote within an unquoted field is text, and
text may follow a closing quote. Line ends are `\n`, `\r\n` and `\r`; empty lines are no records.
"""

from __future__ import annotations

import codecs
import re
from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pipelines.sources import lines
from pipelines.sources.lines import LINE_END, last_line_end, num_lines

MAX_QUOTED_BYTES = 1 << 20
"""Farthest that a field with line ends may reach, from quote to quote."""

_UTF8_WINDOW = 1 << 16


class Dialect:
    """How fields and records look in one source."""

    def __init__(self, delimiter: str, quote: str | None, num_fields: int) -> None:
        """Compile the grammar of one source.

        Args:
            delimiter: one ASCII character.
            quote: one ASCII character, None when quotes are plain text.
            num_fields: fields of a row.
        """
        self.delimiter = delimiter.encode()
        self.quote = quote.encode() if quote is not None else None
        self.num_fields = num_fields
        filler = next(c for c in "012" if c not in (delimiter, quote)).encode()
        self.sentinel = self.delimiter.join([filler] * num_fields) + b"\n"
        d = re.escape(self.delimiter)
        fields = b"[^%b\\r\\n]*+" % d
        if self.quote is not None:
            q = re.escape(self.quote)
            body = b"%b(?:[^%b]+|%b%b)*+" % (q, q, q, q)
            strict = b"%b%b(?=[%b\\r\\n]|\\Z)" % (body, q, d)
            on_line = b"%b(?:[^%b\\r\\n]+|%b%b)*+%b[^%b\\r\\n]*+" % (q, q, q, q, q, d)
            plain = b"[^%b%b\\r\\n][^%b\\r\\n]*+" % (d, q, d)
            fields = b"(?>%b|%b|%b|)" % (strict, on_line, plain)
            self.quoted_body = re.compile(body)
        end = rb"(?:\r\n?|\n|\Z)"
        self.field = re.compile(fields)
        self.fields_before = re.compile(b"(?:%b%b)*+" % (fields, d))
        self.record = re.compile(b"%b(?:%b%b)*+%b" % (fields, d, fields, end))


@dataclass(frozen=True, slots=True)
class Fault:
    """Bytes that are rejected as one row.

    Attributes:
        row: number of the row, from 0 at the beginning of the buffer.
        start: first byte.
        end: byte behind the last one.
        reason: why, empty when the bytes are no UTF-8.
    """

    row: int
    start: int
    end: int
    reason: str


@dataclass(slots=True)
class Records:
    """The whole records at the beginning of a buffer.

    Attributes:
        num_bytes: bytes of the buffer that were used.
        num_rows: rows in these, rejected ones included.
        pieces: ranges of bytes that hold good records only.
        num_good: records in `pieces`.
        faults: what is rejected, in order.
    """

    num_bytes: int = 0
    num_rows: int = 0
    pieces: list[tuple[int, int]] = field(default_factory=list)
    num_good: int = 0
    faults: list[Fault] = field(default_factory=list)

    def add(self, start: int, end: int, count: int) -> None:
        """Take up good records."""
        self.num_rows += count
        self.num_good += count
        self.num_bytes = end
        if self.pieces and self.pieces[-1][1] == start:
            start = self.pieces.pop()[0]
        self.pieces.append((start, end))

    def reject(self, start: int, end: int, reason: str) -> None:
        """Take up a row that is rejected."""
        self.faults.append(Fault(self.num_rows, start, end, reason))
        self.num_rows += 1
        self.num_bytes = end


def lines_not_utf8(data: bytes, final: bool) -> list[int]:
    """Return a byte of each line that is no UTF-8, ascending.

    Args:
        data: some lines; the last one may end in half a character when more follows.
        final: whether nothing follows.
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
                break  # half a character
        except UnicodeDecodeError as error:
            positions.append(position + error.start)
            line_end = LINE_END.search(data, positions[-1])
            position = line_end.end() if line_end else len(data)
    return positions


def well_formed(data: bytes, final: bool, dialect: Dialect) -> Records | None:
    """Return the records of a buffer whose quotes all stand where RFC 4180 puts them.

    This is `walk` for many rows at a time. Quotes then alternate between opening and closing, so
    that a line end lies outside of fields when an even number of quotes stands before it.

    Returns:
        None when a quote stands elsewhere, or a field reaches too far; fields are not counted.
    """
    assert dialect.quote is not None, "only quotes need this"
    array = np.frombuffer(data, np.uint8)
    quotes = np.flatnonzero(array == dialect.quote[0])
    opening, closing = quotes[0::2], quotes[1::2]
    around = np.zeros(256, bool)
    around[[dialect.delimiter[0], 10, 13]] = True
    begins = np.where(opening > 0, around[array[opening - 1]], True)
    ends = np.where(
        closing + 1 < len(array), around[array[np.minimum(closing + 1, len(array) - 1)]], True
    )
    doubled = closing[: len(opening) - 1] + 1 == opening[1:]  # two quotes that stand for one
    begins[1:] |= doubled
    ends[: len(doubled)] |= doubled
    if not (begins.all() and ends.all()):
        return None
    first, last = opening[np.append(True, ~doubled)[: len(opening)]], closing
    last = np.append(closing[: len(doubled)][~doubled], closing[len(doubled) :])
    if len(opening) > len(closing):  # a field that the buffer does not end
        last = np.append(last, len(data))
    if (last - first >= MAX_QUOTED_BYTES).any():
        return None
    line_ends = _line_ends(array, final)
    line_ends = line_ends[np.searchsorted(quotes, line_ends) % 2 == 0]
    if final and len(opening) > len(closing):
        return None
    whole = len(data) if final else (int(line_ends[-1]) + 1 if len(line_ends) else 0)
    records = Records()
    records.add(0, whole, _num_records(array, line_ends, whole))
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


def _num_records(array: NDArray[np.uint8], line_ends: NDArray[np.intp], whole: int) -> int:
    starts = np.append(0, line_ends + 1)
    lengths = line_ends - starts[:-1]
    pairs = (array[line_ends] == 10) & (lengths > 0) & (array[line_ends - 1] == 13)
    return int((lengths - pairs > 0).sum()) + int(starts[-1] < whole)


def walk(data: bytes, final: bool, full: bool, dialect: Dialect) -> Records:
    """Return the records of a buffer; those with quotes or faults are looked at one by one.

    Args:
        data: begins with a record, and holds a whole line.
        final: whether nothing follows.
        full: whether `data` cannot grow before its first record is used.
        dialect: of the source.
    """
    return _Walk(data, final, full, dialect).run()


class _Walk:
    """State of `walk`."""

    def __init__(self, data: bytes, final: bool, full: bool, dialect: Dialect) -> None:
        self.data = data
        self.final = final
        self.full = full
        self.dialect = dialect
        self.not_utf8 = lines_not_utf8(data, final)
        self.records = Records()

    def run(self) -> Records:
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
        """Return the next byte that is a quote or no UTF-8, -1 when there is none."""
        index = bisect_left(self.not_utf8, position)
        invalid = self.not_utf8[index] if index < len(self.not_utf8) else -1
        if self.dialect.quote is None:
            return invalid
        quote = self.data.find(self.dialect.quote, position, invalid if invalid >= 0 else None)
        return quote if quote >= 0 else invalid

    def _one_record(self, start: int) -> None:
        """Take up the record at a line's start, or nothing when its end has not been read."""
        match = self.dialect.record.match(self.data, start)
        line_end = self._line_end(start)
        if match is not None and match.end() <= line_end:
            self._accept(start, line_end)
        elif self.dialect.quote is not None:
            self._record_by_fields(start, self.dialect.quote)

    def _line_end(self, start: int) -> int:
        """Return the byte behind a line, -1 when its end has not been read."""
        match = LINE_END.search(self.data, start)
        if self.final:
            return match.end() if match else len(self.data)
        half = match is not None and match[0] == b"\r" and match.end() == len(self.data)
        return match.end() if match and not half else -1

    def _accept(self, start: int, end: int) -> None:
        index = bisect_left(self.not_utf8, start)
        if index < len(self.not_utf8) and self.not_utf8[index] < end:
            self.records.reject(start, end, "")
        else:
            self.records.add(start, end, 1)

    def _record_by_fields(self, start: int, quote: bytes) -> None:
        """Take up a record that may span lines, if each field is closed as it must be."""
        data, dialect = self.data, self.dialect
        position, count, spanning = start, 0, -1
        while True:
            end = self._field_end(position)
            if end == position and data.startswith(quote, position):
                closed = self._closing_quote(position)
                if closed < len(data) or self.final or closed - position >= MAX_QUOTED_BYTES:
                    return self._reject_line(start, position, self._never_closed(quote))
                return self._wait(start, spanning if spanning >= 0 else position)
            if LINE_END.search(data, position, end):
                if end - position > MAX_QUOTED_BYTES:
                    return self._reject_line(start, position, self._never_closed(quote))
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

    def _field_end(self, position: int) -> int:
        match = self.dialect.field.match(self.data, position)
        assert match is not None, "a field may be empty"
        return match.end()

    def _closing_quote(self, position: int) -> int:
        """Return where the quote stands that closes a field, the end of the data if it lacks."""
        match = self.dialect.quoted_body.match(self.data, position)
        assert match is not None, "the field begins with a quote"
        return match.end()

    def _never_closed(self, quote: bytes) -> str:
        limit = f"{MAX_QUOTED_BYTES >> 10} KiB"
        return (
            f"quote {quote.decode()!r} must be closed before a delimiter or line end within "
            f"{limit}, got none"
        )

    def _wait(self, start: int, opened: int) -> None:
        """Leave a record until more has been read, or reject its line when no more will be."""
        if self.full and start == 0:
            limit = f"{lines.MAX_ROW_BYTES >> 20} MiB"
            self._reject_line(start, opened, f"row must end within {limit}, got none that does")

    def _reject_line(self, start: int, opened: int, reason: str) -> None:
        """Reject from a record's start to the end of the line in which a field opens."""
        end = self._line_end(opened)
        if end < 0 and self.full and start == 0:
            end = self._line_end(start)
        if end >= 0:
            self.records.reject(start, end, reason)
