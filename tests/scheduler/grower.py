"""A process whose memory grows: `grower.py START_MIB STEP_KIB STEPS`, a line for each step."""

import sys
from pathlib import Path


def main() -> None:
    start, step, steps = map(int, sys.argv[1:])
    held = [b"x" * (start << 20)]
    for number in range(steps):
        held.append(b"x" * (step << 10))
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        sys.stdout.write(f"{number} {pages * 4096}\n")
        sys.stdout.flush()
        if not sys.stdin.readline():
            break


if __name__ == "__main__":
    main()
