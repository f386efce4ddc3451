"""A Beam worker whose bundles are retried and duplicated: `python -m ... CONTROL_ENDPOINT ID`.

Each step that writes files runs twice at the same time, as if two workers had been asked for one
bundle, and then again, as if the results of both were lost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from apache_beam.runners.worker.sdk_worker import SdkHarness

from presage.pipelines.beam import build_parts, io, jobs, runner, stage_transforms

DO_FNS = ((build_parts, "_BuildPart"), (jobs, "_NumberTable"), (runner, "_Save"))
FUNCTIONS = (
    (stage_transforms, "write_side"),
    (stage_transforms, "write_shard"),
    (stage_transforms, "write_fitted"),
    (stage_transforms, "write_rejects"),
    (io, "commit_pending"),
)


def repeat(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs three times, twice at the same time; its third result counts."""

    def run(*arguments: Any) -> Any:
        arguments = tuple(list(a) if isinstance(a, Iterator) else a for a in arguments)
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(call, *arguments) for _ in range(2)]
            errors = [future.exception() for future in futures]
        sys.stdout.write(f"repeated {name} {errors}\n")
        sys.stdout.flush()
        assert None in errors, errors
        return call(*arguments)

    return run


def repeat_all() -> None:
    """Repeat every step that writes files."""
    for module, name in DO_FNS:
        do_fn = getattr(module, name)

        def listed(*arguments: Any, process: Any = do_fn.process) -> list[Any]:
            return list(process(*arguments) or ())

        do_fn.process = repeat(name, listed)
    for module, name in FUNCTIONS:
        setattr(module, name, repeat(name, getattr(module, name)))


if __name__ == "__main__":
    repeat_all()
    SdkHarness(sys.argv[1], worker_id=sys.argv[2]).run()
