"""The part of a growing dataset that may be trained, agreed on by all processes of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from presage.schemas.arrays import Array
from presage.schemas.dataset.order import Order
from presage.schemas.errors import PlanError, SchemaError
from presage.trainer.growing.follow import FollowedDataset
from presage.trainer.recovery import Drain
from presage.trainer.steps import DatasetExtent, Span, next_action
from presage.trainer.stores.store import BehindError

FRONTIER = "frontier"
"""Name of `Frontier.state` among the arrays of a state."""
Extend = Callable[[Span, int], None]
"""Extends training to a span, from a step on."""


class DatasetRefusedError(SchemaError):
    """New segments cannot be trained; all replicas raise it in the same step, and save."""


class Frontier:
    """The part of the dataset that may be trained, the same on all replicas at each step.

    A part that all members of a step's agreement see is committed with the step, and reaches
    replicas that are behind with its sums. It becomes valid at the first step that no replica has
    read ahead, so that all caches extend their plan at the same step; at once if training waits.
    """

    def __init__(
        self,
        data: FollowedDataset,
        agreed: DatasetExtent,
        drain: Drain,
        poll_sec: float,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Wait until this process sees as much of the dataset as others.

        Raises:
            SchemaError: the dataset was replaced.
            DrainInterrupt: the process is asked to leave.
        """
        self.fatal_error = ""
        self._data, self._drain, self._poll_sec = data, drain, poll_sec
        self._progress = progress
        self.visible = data.refresh()
        """The part of the dataset that this process saw at the last `refresh`."""
        self._agreed = agreed
        self._pending: tuple[DatasetExtent, int] | None = (
            None  # and the step at which it becomes valid
        )
        self._in_flight: DatasetExtent | None = None  # valid for the step in flight already
        self._reported = ""
        self.span = self._wait_for(agreed)

    @property
    def state(self) -> tuple[int, ...]:
        """The valid part, the pending part, and the step at which it becomes valid or -1."""
        pending, at = (self._agreed, -1) if self._pending is None else self._pending
        extents = self._agreed, pending
        both = [number for each in extents for number in (each.num_segments, int(each.sealed))]
        return (*both, at)

    def sleep(self) -> None:
        """Sleep until the next poll for new segments, or until this process is asked to leave."""
        self._drain.sleep(self._poll_sec)

    def refresh(self, *, at_once: bool = False) -> None:
        """Poll for new segments; a replaced dataset sets `fatal_error`, which ends the run."""
        try:
            self.visible = self._data.refresh(at_once=at_once)
        except SchemaError as error:
            self.fatal_error = self.fatal_error or str(error)

    def time_out(self, train_step: int, seconds: float) -> None:
        """Set `fatal_error`, because training has waited for too long."""
        self.fatal_error = self.fatal_error or (
            f"dataset did not grow within {seconds:g} s, and is not sealed: training waits at "
            f"step {train_step}: {self._data.wait_reason}; continue with --resume --follow"
        )

    def report_waiting(self, train_step: int) -> None:
        """Report what training waits for, unless that was the last report."""
        line = f"waiting at step {train_step}: {self._data.wait_reason}"
        if line != self._reported:
            self._reported = line
            self._progress(line)

    def check(self, agreed: DatasetExtent, state: tuple[int, ...]) -> None:
        """Check that the members of an agreement have the same frontier.

        Args:
            agreed: the part that all of them see.
            state: `state` of the writer.

        Raises:
            BehindError: this replica must be restarted.
        """
        same = state == self.state if self._in_flight is None else agreed == self._in_flight
        if not same:
            raise BehindError(
                f"this replica's part of the dataset differs from the writer's: {self.state} "
                f"instead of {state}, agreed on is {agreed}; restart it"
            )

    def advance(self, agreed: DatasetExtent, train_step: int, extend: Extend) -> bool:
        """Make a part of the dataset valid while training waits at a step.

        Args:
            agreed: the part that all members of the agreement see.
            train_step: the end of what may be trained so far.
            extend: called with what may be trained now.

        Returns:
            Whether training may continue, or end.

        Raises:
            DatasetRefusedError: the new segments cannot be trained.
        """
        if agreed == self._agreed:
            return False
        decision = next_action(train_step, self._wait_for(agreed).horizon)
        if decision == "wait":
            return False
        self._make_valid(agreed, train_step, extend)
        self._in_flight = agreed if decision == "train" else None
        return True

    def on_commit(
        self,
        agreed: DatasetExtent,
        train_step: int,
        stop_reading: Callable[[], int],
        extend: Extend,
    ) -> None:
        """Process the part of the dataset that was committed with a step.

        Args:
            agreed: the part that all members of its agreement saw.
            train_step: the next step.
            stop_reading: limits the steps that are read ahead, and returns the end of them, at
                which the part becomes valid.
            extend: called when that step comes.

        Raises:
            DatasetRefusedError: the new segments cannot be trained.
            BehindError: this replica must be restarted.
        """
        if self._in_flight not in (None, agreed):
            raise BehindError(
                "this replica trained on another part of the dataset than the others: "
                f"{self._in_flight} instead of {agreed}; restart it"
            )
        self._in_flight = None
        if agreed != (self._agreed if self._pending is None else self._pending[0]):
            self._pending = (agreed, stop_reading() if self._pending is None else self._pending[1])
        if self._pending is not None and train_step >= self._pending[1]:
            self._make_valid(self._pending[0], train_step, extend)

    def to_arrays(self) -> dict[str, Array]:
        """Return the state for a replica that joins before the next step."""
        return {FRONTIER: np.array(self.state, np.int64)}

    def load(self, arrays: Mapping[str, Array]) -> int | None:
        """Load what `to_arrays` of another replica returned.

        Returns:
            The step that `stop_reading` returned there; None if it was not called.
        """
        segments, sealed, pending_segments, pending_sealed, at = arrays[FRONTIER].tolist()
        self._agreed = DatasetExtent(num_segments=segments, sealed=bool(sealed))
        self._in_flight = None
        pending = DatasetExtent(num_segments=pending_segments, sealed=bool(pending_sealed))
        self._pending = None if at < 0 else (pending, at)
        self.span = self._wait_for(self._agreed)
        return None if at < 0 else at

    def _make_valid(self, agreed: DatasetExtent, train_step: int, extend: Extend) -> None:
        span = self._wait_for(agreed)
        try:
            extend(span, train_step)
        except (SchemaError, PlanError) as error:
            raise DatasetRefusedError(str(error)) from error
        self.span, self._agreed, self._pending = span, agreed, None

    def _wait_for(self, agreed: DatasetExtent) -> Span:
        """Wait until a part of the dataset is visible here, and return its span."""
        while not covers(self.visible, agreed):
            with self._drain.at_once():
                self._drain.sleep(self._poll_sec)
            self.visible = self._data.refresh()
        return self._data.use(agreed)


def covers(visible: DatasetExtent, agreed: DatasetExtent) -> bool:
    """Return whether a process that sees `visible` can train `agreed`.

    Example:
        >>> fewer = DatasetExtent(num_segments=2, sealed=False)
        >>> covers(DatasetExtent(num_segments=3, sealed=False), fewer)
        True
        >>> covers(fewer, DatasetExtent(num_segments=2, sealed=True))
        False
    """
    enough = visible.num_segments >= agreed.num_segments
    return enough and (visible.sealed or not agreed.sealed)


def extent_at_step(order: Order, agreed: DatasetExtent, train_step: int) -> DatasetExtent:
    """Return the smallest agreed part of a dataset when all steps before one are trained.

    Args:
        order: global order of at least these steps.
        agreed: the minimum.
        train_step: of the run.

    Example:
        >>> from presage.schemas.config.job import OrderConfig
        >>> order = Order((4, 3, 1), 2, epochs=2, config=OrderConfig())
        >>> first = DatasetExtent(num_segments=1, sealed=False)
        >>> [extent_at_step(order, first, step).num_segments for step in (2, 3, 4, 5)]
        [1, 2, 2, 3]
        >>> extent_at_step(order, first, 6)
        DatasetExtent(num_segments=3, sealed=True)
    """
    if agreed.sealed:
        return agreed
    num_steps = 0
    for count, steps in enumerate(order.steps_per_segment, 1):
        num_steps += steps
        if count >= agreed.num_segments and num_steps >= train_step:
            return DatasetExtent(num_segments=count, sealed=False)
    return DatasetExtent(num_segments=len(order.num_blocks), sealed=True)
