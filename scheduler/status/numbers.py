"""Numbers as people want them: few digits, units, thousands apart; texts without what hides."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from datetime import UTC, datetime

from scheduler.grid import GIB, MIB


def duration(seconds: float) -> str:
    """Return a time span.

    Example:
        >>> duration(4.25), duration(61), duration(7384), duration(200000)
        ('4.2 s', '1 min 1 s', '2 h 3 min', '2 d 7 h')
    """
    whole = round(seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def clock(time_sec: float) -> str:
    """Return the time of day.

    Example:
        >>> clock(3661.5)
        '01:01:01'
    """
    return f"{datetime.fromtimestamp(time_sec, UTC):%H:%M:%S}"


def moment(time_sec: float) -> str:
    """Return a moment as HTML wants it.

    Example:
        >>> moment(0.0)
        '1970-01-01T00:00:00Z'
    """
    return f"{datetime.fromtimestamp(time_sec, UTC):%Y-%m-%dT%H:%M:%SZ}"


def memory(num_bytes: float) -> str:
    """Return bytes with a binary unit.

    Example:
        >>> memory(3 << 29), memory(300 << 20)
        ('1.50 GiB', '300 MiB')
    """
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.0f} MiB"


def digits(value: float) -> str:
    """Return about three significant digits.

    Example:
        >>> digits(12345.6), digits(12.34), digits(0.01234), digits(0)
        ('12,346', '12.3', '0.0123', '0')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def percent(share: float) -> str:
    """Return a share.

    Example:
        >>> percent(0.831), percent(1.2)
        ('83 %', '120 %')
    """
    return f"{100 * share:.0f} %"


def spans(numbers: Sequence[int]) -> str:
    """Return ascending numbers, neighbours together.

    Example:
        >>> spans([0, 1, 2, 3, 9, 11, 12]), spans([])
        ('0-3, 9, 11-12', 'none')
    """
    firsts = [n for n in numbers if n - 1 not in numbers]
    lasts = [n for n in numbers if n + 1 not in numbers]
    both = zip(firsts, lasts, strict=True)
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in both) or "none"


def visible(text: str) -> str:
    """Return a text in which control characters, and those that turn its direction, are marked.

    Example:
        >>> visible(chr(27) + "[2J" + chr(10)) == chr(0xFFFD) + "[2J" + chr(0xFFFD)
        True
    """
    return "".join("\ufffd" if unicodedata.category(c) in ("Cc", "Cf") else c for c in text)
