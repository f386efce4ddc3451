"""Completion scripts of `presage`, which shtab makes from the parsers of the commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from importlib import import_module

import shtab

from presage.commands import COMPLETION, PACKAGES, summary

SHELLS = ("bash", "zsh")


def main(words: list[str]) -> int:
    """Print the script of a shell: `presage completion bash`."""
    shell = _own_parser().parse_args(words).shell
    sys.stdout.write(f"{shtab.complete(parser_of_all(), shell)}\n")
    return 0


def parser_of_all() -> argparse.ArgumentParser:
    """Return a parser of all commands; those of packages whose imports are missing lack options."""
    whole = argparse.ArgumentParser("presage")
    commands = whole.add_subparsers()
    parents: dict[str, argparse.ArgumentParser] = {COMPLETION: _own_parser()}
    for package in dict.fromkeys(PACKAGES.values()):
        try:
            parsers = subparsers_of(
                import_module(f"presage.{package}.__main__").build_parser("presage")
            )
        except ModuleNotFoundError as error:
            sys.stderr.write(f"options of {package} are left out: {error}\n")
            continue
        parents |= {name: p for name, p in parsers.items() if PACKAGES.get(name) == package}
    for command in [*PACKAGES, COMPLETION]:
        parent = [parents[command]] if command in parents else []
        parser = commands.add_parser(
            command, help=summary(command), parents=parent, add_help=not parent
        )
        for action in parser._actions:
            if action.nargs != 0 and not action.choices:
                action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]: read by shtab
    return whole


def subparsers_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Return the parser of each command."""
    actions = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return next(actions).choices


def _own_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"presage {COMPLETION}",
        description="Print a completion script; load it by: source <(presage completion bash)",
    )
    parser.add_argument("shell", choices=SHELLS)
    return parser
