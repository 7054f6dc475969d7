"""What a training message says of the tier between clients and cloud, in its configuration."""

from __future__ import annotations

EDGE = "fedplat.edge"
"""The number of the edge server that sends the message."""

EDGE_ROUND = "fedplat.edge-round"
"""Which of the edge's rounds the message belongs to, from 1, within the round that is ``server-round``."""
