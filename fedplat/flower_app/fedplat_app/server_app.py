"""The server's side of a scenario."""

from fedplat.deployment.tiers import app

__all__ = ["app"]
