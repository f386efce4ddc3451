"""Selection of the logs of a benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.storage import main


def test_missing_logs_are_skipped_and_at_least_one_is_required(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="benchmark must have a log"):
        main(["--datasets", "mind,ebnerd", "--shared-data", str(tmp_path)])
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"skipped {n}, its log is not in {tmp_path}" for n in ("mind", "ebnerd")]


def test_unknown_log_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SystemExit, match=r"must be of mind, .* got 'mnd'"):
        main(["--datasets", "mnd"])
