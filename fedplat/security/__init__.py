"""Checks on what clients send."""
