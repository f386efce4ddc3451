"""Days in a simulated world: what is trained, from which run, and what is promoted."""

from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.scheduler.retrain.decide import check_rollback, newest_day, trained_segments
from presage.schemas.config.schedule import RetrainConfig
from presage.schemas.errors import PlanError
from tests.scheduler.retrain.world import KilledError, World, good_but_for

ONE, TWO, THREE, FOUR = (f"2026-01-0{i}" for i in range(1, 5))
DAYS = (ONE, TWO, THREE, FOUR)


def after_days(world: World, *days: str) -> World:
    for day in days:
        world.retrain(day)
    return world


def known_versions(world: World) -> frozenset[str]:
    """The segments that the promoted run knows."""
    return trained_segments(world.state, world.pointer)


def test_retrain_of_days_in_order_trains_each_segment_once_from_the_last_run() -> None:
    world = after_days(World(), ONE, TWO, THREE)
    assert [(a.run, a.base, a.segments) for a in world.state.attempts] == [
        (f"{ONE}.1", None, (f"{ONE}-v1",)),
        (f"{TWO}.1", f"{ONE}.1", (f"{TWO}-v1",)),
        (f"{THREE}.1", f"{TWO}.1", (f"{THREE}-v1",)),
    ]
    assert world.pointer == f"{THREE}.1"


def test_retrain_twice_says_that_it_is_done_and_records_nothing() -> None:
    world = after_days(World(), ONE, TWO)
    records = list(world.records)
    found = world.retrain(ONE)
    assert (found.status, found.message) == (0, f"{ONE} is done: {ONE}.1 is promoted")
    assert world.records == records


def test_retrain_of_a_bad_day_leaves_the_pointer_and_says_why_again() -> None:
    world = after_days(World(quality=good_but_for(f"{TWO}-v1")), ONE)
    first = world.retrain(TWO)
    records = list(world.records)
    assert first.status == 3
    assert first.message.startswith(f"{TWO} was refused, {ONE}.1 stays promoted: {TWO}.1: NE 1.5 ")
    assert world.retrain(TWO) == first
    assert (world.pointer, world.records) == (f"{ONE}.1", records)


def test_retrain_of_a_first_bad_day_promotes_nothing() -> None:
    world = World(quality=good_but_for(f"{ONE}-v1"))
    assert "nothing stays promoted" in world.retrain(ONE).message
    assert world.pointer is None


@pytest.mark.parametrize(
    ("refused_days", "segments"),
    [("train", (f"{TWO}-v1", f"{THREE}-v1")), ("skip", (f"{THREE}-v1",))],
)
def test_retrain_after_a_bad_day_begins_with_the_last_good_run(
    refused_days: str, segments: Sequence[str]
) -> None:
    config = RetrainConfig(refused_days=refused_days)  # pyright: ignore[reportArgumentType]: of a table
    world = World(config=config, quality=good_but_for(f"{TWO}-v1"))
    after_days(world, ONE, TWO, THREE)
    last = world.state.attempts[-1]
    assert (last.base, last.segments) == (f"{ONE}.1", segments)
    assert world.pointer == (f"{ONE}.1" if refused_days == "train" else f"{THREE}.1")


def test_retrain_of_a_corrected_day_begins_before_it_and_trains_later_days_again() -> None:
    world = after_days(World(), ONE, TWO, THREE)
    world.versions[TWO] = 2
    assert world.retrain(TWO, corrected=True).status == 0
    last = world.state.attempts[-1]
    assert (last.run, last.base) == (f"{TWO}.2", f"{ONE}.1")
    assert last.segments == (f"{TWO}-v2", f"{THREE}-v1")
    assert world.pointer == f"{TWO}.2"
    assert newest_day(world.state, world.dataset(), f"{TWO}.2") == THREE
    world.retrain(FOUR)
    assert world.state.attempts[-1].base == f"{TWO}.2"


def test_retrain_of_the_first_day_corrected_begins_from_nothing() -> None:
    world = after_days(World(), ONE, TWO)
    world.versions[ONE] = 2
    world.retrain(ONE, corrected=True)
    last = world.state.attempts[-1]
    assert (last.base, last.segments) == (None, (f"{ONE}-v2", f"{TWO}-v1"))


def test_retrain_corrected_with_the_files_that_are_there_changes_nothing() -> None:
    world = after_days(World(), ONE, TWO)
    found = world.retrain(TWO, corrected=True)
    assert (found.status, found.message) == (0, f"{TWO} is done: {TWO}.1 has trained it")
    assert world.pointer == f"{TWO}.1"
    assert not any(a.run == f"{TWO}.2" and a.started.get("train") for a in world.state.attempts)


def test_retrain_corrected_with_the_files_that_were_turned_down_says_so() -> None:
    world = after_days(World(quality=good_but_for(f"{TWO}-v1")), ONE, TWO)
    found = world.retrain(TWO, corrected=True)
    assert found.status == 3
    assert f"nothing has changed since {TWO}.1 was refused" in found.message
    again = world.retrain(TWO, again=True)
    assert again.message.startswith(f"{TWO} was refused, {ONE}.1 stays promoted: {TWO}.3: NE")


def test_retrain_of_a_corrected_day_that_is_turned_down_leaves_the_pointer() -> None:
    world = after_days(World(quality=good_but_for(f"{TWO}-v2")), ONE, TWO)
    world.versions[TWO] = 2
    assert world.retrain(TWO, corrected=True).status == 3
    assert world.pointer == f"{TWO}.1"
    world.versions[TWO] = 3
    assert world.retrain(TWO, corrected=True).status == 0
    assert (world.pointer, known_versions(world)) == (f"{TWO}.3", {f"{ONE}-v1", f"{TWO}-v3"})


def test_retrain_of_other_files_that_are_not_said_to_be_a_correction_fails_by_name() -> None:
    world = after_days(World(), ONE)
    world.segments[TWO] = f"{TWO}-v1"
    world.versions[TWO] = 2
    found = world.retrain(TWO)
    assert (found.status, found.message) == (
        1,
        f"{TWO}.1: append failed, status 1: another listing",
    )


def test_retrain_of_a_late_day_goes_on_from_the_newest_run() -> None:
    world = after_days(World(), ONE, THREE, TWO)
    last = world.state.attempts[-1]
    assert (last.base, last.segments) == (f"{THREE}.1", (f"{TWO}-v1",))
    # The newest held-back range is that of the newest day, not of the late one.
    assert last.started["evaluate"].segments == (f"{THREE}-v1",)
    assert last.started["compare"].base == f"{THREE}.1"


def test_retrain_after_days_that_were_removed_begins_from_nothing_and_says_so() -> None:
    world = after_days(World(config=RetrainConfig(keep=1)), ONE, TWO, THREE)
    assert world.folders == {f"{THREE}.1"}
    world.versions[TWO] = 2
    world.retrain(TWO, corrected=True)
    last = world.state.attempts[-1]
    assert (last.base, last.segments) == (None, tuple(f"{d}-v{1 + (d == TWO)}" for d in DAYS[:3]))


def test_retrain_keeps_what_was_turned_down_since_the_oldest_run_that_is_kept() -> None:
    config = RetrainConfig(keep=2, refused_days="skip")
    world = World(config=config, quality=good_but_for(f"{THREE}-v1"))
    after_days(world, *DAYS)
    assert world.folders == {f"{TWO}.1", f"{THREE}.1", f"{FOUR}.1"}


def test_retrain_of_a_day_closes_another_that_was_left_and_trains_what_it_had() -> None:
    world = after_days(World(), ONE)
    with pytest.raises(KilledError):  # begun, append started and done, train started
        world.retrain(TWO, lives=6)
    assert world.state.attempts[-1].pending is not None
    world.retrain(THREE)
    assert world.ended == {f"{TWO}.1.train.1"}
    last = world.state.attempts[-1]
    assert (last.base, last.segments) == (f"{ONE}.1", (f"{TWO}-v1", f"{THREE}-v1"))
    found = world.retrain(TWO)
    assert (found.status, found.message) == (0, f"{TWO} is done: {THREE}.1 has trained it")


FAILURES = {
    "what cannot work is started once": (1, 1, "status 1"),
    "what was killed is started three times": (-9, 3, "status -9"),
    "what hangs is started three times": (4, 3, "status 4"),
    "what nobody saw is started three times": (None, 3, "unknown status"),
}


@pytest.mark.parametrize(("status", "starts", "words"), FAILURES.values(), ids=FAILURES.keys())
def test_retrain_of_a_stage_that_fails_gives_up_and_goes_on_when_it_is_asked_again(
    status: int | None, starts: int, words: str
) -> None:
    failing = {f"{ONE}.1.train.{i}": (status, "no") for i in range(1, 4)}
    world = World(failing=failing)
    found = world.retrain(ONE)
    times = " 3 times" if starts == 3 else ""
    assert (found.status, found.message) == (1, f"{ONE}.1: train failed{times}, {words}: no")
    assert len(world.state.attempts[0].failures) == starts
    world.failing = {}
    assert world.retrain(ONE).status == 0
    assert [a.run for a in world.state.attempts] == [f"{ONE}.1"]


def test_retrain_of_data_that_the_gate_of_the_pipelines_refuses_is_turned_down() -> None:
    world = after_days(World(failing={f"{TWO}.1.append.1": (3, "rejects 0.5")}), ONE)
    found = world.retrain(TWO)
    assert (found.status, found.message) == (3, f"{TWO} is done: data: rejects 0.5")
    assert world.retrain(TWO) == found
    world.failing = {}
    assert world.retrain(TWO, corrected=True).status == 0


REQUESTS = st.lists(st.tuples(st.sampled_from(DAYS), st.integers(0, 2)), min_size=1, max_size=6)
"""Days, and how the input of each changes before: not, or corrected."""


def run_requests(world: World, requests: Sequence[tuple[str, int]], lives: Sequence[int]) -> World:
    """Ask for days; each time the command is killed after so many things, until it ends."""
    kills = iter(lives)
    for day, change in requests:
        corrected = change == 2 and day in world.segments
        if corrected:
            world.versions[day] = world.versions.get(day, 1) + 1
        first = True
        while True:
            with suppress(KilledError):
                # Who asks again after a kill asks for the same.
                world.retrain(day, corrected=corrected and first, lives=next(kills, 200))
                break
            begun = world.state.of_day(day)
            first = first and not (begun and begun[-1].corrected and begun[-1].is_open)
    return world


def outcome(world: World) -> object:
    """What a world comes to, whatever happened on the way."""
    done = [a for a in world.state.attempts if a.closed is None or a.closed.final]
    plain = [replace(a, failures=(), started={}) for a in done]
    trained = [(a.run, a.base, a.segments, a.compared_with) for a in done]
    return plain, trained, world.pointer, world.segments, world.folders


@given(
    requests=REQUESTS,
    lives=st.lists(st.integers(0, 9), max_size=12),
    bad=st.sets(st.sampled_from([f"{d}-v{v}" for d in DAYS for v in (1, 2)]), max_size=3),
    skip=st.booleans(),
    keep=st.sampled_from([1, 2, None]),
)
def test_law_kills_at_any_point_lead_where_none_would_have(
    requests: list[tuple[str, int]], lives: list[int], bad: set[str], skip: bool, keep: int | None
) -> None:
    config = RetrainConfig(refused_days="skip" if skip else "train", keep=keep)
    calm = run_requests(World(config=config, quality=good_but_for(*bad)), requests, [])
    hard = run_requests(World(config=config, quality=good_but_for(*bad)), requests, lives)
    assert outcome(hard) == outcome(calm)


@given(
    requests=REQUESTS,
    lives=st.lists(st.integers(0, 25), min_size=6, max_size=6),
    bad=st.sets(st.sampled_from([f"{d}-v1" for d in DAYS]), max_size=2),
)
def test_law_a_promoted_run_knows_each_segment_of_the_dataset_once_and_no_other(
    requests: list[tuple[str, int]], lives: list[int], bad: set[str]
) -> None:
    world = World(quality=good_but_for(*bad))
    for (day, change), limit in zip(requests, lives, strict=False):
        before = world.state.last_good
        corrected = change == 2 and day in world.segments
        world.versions[day] = world.versions.get(day, 1) + corrected
        with suppress(KilledError):  # and nobody asks for that day again
            world.retrain(day, corrected=corrected, lives=limit)
        run, own = world.state.last_good, list[str]()
        if run == before:
            continue
        while run is not None:
            attempt = world.state.attempt(run)
            own, run = [*attempt.segments, *own], attempt.base
        assert sorted(own) == list(world.segments_at_promotion)
        assert not trained_segments(world.state, world.state.last_good) & bad


def test_retrain_after_forgetting_goes_on_from_the_last_run_and_trains_nothing_twice() -> None:
    world = after_days(World(), ONE, TWO)
    world.forget(ONE)
    world.forget(ONE)
    after_days(world, THREE)
    latest = world.state.attempts[-1]
    assert (latest.base, latest.segments) == (f"{TWO}.1", (f"{THREE}-v1",))
    assert newest_day(world.state, world.dataset(), f"{TWO}.1") == TWO
    world.versions[ONE] = 2
    world.retrain(ONE, corrected=True)
    assert world.state.attempts[-1].base is None


@given(lives=st.integers(1, 30))
def test_retrain_that_was_killed_before_a_forgetting_begins_its_day_anew(lives: int) -> None:
    world = after_days(World(), ONE)
    with suppress(KilledError):
        world.retrain(TWO, lives=lives)
    if TWO in world.segments:
        world.forget(TWO)
    assert world.retrain(TWO).status == 0
    latest = world.state.attempts[-1]
    assert world.pointer == latest.run
    assert latest.base == f"{ONE}.1"
    assert {s.removesuffix("-left") for s in latest.segments} == {f"{TWO}-v1"}


def lineage(world: World, run: str | None) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Days and segments that a run and the runs before it have trained, in order."""
    if run is None:
        return ()
    attempt = world.state.attempt(run)
    return (*lineage(world, attempt.base), (attempt.day, attempt.segments))


def serial_outcome(world: World) -> object:
    """What a world comes to, whatever its attempts are called."""
    verdicts = {
        a.day: (a.promoted is not None, a.was_refused, lineage(world, a.run))
        for a in world.state.attempts
        if a.closed is None or a.closed.final
    }
    promoted = [lineage(world, run) for run in world.state.promoted]
    return verdicts, promoted, lineage(world, world.pointer), world.segments


LAST = {"the next day": (FOUR, 0), "a corrected day": (TWO, 2), "a day that is done": (THREE, 0)}
QUALITIES = ((), (f"{FOUR}-v1",), (f"{THREE}-v1",), (f"{TWO}-v2",))


@pytest.mark.slow
@pytest.mark.parametrize("request_of_day", LAST.values(), ids=LAST.keys())
@pytest.mark.parametrize("refused_days", ["train", "skip"])
def test_law_a_rollback_while_a_day_trains_comes_before_or_after_it(
    request_of_day: tuple[str, int], refused_days: str
) -> None:
    config = RetrainConfig(refused_days=refused_days, keep=None)  # pyright: ignore[reportArgumentType]: of a table
    num_meanwhile = 0
    for bad in QUALITIES:
        before = after_days(World(config=config, quality=good_but_for(*bad)), ONE, TWO, THREE)
        for run in before.state.promoted:
            first, last = deepcopy(before), deepcopy(before)
            first.roll_back(run)
            run_requests(first, [request_of_day], [])
            run_requests(last, [request_of_day], [])
            last.roll_back(run)
            for moment, kill in product(range(12), (None, 3, 6)):
                world = deepcopy(before)
                world.rollback_of, world.rollback_after = run, len(before.records) + moment
                run_requests(world, [request_of_day], [] if kill is None else [kill])
                if world.rollback_after is None:
                    num_meanwhile += 1
                else:  # the day was over
                    world.roll_back(run)
                assert serial_outcome(world) in (serial_outcome(first), serial_outcome(last))
    assert num_meanwhile > 100 or request_of_day == LAST["a day that is done"]


def test_rollback_of_a_run_goes_back_to_the_one_before_and_trains_its_days_again() -> None:
    world = after_days(World(), ONE, TWO, THREE)
    assert world.roll_back(f"{TWO}.1")
    assert (world.pointer, world.state.promoted) == (f"{ONE}.1", (f"{ONE}.1",))
    for day in (TWO, THREE):
        found = world.retrain(day)
        message = f"{day} was rolled back: {day}.1; --again trains it again"
        assert (found.status, found.message) == (3, message)
    world.retrain(FOUR)
    last = world.state.attempts[-1]
    assert (last.base, last.segments) == (f"{ONE}.1", tuple(f"{d}-v1" for d in DAYS[1:]))
    assert world.pointer == f"{FOUR}.1"


def test_rollback_is_not_undone_by_a_correction_that_changes_nothing() -> None:
    world = after_days(World(), ONE, TWO)
    world.roll_back(f"{TWO}.1")
    found = world.retrain(TWO, corrected=True)
    assert (found.status, world.pointer) == (3, f"{ONE}.1")
    assert f"nothing has changed since {TWO}.1 was refused" in found.message
    assert world.retrain(TWO, again=True).status == 0
    assert world.pointer == f"{TWO}.3"


def test_rollback_of_what_is_not_promoted_or_has_nothing_before_it_is_refused() -> None:
    world = after_days(World(config=RetrainConfig(keep=2)), ONE, TWO, THREE)
    message = f"run is not promoted: {FOUR}.1; promoted are: {ONE}.1, {TWO}.1, {THREE}.1"
    with pytest.raises(PlanError) as error:
        check_rollback(world.state, f"{FOUR}.1")
    assert str(error.value) == message
    for run in (f"{ONE}.1", f"{TWO}.1"):  # ONE.1 was removed
        with pytest.raises(PlanError, match=f"^no promoted run before {run} is left to roll back"):
            check_rollback(world.state, run)
    check_rollback(world.state, f"{THREE}.1")


MONTH = [f"2026-03-{i:02d}" for i in range(1, 32)]


@pytest.mark.parametrize("taken_over_after", range(0, 300, 37))
def test_backfill_of_a_month_that_another_host_continues_trains_each_day_once(
    taken_over_after: int,
) -> None:
    """A late day and the files of one that change, in between, as if they had come before it."""
    world, late = World(), MONTH[4]
    with suppress(KilledError):
        for day in MONTH[:4] + MONTH[5:]:
            world.retrain(day, lives=taken_over_after - len(world.records))
    world.retrain(late)  # on the other host, which closes what is unfinished
    for day in MONTH:
        assert world.retrain(day).status == 0
    trained = [s for _, segments in lineage(world, world.pointer) for s in segments]
    assert sorted(trained) == [f"{day}-v1" for day in MONTH]
    world.versions[MONTH[9]] = 2
    world.retrain(MONTH[9], corrected=True)
    trained = [s for _, segments in lineage(world, world.pointer) for s in segments]
    assert sorted(trained) == [f"{day}-v{1 + (day == MONTH[9])}" for day in MONTH]
