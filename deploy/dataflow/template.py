"""Begin a build on Dataflow and leave: what the launcher of a flex template runs.

The pipeline's last step commits the segment, as nobody waits for the job here.
"""

from __future__ import annotations

import logging
import sys
from argparse import ArgumentParser
from collections.abc import Sequence

import apache_beam as beam

from presage.pipelines.beam.io import BuildDataset
from presage.pipelines.beam.runner import parsed_options
from presage.schemas.errors import SchemaError

YES = ("true", "false")


def parser() -> ArgumentParser:
    """Return the parameters, as `template.json` names them; all others are Beam's."""
    made = ArgumentParser("template.py", description=__doc__, allow_abbrev=False)
    made.add_argument("--job", required=True, help="the job file, or its URL")
    made.add_argument("--input", required=True, help="directory of raw files, or its URL")
    made.add_argument("--output", required=True, help="directory of the dataset, or its URL")
    made.add_argument("--append", choices=YES, default="false", help="the dataset must be there")
    return made


def pipeline_of(arguments: Sequence[str]) -> beam.Pipeline:
    """Return the pipeline of a build.

    Args:
        arguments: `--name=value` of our parameters and of Beam's options.

    Raises:
        SchemaError: the job, the input or an option does not fit.
    """
    asked, beam_args = parser().parse_known_args(arguments)
    pipeline = beam.Pipeline(options=parsed_options(beam_args))
    made = pipeline | BuildDataset(
        asked.job,
        asked.input,
        asked.output,
        asked.append == "true",
    )
    _ = made["segment"] | "say segment" >> beam.Map(_say, "segment %s committed")
    _ = made["rejects"] | "say reject" >> beam.Map(_say, "rejected: %s")
    return pipeline


def _say(value: object, text: str) -> None:
    logging.getLogger("presage").info(text, value)


if __name__ == "__main__":
    try:
        pipeline_of(sys.argv[1:]).run()
    except SchemaError as error:
        sys.exit(f"error: {error}")
