"""The page says what the files say: numbers read back, equal bytes, nothing fetched."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from presage.pipelines.cli import main
from presage.pipelines.report.report_page import integer, percent, size
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.run.records import SUMMARY, RunSummary, to_line
from tests.pipelines.logs import IN_PROCESS
from tests.shared import error_of, json_of

PLAN = {
    "preprocessing": {
        "segment_jobs": 2, "workers_per_job": 3, "cpus": 6.0, "memory_bytes": 12_000_000_000,
        "rows_per_sec": 4567.8,
    },
    "training": {
        "num_replicas": 4, "num_stores": 1, "cpus": 5.0, "memory_bytes": 9_000_000_000,
        "samples_per_sec": 23456.7,
    },
    "predicted_sec": 78.9, "cost": 0.0321, "confident": False,
    "reasons": ["training: 4 replicas <because> of the fit"],
}  # fmt: skip


class Page(HTMLParser):
    """What a reader sees of a page, and what a browser would fetch for it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, dict[str, list[str]]] = {}
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.labels: list[str | None] = []
        self._path: list[str] = []
        self._cells: list[str] = []
        self.words: list[str] = []
        self._caption = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._path.append(tag)
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "data", "srcset", "action") and value is not None:
                self.addresses.append(value)
            if name == "id" and value is not None:
                self.ids.append(value)
        if tag == "svg":
            self.labels.append(dict(attrs).get("aria-label"))
        if tag == "caption":
            self._caption = ""
        if tag == "tr":
            self._cells = []
        if tag in ("td", "th"):
            self._cells.append("")

    def handle_endtag(self, tag: str) -> None:
        while self._path and self._path.pop() != tag:
            pass
        if tag == "tr" and self._cells:
            rows = self.tables.setdefault(self._caption, {})
            rows[self._cells[0]] = self._cells[1:]

    def handle_data(self, data: str) -> None:
        if "style" in self._path:
            return
        self.words.append(data)
        if "caption" in self._path:
            self._caption += data
        elif "td" in self._path or "th" in self._path:
            self._cells[-1] += data

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())

    def table(self, start: str) -> dict[str, list[str]]:
        """The rows of the table whose caption begins so."""
        return next(rows for caption, rows in self.tables.items() if caption.startswith(start))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """A dataset of 3,000 samples of the demo log, in blocks of 1,024."""
    root = tmp_path_factory.mktemp("report")
    job = root / "job"
    shutil.copytree(repository / "schemas" / "demo", job)
    text = (job / "job.yaml").read_text()
    (job / "job.yaml").write_text(text.replace("batch_samples: 4096", "batch_samples: 1024"))
    log, built_dataset = str(root / "log"), str(root / "dataset")
    arguments = [str(job / "job.yaml")]
    assert main(["generate", *arguments, "--output", log, "--num-samples", "3000"]) == 0
    assert main(["build", *arguments, "--input", log, "--output", built_dataset, IN_PROCESS]) == 0
    return root / "dataset"


def write_run(
    directory: Path, expanded: bool, samples_per_sec: float, embedding: str = "plain"
) -> None:
    """Write the summary of a run of three steps."""
    directory.mkdir(parents=True)
    summary = RunSummary(
        num_steps=3, num_samples=3072, loss_first=0.7, loss_last=0.5, ne=0.9123, auc=0.7345,
        gauc=None, samples_per_sec=samples_per_sec, cache_hit_rate=None, fetched_rows=0,
        peak_rss_bytes=1_234_000_000, embedding=embedding, expanded=expanded,
    )  # fmt: skip
    (directory / SUMMARY).write_text(to_line(summary))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, a plan, and a directory that is no run."""
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "expanded", expanded=True, samples_per_sec=1000.0)
    write_run(root / "with & without", expanded=False, samples_per_sec=2500.0)
    (root / "unfinished").mkdir()
    (root / "plan.json").write_text(json.dumps(PLAN))
    return root


@pytest.fixture(scope="module")
def page(dataset: Path, runs: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page with everything on it."""
    html = tmp_path_factory.mktemp("html") / "sub" / "report.html"
    assert main(["report", str(dataset), "--html", str(html), "--runs", str(runs)]) == 0
    return html.read_text()


@pytest.mark.slow
def test_report_sizes_are_those_of_the_manifests(page: str, dataset: Path) -> None:
    manifest = open_dataset(dataset).segments[0].manifest
    shown = Page(page)
    groups = shown.table("Dedup groups")
    for name, expected in manifest.groups.items():
        assert groups[name][1] == integer(expected.num_unique)
        assert float(groups[name][2]) == pytest.approx(expected.dedup_factor, rel=0.01)
    assert (
        f"{integer(manifest.num_samples)} samples in {integer(manifest.num_sessions)} sessions"
        in (shown.text)
    )
    assert size(manifest.dataset_bytes) in shown.text


@pytest.mark.slow
def test_report_oracle_table_is_what_the_oracle_command_prints(page: str, dataset: Path) -> None:
    tables = json_of(main, ["oracle", str(dataset), "--json"])["tables"]
    rows = {**Page(page).table("Training range"), **Page(page).table("The other tables")}
    for name, report in tables.items():
        assert rows[name] == [
            integer(report["num_lookups"]), integer(report["num_lookups_dedup"]),
            integer(report["num_accesses"]), integer(report["num_unique_rows"]),
            integer(report["fetched_rows"]), percent(report["hit_rate"]),
            integer(report["peak_cache_rows"]),
        ]  # fmt: skip
    total = rows[f"all {len(tables)} tables"]
    assert total[0] == integer(sum(r["num_lookups"] for r in tables.values()))


def test_report_runs_show_their_speeds_and_scores(page: str) -> None:
    shown = Page(page)
    row = shown.table("Runs")["with & without"]
    assert row[0] == "plain"
    assert row[3:9] == ["2,500", "0.5000", "0.9123", "0.7345", "–", "–"]  # noqa: RUF001
    assert "1.23 GB" in row
    assert "2.50 times as fast" in shown.text
    assert "unfinished" not in shown.text


def test_report_plan_shows_both_pools_and_reasons_as_text(page: str) -> None:
    shown = Page(page)
    sizes = shown.table("Sizes of both pools")
    assert sizes["processes"] == ["2 segment jobs x 3 workers", "4 replicas and 1 store"]
    assert sizes["memory"] == ["11.2 GiB", "8.38 GiB"]
    assert sizes["samples per second"] == ["4,568", "23,457"]
    assert "4 replicas <because> of the fit" in shown.text
    assert "because" not in shown.tags


def test_report_fetches_nothing_and_runs_nothing(page: str) -> None:
    shown = Page(page)
    assert "script" not in shown.tags
    assert not re.findall(r"https?:|//[a-z]|@import|url\((?!#)", page)
    assert all(address.startswith("#") for address in shown.addresses)
    assert {a[1:] for a in shown.addresses} <= set(shown.ids)


def test_report_ids_are_unique_and_every_picture_and_table_is_named(page: str) -> None:
    shown = Page(page)
    assert len(shown.ids) == len(set(shown.ids))
    assert len(shown.labels) == 3
    assert all(shown.labels)
    assert shown.tags.count("table") == shown.tags.count("caption") == len(shown.tables)


def test_report_colors_survive_the_renaming_of_ids(page: str) -> None:
    assert "fill: #0b6e6e" in page
    assert not re.findall(r"(?:fill|stroke): #(?![0-9a-f]{6}\b)", page)


@pytest.mark.slow
def test_report_again_gives_the_same_bytes(
    page: str, dataset: Path, runs: Path, tmp_path: Path
) -> None:
    html = tmp_path / "again.html"
    assert main(["report", str(dataset), "--html", str(html), "--runs", str(runs)]) == 0
    assert html.read_text() == page


@pytest.mark.slow
def test_report_without_runs_has_no_training(dataset: Path, tmp_path: Path) -> None:
    assert main(["report", str(dataset), "--html", str(tmp_path / "x.html")]) == 0
    shown = Page((tmp_path / "x.html").read_text())
    assert not {"training", "plan"} & set(shown.ids)
    assert {"storage", "dedup", "oracle", "method"} <= set(shown.ids)


def test_report_of_a_directory_without_runs_is_refused(dataset: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    (folder / "unfinished").mkdir(parents=True)
    html = tmp_path / "x.html"
    assert error_of(main, ["report", str(dataset), "--html", str(html), "--runs", str(folder)]) == (
        f"error: no finished run: {folder} contains no summary.json; pass the --output of trainer "
        "train, or omit --runs\n"
    )
    assert not html.exists()


@pytest.mark.slow
def test_report_of_one_run(dataset: Path, runs: Path, tmp_path: Path) -> None:
    html = tmp_path / "x.html"
    arguments = ["report", str(dataset), "--html", str(html), "--runs", str(runs / "expanded")]
    assert main(arguments) == 0
    shown = Page(html.read_text())
    assert "training" in shown.ids
    assert "expanded trains 1,000 samples per second" in shown.text


def test_report_of_missing_runs_is_refused(dataset: Path, tmp_path: Path) -> None:
    missing = tmp_path / "none"
    html = tmp_path / "x.html"
    assert error_of(
        main, ["report", str(dataset), "--html", str(html), "--runs", str(missing)]
    ) == (
        f"error: no such directory of runs: {missing}; train with --output below it, or omit "
        "--runs\n"
    )
    assert not html.exists()


@pytest.mark.slow
def test_report_of_a_foreign_plan_is_refused(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"training": {}}')
    html = tmp_path / "x.html"
    assert error_of(
        main, ["report", str(dataset), "--html", str(html), "--runs", str(tmp_path)]
    ) == (
        f"error: not the output of its command: KeyError('preprocessing') in {tmp_path}/plan.json; "
        "print it again with --json\n"
    )


def test_report_shows_what_both_policies_do_at_one_size(page: str, dataset: Path) -> None:
    tables = json_of(main, ["oracle", str(dataset), "--json"])["tables"].values()
    shown = Page(page).table("Both policies")
    accesses = sum(t["num_accesses"] for t in tables)
    for policy, name in (("ttl", "time to live, 50 steps"), ("belady", "Belady's optimum")):
        found = [t["policies"][policy] for t in tables]
        fetched = sum(f["fetched_rows"] for f in found)
        required = found[0]["required_rows"]
        assert shown[name] == [
            integer(found[0]["cache_rows"] or required), integer(fetched),
            integer(sum(f["written_rows"] for f in found)), percent(1 - fetched / accesses),
            integer(required),
        ]  # fmt: skip
