"""One task a day: the retraining of one job, by the command that a person would type.

The variables of Airflow's workers say where things are: PRESAGE_HOME (the source tree with its
`.venv`), PRESAGE_JOB (the job file, whose `schedule.retrain` says where logs and root are), and
PRESAGE_FIRST_DAY (`2026-04-01`, the first day that is retrained). Days from then on that were
missed are caught up with in order, one at a time; a task that failed goes on where it was when it
is cleared.
"""

from __future__ import annotations

import os
from datetime import datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG
from airflow.timetables.interval import CronDataIntervalTimetable

with DAG(
    dag_id="presage_retrain",
    schedule=CronDataIntervalTimetable("10 2 * * *", timezone="UTC"),
    start_date=datetime.fromisoformat(os.environ["PRESAGE_FIRST_DAY"]),
    catchup=True,
    max_active_runs=1,
    default_args={"depends_on_past": False, "retries": 2, "retry_delay": timedelta(minutes=5)},
) as dag:
    BashOperator(
        task_id="retrain",
        bash_command=(
            'cd "$PRESAGE_HOME" && exec .venv/bin/python -m presage.scheduler retrain '
            '"$PRESAGE_JOB" '
            "--date {{ data_interval_start | ds }} --json"
        ),
        append_env=True,
    )
