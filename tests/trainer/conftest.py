"""Threads that sleep while they wait: tests share their cores with other work."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read once, when torch is loaded
