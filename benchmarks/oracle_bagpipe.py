"""BagPipe's public oracle as a peer, from a checkout that the user names; nothing of it is copied.

`BagPipe/oraclecacher.py` runs as it is, loaded alone: its transport, its reader of JSON lines and
its prints are replaced by nothing, and `np.in1d`, which numpy has dropped, by `np.isin`. What is
left decides: distinct rows of each table and batch (`unique_once` of its loader), what the next
batch shares, the window of batches ahead, which rows are fetched and how long each is kept. Its
loader runs in processes of its own; here it runs in the same thread, so that rates are of one
processor. They are taken between the first and the last decision, while every decision stands for
one batch read: what fills the window at first, and the batches that are left in it undecided at
the end, do not count.
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

from schemas.cache_plan import Plan
from schemas.config.train import CacheConfig
from schemas.oracle import next_use

ORACLE = Path("BagPipe/oraclecacher.py")
_PACKAGE = "bagpipe_checkout"


def load(checkout: Path) -> tuple[Any, Any]:
    """Return the modules of the oracle and of its loader, without those around them.

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
    sys.modules.setdefault("orjson", ModuleType("orjson"))  # parses lines that are not read here
    oracle: Any = importlib.import_module(f"{_PACKAGE}.oraclecacher")
    loader: Any = importlib.import_module(f"{_PACKAGE}.load_csv")
    oracle.print = lambda *_: None
    if not hasattr(np, "in1d"):
        older: Any = ModuleType("numpy")
        vars(older).update(vars(np), in1d=np.isin)
        oracle.np = older
    return oracle, loader


@dataclass(slots=True)
class Decisions:
    """What the oracle sends to its trainer, in the place of a transport.

    Attributes:
        fetched: for each batch the rows of each table that are fetched, when they are kept.
        at: wall and processor seconds of each decision.
    """

    keep: bool
    fetched: list[list[NDArray[np.int64]]] = field(default_factory=list)
    at: list[tuple[float, float]] = field(default_factory=list)

    def init_rpc(self, *_: object, **__: object) -> None:
        """Connect to nobody."""

    def rpc_async(self, _: str, __: object, args: tuple[dict[str, Any]]) -> None:
        """Note a decision."""
        self.at.append((time.perf_counter(), time.process_time()))
        if self.keep:
            self.fetched.append(args[0]["prefetch"]["prefetch_list"])


def decide(
    checkout: Path,
    columns: Sequence[NDArray[np.int32]],
    num_rows: Sequence[int],
    batch: int,
    lookahead: int,
    *,
    keep: bool = False,
) -> Decisions:
    """Let BagPipe's oracle decide all batches but those that stay in its window.

    Args:
        checkout: folder of BagPipe.
        columns: for each table the row of each sample.
        num_rows: rows of each table.
        batch: samples of a batch.
        lookahead: batches of the window, the one that is decided among them.
        keep: keep what is decided, for comparison.
    """
    oracle, loader = load(checkout)
    decisions = Decisions(keep)

    class Feed:
        """Batches from memory, their distinct rows by BagPipe's loader."""

        def __init__(self, *_: object) -> None:
            self._batches = _batches(columns, batch, loader)

        def __next__(self) -> tuple[Any, ...]:
            return next(self._batches)

    oracle.CSVLoader, oracle.rpc = Feed, decisions
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
    """Return accesses a second by the clock, and a second of one processor's time."""
    at = decide(checkout, columns, num_rows, batch, lookahead).at
    accesses = (len(at) - 1) * batch * len(columns)
    return accesses / (at[-1][0] - at[0][0]), accesses / (at[-1][1] - at[0][1])


def agrees(
    checkout: Path, columns: Sequence[NDArray[np.int32]], num_rows: Sequence[int], batch: int
) -> bool:
    """Tell whether BagPipe's oracle fetches what the plan of our index with its policy does.

    A window of n batches keeps a row for n - 1 steps.
    """
    lookahead = 5
    cache = CacheConfig(policy="ttl", lookahead=lookahead - 1, prefetch_steps=1)
    decided = decide(checkout, columns, num_rows, batch, lookahead, keep=True).fetched
    for table, rows in enumerate(columns):
        wide = rows.astype(np.int64)
        steps = [np.unique(wide[at : at + batch]) for at in range(0, len(rows), batch)]
        planned = Plan(zip(steps, next_use(steps, num_rows[table]), strict=True), cache)
        for found, step in zip(decided, planned, strict=False):
            if not np.array_equal(found[table], step.numbers[step.fetch]):
                return False
    return len(decided) > 0
