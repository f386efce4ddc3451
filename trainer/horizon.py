"""How many steps a run may train, agreed on by all replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from schemas.errors import PlanError
from schemas.order import Order

# How far a run may go: decided once from what is agreed, the same in every replica.
#
# A dataset that is still built has a horizon: the end of its first epoch over the segments that
# are committed. Steps before it are those of the finished dataset, for batches do not straddle
# segments and an epoch is its segments in order. Later epochs begin after the last segment, so
# they wait until the dataset says that it is finished. The end of data is not a thing that a
# replica meets: it is `decide` of a step and the horizon that all have agreed on.


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a process has seen of a dataset, or what all have agreed on."""

    num_segments: int
    """Committed segments, the first of the dataset."""
    finished: bool
    """Whether no segment follows them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Horizon:
    """The steps that may be trained."""

    until: int
    """One after the last of them."""
    known: int
    """One after the last step that is known, which may lie behind: plans look so far."""
    last: bool
    """Whether the run ends there; otherwise it waits there for what is committed next."""


def agreed(states: Sequence[Known]) -> Known:
    """Return what all processes know: the fewest segments, and an end only when all have seen it.

    Args:
        states: of each process, of one dataset, so that one's segments begin another's.

    Example:
        >>> agreed([Known(num_segments=3, finished=True), Known(num_segments=2, finished=False)])
        Known(num_segments=2, finished=False)
    """
    fewest = min(states, key=lambda state: state.num_segments).num_segments
    return Known(num_segments=fewest, finished=all(state.finished for state in states))


def horizon_of(order: Order, known: Known, stop: int | None = None) -> Horizon:
    """Return how far a run may go.

    Args:
        order: global order over at least the segments that are known.
        known: what is agreed.
        stop: the step that the run is to stop before, None for the whole run.

    Raises:
        PlanError: the order is not that of the segments.

    Example:
        >>> from schemas.config.job import OrderConfig
        >>> order = Order((4, 3), 2, epochs=2, config=OrderConfig())
        >>> horizon_of(order, Known(num_segments=1, finished=False))
        Horizon(until=2, known=2, last=False)
        >>> horizon_of(order, Known(num_segments=2, finished=False))
        Horizon(until=4, known=4, last=False)
        >>> horizon_of(order, Known(num_segments=2, finished=True))
        Horizon(until=8, known=8, last=True)
        >>> horizon_of(order, Known(num_segments=2, finished=False), stop=3)
        Horizon(until=3, known=4, last=True)
    """
    given = len(order.num_blocks)
    if given < known.num_segments or (known.finished and given != known.num_segments):
        raise PlanError(
            f"order must be of the {known.num_segments} segments that are known, got {given}; "
            "open the dataset again"
        )
    until = order.num_steps
    if not known.finished:
        until = sum(order.steps_per_segment[: known.num_segments])
    if stop is not None and stop <= until:
        return Horizon(until=stop, known=until, last=True)
    return Horizon(until=until, known=until, last=known.finished)


def decide(train_step: int, horizon: Horizon) -> Literal["train", "wait", "end"]:
    """Return what comes at a step: nothing but the step and what is agreed is asked.

    Args:
        train_step: the next step, committed ones before it.
        horizon: how far the run may go.

    Example:
        >>> [decide(step, Horizon(until=2, known=2, last=False)) for step in range(3)]
        ['train', 'train', 'wait']
        >>> decide(2, Horizon(until=2, known=2, last=True))
        'end'
    """
    if train_step < horizon.until:
        return "train"
    return "end" if horizon.last else "wait"
