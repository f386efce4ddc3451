"""What each unit of sampling does to deduplication, estimated on the same sessions.

The keys with the smallest hashes stand for all (bottom-k): which they are does
not depend on the order of rows. Their samples are counted before anything is
dropped, as each unit would keep them, so both figures come from one build.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.parts.cluster import hash_session_keys
from pipelines.samples.sampling import Unit, always_kept, draws, hash_group, in_evaluation
from pipelines.samples.tuples import Tuples
from schemas.features import FeatureSet
from schemas.hashing import salt_of, splitmix64
from schemas.job import DataConfig
from schemas.layout import SAMPLING, sampling_schema

UNITS: tuple[Unit, ...] = ("session", "sample")
MAX_KEYS = 1024
"""Session keys that the estimate looks at: a few per cent of error, some kilobytes a chunk."""

_SALT = salt_of("sampling estimate")


@dataclass(frozen=True, slots=True)
class UnitCounts:
    """Kept samples and tuples of some session keys; merged by `merge_counts`.

    Attributes:
        keys: (num_keys,) uint64, ascending selection hashes of session keys.
        samples: (num_keys, 2) int64, samples that each unit keeps.
        tuples: group to (num_pairs, 2) uint64, distinct (key, tuple), ascending.
        kept_by: group to (num_pairs,) uint8, bit u when unit u keeps a sample with it.
    """

    keys: NDArray[np.uint64]
    samples: NDArray[np.int64]
    tuples: Mapping[str, NDArray[np.uint64]]
    kept_by: Mapping[str, NDArray[np.uint8]]


def count_units(samples: Tuples, features: FeatureSet, data: DataConfig) -> UnitCounts:
    """Count the training samples of one chunk's smallest keys, before any is dropped."""
    config = data.sampling
    assert config is not None, "only a job that samples compares units"
    training = np.flatnonzero(~in_evaluation(samples, data))
    hashes = splitmix64(hash_session_keys(samples.column(data.session.key)) ^ _SALT)[training]
    keys = np.unique(hashes)[:MAX_KEYS]
    chosen = samples.take(training[hashes <= keys[-1]] if len(keys) else training[:0])
    key = hashes[hashes <= keys[-1]] if len(keys) else hashes
    kept = always_kept(chosen, features.label, data)
    bits = np.zeros(len(key), np.uint8)
    for index, unit in enumerate(UNITS):
        drawn = draws(chosen, unit, config.seed, data.session.key) < config.negatives
        bits |= (kept | drawn).astype(np.uint8) << np.uint8(index)
    tuples: dict[str, NDArray[np.uint64]] = {}
    kept_by: dict[str, NDArray[np.uint8]] = {}
    for group, references in chosen.references.items():
        used, inverse = np.unique(references, return_inverse=True)
        table = Tuples(
            chosen.samples.slice(0, 0), {}, {group: chosen.uniques[group].take(pa.array(used))}
        )
        pairs = np.column_stack([key, hash_group(table, group)[inverse]])
        tuples[group], kept_by[group] = _merged_pairs(pairs, bits)
    place = np.searchsorted(keys, key)
    counts = np.zeros((len(keys), len(UNITS)), np.int64)
    for index in range(len(UNITS)):
        np.add.at(counts[:, index], place, (bits >> np.uint8(index) & 1).astype(np.int64))
    return UnitCounts(keys, counts, tuples, kept_by)


def _merged_pairs(
    pairs: NDArray[np.uint64], bits: NDArray[np.uint8]
) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
    """Return the distinct pairs in ascending order, with the bits of all their rows."""
    if not len(pairs):
        return pairs.reshape(0, 2), bits
    order = np.lexsort((pairs[:, 1], pairs[:, 0]))
    pairs, bits = pairs[order], bits[order]
    starts = np.flatnonzero(np.append(True, (pairs[1:] != pairs[:-1]).any(axis=1)))
    return pairs[starts], np.bitwise_or.reduceat(bits, starts)


def merge_counts(parts: Iterable[UnitCounts]) -> UnitCounts | None:
    """Merge the counts of several chunks; only the smallest keys stay. None without parts."""
    found = list(parts)
    if not found:
        return None
    keys, inverse = np.unique(np.concatenate([p.keys for p in found]), return_inverse=True)
    counts = np.zeros((len(keys), len(UNITS)), np.int64)
    np.add.at(counts, inverse, np.concatenate([p.samples for p in found]))
    keys = keys[:MAX_KEYS]
    tuples: dict[str, NDArray[np.uint64]] = {}
    kept_by: dict[str, NDArray[np.uint8]] = {}
    for group in found[0].tuples:
        pairs = np.concatenate([p.tuples[group] for p in found])
        bits = np.concatenate([p.kept_by[group] for p in found])
        inside = pairs[:, 0] <= keys[-1] if len(keys) else np.zeros(len(pairs), bool)
        tuples[group], kept_by[group] = _merged_pairs(pairs[inside], bits[inside])
    return UnitCounts(keys, counts[: len(keys)], tuples, kept_by)


def units_table(counts: UnitCounts) -> pa.Table:
    """Return the rows of `sampling.parquet`: one per unit and group."""
    rows = [
        {
            "unit": unit,
            "group": group,
            "num_keys": len(counts.keys),
            "num_samples": int(counts.samples[:, index].sum()),
            "num_unique": int((counts.kept_by[group] >> np.uint8(index) & 1).sum()),
        }
        for index, unit in enumerate(UNITS)
        for group in counts.tuples
    ]
    return pa.Table.from_pylist(rows, sampling_schema())


def write_units(root: Path, found: Iterable[UnitCounts | None]) -> None:
    """Write `sampling.parquet` of a segment that is being built; nothing for a job without it."""
    for counts in found:
        if counts is not None:
            pq.write_table(units_table(counts), root / SAMPLING, write_page_checksum=True)
