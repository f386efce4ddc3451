"""Policies compared on a trace of jobs that fail, slow down and run out of memory."""
