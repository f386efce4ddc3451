"""The page's figures about groups, against plain Python over the samples."""

from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest

from pipelines.build import build
from pipelines.cli import main
from pipelines.report.dedup import (
    change_rates,
    group_facts,
    groups_section,
    starts_of_sessions,
    unique_counts,
)
from pipelines.report.storage import flat_rows
from pipelines.table.rows import read_samples
from schemas.dataset import open_dataset
from tests.pipelines.logs import built, request, write_job, write_log


@pytest.mark.slow
@pytest.mark.parametrize("gap", ["", ", gap: 30s"])
def test_change_rates_count_what_changes_within_sessions(tmp_path: Path, gap: str) -> None:
    dataset = open_dataset(built(tmp_path, gap=gap))
    rows = flat_rows(dataset).table
    starts = starts_of_sessions(rows, dataset.job.data.session)
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
    starts = starts_of_sessions(rows.table, dataset.job.data.session)
    facts = group_facts(dataset, rows, "user", starts, 0.0)
    samples = pa.concat_tables(read_samples(dataset)).to_pylist()
    tuples = {(r["session"], r["user"], tuple(r["history"])) for r in samples}
    whole, per_window = unique_counts(dataset, "user")
    stored = dataset.segments[0].manifest.groups["user"].num_unique
    assert whole == len(tuples)
    assert facts.lost_at_windows == per_window - whole > 0
    assert facts.lost_at_edges == stored - per_window > 0


@pytest.mark.slow
def test_page_shows_groups_and_what_stays_in_samples(tmp_path: Path) -> None:
    dataset = built(tmp_path)
    assert main(["report", str(dataset), "--html", str(tmp_path / "x.html")]) == 0
    page = (tmp_path / "x.html").read_text()
    assert "Why these groups" in page
    opened = open_dataset(dataset)
    section = groups_section(opened, flat_rows(opened))
    assert section is not None
    for word in ("history", "item", "user", "0.0 %"):
        assert word in section.body
