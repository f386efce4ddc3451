"""State what the items of the demo log are, as pure functions of the item id.

An item has one genre, a popularity, a quality and attributes.
"""

import numpy as np

from pipelines.generator.random import CARDINALITIES, NUM_GENRES, mix, normal, skewed, unit

NUM_BUCKETS = CARDINALITIES["item_id"] // NUM_GENRES
"""Items of equal popularity form a bucket, one of each genre: taste then moves
accesses within a bucket only, and the popularity curve stays what it is."""

HOT_FRACTION = 0.01
"""Fraction of rows called hot. Source: BagPipe, 1 % of rows take 92 % of accesses."""

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


def popularity_quantiles(hot_share: float) -> np.ndarray:
    """Return the inverse cumulative popularity over buckets of items.

    Args:
        hot_share: fraction of accesses that `HOT_FRACTION` of the items take, in (0, 1).

    Returns:
        (QUANTILE_CELLS + 1,) float64, the real-valued bucket at each quantile.
    """
    bucket = np.arange(NUM_BUCKETS)
    weight = (bucket + 1.0) ** -ZIPF_EXPONENT * np.exp(-bucket / ZIPF_CUTOFF_BUCKETS)
    weight *= (1.0 - UNIFORM_SHARE) / weight.sum()
    weight += UNIFORM_SHARE / NUM_BUCKETS
    num_hot = int(NUM_BUCKETS * HOT_FRACTION)
    weight[:num_hot] *= hot_share / weight[:num_hot].sum()
    weight[num_hot:] *= (1.0 - hot_share) / weight[num_hot:].sum()
    cumulative = np.concatenate([[0.0], np.cumsum(weight)])
    grid = np.linspace(0.0, cumulative[-1], QUANTILE_CELLS + 1)
    return np.interp(grid, cumulative, np.arange(NUM_BUCKETS + 1.0))


def items_at(uniforms: np.ndarray, genres: np.ndarray, quantiles: np.ndarray) -> np.ndarray:
    """Return the items at popularity quantiles within genres.

    Args:
        uniforms: (n,) float64 in [0, 1).
        genres: (n,) int64 below NUM_GENRES.
        quantiles: from `popularity_quantiles`.

    Returns:
        (n,) int64 item ids, popular ones scattered over the whole range.
    """
    place = uniforms * QUANTILE_CELLS
    cell = place.astype(np.int64)
    low = quantiles[cell]
    bucket = (low + (place - cell) * (quantiles[cell + 1] - low)).astype(np.int64)
    np.minimum(bucket, NUM_BUCKETS - 1, out=bucket)
    rank = bucket * NUM_GENRES + genres
    return (rank * _ITEM_STRIDE + _ITEM_SHIFT) % CARDINALITIES["item_id"]


def item_genre(item: np.ndarray) -> np.ndarray:
    """Return each item's genre."""
    return item % NUM_GENRES


def item_brand(item: np.ndarray) -> np.ndarray:
    """Return each item's brand; a brand keeps to one genre."""
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
    """Return ids of which the item's genre is a function."""
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
    """Return the 5 item-side dense features; rating and click rate show the quality."""
    quality = item_quality(item)
    click_rate = 0.2 / (1.0 + np.exp(-quality - 0.4 * normal(mix(item, 42))))
    return {
        "item_price": np.exp(0.2 * item_price_band(item) + 0.1 * normal(mix(item, 41))),
        "item_discount": item_discount(item),
        "item_rating": np.clip(3.7 + 0.5 * quality + 0.4 * normal(mix(item, 44)), 1.0, 5.0),
        "item_ctr_7d": click_rate,
        "item_age_days": -60.0 * np.log1p(-unit(mix(item, 45))),
    }
