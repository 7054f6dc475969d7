"""Making a federation: one folder per machine, each complete, none with more than that machine may know.

::

    superlink/      ca.crt, superlink.crt, superlink.key, signing-keys/*.pub, settings.env, start.sh
    supernode-0/    ca.crt, key, key.pub, signing.pem, signing.pub, settings.env, start.sh
    operator/       ca.crt, supernode-keys/*.pub, flwr-home/config.toml, settings.env, *.sh
    ca/             ca.crt, ca.key

A federation with edges is one whose SuperNodes are edges; see :mod:`.plan_edges`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path

from ..errors import UserError
from . import scripts
from .certificates import (
    all_hosts,
    host_text,
    issue,
    make_authority,
    names_of,
    parse_host,
    pem,
    read_certificate,
)
from .keys import (
    EXECUTABLE,
    PRIVATE,
    PUBLIC,
    make_folder,
    make_node_key,
    make_signing_key,
    openssh_line,
    openssh_private,
    pem_private,
    read_pem_key,
    write_new,
)
from .settings import FILE, join_address, port_number, read_settings, settings_text

GUIDE = "commands.txt"
BRIDGE = "bridge"
_MOST_NODES = 10_000


@dataclass(frozen=True)
class Federation:
    """The folders of a federation's machines below one folder."""

    folder: Path

    @property
    def superlink(self) -> Path:
        """The SuperLink's folder."""
        return self.folder / "superlink"

    @property
    def operator(self) -> Path:
        """The folder of whoever registers clients and starts runs."""
        return self.folder / "operator"

    @property
    def authority(self) -> Path:
        """The folder of the certificate authority."""
        return self.folder / "ca"

    @property
    def supernodes(self) -> list[Path]:
        """The folders of the SuperNodes that are here, in the order of their numbers; edges come first."""
        return [*self.edges, *self._numbered("supernode")]

    @property
    def edges(self) -> list[Path]:
        """The folders of the edges that are here: SuperNodes, with a federation of their own inside."""
        return self._numbered("edge")

    def _numbered(self, kind: str) -> list[Path]:
        found = [path.parent for path in self.folder.glob(f"{kind}-*/{FILE}")]
        return sorted(found, key=lambda path: (len(path.name), path.name))


@dataclass(frozen=True)
class Place:
    """A SuperNode to be made: its name, its partition, of how many, and what else its ClientApp is told."""

    name: str
    partition: int
    of: int
    node_config: str = ""


def create(
    folder: Path,
    hosts: Sequence[str] = (),
    *,
    supernodes: int = 3,
    port: int = 8000,
    first_node_port: int = 9094,
    days: int = 365,
    places: Sequence[Place] | None = None,
    guide: bool = True,
) -> Federation:
    """Make authority, certificate, keys, settings and scripts of a new federation below ``folder``.

    Its clients are ``places``, by default so many ``supernodes``; the ``guide`` tells how to start them.
    ``hosts`` are the names under which clients reach the SuperLink, the first is the one they are told; the
    loopback's names are always added. Raises UserError, before anything is written, for a name, number or
    port that cannot be, and if any of the files exists.
    """
    names = all_hosts(hosts)
    if days < 1:
        raise UserError(f"--days {days}: expected at least 1")
    if places is None:
        places = [Place(f"supernode-{number}", number, supernodes) for number in range(supernodes)]
    _check_ports(len(places), port, first_node_port)
    made = Federation(folder)
    there = [*folder.glob("supernode-*"), *(folder / place.name for place in places)]
    for path in (made.superlink, made.operator, made.authority, folder / GUIDE, *there):
        if path.exists():
            found = next((file for file in sorted(path.rglob("*")) if file.is_file()), path)
            raise UserError(
                f"{found} exists already, and nothing is ever overwritten. Choose another folder; to add "
                f"clients to this federation: fedplat deploy add-supernode {folder}"
            )
    address = join_address(names[0], port)
    key, authority = make_authority(max(days, 3650))
    certificate = pem(authority)
    for path in (folder, made.authority):
        make_folder(path)
    write_new(made.authority / "ca.key", pem_private(key), PRIVATE)
    write_new(made.authority / "ca.crt", certificate, PUBLIC)

    _make_superlink(made.superlink, names, port)
    server_key, server = issue(key, authority, names, days)
    write_new(made.superlink / "superlink.key", pem_private(server_key), PRIVATE)
    write_new(made.superlink / "superlink.crt", pem(server), PUBLIC)
    _make_operator(made.operator, address)
    for machine in (made.superlink, made.operator):
        write_new(machine / "ca.crt", certificate, PUBLIC)
    for number, place in enumerate(places):
        _make_supernode(made, place, first_node_port + number, address, certificate)
    if guide:
        text = scripts.guide(address, [place.name for place in places])
        write_new(folder / GUIDE, text.encode(), PUBLIC)
    return made


def add_supernodes(folder: Path, count: int = 1, *, first_node_port: int | None = None) -> list[Path]:
    """Make the folders of more SuperNodes of a federation and return them; no existing file is touched.

    They get the next numbers; in an edge, the next that no client of an edge beside it has. The SuperNodes
    made before keep the number of partitions they were told. Raises UserError where the operator's or the
    SuperLink's folder is not here, and for a cloud, whose SuperNodes are edges.
    """
    made = Federation(folder)
    if made.edges:
        raise UserError(f"{folder} has edges: name the one that is to have more clients, as {made.edges[0]}")
    beside = [made]
    if (made.folder / BRIDGE).is_dir():
        beside = [Federation(edge) for edge in Federation(made.folder.absolute().parent).edges]
    address = read_settings(made.operator, "SUPERLINK")["SUPERLINK"]
    superlink_port = port_number(read_settings(made.superlink, "PORT")["PORT"], str(made.superlink / FILE))
    registered = [
        path for one in beside for path in (one.operator / "supernode-keys").glob("supernode-*.pub")
    ]
    there = [path for one in beside for path in one.supernodes]
    first = max((_number(path.name.removesuffix(".pub")) for path in [*registered, *there]), default=-1) + 1
    used = [int(read_settings(path, "PORT")["PORT"]) for path in there]
    if first_node_port is None:
        first_node_port = max(used, default=9093 + first) + 1
    _check_ports(count, superlink_port, first_node_port)
    certificate = pem(read_certificate(made.operator / "ca.crt"))
    numbers = list(range(first, first + count))
    for number in numbers:
        place = Place(f"supernode-{number}", number, first + count)
        _make_supernode(made, place, first_node_port + number - first, address, certificate)
    return [made.folder / f"supernode-{number}" for number in numbers]


def renew(folder: Path, hosts: Sequence[str] = (), *, days: int = 365) -> list[Path]:
    """Give the SuperLink a new key and certificate, and return the files that keep the old ones.

    Without ``hosts`` it is for the names of the old certificate. Neither SuperNodes nor the operator need
    anything new. Raises UserError if the authority's key is not here.
    """
    made = Federation(folder)
    key = read_pem_key(made.authority / "ca.key")
    authority = read_certificate(made.authority / "ca.crt")
    path = made.superlink / "superlink.crt"
    names = all_hosts(hosts or (names_of(read_certificate(path)) if path.exists() else ()))
    server_key, server = issue(key, authority, names, days)
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    kept = []
    for old in (path, made.superlink / "superlink.key"):
        if old.exists():
            kept.append(old.with_name(f"{old.name}.until-{stamp}"))
            old.rename(kept[-1])
    write_new(made.superlink / "superlink.key", pem_private(server_key), PRIVATE)
    write_new(path, pem(server), PUBLIC)
    return kept


def _make_superlink(folder: Path, names: Sequence[str], port: int) -> None:
    for part in ("", "signing-keys", "work", "flwr-home"):
        make_folder(folder / part)
    values = {"BIND": _bind(names), "PORT": port}
    write_new(folder / FILE, settings_text("The SuperLink: where it listens.", values), PUBLIC)
    write_new(folder / "start.sh", scripts.SUPERLINK.encode(), EXECUTABLE)


def _make_operator(folder: Path, address: str) -> None:
    for part in ("", "supernode-keys", "flwr-home"):
        make_folder(folder / part)
    about = "The operator: where the SuperLink is."
    write_new(folder / FILE, settings_text(about, {"SUPERLINK": address}), PUBLIC)
    connection = scripts.connection_text(address, folder.resolve() / "ca.crt")
    write_new(folder / "flwr-home" / "config.toml", connection, PRIVATE)
    for name, text in (("flwr", scripts.FLWR), ("register", scripts.REGISTER), ("run", scripts.RUN)):
        write_new(folder / f"{name}.sh", text.encode(), EXECUTABLE)


def _make_supernode(made: Federation, place: Place, port: int, address: str, certificate: bytes) -> None:
    name, folder = place.name, made.folder / place.name
    for part in ("", "work", "flwr-home"):
        make_folder(folder / part)
    key, signing = make_node_key(), make_signing_key()
    public, verifying = (openssh_line(one.public_key(), name) for one in (key, signing))
    write_new(folder / "key", openssh_private(key), PRIVATE)
    write_new(folder / "signing.pem", pem_private(signing), PRIVATE)
    values = {
        "NAME": name,
        "SUPERLINK": address,
        "PORT": port,
        "PARTITION": place.partition,
        "PARTITIONS": place.of,
        "NODE_CONFIG": place.node_config,
    }
    about = (
        "A SuperNode: where the SuperLink is, a port of its own on this machine, which part of the data it "
        "holds of how many, and what else its ClientApp is told, such as 'data-root=\"/data\"'."
    )
    for path, content, mode in (
        (folder / "key.pub", public, PUBLIC),
        (folder / "signing.pub", verifying, PUBLIC),
        (folder / "ca.crt", certificate, PUBLIC),
        (folder / FILE, settings_text(about, values), PUBLIC),
        (folder / "start.sh", scripts.SUPERNODE.encode(), EXECUTABLE),
        (made.operator / "supernode-keys" / f"{name}.pub", public, PUBLIC),
        (made.superlink / "signing-keys" / f"{name}.pub", verifying, PUBLIC),
    ):
        write_new(path, content, mode)


def _bind(names: Sequence[str]) -> str:
    """Return where to listen: only on the loopback if it has no other name."""
    first = names[0]
    if is_loopback(first):
        return "::1" if ":" in first else "127.0.0.1"
    return "::" if ":" in first else "0.0.0.0"


def is_loopback(host: str) -> bool:
    """Return whether a host name or an address is this machine's own."""
    name = host_text(parse_host(host))
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _check_ports(supernodes: int, port: int, first: int) -> None:
    if not 1 <= supernodes <= _MOST_NODES:
        raise UserError(f"--supernodes {supernodes}: expected 1 to {_MOST_NODES:,}")
    port_number(str(port), "--port")
    port_number(str(first), "--first-node-port")
    port_number(str(first + supernodes - 1), "--first-node-port: the last SuperNode's port")
    if first <= port < first + supernodes:
        raise UserError(f"--first-node-port {first}: port {port} is the SuperLink's")


def _number(name: str) -> int:
    tail = name.rpartition("-")[2]
    return int(tail) if tail.isascii() and tail.isdecimal() else -1
