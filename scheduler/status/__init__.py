"""What a scheduler does, for people and for what watches it."""
