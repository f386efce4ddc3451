"""State who the users of the demo log are, as pure functions of the user id.

A user has a main and a second genre; histories, shown items and clicks follow both.
"""

import numpy as np

from pipelines.generator.random import CARDINALITIES, NUM_GENRES, mix, normal, skewed, unit

GENRE_SHARES = {
    "clicked": (0.55, 0.25, 0.0),
    "viewed": (0.45, 0.20, 0.0),
    "shown": (0.35, 0.20, 0.15),
}
"""Fraction of items of the user's main genre, of the second, and of the query's; the rest
are of any genre. Histories are what makes taste visible. Source: none, chosen with the
weights of `generate_clicks`."""


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
        query: (n,) int64, needed where the kind gives the query a share.
    """
    main, second, asked = np.cumsum(GENRE_SHARES[kind])
    genre = ((uniforms - asked) * (NUM_GENRES / (1.0 - asked))).astype(np.int64)
    if query is not None:
        genre = np.where(uniforms < asked, query % NUM_GENRES, genre)
    genre = np.where(uniforms < second, second_genre(user), genre)
    return np.where(uniforms < main, main_genre(user), genre)


def user_ids(user: np.ndarray, versions: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the 10 user-side ids.

    Args:
        user: (n,) int64.
        versions: for each feature that can change, (n,) how often it did so far.
    """

    def draw(name: str, stream: int) -> np.ndarray:
        return unit(mix(user + (versions[name].astype(np.int64) << 40), stream))

    region = skewed(unit(mix(user, 2)), CARDINALITIES["user_region"], 2)
    device = skewed(draw("user_device", 4), CARDINALITIES["user_device"], 3)
    interest, segment = draw("user_interest", 5), draw("user_segment", 6)
    guess = (mix(user, 9) & np.uint64(15)).astype(np.int64)
    known = unit(mix(user, 10)) < 0.6
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
        + np.where(known, main_genre(user), guess),
        "user_tier": skewed(draw("user_tier", 8), CARDINALITIES["user_tier"], 2),
    }


def user_bias(user: np.ndarray) -> np.ndarray:
    """Return how readily each user clicks, about standard normal."""
    return normal(mix(user, 11))


def user_dense(user: np.ndarray, num_clicks: np.ndarray) -> dict[str, np.ndarray]:
    """Return the 5 user-side dense features.

    Args:
        user: (n,) int64.
        num_clicks: (n,) clicks in the session before this request; what was viewed
            is counted nightly, so the click rate changes with a click only.
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
