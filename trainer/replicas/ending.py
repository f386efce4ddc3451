"""After the last step: one replica saves, evaluates and sums up; the others wait for it."""

from __future__ import annotations

from collections.abc import Callable

from trainer.draining import Drain
from trainer.replicas.replica import Replica

_PAUSE_SEC = 0.05


def end(replica: Replica, finish: Callable[[], None], drain: Drain) -> None:
    """Return when the run is finished, whoever of the replicas lives to do it.

    Args:
        replica: that has trained all steps.
        finish: leaves the checkpoint and the summary; may be begun anew by another replica.
        drain: ends a replica that waits at once, one that finishes when it has saved.

    Raises:
        DrainInterrupt: it was asked to end.
    """
    done = False
    while True:
        agreement = replica.agree_on_end(done=done)
        writer = agreement.writer
        if agreement.members[writer].told.done:
            return
        if writer == replica.options.name:
            replica.write_lines()
            finish()
            done = True
        else:
            with drain.at_once():
                drain.sleep(_PAUSE_SEC)
