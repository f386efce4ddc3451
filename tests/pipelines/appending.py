"""Jobs, logs and requests for tests that append segments."""

from pathlib import Path
from typing import Any

from presage.pipelines.prepare import BuildRequest
from presage.schemas.storage.location import Location
from tests.pipelines.logs import SCHEMA, built, request, write_job, write_log

DEFAULT = """tensor_representation_group { key: "" value { tensor_representation { key: "price"
  value { dense_tensor { column_name: "price" default_value { float_value: 2.5 } } } } } }
"""
EXTRA = 'feature { name: "price" type: FLOAT annotation { tag: "dense" } }\n'
KILLED_AT = """
import os, signal, sys
from importlib import import_module
module = import_module("{module}")
from presage.pipelines.cli import main

real, calls = module.{function}, []

def killed(*arguments, **options):
    calls.append(1)
    if len(calls) > {before}:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments, **options)

module.{function} = killed
sys.exit(main(sys.argv[1:]))
"""
"""`pipelines` in a process that kills itself at a call of a function after `before` others."""


def addition(
    job: Path,
    log: Path,
    dataset: Path | Location,
    position: int | None = None,
    attempt: str = "30fe30fe30fe",
    **settings: Any,
) -> BuildRequest:
    """Return a request for one more segment; `settings` as for `request`."""
    wanted = {"append": True, "position": position, "attempt": attempt, **settings}
    return request(job, log, dataset, **wanted)


def changed(directory: Path, *changes: tuple[str, str], schema: str = SCHEMA) -> Path:
    """Write the job with some texts replaced."""
    job = write_job(directory)
    text = job.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    job.write_text(text)
    (directory / "schema.pbtxt").write_text(schema)
    return job


def with_logs(directory: Path) -> Path:
    """Write a job and three logs, and build a dataset of the first."""
    built(directory)
    write_log(directory / "log-1", num_rows=200, seed=1)
    write_log(directory / "log-2", num_rows=150, seed=2)
    return directory
