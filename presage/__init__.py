"""The front door of Presage: one command over `pipelines`, `trainer` and `scheduler`."""
