"""Every command with arguments for a small dataset, and what one leaves alive when it has returned.

`python -m tests.commands FILE_BYTES PACKAGE COMMAND ...` runs one, in which files may have no more
bytes, and prints what it leaves.
"""

from __future__ import annotations

import gc
import json
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from presage.completion import subparsers_of
from presage.scheduler.controller.log import LOG
from presage.schemas.entry import end_threads
from tests.conftest import REPOSITORY
from tests.integration.small_demo import write_small_demo
from tests.scheduler.status.recordings import record_jobs
from tests.shared import hard_links, make_once

MODEL = "model: {name: attention, history: clicked_items, target: item_id, top_layers: [128, 64]}"
CHANGES = {
    MODEL: "model: {bottom_layers: [16], top_layers: [16]}",
    "oracle: {batch_samples: 4096}": "block_samples: 128\n  oracle: {batch_samples: 128}",
    "\n  batch_samples: 4096": "\n  batch_samples: 128\n  checkpoint: {every_steps: 2, keep: 9}",
}
TRACE = "job,submit_sec,duration_sec,num_replicas\na,0,60,1\nb,5,30,2\n"
SPEEDS = (
    "job,num_replicas,num_stores,replica_cpus,store_cpus,batch_size,samples_per_sec\n"
    + "".join(f"a,{n},1,1,1,256,{900 * n / (1 + n / 9):.0f}\n" for n in range(1, 6))
)
TRAIN = "train {in}/job.yaml --dataset {in}/dataset --output"
COMMANDS = {
    "pipelines": {
        "demo": "demo {out}/demo --num-samples 200",
        "generate": "generate {in}/job.yaml --output {out}/log --num-samples 200",
        "init": "init {in}/log --output {out}/job",
        "preview": "preview {in}/job.yaml --input {in}/log",
        "build": "build {in}/job.yaml --input {in}/log --output {out}/dataset --check-sql",
        "append": "append {in}/job.yaml --dataset {dataset} --input {in}/log",
        "seal": "seal {dataset}",
        "unseal": "unseal {dataset}",
        "vacuum": "vacuum {dataset}",
        "rewrite": "rewrite {in}/log --output {out}/dataset",
        "erase": "erase {dataset} --ids {in}/ids --rewrite",
        "verify": "verify {in}/dataset",
        "expand": "expand {in}/dataset --output {out}/rows.parquet",
        "report": "report {in}/dataset --html {out}/page.html",
        "score": "score {in}/model --dataset {in}/dataset --output {out}/scores",
        "oracle": "oracle {dataset} --reindex --batch-samples 256",
    },
    "trainer": {
        "train": f"{TRAIN} {{out}}/run --embedding cached --steps 5",
        "replica": "replica {in}/run --number 0",
        "evaluate": "evaluate {in}/job.yaml --dataset {in}/dataset --run {in}/run",
        "verify": "verify {in}/run",
        "diff": "diff {in}/run {in}/run",
        "export": "export {in}/run --output {out}/model",
        "publish": "publish {in}/run --since 2 --output {out}/changes",
        "apply": "apply {in}/model --changes {in}/none --output {out}/model",
        "erase": "erase {run} --ids {in}/ids --table users",
        "store": "store --directory {out}/store --token-file {in}/token --end-with-stdin",
        "migrate-slots": "migrate-slots --from grpc://127.0.0.1:1 --to grpc://127.0.0.1:1 "
        "--slots 9:0 --token-file {in}/token",
        "agent": "agent {run} --memory {out} --file 0 --keep 1 --parent 1",
    },
    "scheduler": {
        "fit": "fit {in}/speeds.csv",
        "plan": "plan {in}/job.yaml --dataset {in}/dataset --explain",
        "simulate": "simulate --trace {in}/trace.csv --policy presage",
        "run": "run {in}/job.yaml --input {in}/log --output {out}/scheduled --dry-run",
        "retrain": "retrain {in}/job.yaml --output {out}/daily --list",
        "status": "status {in}/scheduled",
        "replay": "replay {in}/scheduled/scheduler.jsonl",
        "doctor": "doctor",
    },
    "presage": {"completion": "completion bash", "--help": "--help", "bild": "bild"},
}
"""Package -> command -> its words. `{in}`: see `inputs`; `{out}`: an empty folder; `{dataset}` and
`{run}`: copies."""
STATUS = {"replica": 1, "apply": 1, "migrate-slots": 1, "agent": 1, "bild": 2}
"""Exit statuses that are not 0."""


def parsed_commands() -> dict[str, set[str]]:
    """Return the commands of each parser."""
    parsers = {
        name: import_module(f"presage.{name}.__main__") for name in COMMANDS if name != "presage"
    }
    return {name: set(subparsers_of(main.build_parser())) for name, main in parsers.items()}


def inputs() -> Path:
    """Return the folder of what all commands read, made once per test session."""
    return make_once(_make_inputs)


def _make_inputs(folder: Path) -> None:
    (folder / "job.yaml").write_text(write_small_demo(REPOSITORY, folder, CHANGES))
    (folder / "ids").write_text("1\n")
    (folder / "token").write_text("0123456789abcdef")
    (folder / "trace.csv").write_text(TRACE)
    (folder / "speeds.csv").write_text(SPEEDS)
    (folder / "scheduled").mkdir()
    record_jobs(3).write_log(folder / "scheduled" / LOG, 60)
    for words in (
        "pipelines generate {in}/job.yaml --output {in}/log --num-samples 1200",
        "pipelines build {in}/job.yaml --input {in}/log --output {in}/dataset",
        f"trainer {TRAIN} {{in}}/run",
        "trainer export {in}/run --output {in}/model --checkpoint 2",
    ):
        subprocess.run(python(words.format_map({"in": folder})), check=True, capture_output=True)


def python(words: str) -> list[str]:
    """Return a command line."""
    return [sys.executable, "-m", *words.split()]


def command_line(package: str, command: str, folder: Path) -> list[str]:
    """Return the command line of a command that writes to an empty folder."""
    source, places = inputs(), {"in": inputs(), "out": folder / "out"}
    shutil.rmtree(folder, ignore_errors=True)
    places["out"].mkdir(parents=True)
    words = f"{package} {COMMANDS[package][command]}"
    for name in ("dataset", "run"):
        if f"{{{name}}}" in words:
            places[name] = hard_links(source / name, folder / name)
    return python(words.format_map(places))


def left_alive(before: Sequence[str]) -> list[str]:
    """Return what lives in this process beside its main thread and what was `before`."""
    gc.collect()
    return sorted({*_alive()} - {*before})


def _alive() -> Iterator[str]:
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            yield f"thread {thread.name}"
    for child in Path("/proc/self/task").glob("*/children"):
        yield from (f"process {pid}" for pid in child.read_text().split())
    for file in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the folder that is listed
            target = str(file.readlink())
            if not target.startswith(OF_LIBRARIES):
                yield f"file {file.name} {target}"
    for each in gc.get_objects():
        if issubclass(type(each), KINDS) and _is_open(each):  # `__class__` of a module may warn
            yield f"{type(each).__name__} {each}"


OF_LIBRARIES = (f"{Path(sys.prefix).resolve()}/", f"{sys.prefix}/", "anon_inode:[event")
"""Files that libraries open once per process: fonts, and the descriptors by which gRPC waits."""
KINDS = (duckdb.DuckDBPyConnection, Executor, pa.NativeFile, pq.ParquetFile)


def _is_open(each: Any) -> bool:
    if isinstance(each, pq.ParquetFile | pa.NativeFile):
        return not each.closed
    if isinstance(each, Executor):
        threads = getattr(each, "_threads", ())
        return any(thread.is_alive() for thread in threads)
    return True


def main(arguments: Sequence[str]) -> int:
    """Run a command and print what it leaves alive, as the last line on stderr."""
    file_bytes, package, *words = arguments
    command = import_module(f"presage.{package}.__main__").main
    before = left_alive(())
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(file_bytes), resource.RLIM_INFINITY))
    try:
        status = command(words)
    except SystemExit as end:
        status = int(end.code or 0)  # of argparse
    end_threads()
    print(json.dumps(left_alive(before)), file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
