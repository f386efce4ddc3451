"""Metrics, whole and streamed, against sums over all pairs, torchmetrics and TorchRec."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torchmetrics.functional.classification import binary_auroc
from torchrec.metrics.auc import compute_auc
from torchrec.metrics.calibration import compute_calibration, get_calibration_states
from torchrec.metrics.gauc import compute_gauc_3d
from torchrec.metrics.ne import compute_ne, get_ne_states

from presage.trainer.evaluation.metrics import (
    GroupAuc,
    LossSums,
    SessionAuc,
    StreamingAuc,
    loss_sums,
    ordered_bits,
)
from tests.trainer.exact_metrics import auc, calibration, gauc, normalized_entropy

Array = NDArray[Any]


def pairwise_auc(labels: Array, scores: Array, weights: Array) -> float:
    """Compare each positive with each negative."""
    won = pairs = 0.0
    for i, j in itertools.product(np.flatnonzero(labels == 1), np.flatnonzero(labels == 0)):
        pair = weights[i] * weights[j]
        pairs += pair
        won += pair * (1.0 if scores[i] > scores[j] else 0.5 if scores[i] == scores[j] else 0.0)
    return won / pairs if pairs else math.nan


def pairwise_gauc(labels: Array, scores: Array, keys: Array, weights: Array) -> float:
    """Average over the keys that have both classes."""
    total = size = 0.0
    for key in set(keys.tolist()):
        mine = keys == key
        area = pairwise_auc(labels[mine], scores[mine], weights[mine])
        if not math.isnan(area):
            total += area * weights[mine].sum()
            size += weights[mine].sum()
    return total / size if size else math.nan


SAMPLES = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.integers(-3, 3),  # few scores, many ties
        st.integers(0, 4),
        st.integers(0, 32).map(lambda eighths: eighths / 8),  # sums are exact
    ),
    max_size=40,
)


@pytest.mark.slow
@given(samples=SAMPLES)
def test_auc_of_any_samples_equals_the_sum_over_pairs(samples: list[tuple[Any, ...]]) -> None:
    labels, scores, keys, weights = np.array(samples, float).reshape(-1, 4).T
    for w in (np.ones(len(labels)), weights):
        area, mean_area = auc(labels, scores, w), gauc(labels, scores, keys, w)
        np.testing.assert_allclose(area, pairwise_auc(labels, scores, w), rtol=1e-14)
        np.testing.assert_allclose(mean_area, pairwise_gauc(labels, scores, keys, w), rtol=1e-14)
    np.testing.assert_equal(auc(labels, scores), auc(labels, scores, np.ones(len(labels))))


@given(samples=SAMPLES, seed=st.integers(0, 9))
def test_metrics_of_samples_in_another_order_are_equal(
    samples: list[tuple[Any, ...]], seed: int
) -> None:
    columns = np.array(samples, float).reshape(-1, 4).T
    shuffled = columns[:, np.random.default_rng(seed).permutation(len(samples))]
    for ours, theirs in zip(_all_metrics(*columns), _all_metrics(*shuffled), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)


def _all_metrics(labels: Array, scores: Array, keys: Array, weights: Array) -> list[float]:
    return [
        auc(labels, scores, weights),
        gauc(labels, scores, keys, weights),
        normalized_entropy(labels, scores, weights),
        calibration(labels, scores, weights),
    ]


@pytest.fixture
def logged() -> dict[str, Array]:
    """5,000 samples of 300 keys whose labels follow their logits."""
    rng = np.random.default_rng(3)
    logits = rng.normal(-1, 1.5, 5000)
    return {
        "labels": (rng.random(5000) < 1 / (1 + np.exp(-logits))).astype(np.int8),
        "logits": logits + rng.normal(0, 0.5, 5000),
        "weights": rng.exponential(1.0, 5000),
        "keys": np.sort(rng.integers(0, 300, 5000)),
    }


def _of(logged: dict[str, Array], *names: str) -> list[torch.Tensor]:
    return [torch.from_numpy(logged[name].astype(np.float64)) for name in names]


def test_normalized_entropy_equals_torchrec(logged: dict[str, Array]) -> None:
    labels, logits, weights = _of(logged, "labels", "logits", "weights")
    states = get_ne_states(labels, torch.sigmoid(logits), weights, 1e-12)
    theirs = compute_ne(
        states["cross_entropy_sum"],
        states["weighted_num_samples"],
        states["pos_labels"],
        states["neg_labels"],
        1e-12,
    )
    ours = normalized_entropy(logged["labels"], logged["logits"], logged["weights"])
    assert ours == pytest.approx(theirs.item(), rel=1e-12)


def test_calibration_equals_torchrec(logged: dict[str, Array]) -> None:
    labels, logits, weights = _of(logged, "labels", "logits", "weights")
    states = get_calibration_states(labels, torch.sigmoid(logits), weights)
    theirs = compute_calibration(states["calibration_num"], states["calibration_denom"])
    ours = calibration(logged["labels"], logged["logits"], logged["weights"])
    assert ours == pytest.approx(theirs.item(), rel=1e-12)


def test_auc_with_weights_and_no_ties_equals_torchrec(logged: dict[str, Array]) -> None:
    labels, logits, weights = _of(logged, "labels", "logits", "weights")
    theirs = compute_auc(1, [logits[None]], [labels[None]], [weights[None]])
    ours = auc(logged["labels"], logged["logits"], logged["weights"])
    assert ours == pytest.approx(theirs.item(), rel=1e-12)


def test_auc_with_ties_equals_torchmetrics(logged: dict[str, Array]) -> None:
    scores = np.clip(np.round(logged["logits"]), -5, 5) / 16 + 0.5  # exact in float32, too
    theirs = binary_auroc(torch.tensor(scores), torch.tensor(logged["labels"]), thresholds=None)
    assert auc(logged["labels"], scores) == pytest.approx(theirs.item(), rel=1e-6)


def test_gauc_over_keys_of_equal_weight_equals_torchrec(logged: dict[str, Array]) -> None:
    # TorchRec averages over keys, we over samples: equal when all keys have the same number.
    labels, logits = _of(logged, "labels", "logits")
    shape = (1, 200, 25)  # (num_tasks, num_keys, samples_per_key)
    states = compute_gauc_3d(logits.view(shape), labels.view(shape), torch.ones(shape).double())
    theirs = (states["auc_sum"] / states["num_samples"]).item()
    ours = gauc(logged["labels"], logged["logits"], np.repeat(np.arange(200), 25))
    assert ours == pytest.approx(theirs, rel=1e-9)


def test_gauc_with_any_weights_equals_the_sum_over_pairs(logged: dict[str, Array]) -> None:
    columns = [logged[name] for name in ("labels", "logits", "keys", "weights")]
    assert gauc(*columns) == pytest.approx(pairwise_gauc(*columns), rel=1e-12)


def test_gauc_with_one_key_is_auc(logged: dict[str, Array]) -> None:
    labels, logits, weights = (logged[n] for n in ("labels", "logits", "weights"))
    assert gauc(labels, logits, np.full(5000, "a"), weights) == auc(labels, logits, weights)


def test_gauc_with_keys_that_hide_a_reversal_differs_from_auc() -> None:
    # Within each key the positive scores lower; the level of the keys hides it from AUC.
    labels, scores = [0, 1, 1, 1, 0], [0.2, 0.1, 0.9, 0.9, 0.95]
    assert auc(labels, scores) == pytest.approx(2 / 6)
    assert gauc(labels, scores, np.array([1, 1, 2, 2, 2])) == 0.0


def test_gauc_weights_keys_by_their_samples() -> None:
    # Key "a" has 2 samples and AUC 1, key "b" 3 and AUC 0, key "c" one class.
    labels, scores = [1, 0, 0, 0, 1, 1], [2.0, 1.0, 2.0, 2.0, 1.0, 0.0]
    keys = np.array(["a", "a", "b", "b", "b", "c"])
    assert gauc(labels, scores, keys) == pytest.approx(2 / 5)
    assert gauc(labels, scores, keys, [3, 3, 1, 1, 1, 9]) == pytest.approx(6 / 9)


def test_normalized_entropy_of_the_base_rate_is_one() -> None:
    labels, weights = [1, 0, 0, 1], [1.0, 2.0, 4.0, 1.0]
    base = math.log(2 / 6)  # log odds of a weighted base rate of 2/8
    assert normalized_entropy(labels, [base] * 4, weights) == pytest.approx(1.0, rel=1e-15)


def test_normalized_entropy_of_extreme_logits_is_exact() -> None:
    # sigmoid(800) rounds to 1, whose complement has no logarithm; the loss is 800 all the same.
    with np.errstate(all="raise", under="ignore"):
        wrong = normalized_entropy([1, 0], [-800.0, 800.0])
        right = normalized_entropy([1, 0], [40.0, -40.0])
    assert wrong == pytest.approx(800 / math.log(2), rel=1e-15)
    assert right == pytest.approx(math.exp(-40) / math.log(2), rel=1e-12)


def test_calibration_of_extreme_logits_is_exact() -> None:
    with np.errstate(all="raise", under="ignore"):
        assert calibration([1, 0, 1], [900.0, -900.0, 0.0]) == 0.75


def test_metrics_of_a_sample_without_weight_ignore_it(logged: dict[str, Array]) -> None:
    labels, logits, keys = (logged[n] for n in ("labels", "logits", "keys"))
    weights = np.where(np.arange(5000) % 3 == 0, 0.0, logged["weights"])
    kept = weights > 0
    whole = _all_metrics(labels, logits, keys, weights)
    part = _all_metrics(labels[kept], logits[kept], keys[kept], weights[kept])
    np.testing.assert_allclose(whole, part, rtol=1e-12)


def test_metrics_of_soft_labels_count_each_sample_as_both_classes() -> None:
    soft = _all_metrics(*np.array([[0.25, 1, 0], [0.5, 2, -1], [1, 1, 1], [4, 2, 1.0]]))
    hard = _all_metrics(*np.array([[1, 0, 1, 0], [0.5, 0.5, 2, -1], [1, 1, 1, 1], [1, 3, 2, 1.0]]))
    np.testing.assert_allclose(soft, hard, rtol=1e-14)


KEYS = np.array([1, 1])
UNDEFINED: dict[str, Callable[[], float]] = {
    "auc of nothing": lambda: auc([], []),
    "auc of positives": lambda: auc([1, 1], [0.0, 1.0]),
    "auc of negatives": lambda: auc([0, 0], [0.0, 1.0]),
    "auc of a class without weight": lambda: auc([1, 0], [0.0, 1.0], [1.0, 0.0]),
    "auc of a NaN score": lambda: auc([1, 0, 1], [0.0, math.nan, 1.0]),
    "gauc of nothing": lambda: gauc([], [], np.empty(0, np.int64)),
    "gauc of keys with one class": lambda: gauc([1, 0], [0.0, 1.0], np.array([1, 2])),
    "gauc of a NaN score": lambda: gauc([1, 0], [math.nan, 1.0], KEYS),
    "NE of nothing": lambda: normalized_entropy([], []),
    "NE of positives": lambda: normalized_entropy([1, 1], [0.0, 1.0]),
    "NE of negatives": lambda: normalized_entropy([0, 0], [0.0, 1.0]),
    "NE of a NaN logit": lambda: normalized_entropy([1, 0], [math.nan, 1.0]),
    "calibration of nothing": lambda: calibration([], []),
    "calibration of negatives": lambda: calibration([0, 0], [0.0, 1.0]),
    "calibration of a NaN logit": lambda: calibration([1, 0], [math.nan, 1.0]),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("metric", UNDEFINED.values(), ids=UNDEFINED.keys())
def test_metric_without_a_value_is_nan(metric: Callable[[], float]) -> None:
    found = metric()
    assert isinstance(found, float)
    assert math.isnan(found)


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
