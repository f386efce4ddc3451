"""`presage COMMAND ...`: the commands of `pipelines`, `trainer` and `scheduler` under one name."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("schemas", "pipelines", "trainer", "scheduler")
COMMANDS = {
    "pipelines": (
        *("generate", "init", "preview", "build", "append", "verify", "expand", "report"),
        *("rewrite", "oracle", "score", "seal", "unseal", "vacuum", "erase"),
    ),
    "trainer": ("train", "evaluate", "export", "publish", "apply", "diff"),
    "scheduler": ("fit", "plan", "simulate", "run", "retrain", "replay", "status", "doctor"),
}
"""Commands by package. Commands of two packages go to the first one: `python -m trainer verify`
and `python -m trainer erase` are for runs."""


def check_imports() -> None:
    """Exit if another package on the path has the name of one of ours."""
    for name in _PACKAGES:
        spec = find_spec(name)
        origin = spec.origin if spec is not None else None
        if origin != str(_ROOT / name / "__init__.py"):
            sys.exit(
                f"error: package {name} must be Presage's, got {origin or 'none with a file'} "
                f"instead of {_ROOT / name}; rename it, or take its folder off PYTHONPATH"
            )


def main() -> int:
    """Run the command of the package that has it."""
    check_imports()
    # Child processes find these packages, and do not search their working directory.
    os.environ |= import_module("schemas.paths").import_variables()
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    for package, commands in COMMANDS.items():
        if command in commands:
            sys.argv[0] = f"presage {package}"
            return import_module(f"{package}.__main__").main()
    lines = (f"  {package:<10} {', '.join(commands)}" for package, commands in COMMANDS.items())
    print("usage: presage COMMAND ...\n\ncommands of\n" + "\n".join(lines))
    return 0 if command in ("-h", "--help") else 2


if __name__ == "__main__":
    sys.exit(main())
