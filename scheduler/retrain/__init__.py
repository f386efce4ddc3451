"""Retrain a job day by day."""
