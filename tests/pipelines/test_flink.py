"""The same bytes on Flink, embedded in the job server and on a session cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from presage.pipelines.cli import main
from tests.external_tools import install_wheel
from tests.flink import START_SEC, ask, flink, is_running, needs_flink
from tests.object_store import Store
from tests.pipelines.logs import bytes_of, write_job, write_log
from tests.pipelines.private_workers import (
    bytes_at,
    upload,
    without_paths,
    without_sources,
    worker_pool,
    write_input,
)
from tests.shared import error_of

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(900), needs_flink]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A log in several files, its job, and parts so small that each worker has several."""
    directory = tmp_path_factory.mktemp("log")
    write_log(directory / "log", num_rows=600, num_files=6)
    write_job(directory / "job")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("presage.pipelines.prepare.PART_INPUT_BYTES", 4_000)
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


def test_session_workers_that_share_no_directory_write_the_same_bytes_to_s3(
    repository: Path,
    s3_store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each worker has our wheel, an empty folder for the launcher's, and its own temporary one."""
    python = install_wheel(repository, repository / "requirements-pipelines.lock") / "python"
    variables = without_sources(tmp_path / "path")
    monkeypatch.setattr("presage.pipelines.prepare.PART_INPUT_BYTES", 8_000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "launcher"))
    for name, value in s3_store.environment.items():
        monkeypatch.setenv(name, value)
    job, url = write_input(tmp_path / "launcher"), s3_store.new_url()
    upload(tmp_path / "launcher" / "log", f"{url}/log")
    words = ["build", str(job), "--input", f"{url}/log", "--output"]
    assert main([*words, str(tmp_path / "local")]) == 0
    with (
        flink("session", repository, tmp_path / "logs") as about,
        worker_pool(tmp_path / "launcher", tmp_path / "pool.log", python, variables) as address,
    ):
        options = [o for o in about["options"] if not o.startswith("--environment_config")]
        options.append(f"--environment_config={address}")
        capsys.readouterr()
        assert "worker does not see the directory of the dataset: /" in error_of(
            main, [*words, str(tmp_path / "launcher" / "dataset"), *options]
        )
        assert main([*words, f"{url}/dataset", *options]) == 0
    assert len(worker_processes(tmp_path / "pool.log")) >= 2
    assert bytes_at(f"{url}/dataset") == without_paths(bytes_of(tmp_path / "local"))


def part_builders(rest: str) -> list[dict[str, Any]]:
    """Return the tasks of the stage that builds parts, as Flink's REST API describes them.

    The figures of a finished task arrive a heartbeat later.
    """
    for _ in range(1500):
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
