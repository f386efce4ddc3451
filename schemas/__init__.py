"""Formats that cross package borders, and the pure functions that give them meaning."""
