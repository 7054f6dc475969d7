"""Engines that run clients."""
