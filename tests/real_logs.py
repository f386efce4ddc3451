"""The shipped jobs, built from the real logs once per test session."""

import json
from pathlib import Path
from typing import Any

from presage.pipelines.build import build
from tests.pipelines.logs import request
from tests.shared import make_once

REPOSITORY = Path(__file__).resolve().parents[1]
LOGS = {
    "mind": "mind",
    "ebnerd": "ebnerd_test",
    "kuairand": "kuairand_pure_part",
    "thirtymusic": "30music_sample10",
}
"""Shipped job -> directory of its log in the shared data."""


def built(name: str, shared_data: Path) -> tuple[Path, dict[str, Any]]:
    """Return the dataset of a shipped job, which must not be modified, and its build's output.

    Args:
        name: a key of `LOGS`.
        shared_data: directory of the real logs.
    """
    folder = make_once(_build, name, str(shared_data))
    return folder / "dataset", json.loads((folder / "printed.json").read_text())


def _build(folder: Path, name: str, shared_data: str) -> None:
    job = REPOSITORY / "schemas" / name / "job.yaml"
    printed = build(request(job, Path(shared_data, LOGS[name]), folder / "dataset"))
    (folder / "printed.json").write_text(json.dumps(printed, default=str))
