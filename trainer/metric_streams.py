"""Metrics batch by batch, in memory that does not grow with the number of samples.

NE and calibration are sums. AUC needs every score once: equal ones are added up, and when more
than 2**20 differ, neighbours are taken for equal, which bounds what AUC can be off by. AUC within
keys needs the samples of a key together: consecutive ones are closed when the next key begins,
scattered ones wait in temporary files.
"""

from __future__ import annotations

import tempfile
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from schemas.hashing import as_bits, splitmix64
from trainer.metrics import Floats, KeyedAuc, keyed_auc

MOST_SCORES = 1 << 20
"""Distinct scores that AUC keeps; 24 bytes each, about 150 MB at most while they are sorted."""
MOST_SAMPLES = 1 << 20
"""Samples of scattered keys in memory, 32 bytes each; beyond, they go to temporary files."""
NUM_FILES = 64
"""Temporary files; one of them is in memory at a time."""

_SAMPLE = np.dtype([("key", np.int64), ("label", "f8"), ("score", "f8"), ("weight", "f8")])


class ScoreTable:
    """AUC over samples that come in parts, with a bound of its error."""

    def __init__(self, most: int = MOST_SCORES) -> None:
        """Start empty.

        Args:
            most: distinct scores that are kept.
        """
        self._most = most
        self._shift = 0
        self._keys = np.zeros(0, np.int64)
        self._weights = np.zeros((0, 2))
        self._waiting: list[tuple[NDArray[np.int64], Floats]] = []
        self._num_waiting = 0
        self._has_nan = False

    def add(self, labels: Floats, scores: Floats, weights: Floats) -> None:
        """Take some samples: (n,) labels from 0 to 1, scores and weights."""
        self._has_nan |= bool(np.isnan(scores).any())
        classes = np.stack([weights * labels, weights * (1 - labels)], axis=1)
        self._waiting.append((ordered_bits(scores) >> self._shift, classes))
        self._num_waiting += len(scores)
        if self._num_waiting >= self._most:
            self._merge()

    @property
    def auc(self) -> float:
        """How often a positive scores higher than a negative, a tie counting half; or NaN."""
        self._merge()
        positive, negative = self._weights.T
        pairs = positive.sum() * negative.sum()
        if self._has_nan or not pairs > 0:
            return float("nan")
        below = np.cumsum(negative) - negative
        return float(positive @ (below + negative / 2) / pairs)

    @property
    def error(self) -> float:
        """The most that `auc` is off by, beside rounding: half the pairs taken for ties."""
        self._merge()
        positive, negative = self._weights.T
        pairs = positive.sum() * negative.sum()
        return float(positive @ negative / 2 / pairs) if self._shift and pairs > 0 else 0.0

    def _merge(self) -> None:
        """Add up equal scores; drop lower bits of all while too many differ."""
        keys = np.concatenate([self._keys, *(k for k, _ in self._waiting)])
        weights = np.concatenate([self._weights, *(w for _, w in self._waiting)])
        order = np.argsort(keys, kind="stable")
        self._keys, self._weights = _added_up(keys[order], weights[order])
        self._waiting, self._num_waiting = [], 0
        while len(self._keys) > self._most:
            self._shift += 1
            self._keys, self._weights = _added_up(self._keys >> 1, self._weights)


def ordered_bits(scores: Floats) -> NDArray[np.int64]:
    """Return integers in the order of some float64 scores; both zeros are equal.

    Example:
        >>> bits = ordered_bits(np.array([-np.inf, -1.5, -0.0, 0.0, 2.0]))
        >>> bool((np.diff(bits) >= 0).all()), int(bits[2]), int(bits[3])
        (True, 0, 0)
    """
    bits = (scores + 0.0).view(np.int64)
    return np.where(bits < 0, ~bits | np.int64(-(2**63)), bits)


def _added_up(keys: NDArray[np.int64], weights: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Return distinct keys of sorted ones and the sums of their weights."""
    if not len(keys):
        return keys, weights
    first = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
    return keys[first], np.add.reduceat(weights, first, axis=0)


class SessionAuc:
    """AUC within sessions that come one after the other; keeps the samples of the open one."""

    def __init__(self, gap: int | None = None) -> None:
        """Start empty.

        Args:
            gap: a longer pause of the same key starts another session; None for no limit.
        """
        self._gap = gap
        self._total = KeyedAuc()
        self._open: tuple[NDArray[Any], ...] = ()

    def add(
        self,
        keys: NDArray[np.int64],
        labels: Floats,
        scores: Floats,
        weights: Floats,
        times: NDArray[np.int64] | None = None,
    ) -> None:
        """Take the next samples: (n,) each; `times` in the unit of the gap."""
        time = keys if times is None else times
        columns: Any = (keys, time, labels, scores, weights)
        if self._open:
            columns = [np.concatenate(pair) for pair in zip(self._open, columns, strict=True)]
        key, time, *found = columns
        starts = key[1:] != key[:-1]
        if self._gap is not None:
            starts |= np.diff(time) > self._gap
        session = np.append(0, np.cumsum(starts))[: len(key)]
        last = int(np.searchsorted(session, session[-1])) if len(session) else 0
        self._total += _within(session[:last], *(c[:last] for c in found))
        self._open = tuple(c[last:] for c in columns)

    def finish(self) -> KeyedAuc:
        """Return the AUC within all sessions, the open one included; the next part begins anew."""
        if self._open:
            keys, _, *columns = self._open
            self._total += _within(np.zeros(len(keys), np.int64), *columns)
            self._open = ()
        return self._total


def _within(keys: NDArray[np.int64], labels: Floats, scores: Floats, weights: Floats) -> KeyedAuc:
    return keyed_auc(labels, scores, keys, weights)


class ScatteredAuc:
    """AUC within keys whose samples come in any order."""

    def __init__(self, most: int = MOST_SAMPLES, num_files: int = NUM_FILES) -> None:
        """Start empty.

        Args:
            most: samples that are kept in memory.
            num_files: files that others go to, by the hash of their key.
        """
        self._most = most
        self._num_files = num_files
        self._files: list[IO[bytes]] = []
        self._waiting: list[NDArray[np.void]] = []
        self._num_waiting = 0

    def add(self, keys: NDArray[np.int64], labels: Floats, scores: Floats, weights: Floats) -> None:
        """Take some samples, (n,) each."""
        samples = np.empty(len(keys), _SAMPLE)
        for name, column in zip(_SAMPLE.names or (), (keys, labels, scores, weights), strict=True):
            samples[name] = column
        self._waiting.append(samples)
        self._num_waiting += len(samples)
        if self._num_waiting > self._most:
            self._spill()

    def finish(self) -> KeyedAuc:
        """Return the AUC within all keys."""
        if not self._files:
            return _of_samples(np.concatenate([np.empty(0, _SAMPLE), *self._waiting]))
        self._spill()
        total = KeyedAuc()
        for file in self._files:
            file.seek(0)
            total += _of_samples(np.frombuffer(file.read(), _SAMPLE))
            file.close()
        self._files = []
        return total

    def _spill(self) -> None:
        """Move what waits to the files; nothing else has a name for them."""
        if not self._files:
            self._files = [tempfile.TemporaryFile() for _ in range(self._num_files)]  # noqa: SIM115
        samples = np.concatenate([np.empty(0, _SAMPLE), *self._waiting])
        place = splitmix64(as_bits(samples["key"])) % np.uint64(self._num_files)
        for number, file in enumerate(self._files):
            file.write(samples[place == number].tobytes())
        self._waiting, self._num_waiting = [], 0


def _of_samples(samples: NDArray[np.void]) -> KeyedAuc:
    return keyed_auc(samples["label"], samples["score"], samples["key"], samples["weight"])
