import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from presage.schemas import machine
from presage.schemas.config.job import load_job
from presage.schemas.config.schedule import BudgetConfig
from presage.schemas.errors import pluralize
from presage.schemas.run.records import (
    LEDGER,
    METRICS,
    PHASES,
    RUN_FILE,
    read_metrics,
    read_summary,
)
from presage.trainer.__main__ import _set_threads, _warn_if_worse_than_mean, main
from presage.trainer.elastic.launcher import _threads_each
from tests.conftest import REPOSITORY
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.runs import SEGMENTS


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"), epochs="6")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, job: Path) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "dataset", job, SEGMENTS)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, job: Path, dataset: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert main(train_arguments(job, dataset, folder)) == 0
    return folder


def train_arguments(job: Path, dataset: Path, run: Path, *more: str) -> list[str]:
    return ["train", str(job), "--dataset", str(dataset), "--output", str(run), "--json", *more]


@pytest.mark.slow
def test_train_learns_and_leaves_what_the_contract_names(run: Path) -> None:
    metrics, summary = read_metrics(run / METRICS), read_summary(run / "summary.json")
    losses = np.array([m.loss for m in metrics])
    assert losses[-16:].mean() < 0.97 * losses[:16].mean()
    assert [m.step for m in metrics] == list(range(96))
    assert all(set(m.phases) == set(PHASES) for m in metrics)
    assert summary.num_samples == 6 * 983
    assert summary.ne is not None
    assert summary.ne < 1
    assert summary.auc is not None
    assert summary.auc > 0.6


@pytest.mark.slow
def test_evaluate_repeats_the_metrics_of_the_run(
    run: Path, job: Path, dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(job), "--dataset", str(dataset), "--run", str(run), "--json"]) == 0
    found, summary = json.loads(capsys.readouterr().out), read_summary(run / "summary.json")
    assert found["num_samples"] == 80
    assert (found["ne"], found["auc"], found["gauc"]) == (summary.ne, summary.auc, summary.gauc)


@pytest.mark.parametrize(("number", "alone", "of_two"), [(None, 5, 2), (3, 3, 3)])
def test_threads_are_the_cores_within_the_quota_unless_the_job_has_a_number(
    number: int | None, alone: int, of_two: int, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "machine_budget", lambda *_: BudgetConfig(cpus=5.5))
    loaded, before = load_job(job), torch.get_num_threads()
    try:
        _set_threads(replace(loaded, train=replace(loaded.train, num_threads=number)))
        assert torch.get_num_threads() == alone
    finally:
        torch.set_num_threads(before)
    assert _threads_each(number, 2) == of_two


@pytest.mark.parametrize(("ne", "warned"), [(1.25, True), (1.0, False), (None, False)])
def test_a_model_worse_than_the_mean_rate_is_named(
    ne: float | None, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    _warn_if_worse_than_mean(ne)
    line = "warning: the model is worse than predicting the mean rate for every sample: ne is 1.25"
    assert capsys.readouterr().err.startswith(line) == warned


def test_verify_counts_every_sample_of_every_epoch(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(run), "--json"]) == 0
    output = capsys.readouterr()
    found = json.loads(output.out)
    assert output.err == "verify: ok, 5898 samples, 96 steps\n"
    assert found["num_samples"] == found["num_expected_samples"] == 6 * 983
    assert found["problems"] == []
    assert main(["verify", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == output.err.strip()


LEDGERS = {
    "a step is missing": (
        lambda lines: [*lines[:5], *lines[6:]],
        "epoch 0 trained 4 of 62 blocks never and 0 more than once",
    ),
    "a step is there twice": (
        lambda lines: [*lines, lines[5]],
        "epoch 0 trained 0 of 62 blocks never and 4 more than once",
    ),
    "a step is of no epoch": (
        lambda lines: [lines[0].replace('"epoch":0', '"epoch":9'), *lines[1:]],
        "4 blocks of the ledger are not in the training range",
    ),
}


@pytest.mark.parametrize("case", LEDGERS)
def test_verify_refuses_a_ledger_in_which(
    case: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, message = LEDGERS[case]
    advice = "continue with --resume, or train again"
    for path in run.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    lines = (tmp_path / LEDGER).read_text().splitlines()
    (tmp_path / LEDGER).write_text("".join(f"{line}\n" for line in change(lines)))
    assert main(["verify", str(tmp_path), "--json"]) == 1
    output = capsys.readouterr()
    problems = [f"{each}; {advice}" for each in json.loads(output.out)["problems"]]
    assert output.err.splitlines() == [*problems, f"verify: {pluralize(len(problems), 'problem')}"]
    assert problems[0] == f"{message}; {advice}"


def test_train_refuses_a_folder_that_holds_a_run(
    run: Path, job: Path, dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(train_arguments(job, dataset, run)) == 1
    error = f"error: output folder has a run already in {run}; use --resume or another folder"
    assert capsys.readouterr().err.strip() == error


def test_train_refuses_to_resume_another_job(
    run: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_job(tmp_path, epochs="6", pooling="sum")
    assert main(train_arguments(other, dataset, run, "--resume")) == 1
    pattern = r"error: train\.\w+ differs from that of the run: \S+ instead of \S+ in .*run\.json"
    assert re.match(pattern, capsys.readouterr().err)


@pytest.mark.slow
def test_train_as_a_process_prints_one_object_and_no_trace(
    job: Path, dataset: Path, tmp_path: Path, repository: Path
) -> None:
    arguments = train_arguments(job, dataset, tmp_path / "run", "--steps", "2")
    done = subprocess.run(
        [sys.executable, "-m", "trainer", *arguments],
        cwd=repository,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["num_steps"] == 2
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "error"),
    [
        (["train", "--output"], "there is no dataset"),
        (["evaluate", "--run"], "there is no dataset"),
        (["train", "--follow", "--output"], "output folder has a run already"),
    ],
)
def test_input_and_output_are_checked_before_torch_is_imported(
    command: list[str], error: str, repository: Path, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RUN_FILE).touch()
    words = [command[0], str(repository / "schemas" / "demo" / "job.yaml")]
    words += ["--dataset", str(tmp_path / "none"), *command[1:], str(tmp_path / "run")]
    program = f"""
import sys
from presage.trainer.__main__ import main
assert main({words!r}) == 1
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=repository, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert error in done.stderr


def test_port_that_is_in_use_is_refused(
    job: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        store = ["store", "--directory", str(tmp_path), "--token-file", str(tmp_path / "token")]
        train = ["train", str(job), "--dataset", str(dataset), "--output", str(tmp_path / "run")]
        for arguments in (store, [*train, "--replicas", "2", "--restarts", "0"]):
            assert main([*arguments, "--port", port]) == 1
            message = f"error: no server can run at 127.0.0.1:{port}: Address already in use; use "
            assert capsys.readouterr().err.startswith(message)


@pytest.mark.skipif(os.getuid() != 0, reason="takes a network namespace of its own")
def test_address_that_cannot_be_reached_is_refused() -> None:
    """Without an interface: `unshare -n`."""
    code = (
        "from presage.trainer.stores.remote.wire import check_address; "
        "check_address('127.0.0.1', 0)"
    )
    ended = subprocess.run(
        ["unshare", "-n", sys.executable, "-c", code],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    if "unshare" in ended.stderr:
        pytest.skip(ended.stderr)
    assert "SchemaError: no server can run at 127.0.0.1:0: Network is unreachable; use" in (
        ended.stderr
    )
