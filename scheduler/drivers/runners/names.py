"""Names under which segment jobs are known where they run."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from scheduler.drivers.instance import instance_of


@dataclass(frozen=True, slots=True)
class Names:
    """Names of one scheduler's jobs, which no other scheduler gives.

    Attributes:
        prefix: with which all of them begin.
    """

    prefix: str

    @staticmethod
    def of_scheduler(output: Path) -> Names:
        """Return the names of a scheduler; the same when it is started again, on any machine."""
        return Names(f"presage-{instance_of(output)}-")

    def of(self, job: str, process: str) -> str:
        """Return the name of a segment job: letters, digits and dashes, as Dataflow wants it.

        Example:
            >>> Names("presage-0123abcd-").of("Demo job", "segment-3.1")
            'presage-0123abcd-demo-job-segment-3-1-2c2c8613'
        """
        words = re.sub("[^a-z0-9]+", "-", f"{job}-{process}".lower())
        return f"{self.prefix}{words}-{_digest(f'{job}/{process}')}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
