"""BagPipe's oracle, from a checkout of its repository, unmodified and in one thread.

`BagPipe/oraclecacher.py` is loaded by itself: its transport, JSON reader and prints are replaced by
stubs, and `np.in1d`, which numpy removed, by `np.isin`. It computes the distinct rows of each table
and batch (`unique_once` of its loader), which rows the next batch shares, and, over a window of
batches, which rows are fetched and how long each is kept. Its loader normally runs in separate
processes; here it runs in the same thread, so that rates are per core. Rates are measured between
the first and the last decision, when each decision corresponds to one batch read: filling the
window and the batches left in it at the end are not counted.
"""

from __future__ import annotations

import importlib
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.schemas.config.train import CacheConfig
from presage.schemas.oracle.cache_plan import plan_table
from presage.schemas.oracle.next_uses import next_use

ORACLE = Path("BagPipe/oraclecacher.py")
_PACKAGE = "bagpipe_checkout"


def load_bagpipe(checkout: Path) -> tuple[Any, Any]:
    """Return BagPipe's oracle and loader modules without importing their package.

    Raises:
        ValueError: the folder is no checkout of BagPipe.
    """
    if not (checkout / ORACLE).is_file():
        raise ValueError(
            f"--bagpipe must be a checkout of uw-mad-dash/bagpipe, got no {ORACLE} in {checkout}; "
            "clone it, or leave the option out"
        )
    package = ModuleType(_PACKAGE)
    package.__path__ = [str(checkout / ORACLE.parent)]  # its __init__ would start the trainer
    sys.modules[_PACKAGE] = package
    sys.modules.setdefault("orjson", ModuleType("orjson"))  # imported, but not used here
    oracle: Any = importlib.import_module(f"{_PACKAGE}.oraclecacher")
    loader: Any = importlib.import_module(f"{_PACKAGE}.load_csv")
    oracle.print = lambda *_: None
    if not hasattr(np, "in1d"):
        numpy_with_in1d: Any = ModuleType("numpy")
        vars(numpy_with_in1d).update(vars(np), in1d=np.isin)
        oracle.np = numpy_with_in1d
    return oracle, loader


@dataclass(slots=True)
class Decisions:
    """A stub for BagPipe's RPC module that records what the oracle sends to its trainer.

    Attributes:
        record_rows: whether to record `fetched`.
        fetched: fetched rows of each table, by batch.
        times: wall and CPU seconds of each decision.
    """

    record_rows: bool
    fetched: list[list[NDArray[np.int64]]] = field(default_factory=list)
    times: list[tuple[float, float]] = field(default_factory=list)

    def init_rpc(self, *_: object, **__: object) -> None:
        """Open no connection."""

    def rpc_async(self, _: str, __: object, args: tuple[dict[str, Any]]) -> None:
        """Record a decision."""
        self.times.append((time.perf_counter(), time.process_time()))
        if self.record_rows:
            self.fetched.append(args[0]["prefetch"]["prefetch_list"])


def run_bagpipe(
    checkout: Path,
    columns: Sequence[NDArray[np.int32]],
    num_rows: Sequence[int],
    batch: int,
    lookahead: int,
    *,
    record_rows: bool = False,
) -> Decisions:
    """Run BagPipe's oracle over all batches but those that stay in its window.

    Args:
        checkout: folder of BagPipe.
        columns: for each table the row of each sample.
        num_rows: rows of each table.
        batch: samples of a batch.
        lookahead: batches of the window, including the current one.
        record_rows: record the fetched rows, for comparison.
    """
    oracle, loader = load_bagpipe(checkout)
    decisions = Decisions(record_rows)

    class InMemoryLoader:
        """Batches from memory with distinct rows computed by BagPipe's loader."""

        def __init__(self, *_: object) -> None:
            self._batches = _batches(columns, batch, loader)

        def __next__(self) -> tuple[Any, ...]:
            return next(self._batches)

    oracle.CSVLoader, oracle.rpc = InMemoryLoader, decisions
    settings = Namespace(
        lookahead_value=lookahead,
        stop_iter=0,
        ragged=False,
        additive_increase_param=1,
        multiplicative_decrease_param=2,
        worker_addresses=None,
        cache_size=0,
        processed_csv=None,
        mini_batch_size=batch,
        ln_emb=list(num_rows),
        dataset_multi_num=0,
        verbose=False,
        world_size_trainers=1,
        cleanup_proportion=0.25,
        worker_id=0,
        oracle_prefix="oracle",
        trainer_prefix="worker",
        world_size=2,
        master_ip="127.0.0.1",
        master_port="0",
    )
    oracle.OracleCacher(settings).train_addition()
    return decisions


def _batches(
    columns: Sequence[NDArray[np.int32]], batch: int, loader: Any
) -> Iterator[tuple[Any, ...]]:
    dense, target = np.empty((batch, 0), np.float32), np.empty((batch, 1), np.float32)
    for start in range(0, len(columns[0]) - batch + 1, batch):
        sparse = np.stack([column[start : start + batch] for column in columns]).astype(np.int64)
        yield dense, sparse, [loader.unique_once(rows) for rows in sparse], target


def bagpipe_rate(
    checkout: Path,
    columns: Sequence[NDArray[np.int32]],
    num_rows: Sequence[int],
    batch: int,
    lookahead: int,
) -> tuple[float, float]:
    """Return BagPipe's accesses per wall second and per CPU second."""
    times = run_bagpipe(checkout, columns, num_rows, batch, lookahead).times
    accesses = (len(times) - 1) * batch * len(columns)
    return accesses / (times[-1][0] - times[0][0]), accesses / (times[-1][1] - times[0][1])


def fetches_equal_rows(
    checkout: Path, columns: Sequence[NDArray[np.int32]], num_rows: Sequence[int], batch: int
) -> bool:
    """Return whether BagPipe's oracle and our plan with the `ttl` policy fetch the same rows.

    A window of n batches keeps a row for n - 1 steps.
    """
    lookahead = 5
    cache = CacheConfig(policy="ttl", lookahead=lookahead - 1, prefetch_steps=1)
    fetched = run_bagpipe(checkout, columns, num_rows, batch, lookahead, record_rows=True).fetched
    for table, rows in enumerate(columns):
        ids = rows.astype(np.int64)
        steps = [np.unique(ids[start : start + batch]) for start in range(0, len(rows), batch)]
        plan = plan_table(zip(steps, next_use(steps, num_rows[table]), strict=True), cache)
        for of_tables, step in zip(fetched, plan, strict=False):
            if not np.array_equal(of_tables[table], step.numbers[step.fetch]):
                return False
    return len(fetched) > 0
