"""What the next steps need, read beside training by one thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Ahead(Generic[T]):
    """Calls a function of a step and a run of its leaves ahead of time; a context."""

    def __init__(self, function: Callable[[int, range], T]) -> None:
        """Remember what is called.

        Args:
            function: of step and leaves; one call at a time.
        """
        self._function = function
        self._pool = ThreadPoolExecutor(
            1, "reader", initializer=torch.set_num_threads, initargs=(1,)
        )
        self._coming: dict[tuple[int, range], Future[T]] = {}

    def __enter__(self) -> Ahead[T]:
        """Do nothing: the thread starts with the first call."""
        return self

    def __exit__(self, *error: object) -> None:
        """Drop what nobody will take."""
        self._pool.shutdown(cancel_futures=True)

    def want(self, step: int, run: range) -> None:
        """Begin with a step, unless that is under way; drop other runs of that step."""
        for key in [key for key in self._coming if key[0] == step and key[1] != run]:
            self._coming.pop(key).cancel()
        if (step, run) not in self._coming:
            self._coming[step, run] = self._pool.submit(self._function, step, run)

    def take(self, step: int, run: range) -> T:
        """Return the result for a step; earlier ones are dropped."""
        self.want(step, run)
        result = self._coming.pop((step, run)).result()
        for key in [key for key in self._coming if key[0] <= step]:
            self._coming.pop(key).cancel()
        return result

    def also(self, step: int, run: range) -> T:
        """Return the result for more leaves of a step, at once."""
        return self._pool.submit(self._function, step, run).result()
