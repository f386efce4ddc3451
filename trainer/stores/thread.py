"""The thread beside training that asks the stores."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from trainer.stores.store import Store, WriteBack
from trainer.stores.together import write_rows

T = TypeVar("T")


class StoreThread:
    """Reads and writes in the order in which it is told, so no read passes a write before it."""

    def __init__(self, stores: Mapping[str, Store], name: str) -> None:
        """Keep the stores; no thread runs before the first order.

        Args:
            stores: by table.
            name: of the thread.
        """
        self._stores = stores
        self._name = name
        self._pool: ThreadPoolExecutor | None = None
        self._writes: deque[Future[None]] = deque()

    def read(self, function: Callable[[int], T], train_step: int) -> Future[T]:
        """Call a function that reads for a step, when all before it is done."""
        return self._worker().submit(function, train_step)

    def write(self, train_step: int, leaving: Mapping[str, WriteBack]) -> None:
        """Write rows as they are after a step."""
        self._writes.append(self._worker().submit(write_rows, self._stores, train_step, leaving))

    def call(self, function: Callable[[], None]) -> None:
        """Call a function in its turn; `check` raises what it raises."""
        self._writes.append(self._worker().submit(function))

    def check(self) -> None:
        """Raise what a write raised that is done."""
        while self._writes and self._writes[0].done():
            self._writes.popleft().result()

    def finish_writes(self) -> None:
        """Wait until all rows are written."""
        while self._writes:
            self._writes.popleft().result()

    def close(self) -> None:
        """Stop; what has not begun is dropped."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _worker(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        return self._pool
