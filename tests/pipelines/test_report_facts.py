"""Facts of the report against plain Python, and the sections that show them."""

from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest

from pipelines.build import build
from pipelines.report.facts import (
    MOST_SEGMENTS,
    change_rates,
    find_runs,
    group_facts,
    quality_facts,
    read_facts,
    session_starts,
    unique_counts,
)
from pipelines.report.page import render
from pipelines.report.sizes import flat_rows
from pipelines.table.commit import anomalies_name
from pipelines.table.rows import session_lengths
from schemas.dataset import open_dataset
from schemas.errors import SchemaError
from schemas.samples import read_samples
from tests.pipelines.appending import addition, changed
from tests.pipelines.logs import (
    SCHEMA,
    built,
    raw_rows,
    request,
    samples_of,
    write_job,
    write_log,
)
from tests.pipelines.test_report import Page, write_run

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


def test_changed_anomalies_are_refused(tmp_path: Path) -> None:
    dataset = open_dataset(built(tmp_path))
    segment = dataset.segments[0]
    (segment.directory / anomalies_name(segment.reference)).write_bytes(b"# changed\n")
    with pytest.raises(SchemaError, match=r"^file must have sha256 "):
        quality_facts(dataset)


@pytest.mark.slow
@pytest.mark.parametrize("gap", ["", ", gap: 30s"])
def test_change_rates_count_what_changes_within_sessions(tmp_path: Path, gap: str) -> None:
    dataset = open_dataset(built(tmp_path, gap=gap))
    rows = flat_rows(dataset).table
    starts = session_starts(rows, dataset.job.data.session)
    seconds = 30 if gap else float("inf")
    follow = [
        (a, b)
        for a, b in pairwise(rows.to_pylist())
        if a["session"] == b["session"] and (b["time"] - a["time"]).total_seconds() <= seconds
    ]
    assert int((~starts).sum()) == len(follow)
    expected = [
        sum(a["item"] != b["item"] for a, b in follow) / len(follow),
        sum(a["time"] != b["time"] for a, b in follow) / len(follow),
        sum(a["item"] != b["item"] or a["time"] != b["time"] for a, b in follow) / len(follow),
    ]
    assert change_rates(rows, ["item", "time"], starts) == pytest.approx(expected)
    assert change_rates(rows, ["session", "user"], starts) == [0, 0, 0]


def test_losses_at_edges_and_windows_add_up_to_all_cuts(tmp_path: Path) -> None:
    write_log(tmp_path / "log")
    job = write_job(tmp_path / "job", gap=", gap: 20s")
    text = job.read_text().replace("  block_samples", "  window: {span: 1m}\n  block_samples")
    job.write_text(text)
    build(request(job, tmp_path / "log", tmp_path / "dataset"))
    dataset = open_dataset(tmp_path / "dataset")
    rows = flat_rows(dataset)
    facts = group_facts(dataset, rows)[0]["user"]
    samples = pa.concat_tables(read_samples(dataset)).to_pylist()
    tuples = {(r["session"], r["user"], tuple(r["history"])) for r in samples}
    per_part, per_window = unique_counts(dataset, "user")
    stored = dataset.segments[0].manifest.groups["user"].num_unique
    assert per_part == len(tuples)
    assert facts.window_tuples == per_window - per_part > 0
    assert facts.edge_tuples == stored - per_window > 0


@pytest.mark.slow
def test_page_shows_groups_and_what_stays_in_samples(tmp_path: Path) -> None:
    page = Page(render(read_facts(open_dataset(built(tmp_path)), None)))
    assert "Why these groups" in page.text
    features = page.table("Features")
    assert features["history"] == ["user", "0.0 %"]
    assert features["item"][0] == "samples"


def test_session_lengths_are_those_of_the_raw_rows(tmp_path: Path) -> None:
    opened = open_dataset(built(tmp_path))
    raw = pa.concat_tables(read_samples(opened))
    expected = raw.group_by("session").aggregate([([], "count_all")])["count_all"].to_pylist()
    assert sorted(session_lengths(opened).tolist()) == sorted(expected)
    assert len(expected) == opened.segments[0].manifest.num_sessions


@pytest.mark.slow
def test_session_lengths_with_a_gap_match_the_manifest(tmp_path: Path) -> None:
    opened = open_dataset(built(tmp_path, gap=", gap: 30s"))
    lengths = session_lengths(opened)
    assert len(lengths) == opened.segments[0].manifest.num_sessions
    assert lengths.sum() == opened.segments[0].manifest.num_samples


@pytest.mark.slow
def test_unique_counts_count_distinct_tuples_of_the_samples(tmp_path: Path) -> None:
    opened = open_dataset(built(tmp_path))
    rows = pa.concat_tables(read_samples(opened)).to_pylist()
    distinct = {(r["session"], r["user"], tuple(r["history"])) for r in rows}
    assert unique_counts(opened, "user")[0] == len(distinct)


def test_phases_of_a_run_leave_out_the_first_step_and_name_the_rest(tmp_path: Path) -> None:
    write_run(tmp_path / "run", expanded=False, samples_per_sec=2500.0)
    (run,) = find_runs(tmp_path)
    assert run.phases["backward"] == pytest.approx(40)
    assert run.phases["rest"] == pytest.approx(250 - 150)
    assert sum(run.phases.values()) == pytest.approx(250)
