"""Users and items of the demo log, as pure functions of their ids.

An item has one genre, a popularity, a quality and attributes. A user has a main and a second genre,
which histories, shown items and clicks follow.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from presage.schemas.hashing import splitmix64

CARDINALITIES = {
    "user_id": 1_000_000,
    "user_country": 60,
    "user_region": 1_000,
    "user_city": 20_000,
    "user_language": 40,
    "user_device": 500,
    "user_os": 20,
    "user_segment": 200,
    "user_interest": 5_000,
    "user_tier": 5,
    "page": 300,
    "hour": 24,
    "slot": 8,
    "query": 100_000,
    "item_id": 1_000_000,
    "item_category": 100,
    "item_subcategory": 1_500,
    "item_brand": 50_000,
    "item_seller": 100_000,
    "item_price_band": 30,
    "item_color": 60,
    "item_topic": 3_000,
    "item_campaign": 20_000,
    "item_creative": 200_000,
    "item_format": 6,
    "item_age_band": 12,
}
"""Distinct ids of each scalar feature, in column order."""

NUM_GENRES = 16
"""Number of latent genres of users and items."""

_GOLDEN = 0x9E3779B97F4A7C15


def mix(values: np.ndarray, stream: int) -> np.ndarray:
    """Hash integers to uint64 with splitmix64; one-to-one for each stream."""
    return splitmix64(values.astype(np.uint64) + np.uint64((stream - 1) * _GOLDEN % (1 << 64)))


def unit(hashes: np.ndarray) -> np.ndarray:
    """Map uint64 hashes to float64 in [0, 1)."""
    return (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53


def normal(hashes: np.ndarray) -> np.ndarray:
    """Map uint64 hashes to about standard normal numbers (sum of four uniforms)."""
    total = np.zeros(hashes.shape)
    for shift in (0, 16, 32, 48):
        total += (hashes >> np.uint64(shift)) & np.uint64(0xFFFF)
    return (total / 65536.0 - 2.0) * np.sqrt(3.0)


def skewed(uniforms: np.ndarray, cardinality: int, power: int = 1) -> np.ndarray:
    """Map uniforms to ids where small ids are frequent: floor(cardinality * u ** power)."""
    scaled = uniforms * cardinality
    for _ in range(power - 1):  # a float power is ten times slower
        scaled = scaled * uniforms
    return scaled.astype(np.int64)


# Items.

NUM_BUCKETS = CARDINALITIES["item_id"] // NUM_GENRES
"""Items of equal popularity form a bucket with one item of each genre: taste moves accesses within
a bucket only and does not change the popularity curve."""

HOT_FRACTION = 0.01
HOT_SHARE = 0.92
"""Fraction of the items called hot, and of the accesses that they take. Source: BagPipe."""

ZIPF_EXPONENT = 0.946
ZIPF_CUTOFF_BUCKETS = 955.0
UNIFORM_SHARE = 0.002
"""Popularity of bucket r: (r + 1) ** -0.946 * exp(-r / 955), and 0.2 % of accesses
spread evenly over the catalogue (cold items).

Source: exponent, cut-off and number of lookups fitted together (Nelder-Mead, Poisson
counts; the uniform share was set) to BagPipe's hot share 0.92 and to Meta's 2022 reuse
histogram (dlrm_datasets, embedding_bag/2022). The two agree on one table of a million
rows only near 420,000 lookups, so the number is part of the fit: Meta's tables have
1.8 million on average, and other numbers give other histograms. There the largest
difference of the cumulative histogram of unique rows is 0.026 and the mean reuse 15.0
against 12.7. The histogram of accesses differs by 0.16 and is not matched: Meta's adds
up 788 tables, some with rows used far more often than any item here.
"""

QUANTILE_CELLS = 1 << 15
"""Cells of the inverse cumulative popularity; the cold tail covers 65 of them."""

_ITEM_STRIDE = 611_953  # coprime to the number of items and 1 modulo NUM_GENRES
_ITEM_SHIFT = 271_824  # 0 modulo NUM_GENRES, so that an id keeps the genre of its rank


@cache
def popularity_quantiles() -> np.ndarray:
    """Return the inverse cumulative popularity over buckets of items.

    Returns:
        (QUANTILE_CELLS + 1,) float64, the real-valued bucket at each quantile.
    """
    bucket = np.arange(NUM_BUCKETS)
    weight = (bucket + 1.0) ** -ZIPF_EXPONENT * np.exp(-bucket / ZIPF_CUTOFF_BUCKETS)
    weight *= (1.0 - UNIFORM_SHARE) / weight.sum()
    weight += UNIFORM_SHARE / NUM_BUCKETS
    num_hot = int(NUM_BUCKETS * HOT_FRACTION)
    weight[:num_hot] *= HOT_SHARE / weight[:num_hot].sum()
    weight[num_hot:] *= (1.0 - HOT_SHARE) / weight[num_hot:].sum()
    cumulative = np.concatenate([[0.0], np.cumsum(weight)])
    grid = np.linspace(0.0, cumulative[-1], QUANTILE_CELLS + 1)
    return np.interp(grid, cumulative, np.arange(NUM_BUCKETS + 1.0))


def items_at(uniforms: np.ndarray, genres: np.ndarray) -> np.ndarray:
    """Return the items at popularity quantiles within genres.

    Args:
        uniforms: (n,) float64 in [0, 1).
        genres: (n,) int64 below NUM_GENRES.

    Returns:
        (n,) int64 item ids, popular ones scattered over the whole range.
    """
    quantiles, position = popularity_quantiles(), uniforms * QUANTILE_CELLS
    cell = position.astype(np.int64)
    low = quantiles[cell]
    bucket = (low + (position - cell) * (quantiles[cell + 1] - low)).astype(np.int64)
    np.minimum(bucket, NUM_BUCKETS - 1, out=bucket)
    rank = bucket * NUM_GENRES + genres
    return (rank * _ITEM_STRIDE + _ITEM_SHIFT) % CARDINALITIES["item_id"]


def item_genre(item: np.ndarray) -> np.ndarray:
    """Return each item's genre."""
    return item % NUM_GENRES


def item_brand(item: np.ndarray) -> np.ndarray:
    """Return each item's brand; all items of a brand have one genre."""
    num_brands = CARDINALITIES["item_brand"] // NUM_GENRES
    return skewed(unit(mix(item, 20)), num_brands, 4) * NUM_GENRES + item % NUM_GENRES


def item_quality(item: np.ndarray) -> np.ndarray:
    """Return each item's latent quality, about standard normal."""
    return normal(mix(item, 21))


def item_price_band(item: np.ndarray) -> np.ndarray:
    """Return each item's price band, 0 is the cheapest."""
    return skewed(unit(mix(item, 40)), CARDINALITIES["item_price_band"])


def item_discount(item: np.ndarray) -> np.ndarray:
    """Return each item's discount, a fraction; 0 for seven items in ten."""
    steps = np.maximum(unit(mix(item, 43)) - 0.7, 0.0) / 0.3 * 10.0
    return np.ceil(steps) * 0.05


def _genre_coded(item: np.ndarray, name: str, stream: int, power: int) -> np.ndarray:
    """Return ids that determine the item's genre."""
    inner = CARDINALITIES[name] // NUM_GENRES
    return skewed(unit(mix(item, stream)), inner, power) * NUM_GENRES + item % NUM_GENRES


def item_ids(item: np.ndarray) -> dict[str, np.ndarray]:
    """Return the 12 item-side ids, each a function of the item id."""
    ids = {
        "item_id": item,
        "item_category": _genre_coded(item, "item_category", 22, 1),
        "item_subcategory": _genre_coded(item, "item_subcategory", 23, 2),
        "item_brand": item_brand(item),
        "item_price_band": item_price_band(item),
        "item_topic": _genre_coded(item, "item_topic", 24, 2),
    }
    plain = {
        "item_seller": 4,
        "item_color": 2,
        "item_campaign": 3,
        "item_creative": 1,
        "item_format": 2,
        "item_age_band": 1,
    }
    for stream, (name, power) in enumerate(plain.items(), start=25):
        ids[name] = skewed(unit(mix(item, stream)), CARDINALITIES[name], power)
    return ids


def item_dense(item: np.ndarray) -> dict[str, np.ndarray]:
    """Return the 5 item-side dense features; rating and click rate depend on the quality."""
    quality = item_quality(item)
    click_rate = 0.2 / (1.0 + np.exp(-quality - 0.4 * normal(mix(item, 42))))
    return {
        "item_price": np.exp(0.2 * item_price_band(item) + 0.1 * normal(mix(item, 41))),
        "item_discount": item_discount(item),
        "item_rating": np.clip(3.7 + 0.5 * quality + 0.4 * normal(mix(item, 44)), 1.0, 5.0),
        "item_ctr_7d": click_rate,
        "item_age_days": -60.0 * np.log1p(-unit(mix(item, 45))),
    }


# Users.

GENRE_SHARES = {
    "clicked": (0.55, 0.25, 0.0),
    "viewed": (0.45, 0.20, 0.0),
    "shown": (0.35, 0.20, 0.15),
}
"""Fraction of items of the user's main genre, of the second, and of the query's; the others are of
any genre. Taste can be learned from histories. Source: none, chosen with `CLICK_WEIGHTS`."""


def main_genre(user: np.ndarray) -> np.ndarray:
    """Return each user's main genre."""
    return (mix(user, 1) & np.uint64(15)).astype(np.int64)


def second_genre(user: np.ndarray) -> np.ndarray:
    """Return each user's second genre, which may equal the main one."""
    return (mix(user, 1) >> np.uint64(4) & np.uint64(15)).astype(np.int64)


def pick_genres(
    uniforms: np.ndarray, user: np.ndarray, kind: str, query: np.ndarray | None = None
) -> np.ndarray:
    """Choose genres by the users' taste.

    Args:
        uniforms: (n,) float64 in [0, 1).
        user: (n,) int64.
        kind: key of `GENRE_SHARES`.
        query: (n,) int64, needed if the kind has a share for the query.
    """
    main, second, asked = np.cumsum(GENRE_SHARES[kind])
    genre = ((uniforms - asked) * (NUM_GENRES / (1.0 - asked))).astype(np.int64)
    if query is not None:
        genre = np.where(uniforms < asked, query % NUM_GENRES, genre)
    genre = np.where(uniforms < second, second_genre(user), genre)
    return np.where(uniforms < main, main_genre(user), genre)


def user_ids(user: np.ndarray, versions: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the 10 user-side ids.

    `versions` has, for each feature that can change, the (n,) number of changes so far.
    """

    def draw(name: str, stream: int) -> np.ndarray:
        return unit(mix(user + (versions[name].astype(np.int64) << 40), stream))

    region = skewed(unit(mix(user, 2)), CARDINALITIES["user_region"], 2)
    device = skewed(draw("user_device", 4), CARDINALITIES["user_device"], 3)
    interest, segment = draw("user_interest", 5), draw("user_segment", 6)
    other_genre = (mix(user, 9) & np.uint64(15)).astype(np.int64)
    shows_main_genre = unit(mix(user, 10)) < 0.6
    return {
        "user_id": user,
        "user_country": region * CARDINALITIES["user_country"] // CARDINALITIES["user_region"],
        "user_region": region,
        "user_city": region * 20 + skewed(draw("user_city", 3), 20, 2),
        "user_language": skewed(draw("user_language", 7), CARDINALITIES["user_language"], 3),
        "user_device": device,
        "user_os": device % CARDINALITIES["user_os"],
        "user_segment": skewed(segment, 12) * NUM_GENRES + second_genre(user),
        "user_interest": skewed(interest, 312, 2) * NUM_GENRES
        + np.where(shows_main_genre, main_genre(user), other_genre),
        "user_tier": skewed(draw("user_tier", 8), CARDINALITIES["user_tier"], 2),
    }


def user_bias(user: np.ndarray) -> np.ndarray:
    """Return each user's click bias, about standard normal."""
    return normal(mix(user, 11))


def user_dense(user: np.ndarray, num_clicks: np.ndarray) -> dict[str, np.ndarray]:
    """Return the 5 user-side dense features.

    `num_clicks` are the (n,) clicks in the session before this request; views are counted nightly,
    so the click rate changes with clicks only.
    """
    sessions = 1.0 + np.floor(-6.0 * np.log1p(-unit(mix(user, 12))))
    views = sessions * 16.0
    rate = 1.0 / (1.0 + np.exp(1.6 - 0.6 * user_bias(user) - 0.2 * normal(mix(user, 13))))
    clicks = np.floor(views * rate) + num_clicks
    return {
        "user_age": 18.0 + np.floor(62.0 * unit(mix(user, 14)) ** 1.5),
        "user_tenure_days": np.floor(-400.0 * np.log1p(-unit(mix(user, 15)))),
        "user_sessions_7d": sessions,
        "user_clicks_7d": clicks,
        "user_ctr_7d": clicks / views,
    }
