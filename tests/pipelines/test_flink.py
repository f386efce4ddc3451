"""The same bytes on Flink, embedded in the job server and on a session cluster."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipelines.commands import main
from tests.pipelines.logs import bytes_of, write_job, write_log

START_SEC = 420.0  # with an empty cache; 15 s with a full one
STOP_SEC = 90.0
MISSING = [name for name in ("java", "javac", "mvn") if shutil.which(name) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(MISSING), reason=f"needs Java 17 and Maven, got no {MISSING} on PATH"),
]


@contextmanager
def flink(kind: str, repository: Path, logs: Path) -> Iterator[dict[str, Any]]:
    """Serve a Flink; afterwards each of its processes must be gone."""
    logs.mkdir()
    with (logs / "launcher.log").open("w") as errors:
        launcher = subprocess.Popen(
            [sys.executable, "deploy/flink", kind, "--logs", str(logs)],
            cwd=repository,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert launcher.stdout is not None
    about = None
    try:
        ready, _, _ = select.select([launcher.stdout], [], [], START_SEC)
        line = launcher.stdout.readline() if ready else ""
        assert line, (logs / "launcher.log").read_text()
        about = json.loads(line)
        yield about
    finally:
        launcher.terminate()
        assert launcher.wait(STOP_SEC) == 128 + signal.SIGTERM
        launcher.stdout.close()
    assert [name for name, pid in about["pids"].items() if is_running(pid)] == []


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A log in several files, its job, and parts so small that each worker has several."""
    directory = tmp_path_factory.mktemp("log")
    write_log(directory / "log", num_rows=600, num_files=6)
    write_job(directory / "job")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipelines.build.PART_INPUT_BYTES", 4_000)
        patch.setattr("pipelines.oracle.stages.WORKER_ENTRIES", 200)
        patch.setattr("pipelines.oracle.index.WORKER_ENTRIES", 200)
        yield directory


def build(log: Path, name: str, options: list[str]) -> dict[str, bytes]:
    words = ["build", str(log / "job" / "job.yaml"), "--input", str(log / "log")]
    assert main([*words, "--output", str(log / name), *options]) == 0
    return bytes_of(log / name)


@pytest.fixture(scope="module")
def local(log: Path) -> dict[str, bytes]:
    """The dataset that the local runner builds."""
    return build(log, "local", [])


# Beam's worker threads in this process complain when Flink closes their channels at the end.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_embedded_flink_gives_the_bytes_of_the_local_runner(
    log: Path, local: dict[str, bytes], repository: Path, tmp_path: Path
) -> None:
    with flink("embedded", repository, tmp_path / "logs") as about:
        assert build(log, "embedded", about["options"]) == local


def test_session_cluster_gives_the_bytes_of_the_local_runner_with_both_slots(
    log: Path, local: dict[str, bytes], repository: Path, tmp_path: Path
) -> None:
    with flink("session", repository, tmp_path / "logs") as about:
        assert build(log, "session", about["options"]) == local
        assert ask(about["rest"], "/overview")["slots-total"] == 2
        tasks = part_builders(about["rest"])
        assert [task["metrics"]["read-records"] > 0 for task in tasks] == [True, True]
        # Two tasks of one stage, at the same time, cannot be in one slot.
        assert max(t["start-time"] for t in tasks) < min(t["end-time"] for t in tasks)
        workers = worker_processes(tmp_path / "logs" / "worker-pool.log")
        assert len(workers) >= 2
        assert not set(workers) & {os.getpid(), *about["pids"].values()}
    assert [pid for pid in workers if is_running(pid)] == []


def ask(rest: str, path: str) -> dict[str, Any]:
    with urllib.request.urlopen(rest + path, timeout=30) as answer:
        return json.loads(answer.read())


def part_builders(rest: str) -> list[dict[str, Any]]:
    """Return the tasks of the stage that builds parts, as Flink's REST API describes them.

    The figures of a finished task arrive a heartbeat later.
    """
    for _ in range(50):
        for job in ask(rest, "/jobs/overview")["jobs"]:
            for stage in ask(rest, f"/jobs/{job['jid']}")["vertices"]:
                if "{BuildParts" in stage["name"]:
                    tasks = ask(rest, f"/jobs/{job['jid']}/vertices/{stage['id']}")["subtasks"]
                    if all(task["metrics"]["read-records-complete"] for task in tasks):
                        return tasks
        time.sleep(0.2)
    raise AssertionError("Flink must have a finished stage that builds parts, got none")


def worker_processes(pool_log: Path) -> list[int]:
    """Return the process ids of the workers that the pool has started."""
    words = (line.split() for line in pool_log.read_text().splitlines())
    return [int(w[4]) for w in words if w[:1] == ["worker"] and w[2:4] == ["is", "process"]]


def test_command_after_flink_gets_the_options_and_gives_its_exit_code(repository: Path) -> None:
    program = "import sys; print(sys.argv[1]); sys.exit(3)"
    done = subprocess.run(
        [sys.executable, "deploy/flink", "embedded", "--", sys.executable, "-c", program],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=START_SEC,
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, "--runner=FlinkRunner\n")
