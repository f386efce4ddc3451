"""What each command of the trainer takes."""

from __future__ import annotations

import argparse
from pathlib import Path

from schemas.paths import SINGLE_WRITER, SINGLE_WRITER_HELP, ArgumentParser
from trainer.export_options import add_export
from trainer.serving_options import TLS_NAME, add_replica, add_store, not_negative, positive

WRITTEN = {"train": "output", "forget": "run", "store": "directory"}
"""Commands to the argument with the folder that they write to, where others may write, too."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = ArgumentParser(prog="python -m trainer", description="Train a model on a dataset.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("train", help="train a job on a dataset")
    run.add_argument("job", type=Path, help="job file")
    run.add_argument("--dataset", type=Path, required=True, help="dataset folder")
    run.add_argument("--output", type=Path, required=True, help="run folder")
    run.add_argument("--steps", type=positive, help="stop before this step")
    run.add_argument("--embedding", choices=("plain", "cached", "lru", "uncached"), default="plain")
    run.add_argument("--expanded", action="store_true", help="undo the deduplication")
    run.add_argument(
        "--fast", action="store_true", help="all samples of a step at once; bits are its own"
    )
    run.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    run.add_argument(
        "--start-from",
        type=Path,
        metavar="RUN",
        help="begin with the checkpoint of a finished run, on segments that it did not train",
    )
    run.add_argument("--segments", type=_names, metavar="ID,...", help="ids or days; no others")
    run.add_argument(
        "--expire-days",
        type=positive,
        metavar="N",
        help="with --start-from: drop rows that no segment of the last N days uses",
    )
    run.add_argument(
        "--follow",
        action="store_true",
        help="train while segments are built, until the dataset is finished",
    )
    run.add_argument(
        "--stores", type=positive, help="keep rows in so many store processes on this machine"
    )
    run.add_argument(
        "--replicas",
        type=not_negative,
        default=1,
        help="processes that train together; 0: all are started by hand",
    )
    run.add_argument("--host", default="127.0.0.1", help="where replicas find the lighthouse")
    run.add_argument("--port", type=not_negative, default=0, help="of the lighthouse")
    run.add_argument("--faults", default="[]", help="that are to happen to replicas, as JSON")
    add_replica(commands.add_parser("replica", help="one of the processes that train together"))
    score = commands.add_parser("evaluate", help="metrics of a run on the evaluation split")
    score.add_argument("job", type=Path, help="job file")
    score.add_argument("--dataset", type=Path, required=True, help="dataset folder")
    score.add_argument("--run", type=Path, required=True, help="run folder")
    score.add_argument(
        "--segments", type=_names, metavar="ID,...", help="ids or days, maybe others than the run's"
    )
    check = commands.add_parser("verify", help="every sample of every epoch trained exactly once")
    check.add_argument("run", type=Path, help="run folder")
    equal = commands.add_parser("equal", help="whether two runs left the same bits")
    equal.add_argument("run", type=Path, help="run folder")
    equal.add_argument("other", type=Path, help="run folder")
    add_export(commands)
    gone = commands.add_parser("forget", help="drop rows of some ids from all that a run keeps")
    gone.add_argument("run", type=Path, help="run folder")
    gone.add_argument("--ids", type=Path, required=True, help="text file, one id a line")
    gone.add_argument("--table", required=True, help="embedding table that they look into")
    add_store(commands.add_parser("store", help="serve rows to trainers, over Arrow Flight"))
    move = commands.add_parser("migrate-slots", help="move slots between stores that serve a run")
    move.add_argument(
        "--from", dest="givers", required=True, help="address of the store that has them"
    )
    move.add_argument("--to", required=True, help="address of who takes them")
    move.add_argument("--slots", required=True, help="START:END of 4,096[,...]")
    move.add_argument(
        "--served", action="store_true", help="those that any store of --from ADDRESS[,...] serves"
    )
    kill = commands.add_parser("kill-store", help="end a store as a failure would; nothing is lost")
    again = commands.add_parser("restart-store", help="start a store anew in its place")
    for command in (kill, again):
        command.add_argument("address", help="grpc://host:port, grpc+tls://host:port or file://")
    for command in (move, kill, again):
        command.add_argument("--token-file", type=Path, required=True, help="of the stores")
        command.add_argument("--trusted", type=Path, help="authorities of the stores, PEM")
        command.add_argument("--tls-name", help=TLS_NAME)
    agent = commands.add_parser("persist", help="write a trainer's checkpoints; it starts this")
    agent.add_argument("run", type=Path, help="run folder")
    agent.add_argument("--memory", type=Path, required=True, help="where the copies lie")
    agent.add_argument("--file", type=int, required=True, help="number of that open file")
    agent.add_argument("--keep", type=positive, required=True, help="checkpoints that remain")
    agent.add_argument("--parent", type=positive, required=True, help="process id of the trainer")
    for command in (run, score, check, equal, gone, move, kill, again):
        command.add_argument("--json", action="store_true", help="one JSON object on stdout")
    for name in WRITTEN:
        command = commands.choices[name]
        command.add_argument(SINGLE_WRITER, action="store_true", help=SINGLE_WRITER_HELP)
    return parser


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    if not names:
        raise argparse.ArgumentTypeError("must name at least one segment, got none")
    return names
