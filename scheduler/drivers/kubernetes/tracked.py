"""One Pod from the wish to have it to the word on how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scheduler.drivers.kubernetes.pod import (
    Waiting,
    ending_of,
    is_over,
    is_running,
    notice_of,
    waiting_of,
)
from scheduler.drivers.processes import Ending


@dataclass(slots=True)
class Tracked:
    """What is known of a Pod, and what is still to be done."""

    name: str
    """Of the Pod."""
    wanted: Mapping[str, Any] | None = None
    """To be applied; None once the server has it."""
    seen: Mapping[str, Any] | None = None
    """As it was seen last."""
    is_gone: bool = False
    """Whether there is no such Pod any more."""
    grace_sec: int | None = None
    """It is to be deleted, with so much time; None while it is to stay."""
    deleted: int | None = None
    """Time with which the server was told so."""
    is_taken: bool = False
    """Whether somebody else had it deleted before we did."""
    verdict: Ending | None = None
    """How it ended, where we decide that it did."""
    since: dict[str, float] = field(default_factory=dict[str, float])
    """When something was first seen that must not last, by its word."""
    given_bytes: int | None = None
    """Limit of memory that the server was told last."""

    @property
    def uid(self) -> str:
        """Return what makes this Pod another than the next one of its name."""
        return "" if self.seen is None else str(self.seen["metadata"]["uid"])

    @property
    def lives(self) -> bool:
        """Whether it may run, now or later."""
        if self.verdict is not None or self.is_gone:
            return False
        return self.seen is None or not is_over(self.seen)

    @property
    def runs(self) -> bool:
        """Whether its program has begun, and not ended."""
        return self.lives and self.seen is not None and is_running(self.seen)

    @property
    def ending(self) -> Ending:
        """How it ended."""
        if self.verdict is not None:
            return self.verdict
        if self.seen is None:
            return Ending()
        return ending_of(self.seen, asked=self.deleted is not None and not self.is_taken)

    @property
    def notice_sec(self) -> float | None:
        """Seconds until somebody else takes it away; None where nobody does."""
        if not self.lives or self.grace_sec is not None or self.seen is None:
            return None
        return notice_of(self.seen)

    @property
    def must_be_deleted(self) -> bool:
        """Whether the server is to be told that it is to go, or to go sooner."""
        if self.is_gone or self.seen is None or self.grace_sec is None:
            return False
        return self.deleted is None or self.grace_sec < self.deleted

    def end(self, grace_sec: int) -> None:
        """Have it deleted; one that the server was never told of ends at once."""
        if self.seen is None:
            self.verdict = self.verdict or Ending(lost="deleted")
            self.wanted = None
        if self.grace_sec is None or grace_sec < self.grace_sec:
            self.grace_sec = grace_sec

    def look(self, now: float, unschedulable_sec: float, lost_sec: float) -> Waiting | None:
        """Give it up when it waits, or is about to go, for too long.

        Args:
            now: seconds of any clock that only goes forward.
            unschedulable_sec: how long it may wait.
            lost_sec: how long it may outlive its grace.

        Returns:
            What it waits for.
        """
        if not self.lives or self.seen is None:
            return None
        waiting = waiting_of(self.seen)
        if waiting is None:
            self.since.pop("waiting", None)
        elif now - self.since.setdefault("waiting", now) > unschedulable_sec:
            said = f"{waiting.word}: {waiting.message}"
            self.verdict = Ending(refused=said) if waiting.hopeless else Ending(lost=said)
            self.grace_sec = 0
        metadata = self.seen["metadata"]
        if "deletionTimestamp" in metadata:
            self.is_taken |= self.deleted is None
            grace = float(metadata.get("deletionGracePeriodSeconds") or 0)
            over = now - self.since.setdefault(f"going {grace:g}", now) - grace
            if over > lost_sec:
                why = f"its node has not ended it {over:.0f} s after its time"
                self.verdict = Ending(lost=f"NodeLost: {why}")
                self.grace_sec = 0
        return waiting
