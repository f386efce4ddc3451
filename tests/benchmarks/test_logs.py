"""Selection of the logs of a benchmark."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.common.harness import SKIPPED
from benchmarks.storage import main
from tests.shared import error_of


def test_missing_logs_are_skipped_and_at_least_one_is_required(tmp_path: Path) -> None:
    words = ["--parts", "logs", "--datasets", "mind,ebnerd", "--shared-data", str(tmp_path)]
    lines = error_of(main, words, SKIPPED).splitlines()
    assert lines == [
        *(f"skipped {n}, its log is not in {tmp_path}" for n in ("mind", "ebnerd")),
        "skipped storage, logs: a log must exist, got none; give --shared-data",
        "skipped storage: a part must run, got none",
    ]


def test_unknown_log_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--datasets", "mind,mnd"])
    message = r"--datasets must be of mind, .*, got 'mnd'"
    assert re.search(message, capsys.readouterr().err)
