"""The next action for a day, from the log and the dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.retrain.records import Attempt, Failed, Metrics, Stage, Started, State
from scheduler.retrain.root import SegmentFact, base_of, held_back, to_train
from schemas.config.schedule import ModelGateConfig, RetrainConfig
from schemas.run_log import EXIT_BEHIND, EXIT_HUNG, EXIT_LOST_ROWS


def judge(new: Metrics, old: Metrics | None, limits: ModelGateConfig) -> tuple[str, ...]:
    """Return what keeps a model from being promoted, in words; nothing where it is good.

    Args:
        new: of the model, on the newest held-back range.
        old: of the last promoted model on the same range; None where there is none.
        limits: of the job file.
    """
    if new.num_samples < limits.min_samples:
        return (
            f"{new.num_samples:,} samples are held back, of at least {limits.min_samples:,} "
            "(gate.min_samples)",
        )
    found = [*_absolute(new, limits), *([] if old is None else _relative(new, old, limits))]
    return tuple(reason for reason in found if reason)


def _absolute(new: Metrics, limits: ModelGateConfig) -> list[str]:
    """Return what is wrong with a model by itself; empty texts where nothing is."""
    most = limits.max_calibration_error
    return [
        _above("NE", new.ne, limits.max_ne, "(gate.max_ne)"),
        _below("AUC", new.auc, limits.min_auc, "(gate.min_auc)"),
        _above(_FAR, _distance(new), most, "(gate.max_calibration_error)"),
    ]


def _relative(new: Metrics, old: Metrics, limits: ModelGateConfig) -> list[str]:
    """Return what is worse than in the last promoted model; where that has no value, nothing is."""
    found: list[str] = []
    if old.ne is not None and limits.max_ne_increase is not None:
        most = old.ne * (1 + limits.max_ne_increase)
        where = f"for {old.ne:.5g} before (gate.max_ne_increase)"
        found.append(_above("NE", new.ne, most, where))
    if old.auc is not None and limits.max_auc_decrease is not None:
        least = old.auc * (1 - limits.max_auc_decrease)
        where = f"for {old.auc:.5g} before (gate.max_auc_decrease)"
        found.append(_below("AUC", new.auc, least, where))
    far = _distance(old)
    if far is not None and limits.max_calibration_drift is not None:
        most = far + limits.max_calibration_drift
        where = f"for {far:.5g} before (gate.max_calibration_drift)"
        found.append(_above(_FAR, _distance(new), most, where))
    return found


_FAR = "distance of the calibration from 1"


def _distance(metrics: Metrics) -> float | None:
    return None if metrics.calibration is None else abs(metrics.calibration - 1)


def _above(name: str, value: float | None, most: float | None, where: str) -> str:
    """Return the sentence about a value above its limit, or without a value; empty otherwise."""
    if most is None:
        return ""
    if value is None:
        return f"{name} has no value {where}"
    # Written so that NaN is above every limit.
    return "" if value <= most else f"{name} {value:.5g} is above {most:.5g} {where}"


def _below(name: str, value: float | None, least: float | None, where: str) -> str:
    """Return the sentence about a value below its limit, as `_above`."""
    if least is None:
        return ""
    if value is None:
        return f"{name} has no value {where}"
    return "" if value >= least else f"{name} {value:.5g} is below {least:.5g} {where}"


REFUSED = 3
"""Exit status of a day whose data or whose model was turned down."""
AGAIN = (EXIT_HUNG, EXIT_BEHIND, EXIT_LOST_ROWS)
"""Exit statuses of a trainer after which another start may get further."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What somebody wants."""

    day: str
    """The day."""
    corrected: bool = False
    """Whether its input is another one than before."""
    again: bool = False
    """Whether a day that was turned down is trained and judged once more."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Begin the day, as this run."""

    run: str


@dataclass(frozen=True, slots=True)
class Run:
    """Start the process of a stage."""

    run: str
    stage: Stage
    process: str
    base: str | None
    segments: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Await:
    """Wait for a process that was started, by whomever."""

    run: str
    started: Started


@dataclass(frozen=True, slots=True)
class Judge:
    """Write the verdict down."""

    run: str
    reasons: tuple[str, ...]
    against: str | None


@dataclass(frozen=True, slots=True)
class Promote:
    """Let the pointer name the run."""

    run: str


@dataclass(frozen=True, slots=True)
class Close:
    """End a day without a verdict; what still runs of it is ended."""

    run: str
    final: bool
    status: int
    reason: str


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove the folder of a run."""

    run: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing is left to do, or nothing can be done."""

    status: int
    words: str


Step = Begin | Run | Await | Judge | Promote | Close | Remove | Finished


def next_step(
    asked: Asked,
    before: State,
    state: State,
    dataset: Sequence[SegmentFact],
    config: RetrainConfig,
) -> Step:
    """Return what is to be done next.

    Args:
        asked: the day.
        before: where the log stood when the command began.
        state: where it stands now.
        dataset: its segments in order, as they are now.
        config: of the job file.
    """
    for attempt in state.attempts:
        if attempt.is_open and attempt.judged is not None:
            return Promote(attempt.run)
    attempts = state.of_day(asked.day)
    latest = attempts[-1] if attempts else None
    if latest is None or _begins_anew(asked, before, latest):
        return _begin(asked, state)
    if latest.is_open:
        return _go_on(latest, before, state, dataset, config)
    useless = removable(state, config.keep)
    return Remove(useless[0]) if useless else _finished(latest)


def removable(state: State, keep: int | None) -> list[str]:
    """Return the runs whose folders are of no use any more, oldest first.

    Args:
        state: of all days.
        keep: promoted runs that stay, with what was turned down since the oldest of them; all when
            None.
    """
    names = [a.run for a in state.attempts]
    promoted = [run for run in state.promoted if run not in state.removed]
    oldest = names.index(promoted[-keep]) if keep is not None and len(promoted) > keep else 0
    return [
        attempt.run
        for place, attempt in enumerate(state.attempts)
        if "train" in attempt.started
        and attempt.run not in state.removed
        and (attempt.closed is not None or place < oldest)
    ]


def _begins_anew(asked: Asked, before: State, latest: Attempt) -> bool:
    """Tell whether a day is begun anew that was begun before."""
    if latest.closed is not None and not latest.closed.final:
        return True
    if latest.run not in {a.run for a in before.attempts}:
        return False
    if latest.is_open:
        return asked.corrected and not latest.corrected
    return asked.corrected or asked.again


def _begin(asked: Asked, state: State) -> Step:
    """Begin a day, after whatever was left unfinished is closed."""
    for attempt in state.attempts:
        if attempt.is_open:
            return Close(
                attempt.run,
                final=False,
                status=0,
                reason=f"left unfinished when {asked.day} was begun, which trains what it had",
            )
    return Begin(f"{asked.day}.{len(state.of_day(asked.day)) + 1}")


def _go_on(
    attempt: Attempt,
    before: State,
    state: State,
    dataset: Sequence[SegmentFact],
    config: RetrainConfig,
) -> Step:
    """Go on with a day that is not finished."""
    if attempt.pending is not None:
        return Await(attempt.run, attempt.pending)
    stage = attempt.stage
    if stage is None:
        return _judge(attempt, config)
    if stale := _renamed(attempt, dataset):
        reason = f"{', '.join(stale)} of it was written again without what was forgotten"
        return Close(attempt.run, final=False, status=0, reason=reason)
    lost = _failures(attempt, before, stage)
    if lost and (given_up := _give_up(attempt, lost, config.tries)):
        return given_up
    if stage == "train" and stage not in attempt.started:
        return _first_train(attempt, state, dataset, config)
    return _start(attempt, stage, state, dataset)


def _renamed(attempt: Attempt, dataset: Sequence[SegmentFact]) -> list[str]:
    """Return the segments of a day's stages that have another name since ids were forgotten."""
    named = {s for started in attempt.started.values() for s in started.segments}
    return sorted(named & frozenset[str]().union(*(s.before for s in dataset)))


def _failures(attempt: Attempt, before: State, stage: Stage) -> list[Failed]:
    """Return what went wrong with a stage since the command began."""
    earlier = next((len(a.failures) for a in before.attempts if a.run == attempt.run), 0)
    return [failed for failed in attempt.failures[earlier:] if failed.stage == stage]


def _give_up(attempt: Attempt, failures: Sequence[Failed], tries: int) -> Step | None:
    """Return how a stage ends that failed; None where it is to be tried again."""
    last = failures[-1]
    if last.stage == "append" and last.status == REFUSED:
        return Close(attempt.run, final=True, status=REFUSED, reason=f"data: {last.reason}")
    may_be_better = last.status is None or last.status < 0 or last.status in AGAIN
    if may_be_better and len(failures) < tries:
        return None
    how = f"status {last.status}" if last.status is not None else "an end that nobody saw"
    times = "" if len(failures) == 1 else f" {len(failures)} times"
    return Finished(1, f"{attempt.run}: {last.stage} failed{times}, {how}: {last.reason}")


def _first_train(
    attempt: Attempt, state: State, dataset: Sequence[SegmentFact], config: RetrainConfig
) -> Step:
    """Choose what a run begins with and trains; close it where that would change nothing."""
    base = base_of(state, dataset)
    segments = to_train(state, dataset, attempt.day, base, config.refused_days)
    if not segments:
        return Close(attempt.run, final=True, status=0, reason=f"{base} has trained it")
    same = _judged_alike(state, base, segments)
    if same is not None and not attempt.again:
        reason = f"nothing has changed since {same} was turned down; --again trains once more"
        return Close(attempt.run, final=True, status=REFUSED, reason=reason)
    reason = f"from the checkpoint of {base}" if base else _why_from_nothing(state)
    return Run(attempt.run, "train", _process(attempt, "train"), base, segments, reason)


def _judged_alike(state: State, base: str | None, segments: tuple[str, ...]) -> str | None:
    """Return the run that was turned down and had the same to train and to beat, if there is."""
    for a in reversed(state.attempts):
        alike = a.base == base and a.segments == segments and a.compared_with == state.last_good
        if a.is_refused and alike:
            return a.run
    return None


def _why_from_nothing(state: State) -> str:
    if not state.promoted:
        return "from nothing: no run was promoted before"
    return "from nothing: no promoted run is left that knows only what the dataset has now"


def _start(attempt: Attempt, stage: Stage, state: State, dataset: Sequence[SegmentFact]) -> Step:
    """Start a stage, in the way in which it was started before."""
    process, earlier = _process(attempt, stage), attempt.started.get(stage)
    if earlier is not None:
        return Run(
            attempt.run, stage, process, earlier.base, earlier.segments, "it is started again"
        )
    if stage == "append":
        return Run(attempt.run, stage, process, None, (), f"{attempt.day} from {attempt.input}")
    if stage == "compare":
        same = attempt.started["evaluate"].segments
        reason = "the last promoted run on the same range"
        return Run(attempt.run, stage, process, attempt.compared_with, same, reason)
    segment = held_back(dataset)
    if segment is None:
        return Finished(
            1,
            "dataset must hold samples back to judge a model on, got none; set "
            "data.split.evaluation_last and correct the day",
        )
    reason = f"on what is held back of {segment}"
    return Run(attempt.run, stage, process, state.last_good, (segment,), reason)


def _process(attempt: Attempt, stage: Stage) -> str:
    """Return the next name of the process of a stage: none is given twice."""
    return f"{attempt.run}.{stage}.{sum(f.stage == stage for f in attempt.failures) + 1}"


def _judge(attempt: Attempt, config: RetrainConfig) -> Step:
    new, old = attempt.metrics("evaluate"), attempt.metrics("compare")
    assert new is not None, "a run is evaluated before it is judged"
    return Judge(attempt.run, judge(new, old, config.gate), attempt.compared_with)


def _finished(attempt: Attempt) -> Finished:
    """Return how a day stands that is done."""
    if attempt.closed is not None:
        return Finished(attempt.closed.status, f"{attempt.day} is done: {attempt.closed.reason}")
    if attempt.judged is not None and attempt.is_refused:
        why = "; ".join(attempt.judged.reasons)
        stays = attempt.judged.against or "nothing"
        words = f"{attempt.day} is turned down, {stays} stays promoted: {attempt.run}: {why}"
        return Finished(REFUSED, words)
    return Finished(0, f"{attempt.day} is done: {attempt.run} is promoted")
