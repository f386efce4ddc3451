"""How far a replica may train: what it sees of the dataset, and what all have agreed on.

What the members of a step's agreement all see is committed with the step, so those that are behind
or join learn it with the sums. It holds from the first step on whose reads no replica has issued
then, the same for all: their caches go on with one plan. Where all known steps are trained, the
agreement that shows more is that of the next step itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from schemas.errors import PlanError, SchemaError
from schemas.horizon import Known, decide
from schemas.jagged import Array
from schemas.order import Order
from trainer.draining import Drain
from trainer.following import Following, Span
from trainer.stores.failures import BehindError

FRONTIER = "frontier"
"""Name of what one that joins must know, among the arrays of a state."""
Extend = Callable[[Span, int], None]
"""Lets a span be trained from a step on."""


class RefusedError(SchemaError):
    """Say that what has come cannot be trained; all replicas find the same, and save."""


class Frontier:
    """What may be trained, from step to step."""

    def __init__(
        self,
        data: Following,
        known: Known,
        drain: Drain,
        poll_sec: float,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Wait until this process sees as much of the dataset as others.

        Args:
            data: the dataset; `first` was called.
            known: what is agreed on at the first step.
            drain: ends a wait.
            poll_sec: seconds between two looks.
            say: told what is waited for, one line at a time.

        Raises:
            SchemaError: the dataset is another one.
            DrainInterrupt: the process is to end.
        """
        self.trouble = ""
        self._data, self._drain, self._poll_sec, self._say = data, drain, poll_sec, say
        self._seen, self._known = data.look(), known
        self._coming: tuple[Known, int] | None = None  # and the step from which on it holds
        self._tried: Known | None = None  # holds already for the step in flight
        self._said = ""
        self.span = self._seen_by_me(known)

    @property
    def seen(self) -> Known:
        """What this process has seen of the dataset when it looked last."""
        return self._seen

    def look(self) -> None:
        """See what is committed now; a dataset that is another one is everybody's trouble."""
        try:
            self._seen = self._data.look()
        except SchemaError as error:
            self.trouble = self.trouble or str(error)

    def give_up(self, train_step: int, seconds: float) -> None:
        """Wait no longer."""
        self.trouble = self.trouble or (
            f"dataset must grow or be finished within {seconds:g} s, got a run that waits at step "
            f"{train_step}: {self._data.waits_for}; go on with --resume --follow"
        )

    def say(self, train_step: int) -> None:
        """Say what is waited for, once."""
        line = f"waiting at step {train_step}: {self._data.waits_for}"
        if line != self._said:
            self._said = line
            self._say(line)

    @property
    def told(self) -> tuple[int, ...]:
        """What is agreed on, and what will hold from which step on."""
        known, at = (self._known, -1) if self._coming is None else self._coming
        both = self._known.num_segments, self._known.finished, known.num_segments, known.finished
        return (*map(int, both), at)

    def check(self, known: Known, told: tuple[int, ...]) -> None:
        """Refuse to compute a step with others that have agreed on something else.

        Args:
            known: what all see that agree on the step.
            told: `told` of the replica that writes.

        Raises:
            BehindError: this replica must be started again.
        """
        same = told == self.told if self._tried is None else known == self._tried
        if not same:
            raise BehindError(
                f"replica must know what others know, got {self.told} for {told} and {known}; "
                "start it again"
            )

    def reach(self, known: Known, train_step: int, extend: Extend) -> bool:
        """Let a step be trained, or be the end, if what is known says so.

        Args:
            known: what all see that agree on the step.
            train_step: behind all that could be trained so far.
            extend: called with what may be trained now.

        Returns:
            Whether it says so.

        Raises:
            RefusedError: what has come cannot be trained.
        """
        if known == self._known:
            return False
        comes = decide(train_step, self._seen_by_me(known).horizon)
        if comes == "wait":
            return False
        self._take(known, train_step, extend)
        self._tried = known if comes == "train" else None
        return True

    def committed(
        self, known: Known, train_step: int, settle: Callable[[], int], extend: Extend
    ) -> None:
        """Take note of what was known to all in the step that was committed last.

        Args:
            known: what all saw that agreed on it.
            train_step: the next step.
            settle: fixes the step from which on more may be known, and returns it or one before.
            extend: called when that step comes.

        Raises:
            RefusedError: what has come cannot be trained.
            BehindError: this replica must be started again.
        """
        if self._tried not in (None, known):
            raise BehindError(
                f"replica must train what others know, got {self._tried} for {known}; start it "
                "again"
            )
        self._tried = None
        if known != (self._known if self._coming is None else self._coming[0]):
            self._coming = (known, settle() if self._coming is None else self._coming[1])
        if self._coming is not None and train_step >= self._coming[1]:
            self._take(self._coming[0], train_step, extend)

    def arrays(self) -> dict[str, Array]:
        """Return what one that joins must know before the next step."""
        return {FRONTIER: np.array(self.told, np.int64)}

    def load(self, arrays: Mapping[str, Array]) -> int | None:
        """Begin with what another replica knew.

        Returns:
            The step before which `settle` was called there; None where it was not.
        """
        segments, finished, coming, ends, at = arrays[FRONTIER].tolist()
        self._known = Known(num_segments=segments, finished=bool(finished))
        self._tried = None
        later = Known(num_segments=coming, finished=bool(ends))
        self._coming = None if at < 0 else (later, at)
        self.span = self._seen_by_me(self._known)
        return None if at < 0 else at

    def _take(self, known: Known, train_step: int, extend: Extend) -> None:
        span = self._seen_by_me(known)
        try:
            extend(span, train_step)
        except (SchemaError, PlanError) as error:
            raise RefusedError(str(error)) from error
        self.span, self._known, self._coming = span, known, None

    def _seen_by_me(self, known: Known) -> Span:
        """Return what may be trained when that much is known, as soon as it is seen here."""
        while not covers(self._seen, known):
            with self._drain.at_once():
                self._drain.sleep(self._poll_sec)
            self._seen = self._data.look()
        return self._data.use(known)


def covers(seen: Known, known: Known) -> bool:
    """Tell whether who has seen something can train what others know.

    Example:
        >>> covers(Known(num_segments=3, finished=False), Known(num_segments=2, finished=False))
        True
        >>> covers(Known(num_segments=2, finished=False), Known(num_segments=2, finished=True))
        False
    """
    enough = seen.num_segments >= known.num_segments
    return enough and (seen.finished or not known.finished)


def known_at(order: Order, known: Known, train_step: int) -> Known:
    """Return the least that is known of a dataset when all steps before one are trained.

    Args:
        order: global order over at least these steps.
        known: what all know in any case.
        train_step: of the run.

    Example:
        >>> from schemas.job import OrderConfig
        >>> order = Order((4, 3, 1), 2, epochs=2, config=OrderConfig())
        >>> first = Known(num_segments=1, finished=False)
        >>> [known_at(order, first, step).num_segments for step in (2, 3, 4, 5)]
        [1, 2, 2, 3]
        >>> known_at(order, first, 6)
        Known(num_segments=3, finished=True)
    """
    if known.finished:
        return known
    num_steps = 0
    for count, steps in enumerate(order.steps_per_segment, 1):
        num_steps += steps
        if count >= known.num_segments and num_steps >= train_step:
            return Known(num_segments=count, finished=False)
    return Known(num_segments=len(order.num_blocks), finished=True)
