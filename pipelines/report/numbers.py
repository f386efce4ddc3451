"""Numbers as readers want them: few digits, units, thousands apart."""

from __future__ import annotations

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def digits(value: float) -> str:
    """Return three significant digits without an exponent.

    Example:
        >>> digits(12.23), digits(0.0123), digits(1234.5), digits(2.0), digits(0)
        ('12.2', '0.0123', '1,234', '2.00', '0')
    """
    if not value:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    text = f"{value:#.3g}"
    return f"{value:.3g}" if "e" in text else text.rstrip(".")


def size(num_bytes: float) -> str:
    """Return bytes with a decimal unit.

    Example:
        >>> size(8_300_000), size(999), size(1_230_000_000)
        ('8.30 MB', '999 B', '1.23 GB')
    """
    for factor, unit in _UNITS:
        if num_bytes >= factor:
            return f"{digits(num_bytes / factor)} {unit}"
    return f"{num_bytes:.0f} B"


def memory(num_bytes: float) -> str:
    """Return bytes of memory with the binary unit in which it is given out.

    Example:
        >>> memory(2 << 30), memory(3 << 29)
        ('2 GiB', '1.5 GiB')
    """
    return f"{num_bytes / (1 << 30):.3g} GiB"


def count(number: float) -> str:
    """Return a whole number with thousands apart.

    Example:
        >>> count(189359)
        '189,359'
    """
    return f"{number:,.0f}"


def short(number: float) -> str:
    """Return a number short enough for an axis.

    Example:
        >>> short(2_500_000), short(40_000), short(12)
        ('2.5M', '40k', '12')
    """
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= factor:
            return f"{number / factor:g}{unit}"
    return f"{number:g}"


def percent(share: float) -> str:
    """Return a share.

    Example:
        >>> percent(0.8312), percent(0.004)
        ('83.1 %', '0.4 %')
    """
    return f"{100 * share:.1f} %"


def compared(ours: float, other: float) -> str:
    """Return how a size compares with another one.

    Example:
        >>> compared(2.0, 8.0), compared(1.19, 1.0), compared(3.0, 3.0)
        ('4.00 times smaller than', '1.19 times as large as', 'as large as')
    """
    if ratio(max(ours, other), min(ours, other)) == "1.00":
        return "as large as"
    if ours < other:
        return f"{ratio(other, ours)} times smaller than"
    return f"{ratio(ours, other)} times as large as"


def ratio(a: float, b: float) -> str:
    """Return how many times larger `a` is.

    Example:
        >>> ratio(8.3, 0.68), ratio(1, 0)
        ('12.2', 'n/a')
    """
    return digits(a / b) if b else "n/a"
