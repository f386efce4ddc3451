"""Training on several replicas that may join, leave and die."""
