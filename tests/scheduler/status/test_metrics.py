"""Prometheus' parser reads the metrics, which agree with the view."""

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from presage.scheduler.status.prometheus import metrics_text
from tests.scheduler.status.recordings import record_job_named, record_jobs


@pytest.mark.parametrize("most", [0, 1, 60, None])
def test_metrics_text_is_parsed_and_says_what_the_view_says(most: int | None) -> None:
    view = record_jobs(3).view(most)
    families = list(text_string_to_metric_families(metrics_text(view).decode()))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    for family in families:
        assert family.documentation
        assert re.fullmatch(r"presage_[a-z_]+", family.name)
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }
    assert len(found) == sum(len(family.samples) for family in families)
    assert found["presage_events_total",] == view.num_events
    assert found["presage_booked_cores",] == view.used_cpus
    for job in view.jobs:
        name = ("job", job.name)
        assert found["presage_cost_total", name] == pytest.approx(job.spent)
        assert found["presage_segments_built", name] == job.segments_built
        assert found["presage_job_phase", name, ("phase", job.phase)] == 1
        live = sum(
            value
            for key, value in found.items()
            if key[0] == "presage_processes" and name in key[1:]
        )
        assert live == sum(len(pool.processes) for pool in job.pools)
        for speed in job.speeds[-1:]:
            key = ("presage_measured_samples_per_second", name, ("pool", speed.pool))
            assert found[key] == pytest.approx(speed.measured)
    assert sum(v for k, v in found.items() if k[0] == "presage_incidents_total") == sum(
        count for _, _, count in view.num_incidents
    )


def test_metrics_text_gives_back_a_hostile_name() -> None:
    name = 'a"b\\c\nd{e="f"} 1'
    view = record_job_named(name).view(30)
    families = text_string_to_metric_families(metrics_text(view).decode())
    labels = {
        sample.labels["job"] for f in families for sample in f.samples if "job" in sample.labels
    }
    assert labels == {name}
