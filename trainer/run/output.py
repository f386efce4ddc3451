"""The files of a run that several replicas train, as its writer keeps them.

A run at a path is a folder that all replicas share. At a URL each replica has a work folder of its
own, and the one that is the writer commits the state of its folder (`upload.py`). Beside
the state are small files by which launcher and replicas find each other.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from presage.schemas.config.train import CheckpointConfig
from presage.schemas.run.records import RENDEZVOUS
from presage.schemas.run.run_manifest import LOGS, SMALL_FILES, fetch_run
from presage.schemas.storage.location import Location
from presage.trainer.checkpoint.files import step_of_newest
from presage.trainer.checkpoint.manager import claim_leftovers
from presage.trainer.recovery import DrainInterrupt
from presage.trainer.run.upload import NEWEST, RunUploader, SupersededError, locked_folder
from presage.trainer.stores.store import RowsLostError

logger = logging.getLogger(__name__)

ROWS_LOST = "rows-lost"
"""File of the run, at a URL beside its state, with the id of the attempt whose rows are lost."""


@contextmanager
def report_lost_rows(run: Location, attempt: str) -> Generator[None]:
    """Report a `RowsLostError` to the launcher of an attempt, through a file of the run."""
    try:
        yield
    except RowsLostError:
        (run / ROWS_LOST).write_bytes(attempt.encode())
        raise


def rows_are_lost(run: Location, attempt: str) -> bool:
    """Return whether a replica of an attempt has reported lost rows."""
    return read_run_object(run, ROWS_LOST) == attempt.encode()


def read_run_object(run: Location, name: str) -> bytes | None:
    """Return a file beside the state of a run; None if it does not exist."""
    try:
        return (run / name).read_bytes()
    except FileNotFoundError:
        return None


class RunOutput:
    """The files of a run as one of its replicas has them; a context.

    Attributes:
        folder: local folder of the run.
        location: the same, or the URL of the run.
        attempt: id of the attempt.
    """

    def __init__(self, folder: Path, location: Location, attempt: str) -> None:
        self.folder, self.location, self.attempt = folder, location, attempt
        self._is_local = location.local is not None
        self._uploader: RunUploader | None = None
        self._former: RunUploader | None = None  # which may still commit
        self._next_check = 0.0

    def __enter__(self) -> RunOutput:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        uploader, self._uploader = self._uploader, None
        if uploader is None:
            return
        try:
            uploader.__exit__(kind, error, trace)
        except SupersededError:
            # by the next writer, or by another attempt: either one continues
            logger.info("last state is not uploaded, another process continues the run")

    def logged(self, written: int) -> int:
        """Return the last step whose log lines are durable, -1 for none."""
        if self._is_local:
            return written
        return -1 if self._uploader is None else self._uploader.logged

    @property
    def saved(self) -> int:
        """Step of the newest checkpoint that is durable, -1 for none."""
        if self._is_local:
            return step_of_newest(self.folder)
        return -1 if self._uploader is None else self._uploader.saved

    def check_attempt(self) -> None:
        """Raise if the launcher has ended this attempt; asks at most once a second.

        Raises:
            RowsLostError: a replica has reported lost rows.
            SupersededError: there is another attempt.
        """
        if time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + 1.0
        if rows_are_lost(self.location, self.attempt):
            raise RowsLostError("rows are lost; another replica has reported it")
        rendezvous = read_run_object(self.location, RENDEZVOUS)
        if rendezvous is not None and json.loads(rendezvous)["attempt"] != self.attempt:
            raise SupersededError(self.location)

    @property
    def must_begin(self) -> bool:
        """Whether this replica must `begin` to be the writer; raises errors of its uploads."""
        if self._is_local:
            return False
        error = None if self._uploader is None else self._uploader.error
        if error is not None and not isinstance(error, SupersededError):
            raise error
        return self._uploader is None or error is not None

    def begin(self, write_log: Callable[[], None]) -> None:
        """Make this replica the writer of a run at a URL.

        The folder gets logs and small files of the newest state; row files of checkpoints stay at
        the URL. No checkpoint may be in progress.

        Raises:
            SupersededError: another attempt trains the run.
            StorageError: the store failed.
        """
        self.end()
        if self._former is not None:
            self._former.join()
        state = fetch_run(self.location, self.folder, (*SMALL_FILES, *LOGS))
        if state.manifest.attempt != self.attempt:
            raise SupersededError(self.location)
        write_log()
        self._uploader = RunUploader(self.folder, self.location, state)
        self._uploader.__enter__()

    def end(self) -> None:
        """Let another replica be the writer."""
        if self._uploader is not None:
            self._uploader.stop()
            self._former, self._uploader = self._uploader, None

    def commit(self) -> bool:
        """Make all files of the writer durable; return False if it must `begin` again."""
        if self._uploader is not None:
            try:
                self._uploader.commit()
            except (SupersededError, FileNotFoundError):  # or the run is being changed
                return False
        return True


@contextmanager
def replica_folder(
    run: Location, work: Path, number: int, config: CheckpointConfig
) -> Generator[Path]:
    """Yield the work folder of a replica with the newest state of the run at a URL.

    It has the newest checkpoint alone. It is removed after the body, unless that raises an error.

    Raises:
        SchemaError: another process uses the folder, or the run is damaged.
        StorageError: the store failed.
    """
    with locked_folder(run, work, f"-{number}") as folder:
        claim_leftovers(folder, config, resume=False)
        fetch_run(run, folder, (*SMALL_FILES, *LOGS), NEWEST)
        try:
            yield folder
        except DrainInterrupt:
            shutil.rmtree(folder)
            raise
        shutil.rmtree(folder)
