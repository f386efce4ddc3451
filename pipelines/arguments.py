"""What each command of the data pipelines takes on its command line."""

from __future__ import annotations

import argparse
from datetime import date, timedelta
from pathlib import Path

from schemas.declare import parse_duration
from schemas.paths import (
    ALLOW_OUTSIDE,
    ALLOW_OUTSIDE_HELP,
    SINGLE_WRITER,
    SINGLE_WRITER_HELP,
    ArgumentParser,
)

DESCRIPTION = "Build, check and rewrite datasets."
WRITTEN = {
    "build": "output",
    "append": "dataset",
    "finish": "dataset",
    "prune": "dataset",
    "rewrite": "output",
    "forget": "dataset",
    "score": "output",
    "oracle": "dataset",
}
"""Commands to the argument with the folder that they write to, where others may write, too."""
_WITHOUT_JSON = ("generate", "expand", "report")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; what those of `_WITH_BEAM` do not know goes there."""
    parser = ArgumentParser(prog="python -m pipelines", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser("generate", help="write the synthetic log of a job")
    command.add_argument("job", type=Path, metavar="JOB")
    command.add_argument("--output", type=Path, required=True, metavar="DIR")
    command.add_argument("--num-samples", type=int, metavar="N")

    command = commands.add_parser("init", help="write a first job for the files of a folder")
    command.add_argument("folder", metavar="DIR", help="a directory or a URL")
    command.add_argument("--output", type=Path, required=True, metavar="JOBDIR")

    command = commands.add_parser("preview", help="what a build would see, in seconds")
    _add_log_options(command)
    command.add_argument("--rows", type=int, default=1000, metavar="N", help="rows to read")

    command = commands.add_parser("build", help="build a dataset from raw files")
    _add_segment_options(command)
    command.add_argument("--output", type=Path, required=True, metavar="DATASET")

    command = commands.add_parser("append", help="add one more segment to a dataset")
    _add_segment_options(command)
    command.add_argument("--dataset", type=Path, required=True, metavar="DATASET")
    command.add_argument(
        "--replace", action="store_true", help="put a new version of the day in the place of it"
    )
    command.add_argument("--position", type=int, metavar="N", help="place; the last by default")
    command.add_argument(
        "--in-order",
        action="store_true",
        help="build at once, enter the dataset when all segments before --position are there",
    )

    command = commands.add_parser("finish", help="say that no segment follows")
    command.add_argument("dataset", type=Path, metavar="DATASET")
    command.add_argument("--reopen", action="store_true", help="take it back: segments may follow")

    command = commands.add_parser("prune", help="remove segments and indexes that were replaced")
    command.add_argument("dataset", type=Path, metavar="DATASET")

    command = commands.add_parser("rewrite", help="make a Parquet dataset smaller, every row kept")
    command.add_argument("folder", type=Path, metavar="DIR")
    command.add_argument("--output", type=Path, required=True, metavar="DATASET")
    command.add_argument("--layout", choices=("star", "flat"), default="star")
    command.add_argument("--session", metavar="COLUMN", help="session key; guessed by its name")
    command.add_argument("--time", metavar="COLUMN", help="order in a session; guessed by its name")
    command.add_argument("--label", metavar="COLUMN", help="make a star schema to train on")

    command = commands.add_parser("forget", help="give samples weight 0, or write them out")
    command.add_argument("dataset", type=Path, metavar="DATASET")
    command.add_argument("--ids", type=Path, metavar="FILE", help="text or Parquet file of ids")
    command.add_argument("--column", metavar="NAME", help="of the ids; the session key by default")
    command.add_argument("--rewrite", action="store_true", help="remove them from all files")
    command.add_argument(
        "--older-than",
        type=parse_duration,
        default=timedelta(),
        metavar="TIME",
        help="rewrite what was forgotten so long ago",
    )
    command.add_argument(
        "--rejects-older-than",
        type=parse_duration,
        metavar="TIME",
        help="remove rejects and late events that were written so long ago",
    )

    command = commands.add_parser("verify", help="recompute counts and checksums")
    command.add_argument("dataset", type=Path, metavar="DATASET")

    command = commands.add_parser("expand", help="write the samples back, one row each")
    command.add_argument("dataset", type=Path, metavar="DATASET")
    command.add_argument("--output", type=Path, required=True, metavar="FILE.parquet")
    command.add_argument("--model-inputs", action="store_true", help="with transformed columns")

    command = commands.add_parser("report", help="write a page about a dataset and its runs")
    command.add_argument("dataset", type=Path, metavar="DATASET")
    command.add_argument("--html", type=Path, required=True, metavar="FILE.html")
    command.add_argument("--runs", type=Path, metavar="DIR", help="a run, or a folder of runs")

    command = commands.add_parser("score", help="score samples by an exported model")
    command.add_argument("model", type=Path, metavar="MODEL", help="from `trainer export`")
    command.add_argument("--dataset", type=Path, required=True, metavar="DATASET")
    command.add_argument("--output", type=Path, required=True, metavar="DIR")
    command.add_argument("--split", choices=("all", "evaluation", "train"), default="all")
    command.add_argument("--segments", type=_names, metavar="ID,...", help="ids or days; all")

    command = commands.add_parser("oracle", help="what the cache will do, and other indexes")
    command.add_argument("dataset", type=Path, metavar="DATASET")
    command.add_argument("--reindex", action="store_true", help="build an index for these settings")
    command.add_argument(
        "--segments", type=_names, metavar="ID,...", help="ids or days; all by default"
    )
    command.add_argument("--batch-samples", type=int, metavar="N")
    command.add_argument("--epochs", type=int, metavar="N")
    command.add_argument("--shuffle", choices=("none", "blocks"), help="order of the blocks")
    command.add_argument("--seed", type=int, metavar="N", help="of the shuffle")
    command.add_argument("--lookahead", type=int, metavar="N", help="steps; train.cache by default")
    command.add_argument("--cache-rows", type=int, metavar="N", help="most rows of each table")
    command.add_argument(
        "--hints", type=Path, metavar="FILE", help="write TorchRec's planner hints"
    )
    for name in WRITTEN:
        command = commands.choices[name]
        command.add_argument(SINGLE_WRITER, action="store_true", help=SINGLE_WRITER_HELP)
    for name, command in commands.choices.items():
        if name not in _WITHOUT_JSON:
            command.add_argument("--json", action="store_true")
    return parser


def _add_log_options(command: argparse.ArgumentParser) -> None:
    """Add what every command takes that runs a job over a log."""
    command.add_argument("job", type=Path, metavar="JOB")
    command.add_argument("--input", required=True, metavar="DIR", help="a directory or a URL")
    command.add_argument(
        "--day", type=_day, metavar="DATE", help="label and place, such as 2026-04-09"
    )
    command.add_argument(ALLOW_OUTSIDE, action="store_true", help=ALLOW_OUTSIDE_HELP)


def _add_segment_options(command: argparse.ArgumentParser) -> None:
    """Add what the commands take that build a segment."""
    _add_log_options(command)
    command.add_argument("--last", action="store_true", help="no segment follows this one")
    command.add_argument("--check-sql", action="store_true", help="compare three cuts of the rows")


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"must be a date, got {text!r}; write 2026-04-09"
        ) from error


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    if not names:
        raise argparse.ArgumentTypeError("must name at least one segment, got none")
    return names
