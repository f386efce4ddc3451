"""The shipped DAG, imported and run for one day by a real Airflow in an environment of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.external_tools import install_environment
from tests.integration.days import DAYS, make_site

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def airflow(repository: Path) -> Path:
    """Folder of the programs of the locked Airflow, installed once for each state of its lock."""
    lock = repository / "deploy" / "airflow" / "requirements.lock"
    return install_environment("airflow", lock, repository / ".venv" / "bin")


def test_dag_runs_for_one_day_by_a_real_airflow(
    repository: Path, airflow: Path, tmp_path: Path
) -> None:
    site = make_site(repository, tmp_path / "site")
    dags = tmp_path / "dags"
    dags.mkdir()
    shutil.copy(repository / "deploy" / "airflow" / "presage_retrain.py", dags)
    own = ("PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in own}
    environment |= {
        "PATH": f"{airflow}{os.pathsep}{os.environ['PATH']}",
        "AIRFLOW_HOME": str(tmp_path / "home"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "false",
        "PRESAGE_HOME": str(repository),
        "PRESAGE_JOB": str(site.job),
        "PRESAGE_FIRST_DAY": DAYS[0],
    }

    def run(*words: str) -> str:
        done = subprocess.run(
            ["airflow", *words], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    run("db", "migrate")
    # The run of 02:10 is for the interval that ended then: the day before.
    run("dags", "test", "presage_retrain", f"{DAYS[1]}T02:10:00+00:00")
    assert [a.day for a in site.state.attempts] == [DAYS[0]]
    assert site.promoted["run"] == f"{DAYS[0]}.1"
