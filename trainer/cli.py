"""Command line of the trainer."""

from __future__ import annotations

import argparse
from pathlib import Path

from presage.schemas.paths import ArgumentParser, parse_store_address, path_or_url
from presage.schemas.storage.location import Location

TLS_NAME = "name in the others' certificates; default: the host of their address"


def add_replica(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `replica`."""
    parser.add_argument("run", type=path_or_url, help="run folder or URL of train --replicas")
    parser.add_argument("--number", type=int, required=True, help="of this replica, from 0")
    parser.add_argument("--host", default="127.0.0.1", help="beyond loopback only with TLS")
    _add_certificate(parser)
    parser.add_argument("--trusted", type=Path, help="authorities of other replicas, PEM")
    parser.add_argument("--tls-name", help=TLS_NAME)
    parser.add_argument(
        "--token-file", type=Path, help="of the replicas; default: RUN/token of a folder"
    )
    parser.add_argument("--expected", type=positive, default=1, help="replicas to wait for")
    parser.add_argument("--threads", type=positive, default=1, help="microbatches computed at once")
    parser.add_argument("--end-with-stdin", action="store_true", help="end when stdin is closed")


def add_store(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `store`."""
    parser.add_argument("--directory", type=Path, required=True, help="folder of its log")
    parser.add_argument(
        "--address-file",
        type=path_or_url,
        metavar="LOCATION",
        help="file or URL at which it publishes its address; default: DIRECTORY/address",
    )
    parser.add_argument(
        "--token-file", type=Path, required=True, help="token that callers must send"
    )
    parser.add_argument("--host", default="127.0.0.1", help="beyond loopback only with TLS")
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    _add_certificate(parser)
    parser.add_argument(
        "--fsync",
        choices=("checkpoint", "write"),
        default="checkpoint",
        help="when the log is forced to disk; default: checkpoint",
    )
    parser.add_argument(
        "--message-bytes", type=positive, default=4 << 20, help="of one message; default: 4 MiB"
    )
    parser.add_argument("--delay-sec", type=float, default=0.0, help="delay of every response")
    parser.add_argument("--end-with-stdin", action="store_true", help="end when stdin is closed")


def _add_certificate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tls-cert", type=Path, help="certificate chain, PEM")
    parser.add_argument("--tls-key", type=Path, help="its key, PEM")


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def not_negative(text: str) -> int:
    """Parse an integer of at least 0."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text}")
    return number


def add_export(commands: argparse._SubParsersAction[ArgumentParser]) -> None:
    """Add the commands that write models to serve."""
    export = commands.add_parser("export", help="one CPU artifact of a run's model, to serve")
    publish = commands.add_parser("publish", help="rows that changed between two checkpoints")
    for command in (export, publish):
        command.add_argument("run", type=path_or_url, help="run")
        command.add_argument(
            "--checkpoint", type=not_negative, help="step of the checkpoint; default: the newest"
        )
    publish.add_argument("--since", type=not_negative, required=True, help="older checkpoint")
    publish.add_argument("--output", type=path_or_url, required=True, help="new folder")
    apply = commands.add_parser("apply", help="apply published rows to an exported model")
    apply.add_argument("model", type=path_or_url, help="file from export")
    apply.add_argument("--changes", type=path_or_url, required=True, help="folder from publish")
    for command in (export, apply):
        command.add_argument("--output", type=path_or_url, required=True, help="file")
    for command in (export, publish, apply):
        command.add_argument("--json", action="store_true", help="one JSON object on stdout")


WRITTEN = {"train": "output", "erase": "run", "store": "directory"}
"""Command to the argument of the folder that it writes and that other processes may write."""


def build_parser(prog: str = "python -m presage.trainer") -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = ArgumentParser(prog=prog, description="Train a model on a dataset.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser("train", help="train a job on a dataset")
    run.add_argument("job", type=path_or_url, help="job file, or its URL")
    run.add_argument("--dataset", type=Location, required=True, help="path or URL")
    run.add_argument("--output", type=path_or_url, required=True, help="run folder or URL")
    run.add_argument("--steps", type=positive, help="stop before this step")
    run.add_argument(
        "--embedding",
        choices=("plain", "cached", "lru", "uncached"),
        default="plain",
        help="rows in memory, or in a store: behind the planned cache, an LRU cache, or none; "
        "default: plain",
    )
    run.add_argument("--expanded", action="store_true", help="undo the deduplication")
    run.add_argument(
        "--fast",
        action="store_true",
        help="all samples of a step at once; not bit-identical to the default mode",
    )
    run.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    run.add_argument(
        "--start-from",
        type=path_or_url,
        metavar="RUN",
        help="start from the checkpoint of a finished run, on segments that it did not train",
    )
    run.add_argument(
        "--rows-only",
        action="store_true",
        help="with --start-from: take its rows with their optimizer state, and new dense layers",
    )
    run.add_argument(
        "--segments", type=_names, metavar="ID,...", help="ids or days to train; default: all"
    )
    run.add_argument(
        "--expire-days",
        type=positive,
        metavar="N",
        help="with --start-from: drop rows that no segment of the last N days uses",
    )
    run.add_argument(
        "--follow",
        action="store_true",
        help="train while segments are built, until the dataset is sealed",
    )
    run.add_argument(
        "--stores",
        type=positive,
        help="number of store processes on this machine that keep the rows",
    )
    run.add_argument(
        "--replicas",
        type=not_negative,
        default=1,
        help="processes that train together; 0: all are started by hand",
    )
    run.add_argument(
        "--restarts",
        type=not_negative,
        default=0,
        help="how often training continues from its newest checkpoint after this process's child "
        "is killed; replicas are always restarted; default: 0",
    )
    run.add_argument("--host", default="127.0.0.1", help="of the lighthouse")
    run.add_argument("--port", type=not_negative, default=0, help="of the lighthouse")
    replica = commands.add_parser("replica", help="run one replica of train --replicas")
    add_replica(replica)
    score = commands.add_parser("evaluate", help="metrics of a run on the evaluation split")
    score.add_argument("job", type=path_or_url, help="job file, or its URL")
    score.add_argument("--dataset", type=Location, required=True, help="path or URL")
    score.add_argument("--run", type=path_or_url, required=True, help="run")
    score.add_argument(
        "--segments", type=_names, metavar="ID,...", help="ids or days; default: those of the run"
    )
    check = commands.add_parser("verify", help="every sample of every epoch trained exactly once")
    check.add_argument("run", type=path_or_url, help="run")
    diff = commands.add_parser("diff", help="compare two runs bit by bit")
    diff.add_argument("run", type=path_or_url, help="run")
    diff.add_argument("other", type=path_or_url, help="run")
    add_export(commands)
    erase = commands.add_parser("erase", help="remove the rows of some ids from a run")
    erase.add_argument("run", type=path_or_url, help="run")
    erase.add_argument("--ids", type=Path, required=True, help="text file, one id per line")
    erase.add_argument("--table", required=True, help="embedding table of the ids")
    for command in (run, replica, erase):
        command.add_argument(
            "--work",
            type=Path,
            metavar="DIR",
            help="directory for the local copy of a run at a URL; default: presage/runs in the "
            "cache directory of the user",
        )
    add_store(commands.add_parser("store", help="serve rows to trainers, over Arrow Flight"))
    move = commands.add_parser("migrate-slots", help="move slots between stores of a run")
    move.add_argument(
        "--from",
        dest="sources",
        type=_addresses,
        required=True,
        metavar="ADDRESS[,...]",
        help="stores, of whose slots those of --slots are moved: grpc://host:port, "
        "grpc+tls://host:port, or the file or URL of an --address-file",
    )
    move.add_argument("--to", type=_address, required=True, help="address of the target store")
    move.add_argument("--slots", required=True, help="START:END of 4,096[,...]")
    move.add_argument("--token-file", type=Path, required=True, help="of the stores")
    move.add_argument("--trusted", type=Path, help="authorities of the stores, PEM")
    move.add_argument("--tls-name", help=TLS_NAME)
    agent = commands.add_parser("agent")  # hidden: a trainer starts it
    agent.add_argument("run", type=Path, help="run folder")
    agent.add_argument("--memory", type=Path, required=True, help="folder of the copies")
    agent.add_argument("--file", type=int, required=True, help="descriptor of that open file")
    agent.add_argument("--keep", type=positive, required=True, help="number of checkpoints to keep")
    agent.add_argument("--parent", type=positive, required=True, help="process id of the trainer")
    for command in (run, score, check, diff, erase, move):
        command.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def _address(text: str) -> str:
    try:
        return parse_store_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _addresses(text: str) -> str:
    return ",".join(map(_address, text.split(",")))


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    if not names:
        raise argparse.ArgumentTypeError("must name at least one segment")
    return names
