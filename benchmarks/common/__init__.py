"""What all benchmarks share: options, rounds, results, logs and processes."""
