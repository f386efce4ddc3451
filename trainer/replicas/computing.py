"""The step in flight at one replica: its leaves are computed, and all is updated by the sum."""

from __future__ import annotations

import time
from contextlib import ExitStack

from trainer.leaf_work import LeafWork, Partial
from trainer.leaves import Leaves
from trainer.replicas.ahead import Ahead
from trainer.replicas.exchange import Shape
from trainer.replicas.faults import Injector
from trainer.replicas.setting import Setting
from trainer.replicas.share import NONE
from trainer.replicas.splits import smoothed
from trainer.step import PhaseTimer, update_by
from trainer.tree import Tree


class Computing:
    """Computes leaves, which are read ahead of time; a context that holds threads."""

    def __init__(self, setting: Setting, injector: Injector, timer: PhaseTimer) -> None:
        """Keep the parts.

        Args:
            setting: of the run.
            injector: faults that happen meanwhile.
            timer: of the phases.
        """
        self.speed: float | None = None  # leaves per second; none before the first
        self._setting, self._injector, self._timer = setting, injector, timer
        self._open: Leaves | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Computing:
        """Start threads."""
        parts, enter = self._setting.parts, self._stack.enter_context
        self._work = enter(LeafWork(parts.model, parts.embedding, self._setting.kernels))
        self._ahead = enter(Ahead(self._setting.read))
        return self

    def __exit__(self, *error: object) -> None:
        """End them."""
        self._stack.close()

    @property
    def shape(self) -> Shape:
        """Return the shape of the sums of the step in flight."""
        assert self._open is not None, "rows of the step are open"
        return self._setting.shape(self._open)

    def want(self, train_step: int, run: range) -> None:
        """Begin to read leaves of a later step."""
        self._ahead.want(train_step, run)

    def compute(self, train_step: int, run: range) -> Tree[Partial]:
        """Open the rows of a step, compute some of its leaves, and return their sums."""
        clock = self._setting.clock
        self._injector.at("start", train_step)
        leaves = self._opened(train_step, run)
        start = clock()
        with self._timer("backward"):
            tree = self._work.compute(leaves)
            slower_sec = self._injector.slower_sec(train_step, len(run), clock() - start)
            if slower_sec > 0:
                time.sleep(slower_sec)
        if len(run):
            self.speed = smoothed(self.speed, len(run) / (clock() - start))
        self._injector.at("computed", train_step)
        return tree

    def also(self, train_step: int, run: range, tree: Tree[Partial]) -> None:
        """Compute more leaves of the step in flight into its sums."""
        with self._timer("read"):
            leaves = self._ahead.also(train_step, run)
        with self._timer("backward"):
            self._setting.parts.embedding.more(leaves)
            self._work.compute(leaves, tree)

    def anew(self, train_step: int) -> Tree[Partial]:
        """Return sums of a step without a leaf yet."""
        return self._work.tree(self._setting.num_leaves(train_step))

    def open(self, train_step: int) -> None:
        """Open the rows of a step that others have computed, unless they are."""
        if not self._is_open(train_step):
            self._opened(train_step, NONE)

    def update(self, total: Partial) -> None:
        """Update all that is trained by the sum of all leaves of the step in flight."""
        parts = self._setting.parts
        with self._timer("update"):
            update_by(total, self._work, parts.embedding, parts.optimizer)
        self.forget()

    def forget(self) -> None:
        """Have no step in flight."""
        self._open = None

    def _opened(self, train_step: int, run: range) -> Leaves:
        with self._timer("read"):
            leaves = self._ahead.take(train_step, run)
        embedding = self._setting.parts.embedding
        with self._timer("fetch"):
            if self._is_open(train_step):  # begun before, and others could not be followed
                embedding.more(leaves)
            else:
                embedding.open(leaves)
        self._open = leaves
        return leaves

    def _is_open(self, train_step: int) -> bool:
        return self._open is not None and self._open.step.train_step == train_step
