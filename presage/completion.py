"""Completion of `presage` in bash and zsh, generated from the parsers of the commands."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module

from presage.commands import COMPLETION, PACKAGES, summary

SHELLS = ("bash", "zsh")


@dataclass(frozen=True, slots=True)
class Option:
    """A long option.

    Attributes:
        name: such as `--layout`.
        help: one line, or empty.
        choices: its values, if they are limited.
    """

    name: str
    help: str
    choices: tuple[str, ...]


def main(words: list[str]) -> int:
    """Print the script of a shell: `presage completion bash`."""
    parser = argparse.ArgumentParser(
        prog=f"presage {COMPLETION}",
        description="Print a completion script; load it by: source <(presage completion bash)",
    )
    parser.add_argument("shell", choices=SHELLS)
    shell = parser.parse_args(words).shell
    options = options_of_commands()
    sys.stdout.write(bash_script(options) if shell == "bash" else zsh_script(options))
    return 0


def options_of_commands() -> dict[str, list[Option]]:
    """Return the long options of every command; none of a package whose imports are missing."""
    options: dict[str, list[Option]] = {COMPLETION: []}
    for package in dict.fromkeys(PACKAGES.values()):
        commands = [command for command in PACKAGES if PACKAGES[command] == package]
        try:
            parser = import_module(f"{package}.__main__").build_parser("presage")
        except ModuleNotFoundError as error:
            sys.stderr.write(f"options of {package} are left out: {error}\n")
            options |= {command: [] for command in commands}
            continue
        parsers = subparsers_of(parser)
        options |= {command: long_options(parsers[command]) for command in commands}
    return options


def subparsers_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Return the parser of each command."""
    actions = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return next(actions).choices


def long_options(parser: argparse.ArgumentParser) -> list[Option]:
    """Return the long options of a command that its help shows."""
    return [
        Option(name, (action.help or "").split("\n")[0], tuple(map(str, action.choices or ())))
        for action in parser._actions
        if action.help != argparse.SUPPRESS
        for name in action.option_strings
        if name.startswith("--")
    ]


def bash_script(options: Mapping[str, list[Option]]) -> str:
    """Return the script for bash; other words than commands, options and choices are files."""
    return f"""\
# bash completion of presage; source it, or write it to a file in
# ~/.local/share/bash-completion/completions/presage
_presage() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} words=
    if ((COMP_CWORD == 1)); then
        words={shlex.quote(" ".join(["--help", *options]))}
    else
        case "${{COMP_WORDS[1]}} ${{COMP_WORDS[COMP_CWORD - 1]}}" in
{_lines(12, (f"{q}) words={c} ;;" for q, c in _choices(options)))}
            *)
                [[ $word == -* ]] && case ${{COMP_WORDS[1]}} in
{_lines(20, (f"{c}) words={shlex.quote(' '.join(_names(o)))} ;;" for c, o in options.items()))}
                esac
                ;;
        esac
    fi
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")
}}
complete -o bashdefault -o default -F _presage presage
"""


def zsh_script(options: Mapping[str, list[Option]]) -> str:
    """Return the script for zsh, with a line about each command and option."""
    described = {command: _described(options[command]) for command in options}
    commands = _quoted(f"{command}:{summary(command)}" for command in options)
    return f"""\
#compdef presage
# zsh completion of presage; source it after compinit, or write it to a file _presage in $fpath
_presage() {{
    local -a found
    if ((CURRENT == 2)); then
        found=({commands})
        _describe -t commands command found
        return
    fi
    case "$words[2] $words[CURRENT-1]" in
{_lines(8, (f"{q}) compadd -- {c.strip(chr(39))}; return ;;" for q, c in _choices(options)))}
    esac
    if [[ $words[CURRENT] != -* ]]; then
        _files
        return
    fi
    case $words[2] in
{_lines(8, (f"{command}) found=({texts}) ;;" for command, texts in described.items()))}
    esac
    _describe -o option found
}}
if [[ $funcstack[1] == _presage ]]; then
    _presage "$@"
else
    compdef _presage presage
fi
"""


def _choices(options: Mapping[str, list[Option]]) -> Iterable[tuple[str, str]]:
    """Yield the command and the word before each limited value, and the values, both quoted."""
    yield f"'{COMPLETION} {COMPLETION}'", shlex.quote(" ".join(SHELLS))
    for command, own in options.items():
        for option in own:
            if option.choices:
                yield f"'{command} {option.name}'", shlex.quote(" ".join(option.choices))


def _names(options: Iterable[Option]) -> list[str]:
    return [option.name for option in options]


def _described(options: Iterable[Option]) -> str:
    return _quoted(f"{o.name}:{o.help}" if o.help else o.name for o in options)


def _quoted(texts: Iterable[str]) -> str:
    return " ".join(shlex.quote(text) for text in texts)


def _lines(indent: int, lines: Iterable[str]) -> str:
    return "\n".join(" " * indent + line for line in lines)
