"""Kubernetes: each process is a bare Pod."""
