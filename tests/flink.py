"""Flink on this machine for tests, started by `deploy/flink`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from presage.trainer.runtime import is_readable

QUICK_START = {"JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
"""Reduces JIT compilation, which dominates short Flink sessions."""
START_SEC = 420.0  # with an empty cache; 15 s with a full one
STOP_SEC = 90.0
MISSING = [name for name in ("java", "javac", "mvn") if shutil.which(name) is None]

needs_flink = pytest.mark.skipif(
    bool(MISSING), reason=f"needs Java 17 and Maven, got no {MISSING} on PATH"
)


@contextmanager
def flink(
    kind: str, repository: Path, logs: Path, slots: int = 2, task_managers: int = 1
) -> Iterator[dict[str, Any]]:
    """Run Flink, yield what `deploy/flink` prints; assert at the end that its processes ended."""
    logs.mkdir()
    with (logs / "launcher.log").open("w") as errors:
        launcher = subprocess.Popen(
            [
                *(sys.executable, "deploy/flink", kind, "--slots", str(slots)),
                *("--task-managers", str(task_managers), "--logs", str(logs)),
            ],
            cwd=repository,
            env=os.environ | QUICK_START,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert launcher.stdout is not None
    about = None
    try:
        line = launcher.stdout.readline() if is_readable(launcher.stdout, START_SEC) else ""
        assert line, (logs / "launcher.log").read_text()
        about = json.loads(line)
        yield about
    finally:
        launcher.terminate()
        assert launcher.wait(STOP_SEC) == 128 + signal.SIGTERM
        launcher.stdout.close()
    assert [name for name, pid in about["pids"].items() if is_running(pid)] == []


def is_running(pid: int) -> bool:
    """Return whether a process is running; a zombie counts as ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def ask(rest: str, path: str) -> dict[str, Any]:
    """Return a response of Flink's REST API."""
    with urllib.request.urlopen(rest + path, timeout=30) as response:
        return json.loads(response.read())


def runner_file(about: dict[str, Any], path: Path, largest: int) -> Path:
    """Write the `--runner` file that sends a scheduler's segment jobs to a session cluster.

    Args:
        about: what `flink` yields.
        path: of the file.
        largest: `largest_parallelism` of the file.
    """
    given = dict(option.removeprefix("--").split("=", 1) for option in about["options"])
    keys = ("job_endpoint", "environment_type", "environment_config")
    cache = f"--environment_cache_millis={given['environment_cache_millis']}"
    section = {
        "address": about["rest"],
        "largest_parallelism": largest,
        **{key: given[key] for key in keys},
        "options": ["--sdk_worker_parallelism=2", cache],
    }
    path.write_text(yaml.safe_dump({"runner": "flink", "flink": section}))
    return path
