"""The process that plans the slots of a run: `python -m presage.trainer.slots FOLDER LOCK`.

It reads a dataset, its order and `SlotSettings` from its standard input, and ends with it.
"""

import os
import pickle
import sys
import threading
from pathlib import Path

from presage.trainer.slots.plan import write_error
from presage.trainer.slots.planner import write_plan


def _end_with_input() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    dataset, order, settings = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        write_plan(dataset, order, settings, folder)
    except Exception as error:
        write_error(folder, error)
        raise SystemExit(1) from error
