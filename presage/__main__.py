"""`presage COMMAND ...`: the commands of `pipelines`, `trainer` and `scheduler` under one name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import TextIO


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of the package that has it."""
    return load_command(argv)()


def load_command(argv: Sequence[str] | None = None) -> Callable[[], int]:
    """Import the package that has a command; return what runs the command."""
    commands = import_module("presage.commands")
    words = list(sys.argv[1:] if argv is None else argv)
    command, *rest = words or ["--help"]
    if command == "help" and rest:
        command, *rest = words = [*rest, "--help"]
    if command == "--version":
        return partial(_print, commands.version_text())
    if command in ("-h", "--help", "help"):
        return partial(_print, commands.help_text())
    if command == commands.COMPLETION:
        return partial(import_module("presage.completion").main, rest)
    if command not in commands.PACKAGES:
        return partial(_print, commands.unknown_command(command), sys.stderr, 2)
    package = import_module(f"presage.{commands.PACKAGES[command]}.__main__")
    if commands.PACKAGES[command] == "pipelines":
        package.hide_pandas(command)
    is_own = argv is None and words == sys.argv[1:]  # then it may fork this process
    return partial(package.main, None if is_own else words, "presage")


def _print(text: str, file: TextIO | None = None, status: int = 0) -> int:
    print(text, file=file)
    return status


def run() -> None:
    """Run the command of this process, and end it."""
    import_module("presage.schemas.entry").run_command(load_command)


if __name__ == "__main__":
    run()
