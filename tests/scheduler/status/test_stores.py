"""Owners of rows and shares of accesses on page, terminal and metrics."""

import json
import re
from collections import defaultdict
from dataclasses import asdict
from io import StringIO

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from presage.scheduler.controller.events import LoadKnown
from presage.scheduler.controller.slots import NUM_RANGES, format_spans
from presage.scheduler.status.prometheus import metrics_text
from presage.scheduler.status.terminal import render
from presage.scheduler.status.view import Stores, View
from tests.scheduler.status.document import check_usable, parsed
from tests.scheduler.status.recordings import record_jobs
from tests.scheduler.status.stored import NUM_STEPS, PERIODS, Stored

OWNERS = {
    "as they begin": (0,) * 6 + (1,) * 5 + (2,) * 5,
    "numbers that have gaps": (2, 9, 9, 2, 0, 0, 0, 9, 2, 2, 2, 2, 2, 9, 0, 11),
    "all with one": (1,) * NUM_RANGES,
}


def stores_of(view: View) -> Stores:
    stores = view.jobs[0].stores
    assert stores is not None
    return stores


def in_terminal(view: View) -> str:
    target = StringIO()
    Console(file=target, width=300).print(render(view))
    return target.getvalue()


def counted_shares(stored: Stored, owners: tuple[int, ...], step: int) -> dict[int, float]:
    """Go over all steps and all ranges, one by one."""
    by_step = [row for row in stored.slots for _ in range(NUM_STEPS // PERIODS)]
    found: defaultdict[int, float] = defaultdict(float)
    for number, count in enumerate(by_step[min(step, NUM_STEPS - 1)]):
        found[owners[number]] += count / sum(by_step[min(step, NUM_STEPS - 1)])
    return found


@pytest.mark.parametrize("owners", OWNERS.values(), ids=OWNERS)
@pytest.mark.parametrize("step", [1, 39, 40, 70, 159, 200])
def test_shares_are_those_that_are_counted_range_by_range(
    owners: tuple[int, ...], step: int
) -> None:
    stored = Stored(step)
    stored.load_known()
    stored.stepped(1, 1.0)
    view = stored.view(owners=owners, next_step=step)
    stores = stores_of(view)
    assert stores.step == min(step, NUM_STEPS - 1)
    step_ahead = min(step + 60, NUM_STEPS - 1)
    assert stores.step_ahead == step_ahead, "60 s at 1 s a step"
    assert [store.number for store in stores.stores] == sorted({0, 1, 2, *owners})
    now = counted_shares(stored, owners, step)
    ahead = counted_shares(stored, owners, step_ahead)
    samples = {
        (sample.name, sample.labels["store"]): sample.value
        for family in text_string_to_metric_families(metrics_text(view).decode())
        for sample in family.samples
        if "store" in sample.labels
    }
    document, terminal = "".join(parsed(view).text), in_terminal(view)
    for store in stores.stores:
        number = store.number
        assert store.ranges == tuple(i for i, owner in enumerate(owners) if owner == number)
        assert store.share == pytest.approx(now[number])
        assert store.share_ahead == pytest.approx(ahead[number])
        key = str(number)
        assert samples["presage_store_ranges", key] == len(store.ranges)
        assert samples["presage_store_access_share", key] == pytest.approx(now[number])
        assert samples["presage_store_predicted_access_share", key] == pytest.approx(ahead[number])
        ranges = "1 range" if len(store.ranges) == 1 else f"{len(store.ranges)} ranges"
        assert f" {number}: {ranges}, {100 * now[number]:.0f} % of accesses" in terminal
        assert f"{100 * ahead[number]:.0f} %" in document
    assert sum(v for (name, _), v in samples.items() if name == "presage_store_ranges") == 16


def test_shares_ahead_are_those_by_which_a_range_is_moved() -> None:
    stored = Stored(1, 300)
    slots, source, target = stored.begins_to_move()
    stores = stores_of(stored.view())
    (reason,) = [d.reason for d in stored.journal.decisions if d.action == "migrate"]
    share = stores.stores[source].share_ahead
    assert share is not None
    times = share * len(stores.stores)
    assert f"store {source} will have {times:.2f} times the mean load at step" in reason
    assert f"at step {stores.step_ahead} according to the oracle" in reason
    assert slots in stores.stores[source].ranges
    assert stores.move is not None
    assert (stores.move.ranges, stores.move.source) == (stored.job.moving, source)
    assert stores.move.target == target


def test_page_has_a_cell_for_each_range_and_says_which_one_moves() -> None:
    stored = Stored(1, 300)
    slots, source, target = stored.begins_to_move()
    document = parsed(stored.view())
    check_usable(document)
    classes = [li["class"] or "" for li in document.all("li") if "class" in li]
    assert len(classes) == NUM_RANGES
    moving = stored.job.moving
    assert [i for i, name in enumerate(classes) if "moves" in name] == list(moving)
    shown = "".join(document.text)
    assert f"range {slots}: moving from {source} to {target}" in shown
    what = f"ange {slots} is" if len(moving) == 1 else f"anges {format_spans(moving)} are"
    assert f"R{what} moving from {source} to {target}." in shown
    assert f"r{what} moving from {source} to {target}" in in_terminal(stored.view())
    stored.moves()
    document = parsed(stored.view())
    shown = "".join(document.text)
    assert f"range {slots}: store {target}" in shown
    assert "No range is moving." in shown
    owners = [int(n) for n in re.findall(r"range [0-9]+: store ([0-9]+)", shown)]
    assert tuple(owners) == stored.job.owners
    tones = [li["class"] for li in document.all("li") if "class" in li]
    styles = set(zip(owners, tones, strict=True))
    assert len(styles) == len(set(owners)) == len(set(tones)), "each store has a look of its own"


def test_a_store_without_ranges_and_one_without_a_process_are_shown() -> None:
    stored = Stored(1)
    stored.read(0, 0.4)
    running = {name: one for name, one in stored.job.processes.items() if one.task_id != "store-1"}
    view = stored.view(processes=running, owners=(0,) * 8 + (1,) * 8)
    first, second, third = stores_of(view).stores
    assert (first.ranges, third.ranges) == (tuple(range(8)), ())
    assert first.process is not None
    assert (first.process.busy_cores, second.process) == (0.4, None)
    document = parsed(view)
    check_usable(document)
    shown = "".join(document.text).replace("\n", "")
    assert "0store-0.10-7not known yetnot known yet" in shown
    assert "1no process8-15" in shown
    terminal = in_terminal(view)
    assert "first: stores 0: 8 ranges; 1: 8 ranges, no process; 2: 0 ranges\n" in terminal


def test_a_store_that_is_alone_with_all_ranges_answers_all_without_an_oracle() -> None:
    stores = stores_of(Stored(1).view(owners=(1,) * NUM_RANGES))
    assert [store.share for store in stores.stores] == [0.0, 1.0, 0.0]
    assert [store.share_ahead for store in stores.stores] == [0.0, 1.0, 0.0]


def test_what_nobody_knows_yet_is_not_told() -> None:
    stored = Stored(1)
    zeros = LoadKnown(time_sec=1.0, job="first", num_steps=4, slots=((0,) * 16,), touched_rows=(0,))
    none = LoadKnown(time_sec=1.0, job="first", num_steps=0, slots=(), touched_rows=())
    for load in (None, zeros, none):
        view = stored.view(load=load)
        assert {store.share for store in stores_of(view).stores} == {None}
        assert (stores_of(view).step is None) == (load is not zeros)
        assert "access_share{" not in metrics_text(view).decode()
        assert "% of accesses" not in in_terminal(view)
    stored.load_known()
    (share,) = {store.share_ahead for store in stores_of(stored.view()).stores}
    assert share is None, "no step was measured, so 60 s are no steps"
    assert stores_of(stored.view()).stores[0].share is not None
    assert "No range has a store yet." in "".join(parsed(stored.view(owners=())).text)


@pytest.mark.parametrize("phase", ["drained", "finished", "failed"])
def test_a_job_that_has_ended_or_has_no_stores_shows_none(phase: str) -> None:
    stored = Stored(1)
    for view in (stored.view(phase=phase, processes={}), record_jobs(3).view(60)):
        assert {job.stores for job in view.jobs} == {None}
        assert "stores" not in {li.get("class") for li in parsed(view).all("section")}
        assert "presage_store_ranges{" not in metrics_text(view).decode()
        assert "stores" not in in_terminal(view)


def test_stores_that_still_leave_when_their_job_has_ended_own_nothing() -> None:
    stored = Stored(1)
    stored.load_known()
    stores = stores_of(stored.view(phase="drained"))
    assert {(store.ranges, store.share) for store in stores.stores} == {((), None)}
    check_usable(parsed(stored.view(phase="drained")))


def test_view_with_stores_is_an_object_of_json() -> None:
    stored = Stored(1, 300)
    stored.begins_to_move()
    with_facts = json.loads(json.dumps(asdict(stored.view())))
    assert with_facts["jobs"][0]["stores"]["owners"] == list(stored.job.owners)
    shares = [store["share"] for store in with_facts["jobs"][0]["stores"]["stores"]]
    assert np.sum(shares) == pytest.approx(1.0)
