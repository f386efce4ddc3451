"""Pools of processes as Pods of a Kubernetes cluster."""
