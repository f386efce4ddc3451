"""A committed step as replicas that are behind get it: its lines, and the sums that update."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch

from schemas.events import LedgerEntry, StepMetric
from schemas.horizon import Known

_LENGTH = 8


@dataclass(frozen=True, slots=True)
class Committed:
    """What a step left behind.

    Attributes:
        known: what all saw of the dataset when they agreed on it.
        metric: its line.
        entries: its lines of the ledger.
        sums: message of the exchange with the sum of all leaves.
    """

    known: Known
    metric: StepMetric
    entries: tuple[LedgerEntry, ...]
    sums: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Return what it keeps in memory."""
        return self.sums.nbytes

    def to_bytes(self) -> bytes:
        """Return length of the lines, lines as JSON, sums."""
        body = {
            "known": asdict(self.known),
            "metric": asdict(self.metric),
            "entries": [asdict(e) for e in self.entries],
        }
        lines = json.dumps(body).encode()
        return len(lines).to_bytes(_LENGTH, "little") + lines + self.sums.numpy().tobytes()

    @staticmethod
    def from_bytes(data: bytes) -> Committed:
        """Read what `to_bytes` returned."""
        end = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
        body = json.loads(data[_LENGTH:end])
        entries = tuple(
            LedgerEntry(**{**entry, "blocks": tuple(entry["blocks"])}) for entry in body["entries"]
        )
        sums = torch.frombuffer(bytearray(data[end:]), dtype=torch.uint8)
        return Committed(Known(**body["known"]), StepMetric(**body["metric"]), entries, sums)
