"""Options of a build that Beam's own do not have; they go where Beam's options go."""

from __future__ import annotations

from argparse import ArgumentParser

from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions

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
