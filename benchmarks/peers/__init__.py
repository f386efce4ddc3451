"""The peers of the benchmarks, each used as its documentation recommends."""
