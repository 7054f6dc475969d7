"""The server's side of a scenario."""

from fedplat.serving import app

__all__ = ["app"]
