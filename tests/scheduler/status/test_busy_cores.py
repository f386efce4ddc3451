"""Busy cores are shown beside reserved ones; old logs have none."""

from presage.scheduler.controller.events import Read
from presage.scheduler.controller.journal import Journal
from presage.scheduler.controller.log import event_from_json, event_to_json
from presage.scheduler.status.prometheus import metrics_text
from presage.scheduler.status.status_page import page
from presage.scheduler.status.view import view_of
from tests.scheduler.controller.bench import Bench
from tests.scheduler.controller.world import BUDGET, GIB, submitted


def trained(*busy: float | None) -> Bench:
    """Return a machine whose coordinator was read so often."""
    bench = Bench(BUDGET, submitted("first"))
    bench.built(0)
    for step, cores in enumerate(busy, start=1):
        fields = {} if cores is None else {"busy_cores": cores}
        bench.at(Read, "coordinator-0.1", 1.0, position=step, resident_bytes=GIB, **fields)
    return bench


def test_busy_cores_are_shown_beside_booked_ones_and_scraped() -> None:
    bench = trained(0.5, 0.757, None)
    view = view_of(bench.state, Journal())
    (coordinator,) = [
        one for pool in view.jobs[0].pools for one in pool.processes if pool.name == "coordinator"
    ]
    assert coordinator.busy_cores == 0.757, "the last that was read"
    assert f"<td>0.76 of {coordinator.cpus:g}</td>" in page(view)
    labels = 'job="first",pool="coordinator",process="coordinator-0.1"'
    text = metrics_text(view).decode()
    assert f"presage_process_busy_cores{{{labels}}} 0.757" in text
    assert f"presage_process_booked_cores{{{labels}}} {coordinator.cpus}" in text


def test_what_was_not_measured_is_left_out() -> None:
    view = view_of(trained(None).state, Journal())
    assert "presage_process_busy_cores{" not in metrics_text(view).decode()


def test_a_reading_of_an_older_log_has_no_busy_cores() -> None:
    read = Read(time_sec=1.0, job="a", process="b", position=1, resident_bytes=2, busy_cores=1.5)
    body = event_to_json(read)
    assert event_from_json(body) == read
    del body["busy_cores"]
    assert event_from_json(body) == Read(
        time_sec=1.0, job="a", process="b", position=1, resident_bytes=2
    )
