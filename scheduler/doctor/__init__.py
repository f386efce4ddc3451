"""What a machine must have before anything is started on it, each lack with its fix."""
