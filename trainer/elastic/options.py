"""Options of one replica, and how it leaves on SIGTERM."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from schemas.run_log import METRICS
from trainer.checkpoint.load import newest_checkpoint, step_of
from trainer.elastic.membership import Agreement
from trainer.stores.remote.connection import Access
from trainer.stores.remote.wire import Certificate, check_host


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """What one replica is told."""

    number: int
    """Of the replica; one that is started again keeps it."""
    name: str
    """Unique for this life of it."""
    lighthouse: str
    """`http://host:port`."""
    access: Access
    """How replicas reach each other; its limit is the longest wait for a message, and for a
    lighthouse that is not there."""
    certificate: Certificate | None = None
    """For TLS, when state is given to others."""
    host: str = "127.0.0.1"
    """Address of the interface that others reach."""
    expected: int = 1
    """Replicas to wait for before the first step."""
    heartbeat_sec: float = 1.0
    """Time without a sign of life after which one is dead."""

    def __post_init__(self) -> None:
        """Refuse to send state over a network in the clear."""
        check_host(self.host, self.certificate)


# What SIGTERM or ^C means to a replica: it leaves after the step in flight, the others go on.
#
# Each tells the others in the agreement of its last step. Where an agreement leaves nobody who
# stays, its step is the last of all, and its writer saves. So one rule serves for one replica,
# whose machine is wanted elsewhere, and for the launcher, which asks all of them.


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveOutcome:
    """How a replica left."""

    saves: bool
    """Whether nobody stays, and this replica is the one to save."""
    alone: bool
    """Whether others go on."""
    trouble: str = ""
    """Why nobody can."""


def leave_outcome(agreement: Agreement, name: str) -> LeaveOutcome | None:
    """Return how a replica leaves after a step, None where it stays.

    Args:
        agreement: of the step.
        name: of the replica, a member.
    """
    if name not in agreement.leaving:
        return None
    alone = name not in agreement.ready or bool(agreement.staying)
    saves = not alone and agreement.writer == name
    return LeaveOutcome(saves=saves, alone=alone, trouble=agreement.trouble)


def resume_message(run: Path, last: int | None) -> str:
    """Say from where a run goes on.

    Args:
        run: run folder; none of its replicas lives.
        last: the step after the last one; None where that is not known yet.
    """
    checkpoint = newest_checkpoint(run)
    saved = step_of(checkpoint)
    trained = (run / METRICS).read_bytes().count(b"\n")
    if saved == last:
        return f"all steps are trained; evaluate {run} with --resume"
    if saved == trained:
        return f"stopped at step {saved}, which {run} goes on from with --resume"
    return f"stopped at step {trained}; {run} goes on from step {saved} with --resume"
