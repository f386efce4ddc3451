"""Run a Beam pipeline on any runner and return its small results to the launcher."""

from __future__ import annotations

import os
import pickle
import re
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apache_beam as beam
import grpc
from apache_beam.metrics import MetricsFilter
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
from apache_beam.runners.runner import PipelineResult
from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Struct

from pipelines.atomic_files import atomic_write
from pipelines.runners import IN_PROCESS, in_process
from schemas.errors import SchemaError

SHUFFLES = ("references", "values")
"""Ways of samples through the shuffle; `shuffle.py` has them."""

_APART = ("dataflow",)
"""Words in the names of runners whose workers share no directory unless somebody mounts one."""


class BuildOptions(PipelineOptions):
    """Options of a build."""

    @classmethod
    def _add_argparse_args(cls, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--shuffle_by",
            default=None,
            help="references: samples cross the shuffle through files below the dataset; values: "
            "through the runner; by default values on Dataflow, else references",
        )


def shuffle_of(options: PipelineOptions) -> str:
    """Return how samples cross the shuffle: what is asked for, else what suits the runner.

    Raises:
        SchemaError: there is no such way.

    Example:
        >>> shuffle_of(PipelineOptions(["--runner=DataflowRunner"]))
        'values'
        >>> shuffle_of(PipelineOptions(["--runner=FlinkRunner"]))
        'references'
    """
    asked = options.view_as(BuildOptions).shuffle_by
    if asked is None:
        runner = options.view_as(StandardOptions).runner or ""
        return "values" if any(word in runner.lower() for word in _APART) else "references"
    if asked not in SHUFFLES:
        raise SchemaError(f"shuffle_by must be one of {SHUFFLES}, got {asked!r}; leave it out")
    return asked


RESULTS = "results"
_STEP = r" \[while running '[^']*'\]$"
"""What Beam adds to an error."""
WORKER_BYTES = 2 << 30
"""Memory that a worker may need."""
PROCESS_BUNDLES = 24
"""Pieces of work from which on workers are processes."""
LOCAL_RUNNERS = (None, "DirectRunner", "FnApiRunner")
"""Names that mean the pinned local runner; DirectRunner may otherwise pick another one."""

worker_handlers.DATA_BUFFER_TIME_LIMIT_MS = 0
"""Beam's workers in threads send what they have every second, from a thread that takes no lock
against the one that writes (2.77): an element cut in two never ends at the reader, and what is
written between the copy and the clearing is lost. Other runners have no such limit by default."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a pipeline gave.

    Attributes:
        values: by output, its elements in any order.
        counters: name `step/counter` to value.
    """

    values: Mapping[str, list[Any]]
    counters: Mapping[str, int]


class _Save(beam.DoFn):
    """Writes a list to a file that the launcher reads; a retry writes the same file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def process(self, values: list[Any]) -> None:
        with atomic_write(self.path) as partial:
            partial.write_bytes(pickle.dumps(values))


def run_pipeline(
    make: Callable[[beam.Pipeline], Mapping[str, beam.PCollection]],
    beam_args: list[str],
    root: Path,
    bundles: int = 1,
) -> Outcome:
    """Build a pipeline, run it to its end and collect its outputs.

    Args:
        make: adds transforms to a pipeline and names the collections to bring back.
        beam_args: Beam options such as `--runner=FlinkRunner`.
        root: directory that launcher and workers share, for the results.
        bundles: pieces of work that may run at once, for the local runner's number of workers.

    Raises:
        SchemaError: an option is unknown to Beam, or the pipeline failed.
    """
    if in_process(beam_args):
        raise SchemaError(
            f"runner {IN_PROCESS} runs build, append, rewrite and oracle, got another command; "
            "use a runner of Beam"
        )
    options = pipeline_options([*local_workers(beam_args, bundles), *beam_args])
    names: list[str] = []
    pipeline = beam.Pipeline(runner=local_runner(options), options=options)
    for name, values in make(pipeline).items():
        names.append(name)
        listed = values | f"collect {name}" >> beam.combiners.ToList()
        _ = listed | f"save {name}" >> beam.ParDo(_Save(root / RESULTS / f"{name}.pickle"))
    try:
        result = pipeline.run()
        result.wait_until_finish()
    except SchemaError as error:
        raise SchemaError(re.sub(_STEP, "", error.message)) from error
    except (RuntimeError, grpc.RpcError, grpc.FutureTimeoutError) as error:
        reason = worker_error(str(error)) or type(error).__name__
        told = re.match(rf"(?:schemas\.errors\.)?SchemaError: (.*){_STEP}", reason)
        if told:  # the worker has said it as it should be said
            raise SchemaError(told[1]) from error
        raise SchemaError(f"pipeline must finish, got {reason}; see the runner's log") from error
    found = {name: _load(root / RESULTS / f"{name}.pickle") for name in names}
    for name in names:
        (root / RESULTS / f"{name}.pickle").unlink()
    (root / RESULTS).rmdir()
    return Outcome(found, _counters(result))


def local_workers(beam_args: Sequence[str], bundles: int) -> list[str]:
    """Return Beam's options for as many local workers as processors, memory and work suggest.

    Threads for little work, because a process takes 3 s to start; processes for much,
    because threads wait for Python's lock. What the user says about `--direct_*` wins.
    """
    if any(a.startswith("--direct_") for a in beam_args):
        return []
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    workers = min(len(os.sched_getaffinity(0)), bundles, memory // WORKER_BYTES)
    if workers < 2:
        return []
    mode = "multi_threading" if bundles < PROCESS_BUNDLES else "multi_processing"
    return [f"--direct_num_workers={workers}", f"--direct_running_mode={mode}"]


def local_processes(beam_args: Sequence[str], bundles: int) -> int | None:
    """Return in how many processes the local runner works, None with another runner.

    Threads of one process wait for each other, so they count as one.
    """
    options = pipeline_options([*local_workers(beam_args, bundles), *beam_args])
    if options.view_as(StandardOptions).runner not in LOCAL_RUNNERS:
        return None
    direct = options.view_as(DirectOptions)
    if direct.direct_running_mode != "multi_processing":
        return 1
    return direct.direct_num_workers or len(os.sched_getaffinity(0))


def worker_error(text: str) -> str:
    r"""Return the line that matters of what a portable runner says about a failure.

    Example:
        >>> worker_error("Job failed: x\nTraceback:\nOSError: full [while running 'y']\nat z.java")
        "OSError: full [while running 'y']"
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    raised = [line for line in lines if re.search(_STEP, line)]
    return (raised or lines[-1:] or [""])[-1]


def _load(path: Path) -> list[Any]:
    try:
        return pickle.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise SchemaError(
            "pipeline must leave its results where the launcher can read them, got none; "
            "use a directory that launcher and workers share",
            file=str(path.parent),
        ) from error


def _counters(result: PipelineResult) -> dict[str, int]:
    try:
        found = result.metrics().query(MetricsFilter())["counters"]
    except NotImplementedError:  # some portable runners keep no metrics after the end
        return {}
    totals: dict[str, int] = {}
    for counter in found:
        key = f"{counter.key.metric.namespace}/{counter.key.metric.name}"
        totals[key] = totals.get(key, 0) + int(counter.committed or 0)
    return totals


def pipeline_options(beam_args: list[str]) -> PipelineOptions:
    """Parse the Beam options of a build whose launcher commits.

    Raises:
        SchemaError: as `parsed_options`, or a template is asked for.
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
    """Parse Beam options; what Beam does not know is an error.

    Raises:
        SchemaError: an option is unknown, or asks for less than no workers.
    """
    options = PipelineOptions(beam_args)
    unknown = _unknown(options, beam_args)
    if unknown:
        raise SchemaError(f"option must be known here or to Beam, got {unknown[0]}; see --help")
    workers = options.view_as(DirectOptions).direct_num_workers
    if workers < 0:
        raise SchemaError(
            f"direct_num_workers must not be negative, got {workers}; 0 means all processors"
        )
    options.view_as(SetupOptions).save_main_session = False
    return options


def _unknown(options: PipelineOptions, beam_args: list[str]) -> list[str]:
    """Return what no part of Beam takes; an option may have more names than its value has."""
    found: list[str] = []

    def parse(parser: ArgumentParser) -> None:
        found.extend(parser.parse_known_args(beam_args)[1])

    options.get_all_options(add_extra_args_fn=parse)
    return found


def local_runner(options: PipelineOptions) -> FnApiRunner | None:
    """Return the pinned local runner, or None when another one is asked for."""
    if options.view_as(StandardOptions).runner in LOCAL_RUNNERS:
        quiet = beam_provision_api_pb2.ProvisionInfo(
            retrieval_token="none",
            pipeline_options=ParseDict({"default_sdk_harness_log_level": "ERROR"}, Struct()),
        )
        return FnApiRunner(provision_info=ExtendedProvisionInfo(quiet))
    return None
