"""Write a first job from the files of a log."""
