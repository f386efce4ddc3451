"""Synthetic logs of many shapes, as tables of samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

DAY_SEC, START_US = 86_400, 1_767_225_600_000_000


def log(
    rng: np.random.Generator,
    num_rows: int,
    samples_per_session: int,
    unit_us: int = 1_000_000,
    /,
    **columns: Any,
) -> pa.Table:
    """Return a day of sessions that overlap in time, in the order of time.

    Args:
        rng: draws keys and times.
        num_rows: samples.
        samples_per_session: the last session may have fewer.
        unit_us: of times.
        columns: values of all samples by session, or a function of the index of their sessions.
    """
    session = np.arange(num_rows) // samples_per_session
    num_sessions = session[-1] + 1
    seconds = rng.integers(0, DAY_SEC, num_sessions)[session] + rng.exponential(600, num_rows)
    order = np.argsort(seconds, kind="stable")
    time = START_US + (seconds * 1e6).astype(np.int64) // unit_us * unit_us
    values = {name: c(session) if callable(c) else c for name, c in columns.items()}
    key = rng.permutation(1 << 24)[:num_sessions][session]
    table = pa.table({"session": key, "time": pa.array(time, pa.timestamp("us")), **values})
    return table.take(pa.array(order))


def lists_of(values: NDArray[Any], lengths: NDArray[np.int64]) -> pa.Array:
    """Return consecutive lists of values."""
    return pa.ListArray.from_arrays(np.cumsum([0, *lengths]).astype(np.int32), pa.array(values))


Rng = np.random.Generator
Shape = Callable[[Rng, int], pa.Table]


def _of_sessions(values: NDArray[Any]) -> Callable[[NDArray[np.int64]], NDArray[Any]]:
    return lambda session: values[session]


def _lists_of_sessions(values: NDArray[Any]) -> Callable[[NDArray[np.int64]], pa.Array]:
    return lambda s: lists_of(values[s].ravel(), np.full(len(s), values.shape[1]))


def _histories(rng: Rng, num_rows: int) -> pa.Array:
    """Return the last 20 items of sessions of 10."""
    items = rng.zipf(1.3, num_rows + 20) % 5000
    starts = np.arange(num_rows) % 10
    lengths = np.minimum(20, starts)
    first = np.repeat(np.arange(num_rows) - lengths, lengths)
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return lists_of(items[first + within], lengths)


SHAPES: Mapping[str, Shape] = {
    "one row": lambda r, n: log(r, 1, 1, item=[3]),
    "ten rows": lambda r, n: log(r, 10, 3, item=r.integers(0, 9, 10)),
    "one sample a session": lambda r, n: log(r, n, 1, item=r.zipf(1.3, n) % 5000),
    "one sample a session, in microseconds": lambda r, n: log(
        r, n, 1, 1, item=r.zipf(1.3, n) % 5000
    ),
    "one sample a session, numbered": lambda r, n: log(r, n, 1, item=np.arange(n)),
    "sessions of two": lambda r, n: log(
        r, n, 2, user=lambda s: s * 7 % 9973, item=r.integers(0, 5000, n)
    ),
    "next items": lambda r, n: log(
        r, n, 5, item=r.zipf(1.2, n) % 5000, next_item=r.zipf(1.2, n) % 5000
    ),
    "next items, in microseconds": lambda r, n: log(
        r, n, 5, 1, item=r.zipf(1.2, n) % 5000, next_item=r.zipf(1.2, n) % 5000
    ),
    "next items with histories": lambda r, n: log(
        r, n, 10, item=r.zipf(1.3, n) % 5000, history=_histories(r, n)
    ),
    "sessions of 5,000": lambda r, n: log(
        r, n, 5000, user=lambda s: s * 7, item=r.zipf(1.2, n) % 5000
    ),
    "numbers": lambda r, n: log(
        r,
        n // 10,
        3,
        **{f"f{i}": r.normal(size=n // 10).astype(np.float32) for i in range(20)},
        **{f"d{i}": r.normal(size=n // 10) for i in range(20)},
    ),
    "numbers of sessions": lambda r, n: log(
        r, n // 10, 6, **{f"d{i}": _of_sessions(r.normal(size=n)) for i in range(40)}
    ),
    "long lists": lambda r, n: log(
        r,
        n // 50,
        4,
        items=lists_of(r.integers(0, 1 << 20, n // 50 * 200), np.full(n // 50, 200)),
    ),
    "lists of sessions": lambda r, n: log(
        r,
        n // 10,
        8,
        items=_lists_of_sessions(r.integers(0, 1 << 20, (n, 50))),
    ),
    "constant columns": lambda r, n: log(r, n, 3, item=np.full(n, 3), text=["a"] * n),
    "nulls": lambda r, n: log(r, n, 3, item=pa.nulls(n, pa.int64()), text=pa.nulls(n, pa.string())),
    "half null": lambda r, n: log(
        r,
        n,
        3,
        item=pa.array(r.integers(0, 99, n), mask=r.random(n) < 0.5),
        user=_of_sessions(r.integers(0, 977, n)),
    ),
    "texts of 4,000": lambda r, n: log(
        r, n // 100, 3, text=[r.bytes(2000).hex() for _ in range(n // 100)]
    ),
    "sentences": lambda r, n: log(
        r,
        n // 10,
        3,
        text=[" ".join(f"word{w}" for w in words) for words in (r.zipf(1.3, (n // 10, 40)) % 3000)],
    ),
    "random ids": lambda r, n: log(r, n, 4, **{f"id{i}": r.integers(0, 1 << 62, n) for i in "ab"}),
    "ids as texts": lambda r, n: log(
        r,
        n,
        4,
        uuid=lambda s: [f"{i:032x}" for i in (s.astype(object) * (1 << 90) % 2**127)],
        item=[f"item-{i}" for i in r.zipf(1.3, n) % 5000],
    ),
    "flags": lambda r, n: log(
        r, n, 6, **{f"b{i}": r.random(n) < 0.01 * (i + 1) for i in range(20)}
    ),
    "500 columns": lambda r, n: log(
        r, n // 50, 3, **{f"c{i}": r.integers(0, 99, n // 50) for i in range(500)}
    ),
    "500 columns of sessions": lambda r, n: log(
        r, n // 50, 6, **{f"c{i}": lambda s, i=i: s * (i + 3) % 991 for i in range(500)}
    ),
    "slowly changing": lambda r, n: log(
        r, n, 8, count=np.cumsum(r.random(n) < 0.3), price=np.round(r.gamma(2, 20, n), 2)
    ),
}
