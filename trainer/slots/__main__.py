"""The process that plans the slots of a run: `python -m presage.trainer.slots FOLDER`.

It reads a line of `encode_job` from its standard input, and ends with it.
"""

import os
import sys
import threading
from pathlib import Path

from presage.trainer.slots.slot_plan import decode_job, write_error
from presage.trainer.slots.slot_planner import write_plan


def _end_with_input() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    job = sys.stdin.readline()
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        write_plan(*decode_job(job), folder)
    except Exception as error:
        write_error(folder, error)
        raise SystemExit(1) from error
