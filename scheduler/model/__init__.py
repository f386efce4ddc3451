"""The resource-performance model: terms, fit, predictions."""
