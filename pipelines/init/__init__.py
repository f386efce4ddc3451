"""A first job from the files of a log, with a reason for each choice."""
