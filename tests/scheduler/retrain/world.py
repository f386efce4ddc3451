"""A simulated dataset and models, on which days are retrained without processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field

from presage.scheduler.retrain.decide import (
    Await,
    DayRequest,
    Finished,
    Promote,
    SegmentFact,
    check_rollback,
    next_action,
    trained_segments,
)
from presage.scheduler.retrain.records import (
    Begun,
    Closed,
    Done,
    Failed,
    Judged,
    ModelMetrics,
    Promoted,
    Record,
    Removed,
    RetrainState,
    RolledBack,
    Started,
    apply_record,
)
from presage.schemas.config.schedule import RetrainConfig
from presage.schemas.errors import PlanError

GOOD = ModelMetrics(num_samples=1000, ne=0.9, auc=0.7, calibration=1.0)
BAD = ModelMetrics(num_samples=1000, ne=1.5, auc=0.4, calibration=3.0)
MAX_STEPS = 200


def good_but_for(*bad: str) -> Callable[[frozenset[str]], ModelMetrics]:
    """Return the quality of models: bad where they know one of these segments."""
    return lambda segments: BAD if segments & set(bad) else GOOD


class KilledError(Exception):
    """The command was killed."""


@dataclass
class World:
    """What is on disk, and what would happen."""

    config: RetrainConfig = field(default_factory=RetrainConfig)
    quality: Callable[[frozenset[str]], ModelMetrics] = field(
        default_factory=lambda: good_but_for()
    )
    versions: dict[str, int] = field(default_factory=dict[str, int])
    """Version of each day's input, 1 where nothing is said."""
    failing: Mapping[str, tuple[int | None, str]] = field(default_factory=dict)
    """Status and last words of processes that fail, by name."""
    records: list[Record] = field(default_factory=list[Record])
    state: RetrainState = field(default_factory=RetrainState)
    segments: dict[str, str] = field(default_factory=dict)
    before: dict[str, frozenset[str]] = field(default_factory=dict)
    """Names that the segment of a day had before ids were erased from it."""
    pointer: str | None = None
    segments_at_promotion: tuple[str, ...] = ()
    """Segments of the dataset when the newest run was promoted."""
    folders: set[str] = field(default_factory=set)
    rollback_after: int | None = None
    """Number of records after which another host withdraws a run."""
    rollback_of: str = ""
    ended: set[str] = field(default_factory=set)
    """Processes that were ended because a day was closed."""

    def dataset(self) -> tuple[SegmentFact, ...]:
        return tuple(
            SegmentFact(
                id=self.segments[day],
                day=day,
                has_evaluation=True,
                former_ids=self.before.get(day, frozenset()),
            )
            for day in sorted(self.segments)
        )

    def forget(self, day: str) -> None:
        """Write the segment of a day again without some ids."""
        old = self.segments[day]
        self.before[day] = self.before.get(day, frozenset()) | {old}
        self.segments[day] = f"{old}-left"

    def retrain(
        self, day: str, *, corrected: bool = False, again: bool = False, lives: int = MAX_STEPS
    ) -> Finished:
        """Bring a day to its end, unless the command is killed after so many things it did."""
        asked = DayRequest(day=day, input=day, corrected=corrected, again=again)
        before = self.state
        remaining = iter(range(lives))
        self.write_pointer()
        while True:
            step = next_action(asked, before, self.state, self.dataset(), self.config)
            if isinstance(step, Finished):
                return step
            for record in self.carry_out(step, remaining):
                if next(remaining, None) is None:
                    raise KilledError
                if self.rollback_after == len(self.records):
                    self.rollback_after = None
                    if self.roll_back(self.rollback_of):
                        break  # the record is late, and the next one is decided again
                self.append(record)

    def append(self, record: Record) -> None:
        self.records.append(record)
        self.state = apply_record(self.state, record)

    def roll_back(self, run: str) -> bool:
        """Withdraw a run, as another host does; return whether that is possible."""
        try:
            check_rollback(self.state, run)
        except PlanError:
            return False
        self.append(RolledBack(run=run))
        self.write_pointer()
        return True

    def write_pointer(self) -> None:
        self.pointer = None if self.state.pointer is None else self.state.pointer["run"]

    def carry_out(self, step: object, remaining: Iterator[int]) -> Iterator[Record]:
        """Do what a step says; what is done to the disk is a moment of its own."""
        match step:
            case Begun() | Started() | Judged():
                yield step
            case Await(started):
                yield self.process(started, remaining)
            case Promote(run):
                self.segments_at_promotion = tuple(sorted(self.segments.values()))
                yield Promoted(run=run, checkpoint=run, pointer={"run": run})
                self.moment(remaining)
                self.write_pointer()
            case Closed():
                pending = self.state.attempt(step.run).pending
                self.ended |= {pending.process} if pending else set()
                yield step
            case Removed(run=run):
                yield step
                self.folders.discard(run)
            case _:
                raise AssertionError(step)

    def moment(self, remaining: Iterator[int]) -> None:
        if next(remaining, None) is None:
            raise KilledError

    def process(self, started: Started, remaining: Iterator[int]) -> Record:
        """Run a process to its end; what it has done stays when the command is killed then."""
        attempt, run = self.state.attempt(started.run), started.run
        if started.process in self.failing:
            status, output = self.failing[started.process]
            return Failed(run=run, stage=started.stage, status=status, reason=output)
        if not set(started.segments) <= set(self.segments.values()):
            return Failed(run=run, stage=started.stage, status=1, reason="no such segment")
        result = {}
        if started.stage == "append":
            version = f"{attempt.day}-v{self.versions.get(attempt.day, 1)}"
            there = self.segments.get(attempt.day)
            valid = {None, version, there if version in self.before.get(attempt.day, ()) else None}
            if there not in valid and not attempt.corrected:
                return Failed(run=run, stage="append", status=1, reason="another listing")
            if version not in self.before.get(attempt.day, ()):
                self.segments[attempt.day] = version
                self.before.pop(attempt.day, None)
            result = {"segment": self.segments[attempt.day]}
        elif started.stage == "train":
            self.folders.add(started.run)
        else:
            run = started.run if started.stage == "evaluate" else started.base
            result = asdict(self.quality(trained_segments(self.state, run)))
        self.moment(remaining)
        return Done(run=started.run, stage=started.stage, result=result)
