"""Command line of the trainer: `python -m trainer --help`."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from schemas.errors import PlanError, SchemaError
from schemas.job import load_job


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(prog="python -m trainer", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("train", help="train a job on a dataset")
    run.add_argument("job", type=Path, help="job file")
    run.add_argument("--dataset", type=Path, required=True, help="dataset folder")
    run.add_argument("--output", type=Path, required=True, help="run folder")
    run.add_argument("--steps", type=_positive, help="stop before this step")
    run.add_argument("--embedding", choices=("plain", "cached", "lru", "uncached"), default="plain")
    run.add_argument("--expanded", action="store_true", help="undo the deduplication")
    run.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    score = commands.add_parser("evaluate", help="metrics of a run on the evaluation split")
    score.add_argument("job", type=Path, help="job file")
    score.add_argument("--dataset", type=Path, required=True, help="dataset folder")
    score.add_argument("--run", type=Path, required=True, help="run folder")
    check = commands.add_parser("verify", help="every sample of every epoch trained exactly once")
    check.add_argument("run", type=Path, help="run folder")
    for command in (run, score, check):
        command.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    arguments = build_parser().parse_args(argv)
    # Read once, when torch loads its OpenMP. Threads that spin while they wait cost five times
    # the step where cores are shared, with the reader's thread or with other processes.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # torchrec asks torch an old question while it is imported; torch's warning is not for the user.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    command = {"train": _train, "evaluate": _evaluate, "verify": _verify}[arguments.command]
    try:
        return command(arguments)
    except (SchemaError, PlanError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _set_threads(job: Path) -> None:
    import torch

    wanted = load_job(job).train.num_threads
    torch.set_num_threads(wanted or len(os.sched_getaffinity(0)))


def _train(arguments: argparse.Namespace) -> int:
    from schemas.events import to_line
    from trainer.progress import show_progress
    from trainer.train import TrainOptions, train

    _set_threads(arguments.job)
    options = TrainOptions(
        embedding=arguments.embedding,
        expanded=arguments.expanded,
        steps=arguments.steps,
        resume=arguments.resume,
    )
    with show_progress() as on_step:
        summary = train(
            arguments.job,
            arguments.dataset,
            arguments.output,
            options,
            clock=time.perf_counter,
            on_step=on_step,
        )
    _show(arguments, to_line(summary))
    return 0


def _evaluate(arguments: argparse.Namespace) -> int:
    from trainer.train import evaluate_run

    _set_threads(arguments.job)
    found = evaluate_run(arguments.job, arguments.dataset, arguments.run)
    _show(arguments, json.dumps(asdict(found), sort_keys=True))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from trainer.ledger import verify_run

    report = verify_run(arguments.run)
    _show(arguments, json.dumps(asdict(report), sort_keys=True))
    for problem in report.problems[:1]:
        print(f"{problem}; train on with --resume, or train again", file=sys.stderr)
    return 1 if report.problems else 0


def _show(arguments: argparse.Namespace, line: str) -> None:
    if arguments.json:
        print(line)
        return
    for name, value in json.loads(line).items():
        print(f"{name:>20} {value}")


if __name__ == "__main__":
    sys.exit(main())
