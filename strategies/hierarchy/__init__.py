"""Edge servers between the clients and the cloud."""

from .deciding import Deciding, EdgeFigures, everywhere, no_limits
from .edge import Edge
from .fixed import Fixed
from .grid import FIRST_EDGE_ID, EdgeGrid
from .settings import Edges

__all__ = [
    "FIRST_EDGE_ID",
    "Deciding",
    "Edge",
    "EdgeFigures",
    "EdgeGrid",
    "Edges",
    "Fixed",
    "everywhere",
    "no_limits",
]
