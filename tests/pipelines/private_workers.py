"""Builds whose workers share nothing with their launcher but the URL of the dataset.

The job has all that workers exchange: side tables, fitted values, rejects, look-ups of the oracle.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from presage.schemas.storage.location import Location, local_copy
from tests.pipelines import transform_jobs
from tests.pipelines.logs import bytes_of

_SIDE = """
  sides:
    towns: {files: "towns.jsonl", format: jsonl, key: user, columns: {user: int64, town: int32}}
  on_error: reject_files
  samples:
    joins: [{side: towns}]
"""
_MOUNT = 'mount -t tmpfs private "$0" && mkdir "$0/tmp" && export TMPDIR="$0/tmp" && '
_RUN = 'exec "$@"'
_REPEAT = 'exec "$1" -m tests.pipelines.repeated_bundles "$4" "$5"'  # of: python -c PROGRAM URL ID
_POOL = Path(__file__).resolve().parents[2] / "deploy" / "flink" / "worker_pool.py"


def write_input(folder: Path) -> Path:
    """Write `folder/job` and `folder/log`; return the job file."""
    job = transform_jobs.write_job(folder / "job")
    job.write_text(transform_jobs.JOB.replace("\n  samples:\n", _SIDE, 1))
    town = '\nfeature { name: "town" type: INT annotation { tag: "kept" } }\n'
    (folder / "job" / "schema.pbtxt").write_text(transform_jobs.schema_text() + town)
    transform_jobs.write_log(folder / "log", transform_jobs.raw_rows(600, seed=3))
    users = (f'{{"user": {user}, "town": {user % 7}}}' for user in range(0, 1000, 3))
    (folder / "log" / "towns.jsonl").write_text("\n".join([*users, '{"user": 1, "town": "x"}']))
    (folder / "log" / "torn.parquet").write_bytes(b"PAR1")
    return job


def upload(folder: Path, url: str) -> None:
    """Copy the files of a folder to a URL."""
    for entry in Location.parse(folder).entries():
        (Location.parse(url) / entry.path).upload(folder / entry.path)


def bytes_at(url: str) -> dict[str, bytes]:
    """Return `bytes_of` of a dataset at a URL."""
    with local_copy(Location.parse(url)) as dataset:
        return without_paths(bytes_of(dataset))


def without_paths(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the content of a dataset without the view, which has its path."""
    return {name: data for name, data in files.items() if name != "view.sql"}


def private_command(folder: Path, *, repeat: bool) -> list[str]:
    """Return words before the command of a worker for which a folder is an empty one of its own.

    Args:
        folder: to hide.
        repeat: whether the worker retries and duplicates its bundles.

    Raises:
        Skipped: this system gives a process no mounts of its own.
    """
    unshare = ["unshare", "--mount"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make mount namespaces")
    return [*unshare, "sh", "-c", _MOUNT + (_REPEAT if repeat else _RUN), str(folder)]


def without_sources(folder: Path) -> dict[str, str]:
    """Return variables with which a Python finds our tests, and our packages if it has the wheel.

    Args:
        folder: to write to.
    """
    folder.mkdir()
    (folder / "tests").symlink_to(_POOL.parents[2] / "tests")
    return {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}


@contextmanager
def worker_pool(
    hidden: Path,
    log: Path,
    python: Path | str = sys.executable,
    variables: Mapping[str, str] | None = None,
    *,
    repeat: bool = False,
) -> Iterator[str]:
    """Run a pool of Beam workers, each with an empty folder of its own instead of `hidden`.

    Args:
        hidden: folder of the launcher.
        log: file for the output of pool and workers.
        python: program of the workers.
        variables: added to their environment.
        repeat: whether workers retry and duplicate their bundles.

    Yields:
        Its address.
    """
    command = [str(python), "-u", str(_POOL), "0", *private_command(hidden, repeat=repeat)]
    with log.open("w") as errors:
        pool = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(_POOL.parents[2]), **(variables or {})},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert pool.stdout is not None
    try:
        address = pool.stdout.readline().strip()
        assert address, log.read_text()
        yield address
    finally:
        pool.terminate()
        pool.wait(60)
        pool.stdout.close()
