"""Pools of all jobs as a pure state machine: `handle(state, event)` gives a state and actions."""
