"""What the processes of a run agree on at each step, and how one leaves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from presage.schemas.errors import SchemaError
from presage.schemas.run.records import LedgerEntry, StepMetric
from presage.schemas.typed_values import from_json
from presage.trainer.checkpoint.format import Buffer
from presage.trainer.steps import DatasetExtent, common_extent

_LENGTH = 8


@dataclass(frozen=True, slots=True)
class CommittedStep:
    """Result of a committed step.

    Attributes:
        extent: the part of the dataset that all members saw when they agreed on the step.
        metric: its line in the metrics.
        entries: its lines in the ledger.
        sums: message with the sum over all microbatches, see `pack_sums`; None without peers.
    """

    extent: DatasetExtent
    metric: StepMetric
    entries: tuple[LedgerEntry, ...]
    sums: torch.Tensor | None

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        return self.message.nbytes

    @property
    def message(self) -> torch.Tensor:
        """The message of a step that others may need."""
        assert self.sums is not None, "a process with peers has the message"
        return self.sums

    def to_bytes(self) -> bytes:
        """Return the length of the JSON part, JSON, sums."""
        body = {
            "extent": asdict(self.extent),
            "metric": asdict(self.metric),
            "entries": [asdict(e) for e in self.entries],
        }
        lines = json.dumps(body).encode()
        return len(lines).to_bytes(_LENGTH, "little") + lines + self.message.numpy().tobytes()

    @staticmethod
    def from_bytes(data: Buffer) -> CommittedStep:
        """Parse what `to_bytes` returned."""
        end = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
        body = json.loads(bytes(data[_LENGTH:end]))
        return CommittedStep(
            from_json(DatasetExtent, body["extent"]),
            from_json(StepMetric, body["metric"]),
            from_json(tuple[LedgerEntry, ...], body["entries"]),
            torch.frombuffer(bytearray(data[end:]), dtype=torch.uint8),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """Status that a replica sends to all others at the start of a step."""

    since: int = 0
    """First step that it took part in."""
    state: str = ""
    """Address of its `PeerServer`."""
    meeting: str = ""
    """Address of its `MeetingStore`."""
    speed: float | None = None
    """Microbatches per second; None before its first step."""
    microbatches: tuple[int, int] = (0, 0)
    """First microbatch of the step that it computes or has computed, and one after the last."""
    failures: int = 0
    """Number of its failed exchanges."""
    written: int = -1
    """Last step whose evicted rows are known to be in the stores."""
    done: bool = False
    """Whether it has nothing left to do."""
    leaving: bool = False
    """Whether this step is its last because it was asked to leave."""
    num_segments: int = 0
    """Committed segments of the dataset that it sees."""
    sealed: bool = False
    """Whether it sees that the dataset is sealed."""
    frontier: tuple[int, ...] = ()
    """`Frontier.state`: what was agreed on before."""
    fatal_error: str = ""
    """Error because of which the run ends with this step."""
    logged: int = -1
    """Last step whose log lines it knows to be durable."""
    saved: int = -1
    """Step of the newest checkpoint that it knows to be durable; -1: none."""

    @property
    def extent(self) -> DatasetExtent:
        """The part of the dataset that it sees."""
        return DatasetExtent(num_segments=self.num_segments, sealed=self.sealed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One replica of an agreement."""

    name: str
    """Unique; a restarted replica has a new name."""
    step: int
    """Step that it is about to commit."""
    status: ReplicaStatus


@dataclass(frozen=True, slots=True)
class Agreement:
    """Status of all members, the same for all of them.

    Attributes:
        number: changes with the members.
        members: by name.
    """

    number: int
    members: Mapping[str, Member]

    @property
    def step(self) -> int:
        """The step to be committed: the maximum over members."""
        return max(member.step for member in self.members.values())

    @property
    def ready(self) -> dict[str, Member]:
        """Members that take part in `step`; others are behind."""
        return {name: m for name, m in self.members.items() if m.step == self.step}

    @property
    def written(self) -> int:
        """The last step whose evicted rows are known to be in the stores by any member."""
        return max(member.status.written for member in self.members.values())

    @property
    def logged(self) -> int:
        """The last step whose log lines any member knows to be durable."""
        return max(member.status.logged for member in self.members.values())

    @property
    def saved(self) -> int:
        """Step of the newest checkpoint that any member knows to be durable; -1: none."""
        return max(member.status.saved for member in self.members.values())

    @property
    def extent(self) -> DatasetExtent:
        """The part of the dataset that all ready members see."""
        return common_extent([member.status.extent for member in self.ready.values()])

    @property
    def fatal_error(self) -> str:
        """Error because of which all members leave after this step; usually empty."""
        return next((m.status.fatal_error for m in self.ready.values() if m.status.fatal_error), "")

    @property
    def leaving(self) -> list[str]:
        """Members for which this step is the last."""
        all_leave = bool(self.fatal_error)
        return [name for name, m in self.members.items() if m.status.leaving or all_leave]

    @property
    def staying(self) -> dict[str, Member]:
        """Ready members that take part in the next step, too."""
        leaving = self.leaving
        return {name: m for name, m in self.ready.items() if name not in leaving}

    @property
    def key(self) -> str:
        """Identifies the connections between the ready members; changes with each failure."""
        failures = sum(member.status.failures for member in self.ready.values())
        return f"{self.number}/{failures}/{','.join(self.ready)}"

    @property
    def writer(self) -> str:
        """The member that writes the run's files: the oldest of those that stay."""
        candidates = self.staying or self.ready
        return min(candidates, key=lambda name: (candidates[name].status.since, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveOutcome:
    """What remains to be done when a replica leaves."""

    saves: bool
    """Whether no replica stays, and this one saves."""
    others_continue: bool
    """Whether other replicas stay."""
    error: BaseException | None = None
    """Error that ends the run, after saving."""


def leave_outcome(agreement: Agreement, name: str) -> LeaveOutcome | None:
    """Return what remains to be done when a member leaves after a step; None if it stays."""
    if name not in agreement.leaving:
        return None
    others_continue = name not in agreement.ready or bool(agreement.staying)
    saves = not others_continue and agreement.writer == name
    error = SchemaError(agreement.fatal_error) if agreement.fatal_error else None
    return LeaveOutcome(saves=saves, others_continue=others_continue, error=error)
