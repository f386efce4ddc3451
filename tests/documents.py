"""Reads the fenced blocks of the documents: which must run, and which only must parse."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(?P<info>[^`\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
OPTIONS = re.compile(
    r"^(?P<language>console|python)(?: (?P<slow>slow))?(?: norun=(?P<reason>.+))?$"
)
HEREDOC = re.compile(r"<<'(\w+)'")
FIRST_WORDS = ("console", "python")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block that makes a promise."""

    language: str
    """`console` or `python`."""
    body: str
    """The text between the fences."""
    line: int
    """Line of the opening fence, from 1."""
    slow: bool
    """Takes more than a few seconds."""
    reason: str | None
    """Why it is not run, such as the cluster that it needs; None when it is run."""


def blocks(text: str) -> list[Block]:
    """List the blocks fenced `console` or `python`, in order.

    Raises:
        ValueError: the words after the language are none of `slow` and `norun=<reason>`.
    """
    found: list[Block] = []
    for fence in FENCE.finditer(text):
        info = fence["info"].strip()
        if info.split(" ")[0] not in FIRST_WORDS:
            continue
        line = text.count("\n", 0, fence.start()) + 1
        options = OPTIONS.match(info)
        if options is None:
            raise ValueError(
                f"block must be opened by its language, `slow`, `norun=<reason>`, "
                f"got info={info!r} in line {line}; mend its first line"
            )
        found.append(
            Block(
                language=options["language"],
                body=fence["body"],
                line=line,
                slow=options["slow"] is not None,
                reason=options["reason"],
            )
        )
    return found


def commands(body: str) -> list[tuple[str, str]]:
    """Split a console block into commands and what each is said to print.

    A command starts with `$ ` and goes on after a backslash at the end of a line. After `<<'WORD'`
    it goes on to the line that is the word.
    """
    found: list[tuple[str, str]] = []
    lines = iter(body.splitlines())
    for line in lines:
        if line.startswith("$ "):
            command = line[2:]
            while command.endswith("\\"):
                command = command[:-1] + next(lines).strip()
            if (heredoc := HEREDOC.search(command)) is not None:
                ends = False
                while not ends:
                    text = next(lines)
                    command, ends = f"{command}\n{text}", text == heredoc[1]
            found.append((command, ""))
        elif not found:
            raise ValueError(
                f"console block must start with a command, got line={line!r}; add `$ `"
            )
        else:
            command, printed = found[-1]
            found[-1] = (command, printed + line + "\n")
    return found


def arguments(command: str) -> list[str]:
    """Split a command into words, without assignments before it and comments after it."""
    words = shlex.split(command, comments=True)
    while words and re.match(r"^[A-Z_]+=", words[0]):
        words.pop(0)
    return words


def named_paths(text: str, folders: set[str]) -> list[str]:
    """List the files of the repository that a document names in links or in backticks."""
    links = re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", text)
    quoted = re.findall(r"`([\w.-]+(?:/[\w.-]+)*\.(?:md|pbtxt|proto|py|sql|toml|yaml))`", text)
    return links + [path for path in quoted if Path(path).parts[0] in folders and "/" in path]


def named_tests(text: str) -> list[tuple[str, str]]:
    """List the tests that a document names in backticks, as `FILE::FUNCTION`: file and function.

    Example:
        >>> named_tests("shown by `tests/test_a.py::test_b` and `tests/test_a.py`")
        [('tests/test_a.py', 'test_b')]
    """
    return re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", text)
