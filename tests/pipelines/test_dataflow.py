"""The job that Dataflow would be sent: its options and its graph, without sending it.

`apache-beam[gcp]` is not installed, so the last two steps are not here: upload and the request.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions, WorkerOptions
from apache_beam.options.pipeline_options_validator import PipelineOptionsValidator
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.pvalue import PCollection
from apache_beam.runners.dataflow.dataflow_runner import DataflowRunner
from apache_beam.transforms.environments import DockerEnvironment

from presage.pipelines.beam.runner import pipeline_options
from presage.pipelines.build import build
from presage.schemas.errors import SchemaError
from tests.pipelines.logs import request, write_job, write_log

MAX_GRAPH_BYTES = 10 << 20
"""Dataflow refuses a larger one."""
OPTIONS = Path(__file__).resolve().parents[2] / "deploy" / "dataflow" / "options.txt"


class StoppedError(Exception):
    """The build has come to the point where its pipeline is known."""


def beam_options() -> list[str]:
    """Return the Beam options that are shipped."""
    return OPTIONS.read_text().split()


def graph_of(directory: Path, num_files: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the job graph of a build as DataflowRunner makes it, up to the upload."""
    write_log(directory / "log", num_rows=600, num_files=num_files)
    job = write_job(directory / "job")
    found: list[Callable[[beam.Pipeline], Mapping[str, PCollection]]] = []

    def stop(
        make: Callable[[beam.Pipeline], Mapping[str, PCollection]], *_: object, **__: object
    ) -> None:
        found.append(make)
        raise StoppedError

    monkeypatch.setattr("presage.pipelines.beam.jobs.run_pipeline", stop)
    asked = request(job, directory / "log", directory / "dataset", beam_args=beam_options())
    with pytest.raises(StoppedError):
        build(asked)
    options, runner = pipeline_options(beam_options()), DataflowRunner()
    pipeline = beam.Pipeline(runner=runner, options=options)
    found[0](pipeline)
    pipeline.visit(runner.combinefn_visitor())
    pipeline.visit(runner.side_input_visitor(deterministic_key_coders=True))
    pipeline.replace_all(DataflowRunner._PTRANSFORM_OVERRIDES)
    runner._adjust_pipeline_for_dataflow_v2(pipeline)
    image = options.view_as(WorkerOptions).sdk_container_image
    containers: Any = DockerEnvironment  # a decorator hides that it is a class
    return pipeline.to_runner_api(default_environment=containers.from_container_image(image))


def problems_of(options: PipelineOptions) -> list[str]:
    return PipelineOptionsValidator(options, DataflowRunner()).validate()


def test_shipped_options_are_valid_and_run_a_batch_job() -> None:
    options = pipeline_options(beam_options())
    assert problems_of(options) == []
    assert options.view_as(StandardOptions).runner == "DataflowRunner"
    assert options.view_as(StandardOptions).streaming is False
    workers = options.view_as(WorkerOptions)
    assert workers.num_workers <= workers.max_num_workers


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("--project=shop-project", "", "Missing required option: project"),
        ("--project=shop-project", "--project=Shop", "Invalid Project ID (Shop)"),
        ("gs://shop-presage", "/mnt", "Invalid GCS path (/mnt/tmp)"),
    ],
)
def test_wrong_options_are_found_before_anything_is_sent(old: str, new: str, problem: str) -> None:
    changed = " ".join(beam_options()).replace(old, new).split()
    assert any(problem in found for found in problems_of(pipeline_options(changed)))


def test_classic_template_is_refused() -> None:
    message = (
        "template_location must not be set, got 'gs://shop-presage/build'; "
        "a build is committed by its launcher: run the job instead, or see deploy/dataflow"
    )
    with pytest.raises(SchemaError, match=re.escape(message)):
        pipeline_options([*beam_options(), "--template_location=gs://shop-presage/build"])


def test_misspelt_option_of_dataflow_is_refused() -> None:
    with pytest.raises(
        SchemaError, match=re.escape("unknown option: --max_num_worker=8; see --help")
    ):
        pipeline_options([*beam_options(), "--max_num_worker=8"])


@pytest.mark.slow
def test_graph_has_each_step_once_and_runs_in_the_given_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = graph_of(tmp_path, 3, monkeypatch).components
    names = Counter(t.unique_name for t in parts.transforms.values())
    assert {"ReadRows", "MakeSamples", "BuildParts"} <= set(names)
    assert set(names.values()) == {1}
    images = [
        beam_runner_api_pb2.DockerPayload.FromString(environment.payload).container_image
        for environment in parts.environments.values()
    ]
    shipped = next(o for o in beam_options() if o.startswith("--sdk_container_image="))
    assert set(images) == {shipped.partition("=")[2]}


@pytest.mark.slow
def test_graph_groups_by_coded_pairs_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = graph_of(tmp_path, 3, monkeypatch).components
    grouped = [
        parts.pcollections[next(iter(t.inputs.values()))].coder_id
        for t in parts.transforms.values()
        if t.spec.urn == "beam:transform:group_by_key:v1"
    ]
    assert grouped
    assert {parts.coders[coder].spec.urn for coder in grouped} == {"beam:coder:kv:v1"}


@pytest.mark.slow
def test_graph_of_ten_thousand_files_is_small_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = graph_of(tmp_path / "few", 10, monkeypatch).ByteSize()
    many = graph_of(tmp_path / "many", 110, monkeypatch).ByteSize()
    assert many > few
    assert few + (many - few) / 100 * 10_000 < MAX_GRAPH_BYTES


@pytest.mark.slow
def test_samples_are_clustered_by_an_int_and_cross_as_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = graph_of(tmp_path, 3, monkeypatch).components
    clustering = next(
        t for t in parts.transforms.values() if t.unique_name == "BuildParts/cluster by session"
    )
    coder = parts.coders[parts.pcollections[next(iter(clustering.inputs.values()))].coder_id]
    urns = [parts.coders[part].spec.urn for part in coder.component_coder_ids]
    assert urns == ["beam:coder:varint:v1", "beam:coder:bytes:v1"]
