"""Command line of the trainer: `python -m presage.trainer --help`."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    from presage.schemas.entry import run_command

    run_command(lambda: import_module("presage.trainer.__main__").main)

import argparse
import json
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from functools import partial

from presage.schemas.config.job import Job, load_job
from presage.schemas.dataset.manifest import read_dataset
from presage.schemas.errors import PlanError, SchemaError, pluralize, printable
from presage.schemas.layout import BLOCKS
from presage.schemas.machine import num_cores
from presage.schemas.paths import network_warning
from presage.schemas.run.records import EXIT_BEHIND, EXIT_LOST_ROWS, LEDGER, METRICS, RUN_FILE
from presage.schemas.run.run_manifest import local_run
from presage.schemas.storage.location import Location
from presage.trainer.cli import WRITTEN, build_parser
from presage.trainer.recovery import Drain, DrainInterrupt, watch_stdin
from presage.trainer.run.folder import check_no_run, has_run, run_lock

__all__ = ["build_parser", "main"]

_BY_HAND = "start replicas with: python -m presage.trainer replica {run} --number 0{token}"


def main(
    argv: Sequence[str] | None = None,
    prog: str = "python -m presage.trainer",
    *,
    forked: bool = False,
) -> int:
    """Run one command; return its exit status.

    Args:
        argv: the command; None for that of this process, which may have others forked.
        prog: name of the program, for messages.
        forked: whether this process runs only this command, and ends with its standard input.
    """
    arguments = build_parser(prog).parse_args(argv)
    arguments.words = sys.argv[1:] if argv is None else argv
    arguments.forked, arguments.may_fork = forked, forked or argv is None
    # Read when torch loads OpenMP. Spinning threads make a step five times slower if cores are
    # shared with the reader's thread or with other processes.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Read when FBGEMM is loaded, which looks for a GPU. Otherwise this initializes CUDA, and
    # processes forked later cannot use it.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # Read when torchft is loaded: its lighthouse logs six lines per step otherwise.
    os.environ.setdefault("RUST_LOG", "warn")
    # The import of torchrec uses a deprecated function of torch, which warns.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    command = {
        "train": _train,
        "replica": _replica,
        "evaluate": _evaluate,
        "verify": _verify,
        "diff": _diff,
        "export": _export,
        "publish": _export,
        "apply": _export,
        "erase": _erase,
        "store": _store,
        "migrate-slots": _migrate_slots,
        "agent": _agent,
    }[arguments.command]
    try:
        if arguments.command in WRITTEN:
            folder = getattr(arguments, WRITTEN[arguments.command])
            if isinstance(folder, Location):
                folder = _work(arguments)
            if warning := network_warning(folder):
                print(warning, file=sys.stderr)
        return command(arguments)
    except (SchemaError, PlanError, ValueError, OSError) as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 1


def _work(arguments: argparse.Namespace) -> Path:
    """Return the directory of local copies of runs at URLs."""
    if arguments.work is not None:
        return arguments.work
    home = os.environ.get("XDG_CACHE_HOME")
    cache = Path(home) if home else Path.home() / ".cache"
    is_writable = os.access(next(p for p in (cache, *cache.parents) if p.exists()), os.W_OK)
    return (cache if is_writable else Path(tempfile.gettempdir())) / "presage" / "runs"


def _set_threads(job: Job) -> None:
    import torch

    torch.set_num_threads(job.train.num_threads or num_cores())


def _check_inputs(arguments: argparse.Namespace, *, may_follow: bool = False) -> Job:
    """Return the job; raise SchemaError for a bad job or dataset before torch is imported."""
    job = load_job(arguments.job)
    if not may_follow:
        read_dataset(arguments.dataset)
    return job


def _train(arguments: argparse.Namespace) -> int:
    drain = Drain()
    with drain.handle_signals():
        try:
            if arguments.may_fork and arguments.restarts:
                from presage.trainer.elastic.fork_server import run_restarted

                has_begun = partial(has_run, arguments.output)
                return run_restarted(arguments.words, drain, arguments.restarts, has_begun)
            return _train_until(drain, arguments)
        except DrainInterrupt as interrupt:
            message = _print_interrupt(interrupt)
            if arguments.json:
                print(json.dumps({"stopped": interrupt.reason, "message": message}))
            return 0


def _print_progress(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)


def _warn_if_worse_than_mean(ne: float | None) -> None:
    if ne is not None and ne > 1:
        _print_progress(
            f"warning: the model is worse than predicting the mean rate for every sample: ne is "
            f"{ne:.4g}, above 1; train fewer epochs, lower the learning rates, or see train.model"
        )


def _print_interrupt(interrupt: DrainInterrupt) -> str:
    message = interrupt.message or "nothing was started"
    print(f"{interrupt.reason}: {message}", file=sys.stderr)
    return message


def _train_until(drain: Drain, arguments: argparse.Namespace) -> int:
    if arguments.forked:
        watch_stdin(drain)
    job = _check_inputs(arguments, may_follow=arguments.follow)
    with nullcontext() if isinstance(arguments.output, Location) else run_lock(arguments.output):
        if not arguments.resume:
            check_no_run(arguments.output)
    start_forked = None
    if arguments.may_fork and arguments.replicas > 1:
        from presage.trainer.elastic.fork_server import start_fork_server

        start_forked = start_fork_server()  # its imports run beside ours
    from presage.schemas.run.records import to_line
    from presage.trainer.elastic.launcher import LaunchOptions, start_replica, train_replicas
    from presage.trainer.options import TrainOptions
    from presage.trainer.run.upload import open_output
    from presage.trainer.runtime import show_progress
    from presage.trainer.train import train

    _set_threads(job)
    options = TrainOptions(
        embedding=arguments.embedding,
        expanded=arguments.expanded,
        steps=arguments.steps,
        resume=arguments.resume,
        stores=arguments.stores,
        follow=arguments.follow,
        fast=arguments.fast,
        start_from=arguments.start_from,
        rows_only=arguments.rows_only,
        output=arguments.output if isinstance(arguments.output, Location) else None,
        segments=arguments.segments,
        expire_days=arguments.expire_days,
    )
    work = _work(arguments)
    output, config = arguments.output, job.train.checkpoint
    with ExitStack() as stack:
        on_step = stack.enter_context(show_progress())
        if arguments.replicas != 1:
            launch = LaunchOptions(
                count=arguments.replicas,
                host=arguments.host,
                port=arguments.port,
                work=work,
                start=start_forked or start_replica,
            )
            if not arguments.replicas:
                token = " --token-file FILE" if isinstance(output, Location) else ""
                print(_BY_HAND.format(run=output, token=token), file=sys.stderr)
            paths = (arguments.job, arguments.dataset, output)
            summary = train_replicas(
                *paths, options, launch, on_step, drain, progress=_print_progress
            )
        else:
            run = open_output(output, work, config, resume=arguments.resume, drain=drain)
            paths = (arguments.job, arguments.dataset, stack.enter_context(run))
            clock = time.perf_counter
            summary = train(
                *paths, options, clock=clock, on_step=on_step, drain=drain, progress=_print_progress
            )
    _show(arguments, to_line(summary))
    _warn_if_worse_than_mean(summary.ne)
    return 0


def _replica(arguments: argparse.Namespace) -> int:
    drain = Drain()
    with drain.handle_signals():
        try:
            return _replica_until(drain, arguments)
        except DrainInterrupt as interrupt:
            _print_interrupt(interrupt)
            return 0


def _replica_until(drain: Drain, arguments: argparse.Namespace) -> int:
    import secrets

    import torch

    from presage.trainer.elastic.attempt import read_rendezvous
    from presage.trainer.elastic.membership import ReplicaOptions
    from presage.trainer.elastic.worker import run_replica
    from presage.trainer.run.upload import SupersededError
    from presage.trainer.stores.remote.connection import read_access
    from presage.trainer.stores.store import BehindError, RowsLostError

    if arguments.end_with_stdin:
        watch_stdin(drain)
    torch.set_num_threads(arguments.threads)
    rendezvous = read_rendezvous(Location.parse(arguments.run))
    options = ReplicaOptions(
        number=arguments.number,
        name=f"{arguments.number:03d}-{secrets.token_hex(4)}",
        lighthouse=rendezvous.lighthouse,
        access=read_access(_token_file(arguments), arguments.trusted, arguments.tls_name),
        certificate=_certificate(arguments),
        host=arguments.host,
        expected=arguments.expected,
        heartbeat_sec=rendezvous.heartbeat_sec,
    )
    try:
        clock = time.perf_counter
        run_replica(
            arguments.run,
            rendezvous,
            options,
            work=_work(arguments),
            clock=clock,
            drain=drain,
            progress=_print_progress,
        )
    except (BehindError, RowsLostError, SupersededError) as error:
        print(f"replica {options.name}: {error}", file=sys.stderr)
        return EXIT_LOST_ROWS if isinstance(error, RowsLostError) else EXIT_BEHIND
    return 0


def _token_file(arguments: argparse.Namespace) -> Path:
    from presage.trainer.elastic.attempt import TOKEN

    if arguments.token_file is not None:
        return arguments.token_file
    if isinstance(arguments.run, Location):
        raise SchemaError(
            "replicas of a run at a URL need a token that is not there; give each the same "
            "--token-file",
            file=str(arguments.run),
        )
    return arguments.run / TOKEN


def _evaluate(arguments: argparse.Namespace) -> int:
    job = _check_inputs(arguments)
    from presage.trainer.evaluation.evaluate import evaluate_run

    _set_threads(job)
    with local_run(arguments.run, (RUN_FILE,), (None,)) as run:
        evaluation = evaluate_run(arguments.job, arguments.dataset, run, arguments.segments)
    _show(arguments, json.dumps(asdict(evaluation), sort_keys=True))
    _warn_if_worse_than_mean(evaluation.ne)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from presage.trainer.run.folder import verify_run

    with local_run(arguments.run, (BLOCKS, LEDGER, METRICS)) as run:
        report = verify_run(run)
    _show(arguments, json.dumps(asdict(report), sort_keys=True))
    for problem in report.problems:
        print(f"{problem}; continue with --resume, or train again", file=sys.stderr)
    if report.problems:
        _print_result(arguments, f"verify: {pluralize(len(report.problems), 'problem')}")
    else:
        samples, steps = (
            pluralize(report.num_samples, "sample"),
            pluralize(report.num_steps, "step"),
        )
        _print_result(arguments, f"verify: ok, {samples}, {steps}")
    return 1 if report.problems else 0


def _diff(arguments: argparse.Namespace) -> int:
    from presage.trainer.run.compare import compare_runs

    with (
        local_run(arguments.run, (METRICS,), (None,)) as run,
        local_run(arguments.other, (METRICS,), (None,)) as other,
    ):
        comparison = compare_runs(run, other)
    _show(arguments, json.dumps(asdict(comparison), sort_keys=True))
    if comparison.difference is not None:
        print(
            f"runs differ: {comparison.difference} in {arguments.run} and {arguments.other}; "
            "compare runs of one job and dataset",
            file=sys.stderr,
        )
        _print_result(arguments, "equal: no")
        return 1
    steps, rows = pluralize(comparison.num_steps, "step"), pluralize(comparison.num_rows, "row")
    _print_result(arguments, f"equal: yes, {steps}, {rows}")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from presage.trainer.serve.publish import COMMANDS

    summary = COMMANDS[arguments.command](arguments)
    _show(arguments, json.dumps(asdict(summary), sort_keys=True))
    return 0


def _erase(arguments: argparse.Namespace) -> int:
    from presage.trainer.run.erase import erase_ids

    summary = erase_ids(arguments.run, arguments.ids, arguments.table, _work(arguments))
    _show(arguments, json.dumps(summary))
    return 0


def _certificate(arguments: argparse.Namespace) -> tuple[Path, Path] | None:
    if (arguments.tls_cert is None) != (arguments.tls_key is None):
        raise ValueError("TLS needs both files; give --tls-cert and --tls-key")
    return arguments.tls_cert and (arguments.tls_cert, arguments.tls_key)


def _store(arguments: argparse.Namespace) -> int:
    from presage.trainer.stores.remote.server import StoreOptions, run_store
    from presage.trainer.stores.remote.wire import read_token

    options = StoreOptions(
        directory=arguments.directory,
        address_file=arguments.address_file,
        token=read_token(arguments.token_file),
        host=arguments.host,
        port=arguments.port,
        certificate=_certificate(arguments),
        sync=arguments.fsync == "write",
        message_bytes=arguments.message_bytes,
        delay_sec=arguments.delay_sec,
    )
    run_store(
        options,
        announce=lambda line: print(line, flush=True),
        end_with=sys.stdin.buffer if arguments.end_with_stdin else None,
    )
    return 0


def _migrate_slots(arguments: argparse.Namespace) -> int:
    from presage.trainer.stores.remote.connection import read_access
    from presage.trainer.stores.remote.ownership import parse_ranges
    from presage.trainer.stores.remote.processes import migrate_slots

    access = read_access(arguments.token_file, arguments.trusted, arguments.tls_name)
    moved = migrate_slots(
        arguments.sources.split(","), arguments.to, parse_ranges(arguments.slots), access
    )
    _show(arguments, json.dumps(moved, sort_keys=True))
    return 0


def _agent(arguments: argparse.Namespace) -> int:
    from presage.trainer.checkpoint.agent import run_agent, send_answer

    run_agent(
        arguments.run,
        arguments.memory,
        arguments.file,
        keep=arguments.keep,
        parent=arguments.parent,
        requests=sys.stdin.buffer,
        answer=lambda line: send_answer(sys.stdout.buffer, line),
    )
    return 0


def _print_result(arguments: argparse.Namespace, line: str) -> None:
    """Print the result as the last line; to stderr if stdout has the JSON object."""
    print(line, file=sys.stderr if arguments.json else sys.stdout)


def _show(arguments: argparse.Namespace, line: str) -> None:
    if arguments.json:
        print(line)
        return
    for name, value in json.loads(line).items():
        if value is not None:
            print(f"{name:>20} {value}")
