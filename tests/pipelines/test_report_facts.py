"""Facts of the report against plain Python, and the sections that show them."""

from dataclasses import replace
from pathlib import Path

import pytest

from presage.pipelines.build import build
from presage.pipelines.report.facts import MOST_SEGMENTS, quality_facts, read_facts
from presage.pipelines.report.report_page import render
from presage.pipelines.table.commit import anomalies_name
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.errors import SchemaError
from tests.pipelines.appending import addition, changed
from tests.pipelines.logs import SCHEMA, built, raw_rows, request, samples_of, write_log
from tests.pipelines.test_report import Page

SKEWED = SCHEMA.replace(
    'int_domain { min: 0 max: 1 } annotation { tag: "label" }',
    'int_domain { min: 0 max: 1 } annotation { tag: "label" } '
    "drift_comparator { infinity_norm { threshold: 0 } } "
    "skew_comparator { jensen_shannon_divergence { threshold: 0.9 } }",
).replace(
    'name: "user" type: INT', 'name: "user" type: INT unique_constraints { min: 99 max: 9000 }'
)


@pytest.mark.slow
def test_page_shows_findings_and_distances_of_each_segment(tmp_path: Path) -> None:
    job = changed(
        tmp_path / "job", ("  on_error", "  gate: {action: warn}\n  on_error"), schema=SKEWED
    )
    for seed, num_rows in enumerate((300, 200)):
        write_log(tmp_path / str(seed), num_rows, seed)
    build(request(job, tmp_path / "0", tmp_path / "dataset"))
    build(addition(job, tmp_path / "1", tmp_path / "dataset"))
    dataset = open_dataset(tmp_path / "dataset")
    page = Page(render(read_facts(dataset, None)))
    samples = [samples_of(raw_rows(n, s)) for s, n in enumerate((300, 200))]
    rates = [sum(s[-1] for s in one) / len(one) for one in samples]  # type: ignore[misc]

    assert (
        "3 findings in 2 segments; data.gate only warns. Of 3 distances, 1 exceed their threshold."
    ) in page.text
    num_users = len({s[2] for s in samples[1]})
    found = page.table("Findings")
    assert found["user"] == [
        "segment 1", "warning", f"must have at least 99 distinct values, got {num_users}"
    ]  # fmt: skip
    assert found["label"][1] == "warning"
    distance = abs(rates[0] - rates[1])
    drift = ("segment 1", "label", "drift", "L_INFTY", pytest.approx(distance), 0.0)
    assert drift in quality_facts(dataset).distances
    cells = (
        "label",
        "segment 1",
        "segment before",
        "L-infinity",
        f"{distance:#.3g}",
        "0",
        "beyond",
    )
    assert "".join(cells) in page.text


@pytest.mark.slow
def test_page_of_a_dataset_without_limits_says_so_in_one_line(tmp_path: Path) -> None:
    page = Page(render(read_facts(open_dataset(built(tmp_path)), None)))
    assert (
        "0 findings in 1 segment; the job has no data.gate, so findings are only recorded. "
        "No distance was measured: the schema has no comparator that applies."
    ) in page.text
    assert not {"Findings", "Distances"} & set(page.tables)


@pytest.mark.slow
def test_page_of_many_segments_says_which_are_left_out(tmp_path: Path) -> None:
    dataset = open_dataset(built(tmp_path))
    many = replace(dataset, segments=dataset.segments * (MOST_SEGMENTS + 2))
    assert len(quality_facts(many).segments) == MOST_SEGMENTS
    page = render(read_facts(dataset, None) | {"dataset": many})
    assert "11 earlier segments not shown" in page


@pytest.mark.slow
def test_changed_anomalies_are_refused(tmp_path: Path) -> None:
    dataset = open_dataset(built(tmp_path))
    segment = dataset.segments[0]
    (segment.directory / anomalies_name(segment.reference)).write_bytes(b"# changed\n")
    with pytest.raises(SchemaError, match=r"^file must have sha256 "):
        quality_facts(dataset)
