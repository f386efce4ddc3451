"""The Beam shell: the graph, what crosses it, the runner, transforms for others' pipelines."""
