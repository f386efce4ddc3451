"""Synthetic logs of hotel clickouts, in which little repeats."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class ClickoutConfig:
    """Shape of a synthetic log of hotel clickouts."""

    num_sessions: int
    """Sessions, each of one user and city."""
    requests: float = 1.7
    """Lists shown per session, on average."""
    shown: int = 25
    """Hotels per list."""
    again: float = 0.4
    """Probability that a later list of a session repeats the previous one."""
    actions: float = 8.0
    """Actions before a list, on average."""
    num_cities: int = 4000
    """Cities; few of them get most searches."""
    seed: int = 0
    """Seed of the log."""


CLICKOUTS = {
    "clickouts": ClickoutConfig(num_sessions=7400),
    "clickouts_hourly": ClickoutConfig(num_sessions=7400),
    "short_sessions": ClickoutConfig(
        num_sessions=60_000, requests=1.0, shown=3, actions=1.0, seed=1
    ),
    "no_repeats": ClickoutConfig(
        num_sessions=60_000, requests=1.0, shown=1, actions=2.0, num_cities=10**9, seed=2
    ),
    "ten_rows": ClickoutConfig(num_sessions=1, requests=1.0, shown=10, seed=3),
}
"""Logs for `job.yaml`; `clickouts_hourly` has windows of one hour."""

HEADER = (
    "user_id,session_id,timestamp,step,action_type,reference,platform,city,device,"
    "current_filters,impressions,prices"
)
START, SPAN = 1541030400, 6 * 86400
"""Start of the clickout log, 2018-11-01, in seconds since 1970, and its length in seconds."""
FILTERS = (
    "",
    "",
    "",
    "",
    "Breakfast Included",
    "Swimming Pool|Beach",
    "4 Star|5 Star",
    "Focus on Rating",
)
DEVICES, PLATFORMS = ("mobile", "desktop", "tablet"), 55
HOTELS_PER_CITY = 300


def write_clickouts(config: ClickoutConfig, directory: Path) -> None:
    """Write a synthetic log of hotel clickouts, in which little repeats, as one CSV file.

    A session is a search in one city. Some rows show a list of hotels with prices, both as text
    with `|` between the values, and one hotel of the list is clicked; the other rows are actions
    on single hotels. Rows are not in time order. `job.yaml` makes one sample
    of each shown hotel.
    """
    rng = np.random.default_rng(config.seed)
    rows: list[list[object]] = []
    for _ in range(config.num_sessions):
        rows.extend(_clickout_session(config, rng))
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "actions.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(HEADER.split(","))
        writer.writerows(rows)


def _clickout_session(config: ClickoutConfig, rng: np.random.Generator) -> list[list[object]]:
    city = int(config.num_cities * rng.random() ** 3)
    hotels = _hotels(city)
    base = 20 + (hotels * 7919 % 1009) ** 2 // 2400  # a hotel's price, skewed
    user = np.base_repr(int(rng.integers(1 << 60)), 36).rjust(12, "0")[:12]
    place = [np.base_repr(city % PLATFORMS + 400, 26), f"City {city}, Country {city % 97}"]
    head = [user, f"{int(rng.integers(1 << 52)):013x}"]
    tail = [*place, DEVICES[int(rng.choice(3, p=(0.55, 0.37, 0.08)))]]
    second, step = START + int(rng.integers(SPAN)), 0
    rows: list[list[object]] = []
    shown: NDArray[np.int64] = hotels[:0]
    prices = shown
    for _ in range(int(rng.geometric(1 / config.requests))):
        if not len(shown) or rng.random() >= config.again:
            noise = rng.gumbel(size=len(hotels)) * 40
            chosen = np.argsort(np.arange(len(hotels)) + noise)[: config.shown]
            shown = hotels[chosen]
            prices = np.maximum(5, base[chosen] * rng.normal(1, 0.15, len(chosen))).astype(np.int64)
        filters = FILTERS[int(rng.integers(len(FILTERS)))]
        for _ in range(int(rng.poisson(config.actions))):
            second, step = second + int(rng.exponential(20)), step + 1
            item = int(rng.choice(shown))
            rows.append(
                [*head, second, step, "interaction item image", item, *tail, filters, "", ""]
            )
        second, step = second + int(rng.exponential(60)), step + 1
        clicked = int(shown[min(len(shown) - 1, int(rng.geometric(0.2)) - 1)])
        lists = ["|".join(map(str, values.tolist())) for values in (shown, prices)]
        rows.append([*head, second, step, "clickout item", clicked, *tail, filters, *lists])
    return rows


def _hotels(city: int) -> NDArray[np.int64]:
    """Return the hotels of a city, the most popular first."""
    rng = np.random.default_rng(city)
    return rng.integers(1000, 10_000_000, int(rng.integers(30, HOTELS_PER_CITY)))
