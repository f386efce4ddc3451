"""Days of a real log: appended one by one, trained one by one, equal to all at once."""

import json
from pathlib import Path
from typing import Any

import duckdb
import pytest

from presage.pipelines.cli import main as pipelines
from presage.pipelines.table.verify import verify
from presage.schemas.layout import JOB, SCHEMA
from presage.trainer.__main__ import main as trainer
from presage.trainer.checkpoint.load import newest_checkpoint, read_dense
from presage.trainer.run.folder import verify_run
from tests.pipelines.logs import IN_PROCESS

DAYS = ("2022-05-01", "2022-05-02", "2022-05-03")
"""UTC days of KuaiRand's standard log that two files of it cover wholly."""
ONE_OF_USERS = 12
CHANGES = {
    "split: {evaluation_from: 2022-05-07}": "split: {evaluation_last: 3h}",
    "oracle: {batch_samples: 4096}": "block_samples: 64\n  oracle: {batch_samples: 256}",
    "embedding_dim: 32": "embedding_dim: 8",
    "  batch_samples: 4096\n": "  batch_samples: 256\n",
}


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory, shared_data: Path, repository: Path) -> Path:
    """The job, and a directory for each day with the rows of some users."""
    raw, folder = shared_data / "kuairand_pure_part", tmp_path_factory.mktemp("daily")
    text = (repository / "schemas" / "kuairand" / JOB).read_text()
    for old, new in CHANGES.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / JOB).write_text(text)
    (folder / SCHEMA).write_bytes((repository / "schemas" / "kuairand" / SCHEMA).read_bytes())
    some = f"user_id % {ONE_OF_USERS} = 0"
    for day in DAYS:
        (folder / day).mkdir()
        of_day = f"make_timestamp(time_ms * 1000)::DATE = '{day}'"
        for name, where in (
            ("[tv]*", f"{some} AND {of_day}"),
            ("user_features", some),
            ("user_sequences", some),
        ):
            rows = f"SELECT * FROM '{raw}/{name}.parquet' WHERE {where}"
            target = folder / day / f"{name.replace('[tv]*', 'test')}.parquet"
            duckdb.sql(f"COPY ({rows}) TO '{target}'")
    return folder


def bits_of(run: Path) -> dict[str, bytes]:
    """Return the bytes of the rows and of the dense state of a run's newest checkpoint."""
    newest = newest_checkpoint(run)
    assert newest is not None
    rows = {str(p.relative_to(newest)): p.read_bytes() for p in newest.rglob("*.npy")}
    return rows | {name: array.tobytes() for name, array in read_dense(newest).items()}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_days_of_kuairand_one_by_one_equal_all_at_once(
    logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, dataset = str(logs / JOB), tmp_path / "dataset"

    def say(command: str, *arguments: object) -> dict[str, Any]:
        words = [command, job, *map(str, arguments), "--json"]
        capsys.readouterr()
        if command in ("build", "append"):
            assert pipelines([*words, IN_PROCESS]) == 0
        else:
            assert trainer(words) == 0
        return json.loads(capsys.readouterr().out)

    new_rows: list[int] = []
    for number, day in enumerate(DAYS):
        place = ("--output", dataset) if number == 0 else ("--dataset", dataset)
        command = "append" if number else "build"
        answer = say(command, "--input", logs / day, *place, "--day", day)
        assert (answer["day"], answer["built"]) == (day, True)
        begin = ("--start-from", tmp_path / DAYS[number - 1]) if number else ("--segments", day)
        summary = say("train", "--dataset", dataset, "--output", tmp_path / day, *begin)
        assert verify_run(tmp_path / day).problems == ()
        own = say("evaluate", "--dataset", dataset, "--run", tmp_path / day)
        assert own["ne"] == summary["ne"]
        if number:
            start = summary["start"]
            assert start["segments"] == [answer["segment"]]
            new_rows.append(start["tables"]["users"]["new"])
    assert all(count > 0 for count in new_rows), "users come every day"
    assert verify(dataset)["problems"] == []
    say("train", "--dataset", dataset, "--output", tmp_path / "whole")
    assert bits_of(tmp_path / "whole") == bits_of(tmp_path / DAYS[-1])
    newest = ("--segments", DAYS[-1])
    scores = [say("evaluate", "--dataset", dataset, "--run", tmp_path / d, *newest) for d in DAYS]
    assert len({score["ne"] for score in scores}) == len(DAYS)
    assert {score["num_samples"] for score in scores} == {scores[0]["num_samples"]}
