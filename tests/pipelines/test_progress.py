"""Lines about a running build: rows read and rejected, with an example, and parts written."""

from pathlib import Path

import pytest

from pipelines import progress
from pipelines.progress import count_rows, counted_rows, watched


def test_lines_name_rows_rejects_and_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_INTERVAL_SEC", 0.01)
    lines: list[str] = []
    with watched(tmp_path, 3, lines.append):
        count_rows(tmp_path, read=1000)
        count_rows(tmp_path, rejected=20, example="x must be int64, got 'a' in log.csv:7")
        (tmp_path / ".progress" / "other").write_text(
            '{"read": 1000, "rejected": 5, "example": ""}'
        )
        (tmp_path / ".progress" / "torn").write_text('{"read": 10')
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
    count_rows(tmp_path, read=1000)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".progress").mkdir()
    assert str(counted_rows(tmp_path)) == "rows read: 0, rejected: 0"
