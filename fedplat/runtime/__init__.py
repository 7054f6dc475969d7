"""Engines that run clients."""

from .local import LocalGrid

__all__ = ["LocalGrid"]
