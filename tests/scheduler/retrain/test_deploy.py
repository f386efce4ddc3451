"""The shipped daily jobs call existing commands and contain no logic."""

import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from presage.scheduler.__main__ import build_parser
from presage.scheduler.retrain.decide import EXIT_REFUSED


def words_of(text: str) -> list[str]:
    """The words after `python -m presage.scheduler` in a line of a shell."""
    found = re.search(r"python -m presage.scheduler (retrain .*?)(?: > .*)?$", text, re.MULTILINE)
    assert found is not None
    return shlex.split(found[1])


def manifest(repository: Path) -> dict[str, Any]:
    return yaml.safe_load(
        (repository / "deploy" / "kubernetes" / "retrain" / "cronjob.yaml").read_text()
    )


def test_crontab_calls_the_command_for_the_day_before(repository: Path) -> None:
    text = (repository / "deploy" / "cron" / "retrain.cron").read_text()
    found = build_parser().parse_args(words_of(text))
    assert (found.date, found.job) == ("yesterday", Path("/presage/job.yaml"))
    # A percent sign would end the command in a crontab.
    assert "%" not in text


def test_manifest_calls_the_command_and_tries_a_refused_day_once(repository: Path) -> None:
    job = manifest(repository)["spec"]["jobTemplate"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert container["command"][:3] == ["python", "-m", "presage.scheduler"]
    assert build_parser().parse_args(container["command"][3:]).date == "yesterday"
    first = job["podFailurePolicy"]["rules"][0]
    assert (first["action"], first["onExitCodes"]["values"]) == ("FailJob", [EXIT_REFUSED])
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in job["template"]["spec"]["volumes"]}
