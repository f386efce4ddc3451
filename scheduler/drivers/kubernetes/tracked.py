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
from scheduler.drivers.processes import Ending, Needs

STOP_SEC = 1
"""Time of a process that is ended; 0 would take its object away before its node has ended it."""
USUAL_SEC = 30.0
"""What every Pod waits for is worth a word after so long."""
_FOR_NODE, _FOR_START = "waits for a node", "waits for its start"


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
    given_up: Ending | None = None
    """How it ends that waited for too long, once it is gone."""
    final: str = ""
    """Why it will never begin, once its node has said so; between two tries it says less."""
    since: dict[str, float] = field(default_factory=dict[str, float])
    """When something was first seen that must not last, by its word."""
    needs_secret_of: str | None = None
    """Job whose Secret it is to see; None where it sees none, or is there already."""
    given: Needs | None = None
    """Limits that the server was told last, since it began."""

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
        found = ending_of(self.seen, asked=self.deleted is not None and not self.is_taken)
        return found if self.given_up is None or found.status == 0 else self.given_up

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
        """Have it deleted; one that the server has not shown ends at once.

        It stays known: should the server have made it, it is deleted when it is shown.
        """
        if self.seen is None:
            self.verdict = self.verdict or Ending(lost="deleted")
            self.wanted = None
        if self.grace_sec is None or grace_sec < self.grace_sec:
            self.grace_sec = grace_sec

    def look(self, now: float, unschedulable_sec: float, lost_sec: float) -> Waiting | None:
        """Give it up when it waits, or is about to go, for too long.

        One that waits is deleted, and has ended when it is gone: it may begin meanwhile. For one
        that its node does not end there is nothing to wait for.

        Args:
            now: seconds of any clock that only goes forward.
            unschedulable_sec: how long it may wait.
            lost_sec: how long it may outlive its grace.

        Returns:
            What it waits for, when that is worth a word.
        """
        if not self.lives or self.seen is None:
            return None
        self._look_at_deletion(now, self.seen["metadata"], lost_sec)
        waiting = waiting_of(self.seen)
        waited_sec = self._waited_sec(now, waiting)
        if waiting is not None and waiting.hopeless:
            self.final = waiting.in_words
        if waiting is not None and waited_sec > unschedulable_sec and self.given_up is None:
            lost = Ending(lost=waiting.in_words)
            self.given_up = Ending(refused=self.final) if self.final else lost
            self.end(STOP_SEC)
        return None if waiting is None or (waiting.usual and waited_sec < USUAL_SEC) else waiting

    def look_anew(self) -> None:
        """Forget for how long something was seen: it may have changed since, unseen."""
        for word in [word for word in self.since if word.startswith(("waits", "going"))]:
            del self.since[word]

    def _waited_sec(self, now: float, waiting: Waiting | None) -> float:
        """Return for how long it has waited for a node, or since then for its start."""
        word = None if waiting is None else _FOR_NODE if waiting.roomless else _FOR_START
        for other in {_FOR_NODE, _FOR_START} - {word}:
            self.since.pop(other, None)
        return 0.0 if word is None else now - self.since.setdefault(word, now)

    def _look_at_deletion(self, now: float, metadata: Mapping[str, Any], lost_sec: float) -> None:
        if "deletionTimestamp" in metadata:
            self.is_taken |= self.deleted is None
            grace = float(metadata.get("deletionGracePeriodSeconds") or 0)
            over = now - self.since.setdefault(f"going {grace:g}", now) - grace
            if over > lost_sec:
                why = f"its node has not ended it {over:.0f} s after its time"
                self.verdict = Ending(lost=f"NodeLost: {why}")
                self.grace_sec = 0
