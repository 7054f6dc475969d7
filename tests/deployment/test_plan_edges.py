"""What ``fedplat deploy init --edges`` leaves on the disk."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest
from flwr.common.config import parse_config_args

from fedplat.cli import main
from fedplat.deployment.certificates import read_certificate
from fedplat.deployment.check import ERROR, OK, check, worst
from fedplat.deployment.plan import Federation, add_supernodes
from fedplat.deployment.plan_edges import create_with_edges
from fedplat.deployment.settings import read_settings
from fedplat.errors import UserError


@pytest.fixture
def made(tmp_path: Path) -> list[Federation]:
    return create_with_edges(tmp_path / "fed", edges=2, supernodes=5)


def test_clients_are_dealt_out_as_in_a_simulation(made: list[Federation]) -> None:
    cloud, *edges = made
    assert [path.name for path in cloud.supernodes] == ["edge-0", "edge-1"]
    found = [
        [(path.name, *read_settings(path).values()) for path in edge.supernodes] for edge in (cloud, *edges)
    ]
    partitions = [[(row[0], row[4], row[5]) for row in rows] for rows in found]
    assert partitions == [
        [("edge-0", "0", "2"), ("edge-1", "1", "2")],
        [("supernode-0", "0", "5"), ("supernode-2", "2", "5"), ("supernode-4", "4", "5")],
        [("supernode-1", "1", "5"), ("supernode-3", "3", "5")],
    ]


def test_all_can_run_on_one_machine(made: list[Federation]) -> None:
    places = [place for one in made for place in (one.superlink, *one.supernodes)]
    ports = [read_settings(place)["PORT"] for place in places]
    assert len(set(ports)) == len(ports) == 3 + 2 + 5
    addresses = [read_settings(one.operator)["SUPERLINK"] for one in made]
    assert addresses == ["localhost:8000", "localhost:8001", "localhost:8002"]


def test_each_tier_has_an_authority_of_its_own_and_an_edge_trusts_the_clouds(made: list[Federation]) -> None:
    cloud, one, other = made
    own = [read_certificate(made.authority / "ca.crt") for made in (cloud, one, other)]
    assert len({certificate.fingerprint(certificate.signature_hash_algorithm) for certificate in own}) == 3  # type: ignore[arg-type]
    assert read_certificate(one.folder / "ca.crt") == own[0]
    assert read_certificate(one.supernodes[0] / "ca.crt") == own[1]


def test_an_edge_is_told_where_its_server_is_and_its_secret_is_private(made: list[Federation]) -> None:
    secrets = []
    for place in made[0].edges:
        told = parse_config_args([read_settings(place)["NODE_CONFIG"]])
        assert (place / "work" / str(told["edge-bridge"])).resolve() == place / "bridge"
        secret = place / "bridge" / "secret"
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
        secrets.append(secret.read_text())
    assert len(set(secrets)) == 2


def test_the_server_of_an_edge_is_started_with_what_its_run_config_has(made: list[Federation]) -> None:
    place = made[1].operator
    (place / "run.sh").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    done = subprocess.run(
        [place / "serve.sh", 'min-nodes=2 data-root="/data"'], capture_output=True, text=True, check=True
    )
    assert parse_config_args([done.stdout.splitlines()[2]]) == {
        "tier": "edge",
        "bridge": "../../bridge",
        "signing-keys": "../signing-keys",
        "min-nodes": 2,
        "data-root": "/data",
    }


def test_it_is_well_and_faults_inside_an_edge_are_found(made: list[Federation]) -> None:
    folder = made[0].folder
    assert worst(check(folder)) == OK
    assert len(check(folder)) == 3 + 2 + 2 * 3 + 5
    assert len(check(folder / "edge-1")) == 1 + 3 + 2
    (folder / "edge-1" / "bridge" / "secret").chmod(0o644)
    (made[2].supernodes[0] / "key").unlink()
    for place in (folder, folder / "edge-1"):
        faults = {finding.where.name for finding in check(place) if finding.level == ERROR}
        assert faults == {"secret", "key"}


def test_another_client_of_an_edge_gets_a_number_and_a_port_of_its_own(made: list[Federation]) -> None:
    (new,) = add_supernodes(made[1].folder)
    told = read_settings(new)
    assert (new.name, told["PARTITION"], told["PORT"]) == ("supernode-5", "5", "9101")
    assert told["SUPERLINK"] == "localhost:8001"
    assert (made[1].operator / "supernode-keys" / "supernode-5.pub").exists()
    with pytest.raises(UserError, match=r"has edges: name the one .*edge-0"):
        add_supernodes(made[0].folder)


def test_the_command_makes_it_and_tells_how_to_start_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["deploy", "init", str(tmp_path / "fed"), "--edges", "2", "--supernodes", "2"]
    arguments += ["--host", "cloud.example.org", "--edge-host", "e0.example.org", "--edge-host", "10.0.0.2"]
    assert main(arguments) == 0
    told = capsys.readouterr().out
    for line in ("edge-0/operator/serve.sh", "edge-1/supernode-1/start.sh", 'tier="cloud"'):
        assert line in told
    addresses = [
        read_settings(tmp_path / "fed" / place)["SUPERLINK"]
        for place in ("edge-1", "edge-0/supernode-0", "edge-1/supernode-1")
    ]
    assert addresses == ["cloud.example.org:8000", "e0.example.org:8001", "10.0.0.2:8002"]
    assert main(arguments) == 2
    assert "nothing is ever overwritten" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"edges": 6}, "--edges 6: expected 1 to 5"),
        ({"edge_hosts": ["one"]}, "--edge-host is given 1 times for 2 edges"),
        ({"first_node_port": 8002}, "overlap"),
        ({"first_node_port": 7994}, "overlap"),
        ({"port": 65534}, "the last edge's port"),
        ({"first_node_port": 65530}, "the last SuperNode's port"),
        ({"edge_hosts": ["fine", "http://not"]}, "neither a host name nor an IP address"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(
    changes: dict[str, object], match: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=match):
        create_with_edges(tmp_path / "fed", **{"edges": 2, "supernodes": 5, **changes})  # type: ignore[arg-type]
    assert not (tmp_path / "fed").exists()


def test_hosts_of_edges_need_edges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "init", str(tmp_path / "fed"), "--edge-host", "one"]) == 2
    assert "--edge-host needs --edges" in capsys.readouterr().err
