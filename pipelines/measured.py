"""How fast builds on this machine were: a line for each, beside the dataset's manifest.

`python -m scheduler plan JOB --dataset DATASET` reads it. It is no part of the dataset: no
manifest names it, and it may be removed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from apache_beam.options.pipeline_options import DirectOptions

from pipelines.beam.runner import local_runner, local_workers, pipeline_options
from pipelines.build import PART_INPUT_BYTES
from schemas.layout import BUILDS
from schemas.manifest import canonical_json

_KEPT = ("segment", "num_samples", "startup_sec", "rows_per_sec")


def keep_measurement(dataset: Path, result: Mapping[str, Any], beam_args: Sequence[str]) -> None:
    """Add a line for a build, unless it found its segment there or ran on a cluster.

    Args:
        dataset: directory of the dataset.
        result: what `build --json` prints.
        beam_args: Beam options of the build.
    """
    bundles = -(-result["input_bytes"] // PART_INPUT_BYTES)
    options = pipeline_options([*local_workers(beam_args, bundles), *beam_args])
    if not result["built"] or local_runner(options) is None:
        return
    direct = options.view_as(DirectOptions)
    # Threads wait for each other, so many of them are one worker.
    workers = 1
    if direct.direct_running_mode == "multi_processing":
        workers = direct.direct_num_workers or len(os.sched_getaffinity(0))
    line = canonical_json({**{name: result[name] for name in _KEPT}, "num_workers": workers})
    with (dataset / BUILDS).open("ab") as file:
        file.write(f"{line}\n".encode())
