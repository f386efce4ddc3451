"""Embedding rows for any training loop, in memory or behind the cache that the oracle plans."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from presage.loader import DataLoader
from presage.schemas.config.train import CacheConfig, StoresConfig
from presage.schemas.layout import TRAIN
from presage.trainer.own_loops import EmbeddingRows


def open_rows(
    loader: DataLoader,
    store: Literal["memory", "mmap", "log"] | StoresConfig = "mmap",
    directory: Path | str | None = None,
    *,
    cache_rows: int | None = None,
    policy: Literal["ttl", "belady"] = "belady",
    lookahead: int = 50,
    prefetch_steps: int = 2,
) -> EmbeddingRows:
    """Return a source of rows for the collections of a model that trains on a loader's batches.

    Args:
        loader: of the training split, for one rank.
        store: where rows are that are not cached. `memory`: there is no cache, all rows are in
            memory; `mmap`: mapped files, for tables that the page cache holds; `log`: files that
            are read and written sequentially, 17 times as fast on tables of four times the memory
            (benchmarks/memory.md); `StoresConfig`: store processes.
        directory: of the run's files, for any store but `memory`; files of a store before are
            replaced when training begins.
        cache_rows: most cached rows of all tables; None: all that are used again.
        policy: which rows stay cached: with `belady`, those that are used next; with `ttl`, those
            that are used within `lookahead` steps.
        lookahead: of `ttl`.
        prefetch_steps: steps between the read of a row and its use.

    Raises:
        ValueError: the loader is of another split or of one of several ranks, or follows a dataset.
    """
    if loader.split != TRAIN or loader.world_size > 1 or loader.follow:
        raise ValueError(
            "rows are planned for a loader of the train split without ranks and follow, got "
            f"split={loader.split!r}, world_size={loader.world_size}, follow={loader.follow}"
        )
    return EmbeddingRows(
        loader.opened,
        loader.order,
        store=store,
        directory=None if directory is None else Path(directory),
        cache=CacheConfig(
            policy=policy, lookahead=lookahead, prefetch_steps=prefetch_steps, rows=cache_rows
        ),
    )
