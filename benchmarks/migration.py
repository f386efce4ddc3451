"""What it costs a scheduled job when one of its processes dies: pause, lost work, replacement.

`python -m benchmarks.migration [--json] [--parts replica,lead,store,node,segment] [--rounds N]`

Real processes under `python -m scheduler run`, of which one is killed (`kill -9`): a replica of
two, the trainer of a job whose rows lie in two stores, one of these stores, both at once with the
store's directory as when their node is gone, a segment job.
`pause_sec` is the time without a new step, or in which nobody builds the segment; the peer is the
usual time between two steps before the kill, or that of building the segment. The bits of each run
are compared with those of one that nobody disturbed. All parts in each round, forwards and
backwards by turns (`migration_runs.py`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.migration_runs import KINDS, SAMPLES, measure, undisturbed, write_job
from benchmarks.recovery import in_rounds
from pipelines.demo_log.log import GeneratorConfig, write_log

PARTS = tuple(KINDS)


def headline(found: dict[str, list[dict[str, Any]]], part: str) -> dict[str, Any]:
    """Return the pause of one part beside the usual time of a step, or of a segment."""
    peer = "work_sec" if part == "segment" else "usual_gap_sec"
    pauses, usual = ([one[key] for one in found[part]] for key in ("pause_sec", peer))
    ratios = [b / a for a, b in zip(pauses, usual, strict=True)]
    return {
        "ours": round(statistics.median(pauses), 3),
        "peer": round(statistics.median(usual), 3),
        "ratio": round(statistics.median(ratios), 4),
        "unit": f"seconds of pause when a {part} is killed, against {peer.removesuffix('_sec')}",
        "rounds": [round(ratio, 4) for ratio in ratios],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print it, the headline first."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.migration")
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--parts", default=",".join(PARTS), help="by comma")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args(argv)
    parts = options.parts.split(",")
    if not set(parts) <= set(PARTS):
        parser.error(f"parts must be of {', '.join(PARTS)}, got {options.parts!r}")
    with tempfile.TemporaryDirectory(prefix="presage-migration-") as name:
        scratch = Path(name)
        log = scratch / "log"
        start = datetime(2026, 1, 1)
        write_log(GeneratorConfig(num_samples=SAMPLES, seed=1, start=start), log)
        kinds = dict.fromkeys(KINDS[part] for part in parts)
        jobs = {kind: write_job(scratch / f"job-{kind}", kind) for kind in kinds}
        alone = {kind: undisturbed(job, log, scratch / kind) for kind, job in jobs.items()}
        found = in_rounds(
            parts,
            options.rounds,
            lambda part: measure(part, jobs[KINDS[part]], log, alone[KINDS[part]], scratch),
        )
    equal = all(one["equal_bits"] for runs in found.values() for one in runs)
    result = headline(found, parts[0]) | {"equal_bits": equal, "parts": found}
    sys.stdout.write(json.dumps(result, indent=None if options.json else 2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
