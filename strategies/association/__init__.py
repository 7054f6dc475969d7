"""Policies that decide which clients take part in a round, and at which edge server."""
