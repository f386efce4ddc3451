"""Lines about a running build: rows read and rejected, with an example, and parts written."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from presage.pipelines import exchange, executor
from presage.pipelines.cli import main
from presage.pipelines.exchange import Counts, Progress
from tests.pipelines import logs
from tests.shared import error_of


def test_lines_name_rows_rejects_and_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_INTERVAL_SEC", 0.0)
    lines: list[str] = []
    reported = Progress(lines.append, 3, 100)
    reported.add(Counts(read=1000))
    reported.add(Counts(rejected=20, example="x must be int64, got 'a' in log.csv:7"))
    reported.add(Counts(read=1000, rejected=5, example="another", parts=1))
    assert lines[0] == "rows read: 1,000, rejected: 0; parts written: 0 of 3"
    assert lines[-1] == (
        "rows read: 2,000, rejected: 25 (1.25%), such as x must be int64, got 'a' in "
        "log.csv:7; parts written: 1 of 3"
    )


GOOD_ELSEWHERE = Counts(read=1, good=1, samples=1)


@pytest.mark.parametrize(
    ("own", "others", "most", "ends"),
    [
        (Counts(unread=50_000, num_bytes=10), Counts(), 0.1, True),
        (Counts(unused=50_000, good=70_000, num_bytes=10), Counts(), 0.1, True),
        (Counts(unused=30_000, num_bytes=10), Counts(rejected=20_000, unused=20_000), 0.1, True),
        (Counts(unread=49_999, num_bytes=10), Counts(), 0.1, False),
        (Counts(unread=50_000, num_bytes=9), Counts(), 0.1, False),
        (Counts(unread=50_000, num_bytes=10), Counts(), 1, False),
        (Counts(unread=50_000, num_bytes=10), Counts(), None, False),
        (Counts(unread=50_000, num_bytes=10), GOOD_ELSEWHERE, 0.1, False),
        (Counts(unused=50_000, num_bytes=10), GOOD_ELSEWHERE, 0.1, False),
        (Counts(unread=50_000, good=9, num_bytes=10), Counts(), 0.1, False),
    ],
)
def test_a_build_without_a_good_row_ends_where_the_gate_would_refuse_it(
    own: Counts, others: Counts, most: float | None, ends: bool
) -> None:
    build = Progress(num_bytes=100, max_reject_fraction=most)
    assert not build.add(others)
    assert build.add(own) == build.stopped == ends
    assert not build.add(Counts())  # the stages that follow write the rejects


@pytest.mark.slow
def test_a_build_of_bad_rows_alone_stops_and_keeps_what_it_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "STOP_AFTER_REJECTS", 100)
    monkeypatch.setattr(executor, "num_cores", lambda: 1)  # a second one reads the next file
    monkeypatch.setattr(executor, "MEMORY_BUNDLE_BYTES", 1)
    rows = logs.write_log(tmp_path / "log")
    first = tmp_path / "log" / "log-0.parquet"
    bad = rows.slice(0, 100).set_column(2, "user", pa.array([f"u{i}" for i in range(100)]))
    pq.write_table(bad, first, row_group_size=50)
    job = logs.write_job(tmp_path / "job")
    words = ["build", str(job), "--input", str(tmp_path / "log"), "--runner=InProcess"]
    words += ["--output", str(tmp_path / "d")]
    error = error_of(main, words, 3).split("error: ")[1]
    assert error.startswith("every one of the first 100 rows was rejected; the build stopped ")
    assert f"after it had opened {first.stat().st_size:,} of " in error
    assert "  100: column 'user' must be int64, got '...'; such as log-0.parquet:0 {" in error
    (kept,) = (tmp_path / "d").glob(".refused-*/rejects/*.parquet")
    assert pq.read_metadata(kept).num_rows == 100
    text = job.read_text().replace("  on_error:", "  gate: {max_reject_fraction: 1}\n  on_error:")
    job.write_text(text)
    assert "rejected: 100 rows" in error_of(main, words, 0)


def test_groups_auto_without_samples_names_a_reject(tmp_path: Path) -> None:
    rows = logs.write_log(tmp_path / "log", num_rows=40, num_files=1)
    bad = rows.set_column(2, "user", pa.array([f"u{i}" for i in range(40)]))
    pq.write_table(bad, tmp_path / "log" / "log-0.parquet")
    job = logs.write_job(tmp_path / "job")
    text = job.read_text().replace("{user: [session, user, history]}", "auto")
    job.write_text(text.replace("  transforms: {user: ", "  transforms: {samples: "))
    words = ["build", str(job), "--input", str(tmp_path / "log"), "--runner=InProcess"]
    error = error_of(main, [*words, "--output", str(tmp_path / "d")])
    assert "groups: auto found no samples in the training range in " in error
    assert (
        "; rows read: 40, rejected: 40 (100.00%), such as column 'user' must be int64, got 'u0' in "
        "log-0.parquet:0; correct the job or the rows\n"
    ) in error
