"""What a build would see, in seconds: the first rows of a log through all of its stages."""
