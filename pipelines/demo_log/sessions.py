"""Sessions of the demo log: requests, shown items, clicks and histories.

A chunk is `SESSIONS_PER_CHUNK` sessions, consecutive by start time, drawn from its own generators
(Philox keyed by seed and chunk). Its content depends on nothing else, so chunks can be generated in
any order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from presage.pipelines.demo_log.entities import (
    CARDINALITIES,
    NUM_GENRES,
    item_discount,
    item_genre,
    item_price_band,
    item_quality,
    items_at,
    main_genre,
    mix,
    pick_genres,
    second_genre,
    skewed,
    unit,
    user_bias,
)

CLICK_WEIGHTS = {
    "bias": -2.05,
    "main_genre": 1.6,
    "second_genre": 1.0,
    "query_genre": 0.9,
    "quality": 0.8,
    "user": 0.6,
    "position": -0.35,
    "price": -0.5,
    "discount": 1.0,
}
"""Terms of the logit of a click. Source: none; set so that about a fifth of the samples is
clicked and ranking by the true probability gives an AUC of about 0.8."""


def click_logit(
    user: np.ndarray, item: np.ndarray, query: np.ndarray, position: np.ndarray
) -> np.ndarray:
    """Return the logit of a click, a function of latent factors only.

    Taste and query act when the item has their genre; quality and user bias are about
    standard normal; the position acts by its logarithm, the price by its band in [0, 1],
    the discount by its fraction.

    All arguments are (n,) int64; position 0 is the top of the page.
    """
    weight = CLICK_WEIGHTS
    genre = item_genre(item)
    logit = weight["bias"] + weight["main_genre"] * (genre == main_genre(user))
    logit += weight["second_genre"] * (genre == second_genre(user))
    logit += weight["query_genre"] * (genre == query % NUM_GENRES)
    logit += weight["quality"] * item_quality(item)
    logit += weight["user"] * user_bias(user)
    logit += weight["position"] * np.log1p(position)
    logit += weight["price"] * item_price_band(item) / CARDINALITIES["item_price_band"]
    return logit + weight["discount"] * item_discount(item)


# Histories of a chunk: windows over one list per session, its base history and the items appended
# in the session. They are copied only when a record batch is written, to save memory.

MAX_HISTORY = 50


@dataclass(frozen=True, slots=True)
class Histories:
    """One list per session: its base history, then the items appended in the session."""

    values: np.ndarray
    lengths: np.ndarray

    def take(self, keep: np.ndarray) -> Histories:
        """Return the lists of the sessions where `keep` is true."""
        return Histories(self.values[np.repeat(keep, self.lengths)], self.lengths[keep])

    def windows(self, session: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return up to `MAX_HISTORY` values before each end, concatenated.

        Args:
            session: (n,) index of the list of each window.
            end: (n,) end of the window within its list.

        Returns:
            (n + 1,) int32 offsets, and the indices of the values.
        """
        length = np.minimum(end, MAX_HISTORY)
        offsets = np.concatenate([[0], np.cumsum(length)])
        first = np.cumsum(self.lengths) - self.lengths
        shift = first[session] + end - length - offsets[:-1]
        return offsets.astype(np.int32), np.arange(offsets[-1]) + np.repeat(shift, length)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Samples, in session order, with the histories of their sessions.

    `samples["session"]` is the index of a sample's session in both histories;
    `samples["clicked_end"]` and `samples["viewed_end"]` are the ends of its windows.
    """

    samples: dict[str, np.ndarray]
    clicked: Histories
    viewed: Histories

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return len(self.samples["time"])

    def take(self, keep: np.ndarray) -> Chunk:
        """Return the samples where `keep` is true, and only their sessions."""
        samples = {name: column[keep] for name, column in self.samples.items()}
        live = np.zeros(len(self.clicked.lengths), dtype=bool)
        live[samples["session"]] = True
        samples["session"] = (np.cumsum(live) - 1)[samples["session"]]
        return Chunk(samples, self.clicked.take(live), self.viewed.take(live))


def concat_chunks(a: Chunk, b: Chunk) -> Chunk:
    """Return the samples of `a`, then those of `b`."""
    moved = b.samples | {"session": b.samples["session"] + len(a.clicked.lengths)}
    return Chunk(
        {name: np.concatenate([column, moved[name]]) for name, column in a.samples.items()},
        _concat_histories(a.clicked, b.clicked),
        _concat_histories(a.viewed, b.viewed),
    )


def _concat_histories(a: Histories, b: Histories) -> Histories:
    return Histories(np.concatenate([a.values, b.values]), np.concatenate([a.lengths, b.lengths]))


# Chunks of sessions.

SESSIONS_PER_CHUNK = 4096
NUM_USERS = CARDINALITIES["user_id"]
MEAN_SESSION_SAMPLES = 16.5
"""Samples per session, before clipping. Source: RecD."""
MAX_SESSION_SAMPLES = 500
SESSION_SIGMA = 1.0
"""Spread of the lognormal session length. Source: none for the form; RecD gives the
mean, 16.5 samples, and a long tail; here the 99th percentile is about six means."""

REQUEST_PROBABILITY = 1.0 / 3.0
"""Chance that a sample opens a new request; a request fills at most 8 slots."""
REQUEST_GAP_SEC = 60.0
MAX_REQUEST_GAP_SEC = 1200.0
"""Mean (lognormal, sigma 1) and longest pause between two requests of a session.
Source: none; minutes, so that sessions interleave, and below the usual 30-minute gap."""
SLOT_GAP_US = 150_000
"""Time between the impressions of one request, microseconds."""

FULL_HISTORY_SHARE = 0.6
"""Fraction of users with a full base history; the others have 0 to 49 items, evenly: 40 on
average. Source: none; KuaiRand-Pure has 45.6 events a user before its log, 30.9 once cut to 50."""
NIGHTLY_SHIFT = 3
"""New items in a user's base history from one nightly snapshot to the next."""
DAY_US = 86_400_000_000

CHANGE_PROBABILITY = {
    "user_city": 0.002,
    "user_language": 0.0005,
    "user_device": 0.001,
    "user_segment": 0.005,
    "user_interest": 0.01,
    "user_tier": 0.0005,
    "page": 0.3,
    "query": 0.35,
}
"""Chance that a feature takes a new value from one request of a session to the next.

Of the others, user_clicks_7d, user_ctr_7d, clicked_items and clicked_brands change
with a click; viewed_items, page_depth and time_since_last_sec with each request;
user_os with user_device; item features, slot and position with the sample; the others do
not change (hour follows the clock). Source: none for the numbers; RecD for the rule that user
features hardly change within a session while item features do.
"""
VERSIONED = tuple(name for name in CHANGE_PROBABILITY if name.startswith("user_"))
"""Features with a version number, hashed with it; at most one changes per request."""

_USER_STRIDE = 7_368_787  # prime, so coprime to any number of users
_LENGTHS, _SESSIONS, _REQUESTS, _SAMPLES = range(4)  # streams of random numbers of a chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlan:
    """Settings and tables that all chunks of a log share."""

    seed: int
    num_sessions: int
    last_session_samples: int
    """Samples of the last session, which is shortened to give the log its size."""
    start_us: int
    """Start of the log, microseconds since 1970."""
    start_offsets_us: np.ndarray
    """Start of sessions within the log at an even grid of quantiles, microseconds."""

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return -(-self.num_sessions // SESSIONS_PER_CHUNK)


def draw_lengths(seed: int, chunk: int) -> np.ndarray:
    """Draw the number of samples of each session of a chunk."""
    mu = np.log(MEAN_SESSION_SAMPLES - 0.5) - SESSION_SIGMA**2 / 2.0  # rounding up adds a half
    length = _rng(seed, chunk, _LENGTHS).lognormal(mu, SESSION_SIGMA, SESSIONS_PER_CHUNK)
    return np.clip(np.ceil(length), 1, MAX_SESSION_SAMPLES).astype(np.int64)


def count_sessions(seed: int, num_samples: int) -> tuple[int, int]:
    """Return the number of sessions of `num_samples` samples, and the samples of the last one."""
    chunk, remaining = 0, num_samples
    while True:
        length = draw_lengths(seed, chunk)
        total = np.cumsum(length)
        if total[-1] >= remaining:
            last = int(np.searchsorted(total, remaining))
            last_samples = remaining - int(total[last] - length[last])
            return chunk * SESSIONS_PER_CHUNK + last + 1, last_samples
        chunk, remaining = chunk + 1, remaining - int(total[-1])


def start_time_us(plan: SessionPlan, ordinal: np.ndarray) -> np.ndarray:
    """Return start times of sessions, which increase with the ordinal.

    `ordinal` is (n,) float64 in [0, num_sessions].
    """
    grid = np.linspace(0.0, plan.num_sessions, len(plan.start_offsets_us))
    return plan.start_us + np.interp(ordinal, grid, plan.start_offsets_us).astype(np.int64)


def generate_chunk(plan: SessionPlan, chunk: int) -> Chunk:
    """Return all samples of the sessions of a chunk, in session order."""
    first = chunk * SESSIONS_PER_CHUNK
    ordinal = np.arange(first, min(first + SESSIONS_PER_CHUNK, plan.num_sessions))
    length = draw_lengths(plan.seed, chunk)[: len(ordinal)]
    if ordinal[-1] == plan.num_sessions - 1:
        length[-1] = plan.last_session_samples
    rng = _rng(plan.seed, chunk, _SESSIONS)
    start_us = start_time_us(plan, ordinal + rng.random(len(ordinal)))
    rank = skewed(rng.random(len(ordinal)), NUM_USERS, 2)
    user = rank * _USER_STRIDE % NUM_USERS

    session = np.repeat(np.arange(len(ordinal)), length)
    opening = np.cumsum(length) - length  # first sample of each session
    requests, request, slot = _requests(plan, chunk, session, opening, start_us)
    samples = {name: column[request] for name, column in requests.items()}
    samples |= {"session": session, "slot": slot, "user": user[session]}
    samples["session_ordinal"] = ordinal[session]
    samples["time"] += slot * SLOT_GAP_US
    samples["position"] = samples.pop("page_requests") * CARDINALITIES["slot"] + slot
    samples |= _shown_items(plan, chunk, samples)

    day = (start_us - plan.start_us) // DAY_US
    first_of_request = np.flatnonzero(slot == 0)
    clicked, samples["clicked_end"] = _append(
        user, day, "clicked", session, samples["item"], samples["clicked"] == 1
    )
    viewed, samples["viewed_end"] = _append(
        user, day, "viewed", session, samples["item"], slot == 0
    )
    for name in ("clicked_end", "viewed_end"):  # all slots of a request have the same histories
        samples[name] = samples[name][first_of_request][request]
    base = samples["clicked_end"][opening]
    samples["num_clicks"] = samples["clicked_end"] - base[session]
    return Chunk(samples, clicked, viewed)


def _rng(seed: int, chunk: int, stream: int) -> np.random.Generator:
    key = np.array([seed, chunk << 8 | stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def _requests(
    plan: SessionPlan, chunk: int, session: np.ndarray, opening: np.ndarray, start_us: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Split sessions into requests; return their columns, each sample's request and slot."""
    rng = _rng(plan.seed, chunk, _REQUESTS)
    index = np.arange(len(session))
    opens = rng.random(len(session)) < REQUEST_PROBABILITY
    opens[opening] = True
    slot = (index - np.maximum.accumulate(np.where(opens, index, 0))) % CARDINALITIES["slot"]
    opens = slot == 0
    request = np.cumsum(opens) - 1

    owner = session[opens]  # session of each request
    num_requests = len(owner)
    row = np.arange(num_requests)
    head = request[opening]  # first request of each session
    starts = np.zeros(num_requests, dtype=bool)
    starts[head] = True
    mu = np.log(REQUEST_GAP_SEC) - 0.5
    gap_us = np.minimum(rng.lognormal(mu, 1.0, num_requests), MAX_REQUEST_GAP_SEC) * 1e6
    gap_us = gap_us.astype(np.int64) + CARDINALITIES["slot"] * SLOT_GAP_US
    clock = np.cumsum(gap_us)
    columns = {
        "time": start_us[owner] + clock - clock[head][owner],
        "request_ordinal": row - head[owner],
        "page_depth": row - head[owner] + 1,
        "gap_sec": np.where(starts, rng.lognormal(10.5, 1.0, num_requests), gap_us * 1e-6),
    }
    columns["hour"] = columns["time"] // 3_600_000_000 % 24
    for name in ("page", "query"):
        renewed = starts | (rng.random(num_requests) < CHANGE_PROBABILITY[name])
        since = np.maximum.accumulate(np.where(renewed, row, 0))
        columns[name] = skewed(rng.random(num_requests), CARDINALITIES[name], 4)[since]
        if name == "page":
            columns["page_requests"] = row - since
    bounds = np.cumsum([CHANGE_PROBABILITY[name] for name in VERSIONED])
    changed = np.searchsorted(bounds, rng.random(num_requests), side="right")
    changed[head] = len(VERSIONED)
    for feature, name in enumerate(VERSIONED):
        count = np.cumsum(changed == feature)
        columns[name] = (count - count[head][owner]).astype(np.int16)
    return columns, request, slot


def _shown_items(
    plan: SessionPlan, chunk: int, samples: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Choose the item of each sample and whether it is clicked."""
    rng = _rng(plan.seed, chunk, _SAMPLES)
    num_samples = len(samples["slot"])
    genre = pick_genres(rng.random(num_samples), samples["user"], "shown", samples["query"])
    item = items_at(rng.random(num_samples), genre)
    logit = click_logit(samples["user"], item, samples["query"], samples["position"])
    probability = 1.0 / (1.0 + np.exp(-logit))
    clicked = (rng.random(num_samples) < probability).astype(np.int8)
    return {"item": item, "clicked": clicked}


def _append(
    user: np.ndarray,
    day: np.ndarray,
    kind: str,
    session: np.ndarray,
    item: np.ndarray,
    happens: np.ndarray,
) -> tuple[Histories, np.ndarray]:
    """Append the items where `happens` to the users' base histories.

    Returns:
        The lists, and for each sample the length of its list before it.
    """
    stream = {"clicked": 50, "viewed": 51}[kind]
    share = unit(mix(user, stream))
    partial = (share - FULL_HISTORY_SHARE) / (1.0 - FULL_HISTORY_SHARE) * MAX_HISTORY
    base = np.where(share < FULL_HISTORY_SHARE, MAX_HISTORY, partial).astype(np.int64)
    total = base + np.bincount(session[happens], minlength=len(user))
    first = np.cumsum(total) - total

    before = np.cumsum(happens) - happens
    opening = np.searchsorted(session, np.arange(len(user)))
    end = base[session] + before - before[opening][session]
    values = np.empty(total.sum(), dtype=np.int64)
    values[(first[session] + end)[happens]] = item[happens]

    # base history: a window of the user's infinite event sequence, shifted nightly
    owner = np.repeat(np.arange(len(user)), base)
    j = np.arange(len(owner)) - np.repeat(np.cumsum(base) - base, base)
    event = mix((user << 24)[owner] + day[owner] * NIGHTLY_SHIFT + j, stream + 2)
    genre_at = (event >> np.uint64(32)) * 2.0**-32
    genre = pick_genres(genre_at, user[owner], kind)
    values[first[owner] + j] = items_at((event & np.uint64(0xFFFFFFFF)) * 2.0**-32, genre)
    return Histories(values, total), end
