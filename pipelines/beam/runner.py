"""Beam options, and pipelines whose small results return to the launcher."""

from __future__ import annotations

import hmac
import pickle
import re
import secrets
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import apache_beam as beam
import grpc
from apache_beam.options.pipeline_options import (
    DirectOptions,
    GoogleCloudOptions,
    PipelineOptions,
    SetupOptions,
    StandardOptions,
)
from apache_beam.portability.api import beam_provision_api_pb2
from apache_beam.runners.portability.fn_api_runner import FnApiRunner, worker_handlers
from apache_beam.runners.portability.fn_api_runner.fn_runner import ExtendedProvisionInfo
from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Struct

from presage.pipelines.runner_options import IN_PROCESS
from presage.schemas.errors import SchemaError
from presage.schemas.machine import machine_budget
from presage.schemas.storage.location import Location

_SIGNATURE_BYTES = 32
RESULTS = "results"
"""Directory of the results below the root of a pipeline; removed when they are read."""
_STEP = r" \[while running '[^']*'\]$"
"""Suffix that Beam adds to an error."""
WORKER_BYTES = 2 << 30
"""Memory reserved for a local worker."""
PROCESS_TASKS = 24
"""Local workers are processes with at least so many tasks, threads with fewer."""
LOCAL_RUNNERS = (None, "FnApiRunner")
"""Names that select FnApiRunner; DirectRunner is Beam's own choice, Prism where it can have it."""
_FLUSH_MS = worker_handlers.DATA_BUFFER_TIME_LIMIT_MS
"""Interval of the periodic flush of FnApiRunner's worker threads."""


class _Save(beam.DoFn):
    """Writes a list, signed, to a file that the launcher reads; a retry writes the same file."""

    def __init__(self, file: Location, key: bytes) -> None:
        self.file, self.key = file, key

    def process(self, values: list[Any]) -> None:
        data = pickle.dumps(values)
        self.file.write_bytes(hmac.digest(self.key, data, "sha256") + data)


def run_pipeline(
    add_transforms: Callable[[beam.Pipeline], Mapping[str, beam.PCollection]],
    beam_args: list[str],
    root: Location,
    num_tasks: int = 1,
) -> Mapping[str, list[Any]]:
    """Run a pipeline to its end and return its outputs.

    Args:
        add_transforms: adds transforms to a pipeline and names the collections to return.
        beam_args: Beam options such as `--runner=FlinkRunner`.
        root: directory in which launcher and workers find the results.
        num_tasks: tasks that can run in parallel, for the local runner's number of workers.

    Returns:
        The elements of each collection, in any order.

    Raises:
        SchemaError: an option is unknown to Beam, or the pipeline failed.
    """
    options = pipeline_options([*local_workers(beam_args, num_tasks), *beam_args])
    if options.view_as(StandardOptions).runner == IN_PROCESS:
        raise SchemaError(
            f"runner {IN_PROCESS} supports build, append, rewrite and oracle only; use a runner "
            "of Beam"
        )
    files: dict[str, Location] = {}
    key = secrets.token_bytes(32)  # only the workers of this pipeline can write what is unpickled
    pipeline = beam.Pipeline(runner=local_runner(options), options=options)
    for name, values in add_transforms(pipeline).items():
        files[name] = root / RESULTS / f"{name}.pickle"
        listed = values | f"collect {name}" >> beam.combiners.ToList()
        _ = listed | f"save {name}" >> beam.ParDo(_Save(files[name], key))
    try:
        with _without_periodic_flush():
            pipeline.run().wait_until_finish()
    except SchemaError as error:
        raise SchemaError(re.sub(_STEP, "", error.message)) from error
    except (RuntimeError, grpc.RpcError, grpc.FutureTimeoutError) as error:
        reason = worker_error(str(error)) or type(error).__name__
        schema_error = re.match(rf"(?:schemas\.errors\.)?SchemaError: (.*){_STEP}", reason)
        if schema_error:
            raise SchemaError(schema_error[1]) from error
        raise SchemaError(f"pipeline failed: {reason}; see the runner's log") from error
    outputs = {name: _load(file, key) for name, file in files.items()}
    (root / RESULTS).remove_all()
    return outputs


@contextmanager
def _without_periodic_flush() -> Iterator[None]:
    """Turn off the periodic flush of FnApiRunner's worker threads while a build of ours runs.

    In Beam 2.77 it runs every second without a lock against the writing thread: it can cut an
    element in two, and elements written between its copy and its clear are lost. Other runners have
    no such flush by default.
    """
    worker_handlers.DATA_BUFFER_TIME_LIMIT_MS = 0
    try:
        yield
    finally:
        worker_handlers.DATA_BUFFER_TIME_LIMIT_MS = _FLUSH_MS


def local_workers(beam_args: Sequence[str], num_tasks: int) -> list[str]:
    """Return Beam options for the number of local workers by processors, memory and tasks.

    Few tasks run in threads, because a process takes 3 s to start; many run in processes, because
    threads wait for the GIL. The user's `--direct_*` options win.
    """
    if any(a.startswith("--direct_") for a in beam_args):
        return []
    machine = machine_budget()
    workers = min(int(machine.cpus), num_tasks, machine.memory // WORKER_BYTES)
    if workers < 2:
        return []
    mode = "multi_threading" if num_tasks < PROCESS_TASKS else "multi_processing"
    return [f"--direct_num_workers={workers}", f"--direct_running_mode={mode}"]


def worker_error(text: str) -> str:
    r"""Return the line with the cause in a portable runner's error message.

    Example:
        >>> worker_error("Job failed: x\nTraceback:\nOSError: full [while running 'y']\nat z.java")
        "OSError: full [while running 'y']"
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    raised = [line for line in lines if re.search(_STEP, line)]
    return (raised or lines[-1:] or [""])[-1]


def _load(file: Location, key: bytes) -> list[Any]:
    try:
        content = file.read_bytes()
    except FileNotFoundError as error:
        raise SchemaError(
            "results of the pipeline are missing; use a directory that launcher and workers share, "
            "or the URL of an object store",
            file=str(file.parent),
        ) from error
    signature, data = content[:_SIGNATURE_BYTES], content[_SIGNATURE_BYTES:]
    if not hmac.compare_digest(signature, hmac.digest(key, data, "sha256")):
        raise SchemaError("result was not written by this pipeline; run it again", file=str(file))
    return pickle.loads(data)


def pipeline_options(beam_args: list[str]) -> PipelineOptions:
    """Parse the Beam options of a command whose launcher commits.

    Raises:
        SchemaError: as `parsed_options`, or `--template_location` is set.
    """
    options = parsed_options(beam_args)
    template = options.view_as(GoogleCloudOptions).template_location
    if template is not None:
        raise SchemaError(
            f"template_location must not be set, got {template!r}; "
            "a build is committed by its launcher: run the job instead, or see deploy/dataflow"
        )
    return options


def parsed_options(beam_args: list[str]) -> PipelineOptions:
    """Parse Beam options.

    Raises:
        SchemaError: an option is unknown, or the number of workers is negative.
    """
    options = PipelineOptions(beam_args)
    unknown = _unknown_options(options, beam_args)
    if unknown:
        raise SchemaError(f"unknown option: {unknown[0]}; see --help")
    workers = options.view_as(DirectOptions).direct_num_workers
    if workers < 0:
        raise SchemaError(
            f"direct_num_workers must not be negative, got {workers}; 0 means all processors"
        )
    options.view_as(SetupOptions).save_main_session = False
    return options


def _unknown_options(options: PipelineOptions, beam_args: list[str]) -> list[str]:
    unknown: list[str] = []

    def parse(parser: ArgumentParser) -> None:
        unknown.extend(parser.parse_known_args(beam_args)[1])

    options.get_all_options(add_extra_args_fn=parse)
    return unknown


def local_runner(options: PipelineOptions) -> FnApiRunner | None:
    """Return FnApiRunner, or None if the options select another runner."""
    if options.view_as(StandardOptions).runner in LOCAL_RUNNERS:
        quiet = beam_provision_api_pb2.ProvisionInfo(
            retrieval_token="none",
            pipeline_options=ParseDict({"default_sdk_harness_log_level": "ERROR"}, Struct()),
        )
        return FnApiRunner(provision_info=ExtendedProvisionInfo(quiet))
    return None
