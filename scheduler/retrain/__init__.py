"""Trains a job again, day by day, and promotes what is good enough."""
