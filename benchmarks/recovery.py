"""What failures cost: of a replica, of a store, of the whole run; and what moving slots costs.

`python -m benchmarks.recovery [--json] [--parts replicas,stores] [--samples N] [--rounds N]`

Told of each failure are the seconds from then to the next step that was not committed before, and
the steps that were trained again. Of replicas (`recovery_replicas.py`) also the seconds until all
train again and the longest time between two commits while the lost one came back, beside the usual
time; of stores (`recovery_stores.py`) the longest time between two commits until the next
checkpoint. The peer is `torchrun` over TorchRec's sharded tables, which starts all processes again
and goes on from the newest checkpoint; beside it our own launcher, killed and started with
`--resume`. All in the same rounds, forwards and backwards by turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks import recovery_replicas, recovery_stores
from benchmarks.order import built
from pipelines.demo_log.log import GeneratorConfig, write_log

Found = dict[str, list[dict[str, Any]]]
PARTS = ("replicas", "stores")


def in_rounds(
    scenarios: Iterable[str], rounds: int, measure: Callable[[str], dict[str, Any]]
) -> Found:
    """Return what each scenario cost in each round."""
    found: Found = {scenario: [] for scenario in scenarios}
    for number in range(rounds):
        for scenario in found if number % 2 == 0 else reversed(found):
            found[scenario].append(measure(scenario))
            sys.stderr.write(f"{scenario}: {json.dumps(found[scenario][-1])}\n")
    return found


def of_replicas(log: Path, scratch: Path, rounds: int) -> Found:
    """Return what failures of replicas cost."""
    job = recovery_replicas.write_job(scratch / "job-replicas")
    dataset = built(job, log, scratch / "dataset-replicas")
    alone = recovery_replicas.undisturbed(job, dataset, scratch / "alone")
    return in_rounds(
        recovery_replicas.SCENARIOS,
        rounds,
        lambda scenario: recovery_replicas.measure(scenario, job, dataset, alone, scratch),
    )


def of_stores(log: Path, scratch: Path, rounds: int) -> Found:
    """Return what failures of stores cost."""
    job = recovery_stores.write_job(scratch / "job-stores", None, 1)
    dataset = built(job, log, scratch / "dataset-stores")
    return in_rounds(
        recovery_stores.SCENARIOS,
        rounds,
        lambda scenario: recovery_stores.measure(scenario, dataset, scratch),
    )


def headline(found: Found, ours: str, peer: str) -> dict[str, Any]:
    """Return the seconds to the next new step of two scenarios, and their ratio by round."""
    mine, theirs = ([one["next_step_sec"] for one in found[name]] for name in (ours, peer))
    ratios = [b / a for a, b in zip(mine, theirs, strict=True)]
    return {
        "ours": round(statistics.median(mine), 3),
        "peer": round(statistics.median(theirs), 3),
        "ratio": round(statistics.median(ratios), 3),
        "unit": f"seconds to the next new step: {ours} against {peer}",
        "rounds": [round(ratio, 3) for ratio in ratios],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print it, the headline first."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery")
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--parts", default=",".join(PARTS), help="by comma")
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args(argv)
    parts = options.parts.split(",")
    if not set(parts) <= set(PARTS):
        parser.error(f"parts must be of {', '.join(PARTS)}, got {options.parts!r}")
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="presage-recovery-") as name:
        scratch = Path(name)
        log = scratch / "log"
        start = datetime(2026, 1, 1)
        write_log(GeneratorConfig(num_samples=options.samples, seed=1, start=start), log)
        if "replicas" in parts:
            found = of_replicas(log, scratch, options.rounds)
            equal = [one.get("equal_bits", True) for runs in found.values() for one in runs]
            result |= headline(found, "killed", recovery_replicas.TORCHRUN)
            result |= {"equal_bits": all(equal), "replicas": found}
        if "stores" in parts:
            found = of_stores(log, scratch, options.rounds)
            losses = {one["loss_last"] for runs in found.values() for one in runs}
            if "replicas" not in parts:
                result |= headline(found, "process", "everything")
            result |= {"equal_losses": len(losses) == 1, "stores": found}
    sys.stdout.write(json.dumps(result, indent=None if options.json else 2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
