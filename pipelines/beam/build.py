"""A whole build as one step of somebody else's pipeline."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import apache_beam as beam

from pipelines.beam.commit import SEGMENT, Wanted, committed
from pipelines.beam.io import INCOMING
from pipelines.beam.options import shuffle_of
from pipelines.beam.segment import segment_pipeline
from pipelines.build import hashes_of
from pipelines.groups.job import with_groups
from pipelines.learned.files import stage_learned
from pipelines.prepare import BuildRequest, context_of, prepare
from pipelines.segments.admit import admit
from pipelines.sources.rejects import Reject
from pipelines.stages import REJECTS
from schemas.features import load_features
from schemas.job import check_new_names, load_job
from schemas.paths import check_writable, local_path, schema_path


class BuildDataset(beam.PTransform):
    """Begin a pipeline with a build: what `python -m pipelines build` does, to the same bytes.

    The input is listed and the job checked when the pipeline is made; a segment that is there
    already is not built again.

    Returns:
        `{"segment": PCollection[str], "rejects": PCollection[Reject]}`; the segment's name comes
        when it is committed.

    Example: `pipeline | BuildDataset("job.yaml", "log", "dataset")`
    """

    def __init__(
        self, job: str | Path, log: str | Path, dataset: str | Path, append: bool = False,
        *, single_writer: bool = False, allow_outside: bool = False,
    ) -> None:  # fmt: skip
        """Check the job.

        Args:
            job: the job file.
            log: directory of raw files, or its URL.
            dataset: directory of the dataset.
            append: whether the dataset must be there already.
            single_writer: whether nothing else writes there, for a network filesystem.
            allow_outside: whether the schema may lie outside the folder of the job file.

        Raises:
            SchemaError: the job does not fit, or the dataset is no place to write to.
        """
        super().__init__()
        path = Path(job).resolve()
        self._parsed = load_job(path)
        schema = schema_path(path, self._parsed.data.schema, allow_outside=allow_outside)
        self._features = load_features(schema)
        target = local_path(dataset).resolve()
        check_writable(target, single_writer=single_writer)
        check_new_names(self._parsed, path, target)
        self._request = BuildRequest(
            job_path=path,
            input_root=str(log),
            dataset=target,
            beam_args=["--direct_num_workers=1"],  # of the index, which the last worker makes
            attempt=uuid.uuid4().hex[:12],
            append=append,
            allow_outside=allow_outside,
        )

    def expand(self, input_or_inputs: Any) -> dict[str, Any]:
        """List the input, build the parts, commit the segment."""
        pipeline, features = input_or_inputs.pipeline, self._features
        request, job = with_groups(self._request, self._parsed, features)
        prepared = prepare(request, job, features)
        _, key = hashes_of(job, features, prepared.listing)
        reference = admit(request, job, features, key, prepared.listing)
        if reference is not None:
            nothing = pipeline | "no rejects" >> beam.Create([])
            return {
                SEGMENT: pipeline | "there already" >> beam.Create([reference.id]),
                REJECTS: nothing | "typed" >> beam.Map(_as_is).with_output_types(Reject),
            }
        request.dataset.mkdir(parents=True, exist_ok=True)
        building = request.dataset / f"{INCOMING}.{request.attempt}"
        context = replace(
            context_of(request, job, features, prepared, building),
            shuffle_by=shuffle_of(pipeline.options),
        )
        context.segment_root.mkdir()
        stage_learned(request.dataset, context.learned, context.segment_root)
        made = segment_pipeline(pipeline, context)
        listing = pipeline | "listing" >> beam.Create([prepared.listing])
        return committed(listing, made, Wanted(request, job, features, context))


def _as_is(reject: Reject) -> Reject:
    return reject
