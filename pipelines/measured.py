"""How fast builds on this machine were: a line for each, beside the dataset's manifest.

`python -m scheduler plan JOB --dataset DATASET` reads it. It is no part of the dataset: no
manifest names it, and it may be removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.prepare import num_parts_of
from pipelines.runners import in_process, runner_module
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
    workers = 1
    bundles = num_parts_of(result["input_bytes"])
    if not in_process(beam_args, is_small=bundles == 1):
        workers = runner_module("runner").local_processes(beam_args, bundles)
    if not result["built"] or workers is None:
        return
    line = canonical_json({**{name: result[name] for name in _KEPT}, "num_workers": workers})
    with (dataset / BUILDS).open("ab") as file:
        file.write(f"{line}\n".encode())
