"""Statistics of tables for TorchRec's sharding planner."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import CacheParams, CacheStatistics

from schemas.sharding_hints import TableHints


class OracleCacheStatistics(CacheStatistics):
    """Cache misses of the run to come, counted from the oracle instead of estimated."""

    def __init__(self, hints: TableHints) -> None:
        """Read the hints of one table."""
        self._lookups = hints.unique_rows_per_step
        fractions, misses = zip(*hints.lru_misses, strict=True)
        self._fractions, self._misses = np.array(fractions), np.array(misses)

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


def planner_constraints(tables: Mapping[str, TableHints]) -> dict[str, ParameterConstraints]:
    """Return constraints for `EmbeddingShardingPlanner`, by table.

    Args:
        tables: from `schemas.sharding_hints.read_hints`.
    """
    return {
        name: ParameterConstraints(
            pooling_factors=list(hints.pooling_factors),
            num_poolings=list(hints.num_poolings),
            batch_sizes=list(hints.batch_sizes),
            feature_names=list(hints.feature_names),
            cache_params=CacheParams(stats=OracleCacheStatistics(hints)),
        )
        for name, hints in tables.items()
    }
