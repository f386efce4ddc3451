"""Execute actions as processes: all I/O of the scheduler while jobs run."""
