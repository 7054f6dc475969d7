"""Making a federation of two tiers: a cloud whose SuperNodes are edges, each with a federation inside.

::

    superlink/, operator/, ca/    the cloud's
    edge-0/                       a SuperNode of the cloud's: ca.crt, key, settings.env, start.sh
    edge-0/bridge/secret          between that SuperNode and the edge's own server
    edge-0/superlink/, operator/, ca/, supernode-*/    the edge's own federation; operator/ has serve.sh too
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import UserError
from . import scripts
from .certificates import all_hosts
from .edge_bridge import make_bridge
from .edge_client import BRIDGE_KEY
from .keys import EXECUTABLE, PUBLIC, write_new
from .plan import BRIDGE, GUIDE, Federation, Place, create
from .settings import port_number, read_settings

# As seen from the folder "work" of the SuperNode, where its ClientApp runs.
_NODE_CONFIG = f'{BRIDGE_KEY}="../{BRIDGE}"'


def create_with_edges(
    folder: Path,
    hosts: Sequence[str] = (),
    *,
    edges: int,
    edge_hosts: Sequence[str] = (),
    supernodes: int = 4,
    port: int = 8000,
    first_node_port: int = 9094,
    days: int = 365,
) -> list[Federation]:
    """Make a cloud with ``edges``, among which ``supernodes`` clients are dealt out one by one.

    So client n holds partition n, and is at edge n modulo their number: where a simulation has it too.
    ``hosts`` are names of the cloud's machine, and ``edge_hosts`` one name of each edge's. Edge m's SuperLink
    has port ``port`` + 1 + m. Returns the cloud's federation, then the edges'. Raises UserError, before
    anything is written, for what cannot be, and if any of the files exists.
    """
    if not 1 <= edges <= supernodes:
        raise UserError(f"--edges {edges}: expected 1 to {supernodes}, the number of clients")
    if edge_hosts and len(edge_hosts) != edges:
        raise UserError(
            f"--edge-host is given {len(edge_hosts)} times for {edges} edges: once for each, or never"
        )
    port_number(str(port + edges), "--port: the last edge's port")
    port_number(str(first_node_port + edges + supernodes - 1), "--first-node-port: the last SuperNode's port")
    if port <= first_node_port + edges + supernodes - 1 and first_node_port <= port + edges:
        raise UserError(
            f"--first-node-port {first_node_port}: the {edges + supernodes} ports of SuperNodes and those "
            f"of SuperLinks, {port} to {port + edges}, overlap"
        )
    all_hosts(edge_hosts)
    dealt = [range(edge, supernodes, edges) for edge in range(edges)]
    own = [Place(f"edge-{edge}", edge, edges, _NODE_CONFIG) for edge in range(edges)]
    cloud = create(
        folder, hosts, port=port, first_node_port=first_node_port, days=days, places=own, guide=False
    )
    made, next_port = [cloud], first_node_port + edges
    for edge, place in enumerate(cloud.edges):
        inside = create(
            place,
            edge_hosts[edge : edge + 1],
            port=port + 1 + edge,
            first_node_port=next_port,
            days=days,
            places=[Place(f"supernode-{n}", n, supernodes) for n in dealt[edge]],
            guide=False,
        )
        next_port += len(dealt[edge])
        make_bridge(place / BRIDGE)
        write_new(inside.operator / "serve.sh", scripts.SERVE.encode(), EXECUTABLE)
        made.append(inside)
    address = read_settings(cloud.operator, "SUPERLINK")["SUPERLINK"]
    text = scripts.guide_with_edges(address, [[f"supernode-{n}" for n in numbers] for numbers in dealt])
    write_new(folder / GUIDE, text.encode(), PUBLIC)
    return made
