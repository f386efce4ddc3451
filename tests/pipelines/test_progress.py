"""Lines about a running build: rows read and rejected, with an example, and parts written."""

import json
import threading
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines import executor, progress
from pipelines.cli import main
from pipelines.progress import (
    Counts,
    count_rows,
    counted_rows,
    is_stopped,
    report_progress,
    stop_if_all_rejected,
)
from tests.pipelines import logs


def test_lines_name_rows_rejects_and_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_INTERVAL_SEC", 0.01)
    lines: list[str] = []
    with report_progress(tmp_path, 3, 100, lines.append):
        count_rows(tmp_path, Counts(read=1000))
        count_rows(tmp_path, Counts(rejected=20, example="x must be int64, got 'a' in log.csv:7"))
        (tmp_path / ".progress" / "0.json").write_text('{"read": 1000, "rejected": 5}')
        (tmp_path / ".progress" / ".0.json.partial").write_text('{"read": 10')
        (tmp_path / "samples").mkdir()
        (tmp_path / "samples" / "00000.parquet").touch()
        expected = (
            "rows read: 2,000, rejected: 25 (1.25%), such as x must be int64, got 'a' in "
            "log.csv:7; parts written: 1 of 3"
        )
        for _ in range(500):
            if lines and lines[-1] == expected:
                break
            progress.threading.Event().wait(0.01)
        assert lines[-1] == expected
    assert not (tmp_path / ".progress").exists()


def test_rows_are_counted_only_where_somebody_watches(tmp_path: Path) -> None:
    assert count_rows(tmp_path, Counts(read=1000)) is None
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".progress").mkdir()
    assert str(counted_rows(tmp_path)) == "rows read: 0, rejected: 0"


def test_counts_of_a_worker_never_go_backwards_while_it_writes(tmp_path: Path) -> None:
    (tmp_path / ".progress").mkdir()
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            count_rows(tmp_path, Counts(read=1, example="x" * 10_000))

    writer = threading.Thread(target=write)
    writer.start()
    seen = [counted_rows(tmp_path).read for _ in range(200)]
    done.set()
    writer.join()
    progress._COUNTS.pop(tmp_path / ".progress")
    assert seen == sorted(seen)


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
    own: Counts, others: Counts, most: float | None, ends: bool, tmp_path: Path
) -> None:
    (tmp_path / ".progress").mkdir()
    (tmp_path / ".progress" / "0.json").write_text(json.dumps(asdict(others)))
    own += Counts(rejected=own.unread + own.unused, example="x must be y in log.csv:0")
    count_rows(tmp_path, own)
    progress._COUNTS.pop(tmp_path / ".progress")
    stop_if_all_rejected(tmp_path, most, 100)
    assert is_stopped(tmp_path) == ends


@pytest.mark.slow
def test_a_build_of_bad_rows_alone_stops_and_keeps_what_it_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "STOP_AFTER_REJECTS", 100)
    monkeypatch.setattr(executor, "num_threads", lambda: 1)  # a second one reads the next file
    rows = logs.write_log(tmp_path / "log")
    first = tmp_path / "log" / "log-0.parquet"
    bad = rows.slice(0, 100).set_column(2, "user", pa.array([f"u{i}" for i in range(100)]))
    pq.write_table(bad, first, row_group_size=50)
    job = logs.write_job(tmp_path / "job")
    words = ["build", str(job), "--input", str(tmp_path / "log"), "--runner=InProcess"]
    assert main([*words, "--output", str(tmp_path / "d")]) == 3
    error = capsys.readouterr().err.split("error: ")[1]
    assert error.startswith("every one of the first 100 rows was rejected; the build stopped ")
    assert f"after it had opened {first.stat().st_size:,} of " in error
    assert "  100: column 'user' must be int64, got '...'; such as log-0.parquet:0 {" in error
    (kept,) = (tmp_path / "d").glob(".refused-*/rejects/*.parquet")
    assert pq.read_metadata(kept).num_rows == 100
    text = job.read_text().replace("  on_error:", "  gate: {max_reject_fraction: 1}\n  on_error:")
    job.write_text(text)
    assert main([*words, "--output", str(tmp_path / "d")]) == 0
    assert "rejected: 100 rows" in capsys.readouterr().err


def test_groups_auto_without_samples_names_a_reject(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = logs.write_log(tmp_path / "log", num_rows=40, num_files=1)
    bad = rows.set_column(2, "user", pa.array([f"u{i}" for i in range(40)]))
    pq.write_table(bad, tmp_path / "log" / "log-0.parquet")
    job = logs.write_job(tmp_path / "job")
    text = job.read_text().replace("{user: [session, user, history]}", "auto")
    job.write_text(text.replace("  transforms: {user: ", "  transforms: {samples: "))
    words = ["build", str(job), "--input", str(tmp_path / "log"), "--runner=InProcess"]
    assert main([*words, "--output", str(tmp_path / "d")]) == 1
    error = capsys.readouterr().err
    assert "groups: auto found no samples in the training range in " in error
    assert (
        "; rows read: 40, rejected: 40 (100.00%), such as column 'user' must be int64, got 'u0' in "
        "log-0.parquet:0; correct the job or the rows\n"
    ) in error
