"""Metrics in parts against metrics over all samples at once, and against sums over all pairs."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.trainer.exact_metrics import auc, calibration, gauc, normalized_entropy
from tests.trainer.test_metrics import pairwise_auc
from trainer.metrics import (
    GroupAuc,
    LossSums,
    SessionAuc,
    StreamingAuc,
    loss_sums,
    ordered_bits,
)

Array = NDArray[Any]


@st.composite
def parts(draw: st.DrawFn) -> list[tuple[Array, ...]]:
    """Draw batches of (key, time, label, score, weight): few scores, sums of weights exact."""
    sample = st.tuples(
        st.integers(0, 3),
        st.integers(0, 9),
        st.integers(0, 1),
        st.integers(-3, 3),
        st.integers(0, 32).map(lambda eighths: eighths / 8),
    )
    drawn = draw(st.lists(st.lists(sample, max_size=12), max_size=6))
    found = []
    for batch in drawn:
        columns = np.array(batch, float).reshape(-1, 5).T
        found.append((columns[0].astype(int), columns[1].astype(int), *columns[2:]))
    return found


def whole(batches: list[tuple[Array, ...]]) -> tuple[Array, ...]:
    empty = (np.zeros(0, int), np.zeros(0, int), np.zeros(0), np.zeros(0), np.zeros(0))
    return tuple(np.concatenate(c) for c in zip(empty, *batches, strict=True))


@pytest.mark.slow
@given(batches=parts(), most=st.sampled_from([8, 1 << 20]))
def test_streamed_sums_and_auc_equal_those_over_all_samples(
    batches: list[tuple[Array, ...]], most: int
) -> None:
    sums, table = LossSums(), StreamingAuc(most)
    for _, _, *found in batches:
        sums += loss_sums(*found)
        table.add(*found)
    _, _, *columns = whole(batches)
    np.testing.assert_allclose(sums.normalized_entropy, normalized_entropy(*columns), rtol=1e-13)
    np.testing.assert_allclose(sums.calibration, calibration(*columns), rtol=1e-13)
    np.testing.assert_allclose(table.auc, auc(*columns), rtol=1e-14)  # 7 scores: nothing dropped
    assert table.error == 0


@pytest.mark.slow
@given(batches=parts(), most=st.sampled_from([0, 5, 1 << 20]))
def test_auc_of_scattered_keys_does_not_depend_on_files(
    batches: list[tuple[Array, ...]], most: int
) -> None:
    groups = GroupAuc(most, num_files=3)
    for keys, _, *found in batches:
        groups.add(keys, *found)
    keys, _, *columns = whole(batches)
    found = groups.finish()
    np.testing.assert_allclose(
        found.mean, gauc(columns[0], columns[1], keys, columns[2]), rtol=1e-14
    )
    assert found.num_keys + found.num_one_class == len(set(keys.tolist()))


def session_auc_by_hand(columns: tuple[Array, ...], gap: int | None) -> tuple[float, int, int]:
    """Cut sessions sample by sample and compare all pairs within each."""
    sessions: list[list[int]] = []
    for i, (key, time) in enumerate(zip(*columns[:2], strict=True)):
        last = sessions[-1][-1] if sessions else None
        same = last is not None and columns[0][last] == key
        if same and (gap is None or time - columns[1][last] <= gap):
            sessions[-1].append(i)
        else:
            sessions.append([i])
    total = size = 0.0
    defined = 0
    for mine in sessions:
        labels, scores, weights = (c[mine] for c in columns[2:])
        area = pairwise_auc(labels, scores, weights)
        if not math.isnan(area):
            total, size, defined = total + area * weights.sum(), size + weights.sum(), defined + 1
    return total / size if size else math.nan, defined, len(sessions) - defined


@pytest.mark.slow
@given(batches=parts(), gap=st.sampled_from([None, 0, 2]))
def test_session_auc_is_that_of_each_session_whatever_batches_cut(
    batches: list[tuple[Array, ...]], gap: int | None
) -> None:
    stream = SessionAuc(gap)
    for keys, times, *found in batches:
        labels, scores, weights = found
        stream.add(keys, labels, scores, weights, times)
    wanted, defined, one_class = session_auc_by_hand(whole(batches), gap)
    found = stream.finish()
    np.testing.assert_allclose(found.mean, wanted, rtol=1e-14)
    assert (found.num_keys, found.num_one_class) == (defined, one_class)


@pytest.mark.parametrize("most", [64, 1000])
def test_auc_of_more_scores_than_are_kept_is_within_its_stated_error(most: int) -> None:
    rng = np.random.default_rng(5)
    scores = rng.normal(0, 2, 20_000)
    labels = (rng.random(20_000) < 1 / (1 + np.exp(-scores))).astype(float)
    weights = rng.exponential(1.0, 20_000)
    table = StreamingAuc(most)
    for part in range(0, 20_000, 700):
        table.add(*(c[part : part + 700] for c in (labels, scores, weights)))
    assert 0 < abs(table.auc - auc(labels, scores, weights)) <= table.error
    assert table.error < 20 / most


def test_auc_of_a_score_that_is_no_number_is_nan() -> None:
    table = StreamingAuc()
    table.add(np.array([1.0, 0.0]), np.array([math.nan, 0.0]), np.ones(2))
    assert math.isnan(table.auc)


@given(scores=st.lists(st.floats(allow_nan=False), min_size=2, max_size=2))
def test_ordered_bits_compare_as_scores_do(scores: list[float]) -> None:
    bits = ordered_bits(np.array(scores)).tolist()
    for (a, x), (b, y) in itertools.permutations(zip(scores, bits, strict=True), 2):
        assert (a < b) == (x < y)
        assert (a == b) == (x == y)
