"""What ``fedplat deploy init``, ``add-supernode`` and ``renew`` leave on the disk."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID
from flwr.cli.flower_config import parse_superlink_connection
from flwr.cli.supernode.register import try_load_public_key
from flwr.common.config import parse_config_args

from fedplat.cli import main
from fedplat.deployment.certificates import all_hosts, names_of, parse_host, read_certificate, refusal_of
from fedplat.deployment.keys import read_node_public, read_signing_public, write_new
from fedplat.deployment.plan import Federation, add_supernodes, create, renew
from fedplat.deployment.settings import read_settings
from fedplat.errors import UserError
from fedplat.security.signatures import read_private_key, read_public_keys

PRIVATE = {"ca/ca.key", "superlink/superlink.key"} | {
    f"supernode-{i}/{name}" for i in range(2) for name in ("key", "signing.pem")
}


@pytest.fixture
def made(tmp_path: Path) -> Federation:
    return create(tmp_path / "fed", ["superlink.example.org", "10.0.0.7"], supernodes=2, port=8443)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_certificate_is_for_every_name_and_only_the_authority_vouches_for_it(made: Federation) -> None:
    authority = read_certificate(made.superlink / "ca.crt")
    certificate = read_certificate(made.superlink / "superlink.crt")
    basic = authority.extensions.get_extension_for_class(x509.BasicConstraints)
    assert basic.critical
    assert (basic.value.ca, basic.value.path_length) == (True, 0)
    assert authority.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    authority.verify_directly_issued_by(authority)
    certificate.verify_directly_issued_by(authority)
    assert names_of(certificate) == ["superlink.example.org", "10.0.0.7", "localhost", "127.0.0.1", "::1"]
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.SERVER_AUTH]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    for one in (authority, certificate):
        key = one.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        assert key.curve.name == "secp384r1"
        assert one.not_valid_before_utc < datetime.now(UTC)
    left = certificate.not_valid_after_utc - datetime.now(UTC)
    assert timedelta(days=364, hours=23) < left < timedelta(days=365, hours=1)
    assert authority.not_valid_after_utc > certificate.not_valid_after_utc


def test_a_tls_handshake_succeeds_under_these_names_and_no_other(made: Federation) -> None:
    place = made.superlink
    key = (place / "superlink.key").read_bytes()
    for host in ("superlink.example.org", "10.0.0.7", "localhost", "127.0.0.1", "::1"):
        assert refusal_of(place / "ca.crt", place / "superlink.crt", key, host) is None
    for host in ("example.org", "10.0.0.8"):
        assert "mismatch" in (refusal_of(place / "ca.crt", place / "superlink.crt", key, host) or "").lower()


def test_flower_reads_the_keys_and_every_supernode_has_its_own(made: Federation) -> None:
    seen = set()
    for place in made.supernodes:
        key = load_ssh_private_key((place / "key").read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        assert key.curve.name == "secp384r1"
        assert b"OPENSSH" in (place / "key").read_bytes()
        assert key.public_key() == read_node_public(place / "key.pub")
        seen.add(try_load_public_key(made.operator / "supernode-keys" / f"{place.name}.pub"))
        signing = load_pem_private_key((place / "signing.pem").read_bytes(), None)
        assert isinstance(signing, ed25519.Ed25519PrivateKey)
        known = read_signing_public(made.superlink / "signing-keys" / f"{place.name}.pub")
        assert signing.public_key() == known == read_signing_public(place / "signing.pub")
        seen.add(known.public_bytes_raw())
    assert len(seen) == 4


def test_signed_updates_read_the_signing_keys_under_the_names_of_the_supernodes(made: Federation) -> None:
    known = read_public_keys(made.superlink / "signing-keys")
    assert sorted(known.values()) == ["supernode-0", "supernode-1"]
    for place in made.supernodes:
        key = read_private_key(place / "signing.pem")
        assert known[key.public_key().public_bytes_raw()] == place.name


def test_private_keys_are_their_owners_only_and_lie_nowhere_else(made: Federation) -> None:
    found = {name for name, content in contents(made.folder).items() if b"PRIVATE KEY" in content}
    assert found == PRIVATE
    for name in PRIVATE:
        assert stat.S_IMODE((made.folder / name).stat().st_mode) == 0o600
    for path in (made.folder, *made.folder.rglob("*")):
        if path.is_dir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_private_key_is_never_open_to_others_not_even_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = []
    real = os.open

    def watched(path, flags, mode=0o777, **more):
        handle = real(path, flags, mode, **more)
        modes.append((stat.S_IMODE(os.fstat(handle).st_mode), bool(flags & os.O_EXCL)))
        return handle

    old = os.umask(0)
    try:
        monkeypatch.setattr(os, "open", watched)
        write_new(tmp_path / "key", b"secret", 0o600)
    finally:
        os.umask(old)
    assert modes == [(0o600, True)]


def test_a_second_init_names_the_file_that_is_there_and_changes_nothing(
    made: Federation, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(made.folder)
    assert main(["deploy", "init", str(made.folder), "--supernodes", "5"]) == 2
    told = capsys.readouterr().err
    assert str(made.superlink / "ca.crt") in told
    assert "add-supernode" in told
    assert contents(made.folder) == before


def test_one_file_that_is_there_stops_init_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "ca").mkdir()
    (tmp_path / "ca" / "ca.key").write_text("precious")
    with pytest.raises(UserError, match=r"ca\.key exists already"):
        create(tmp_path)
    assert contents(tmp_path) == {"ca/ca.key": b"precious"}
    with pytest.raises(UserError, match="exists already"):
        write_new(tmp_path / "ca" / "ca.key", b"new", 0o600)


def test_supernodes_are_added_without_touching_a_file(
    made: Federation, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(made.folder)
    assert main(["deploy", "add-supernode", str(made.folder), "--count", "2"]) == 0
    after = contents(made.folder)
    assert {name: after[name] for name in before} == before
    assert [place.name for place in made.supernodes] == [f"supernode-{i}" for i in range(4)]
    assert [read_settings(place)["PORT"] for place in made.supernodes] == ["9094", "9095", "9096", "9097"]
    assert read_settings(made.supernodes[3])["PARTITION"] == "3"
    assert "superlink/signing-keys/supernode-3.pub" in capsys.readouterr().out
    assert main(["deploy", "check", str(made.folder)]) == 0


def test_numbers_go_on_after_those_that_were_given_away(made: Federation) -> None:
    for place in made.supernodes:
        place.rename(place.with_name(f"away-{place.name}"))
    assert [path.name for path in add_supernodes(made.folder)] == ["supernode-2"]


def test_renewing_keeps_the_old_certificate_and_its_names(made: Federation) -> None:
    before = contents(made.folder)
    kept = renew(made.folder, days=10)
    after = contents(made.folder)
    assert [path.read_bytes() for path in kept] == [
        before["superlink/superlink.crt"],
        before["superlink/superlink.key"],
    ]
    assert all(stat.S_IMODE(p.stat().st_mode) & 0o077 == 0 for p in kept if "key" in p.name)
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {"superlink/superlink.crt", "superlink/superlink.key"}
    certificate = read_certificate(made.superlink / "superlink.crt")
    assert names_of(certificate)[:2] == ["superlink.example.org", "10.0.0.7"]
    renew(made.folder, ["other.org"])
    assert names_of(read_certificate(made.superlink / "superlink.crt"))[0] == "other.org"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--host", "https://a.org"], "without a scheme"),
        (["--host", "a.org:8000"], "without a scheme and a port"),
        (["--host", "a b"], "neither a host name"),
        (["--host", "10.0.0.300"], "neither a host name"),
        (["--host", ""], "neither a host name"),
        (["--supernodes", "0"], "0 is not in the range"),
        (["--days", "0"], "0 is not in the range"),
        (["--port", "70000"], "--port: expected a port from 1 to 65535, found '70000'"),
        (["--first-node-port", "65534"], "the last SuperNode's port"),
        (["--port", "9095"], "port 9095 is the SuperLink's"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    options: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deploy", "init", str(tmp_path / "fed"), *options]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "fed").exists()


@pytest.mark.parametrize("command", [[], ["init"], ["add-supernode"], ["renew"], ["check"]])
def test_every_command_has_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", *command, *(["-h"] if command else [])]) == 0
    captured = capsys.readouterr()
    assert f"Usage: fedplat deploy {' '.join(command)}".rstrip() in captured.out
    assert captured.err == ""


def test_hosts_are_told_apart() -> None:
    assert parse_host("Bücher.example").value == "xn--bcher-kva.example"
    assert str(parse_host("[fd00::1]").value) == "fd00::1"
    assert all_hosts(["LOCALHOST", "a.org"]) == ["localhost", "a.org", "127.0.0.1", "::1"]


@pytest.mark.parametrize(
    ("hosts", "bind", "address"),
    [
        ([], "127.0.0.1", "localhost:8000"),
        (["::1"], "::1", "[::1]:8000"),
        (["a.org"], "0.0.0.0", "a.org:8000"),
        (["fd00::7"], "::", "[fd00::7]:8000"),
    ],
)
def test_the_superlink_listens_where_clients_are_told_to_come(
    hosts: list[str], bind: str, address: str, tmp_path: Path
) -> None:
    made = create(tmp_path, hosts, supernodes=1)
    assert read_settings(made.superlink)["BIND"] == bind
    assert read_settings(made.supernodes[0])["SUPERLINK"] == address
    assert f'address = "{address}"' in (made.operator / "flwr-home" / "config.toml").read_text()


FAKE = """\
#!{python}
import json, os, sys
names = ("FLWR_HOME", "FLWR_TELEMETRY_ENABLED", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION")
with open(os.environ["SAID"], "a") as file:
    print(json.dumps([sys.argv, os.getcwd(), {{n: os.environ.get(n) for n in names}}]), file=file)
print('{{"success": true, "run-id": "7", "status": "finished:completed"}}')
"""


Call = tuple[list[str], str, dict[str, str]]


def started(script: Path, tmp_path: Path, *options: str) -> Call:
    """Return how a script called the one program that it calls in the end."""
    return calls(script, tmp_path, *options)[-1]


def calls(script: Path, tmp_path: Path, *options: str) -> list[Call]:
    """Run a script with programs of Flower that only write down how they were called."""
    programs = tmp_path / "bin"
    programs.mkdir(exist_ok=True)
    for name in ("flower-superlink", "flower-supernode", "flwr"):
        (programs / name).write_text(FAKE.format(python=sys.executable))
        (programs / name).chmod(0o755)
    said = tmp_path / "said"
    said.unlink(missing_ok=True)
    places = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [script, *options],
        env={"PATH": places, "SAID": str(said)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in said.read_text().splitlines()]


def after(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def test_scripts_work_wherever_their_folder_was_moved(made: Federation, tmp_path: Path) -> None:
    moved = Federation(made.folder.rename(tmp_path / "some where"))
    words, where, environment = started(moved.superlink / "start.sh", tmp_path, "--log-file", "x.log")
    assert where == str(moved.superlink / "work")
    assert list((moved.superlink / "work").iterdir()) == []
    assert (after(words, "--host"), after(words, "--port")) == ("0.0.0.0", "8443")
    assert after(words, "--ssl-keyfile") == str(moved.superlink / "superlink.key")
    assert {"--enable-supernode-auth", "--disable-runtime-dependency-installation"} <= set(words)
    assert words[-2:] == ["--log-file", "x.log"]
    assert environment == {
        "FLWR_HOME": str(moved.superlink / "flwr-home"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }


def test_a_supernode_is_told_who_it_is_and_where_its_signing_key_lies(
    made: Federation, tmp_path: Path
) -> None:
    place = made.supernodes[1].rename(tmp_path / "St. Mary's")
    text = (place / "settings.env").read_text()
    (place / "settings.env").write_text(
        text.replace("NODE_CONFIG=''", "NODE_CONFIG='device=\"cpu\" threads=2'")
    )
    words, where, _ = started(place / "start.sh", tmp_path)
    assert where == str(place / "work")
    assert after(words, "--superlink") == "superlink.example.org:8443"
    assert after(words, "--port") == "9095"
    assert after(words, "--auth-supernode-private-key") == str(place / "key")
    assert parse_config_args([after(words, "--node-config")]) == {
        "partition-id": 1,
        "num-partitions": 2,
        "name": "supernode-1",
        "signing-key": str(place / "signing.pem"),
        "device": "cpu",
        "threads": 2,
    }


def test_the_operators_scripts_follow_their_folder_and_pass_on_what_they_are_given(
    made: Federation, tmp_path: Path
) -> None:
    place = made.operator.rename(tmp_path / "operator")
    (words, _, environment), (log, *_), (last, *_) = calls(
        place / "run.sh", tmp_path, "quickstart", "fed-credit", "rounds=5"
    )
    assert log[1:] == ["log", "7", "federation", "--stream"]
    assert last[1:] == ["ls", "federation", "--run-id", "7", "--format", "json"]
    assert Path(words[2]).name == "flower_app"
    assert (Path(words[2]) / "pyproject.toml").is_file()
    assert parse_config_args([after(words, "--run-config")]) == {
        "scenario": "quickstart",
        "strategy": "fed-credit",
        "rounds": 5,
    }
    written = tomllib.loads((Path(environment["FLWR_HOME"]) / "config.toml").read_text())["superlink"]
    connection = parse_superlink_connection(written[written["default"]], "federation")
    assert connection.address == "superlink.example.org:8443"
    assert connection.root_certificates == str(place / "ca.crt")
    for number, (words, *_) in enumerate(calls(place / "register.sh", tmp_path)):
        assert words[1:4] == [
            "supernode",
            "register",
            str(place / "supernode-keys" / f"supernode-{number}.pub"),
        ]


def test_a_machine_without_fedplats_environment_is_told_so(made: Federation) -> None:
    done = subprocess.run(
        ["/bin/sh", made.superlink / "start.sh"],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 127
    assert "activate the environment" in done.stderr


def operate(made: Federation, script: str, flwr: str, *options: str) -> tuple[int, str, str]:
    """Run one of the operator's scripts with a ``flwr.sh`` that does what is given."""
    (made.operator / "flwr.sh").write_text(f"#!/bin/sh\n{flwr}\n")
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [made.operator / script, *options], env={"PATH": places}, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_registering_again_is_no_failure_and_anything_else_is(made: Federation) -> None:
    taken = 'echo "[code: 23] Public key already in use." >&2; exit 1'
    status, out, err = operate(made, "register.sh", taken)
    assert (status, out, err) == (0, "supernode-0: registered before\nsupernode-1: registered before\n", "")
    status, out, err = operate(
        made, "register.sh", f"case $3 in *-1.pub) {taken};; *) echo down; exit 1;; esac"
    )
    assert (status, out) == (1, "supernode-1: registered before\n")
    assert err == "supernode-0: not registered\ndown\n"


@pytest.mark.parametrize(("end", "status"), [("finished:completed", 0), ("finished:failed", 1)])
def test_the_run_script_ends_as_the_run_did(end: str, status: int, made: Federation) -> None:
    flwr = f"""case $1 in
run) echo '{{"success": true, "run-id": "1234567890123"}}' ;;
log) echo "the log of $2" ;;
ls) echo '{{"runs": [{{"run-id": "'$4'", "status": "{end}"}}]}}' ;;
esac"""
    code, out, err = operate(made, "run.sh", flwr, "quickstart", "fed-credit")
    assert code == status
    assert "the log of 1234567890123\n" in out
    assert ("finished:failed" in err) == bool(status)


def test_the_run_script_tells_why_a_run_could_not_start(made: Federation) -> None:
    answer = '{"success": false, "error-message": "Invalid run configuration"}'
    code, _, err = operate(made, "run.sh", f"echo '{answer}'; exit 1", "quickstart", "fed-credit")
    assert (code, err) == (1, answer + "\n")
    code, _, err = operate(made, "run.sh", "exit 0", "quickstart")
    assert code == 2
    assert "usage:" in err
