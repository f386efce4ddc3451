"""Command line of the data pipelines."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import uuid
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

from rich.console import Console

from presage.pipelines.build import build, record_build_speed
from presage.pipelines.demo_log.example import generate_log, write_example
from presage.pipelines.init.first_job import init
from presage.pipelines.prepare import BuildInput, BuildOptions, BuildRequest
from presage.pipelines.preview import preview
from presage.pipelines.preview_text import WIDTH, show
from presage.pipelines.quality.gate import GateError
from presage.pipelines.rewrite.rewrite import RewriteRequest, rewrite
from presage.pipelines.table.commit import seal
from presage.pipelines.table.compact import CompactionRequest, compact_dataset
from presage.pipelines.table.delete import erase
from presage.pipelines.table.expand import expand
from presage.pipelines.table.indexes import oracle
from presage.pipelines.table.root import MIN_AGE
from presage.pipelines.table.target import SegmentTarget
from presage.pipelines.table.vacuum import vacuum
from presage.pipelines.table.verify import verify
from presage.schemas.config.job import load_job
from presage.schemas.errors import PlanError, SchemaError, pluralize, printable
from presage.schemas.paths import ALLOW_OUTSIDE, ALLOW_OUTSIDE_HELP, ArgumentParser, path_or_url
from presage.schemas.storage.location import Location
from presage.schemas.typed_values import parse_duration

DESCRIPTION = "Build, check and rewrite datasets."
DATASET = "path or URL of the dataset"
_WITHOUT_JSON = ("generate", "expand", "report")


def build_parser(prog: str = "python -m presage.pipelines") -> argparse.ArgumentParser:
    """Return the parser of all commands; commands in `_WITH_BEAM` pass unknown options to Beam."""
    parser = ArgumentParser(prog=prog, description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser("demo", help="write an example: a job, its log, and a dataset")
    command.add_argument("folder", type=Location, metavar="DIR", help="a directory or a URL")
    command.add_argument("--num-samples", type=int, metavar="N", help="default: 200000")

    command = commands.add_parser("generate", help="write the synthetic log of a job")
    command.add_argument("job", type=path_or_url, metavar="JOB", help="job file, or its URL")
    command.add_argument(
        "--output", type=Location, required=True, metavar="DIR", help="of the log, or a URL"
    )
    command.add_argument("--num-samples", type=int, metavar="N", help="default: those of the job")

    command = commands.add_parser("init", help="write a first job for the files of a folder")
    command.add_argument("folder", metavar="DIR", help="a directory or a URL")
    command.add_argument(
        "--output", type=path_or_url, required=True, metavar="JOBDIR", help="of job and schema"
    )

    command = commands.add_parser("preview", help="check a job on the first rows of its input")
    _add_log_options(command)
    command.add_argument("--rows", type=int, default=1000, metavar="N", help="rows to read")

    command = commands.add_parser("build", help="build a dataset from raw files")
    _add_segment_options(command)
    command.add_argument("--output", type=Location, required=True, metavar="DATASET", help=DATASET)

    command = commands.add_parser("append", help="add one more segment to a dataset")
    _add_segment_options(command)
    command.add_argument("--dataset", type=Location, required=True, metavar="DATASET", help=DATASET)
    command.add_argument(
        "--replace", action="store_true", help="replace the current version of the day"
    )
    command.add_argument("--position", type=int, metavar="N", help="position; default: last")
    command.add_argument(
        "--wait",
        type=parse_duration,
        default=timedelta(hours=1),
        metavar="TIME",
        help="maximum time for which --in-order waits",
    )
    command.add_argument(
        "--in-order",
        action="store_true",
        help="build now, commit when all segments before --position are committed",
    )

    command = commands.add_parser("seal", help="mark a dataset complete: append is refused")
    command.add_argument("dataset", type=Location, metavar="DATASET", help=DATASET)

    command = commands.add_parser("unseal", help="remove the mark: append is allowed again")
    command.add_argument("dataset", type=Location, metavar="DATASET", help=DATASET)

    command = commands.add_parser("vacuum", help="remove what no manifest names any more")
    command.add_argument("dataset", type=Location, metavar="DATASET", help=DATASET)
    command.add_argument(
        "--older-than",
        type=parse_duration,
        default=MIN_AGE,
        metavar="TIME",
        help="keep what was replaced or left by a killed build later; at least 7d",
    )

    command = commands.add_parser("rewrite", help="make a Parquet dataset smaller; keep all rows")
    command.add_argument("folder", metavar="DIR", help="a directory or a URL")
    command.add_argument("--output", type=Location, required=True, metavar="DATASET", help=DATASET)
    command.add_argument(
        "--layout",
        choices=("star", "flat"),
        default="star",
        help="deduplicated, or plain Parquet in a better order; default: star",
    )
    command.add_argument("--session", metavar="COLUMN", help="session key; default: by name")
    command.add_argument("--time", metavar="COLUMN", help="session order; default: by name")
    command.add_argument("--label", metavar="COLUMN", help="label, to train on the result")

    command = commands.add_parser("erase", help="delete the samples of some ids")
    command.add_argument("dataset", type=Location, metavar="DATASET", help=DATASET)
    command.add_argument(
        "--ids", type=path_or_url, metavar="FILE", help="text or Parquet file of ids"
    )
    command.add_argument("--column", metavar="NAME", help="of the ids; the session key by default")
    command.add_argument("--rewrite", action="store_true", help="remove them from all files")
    command.add_argument(
        "--older-than",
        type=parse_duration,
        default=timedelta(),
        metavar="TIME",
        help="rewrite segments whose samples were erased at least so long ago",
    )
    command.add_argument(
        "--rejects-older-than",
        type=parse_duration,
        metavar="TIME",
        help="remove rejects and late events that were written so long ago",
    )

    command = commands.add_parser("verify", help="recompute counts and checksums")
    command.add_argument("dataset", type=Location, metavar="DATASET", help=DATASET)

    command = commands.add_parser("expand", help="write the samples back, one row each")
    command.add_argument("dataset", type=Location, metavar="DATASET", help=DATASET)
    command.add_argument(
        "--output", type=Location, required=True, metavar="FILE.parquet", help="or a URL"
    )
    command.add_argument("--model-inputs", action="store_true", help="with transformed columns")

    command = commands.add_parser("report", help="write a page about a dataset and its runs")
    command.add_argument("dataset", type=Location, metavar="DATASET", help=DATASET)
    command.add_argument(
        "--html", type=Location, required=True, metavar="FILE.html", help="or a URL"
    )
    command.add_argument(
        "--runs", type=path_or_url, metavar="DIR", help="a run, or a folder of runs"
    )

    command = commands.add_parser("score", help="score samples by an exported model")
    command.add_argument("model", type=path_or_url, metavar="MODEL", help="from `trainer export`")
    command.add_argument("--dataset", type=Location, required=True, metavar="DATASET", help=DATASET)
    command.add_argument(
        "--output", type=Location, required=True, metavar="DIR", help="of the scores, or a URL"
    )
    command.add_argument(
        "--split", choices=("all", "evaluation", "train"), default="all", help="default: all"
    )
    command.add_argument("--segments", type=_names, metavar="ID,...", help="ids or days")

    command = commands.add_parser("oracle", help="predict the cache, and build other indexes")
    command.add_argument("dataset", type=Location, metavar="DATASET", help=DATASET)
    command.add_argument("--reindex", action="store_true", help="build an index for these settings")
    command.add_argument("--segments", type=_names, metavar="ID,...", help="ids or days")
    command.add_argument("--batch-samples", type=int, metavar="N", help="default: data.oracle")
    command.add_argument("--epochs", type=int, metavar="N", help="default: data.oracle")
    command.add_argument("--shuffle", choices=("none", "blocks"), help="order of the blocks")
    command.add_argument("--seed", type=int, metavar="N", help="seed of the shuffle")
    command.add_argument(
        "--history",
        action="append",
        metavar="NAME=LENGTH[:STEP]",
        help="window of a history whose rows are accesses, too",
    )
    command.add_argument("--lookahead", type=int, metavar="N", help="steps; default: train.cache")
    command.add_argument("--cache-rows", type=int, metavar="N", help="cache capacity per table")
    command.add_argument(
        "--hints", type=path_or_url, metavar="FILE", help="write TorchRec's planner hints"
    )
    for name, command in commands.choices.items():
        if name not in _WITHOUT_JSON:
            command.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def _add_log_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("job", type=path_or_url, metavar="JOB", help="job file, or its URL")
    command.add_argument("--input", required=True, metavar="DIR", help="a directory or a URL")
    command.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATH",
        help="read this file of --input, and others that are named so; default: all",
    )
    command.add_argument(
        "--day",
        type=_day,
        metavar="DATE",
        help="day of the segment, such as 2026-04-09",
    )
    command.add_argument(ALLOW_OUTSIDE, action="store_true", help=ALLOW_OUTSIDE_HELP)


def _add_segment_options(command: argparse.ArgumentParser) -> None:
    _add_log_options(command)
    command.add_argument("--final", action="store_true", help="seal the dataset after this segment")
    command.add_argument(
        "--check-sql",
        action="store_true",
        help="map all rows twice, in chunks cut at other rows, and compare",
    )


def _day(text: str) -> str:
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"must be a date, got {text!r}; write 2026-04-09"
        ) from error


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    if not names:
        raise argparse.ArgumentTypeError("no segment named")
    return names


# Commands. Modules that import Beam or torch, which takes seconds, are imported where needed.

REFUSED = 3
"""Exit code of a build whose segment the quality gate refused."""


def main(argv: Sequence[str] | None = None, prog: str = "python -m presage.pipelines") -> int:
    """Run one command.

    Returns:
        0; 1 after an error, printed to stderr as one line; 3 when the quality gate refused the
        segment that was built, with a line for each finding on stderr.
    """
    parser = build_parser(prog)
    arguments, beam_args = parser.parse_known_args(argv)
    if beam_args and arguments.command not in _WITH_BEAM:
        parser.error(f"unrecognized arguments: {' '.join(beam_args)}")
    try:
        return _COMMANDS[arguments.command](arguments, beam_args)
    except GateError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return REFUSED
    except (SchemaError, PlanError, ValueError, OSError) as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 1


def _print_result(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    print(json.dumps(result, indent=None if arguments.json else 1))


def _progress(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


def _new_attempt() -> str:
    return uuid.uuid4().hex[:12]


def _demo(arguments: argparse.Namespace, beam_args: list[str]) -> int:
    result = write_example(
        arguments.folder,
        num_samples=arguments.num_samples,
        attempt=_new_attempt(),
        beam_args=beam_args,
        progress=_progress,
    )
    _print_result(arguments, result)
    return 0


def _generate(arguments: argparse.Namespace, _: list[str]) -> int:
    config = load_job(arguments.job).data.generate
    if config is None:
        raise SchemaError("job has no data.generate; use schemas/demo/job.yaml")
    num_files = generate_log(config, arguments.output, arguments.num_samples)
    print(f"wrote {num_files} files to {arguments.output}", file=sys.stderr)
    return 0


def _build(arguments: argparse.Namespace, beam_args: list[str]) -> int:
    target = SegmentTarget(
        arguments.output, _new_attempt(), day=arguments.day, final=arguments.final
    )
    return _build_segment(arguments, beam_args, target)


def _append(arguments: argparse.Namespace, beam_args: list[str]) -> int:
    if arguments.in_order and arguments.position is None:
        raise ValueError("--in-order needs --position; name the position")
    if arguments.day is not None and arguments.position is not None:
        raise ValueError("--day and --position exclude each other; the day is the position")
    if arguments.replace and arguments.day is None:
        raise ValueError("--replace needs --day; name the day")
    target = SegmentTarget(
        dataset=arguments.dataset,
        attempt=_new_attempt(),
        append=True,
        position=arguments.position,
        day=arguments.day,
        replaces=arguments.replace,
        in_order=arguments.in_order,
        wait_sec=arguments.wait.total_seconds(),
        final=arguments.final,
    )
    return _build_segment(arguments, beam_args, target)


def _build_segment(
    arguments: argparse.Namespace, beam_args: list[str], target: SegmentTarget
) -> int:
    startup = _process_age()
    request = BuildRequest(
        BuildInput(
            job_path=arguments.job,
            root=arguments.input,
            only=tuple(arguments.only),
            allow_outside=arguments.allow_outside,
        ),
        target,
        BuildOptions(beam_args, check_sql=arguments.check_sql, progress=_progress),
    )
    result = {**build(request), "startup_sec": round(startup, 3)}
    record_build_speed(target.dataset, result, beam_args)
    _print_result(arguments, result)
    return 0


def _process_age() -> float:
    """Return the seconds since this process started."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - ticks / os.sysconf("SC_CLK_TCK")


def _init(arguments: argparse.Namespace, _: list[str]) -> int:
    result = init(arguments.folder, arguments.output, _progress)
    if arguments.json:
        print(json.dumps(result))
        return 0
    for note in result["notes"]:
        print(f"note: {note}")
    job, first = result["job"], pluralize(result["num_samples"], "sample")
    print(f"wrote {job}: its first rows give {first} and {result['num_rejects']} rejects")
    print(f"correct it, then: presage preview {job} --input {arguments.folder}")
    return 0


def _preview(arguments: argparse.Namespace, _: list[str]) -> int:
    result = preview(
        arguments.job,
        arguments.input,
        only=tuple(arguments.only),
        rows=arguments.rows,
        day=arguments.day,
        allow_outside=arguments.allow_outside,
        progress=_progress,
    )
    if arguments.json:
        print(json.dumps(result))
    else:
        show(result, Console(width=WIDTH))
    return 0


def _rewrite(arguments: argparse.Namespace, beam_args: list[str]) -> int:
    request = RewriteRequest(
        folder=arguments.folder,
        output=arguments.output,
        layout=arguments.layout,
        session=arguments.session,
        time=arguments.time,
        label=arguments.label,
        beam_args=beam_args,
        attempt=_new_attempt(),
        progress=_progress,
    )
    _print_result(arguments, rewrite(request))
    return 0


def _seal(arguments: argparse.Namespace, _: list[str]) -> int:
    manifest = seal(arguments.dataset, sealed=arguments.command == "seal")
    result = {"num_segments": len(manifest.segments), "sealed": manifest.sealed}
    _print_result(arguments, result)
    return 0


def _vacuum(arguments: argparse.Namespace, _: list[str]) -> int:
    _print_result(arguments, vacuum(arguments.dataset, arguments.older_than))
    return 0


def _erase(arguments: argparse.Namespace, beam_args: list[str]) -> int:
    rewrites = arguments.rewrite or arguments.rejects_older_than is not None
    if arguments.ids is None and not rewrites:
        raise ValueError("erase needs --ids or --rewrite; name a file of ids")
    now = datetime.now(UTC)
    result: dict[str, Any] = {}
    if arguments.ids is not None:
        result["erased"] = erase(arguments.dataset, arguments.ids, arguments.column, now)
    if rewrites:
        compaction = CompactionRequest(
            dataset=arguments.dataset,
            older_than=arguments.older_than if arguments.rewrite else None,
            rejects_older_than=arguments.rejects_older_than,
            ids=arguments.ids,
            column=arguments.column,
            at=now,
            beam_args=beam_args,
            attempt=_new_attempt(),
            progress=_progress,
        )
        result["rewritten"] = compact_dataset(compaction)
    _print_result(arguments, result)
    return 0


def _verify(arguments: argparse.Namespace, _: list[str]) -> int:
    result = verify(arguments.dataset)
    _print_result(arguments, result)
    for problem in result["problems"]:
        print(printable(f"error: {problem}"), file=sys.stderr)
    if result["problems"]:
        verdict = pluralize(len(result["problems"]), "problem")
    else:
        segments = pluralize(result["num_segments"], "segment")
        verdict = f"ok, {pluralize(result['num_samples'], 'sample')}, {segments}"
    print(f"verify: {verdict}", file=sys.stderr if arguments.json else sys.stdout)
    return 1 if result["problems"] else 0


def _expand(arguments: argparse.Namespace, _: list[str]) -> int:
    rows = expand(arguments.dataset, arguments.output, model_inputs=arguments.model_inputs)
    print(f"wrote {rows} samples to {arguments.output}", file=sys.stderr)
    return 0


def _report(arguments: argparse.Namespace, _: list[str]) -> int:
    page = importlib.import_module(
        "presage.pipelines.report.report_page"
    )  # imports matplotlib: 1.5 s
    page.write_report(arguments.dataset, arguments.html, arguments.runs)
    print(f"wrote {arguments.html}", file=sys.stderr)
    return 0


def _score(arguments: argparse.Namespace, beam_args: list[str]) -> int:
    module = importlib.import_module("presage.pipelines.beam.score")  # imports Beam
    result = module.score(
        arguments.model,
        arguments.dataset,
        arguments.output,
        split=arguments.split,
        segments=arguments.segments,
        beam_args=beam_args,
    )
    _print_result(arguments, result)
    return 0


def _oracle(arguments: argparse.Namespace, beam_args: list[str]) -> int:
    _print_result(arguments, oracle(arguments, beam_args))
    return 0


_COMMANDS = {
    "demo": _demo,
    "generate": _generate,
    "init": _init,
    "preview": _preview,
    "build": _build,
    "append": _append,
    "seal": _seal,
    "unseal": _seal,
    "vacuum": _vacuum,
    "rewrite": _rewrite,
    "erase": _erase,
    "verify": _verify,
    "expand": _expand,
    "report": _report,
    "score": _score,
    "oracle": _oracle,
}
_WITH_BEAM = ("demo", "build", "append", "rewrite", "erase", "score", "oracle")
"""Commands that pass options they do not define to Beam."""
