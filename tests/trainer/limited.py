"""`python -m tests.trainer.limited GROUP MODULE ARGUMENT ...`: a command in a memory cgroup.

Modules that the fork server has imported belong to the server's cgroup; what the command adds, and
all of its children, to GROUP.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests import fork_server

COMMANDS = {"trainer": "presage.trainer.__main__", "pipelines": "presage.pipelines.cli"}


def main(arguments: Sequence[str]) -> int:
    """Join the group and run the command."""
    group, module, *given = arguments
    command = importlib.import_module(COMMANDS[module])
    os.environ.pop(fork_server.ADDRESS, None)  # a forked child would be outside of the group
    (Path(group) / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    return command.main(given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
