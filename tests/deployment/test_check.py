"""``fedplat deploy check``: every fault is found, named, and comes with what to do."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fedplat.cli import main
from fedplat.deployment.certificates import issue, make_authority, pem, read_certificate, refusal_of
from fedplat.deployment.check import ERROR, OK, WARNING, Finding, check, worst
from fedplat.deployment.keys import make_node_key, pem_private, read_pem_key
from fedplat.deployment.plan import Federation, create
from fedplat.errors import UserError

HOSTS = ["superlink.example.org", "localhost", "127.0.0.1"]
Change = Callable[[Federation], object]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create(tmp_path_factory.mktemp("made") / "fed", ["superlink.example.org"]).folder


@pytest.fixture
def made(pristine: Path, tmp_path: Path) -> Federation:
    return Federation(Path(shutil.copytree(pristine, tmp_path / "fed")))


def faults(made: Federation, *hosts: str) -> list[Finding]:
    return [finding for finding in check(made.folder, hosts) if finding.level != OK]


def reissue(made: Federation, days: int, start: datetime | None = None, hosts: list[str] = HOSTS) -> None:
    """Write another certificate for the SuperLink, of the right authority."""
    key = read_pem_key(made.authority / "ca.key")
    server_key, server = issue(key, read_certificate(made.authority / "ca.crt"), hosts, days, start)
    (made.superlink / "superlink.key").write_bytes(pem_private(server_key))
    (made.superlink / "superlink.crt").write_bytes(pem(server))


def other_authority(made: Federation) -> None:
    key, authority = make_authority()
    server_key, server = issue(key, authority, HOSTS, 365)
    (made.superlink / "superlink.key").write_bytes(pem_private(server_key))
    (made.superlink / "superlink.crt").write_bytes(pem(server))


def copy(source: Path, target: Path) -> None:
    target.write_bytes(source.read_bytes())


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def ago(days: int) -> datetime:
    return datetime.now(UTC) - timedelta(days=days)


def test_what_init_makes_is_well(made: Federation) -> None:
    findings = check(made.folder)
    assert worst(findings) == OK
    assert [finding.where.name for finding in findings] == [
        "ca",
        "superlink",
        "operator",
        "supernode-0",
        "supernode-1",
        "supernode-2",
    ]


@pytest.mark.parametrize(
    ("change", "where", "what", "remedy"),
    [
        (lambda m: reissue(m, 10, ago(11)), "superlink/superlink.crt", "expired on", "deploy renew"),
        (lambda m: reissue(m, 10, ago(-2)), "superlink/superlink.crt", "not valid before", "set the clock"),
        (other_authority, "superlink/superlink.crt", "not signed by the authority", "deploy renew"),
        (
            lambda m: reissue(m, 365, hosts=["localhost", "127.0.0.1"]),
            "superlink/superlink.crt",
            "clients that connect to superlink.example.org would refuse",
            "--host superlink.example.org",
        ),
        (
            lambda m: reissue(m, 365, hosts=["superlink.example.org"]),
            "superlink/superlink.crt",
            "connect to 127.0.0.1 would refuse",
            "deploy renew",
        ),
        (
            lambda m: (m.superlink / "superlink.key").write_bytes(pem_private(make_node_key())),
            "superlink/superlink.key",
            "not the key of superlink.crt",
            "deploy renew",
        ),
        (lambda m: (m.superlink / "superlink.crt").unlink(), "superlink/superlink.crt", "missing", "renew"),
        (
            lambda m: (m.superlink / "superlink.crt").write_text("x"),
            "superlink/superlink.crt",
            "expected a certificate in PEM",
            "renew",
        ),
        (
            lambda m: (m.superlink / "superlink.key").chmod(0o644),
            "superlink/superlink.key",
            "0644",
            "chmod 600",
        ),
        (lambda m: (m.supernodes[1] / "key").chmod(0o640), "supernode-1/key", "mode 0640", "chmod 600"),
        (
            lambda m: (m.supernodes[1] / "signing.pem").chmod(0o604),
            "supernode-1/signing.pem",
            "0604",
            "chmod 600",
        ),
        (lambda m: (m.authority / "ca.key").chmod(0o644), "ca/ca.key", "others can read", "chmod 600"),
        (lambda m: (m.supernodes[0] / "key").unlink(), "supernode-0/key", "missing", "copy it again"),
        (lambda m: (m.supernodes[0] / "ca.crt").unlink(), "supernode-0/ca.crt", "missing", "copy it again"),
        (
            lambda m: (m.supernodes[0] / "signing.pub").unlink(),
            "supernode-0/signing.pub",
            "missing",
            "copy it again",
        ),
        (
            lambda m: copy(m.supernodes[1] / "key", m.supernodes[0] / "key"),
            "supernode-0/key",
            "not the private key of key.pub",
            "copy it again",
        ),
        (
            lambda m: copy(m.supernodes[1] / "signing.pem", m.supernodes[0] / "signing.pem"),
            "supernode-0/signing.pem",
            "not the private key of signing.pub",
            "copy it again",
        ),
        (
            lambda m: copy(m.supernodes[1] / "signing.pem", m.supernodes[0] / "key"),
            "supernode-0/key",
            "expected an EC private key in OpenSSH format",
            "copy it again",
        ),
        (
            lambda m: (m.superlink / "signing-keys" / "supernode-2.pub").unlink(),
            "superlink/signing-keys/supernode-2.pub",
            "is not known there",
            "copy ",
        ),
        (
            lambda m: copy(*(m.superlink / "signing-keys" / f"supernode-{i}.pub" for i in (0, 2))),
            "superlink/signing-keys/supernode-2.pub",
            "not the key of",
            "copy ",
        ),
        (
            lambda m: copy(*(m.operator / "supernode-keys" / f"supernode-{i}.pub" for i in (0, 2))),
            "operator/supernode-keys/supernode-0.pub",
            "the same key as in",
            "add-supernode",
        ),
        (
            lambda m: (m.authority / "ca.crt").write_bytes(pem(make_authority()[1])),
            "ca/ca.crt",
            "another authority's certificate",
            "copy ",
        ),
        (
            lambda m: (m.authority / "ca.key").write_bytes(pem_private(make_node_key())),
            "ca/ca.key",
            "not the key of ca.crt",
            "copy it again",
        ),
        (
            lambda m: replace(m.supernodes[1] / "settings.env", "PORT=9095", "PORT=many"),
            "supernode-1/settings.env",
            "expected a port from 1 to 65535, found 'many'",
            "correct it",
        ),
        (
            lambda m: replace(m.supernodes[1] / "settings.env", "PORT=9095", "PORT 9095"),
            "supernode-1/settings.env",
            "line 4: expected NAME=value",
            "correct it",
        ),
        (
            lambda m: replace(m.supernodes[1] / "settings.env", "PARTITION=1", "PARTITION=0"),
            "supernode-0/settings.env",
            "partition 0 is also that of",
            "PARTITION",
        ),
    ],
)
def test_every_fault_is_found_with_what_to_do(
    change: Change, where: str, what: str, remedy: str, made: Federation, capsys: pytest.CaptureFixture[str]
) -> None:
    change(made)
    errors = [finding for finding in faults(made) if finding.level == ERROR]
    found = [finding for finding in errors if finding.where == made.folder / where and what in finding.what]
    assert len(found) == 1, errors
    assert remedy in found[0].remedy
    assert main(["deploy", "check", str(made.folder)]) == 2
    printed = capsys.readouterr().out
    assert found[0].what in printed
    assert found[0].remedy in printed


def test_an_authority_that_expired_is_told(made: Federation) -> None:
    key, authority = make_authority(5, ago(6))
    server_key, server = issue(key, authority, HOSTS, 365)
    for place in (made.authority, made.superlink, made.operator, *made.supernodes):
        (place / "ca.crt").write_bytes(pem(authority))
    (made.authority / "ca.key").write_bytes(pem_private(key))
    (made.superlink / "superlink.crt").write_bytes(pem(server))
    (made.superlink / "superlink.key").write_bytes(pem_private(server_key))
    assert {finding.where.name for finding in faults(made)} >= {"ca.crt"}
    assert all(
        "expired" in f.what and "new federation" in f.remedy for f in faults(made) if f.where.name == "ca.crt"
    )


def test_a_certificate_that_expires_soon_is_a_warning(
    made: Federation, capsys: pytest.CaptureFixture[str]
) -> None:
    reissue(made, 29)
    (finding,) = faults(made)
    assert finding.level == WARNING
    assert "expires in 29 days" in finding.what
    assert main(["deploy", "check", str(made.folder)]) == 0
    assert capsys.readouterr().out.rstrip().endswith("1 warning")
    reissue(made, 31)
    assert faults(made) == []


def test_would_clients_that_connect_by_this_name_accept_it(
    made: Federation, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deploy", "check", str(made.folder), "--host", "superlink.example.org"]) == 0
    assert main(["deploy", "check", str(made.folder), "--host", "10.0.0.7"]) == 2
    assert "connect to 10.0.0.7 would refuse" in capsys.readouterr().out
    assert (
        main(["deploy", "renew", str(made.folder), "--host", "superlink.example.org", "--host", "10.0.0.7"])
        == 0
    )
    assert main(["deploy", "check", str(made.folder), "--host", "10.0.0.7"]) == 0


def test_a_shared_port_matters_on_one_machine_only(made: Federation, tmp_path: Path) -> None:
    replace(made.supernodes[1] / "settings.env", "PORT=9095", "PORT=9094")
    (finding,) = faults(made)
    assert finding.level == WARNING
    assert "cannot run on the same machine" in finding.what
    here = create(tmp_path / "here", supernodes=2)
    replace(here.supernodes[1] / "settings.env", "PORT=9095", "PORT=8000")
    (finding,) = faults(here)
    assert finding.level == ERROR
    assert "port 8000 is also that of" in finding.what


def test_a_private_key_where_it_does_not_belong_is_told(made: Federation) -> None:
    stray = made.operator / "backup.txt"
    stray.write_bytes((made.authority / "ca.key").read_bytes())
    (finding,) = faults(made)
    assert (finding.level, finding.where) == (WARNING, stray)


def test_one_machines_folder_is_checked_alone(made: Federation, tmp_path: Path) -> None:
    for number, name in enumerate(("supernode-1", "superlink", "operator", "ca")):
        alone = Path(shutil.copytree(made.folder / name, tmp_path / f"machine-{number}"))
        (finding,) = check(alone)
        assert finding.level == OK
    (alone / "ca.key").chmod(0o644)
    assert worst(check(alone)) == ERROR


def test_machines_that_went_to_their_places_are_not_missed(made: Federation) -> None:
    shutil.rmtree(made.authority)
    shutil.rmtree(made.folder / "supernode-1")
    assert faults(made) == []


@pytest.mark.parametrize("pair", [("key", "key.pub"), ("signing.pem", "signing.pub")])
def test_a_key_of_two_supernodes_is_told_even_where_nobody_else_knows_it(
    pair: tuple[str, str], made: Federation
) -> None:
    shutil.rmtree(made.operator)
    shutil.rmtree(made.superlink)
    for name in pair:
        copy(made.supernodes[0] / name, made.supernodes[2] / name)
    (finding,) = faults(made)
    assert finding.where == made.supernodes[0] / pair[1]
    assert "the same key as in" in finding.what


def test_where_no_machine_is_there_is_nothing_to_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deploy", "check", str(tmp_path / "none")]) == 2
    assert "fedplat deploy init" in capsys.readouterr().err


def test_a_key_that_does_not_fit_is_refused_by_the_handshake(made: Federation) -> None:
    place = made.superlink
    with pytest.raises(UserError, match="not the certificate of this key"):
        refusal_of(place / "ca.crt", place / "superlink.crt", pem_private(make_node_key()), "localhost")
