"""The files of a dataset: manifests, columns, samples, and their order."""
