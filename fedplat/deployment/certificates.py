"""A private certificate authority and the SuperLink's certificate.

Only this authority vouches for the SuperLink: every SuperNode and every ``flwr`` command is given its
certificate and trusts no other, so no certificate has to be bought or renewed with a third party.
"""

from __future__ import annotations

import ipaddress
import re
import ssl
import tempfile
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..errors import UserError
from .keys import PRIVATE, make_node_key, read_file, write_new

CA_DAYS = 3650
# Machines' clocks differ a little; a certificate must not be refused on the day it is made.
_BACKDATED = timedelta(hours=1)
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)\Z")
# The SuperLink's own ServerApp connects to it over the loopback, whatever its name is.
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def parse_host(host: str) -> x509.GeneralName:
    """Return a DNS name or an IP address as it stands in a certificate.

    >>> parse_host("superlink.example.org")
    <DNSName(value='superlink.example.org')>
    >>> parse_host("10.0.0.7")
    <IPAddress(value=10.0.0.7)>

    Raises UserError for anything else, such as a URL or a name with a port.
    """
    try:
        return x509.IPAddress(ipaddress.ip_address(host.removeprefix("[").removesuffix("]")))
    except ValueError:
        pass
    try:
        name = host.encode("idna").decode().lower()
    except UnicodeError:
        name = ""
    labels = name.split(".")
    if len(name) > 253 or not all(map(_LABEL.match, labels)) or labels[-1].isdecimal():
        raise UserError(
            f"'{host}' is neither a host name nor an IP address; give it without a scheme and a port, "
            "for example superlink.example.org or 10.0.0.7"
        )
    return x509.DNSName(name)


def host_text(name: x509.GeneralName) -> str:
    """Return the text of a name that ``parse_host`` gave."""
    return str(name.value)


def all_hosts(hosts: Iterable[str]) -> list[str]:
    """Return the names a certificate needs: those given, once each, and the loopback's."""
    return list(dict.fromkeys(host_text(parse_host(host)) for host in (*hosts, *LOOPBACK)))


def make_authority(
    days: int = CA_DAYS, start: datetime | None = None
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Return the key and the self-signed certificate of a new authority that may only sign end entities.

    It is valid for ``days`` days from ``start``, by default a little before now.
    """
    key = make_node_key()
    serial = x509.random_serial_number()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"fedplat federation {serial % 2**32:08x}")])
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        _builder(name, name, key.public_key(), serial, days, start)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False
        )
        .sign(key, hashes.SHA384())
    )
    return key, certificate


def issue(
    authority_key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    hosts: Sequence[str],
    days: int,
    start: datetime | None = None,
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Return a new key and the certificate of a server that clients reach under ``hosts``.

    It is valid for ``days`` days from ``start``, by default a little before now.
    """
    key = make_node_key()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    identifier = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    certificate = (
        _builder(name, authority.subject, key.public_key(), x509.random_serial_number(), days, start)
        .add_extension(x509.SubjectAlternativeName([parse_host(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False
        )
        .sign(authority_key, hashes.SHA384())
    )
    return key, certificate


def pem(certificate: x509.Certificate) -> bytes:
    """Return a certificate in PEM."""
    return certificate.public_bytes(Encoding.PEM)


def read_certificate(path: Path) -> x509.Certificate:
    """Read a certificate; raises UserError if the file is missing or is none."""
    try:
        return x509.load_pem_x509_certificate(read_file(path))
    except ValueError as error:
        raise UserError(f"{path}: expected a certificate in PEM") from error


def names_of(certificate: x509.Certificate) -> list[str]:
    """Return the host names and addresses for which a certificate was made."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names if isinstance(name, x509.DNSName | x509.IPAddress)]


def is_signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Return whether the authority's key signed the certificate, whatever the date."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def refusal_of(authority: Path, certificate: Path, key: bytes, host: str) -> str | None:
    """Return why a client that connects to ``host`` and trusts ``authority`` would refuse, or None.

    Both sides of a TLS handshake run here in memory, so it is the TLS library that judges: chain, dates, name
    and usage at once. Raises UserError if the certificate does not fit the key.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # The library reads keys from files only; a folder of mkdtemp is private, and so is the file.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "key"
        write_new(path, key, PRIVATE)
        try:
            server.load_cert_chain(certificate, path)
        except ssl.SSLError as error:
            raise UserError(f"{certificate}: not the certificate of this key") from error
    client = ssl.create_default_context(cafile=str(authority))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    name = host_text(parse_host(host))
    one = client.wrap_bio(to_client, to_server, server_hostname=name)
    other = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (one, other):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return error.verify_message
            except ssl.SSLError as error:
                return error.reason or str(error)
    return None


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    serial: int,
    days: int,
    start: datetime | None,
) -> x509.CertificateBuilder:
    begin = start or datetime.now(UTC) - _BACKDATED
    return x509.CertificateBuilder(
        subject_name=subject,
        issuer_name=issuer,
        public_key=key,
        serial_number=serial,
        not_valid_before=begin,
        not_valid_after=begin + timedelta(days=days) + _BACKDATED,
    )


def _usage(**allowed: bool) -> x509.KeyUsage:
    names = (
        "digital_signature",
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "key_cert_sign",
        "crl_sign",
        "encipher_only",
        "decipher_only",
    )
    return x509.KeyUsage(**{name: allowed.get(name, False) for name in names})
