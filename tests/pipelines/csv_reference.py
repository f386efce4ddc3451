"""CSV read byte by byte, as `text_records.py` documents it; shares no code with it."""

from __future__ import annotations

from dataclasses import dataclass

Row = list[bytes] | None
"""Fields of an accepted row, None for a rejected one."""


@dataclass(frozen=True)
class Reference:
    """The grammar, with limits in bytes."""

    delimiter: bytes
    quote: bytes | None
    escape: bytes | None
    num_fields: int
    max_row: int
    max_quoted: int

    def rows(self, data: bytes) -> list[Row]:
        """Return all rows of a text, rejected ones too."""
        rows: list[Row] = []
        position = 0
        while position < len(data):
            if data[position] in b"\r\n":
                position += 1
                continue
            row, position = self.row(data, position)
            rows.append(row)
        return rows

    def row(self, data: bytes, start: int) -> tuple[Row, int]:
        """Return the row at a byte, and where the next one begins."""
        view, cut = data[start : start + self.max_row], len(data) - start >= self.max_row
        if self.line_end(view, 0, cut) is None:  # the line is too long
            end = start
            while end < len(data) and data[end] not in b"\r\n":
                end += 1
            return None, end + (2 if data[end : end + 2] == b"\r\n" else 1)
        fields: list[bytes] = []
        position, spanning = 0, None
        while True:
            value, end, spans = self.field(view, position)
            if spans and end is not None and end - position > self.max_quoted:
                value = None
            if value is None and end is None and cut and len(view) - position < self.max_quoted:
                return None, start + self.skip(
                    view, position if spanning is None else spanning, cut
                )
            if value is None or end is None:
                return None, start + self.skip(view, position, cut)
            if spans and spanning is None:
                spanning = position
            fields.append(value)
            if view[end : end + 1] != self.delimiter:
                break
            position = end + 1
        next_row = self.line_end(view, end, cut)
        if next_row is None:
            assert spanning is not None
            return None, start + self.skip(view, spanning, cut)
        if len(fields) != self.num_fields:
            return None, start + (next_row if spanning is None else self.skip(view, spanning, cut))
        try:
            view[:next_row].decode()
        except UnicodeDecodeError:
            return None, start + next_row
        return fields, start + next_row

    def field(
        self, view: bytes, start: int
    ) -> tuple[bytes | None, int, bool] | tuple[None, None, bool]:
        """Return value and end of a field and whether it spans lines; no value when it is open."""
        stop = self.delimiter + b"\r\n"
        value, end = b"", start
        if self.quote is None or view[start : start + 1] != self.quote:
            while end < len(view) and view[end] not in stop:
                end += 1
            return view[start:end], end, False
        end += 1
        while end < len(view):
            pair = view[end : end + 2]
            if self.escape and pair in (self.escape + self.quote, self.escape * 2):
                value += pair[1:]
                end += 2
            elif pair == self.quote * 2:
                value += self.quote
                end += 2
            elif view[end : end + 1] == self.quote:
                break
            else:
                value += view[end : end + 1]
                end += 1
        if end == len(view):
            return None, None, False
        end += 1
        spans = b"\n" in value or b"\r" in value
        rest = end
        while rest < len(view) and view[rest] not in stop:
            rest += 1
        if rest > end:
            return None, rest, True
        return value, rest, spans

    def line_end(self, view: bytes, start: int, cut: bool) -> int | None:
        """Return the byte behind a line, None when it is not in the view."""
        for end in range(start, len(view)):
            if view[end : end + 1] == b"\n":
                return end + 1
            if view[end : end + 1] == b"\r":
                if end + 1 == len(view) and cut:
                    return None
                return end + (2 if view[end + 1 : end + 2] == b"\n" else 1)
        return None if cut else len(view)

    def skip(self, view: bytes, opened: int, cut: bool) -> int:
        """Return the byte behind the line in which a field opens."""
        end = self.line_end(view, opened, cut)
        if end is None:
            end = self.line_end(view, 0, cut)
        assert end is not None
        return end
