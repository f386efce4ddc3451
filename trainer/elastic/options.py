"""Options of one replica, and how it leaves on SIGTERM.

A replica that is asked to leave announces it in the agreement of its last step.
If an agreement leaves no replica that stays, its step is the last one and its writer saves. The
rule is the same for one replica and for a launcher that asks all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.elastic.membership import Agreement
from trainer.stores.remote.connection import Access
from trainer.stores.remote.wire import Certificate, check_host


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """Options of one replica."""

    number: int
    """Number of the replica, the same after a restart."""
    name: str
    """Unique name of this process."""
    lighthouse: str
    """`http://host:port`."""
    access: Access
    """Credentials between replicas, and the maximum wait for a message or for the lighthouse."""
    certificate: Certificate | None = None
    """Certificate of the server that sends state to other replicas, for TLS."""
    host: str = "127.0.0.1"
    """Address of the interface that others reach."""
    expected: int = 1
    """Replicas to wait for before the first step."""
    heartbeat_sec: float = 1.0
    """Time without heartbeat after which a replica is considered dead."""

    def __post_init__(self) -> None:
        """Require TLS beyond loopback."""
        check_host(self.host, self.certificate)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveOutcome:
    """How a replica leaves."""

    saves: bool
    """Whether no replica stays, and this one saves."""
    others_continue: bool
    """Whether other replicas stay."""
    trouble: str = ""
    """Error that ended the run."""


def leave_outcome(agreement: Agreement, name: str) -> LeaveOutcome | None:
    """Return how a member leaves after a step, None if it stays."""
    if name not in agreement.leaving:
        return None
    others_continue = name not in agreement.ready or bool(agreement.staying)
    saves = not others_continue and agreement.writer == name
    return LeaveOutcome(saves=saves, others_continue=others_continue, trouble=agreement.trouble)
