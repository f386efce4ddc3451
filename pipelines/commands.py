"""Which function each command of the data pipelines calls.

Modules that import Beam, which takes seconds, are loaded by the commands that run on it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import uuid
from collections.abc import Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from pipelines.arguments import WRITTEN, build_parser
from pipelines.build import build
from pipelines.forget.at_once import ForgetRequest, forget
from pipelines.gate.judge import GateError
from pipelines.generator.log import GeneratorConfig, write_log
from pipelines.init.init import InitRequest, init
from pipelines.measured import keep_measurement
from pipelines.oracle.command import oracle
from pipelines.parts.expand import expand
from pipelines.prepare import BuildRequest
from pipelines.preview.preview import PreviewRequest, preview
from pipelines.preview.show import WIDTH, show
from pipelines.segments.finish import finish
from pipelines.segments.prune import prune
from pipelines.segments.verify import verify
from schemas.errors import PlanError, SchemaError, counted
from schemas.job import load_job
from schemas.paths import check_writable

REFUSED = 3
"""Exit code of a build whose segment did not pass the gate."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0, or 1 when something does not fit; the one line that says what is on stderr. 3 when a
        segment was built, but did not pass the gate; stderr has a line for each finding.
    """
    parser = build_parser()
    arguments, beam_args = parser.parse_known_args(argv)
    if beam_args and arguments.command not in _WITH_BEAM:
        parser.error(f"unrecognized arguments: {' '.join(beam_args)}")
    try:
        if arguments.command in WRITTEN and getattr(arguments, "reindex", True):
            place = getattr(arguments, WRITTEN[arguments.command])
            check_writable(place, single_writer=arguments.single_writer)
        return _COMMANDS[arguments.command](arguments, beam_args)
    except GateError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    except (SchemaError, PlanError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _say(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    if arguments.json:
        print(json.dumps(result))
    else:
        print(json.dumps(result, indent=1))


def _generate(arguments: argparse.Namespace, _: list[str]) -> int:
    config = load_job(arguments.job).data.generate
    if config is None:
        raise SchemaError("job must have data.generate, got none; use schemas/demo/job.yaml")
    num_samples = arguments.num_samples
    files = write_log(
        GeneratorConfig(
            num_samples=config.num_samples if num_samples is None else num_samples,
            seed=config.seed,
            start=config.start,
            span=config.span,
        ),
        arguments.output,
    )
    print(f"wrote {len(files)} files to {arguments.output}", file=sys.stderr)
    return 0


def _build(arguments: argparse.Namespace, beam_args: list[str]) -> int:
    startup = time.time() - _process_start()
    request = BuildRequest(
        job_path=arguments.job,
        input_root=arguments.input,
        dataset=arguments.output,
        beam_args=beam_args,
        attempt=uuid.uuid4().hex[:12],
        check_sql=arguments.check_sql,
        allow_outside=arguments.allow_outside,
        last=arguments.last,
        day=_text_of(arguments.day),
        say=_progress,
    )
    result = {**build(request), "startup_sec": round(startup, 3)}
    keep_measurement(request.dataset, result, beam_args)
    _say(arguments, result)
    return 0


def _init(arguments: argparse.Namespace, _: list[str]) -> int:
    request = InitRequest(input_root=arguments.folder, output=arguments.output, say=_progress)
    _say(arguments, init(request))
    return 0


def _preview(arguments: argparse.Namespace, _: list[str]) -> int:
    result = preview(
        PreviewRequest(
            job_path=arguments.job,
            input_root=arguments.input,
            rows=arguments.rows,
            day=_text_of(arguments.day),
            allow_outside=arguments.allow_outside,
            say=_progress,
        )
    )
    if arguments.json:
        print(json.dumps(result))
    else:
        show(result, Console(width=WIDTH))
    return 0


def _text_of(day: date | None) -> str | None:
    return None if day is None else day.isoformat()


def _check_place(arguments: argparse.Namespace) -> None:
    """Refuse two ways of saying where a segment stands."""
    if arguments.in_order and arguments.position is None:
        raise ValueError("--in-order must come with --position, got none; name the place")
    if arguments.day is not None and arguments.position is not None:
        raise ValueError("--day must come without --position, got both; the day is the place")
    if arguments.replace and arguments.day is None:
        raise ValueError("--replace must come with --day, got none; name the day")


def _append(arguments: argparse.Namespace, beam_args: list[str]) -> int:
    _check_place(arguments)
    startup = time.time() - _process_start()
    request = BuildRequest(
        job_path=arguments.job,
        input_root=arguments.input,
        dataset=arguments.dataset,
        beam_args=beam_args,
        attempt=uuid.uuid4().hex[:12],
        check_sql=arguments.check_sql,
        allow_outside=arguments.allow_outside,
        append=True,
        position=arguments.position,
        day=_text_of(arguments.day),
        replaces=arguments.replace,
        in_order=arguments.in_order,
        last=arguments.last,
        say=_progress,
    )
    result = {**build(request), "startup_sec": round(startup, 3)}
    keep_measurement(request.dataset, result, beam_args)
    _say(arguments, result)
    return 0


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _process_start() -> float:
    """Return when this process started, in seconds since the epoch."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    boot = next(
        float(line.split()[1])
        for line in Path("/proc/stat").read_text().splitlines()
        if line.startswith("btime")
    )
    return boot + ticks / os.sysconf("SC_CLK_TCK")


def _rewrite(arguments: argparse.Namespace, beam_args: list[str]) -> int:
    module = importlib.import_module("pipelines.rewrite.command")  # brings Beam
    request = module.RewriteRequest(
        folder=arguments.folder,
        output=arguments.output,
        layout=arguments.layout,
        session=arguments.session,
        time=arguments.time,
        label=arguments.label,
        beam_args=beam_args,
        attempt=uuid.uuid4().hex[:12],
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )
    _say(arguments, module.rewrite(request))
    return 0


def _finish(arguments: argparse.Namespace, _: list[str]) -> int:
    manifest = finish(arguments.dataset, finished=not arguments.reopen)
    _say(arguments, {"num_segments": len(manifest.segments), "finished": manifest.finished})
    return 0


def _prune(arguments: argparse.Namespace, _: list[str]) -> int:
    _say(arguments, prune(arguments.dataset))
    return 0


def _forget(arguments: argparse.Namespace, beam_args: list[str]) -> int:
    rewrites = arguments.rewrite or arguments.rejects_older_than is not None
    if arguments.ids is None and not rewrites:
        raise ValueError("forget must have --ids or --rewrite, got neither; name a file of ids")
    now = datetime.now(UTC)
    found: dict[str, Any] = {}
    if arguments.ids is not None:
        request = ForgetRequest(
            dataset=arguments.dataset, ids=arguments.ids, column=arguments.column, at=now
        )
        found["forgotten"] = forget(request)
    if rewrites:
        module = importlib.import_module("pipelines.forget.rewriting")  # brings Beam
        rewriting = module.RewriteRequest(
            dataset=arguments.dataset,
            older_than=arguments.older_than if arguments.rewrite else None,
            rejects_older_than=arguments.rejects_older_than,
            ids=arguments.ids,
            column=arguments.column,
            at=now,
            beam_args=beam_args,
            attempt=uuid.uuid4().hex[:12],
            say=_progress,
        )
        found["rewritten"] = module.rewrite(rewriting)
    _say(arguments, found)
    return 0


def _verify(arguments: argparse.Namespace, _: list[str]) -> int:
    result = verify(arguments.dataset)
    _say(arguments, result)
    for problem in result["problems"]:
        print(f"error: {problem}", file=sys.stderr)
    if result["problems"]:
        verdict = counted(len(result["problems"]), "problem")
    else:
        segments = counted(result["num_segments"], "segment")
        verdict = f"ok, {counted(result['num_samples'], 'sample')}, {segments}"
    print(f"verify: {verdict}", file=sys.stderr if arguments.json else sys.stdout)
    return 1 if result["problems"] else 0


def _expand(arguments: argparse.Namespace, _: list[str]) -> int:
    rows = expand(arguments.dataset, arguments.output, model_inputs=arguments.model_inputs)
    print(f"wrote {rows} samples to {arguments.output}", file=sys.stderr)
    return 0


def _report(arguments: argparse.Namespace, _: list[str]) -> int:
    page = importlib.import_module("pipelines.report.page")  # brings matplotlib, 1.5 s: only here
    page.write_report(arguments.dataset, arguments.html, arguments.runs)
    print(f"wrote {arguments.html}", file=sys.stderr)
    return 0


def _score(arguments: argparse.Namespace, beam_args: list[str]) -> int:
    try:
        module = importlib.import_module("pipelines.score")  # brings torch: only here
    except ModuleNotFoundError as error:
        raise SchemaError(
            f"extra `score` must be installed, got no {error.name}; use requirements.lock"
        ) from error
    request = module.ScoreRequest(
        model=arguments.model,
        dataset=arguments.dataset,
        output=arguments.output,
        split=arguments.split,
        segments=arguments.segments,
        beam_args=beam_args,
    )
    _say(arguments, module.score(request))
    return 0


def _oracle(arguments: argparse.Namespace, beam_args: list[str]) -> int:
    _say(arguments, oracle(arguments, beam_args, uuid.uuid4().hex[:12]))
    return 0


_COMMANDS = {
    "generate": _generate,
    "init": _init,
    "preview": _preview,
    "build": _build,
    "append": _append,
    "finish": _finish,
    "prune": _prune,
    "rewrite": _rewrite,
    "forget": _forget,
    "verify": _verify,
    "expand": _expand,
    "report": _report,
    "score": _score,
    "oracle": _oracle,
}
_WITH_BEAM = ("build", "append", "rewrite", "forget", "score", "oracle")
"""Commands that hand options which they do not know to Beam."""
