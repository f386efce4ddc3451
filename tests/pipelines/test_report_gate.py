"""What the page says of the gate is what statistics and anomalies say."""

from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from pipelines.build import build
from pipelines.report.quality import MOST_SEGMENTS, gate_section
from schemas.dataset import open_dataset
from schemas.errors import SchemaError
from schemas.layout import ANOMALIES
from tests.pipelines.appending import addition, changed
from tests.pipelines.logs import SCHEMA, built, raw_rows, request, samples_of, write_log
from tests.pipelines.test_report import Page

SKEWED = SCHEMA.replace(
    'int_domain { min: 0 max: 1 } annotation { tag: "label" }',
    'int_domain { min: 0 max: 1 } annotation { tag: "label" } '
    "drift_comparator { infinity_norm { threshold: 0 } } "
    "skew_comparator { jensen_shannon_divergence { threshold: 0.9 } }",
).replace(
    'name: "user" type: INT',
    'name: "user" type: INT unique_constraints { min: 99 max: 9000 }',
)
EVALUATION_FROM = datetime(2026, 1, 1, 0, 8)


@pytest.mark.slow
def test_page_shows_findings_distances_and_sessions_of_each_segment(tmp_path: Path) -> None:
    job = changed(
        tmp_path / "job", ("  on_error", "  gate: {action: warn}\n  on_error"), schema=SKEWED
    )
    for seed, num_rows in enumerate((300, 200)):
        write_log(tmp_path / str(seed), num_rows, seed)
    build(request(job, tmp_path / "0", tmp_path / "dataset"))
    build(addition(job, tmp_path / "1", tmp_path / "dataset"))
    section = gate_section(open_dataset(tmp_path / "dataset"))
    page = Page(section.body)
    samples = [samples_of(raw_rows(n, s)) for s, n in enumerate((300, 200))]
    rates = [sum(s[-1] for s in one) / len(one) for one in samples]  # type: ignore[misc]

    assert section.finding.startswith("3 findings in 2 segments; data.gate only warns. Of 3 ")
    assert section.finding.endswith("distances, 1 exceed their threshold.")
    num_users = len({s[2] for s in samples[1]})
    found = page.table("Findings")
    assert found["user"] == [
        "segment 1", "warning", f"must have at least 99 distinct values, got {num_users}"
    ]  # fmt: skip
    assert found["label"][1] == "warning"
    distance = abs(rates[0] - rates[1])
    drift = [
        "label",
        "segment 1",
        "segment before",
        "L-infinity",
        f"{distance:#.3g}",
        "0",
        "beyond",
    ]
    assert "".join(drift) in "".join(page.words)
    sessions = page.table("Sessions")
    assert set(sessions) >= {"segment 0", "segment 0, train", "segment 1, evaluation"}
    for index, one in enumerate(samples):
        row = sessions[f"segment {index}"]
        sessions_by_split = {(s[0], s[1] >= EVALUATION_FROM) for s in one}  # type: ignore[operator]
        per_session = len(one) / len(sessions_by_split)
        assert row[:3] == [str(len(one)), f"{per_session:#.3g}", f"{rates[index]:#.3g}"]
    assert sessions["segment 0"][-1] == "\N{EN DASH}"
    assert 0 < float(sessions["segment 1"][-1]) < 1


@pytest.mark.slow
def test_page_of_a_dataset_without_limits_says_so_in_one_line(tmp_path: Path) -> None:
    section = gate_section(open_dataset(built(tmp_path)))
    assert section.finding == (
        "No findings in 1 segment; the job has no data.gate, so findings are only written down. "
        "No distance was measured: the schema has no comparator that applies."
    )
    assert "Findings" not in section.body
    assert "Distances" not in section.body


@pytest.mark.slow
def test_page_of_many_segments_says_which_are_left_out(tmp_path: Path) -> None:
    dataset = open_dataset(built(tmp_path))
    many = replace(dataset, segments=dataset.segments * (MOST_SEGMENTS + 2))
    assert "The 2 segments before are left out." in gate_section(many).body


def test_changed_anomalies_are_refused(tmp_path: Path) -> None:
    dataset = open_dataset(built(tmp_path))
    (dataset.segments[0].directory / ANOMALIES).write_text("# changed\n")
    with pytest.raises(SchemaError, match=r"^file must have sha256 "):
        gate_section(dataset)
