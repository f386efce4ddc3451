"""Where actions are carried out: the only I/O of the scheduler while jobs run."""
