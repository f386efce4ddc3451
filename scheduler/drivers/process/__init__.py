"""Pools of processes on this machine."""
