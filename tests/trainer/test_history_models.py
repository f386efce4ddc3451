"""Models that read `train.histories`, against loops over events and samples one by one."""

from __future__ import annotations

import gc
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from torch import nn
from torch.nn.functional import silu

from presage.pipelines.build import build
from presage.pipelines.cli import main as run_pipelines
from presage.pipelines.report.report_page import write_report
from presage.pipelines.table.verify import verify
from presage.schemas.config.job import Job, load_job
from presage.schemas.config.train import TrainConfig
from presage.schemas.dataset.accesses import TableAccesses
from presage.schemas.dataset.opened import OpenDataset, open_dataset, reading_histories
from presage.schemas.errors import SchemaError
from presage.trainer.components import Components, build_components, order_of
from presage.trainer.data.collate import CollatedBatch, single_microbatch
from presage.trainer.data.decode import training_spec
from presage.trainer.data.reader import Reader
from presage.trainer.models.hstu import HstuLayer, HstuModel, time_buckets
from presage.trainer.serve.export import export_run
from tests.pipelines.appending import addition
from tests.pipelines.history_days import Days, build_days, write_days
from tests.trainer.replica_runs import run_replicas
from tests.trainer.runs import assert_same_bits, losses_of, run_job

HSTU = "{{name: hstu, history: plays, target: item, num_layers: {}, num_heads: 2, top_layers: [8]}}"
ATTENTION = "{name: attention, history: plays.item, target: item, num_heads: 2, top_layers: [8]}"
SHARED = "{plays: {length: 12, step: 8}, shown: {length: 5}}"
CASES = {
    "one layer": (HSTU.format(1), "{plays: {length: 12}}"),
    "one layer, short": (HSTU.format(1), "{plays: {length: 2}}"),
    "three layers": (HSTU.format(3), SHARED),
    "three layers, exact": (HSTU.format(3), "{plays: {length: 12}}"),
    "attention": (ATTENTION, SHARED),
    "dlrm": ("{name: dlrm, top_layers: [8]}", SHARED),
}


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Days:
    """Four days of a log with histories, and an index for each case."""
    folder = tmp_path_factory.mktemp("days") / "log"
    days = write_days(folder, num_days=4, before="order", texts=True, delay=9000, seed=5)
    build_days(days, days.dataset)
    for windows in {text for _, text in CASES.values()}:
        reindex(days.dataset, windows)
    return days


def reindex(dataset: Path, windows: str) -> None:
    """Build an index with the windows of `train.histories` for two epochs."""
    options: list[str] = []
    for name, window in yaml.safe_load(windows).items():
        options += ["--history", f"{name}={window['length']}:{window.get('step', 1)}"]
    command = ["oracle", str(dataset), "--reindex", "--batch-samples=32", "--epochs=2", *options]
    assert run_pipelines([*command, "--json"]) == 0


def job_of(days: Days, folder: Path, case: str, **changes: str) -> Path:
    """Write the job of the days with a model and histories."""
    model, histories = CASES[case]
    values = {"dtype": "float64", "embedding_dim": "8", "model": model, "histories": histories}
    text = ", ".join(f"{key}: {value}" for key, value in (values | changes).items())
    folder.mkdir(exist_ok=True)
    shutil.copy(days.job.parent / "schema.pbtxt", folder)
    job = days.job.read_text(encoding="utf-8").replace("train: {batch", f"train: {{{text}, batch")
    (folder / "job.yaml").write_text(job, encoding="utf-8")
    return folder / "job.yaml"


def reader_of(job: Job, dataset: OpenDataset, *, expanded: bool = False) -> Reader:
    spec = training_spec(dataset, job.train)
    return Reader(dataset, order_of(job, dataset), spec, expanded=expanded)


def loss_and_gradients(
    job: Job, dataset: OpenDataset, step: int, *, expanded: bool, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Return logits, and the gradients of their weighted sum, with drawn parameters."""
    components = build_components(training_spec(dataset, job.train), job.train)
    draw(components.model, seed)
    batch = reader_of(job, dataset, expanded=expanded).read(step)
    microbatches = single_microbatch(batch)
    components.embedding.open(microbatches)
    logits = components.model(batch)
    (logits * torch.arange(1, len(logits) + 1)).sum().backward()
    gradients = {f"parameter {n}": p.grad for n, p in components.model.named_parameters()}
    sums = components.embedding.microbatch(batch).row_gradients()
    present = {n: g for n, g in gradients.items() if g is not None}
    return present | {"logits": logits.detach(), "rows": sums.sums}


def draw(model: nn.Module, seed: int) -> None:
    """Set all parameters to drawn values: some are zero at first."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_a_history_for_each_sample(
    days: Days, tmp_path: Path, case: str
) -> None:
    job, dataset = load_job(job_of(days, tmp_path / "job", case)), open_dataset(days.dataset)
    for step in (0, 3):
        shared, expanded = (
            loss_and_gradients(job, dataset, step, expanded=expanded) for expanded in (False, True)
        )
        assert shared.keys() == expanded.keys()
        for name, values in shared.items():
            torch.testing.assert_close(values, expanded[name], rtol=1e-11, atol=1e-12, msg=name)


@pytest.mark.parametrize("case", [c for c in CASES if "layer" in c])
def test_model_is_a_walk_over_events(days: Days, tmp_path: Path, case: str) -> None:
    job, dataset = load_job(job_of(days, tmp_path / "job", case)), open_dataset(days.dataset)
    components = build_components(training_spec(dataset, job.train), job.train)
    draw(components.model, 1)
    reader = reader_of(job, dataset)
    lengths: set[int] = set()
    for step in range(reader.order.num_steps):
        batch = reader.read(step)
        components.embedding.open(single_microbatch(batch))
        read = targets_of(components, batch, job.train)
        torch.testing.assert_close(*read, rtol=1e-11, atol=1e-12)
        lengths |= set(batch.histories["plays"].lengths.tolist())
    window = job.train.histories["plays"]
    assert {0, window.length + window.step - 1} <= lengths <= {*range(window.length + window.step)}


def targets_of(
    components: Components, batch: CollatedBatch, config: TrainConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the targets after the last layer: those of the model, and by loops."""
    model, embedding, history = components.model, components.embedding, batch.histories["plays"]
    assert isinstance(model, HstuModel)
    targets = embedding(batch.sparse).to_dict()["item"]
    rows = [embedding.sequence(batch.sparse, f"plays.{name}")[0] for name in ("item", "kind")]
    events = sum(rows[1:], rows[0])
    assert len(events) == len(history.ticks)
    walked = []
    with torch.no_grad():
        for sample in range(batch.num_samples):
            chosen = slice(int(history.starts[sample]), int(history.ends[sample]))
            x = torch.cat([events[chosen], targets[sample : sample + 1]])
            times = torch.cat([history.ticks[chosen], history.times[sample : sample + 1]])
            for layer in model.layers:
                assert isinstance(layer, HstuLayer)
                x = walk(layer, x, times, config)
            walked.append(x[-1])
        return model.read(batch, embedding, targets), torch.stack(walked)


def walk(
    layer: HstuLayer, x: torch.Tensor, times: torch.Tensor, config: TrainConfig
) -> torch.Tensor:
    """Return one layer over the events of a sample and its target, one after the other."""
    window, heads = config.histories["plays"], config.model.num_heads
    gate, value, query, key = silu(layer.project(layer.norm(x))).chunk(4, dim=1)
    width, count = x.shape[1] // heads, len(x)
    summed = torch.zeros_like(x)
    for i in range(count):
        seen = range(i + 1)  # events attend to themselves, as a target does
        buckets = [int(times[i] - times[j]).bit_length() for j in seen]
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            scores = key[: i + 1, part] @ query[i, part] / width**0.5
            scores += layer.distances[[i - j for j in seen], head] + layer.times[buckets, head]
            weights = silu(scores) / (window.length + window.step - 1)
            summed[i, part] = weights @ value[: i + 1, part]
    return x + layer.mix(layer.mix_norm(summed) * gate)


def test_window_begins_at_a_multiple_of_the_step(days: Days, tmp_path: Path) -> None:
    dataset, starts = open_dataset(days.dataset), {}
    for case in ("three layers", "three layers, exact"):
        job = load_job(job_of(days, tmp_path / case.replace(" ", "-"), case))
        reader = reader_of(job, dataset)
        for step in range(reader.order.num_steps):
            batch = reader.read(step)
            history, inverse = batch.histories["plays"], batch.groups["histories/plays"].indices
            assert (history.starts == history.runs[inverse]).all(), "a run begins with its windows"
            assert (history.ends <= history.runs[inverse + 1]).all()
            assert (history.times >= 0).all()
            starts.setdefault(case, []).append(history.lengths)
    stepped, exact = (torch.cat(of_case) for of_case in starts.values())
    is_full = exact == 12
    assert (stepped[~is_full] == exact[~is_full]).all()
    assert ((stepped >= exact) & (stepped < exact + 8)).all()
    assert len(set(stepped[is_full].tolist())) == 8


@pytest.mark.slow
@pytest.mark.parametrize("case", ["one layer, short", "three layers", "dlrm"])
def test_run_has_equal_bits_in_every_mode_and_when_resumed(
    days: Days, tmp_path: Path, case: str
) -> None:
    changes = {"epochs": "2", "cache": "{rows: 195}", "microbatch_samples": "16"}
    job = job_of(days, tmp_path / "job", case, **changes, checkpoint="{every_steps: 4}")
    run_job(job, days.dataset, tmp_path / "plain")
    run_job(job, days.dataset, tmp_path / "lru", embedding="lru")
    run_job(job, days.dataset, tmp_path / "cached", steps=9, embedding="cached")
    run_job(job, days.dataset, tmp_path / "cached", resume=True, embedding="cached")
    assert_same_bits(tmp_path / "plain", tmp_path / "lru")
    assert_same_bits(tmp_path / "plain", tmp_path / "cached")
    losses = losses_of(tmp_path / "plain").tolist()
    assert len(set(losses)) == len(losses)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"embedding": "cached", "stores": 1}], ids=["plain", "cached"]
)
def test_replicas_have_the_bits_of_one_process(
    days: Days, tmp_path: Path, options: dict[str, Any]
) -> None:
    changes = {"epochs": "2", "cache": "{rows: 195}", "microbatch_samples": "16"}
    job = job_of(days, tmp_path / "job", "three layers", **changes)
    run_job(job, days.dataset, tmp_path / "alone")
    run_replicas(job, tmp_path / "two", dataset=days.dataset, **options)
    assert_same_bits(tmp_path / "alone", tmp_path / "two")


def days_with_windows(folder: Path, *, num_days: int, seed: int) -> Days:
    """Build days of a job with `train.histories`, whose index has the rows of events."""
    days = write_days(folder, num_days=num_days, before="time", texts=False, delay=0, seed=seed)
    text = days.job.read_text(encoding="utf-8")
    days.job.write_text(text.replace("train: {", f"train: {{histories: {SHARED}, "))
    build_days(days, days.dataset)
    return days


def test_index_follows_the_days_that_its_samples_see(tmp_path: Path) -> None:
    days = days_with_windows(tmp_path / "log", num_days=3, seed=2)
    assert_parts(days.dataset, {0, 1, 2})
    before = parts_of(days.dataset)
    pq.write_table(days.plays[1].slice(7), days.folder(1) / "plays-0.parquet")
    log = addition(days.job, days.folder(1), days.dataset, day="2026-01-02", replaces=True)
    build(log)
    after = parts_of(days.dataset)
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, False]
    assert_parts(days.dataset, {0, 1, 2})
    assert not [p for p in verify(days.dataset)["problems"] if "index" in p]


@pytest.mark.slow
def test_later_days_and_an_erased_key_train_alike_with_a_plan(tmp_path: Path) -> None:
    days = write_days(tmp_path / "log", num_days=3, before="order", texts=True, delay=9000, seed=5)
    job = job_of(days, tmp_path / "job", "three layers", cache="{rows: 200}")
    days.job.write_bytes(job.read_bytes())
    build_days(days, days.dataset)
    first, last = ("2026-01-01", "2026-01-02"), ("2026-01-03",)
    run_job(job, days.dataset, tmp_path / "first", embedding="cached", segments=first)
    for embedding in ("plain", "cached"):
        options = {"embedding": embedding, "start_from": tmp_path / "first", "segments": last}
        run_job(job, days.dataset, tmp_path / f"last-{embedding}", **options)
    assert_same_bits(tmp_path / "last-plain", tmp_path / "last-cached")
    gc.collect()  # leases of the runs
    (tmp_path / "ids").write_text("user 3\n", encoding="utf-8")
    command = ["erase", str(days.dataset), "--ids", str(tmp_path / "ids"), "--rewrite", "--json"]
    assert run_pipelines(command) == 0
    assert verify(days.dataset)["problems"] == []
    for embedding in ("plain", "cached"):
        run_job(job, days.dataset, tmp_path / f"all-{embedding}", embedding=embedding)
    assert_same_bits(tmp_path / "all-plain", tmp_path / "all-cached")


def test_report_has_the_events_that_samples_see(tmp_path: Path) -> None:
    days = days_with_windows(tmp_path / "log", num_days=2, seed=8)
    opened = open_dataset(days.dataset)
    reader = reader_of(opened.job, opened)
    batches = [reader.read(step) for step in range(reader.order.num_steps)]
    seen = {n: sum(int(b.histories[n].lengths.sum()) for b in batches) for n in ("plays", "shown")}
    seen_values = 2 * seen["plays"] + seen["shown"]  # plays have two columns with tables
    page = tmp_path / "report.html"
    write_report(days.dataset, page, None)
    shown = re.sub(r"<[^>]*>|\s+", " ", page.read_text(encoding="utf-8"))
    assert f"samples see {seen_values:,} values of events in training" in re.sub(" +", " ", shown)
    for name, length in (("plays", "12"), ("shown", "5")):
        [row] = re.findall(rf'<th scope="row">{name}</th>(.*?)</tr>', page.read_text())
        cells = re.findall(r"<td>(.*?)</td>", row)
        counts = [segment.manifest.histories[name] for segment in opened.segments]
        assert cells[0] == f"{sum(each.num_events for each in counts):,}"
        assert cells[-1] == length


def parts_of(dataset: Path) -> list[str]:
    """Return the parts of the index with histories, in the order of their segments."""
    [index] = [i for i in open_dataset(dataset).manifest.indexes if i.histories]
    return [part.id for _, part in sorted(index.parts.items())]


def assert_parts(dataset: Path, positions: set[int]) -> None:
    """Assert that steps access exactly the rows that their batches look up."""
    opened = open_dataset(dataset)
    job = replace(opened.job, train=replace(opened.job.train, dtype="float64"))
    opened = reading_histories(opened, job.train.windows)
    order, spec = order_of(job, opened), training_spec(opened, job.train)
    reader, accesses = Reader(opened, order, spec), TableAccesses(opened, "items", order)
    segments = {order.step(step).segment for step in range(order.num_steps)}
    assert segments == positions
    assert opened.index_for(order).entry.histories == {"plays": (12, 8), "shown": (5, 1)}
    for step in range(order.num_steps):
        rows = np.sort(accesses.rows[accesses.numbers(step)])
        np.testing.assert_array_equal(rows, reader.read(step).lookups["items"].rows)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("dlrm", {"histories": "{played: {length: 3}}"}, "dataset has no history 'played'"),
        ("one layer", {"histories": "{shown: {length: 3}}"}, "must be one of train.histories"),
        ("one layer", {"histories": "{plays: {length: 0}}"}, "length must be at least 1, got 0"),
        ("attention", {"histories": "{shown: {length: 3}}"}, "history='plays.item'"),
        (
            "one layer",
            {"model": "{name: hstu, history: plays, target: plays.item}"},
            "target must be a sparse feature of samples",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    days: Days, tmp_path: Path, case: str, changes: dict[str, str], message: str
) -> None:
    job = job_of(days, tmp_path / "job", case, **changes)
    with pytest.raises((SchemaError, ValueError), match=message):
        run_job(job, days.dataset, tmp_path / "run")


def test_run_with_histories_is_not_exported(days: Days, tmp_path: Path) -> None:
    job = job_of(days, tmp_path / "job", "dlrm")
    run_job(job, days.dataset, tmp_path / "run", steps=2)
    with pytest.raises(SchemaError, match="which exported models cannot"):
        export_run(tmp_path / "run", tmp_path / "model")


def test_bucket_of_a_time_is_the_length_of_its_ticks_in_bits() -> None:
    ticks = np.concatenate([np.arange(-3, 1100), 2 ** np.arange(50) - 1, 2 ** np.arange(50)])
    expected = [min(31, max(0, int(t)).bit_length()) for t in ticks]
    assert time_buckets(torch.from_numpy(ticks)).tolist() == expected
