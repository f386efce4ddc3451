"""Fenced blocks of the documents: commands and scripts to run or to parse."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(?P<info>[^`\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
OPTIONS = re.compile(r"^(?P<language>console|python)(?: norun=(?P<reason>.+))?$")
HEREDOC = re.compile(r"<<'(\w+)'")
FIRST_WORDS = ("console", "python")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block to run or to parse."""

    language: str
    """`console` or `python`."""
    body: str
    """The text between the fences."""
    line: int
    """Line of the opening fence, from 1."""
    reason: str | None
    """Why it is not run, such as a cluster that it needs; None if it is run."""


def blocks(text: str) -> list[Block]:
    """List the blocks fenced `console` or `python`, in order.

    Raises:
        ValueError: an option after the language is not `norun=<reason>`.
    """
    result: list[Block] = []
    for fence in FENCE.finditer(text):
        info = fence["info"].strip()
        if info.split(" ")[0] not in FIRST_WORDS:
            continue
        line = text.count("\n", 0, fence.start()) + 1
        options = OPTIONS.match(info)
        if options is None:
            raise ValueError(
                f"block must be opened by its language, `norun=<reason>`, "
                f"got info={info!r} in line {line}; mend its first line"
            )
        result.append(
            Block(
                language=options["language"],
                body=fence["body"],
                line=line,
                reason=options["reason"],
            )
        )
    return result


def commands(body: str) -> list[tuple[str, str]]:
    """Split a console block into commands and their expected output.

    A command starts with `$ ` and continues after a backslash at the end of a line. After
    `<<'WORD'` it continues to the line `WORD`.
    """
    result: list[tuple[str, str]] = []
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
            result.append((command, ""))
        elif not result:
            raise ValueError(
                f"console block must start with a command, got line={line!r}; add `$ `"
            )
        else:
            command, output = result[-1]
            result[-1] = (command, output + line + "\n")
    return result


def arguments(command: str) -> list[str]:
    """Split a command into words, without leading assignments and trailing comments."""
    words = shlex.split(command, comments=True)
    while words and re.match(r"^[A-Z_]+=", words[0]):
        words.pop(0)
    return words


def anchor(title: str) -> str:
    """Return the anchor of a heading.

    Example:
        >>> anchor("The columns: `schema.pbtxt`")
        'the-columns-schemapbtxt'
    """
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def anchors(text: str) -> set[str]:
    """List the anchors of a document's headings."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {anchor(title) for title in titles}


def named_anchors(text: str) -> list[tuple[str, str]]:
    """List the anchors that a document links to, with their files; its own have none.

    Example:
        >>> named_anchors("[a](job.md#data), [b](#top), [c](job.md)")
        [('job.md', 'data'), ('', 'top')]
    """
    return re.findall(r"\]\((?!\w+:)([^)#\s]*)#([^)\s]+)\)", text)


def named_paths(text: str, folders: set[str]) -> list[str]:
    """List the files of the repository that a document names in links or backticks."""
    links = re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", text)
    quoted = re.findall(r"`([\w.-]+(?:/[\w.-]+)*\.(?:md|pbtxt|proto|py|sql|toml|yaml))`", text)
    return links + [path for path in quoted if Path(path).parts[0] in folders and "/" in path]


def named_tests(text: str) -> list[tuple[str, str]]:
    """List the tests that a document names in backticks as `FILE::FUNCTION`.

    Example:
        >>> named_tests("shown by `tests/test_a.py::test_b` and `tests/test_a.py`")
        [('tests/test_a.py', 'test_b')]
    """
    return re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", text)
