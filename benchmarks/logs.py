"""Logs, ids, datasets and figures that several benchmarks share."""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from pipelines.build import build
from pipelines.demo_log.generate import GeneratorConfig, write_log
from pipelines.prepare import BuildInput, BuildOptions, BuildRequest
from pipelines.table.target import SegmentTarget
from schemas.config.job import load_job
from schemas.run.records import StepMetric
from schemas.storage.location import Location

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED_DATA = REPOSITORY.parent / "shared" / "data"
DEMO_JOB = REPOSITORY / "schemas" / "demo" / "job.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClickoutConfig:
    """Shape of a synthetic log of hotel clickouts."""

    num_sessions: int
    """Sessions, each of one user and city."""
    requests: float = 1.7
    """Lists shown per session, on average."""
    shown: int = 25
    """Hotels per list."""
    again: float = 0.4
    """Probability that a later list of a session repeats the previous one."""
    actions: float = 8.0
    """Actions before a list, on average."""
    num_cities: int = 4000
    """Cities; few of them get most searches."""
    seed: int = 0
    """Seed of the log."""


LOGS = {
    "mind": "mind",
    "ebnerd": "ebnerd_test",
    "demo": None,
    "kuairand": "kuairand_pure_part",
    "thirtymusic": "30music_sample10",
}
"""Shipped job -> its log below the shared data, None where the log is generated."""
FORTNIGHT, FORTNIGHT_SPAN, FORTNIGHT_SAMPLES = "demo_fortnight", timedelta(days=14), 1_000_000
"""Name, span and samples of a longer log of the demo, whose last day is for evaluation."""
SYNTHETIC_LOGS = {
    "clickouts": ClickoutConfig(num_sessions=7400),
    "clickouts_hourly": ClickoutConfig(num_sessions=7400),
    "short_sessions": ClickoutConfig(
        num_sessions=60_000, requests=1.0, shown=3, actions=1.0, seed=1
    ),
    "no_repeats": ClickoutConfig(
        num_sessions=60_000, requests=1.0, shown=1, actions=2.0, num_cities=10**9, seed=2
    ),
    "ten_rows": ClickoutConfig(num_sessions=1, requests=1.0, shown=10, seed=3),
}
"""Logs for `benchmarks/clickouts/job.yaml`; `clickouts_hourly` has windows of one hour."""


def log_parser(module: str, doc: str | None, names: Iterable[str]) -> argparse.ArgumentParser:
    """Return a parser with the options that benchmarks over several logs share.

    Args:
        module: below `benchmarks`.
        doc: description.
        names: default of `--datasets`.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=doc)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--datasets", default=",".join(names), help="logs, comma-separated")
    parser.add_argument("--shared-data", type=Path, default=SHARED_DATA)
    return parser


def each_log(options: argparse.Namespace) -> Iterator[tuple[str, Path, Path]]:
    """Yield the name and directory of each available log, and a scratch directory.

    Args:
        options: parsed by `log_parser`.

    Raises:
        SystemExit: a name is unknown, or no log is available.
    """
    names, known = options.datasets.split(","), [*LOGS, *SYNTHETIC_LOGS, FORTNIGHT]
    if unknown := [n for n in names if n not in known]:
        sys.exit(f"error: --datasets must be of {', '.join(known)}, got {unknown[0]!r}")
    num_logs = 0
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            log = raw_log(name, options.shared_data, Path(scratch))
            if log is None:
                sys.stderr.write(f"skipped {name}, its log is not in {options.shared_data}\n")
                continue
            num_logs += 1
            yield name, log, Path(scratch)
    if not num_logs:
        sys.exit("error: benchmark must have a log, got none; give --shared-data")


def write_result(result: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Write a result to standard output, on one line with `--json`."""
    sys.stdout.write(json.dumps(result, indent=None if options.json else 2) + "\n")


def raw_log(name: str, shared_data: Path, scratch: Path) -> Path | None:
    """Return the directory of a log, generated if it is synthetic; None if it is missing."""
    if name in SYNTHETIC_LOGS:
        write_clickouts(SYNTHETIC_LOGS[name], scratch / "log")
        return scratch / "log"
    folder = LOGS.get(name)
    if folder is not None:
        path = shared_data / folder
        return path if path.is_dir() else None
    config = load_job(DEMO_JOB).data.generate
    assert config is not None, "the demo's job configures its generated log"
    if name == FORTNIGHT:
        config = replace(config, num_samples=FORTNIGHT_SAMPLES, span=FORTNIGHT_SPAN)
    write_log(
        GeneratorConfig(
            num_samples=config.num_samples, seed=config.seed, start=config.start, span=config.span
        ),
        scratch / "log",
    )
    return scratch / "log"


def job_path(name: str, scratch: Path | None = None) -> Path:
    """Return the job file of a log; a modified job is written to `scratch`."""
    if name == FORTNIGHT:
        if scratch is None:
            return DEMO_JOB
        body = read_job(DEMO_JOB)
        first = body["data"]["generate"]["start"]
        body["data"]["split"] = {"evaluation_from": first + FORTNIGHT_SPAN - timedelta(days=1)}
        return write_job_file(scratch / "job", body)
    if name not in SYNTHETIC_LOGS:
        return REPOSITORY / "schemas" / name / "job.yaml"
    job = REPOSITORY / "benchmarks" / "clickouts"
    if name != "clickouts_hourly" or scratch is None:
        return job / "job.yaml"
    shutil.copytree(job, scratch / "job")
    text = (job / "job.yaml").read_text()
    hourly = text.replace("  split:", "  window: {span: 1h}\n  split:", 1)
    (scratch / "job" / "job.yaml").write_text(hourly)
    return scratch / "job" / "job.yaml"


def read_job(path: Path) -> dict[str, Any]:
    """Return a job file as plain dictionaries, to be modified."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def write_job_file(folder: Path, job: Mapping[str, Any], original: Path = DEMO_JOB) -> Path:
    """Write a modified job with a copy of the original's schema; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    schema = job["data"].get("schema", "schema.pbtxt")
    shutil.copy(original.parent / schema, folder / schema)
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job, sort_keys=False), encoding="utf-8")
    return path


def with_auto(job: Path, scratch: Path) -> Path:
    """Write a job with `groups: auto`; its transforms move to `samples`."""
    body = read_job(job)
    data = body["data"]
    data["groups"] = "auto"
    if by_group := data.get("transforms"):
        transforms = {k: v for each in by_group.values() for k, v in each.items()}
        data["transforms"] = {"samples": transforms}
    return write_job_file(scratch / "auto", body, job)


def build_job(job: Path, log: Path, dataset: Path) -> dict[str, Any]:
    """Build a dataset on the local runner and return what `build --json` prints."""
    return build(
        BuildRequest(
            BuildInput(job, log),
            SegmentTarget(Location.parse(dataset), "benchmark"),
            BuildOptions([]),
        )
    )


def build_dataset(job: Path, log: Path, dataset: Path) -> Path:
    """Build a dataset on the local runner and return its path."""
    build_job(job, log, dataset)
    return dataset


def step_figures(metrics: Sequence[StepMetric]) -> dict[str, float]:
    """Return the milliseconds of a step and of its phases, and the loss of the last step.

    Args:
        metrics: the measured steps, without warm-up.
    """
    steps = [m.num_samples / m.samples_per_sec * 1e3 for m in metrics]
    return {
        "step_ms": round(statistics.median(steps), 2),
        "mean_ms": round(statistics.mean(steps), 2),
        "loss_last": metrics[-1].loss,
        **{
            phase: round(statistics.median(m.phases[phase] for m in metrics) * 1e3, 2)
            for phase in metrics[0].phases
        },
    }


COLUMNS = [
    "user_id",
    "session_id",
    "timestamp",
    "step",
    "action_type",
    "reference",
    "platform",
    "city",
    "device",
    "current_filters",
    "impressions",
    "prices",
]
START, SPAN = 1541030400, 6 * 86400
"""Start of the clickout log, 2018-11-01, in seconds since 1970, and its length in seconds."""
FILTERS = (
    "",
    "",
    "",
    "",
    "Breakfast Included",
    "Swimming Pool|Beach",
    "4 Star|5 Star",
    "Focus on Rating",
)
DEVICES, PLATFORMS = ("mobile", "desktop", "tablet"), 55
HOTELS_PER_CITY = 300


def write_clickouts(config: ClickoutConfig, directory: Path) -> None:
    """Write a synthetic log of hotel clickouts, in which little repeats, as one CSV file.

    A session is a search in one city. Some rows show a list of hotels with prices, both as text
    with `|` between the values, and one hotel of the list is clicked; the other rows are actions
    on single hotels. Rows are not in time order. `benchmarks/clickouts/job.yaml` makes one sample
    of each shown hotel.
    """
    rng = np.random.default_rng(config.seed)
    rows: list[list[object]] = []
    for _ in range(config.num_sessions):
        rows.extend(_clickout_session(config, rng))
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "actions.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(rows)


def _clickout_session(config: ClickoutConfig, rng: np.random.Generator) -> list[list[object]]:
    city = int(config.num_cities * rng.random() ** 3)
    hotels = _hotels(city)
    base = 20 + (hotels * 7919 % 1009) ** 2 // 2400  # a hotel's price, skewed
    user = np.base_repr(int(rng.integers(1 << 60)), 36).rjust(12, "0")[:12]
    place = [np.base_repr(city % PLATFORMS + 400, 26), f"City {city}, Country {city % 97}"]
    head = [user, f"{int(rng.integers(1 << 52)):013x}"]
    tail = [*place, DEVICES[int(rng.choice(3, p=(0.55, 0.37, 0.08)))]]
    second, step = START + int(rng.integers(SPAN)), 0
    rows: list[list[object]] = []
    shown: NDArray[np.int64] = hotels[:0]
    prices = shown
    for _ in range(int(rng.geometric(1 / config.requests))):
        if not len(shown) or rng.random() >= config.again:
            noise = rng.gumbel(size=len(hotels)) * 40
            chosen = np.argsort(np.arange(len(hotels)) + noise)[: config.shown]
            shown = hotels[chosen]
            prices = np.maximum(5, base[chosen] * rng.normal(1, 0.15, len(chosen))).astype(np.int64)
        filters = FILTERS[int(rng.integers(len(FILTERS)))]
        for _ in range(int(rng.poisson(config.actions))):
            second, step = second + int(rng.exponential(20)), step + 1
            item = int(rng.choice(shown))
            rows.append(
                [*head, second, step, "interaction item image", item, *tail, filters, "", ""]
            )
        second, step = second + int(rng.exponential(60)), step + 1
        clicked = int(shown[min(len(shown) - 1, int(rng.geometric(0.2)) - 1)])
        lists = ["|".join(map(str, values.tolist())) for values in (shown, prices)]
        rows.append([*head, second, step, "clickout item", clicked, *tail, filters, *lists])
    return rows


def _hotels(city: int) -> NDArray[np.int64]:
    """Return the hotels of a city, the most popular first."""
    rng = np.random.default_rng(city)
    return rng.integers(1000, 10_000_000, int(rng.integers(30, HOTELS_PER_CITY)))


NUM_TABLES = 26
NUM_ROWS = tuple(np.round(np.geomspace(3, 10_000_000, NUM_TABLES)).astype(int).tolist())
"""Rows of 26 tables shaped like Criteo's."""
HOT_SHARE, HOT_ROWS = 0.92, 0.01
"""The hottest 1 % of a table's rows get 92 % of its accesses."""
_MIN_SKEWED_ROWS = 1_000
"""Smaller tables have Zipf's exponent 1."""


def zipf_exponent(num_rows: int, hot_share: float = HOT_SHARE) -> float:
    """Return Zipf's exponent with which the hottest `HOT_ROWS` of rows get a share of accesses."""
    if num_rows < _MIN_SKEWED_ROWS:
        return 1.0
    low, high = 0.5, 2.5
    rank = np.log(np.arange(1, num_rows + 1, dtype=np.float64))
    hot = max(1, int(num_rows * HOT_ROWS))
    for _ in range(14):
        middle = (low + high) / 2
        weight = np.exp(-middle * rank)
        if weight[:hot].sum() / weight.sum() < hot_share:
            low = middle
        else:
            high = middle
    return low


def skewed_rows(
    num_rows: int, num_accesses: int, seed: int, hot_share: float = HOT_SHARE
) -> NDArray[np.int32]:
    """Draw accessed rows from a power law; hot rows are spread over the table."""
    rng = np.random.default_rng([seed, num_rows])
    exponent = zipf_exponent(num_rows, hot_share)
    total = np.cumsum(np.arange(1, num_rows + 1, dtype=np.float64) ** -exponent)
    rank = np.searchsorted(total, rng.random(num_accesses) * total[-1])
    return rng.permutation(num_rows)[np.minimum(rank, num_rows - 1)].astype(np.int32)


def uniform_rows(num_rows: int, num_accesses: int, seed: int) -> NDArray[np.int32]:
    """Draw accessed rows with equal probability, the worst case for a cache."""
    rng = np.random.default_rng([seed, num_rows])
    return rng.integers(0, num_rows, num_accesses).astype(np.int32)
