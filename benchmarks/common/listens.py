"""Drawn logs of listening events with the published statistics of Yambda-5b.

Published (Yambda, 2025; MLPerf Training v6.1, DLRMv4): events a user (median 2,695, mean 4,763, at
most 27,738), the shares of events, times in bins of 5 seconds of which 12 to 13 % of neighbours are
equal, 9.39 million items, and 8.0 bytes an event in Parquet. Guesses: half of the events repeat an
item of the same user, others follow a Zipf law of exponent 1.2, and a session has 20 events. All
draws depend on the seed alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from presage.schemas.arrays import offsets_of

NUM_ITEMS = 9_390_623
MEDIAN_EVENTS, MOST_EVENTS, SPREAD = 2_695, 27_738, 1.22
"""Events of a user: a log-normal distribution, cut at the most."""
BIN_SEC, DAY_SEC = 5, 86_400
FIRST_DAY = date(2024, 1, 1)
TYPES = ("listen", "like", "dislike")
LIKES, DISLIKES, SKIPS, REPEATS, TIES = 0.019, 0.01, 0.367, 0.52, 0.047
SESSION_EVENTS = 20
"""Mean."""


def draw_events(num_events: int, num_days: int, *, scale: float = 1.0, seed: int = 0) -> pa.Table:
    """Draw events, sorted by user and time.

    Args:
        num_events: about as many.
        num_days: over which a user's events spread.
        scale: of the events of a user.
        seed: of all draws.

    Returns:
        Columns `uid`, `timestamp`, `item_id`, `is_organic`, `event_type`, `played_ratio_pct`,
        `track_length_seconds`.
    """
    rng = np.random.default_rng(seed)
    counts = _events_per_user(num_events, scale, rng)
    starts, total = offsets_of(counts), int(counts.sum())
    user = np.repeat(np.arange(len(counts)), counts)
    position = np.arange(total) - np.repeat(starts[:-1], counts)
    drawn = rng.random(total)
    kind = np.where(drawn < LIKES, 1, np.where(drawn < LIKES + DISLIKES, 2, 0))
    item = _items(position, kind, rng)
    length = (120 + item * 2_654_435_761 % (1 << 32) / (1 << 32) * 180).astype(np.int32)
    skips = rng.beta(3, 5.2, len(counts))[user] * SKIPS / (3 / 8.2)
    ratio = _ratios(kind, skips, rng)
    second, session = _times(counts, position, kind, length * ratio // 100, num_days, rng)
    order = np.lexsort((np.arange(total), second, user))
    organic = (rng.random(int(session[-1]) + 1 if total else 0) < 0.517)[session]
    start = (FIRST_DAY - date(1970, 1, 1)).days * DAY_SEC
    return pa.table(
        {
            "uid": user.astype(np.int64),
            "timestamp": pa.array((start + second[order]) * 1_000_000, pa.timestamp("us")),
            "item_id": item[order],
            "is_organic": organic[order].astype(np.int8),
            "event_type": pa.array(kind[order], pa.int8()),
            "played_ratio_pct": ratio[order].astype(np.int32),
            "track_length_seconds": length[order],
        }
    )


def _events_per_user(num_events: int, scale: float, rng: np.random.Generator) -> NDArray[np.int64]:
    most = int(num_events / (MEDIAN_EVENTS * scale)) + 8
    counts = np.exp(rng.normal(np.log(MEDIAN_EVENTS * scale), SPREAD, most))
    counts = np.clip(counts, 5, MOST_EVENTS * scale).astype(np.int64)
    return counts[: int(np.searchsorted(np.cumsum(counts), num_events)) + 1]


def _items(
    position: NDArray[np.int64], kind: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return the item of each event: that of an earlier event of the user, or of a Zipf law."""
    total = len(position)
    weights = np.cumsum((np.arange(NUM_ITEMS) + 400.0) ** -1.2)
    fresh = rng.permutation(NUM_ITEMS)[
        np.minimum(np.searchsorted(weights / weights[-1], rng.random(total)), NUM_ITEMS - 1)
    ]
    back = np.exp(rng.random(total) * np.log(np.maximum(position, 2) + 1)).astype(np.int64)
    repeats = (rng.random(total) < REPEATS) & (position > back)
    liked = (kind == 1) & (position > 0)  # of the track before
    source = np.arange(total) - np.where(liked, 1, np.where(repeats, back, 0))
    while not np.array_equal(further := source[source], source):
        source = further
    return fresh[source]


def _ratios(
    kind: NDArray[np.int64], skips: NDArray[np.float64], rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return the played share of each track, in per cent; 0 of likes and dislikes."""
    total = len(kind)
    whole = np.where(rng.random(total) < 0.75, 100, rng.integers(50, 100, total))
    early = np.where(rng.random(total) < 0.2, 0, np.exp(rng.random(total) * np.log(50)))
    ratio = np.where(rng.random(total) < skips, np.minimum(early, 49), whole).astype(np.int64)
    return np.where(kind == 0, ratio, 0)


def _times(
    counts: NDArray[np.int64],
    position: NDArray[np.int64],
    kind: NDArray[np.int64],
    played_sec: NDArray[np.int64],
    num_days: int,
    rng: np.random.Generator,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the second of each event since the first day, and its session."""
    total = len(position)
    opens = (rng.random(total) < 1 / SESSION_EVENTS) | (position == 0)
    session = np.cumsum(opens) - 1
    user = np.repeat(np.arange(len(counts)), counts)[opens]
    evening = np.clip(rng.normal(0.62, 0.2, len(user)), 0, 0.999)
    start = (rng.integers(0, num_days, len(user)) + evening) * DAY_SEC
    start = start[np.lexsort((start, user))]
    gap = np.where(kind == 1, 0, np.concatenate([[0], played_sec[:-1]]))
    gap = np.where(rng.random(total) < TIES, 0, gap)
    gap[opens] = 0
    since = np.cumsum(gap)
    second = start[session] + since - since[opens][session]
    return np.minimum(second, num_days * DAY_SEC - 1).astype(np.int64) // BIN_SEC * BIN_SEC, session


def write_days(events: pa.Table, folder: Path) -> Iterator[tuple[str, Path]]:
    """Write the log of each day in the order of time; yield the day and its folder."""
    seconds = events["timestamp"].cast(pa.int64()).to_numpy() // 1_000_000
    day = seconds // DAY_SEC
    order = np.lexsort((seconds, day))
    bounds = np.flatnonzero(np.diff(day[order], prepend=-1)).tolist()
    for start, end in zip(bounds, [*bounds[1:], len(order)], strict=True):
        label = (date(1970, 1, 1) + timedelta(days=int(day[order[start]]))).isoformat()
        path = folder / label
        path.mkdir(parents=True)
        pq.write_table(events.take(pa.array(order[start:end])), path / "events.parquet")
        yield label, path
