"""Statistics of a run's look-ups for TorchRec's sharding planner, counted instead of estimated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import CacheParams, CacheStatistics
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from presage.schemas.dataset.hints import TableHints, read_hints
from presage.schemas.errors import SchemaError, suggest_name

_MAX_LOAD_FACTOR = 0.9999
"""TorchRec's planner refuses 1; its own search takes this for a whole table."""


class OracleCacheStatistics(CacheStatistics):
    """Cache misses of the run to come, from the oracle."""

    def __init__(self, hints: TableHints, num_embeddings: int) -> None:
        """Store the miss curve of a table with a number of rows."""
        self._lookups, self._num_embeddings = hints.unique_rows_per_step, num_embeddings
        fractions, misses = zip(*hints.lru_misses, strict=True)
        self._fractions = np.minimum(1, np.array(fractions) * hints.num_rows / num_embeddings)
        self._misses = np.array(misses)

    @property
    def expected_lookups(self) -> float:
        """Distinct rows of a global batch."""
        return self._lookups

    def expected_miss_rate(self, clf: float) -> float:
        """Return the miss rate of repeated accesses; the cache holds `clf` of the table."""
        return 0.0 if clf >= 1 else float(np.interp(clf, self._fractions, self._misses))

    @property
    def cacheability(self) -> float:
        """Area under the miss rate: 0 if a small cache has no misses, 1 if no cache helps."""
        beyond = self._misses[-1] * (1 - self._fractions[-1])
        return float(np.trapezoid(self._misses, self._fractions) + beyond)

    def load_factor(self, miss_rate: float) -> float:
        """Return the smallest load factor whose `expected_miss_rate` is at most `miss_rate`.

        It is between one row and `_MAX_LOAD_FACTOR`; one row if no row is used twice.
        """
        reached = np.flatnonzero(self._misses <= miss_rate)
        first = int(reached[0]) if len(reached) else 0
        fraction = np.interp(miss_rate, self._misses[first::-1], self._fractions[first::-1])
        return min(max(float(fraction), 1 / self._num_embeddings), _MAX_LOAD_FACTOR)


def planner_constraints(
    hints: Mapping[str, TableHints] | Path | str,
    tables: Sequence[BaseEmbeddingConfig],
    *,
    world_size: int = 1,
    max_miss_rate: float | None = None,
) -> dict[str, ParameterConstraints]:
    """Return constraints for TorchRec's `EmbeddingShardingPlanner`, by the names of its tables.

    They have the look-ups of deduplicated batches: values per bag, bags per sample, samples per
    rank, and the distinct rows and cache misses of a global batch.

    Args:
        hints: file of `presage oracle DATASET --hints FILE`, or its content.
        tables: configs of the model, with names of features of the dataset, such as those of
            `presage.DataLoader.embedding_bag_configs`.
        world_size: ranks that share a global batch.
        max_miss_rate: gives each table the smallest load factor at which an LRU cache on the device
            misses at most this share of repeated look-ups, for `fused_uvm_caching`; None: leave
            load factors to the planner.

    Raises:
        SchemaError: the file is invalid, or the features of a table are not those of one table.
        ValueError: an argument is out of range.

    Example:
        >>> constraints = planner_constraints(  # doctest: +SKIP
        ...     "hints.json", loader.embedding_bag_configs(128), world_size=8, max_miss_rate=0.05
        ... )
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}; raise it")
    if max_miss_rate is not None and not 0 <= max_miss_rate <= 1:
        raise ValueError(
            f"max_miss_rate must be in [0, 1], got {max_miss_rate}; pass a share, not per cent"
        )
    if not isinstance(hints, Mapping):
        hints = read_hints(Path(hints))
    constraints: dict[str, ParameterConstraints] = {}
    for table in tables:
        found = _hints_of(table, hints)
        positions = [found.feature_names.index(feature) for feature in table.feature_names]
        statistics = OracleCacheStatistics(found, table.num_embeddings)
        constraints[table.name] = ParameterConstraints(
            pooling_factors=[found.pooling_factors[i] for i in positions],
            num_poolings=[found.num_poolings[i] for i in positions],
            batch_sizes=[-(-found.batch_sizes[i] // world_size) for i in positions],
            feature_names=list(table.feature_names),
            cache_params=CacheParams(
                load_factor=None
                if max_miss_rate is None
                else statistics.load_factor(max_miss_rate),
                stats=statistics,
            ),
        )
    return constraints


def _hints_of(table: BaseEmbeddingConfig, hints: Mapping[str, TableHints]) -> TableHints:
    """Return the hints of the table that has all features of a config."""
    table_of = {feature: name for name, each in hints.items() for feature in each.feature_names}
    for feature in table.feature_names:
        if feature not in table_of:
            raise SchemaError(
                f"hints lack feature {feature!r} of table {table.name!r}; "
                f"{suggest_name(feature, table_of)}"
            )
    names = sorted({table_of[feature] for feature in table.feature_names})
    if len(names) != 1:
        raise SchemaError(
            f"features of table {table.name!r} must be of one table of the hints, got "
            f"{', '.join(names) or 'none'}; give each its own table"
        )
    return hints[names[0]]
