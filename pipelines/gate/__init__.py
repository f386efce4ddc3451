"""What a segment must be like to stay."""
