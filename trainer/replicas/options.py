"""What one replica is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.stores.peer import Access
from trainer.stores.tls import Certificate, check_host


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
