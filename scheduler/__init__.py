"""Sizes, starts and moves the pools that build and train."""
