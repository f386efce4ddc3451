"""Old names of commands and options: refused in one line that gives the new one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from pipelines import cli as pipelines
from trainer import __main__ as trainer

Main = Callable[[Sequence[str]], int]
RENAMED: tuple[tuple[Main, str, str], ...] = (
    (pipelines.main, "finish dataset", "command was renamed: finish; use seal"),
    (
        pipelines.main,
        "finish dataset --reopen",
        "option was renamed: --reopen; use the command unseal",
    ),
    (
        pipelines.main,
        "build job.yaml --input log --output dataset --last",
        "option was renamed: --last; use --final",
    ),
    (
        pipelines.main,
        "append job.yaml --last --input log --dataset dataset",
        "option was renamed: --last; use --final",
    ),
    (pipelines.main, "prune dataset", "command was renamed: prune; use vacuum"),
    (pipelines.main, "forget dataset --rewrite", "command was renamed: forget; use erase"),
    (trainer.main, "equal run other", "command was renamed: equal; use diff"),
    (trainer.main, "forget run", "command was renamed: forget; use erase"),
    (trainer.main, "persist run", "command was renamed: persist; use agent"),
)


@pytest.mark.parametrize(("main", "line", "message"), RENAMED, ids=[line for _, line, _ in RENAMED])
def test_an_old_name_is_refused_with_the_new_one(
    main: Main, line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(line.split())
    assert refused.value.code == 2
    package = "pipelines" if main is pipelines.main else "trainer"
    assert capsys.readouterr().err == f"python -m {package}: error: {message}\n"


def test_the_agent_is_not_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        trainer.main(["--help"])
    assert "agent" not in capsys.readouterr().out
