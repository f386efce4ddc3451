"""`presage COMMAND ...`: the commands of `pipelines`, `trainer` and `scheduler` under one name."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("schemas", "pipelines", "trainer", "scheduler")


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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of the package that has it."""
    check_imports()
    commands = import_module("presage.commands")
    words = list(sys.argv[1:] if argv is None else argv)
    command, *rest = words or ["--help"]
    if command == "help" and rest:
        command, *rest = words = [*rest, "--help"]
    if command == "--version":
        print(commands.version_text())
        return 0
    if command in ("-h", "--help", "help"):
        print(commands.help_text())
        return 0
    if command == commands.COMPLETION:
        return import_module("presage.completion").main(rest)
    if command not in commands.PACKAGES:
        print(commands.unknown_command(command), file=sys.stderr)
        return 2
    # Child processes find these packages, and do not search their working directory.
    import_module("schemas.paths").prepare_process()
    package = import_module(f"{commands.PACKAGES[command]}.__main__")
    if commands.PACKAGES[command] == "pipelines":
        package.hide_pandas(command)
    is_own = argv is None and words == sys.argv[1:]  # then it may fork this process
    return package.main(None if is_own else words, "presage")


if __name__ == "__main__":
    sys.exit(main())
