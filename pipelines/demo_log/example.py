"""The example of `presage demo`: a job, its synthetic log, and the dataset built from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from presage import schemas
from presage.pipelines.build import build
from presage.pipelines.demo_log.generate import GeneratorConfig, write_log
from presage.pipelines.prepare import BuildInput, BuildOptions, BuildRequest
from presage.pipelines.table.target import SegmentTarget
from presage.schemas.config.job import GenerateConfig, load_job
from presage.schemas.dataset.manifest import find_root
from presage.schemas.errors import SchemaError
from presage.schemas.storage.location import Location

SOURCE = Path(schemas.__file__).parent / "demo"
"""Folder of the job and its schema, which every installation has."""
JOB, SCHEMA = "job.yaml", "schema.pbtxt"


def generate_log(config: GenerateConfig, output: Location, num_samples: int | None) -> int:
    """Write the log of a job's `data.generate`; return the number of files.

    `num_samples` are the rows of the log; those of `config` when None.
    """
    generator = GeneratorConfig(
        num_samples=config.num_samples if num_samples is None else num_samples,
        seed=config.seed,
        start=config.start,
        span=config.span,
    )
    return len(write_log(generator, output))


def write_example(
    folder: Location,
    *,
    num_samples: int | None,
    attempt: str,
    beam_args: list[str],
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Write job and schema, `log/` and `dataset/` into a folder; return the result of the build.

    `num_samples` are the rows of the log; those of the job when None.

    Raises:
        SchemaError: the folder has another job, or a dataset.
    """
    _check_folder(folder)
    for name in (JOB, SCHEMA):
        (folder / name).write_bytes((SOURCE / name).read_bytes())
    config = load_job(SOURCE / JOB).data.generate
    assert config is not None, "the job of the example generates its log"
    generate_log(config, folder / "log", num_samples)
    progress(f"wrote {folder / JOB} and {folder / 'log'}; building {folder / 'dataset'}")
    request = BuildRequest(
        BuildInput(SOURCE / JOB, str(folder / "log")),
        SegmentTarget(folder / "dataset", attempt),
        BuildOptions(beam_args, progress=progress),
    )
    return build(request)


def _check_folder(folder: Location) -> None:
    job = folder / JOB
    if job.exists() and job.read_bytes() != (SOURCE / JOB).read_bytes():
        raise SchemaError("folder has another job; name an empty folder", file=str(job))
    if find_root(folder / "dataset") is not None:
        raise SchemaError(
            "folder has a dataset; remove it, or name an empty folder",
            file=str(folder / "dataset"),
        )
