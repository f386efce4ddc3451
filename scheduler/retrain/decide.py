"""The next action for a day, as a pure function of the log, the dataset and the request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from presage.scheduler.retrain.records import (
    Attempt,
    Begun,
    Closed,
    Failed,
    Judged,
    ModelMetrics,
    Removed,
    RetrainState,
    Stage,
    Started,
    started_from,
)
from presage.schemas.config.schedule import ModelGateConfig, RetrainConfig
from presage.schemas.errors import PlanError
from presage.schemas.run.records import EXIT_BEHIND, EXIT_HUNG, EXIT_LOST_ROWS


def judge(new: ModelMetrics, old: ModelMetrics | None, limits: ModelGateConfig) -> tuple[str, ...]:
    """Return why a model is refused; empty if it passes."""
    if new.num_samples < limits.min_samples:
        return (
            f"evaluation has {new.num_samples:,} samples, less than {limits.min_samples:,} "
            "(gate.min_samples)",
        )
    reasons = _absolute_reasons(new, limits)
    if old is not None:
        reasons += _relative_reasons(new, old, limits)
    return tuple(reason for reason in reasons if reason)


def _absolute_reasons(new: ModelMetrics, limits: ModelGateConfig) -> list[str]:
    return [
        _above("NE", new.ne, limits.max_ne, "(gate.max_ne)"),
        _below("AUC", new.auc, limits.min_auc, "(gate.min_auc)"),
        _above(
            _CALIBRATION,
            _calibration_error(new),
            limits.max_calibration_error,
            "(gate.max_calibration_error)",
        ),
    ]


def _relative_reasons(new: ModelMetrics, old: ModelMetrics, limits: ModelGateConfig) -> list[str]:
    reasons: list[str] = []
    if old.ne is not None and limits.max_ne_increase is not None:
        most = old.ne * (1 + limits.max_ne_increase)
        where = f"for {old.ne:.5g} before (gate.max_ne_increase)"
        reasons.append(_above("NE", new.ne, most, where))
    if old.auc is not None and limits.max_auc_decrease is not None:
        least = old.auc * (1 - limits.max_auc_decrease)
        where = f"for {old.auc:.5g} before (gate.max_auc_decrease)"
        reasons.append(_below("AUC", new.auc, least, where))
    error = _calibration_error(old)
    if error is not None and limits.max_calibration_drift is not None:
        most = error + limits.max_calibration_drift
        where = f"for {error:.5g} before (gate.max_calibration_drift)"
        reasons.append(_above(_CALIBRATION, _calibration_error(new), most, where))
    return reasons


_CALIBRATION = "distance of the calibration from 1"


def _calibration_error(metrics: ModelMetrics) -> float | None:
    return None if metrics.calibration is None else abs(metrics.calibration - 1)


def _above(name: str, value: float | None, most: float | None, where: str) -> str:
    """Return the violation of an upper limit or a missing value; else an empty string."""
    if most is None:
        return ""
    if value is None:
        return f"{name} has no value {where}"
    # NaN is above every limit.
    return "" if value <= most else f"{name} {value:.5g} is above {most:.5g} {where}"


def _below(name: str, value: float | None, least: float | None, where: str) -> str:
    if least is None:
        return ""
    if value is None:
        return f"{name} has no value {where}"
    return "" if value >= least else f"{name} {value:.5g} is below {least:.5g} {where}"


EXIT_REFUSED = 3
"""Exit status of a day whose data or model was refused."""
RETRYABLE = (EXIT_HUNG, EXIT_BEHIND, EXIT_LOST_ROWS)
"""Exit statuses of a trainer after which it is retried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DayRequest:
    """A request to retrain a day."""

    day: str
    input: str
    """Folder of its raw files."""
    corrected: bool = False
    """Whether these have changed."""
    again: bool = False
    """Whether to train and judge it again after a refusal."""


@dataclass(frozen=True, slots=True)
class Await:
    """Wait for the process of a started stage."""

    started: Started


@dataclass(frozen=True, slots=True)
class Promote:
    """Point to the run."""

    run: str


@dataclass(frozen=True, slots=True)
class Finished:
    """No action remains, or none is possible."""

    status: int
    message: str


Action = Begun | Started | Await | Judged | Promote | Closed | Removed | Finished
"""A record is to be logged, with what it records."""


def next_action(
    request: DayRequest,
    before: RetrainState,
    state: RetrainState,
    dataset: Sequence[SegmentFact],
    config: RetrainConfig,
) -> Action:
    """Return the next action: the first stage that is not done, or how the day ends."""
    for attempt in state.attempts:
        if attempt.is_open and (rolled_back := _rolled_back_bases(attempt, state)):
            reason = f"{', '.join(rolled_back)} was rolled back"
            return Closed(run=attempt.run, final=False, reason=reason)
        if attempt.is_open and attempt.judged is not None:
            return Promote(attempt.run)
    attempts = state.of_day(request.day)
    latest = attempts[-1] if attempts else None
    if latest is None or _needs_new_attempt(request, before, latest):
        return _begin(request, state)
    if latest.is_open:
        return _continue(latest, before, state, dataset, config)
    obsolete = removable(state, config.keep)
    return Removed(run=obsolete[0]) if obsolete else _finished(latest)


def removable(state: RetrainState, keep: int | None) -> list[str]:
    """Return the runs whose folders can be removed, oldest first.

    Args:
        state: of all days.
        keep: number of promoted runs to keep, with all later refused ones; None for all.
    """
    names = [a.run for a in state.attempts]
    promoted = [run for run in state.promoted if run not in state.removed]
    oldest = names.index(promoted[-keep]) if keep is not None and len(promoted) > keep else 0
    return [
        attempt.run
        for index, attempt in enumerate(state.attempts)
        if "train" in attempt.started
        and attempt.run not in state.removed
        and (attempt.closed is not None or index < oldest)
    ]


def check_rollback(state: RetrainState, run: str) -> None:
    """Raise PlanError unless the promotion of a run can be withdrawn."""
    if run not in state.promoted:
        known = ", ".join(state.promoted) or "none"
        raise PlanError(f"run is not promoted: {run}; promoted are: {known}")
    withdrawn = started_from(state, run)
    left = [other for other in state.promoted if other not in withdrawn]
    previous = state.attempt(left[-1]).promoted if left else None
    if previous is None or previous.run in state.removed:
        raise PlanError(
            f"no promoted run before {run} is left to roll back to; correct its day, or train a "
            "newer one"
        )


def _needs_new_attempt(request: DayRequest, before: RetrainState, latest: Attempt) -> bool:
    if latest.closed is not None and not latest.closed.final:
        return True
    if latest.run not in {a.run for a in before.attempts}:
        return False
    if latest.is_open:
        return request.corrected and not latest.corrected
    return request.corrected or request.again


def _begin(request: DayRequest, state: RetrainState) -> Action:
    for attempt in state.attempts:
        if attempt.is_open:
            reason = f"unfinished when {request.day} was started, which trains its segment"
            return Closed(run=attempt.run, final=False, reason=reason)
    return Begun(
        run=f"{request.day}.{len(state.of_day(request.day)) + 1}",
        day=request.day,
        input=request.input,
        corrected=request.corrected,
        again=request.again,
    )


def _continue(
    attempt: Attempt,
    before: RetrainState,
    state: RetrainState,
    dataset: Sequence[SegmentFact],
    config: RetrainConfig,
) -> Action:
    if attempt.pending is not None:
        return Await(attempt.pending)
    stage = attempt.stage
    if stage is None:
        new, old = attempt.metrics("evaluate"), attempt.metrics("compare")
        assert new is not None, "a run is evaluated before it is judged"
        reasons = judge(new, old, config.gate)
        return Judged(run=attempt.run, reasons=reasons, against=attempt.compared_with)
    if stale := _rewritten(attempt, dataset):
        reason = f"its segments {', '.join(stale)} were rewritten without erased ids"
        return Closed(run=attempt.run, final=False, reason=reason)
    failures = _failures(attempt, before, stage)
    if failures and (end := _end_after_failures(attempt, failures, config.tries)):
        return end
    if stage == "train" and stage not in attempt.started:
        return _first_train(attempt, state, dataset, config)
    return _start(attempt, stage, state, dataset)


def _rolled_back_bases(attempt: Attempt, state: RetrainState) -> list[str]:
    bases = {started.base for started in attempt.started.values()}
    return sorted(a.run for a in state.attempts if a.rolled_back is not None and a.run in bases)


def _rewritten(attempt: Attempt, dataset: Sequence[SegmentFact]) -> list[str]:
    used = {s for started in attempt.started.values() for s in started.segments}
    return sorted(used & frozenset[str]().union(*(s.former_ids for s in dataset)))


def _failures(attempt: Attempt, before: RetrainState, stage: Stage) -> list[Failed]:
    earlier = next((len(a.failures) for a in before.attempts if a.run == attempt.run), 0)
    return [failed for failed in attempt.failures[earlier:] if failed.stage == stage]


def _end_after_failures(attempt: Attempt, failures: Sequence[Failed], tries: int) -> Action | None:
    """Return how a failed stage ends; None if it is retried."""
    last = failures[-1]
    if last.stage == "append" and last.status == EXIT_REFUSED:
        reason = f"data: {last.reason}"
        return Closed(run=attempt.run, final=True, status=EXIT_REFUSED, reason=reason)
    retryable = last.status is None or last.status < 0 or last.status in RETRYABLE
    if retryable and len(failures) < tries:
        return None
    how = f"status {last.status}" if last.status is not None else "unknown status"
    times = "" if len(failures) == 1 else f" {len(failures)} times"
    return Finished(1, f"{attempt.run}: {last.stage} failed{times}, {how}: {last.reason}")


def _first_train(
    attempt: Attempt, state: RetrainState, dataset: Sequence[SegmentFact], config: RetrainConfig
) -> Action:
    """Choose what a run starts from and trains; close it if that would change nothing."""
    base = choose_base(state, dataset)
    segments = segments_to_train(state, dataset, attempt.day, base, config.refused_days)
    if not segments:
        return Closed(run=attempt.run, final=True, reason=f"{base} has trained it")
    same = _same_refusal(state, base, segments)
    if same is not None and not attempt.again:
        reason = f"nothing has changed since {same} was refused; --again trains it again"
        return Closed(run=attempt.run, final=True, status=EXIT_REFUSED, reason=reason)
    reason = f"from the checkpoint of {base}" if base else _why_from_scratch(state)
    return _started(attempt, "train", base, segments, reason)


def _same_refusal(state: RetrainState, base: str | None, segments: tuple[str, ...]) -> str | None:
    for a in reversed(state.attempts):
        same = a.base == base and a.segments == segments and a.compared_with == state.last_good
        if a.was_refused and same:
            return a.run
    return None


def _why_from_scratch(state: RetrainState) -> str:
    if not state.promoted:
        return "from scratch: no run was promoted before"
    return "from scratch: all promoted runs have trained segments that the dataset no longer has"


def _start(
    attempt: Attempt, stage: Stage, state: RetrainState, dataset: Sequence[SegmentFact]
) -> Action:
    """Start a stage; a retry has the same arguments."""
    earlier = attempt.started.get(stage)
    if earlier is not None:
        return _started(attempt, stage, earlier.base, earlier.segments, "restarted")
    if stage == "append":
        return _started(attempt, stage, None, (), f"{attempt.day} from {attempt.input}")
    if stage == "compare":
        same = attempt.started["evaluate"].segments
        reason = "the last promoted run on the same samples"
        return _started(attempt, stage, attempt.compared_with, same, reason)
    segment = evaluation_segment(dataset)
    if segment is None:
        return Finished(
            1,
            "dataset has no evaluation split to judge a model on; set data.split.evaluation_last "
            "and correct the day",
        )
    reason = f"on the evaluation split of {segment}"
    return _started(attempt, stage, state.last_good, (segment,), reason)


def _started(
    attempt: Attempt, stage: Stage, base: str | None, segments: tuple[str, ...], reason: str
) -> Started:
    """Return the start of a stage, by a process with an unused name."""
    number = sum(f.stage == stage for f in attempt.failures) + 1
    return Started(
        run=attempt.run,
        stage=stage,
        process=f"{attempt.run}.{stage}.{number}",
        base=base,
        segments=segments,
        reason=reason,
    )


def _finished(attempt: Attempt) -> Finished:
    if attempt.closed is not None:
        return Finished(attempt.closed.status, f"{attempt.day} is done: {attempt.closed.reason}")
    if attempt.rolled_back is not None:
        message = f"{attempt.day} was rolled back: {attempt.run}; --again trains it again"
        return Finished(EXIT_REFUSED, message)
    if attempt.judged is not None and attempt.was_refused:
        reasons = "; ".join(attempt.judged.reasons)
        current = attempt.judged.against or "nothing"
        message = f"{attempt.day} was refused, {current} stays promoted: {attempt.run}: {reasons}"
        return Finished(EXIT_REFUSED, message)
    return Finished(0, f"{attempt.day} is done: {attempt.run} is promoted")


# Segments: which run a day starts from, and what it trains.


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentFact:
    """A segment of the dataset."""

    id: str
    """Position and hash; a corrected segment has a new one."""
    day: str | None
    """Its day; None if it was built without one."""
    has_evaluation: bool
    former_ids: frozenset[str] = frozenset()
    """Ids that it had before ids were erased in it; its remaining samples were trained as those."""

    @property
    def ids(self) -> frozenset[str]:
        """Its current id and its former ones."""
        return self.former_ids | {self.id}


def trained_segments(state: RetrainState, run: str | None) -> frozenset[str]:
    """Return all segments that a run and the runs it started from have trained."""
    segments: frozenset[str] = frozenset()
    while run is not None:
        attempt = state.attempt(run)
        segments |= frozenset(attempt.segments)
        run = attempt.base
    return segments


def choose_base(state: RetrainState, dataset: Sequence[SegmentFact]) -> str | None:
    """Return the newest promoted run to start from; None to train from scratch.

    Runs that have trained a segment which was since corrected are excluded, as they would carry its
    errors on. Erased ids are no correction, unless nothing of a segment remains.
    """
    existing = frozenset[str]().union(*(segment.ids for segment in dataset))
    for run in reversed(state.promoted):
        if run not in state.removed and trained_segments(state, run) <= existing:
            return run
    return None


def segments_to_train(
    state: RetrainState,
    dataset: Sequence[SegmentFact],
    day: str,
    base: str | None,
    refused_days: Literal["train", "skip"],
) -> tuple[str, ...]:
    """Return the segments that a run must train, in the order of the dataset."""
    excluded = trained_segments(state, base)
    if refused_days == "skip":
        excluded |= _refused_segments(state, day)
    return tuple(s.id for s in dataset if s.ids.isdisjoint(excluded))


def evaluation_segment(dataset: Sequence[SegmentFact]) -> str | None:
    """Return the newest segment with an evaluation split; None if there is none."""
    return next((s.id for s in reversed(dataset) if s.has_evaluation), None)


def newest_day(state: RetrainState, dataset: Sequence[SegmentFact], run: str) -> str:
    """Return the newest day that a run has trained."""
    trained = trained_segments(state, run)
    return max(s.day for s in dataset if s.ids & trained and s.day is not None)


def _refused_segments(state: RetrainState, day: str) -> frozenset[str]:
    newest = {a.day: a for a in state.attempts if a.judged is not None}
    return frozenset(
        a.segment for a in newest.values() if a.was_refused and a.day != day and a.segment
    )
