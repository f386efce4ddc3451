"""One training process behind a link: steps from the middle of a run, with one row source.

    python -m benchmarks.peers.linked TASK.json

Runs inside a network namespace whose loopback is the link; `benchmarks/cache.py` starts it. The
process opens two stores, fills the cache as that of a run which has trained all steps before, and
trains some steps with one compute thread. All rows start with their initial values, so the losses
of all modes are equal.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from presage.schemas.config.train import CacheConfig, TrainConfig
from presage.schemas.dataset.accesses import TableAccesses
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.errors import PlanError
from presage.schemas.typed_values import from_json
from presage.trainer.components import build_components, layouts_of, order_of, plan_of_rows
from presage.trainer.data.decode import spec_of
from presage.trainer.data.reader import Reader, prefetch
from presage.trainer.embedding.cache import (
    DirectSource,
    PlannedCache,
    RowSource,
)
from presage.trainer.embedding.unplanned import LruCache
from presage.trainer.step import PhaseTimer, train_batch
from presage.trainer.stores.local import memory_store
from presage.trainer.stores.remote.client import open_remote_store
from presage.trainer.stores.remote.connection import Access
from presage.trainer.stores.remote.processes import StoreProcesses
from presage.trainer.stores.store import Records, Store, initial_records

NextRows = Callable[[int], Mapping[str, NDArray[np.int64]]]
NUM_STORES, PREFETCH_STEPS, WARM_UP = 2, 4, 8
STORE_CORE = 1


@contextmanager
def open_rows(mode: str, task: dict[str, Any], layouts: Any) -> Iterator[Store]:
    """Open the store of a mode: in this process, or in processes behind the link."""
    if mode == "memory":
        yield memory_store(layouts)
        return
    with StoreProcesses(NUM_STORES, Path(task["folder"]) / "stores") as processes:
        for pid in processes.pids:
            os.sched_setaffinity(pid, {STORE_CORE})
        access, session = Access(token=processes.token), secrets.token_hex(8)
        store = open_remote_store(
            processes.addresses, access, layouts, owner="benchmark", session=session
        )
        yield store
        store.close()


class Run:
    """What the modes share: a dataset of one table, and steps in the middle of it."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.dataset = open_dataset(task["dataset"])
        self.config = from_json(TrainConfig, task["train"], use_defaults=True)
        self.order = order_of(replace(self.dataset.job, train=self.config), self.dataset)
        self.spec = spec_of(self.dataset, self.config.dtype)
        self.layouts = layouts_of(self.spec, self.config)
        (self.table,) = self.layouts
        self._accesses = TableAccesses(self.dataset, self.table, self.order)
        self.first = self.order.num_steps // 2
        self.end = self.first + WARM_UP + task["steps"]
        self.cache_rows = round(task["share"] * len(self._accesses.rows))

    def rows_at(self, step: int) -> NDArray[np.int64]:
        """Return the rows of a step, ascending."""
        return np.sort(self._accesses.rows[self._accesses.numbers(step)])

    def initial(self, rows: NDArray[np.int64]) -> Records:
        """Return the initial records of rows."""
        return initial_records(self.layouts[self.table], rows)

    def next_rows(self, step: int) -> dict[str, NDArray[np.int64]]:
        """Return the rows of a step, none after the last."""
        return {self.table: self.rows_at(step)} if step < self.end else {}

    def source(self, mode: str, store: Store) -> RowSource:
        """Return the row source of a mode, with the rows that it would have."""
        match mode:
            case "planned":
                return self._planned(store)
            case "lru":
                return self._lru(store, None)
            case "lru_next":
                return self._lru(store, self.next_rows)
            case _:
                if mode == "memory":
                    for step in range(self.first, self.end):
                        store.fetch(step, {self.table: self.rows_at(step)})
                return DirectSource(store)

    def _planned(self, store: Store) -> PlannedCache:
        cache = CacheConfig(policy="belady", rows=self.cache_rows, prefetch_steps=PREFETCH_STEPS)
        plan = plan_of_rows(self.dataset, self.order, [self.table], cache, 0)
        for _ in islice(plan.steps, self.first):
            pass
        state = plan.states()[self.table]
        starts = {self.table: state.keyframe}
        source = PlannedCache(
            store,
            plan_of_rows(self.dataset, self.order, [self.table], cache, self.first, starts=starts),
            first_step=self.first,
            last_step=self.order.num_steps,
            prefetch_steps=PREFETCH_STEPS,
        )
        source.restore(self.table, state, self.initial(state.rows[state.is_cached]))
        return source

    def _lru(self, store: Store, next_rows: NextRows | None) -> LruCache:
        """Use the rows of the steps before, as far back as the cache holds them."""
        used, start = set[int](), self.first
        while start > 0 and len(used) < self.cache_rows:
            start -= 1
            used.update(self.rows_at(start).tolist())
        here: Any = LaterStore(memory_store(self.layouts))
        source = LruCache(here, self.cache_rows, next_rows)
        for step in range(start, self.first):
            rows = {self.table: self.rows_at(step)}
            source.gather(step, rows)
            source.release(step, rows)
        source.flush()
        here.store = store
        return source


class LaterStore:
    """A store that is replaced once a cache is full."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def sent_bytes() -> int:
    """Return the bytes that were sent over the loopback of this namespace."""
    lines = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()
    (counts,) = [line.partition(":")[2] for line in lines if line.strip().startswith("lo:")]
    return int(counts.split()[8])


def train(task: dict[str, Any], mode: str) -> dict[str, Any]:
    """Return the mean milliseconds of a step and its phases, rows and bytes, and the last loss."""
    torch.set_num_threads(1)
    run = Run(task)
    with open_rows(mode, task, run.layouts) as store:
        components = build_components(run.spec, run.config, store)
        source = run.source(mode, store)
        components.embedding.set_source(source)
        timer, loss = PhaseTimer(time.perf_counter), 0.0
        reader = Reader(run.dataset, run.order, run.spec)
        batches = prefetch(reader.read, range(run.first, run.end), 2)
        start, fetched, sent = 0.0, 0, 0
        phases: list[dict[str, float]] = []
        for number in range(WARM_UP + task["steps"]):
            if number == WARM_UP:
                start, fetched, sent = time.perf_counter(), source.fetched_rows, sent_bytes()
            loss = train_batch(components, next(batches), timer)
            phases.append(timer.finish()[1])
        seconds = time.perf_counter() - start
        fetched, sent = source.fetched_rows - fetched, sent_bytes() - sent
        source.close()
    measured = phases[WARM_UP:]
    return {
        "step_ms": round(seconds / task["steps"] * 1e3, 2),
        "rows": round(fetched / task["steps"], 1),
        "bytes": round(sent / task["steps"]),
        "loss": loss,
        **{
            name: round(sum(of[name] for of in measured) / len(measured) * 1e3, 2)
            for name in measured[0]
        },
    }


def main() -> None:
    """Run the task."""
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        figures = train(task, task["mode"])
    except PlanError as error:
        figures = {"refused": str(error)}
    print(json.dumps(figures))  # noqa: T201


if __name__ == "__main__":
    main()
