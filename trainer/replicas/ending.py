"""After the last step: one replica saves, evaluates and sums up; the others wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable

from trainer.replicas.replica import Replica

_PAUSE_SEC = 0.05


def end(replica: Replica, finish: Callable[[], None]) -> None:
    """Return when the run is finished, whoever of the replicas lives to do it.

    Args:
        replica: that has trained all steps.
        finish: leaves the checkpoint and the summary; may be begun anew by another replica.
    """
    done = False
    while True:
        agreement = replica.agree_on_end(done=done)
        writer = agreement.writer
        if agreement.members[writer].told.done:
            return
        if writer == replica.options.name:
            finish()
            done = True
        else:
            time.sleep(_PAUSE_SEC)
