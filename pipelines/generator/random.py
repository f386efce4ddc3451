"""Hash ids to numbers: what an id means is computed, never stored."""

import numpy as np

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
"""Latent genres in which users and items meet."""

_GOLDEN = 0x9E3779B97F4A7C15


def mix(values: np.ndarray, stream: int) -> np.ndarray:
    """Hash integers to uint64 with splitmix64; one-to-one for each stream.

    Args:
        values: any shape, integers.
        stream: names an independent hash function.
    """
    state = values.astype(np.uint64) + np.uint64(stream * _GOLDEN % (1 << 64))
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return state


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
