"""Where segment jobs run: Beam's local runner, a Flink session cluster, or Dataflow."""
