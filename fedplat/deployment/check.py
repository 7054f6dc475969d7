"""Looking over a federation's folders: what would fail when it starts, and what would leak."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cryptography import x509

from ..errors import UserError
from .certificates import is_signed_by, names_of, read_certificate, refusal_of
from .edge_bridge import SECRET
from .keys import (
    fingerprint,
    read_node_key,
    read_node_public,
    read_pem_key,
    read_signing_key,
    read_signing_public,
    stray_private_keys,
)
from .plan import BRIDGE, Federation, is_loopback
from .settings import FILE, read_port, read_settings, split_address

OK, WARNING, ERROR = "ok", "warning", "error"
_DAY = timedelta(days=1)
_SOON = 30 * _DAY
_COPY_AGAIN = "copy it again from where the federation was made"
_T = TypeVar("_T")


class Finding(NamedTuple):
    """One result: how bad, in which file or folder, what, and what to do about it."""

    level: str
    where: Path
    what: str
    remedy: str = ""


def check(folder: Path, hosts: Sequence[str] = ()) -> list[Finding]:
    """Check all machines below a federation's folder, or the one machine whose folder it is.

    ``hosts`` asks besides whether a client would accept the SuperLink under these names. A machine that is
    not here, because its folder went to its place, is passed over. Raises UserError where there is none.
    """
    folder = Path(folder)
    if (folder / FILE).is_file() or (folder / "ca.key").is_file():
        looks, edges = [_Look(Federation(folder.parent), [folder])], [folder]
    else:
        looks, edges = [_Look(Federation(folder), _places(folder))], Federation(folder).edges
        if not looks[0].places:
            raise UserError(
                f"{folder}: neither a federation nor one of its machines is here. "
                f"To make one: fedplat deploy init {folder}"
            )
    # An edge has a federation of its own inside.
    looks += [_Look(Federation(edge), _places(edge)) for edge in edges if (edge / BRIDGE).is_dir()]
    findings: list[Finding] = []
    for look in looks:
        for place in look.places:
            look.machine(place, hosts if look is looks[0] else ())
        look.across()
        findings += look.findings
    return findings


def _places(folder: Path) -> list[Path]:
    """Return the machines of a federation that are here."""
    made, numbered = Federation(folder), [*folder.glob("supernode-*"), *folder.glob("edge-*")]
    places = [made.authority, made.superlink, made.operator, *sorted(numbered)]
    return [place for place in places if place.is_dir()]


def worst(findings: Iterable[Finding]) -> str:
    """Return the worst level there is.

    >>> worst([Finding(OK, Path(), ""), Finding(WARNING, Path(), "")])
    'warning'
    """
    levels = {finding.level for finding in findings}
    return next((level for level in (ERROR, WARNING) if level in levels), OK)


class _Look:
    """One look over the machines: what was found, and what is compared between machines in the end."""

    def __init__(self, made: Federation, places: Sequence[Path]) -> None:
        self.made, self.places = made, places
        self.findings: list[Finding] = []
        self.authorities: dict[bytes, list[Path]] = defaultdict(list)
        self.keys: dict[bytes, list[Path]] = defaultdict(list)
        self.ports: dict[int, list[Path]] = defaultdict(list)
        self.partitions: dict[str, list[Path]] = defaultdict(list)
        self.one_machine = False

    def machine(self, place: Path, hosts: Sequence[str]) -> None:
        """Check one folder by what is in it."""
        before = len(self.findings)
        if place.name == "ca" or (place / "ca.key").is_file():
            about, keys = self._authority(place), ["ca.key"]
        elif place.name == "superlink" or (place / "superlink.crt").is_file():
            about, keys = self._superlink(place, hosts), ["superlink.key"]
        elif place.name == "operator" or (place / "supernode-keys").is_dir():
            about, keys = self._operator(place), []
        else:
            about, keys = self._supernode(place), ["key", "signing.pem"]
        for name in (*keys, f"{BRIDGE}/{SECRET}"):
            self._mode(place / name)
        for path in stray_private_keys(place, keys):
            if path.name.startswith("superlink.key.until-"):
                continue
            self._add(WARNING, path, "a private key that does not belong here", f"remove {path}")
        if not any(finding.level == ERROR for finding in self.findings[before:]):
            self._add(OK, place, about)

    def across(self) -> None:
        """Check what holds between machines."""
        if len(self.authorities) > 1:
            common = max(self.authorities.values(), key=len)
            for paths in self.authorities.values():
                for path in paths if paths is not common else ():
                    what = f"another authority's certificate than {common[0]}"
                    self._add(ERROR, path, what, f"copy {common[0]} to {path}")
        for paths in self.keys.values():
            if len(paths) > 1:
                self._add(
                    ERROR,
                    paths[0],
                    f"the same key as in {', '.join(map(str, paths[1:]))}; no two SuperNodes may share one",
                    "delete one of the two and make another: fedplat deploy add-supernode",
                )
        for port, paths in self.ports.items():
            if len(paths) > 1:
                self._add(
                    ERROR if self.one_machine else WARNING,
                    paths[0] / FILE,
                    f"port {port} is also that of {', '.join(str(path) for path in paths[1:])}"
                    + ("" if self.one_machine else "; they cannot run on the same machine"),
                    f"give each its own PORT in {FILE}",
                )
        for number, paths in self.partitions.items():
            if len(paths) > 1:
                what = f"partition {number} is also that of {', '.join(str(path) for path in paths[1:])}"
                self._add(ERROR, paths[0] / FILE, what, f"give each its own PARTITION in {FILE}")

    def _authority(self, place: Path) -> str:
        key = self._read(read_pem_key, place / "ca.key")
        certificate = self._own_authority(place)
        if key and certificate and fingerprint(key.public_key()) != fingerprint(_public(certificate)):
            self._add(ERROR, place / "ca.key", "not the key of ca.crt", _COPY_AGAIN)
        return "the authority; keep it off the machines of the federation"

    def _superlink(self, place: Path, hosts: Sequence[str]) -> str:
        authority = self._own_authority(place)
        certificate = self._read(read_certificate, place / "superlink.crt", self._renew())
        key = self._read(read_pem_key, place / "superlink.key", self._renew())
        settings = self._settings(place, "BIND", "PORT")
        about = "the SuperLink"
        if certificate:
            names = names_of(certificate)
            about += f", for {', '.join(names)}, until {certificate.not_valid_after_utc:%Y-%m-%d}"
            valid = self._dates(place / "superlink.crt", certificate, self._renew())
            fits = key is None or fingerprint(key.public_key()) == fingerprint(_public(certificate))
            if not fits:
                self._add(ERROR, place / "superlink.key", "not the key of superlink.crt", self._renew())
            signed = authority is None or is_signed_by(certificate, authority)
            if not signed:
                what = f"not signed by the authority of {place / 'ca.crt'}"
                self._add(ERROR, place / "superlink.crt", what, self._renew())
            if authority and key and valid and fits and signed:
                self._accepted(place, names, [*self._addresses(), *hosts, *_own_address(settings)])
        for path in sorted((place / "signing-keys").glob("*")):
            public = self._read(read_signing_public, path, f"remove it, or: {_COPY_AGAIN}")
            if public:
                self.keys[fingerprint(public)].append(path)
        self.one_machine = bool(settings) and _is_loopback(settings.get("BIND", ""))
        return about

    def _accepted(self, place: Path, names: Sequence[str], hosts: Iterable[str]) -> None:
        """Ask for every host whether a client would accept the certificate under that name."""
        key = (place / "superlink.key").read_bytes()
        for host in dict.fromkeys(hosts):
            refused = refusal_of(place / "ca.crt", place / "superlink.crt", key, host)
            if refused:
                given = " ".join(f"--host {name}" for name in (*names, host) if not _is_loopback(name))
                what = f"clients that connect to {host} would refuse it: {refused}"
                self._add(ERROR, place / "superlink.crt", what, f"{self._renew()} {given}")

    def _operator(self, place: Path) -> str:
        self._own_authority(place)
        self._settings(place, "SUPERLINK")
        paths = sorted((place / "supernode-keys").glob("*"))
        for path in paths:
            public = self._read(read_node_public, path, f"remove it, or: {_COPY_AGAIN}")
            if public:
                self.keys[fingerprint(public)].append(path)
        return f"the operator, with the public keys of {len(paths)} SuperNodes"

    def _supernode(self, place: Path) -> str:
        self._own_authority(place)
        settings = self._settings(place, "NAME", "SUPERLINK", "PORT", "PARTITION", "PARTITIONS")
        name = settings.get("NAME", place.name)
        pairs: tuple[tuple[str, Callable[[Path], Any], Callable[[Path], Any], str, Path], ...] = (
            ("key", read_node_key, read_node_public, "key.pub", self.made.operator / "supernode-keys"),
            (
                "signing.pem",
                read_signing_key,
                read_signing_public,
                "signing.pub",
                self.made.superlink / "signing-keys",
            ),
        )
        for file, read, read_public, beside, known in pairs:
            private = self._read(read, place / file)
            public = self._read(read_public, place / beside)
            if private is None or public is None:
                continue
            own = fingerprint(private.public_key())
            if own != fingerprint(public):
                self._add(ERROR, place / file, f"not the private key of {beside}", _COPY_AGAIN)
            elif known.parent in self.places:
                self._known(place / beside, own, known / f"{name}.pub", read_public)
            else:
                self.keys[own].append(place / beside)
        number = settings.get("PARTITION", "")
        if number:
            self.partitions[number].append(place)
        return f"{name}, partition {number}, port {settings.get('PORT', '')}"

    def _known(self, path: Path, own: bytes, known: Path, read: Callable[[Path], Any]) -> None:
        """Check that the other side has this public key under the SuperNode's name."""
        remedy = f"copy {path} to {known}"
        if not known.exists():
            self._add(ERROR, known, f"missing: {path} is not known there", remedy)
            return
        public = self._read(read, known, remedy)
        if public and fingerprint(public) != own:
            self._add(ERROR, known, f"not the key of {path}", remedy)

    def _own_authority(self, place: Path) -> x509.Certificate | None:
        certificate = self._read(read_certificate, place / "ca.crt")
        if certificate:
            self.authorities[fingerprint(_public(certificate))].append(place / "ca.crt")
            remedy = "make a new federation: fedplat deploy init, and give every machine its new folder"
            self._dates(place / "ca.crt", certificate, remedy)
        return certificate

    def _settings(self, place: Path, *names: str) -> dict[str, str]:
        try:
            settings = read_settings(place, *names)
            if "PORT" in names:
                self.ports[read_port(place)].append(place)
            if "SUPERLINK" in names:
                split_address(settings["SUPERLINK"])
        except UserError as error:
            self._add(ERROR, place / FILE, _without(error, place / FILE), "correct it, or " + _COPY_AGAIN)
            return {}
        return settings

    def _addresses(self) -> list[str]:
        """Return the hosts under which the machines that are here connect to the SuperLink."""
        hosts = []
        for place in self.places:
            try:
                hosts.append(split_address(read_settings(place, "SUPERLINK")["SUPERLINK"])[0])
            except UserError:
                continue
        return hosts

    def _dates(self, path: Path, certificate: x509.Certificate, remedy: str) -> bool:
        now = datetime.now(UTC)
        start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if now < start:
            self._add(
                ERROR, path, f"not valid before {start:%Y-%m-%d %H:%M} UTC", f"set the clock, or: {remedy}"
            )
        elif now > end:
            self._add(ERROR, path, f"expired on {end:%Y-%m-%d %H:%M} UTC", remedy)
        elif end - now < _SOON:
            self._add(
                WARNING, path, f"expires in {round((end - now) / _DAY)} days, on {end:%Y-%m-%d}", remedy
            )
        return start <= now <= end

    def _mode(self, path: Path) -> None:
        if path.exists() and (mode := path.stat().st_mode & 0o777) & 0o077:
            what = f"others can read or change this private key (mode {mode:04o})"
            self._add(
                ERROR, path, what, f"chmod 600 {path}; if others use the machine, replace the key as well"
            )

    def _read(self, read: Callable[[Path], _T], path: Path, remedy: str = _COPY_AGAIN) -> _T | None:
        try:
            return read(path)
        except UserError as error:
            self._add(ERROR, path, _without(error, path) if path.exists() else "missing", remedy)
            return None

    def _renew(self) -> str:
        return f"fedplat deploy renew {self.made.folder}"

    def _add(self, level: str, where: Path, what: str, remedy: str = "") -> None:
        self.findings.append(Finding(level, where, what, remedy))


def _public(certificate: x509.Certificate) -> Any:
    return certificate.public_key()


def _without(error: UserError, path: Path) -> str:
    return str(error).removeprefix(f"{path}: ").removeprefix(f"{path}, ")


def _own_address(settings: dict[str, str]) -> list[str]:
    """Return where the SuperLink's own ServerApp connects."""
    bind = settings.get("BIND", "")
    return [{"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind, bind)] if bind else []


def _is_loopback(host: str) -> bool:
    try:
        return is_loopback(host)
    except UserError:
        return False
