"""State the true probability of a click in the demo log."""

import numpy as np

from pipelines.generator.items import item_discount, item_genre, item_price_band, item_quality
from pipelines.generator.random import CARDINALITIES, NUM_GENRES
from pipelines.generator.users import main_genre, second_genre, user_bias

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

    Args:
        user: (n,) int64.
        item: (n,) int64.
        query: (n,) int64.
        position: (n,) int64, 0 is the top of the page.
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
