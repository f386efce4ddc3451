"""Mutation testing: which of a random sample of small changes to the code make a test fail.

    python -m tests.mutants draw --seed 22 --output mutants.json
    python -m tests.mutants cover mutants.json --tree CLONE --hits HITS
    python -m tests.mutants kill mutants.json --tree CLONE --hits HITS --output killed.json

`cover` rewrites a clone so that each mutated location records the test that
runs it; run the suite there once, in any number of parts, then restore the
clone with `git checkout .`. The name of the test is read from the environment,
so that code in child processes is attributed, too (mutmut and cosmic-ray cover
one process; coverage.py slows down training and writes files for each process).
`kill` applies one mutant after another to a clone and runs the tests that cover
it, fast ones first, until the first failure.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("pipelines", "presage", "scheduler", "schemas", "trainer")
_SWAPS: dict[type[ast.AST], Any] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_PROBE = '__import__("mutant_probe").hit({number})'
_PROBE_MODULE = '''"""Records which test runs a mutated place."""
import os

FOLDER = {folder!r}
_recorded = set()


def hit(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    if (number, test) not in _recorded:
        _recorded.add((number, test))
        with open(os.path.join(FOLDER, str(os.getpid())), "a") as file:
            file.write(f"{{number}}\\t{{test}}\\n")
'''


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change at one location.

    Attributes:
        path: of the file, relative to the repository.
        line: of the location, from 1.
        start, end: offsets of the location in the file, in bytes of UTF-8.
        old, new: its source.
        statement: whether the location is a statement; otherwise it is an expression.
    """

    path: str
    line: int
    start: int
    end: int
    old: str
    new: str
    statement: bool


def mutants_of(path: str, source: str) -> list[Mutant]:
    """Return every mutant of the functions in a file.

    Annotations, defaults, decorators, assertions, patterns and expressions in f-strings, whose
    positions Python 3.11 does not report, are not mutated.
    """
    content = source.encode()
    starts = [0]
    for line in content.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    mutants: list[Mutant] = []
    for node in _places(ast.parse(source), inside=False):
        for place, new in _changes(node):
            start = starts[place.lineno - 1] + place.col_offset
            end = starts[(place.end_lineno or 0) - 1] + (place.end_col_offset or 0)
            old = content[start:end].decode()
            is_statement = isinstance(place, ast.stmt)
            mutants.append(Mutant(path, place.lineno, start, end, old, new, is_statement))
    return mutants


def _places(node: ast.AST, *, inside: bool) -> Iterator[ast.AST]:
    if isinstance(node, (ast.JoinedStr, ast.Assert, ast.pattern)):
        return
    if inside:
        yield node
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        for statement in node.body:
            yield from _places(statement, inside=True)
        return
    skipped = [getattr(node, "annotation", None)]
    for child in ast.iter_child_nodes(node):
        if child not in skipped:
            yield from _places(child, inside=inside)


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield the location and the new source of each change of a node."""
    if isinstance(node, ast.Compare):
        if type(node.ops[0]) in _SWAPS:
            ops = [_SWAPS[type(node.ops[0])](), *node.ops[1:]]
            yield node, f"({ast.unparse(ast.Compare(node.left, ops, node.comparators))})"
    elif isinstance(node, ast.BinOp):
        if type(node.op) in _SWAPS:
            yield (
                node,
                f"({ast.unparse(ast.BinOp(node.left, _SWAPS[type(node.op)](), node.right))})",
            )
    elif isinstance(node, ast.BoolOp):
        yield node, f"({ast.unparse(ast.BoolOp(_SWAPS[type(node.op)](), node.values))})"
    elif isinstance(node, ast.UnaryOp):
        if isinstance(node.op, ast.Not):
            yield node, f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield node, str(not node.value)
        elif isinstance(node.value, int):
            yield node, str(node.value + 1)
    elif isinstance(node, ast.Return):
        if node.value is not None and not isinstance(node.value, ast.Constant):
            yield node.value, "None"
    elif isinstance(node, (ast.If, ast.IfExp)):
        yield node.test, f"(not ({ast.unparse(node.test)}))"
    elif isinstance(node, ast.Raise) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield node, "pass"
    elif isinstance(node, ast.AugAssign) and type(node.op) in _SWAPS:
        changed = ast.AugAssign(node.target, _SWAPS[type(node.op)](), node.value)
        yield node, ast.unparse(changed)


def draw(seed: int | str, num_per_package: int) -> list[Mutant]:
    """Draw the same number of random mutants from each package."""
    rng = random.Random(seed)
    drawn: list[Mutant] = []
    for package in PACKAGES:
        mutants: list[Mutant] = []
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            mutants += mutants_of(path.relative_to(REPOSITORY).as_posix(), path.read_text())
        drawn += rng.sample(mutants, num_per_package)
    return drawn


def replaced(content: bytes, changes: list[tuple[int, int, str]]) -> bytes:
    """Return a file with ranges replaced; of insertions at one offset the last comes first."""
    for start, end, new in sorted(changes, key=lambda change: change[0], reverse=True):
        content = content[:start] + new.encode() + content[end:]
    return content


def cover(mutants: list[Mutant], tree: Path, hits: Path) -> None:
    """Rewrite a clone so that its mutated locations record the tests that run them in a folder."""
    hits.mkdir(parents=True, exist_ok=True)
    (tree / "mutant_probe.py").write_text(_PROBE_MODULE.format(folder=str(hits.resolve())))
    inserts: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for number, mutant in enumerate(mutants):
        probe = _PROBE.format(number=number)
        if mutant.statement:
            inserts[mutant.path].append((mutant.start, mutant.start, f"{probe}; "))
        else:  # outer locations open before inner ones and close after them
            inserts[mutant.path].append((mutant.start, mutant.start, f"({probe} or "))
            inserts[mutant.path].append((mutant.end, mutant.end, ")"))
    for path, changes in inserts.items():
        changes.sort(key=lambda change: "(;)".index(change[2].strip()[-1:].replace("r", "(")))
        file = tree / path
        content = replaced(file.read_bytes(), changes)
        compile(content, path, "exec")
        file.write_bytes(content)


def read_hits(folder: Path) -> dict[int, set[str]]:
    """Return the tests that run each mutant, or the test file if a shared fixture runs it."""
    tests: dict[int, set[str]] = defaultdict(set)
    for file in folder.iterdir():
        for line in file.read_text().splitlines():
            number, _, test = line.partition("\t")
            name, _, phase = test.rpartition(" ")
            if name:
                tests[int(number)].add(name if phase == "(call)" else name.partition("::")[0])
    return tests


def seconds_by_test(log: Path) -> dict[str, float]:
    """Parse the output of `--durations=0 -vv`."""
    seconds: dict[str, float] = defaultdict(float)
    for match in re.finditer(
        r"^ *([\d.]+)s (?:call|setup|teardown) +(\S.*)$", log.read_text(), re.M
    ):
        seconds[match[2]] += float(match[1])
    return seconds


def kill(
    mutant: Mutant, tree: Path, tests: list[str], limit_sec: float
) -> dict[str, str | float | int]:
    """Apply a mutant to a clone, run tests until the first failure, and restore the file."""
    file = tree / mutant.path
    original = file.read_bytes()
    assert original[mutant.start : mutant.end].decode() == mutant.old, (
        "the clone is another version"
    )
    listed = tree / "mutant_tests.txt"
    listed.write_text("\n".join(tests))
    start = time.monotonic()
    try:
        file.write_bytes(replaced(original, [(mutant.start, mutant.end, mutant.new)]))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "--no-header",
            "-p",
            "no:cacheprovider",
        ]
        process = subprocess.run(
            [*command, "--timeout=300", f"@{listed.name}"],
            cwd=tree,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=limit_sec,
        )
        verdict = {0: "survived", 1: "killed"}.get(process.returncode, "killed")
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", process.stdout, re.M)
        by = failed[1] if failed else process.stdout[-300:] if verdict == "killed" else ""
    except subprocess.TimeoutExpired:
        verdict, by = "survived", f"no failure in {limit_sec:.0f} s"
    finally:
        file.write_bytes(original)
    seconds = round(time.monotonic() - start, 1)
    return {"verdict": verdict, "by": by, "num_tests": len(tests), "seconds": seconds}


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(description="Mutation testing.")
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw")
    drawing.add_argument("--seed", required=True)
    drawing.add_argument("--per-package", type=int, default=8)
    drawing.add_argument("--output", type=Path, required=True)
    for name in ("cover", "kill"):
        command = commands.add_parser(name)
        command.add_argument("mutants", type=Path)
        command.add_argument("--tree", type=Path, required=True)
        command.add_argument("--hits", type=Path, required=True)
    command.add_argument("--durations", type=Path, help="log of the run that covered")
    command.add_argument("--limit", type=float, default=900, help="seconds for a mutant")
    command.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    if given.command == "draw":
        drawn = [asdict(mutant) for mutant in draw(given.seed, given.per_package)]
        given.output.write_text(json.dumps(drawn, indent=1))
        return
    mutants = [Mutant(**mutant) for mutant in json.loads(given.mutants.read_text())]
    if given.command == "cover":
        cover(mutants, given.tree, given.hits)
        return
    tests = read_hits(given.hits)
    seconds = seconds_by_test(given.durations) if given.durations else {}
    results = json.loads(given.output.read_text()) if given.output.exists() else []
    for number, mutant in enumerate(mutants[len(results) :], len(results)):
        ordered = sorted(tests[number], key=lambda test: (seconds.get(test, 0.0), test))
        uncovered = {"verdict": "survived", "by": "no test runs it", "num_tests": 0, "seconds": 0}
        result = kill(mutant, given.tree, ordered, given.limit) if ordered else uncovered
        results.append({"mutant": asdict(mutant), **result})
        given.output.write_text(json.dumps(results, indent=1))
        line = f"{number} {mutant.path}:{mutant.line} {result['verdict']} {result['by']}"
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
