"""The generated log of the demo."""
