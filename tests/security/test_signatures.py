from __future__ import annotations

import base64
import copy
import hashlib
import logging
import os
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from fedplat.arrays import FlatArrays, Layout
from fedplat.clients.mods.signing import SigningMod
from fedplat.compat import records_from_bytes, records_to_bytes, set_task_identity
from fedplat.errors import UserError
from fedplat.security.signatures import (
    CHALLENGE,
    SIGNATURE,
    Occasion,
    array_digest,
    fingerprint,
    identity_of,
    packed,
    raw_public_key,
    read_private_key,
    read_public_keys,
    sign,
    simulation_key,
    simulation_keys,
    statement,
    unpacked,
    verified,
)
from fedplat.security.validation import ReplyRefused

from ..flower_apps import record

KEY = simulation_key(1, 0)
RAW = KEY.public_key().public_bytes_raw()
OCCASION = Occasion(5, "train", 2, 2**64 - 1, b"c" * 16)


def reply(count: int = 10, **arrays: np.ndarray) -> RecordDict:
    arrays = arrays or {"w": np.arange(3, dtype=np.float32)}
    metrics = MetricRecord({"num-examples": count, "loss": 0.5})
    return RecordDict({"arrays": record(**arrays), "metrics": metrics})


def digest(**arrays: np.ndarray) -> bytes:
    return array_digest(RecordDict({"arrays": record(**arrays)}))


def line(key: Ed25519PrivateKey, comment: str = "") -> str:
    text = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    return f"{text} {comment}\n" if comment else text


def pem(key, encryption=None) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption or NoEncryption())


# The statement ---------------------------------------------------------------------------------------------


def test_the_bytes_that_are_signed_never_change() -> None:
    # Written out by hand: a client of one version must be understood by a server of another.
    content = RecordDict(
        {
            "metrics": MetricRecord({"num-examples": 3, "loss": 0.5}),
            "a": record(w=np.array([1.0, -2.0], ">f4"), n=np.array(7, np.int64)),
            "empty": ConfigRecord(),
        }
    )

    def part(data: bytes) -> bytes:
        return bytes([len(data), 0, 0, 0, 0, 0, 0, 0]) + data

    hashed = (
        part(b"a")
        + part(b"2")
        + (part(b"n") + part(b"<i8") + part(b"") + bytes.fromhex("0700000000000000"))
        + (part(b"w") + part(b"<f4") + part(b"2") + bytes.fromhex("0000803f 000000c0"))
    )
    expected = (
        part(b"fedplat signed update 1")
        + part(b"5")
        + part(b"train")
        + part(b"2")
        + part(b"18446744073709551615")
        + part(b"cccccccccccccccc")
        + part(hashlib.sha256(hashed).digest())
        + part(part(b"empty") + part(b"config"))
        + part(
            part(b"metrics") + part(b"metrics") + part(b"loss") + part(bytes.fromhex("64000000000000e03f"))
        )
        + part(part(b"metrics") + part(b"metrics") + part(b"num-examples") + part(b"i3"))
    )
    assert statement(OCCASION, content) == expected


@given(st.lists(st.binary(max_size=20), max_size=6))
def test_what_was_packed_is_unpacked(parts: list[bytes]) -> None:
    assert unpacked(packed(*parts)) == parts


@given(st.binary(max_size=40))
def test_anything_else_is_refused_or_packs_to_itself(data: bytes) -> None:
    try:
        parts = unpacked(data)
    except ValueError:
        return
    assert packed(*parts) == data


def test_values_of_different_types_are_signed_differently() -> None:
    values = [1, 1.0, True, "1", b"1", [1], [1.0], [True], ["1"], [b"1"], [], "", b"", False, 0, -0.0, 0.0]
    said = {statement(OCCASION, RecordDict({"c": ConfigRecord({"k": value})})) for value in values}
    assert len(said) == len(values)


def test_metrics_and_settings_of_equal_names_are_signed_differently() -> None:
    as_metric = statement(OCCASION, RecordDict({"r": MetricRecord({"k": 1})}))
    assert as_metric != statement(OCCASION, RecordDict({"r": ConfigRecord({"k": 1})}))


@pytest.mark.parametrize(
    "change",
    [
        {"run_id": 6},
        {"message_type": "train.second"},
        {"server_round": 3},
        {"node_id": 1},
        {"challenge": b"d" * 16},
    ],
)
def test_every_part_of_the_occasion_is_signed(change) -> None:
    other = Occasion(**{**vars(OCCASION), **change})
    assert statement(other, reply()) != statement(OCCASION, reply())


# The digest ------------------------------------------------------------------------------------------------


ODD = {
    "scalar": np.array(3.5, np.float32),
    "empty": np.zeros((0, 4), np.float32),
    "flags": np.array([True, False]),
    "turned": np.arange(6, dtype=np.float64).reshape(2, 3).T,
    "gaps": np.arange(10, dtype=np.int16)[::3],
    "big": np.array([1.0, 2.0], ">f8"),
    "half": np.array([0.5, -0.0], np.float16),
    "complex": np.array([1 + 2j], np.complex64),
    "nan": np.array([np.nan, np.inf], np.float32),
}


def test_the_digest_survives_flowers_wire_format() -> None:
    content = RecordDict({"arrays": record(**ODD)})
    assert array_digest(records_from_bytes(records_to_bytes(content))) == array_digest(content)


def test_the_digest_of_arrays_in_one_memory_is_that_of_separate_ones() -> None:
    flat = FlatArrays.copy_of(ODD)
    assert array_digest(RecordDict({"arrays": flat.to_record()})) == digest(**ODD)
    promoted = Layout.of_record(record(**ODD), promote=True).new().fill(record(**ODD))
    assert array_digest(RecordDict({"arrays": promoted.to_record()})) == digest(**ODD)


def test_memory_order_byte_order_and_order_of_names_do_not_matter() -> None:
    a, b = np.arange(12, dtype=np.float32).reshape(3, 4), np.arange(3, dtype=np.int64)
    expected = digest(a=a, b=b)
    assert digest(b=b, a=a) == expected
    assert digest(a=np.asfortranarray(a), b=b.astype(">i8")) == expected
    assert digest(a=np.repeat(a, 2, axis=1)[:, ::2], b=b) == expected


@pytest.mark.parametrize(
    "other",
    [
        {"a": np.zeros((2, 3), np.float32)},
        {"a": np.zeros(6, np.int32)},
        {"a": np.array([0, 0, 0, 0, 0, 1e-45], np.float32)},
        {"b": np.zeros(6, np.float32)},
        {"a": np.zeros(6, np.float32), "b": np.zeros(0, np.float32)},
        {"a": np.zeros(3, np.float32), "b": np.zeros(3, np.float32)},
        {"a": np.array([0, 0, 0, 0, 0, -0.0], np.float32)},
        {},
    ],
)
def test_shape_type_name_and_every_bit_matter(other) -> None:
    assert digest(**other) != digest(a=np.zeros(6, np.float32))


def test_the_names_of_records_and_empty_records_matter() -> None:
    one, none = record(w=np.zeros(2, np.float32)), ArrayRecord()
    found = {
        array_digest(RecordDict(records))
        for records in ({"a": one}, {"b": one}, {"a": one, "b": none}, {"a": none}, {"b": none}, {})
    }
    assert len(found) == 6


# Verifying -------------------------------------------------------------------------------------------------


def test_a_signed_reply_is_verified_also_after_it_went_over_the_wire() -> None:
    content = sign(reply(**ODD), OCCASION, KEY)
    assert verified(content, OCCASION, {RAW}) == RAW
    assert verified(records_from_bytes(records_to_bytes(content)), OCCASION, {RAW}) == RAW


def test_signing_leaves_the_content_as_it_is_and_replaces_an_old_signature() -> None:
    content = reply()
    again = sign(sign(content, OCCASION, simulation_key(9, 9)), OCCASION, KEY)
    assert SIGNATURE not in content
    assert again["arrays"] is content["arrays"]
    assert verified(again, OCCASION, {RAW}) == RAW


def tampered(**changes: object) -> RecordDict:
    """Return signed content with something changed in the record of its signature."""
    content = sign(reply(), OCCASION, KEY)
    kept = {k: v for k, v in {**content[SIGNATURE], **changes}.items() if v is not None}
    content[SIGNATURE] = ConfigRecord(kept)
    return content


def with_record(name: str, new) -> RecordDict:
    content = sign(reply(), OCCASION, KEY)
    content[name] = new
    return content


def oddly_signed(said: bytes) -> RecordDict:
    return tampered(statement=said, signature=KEY.sign(said))


GOOD = statement(OCCASION, reply())


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (reply(), "the reply is not signed"),
        (tampered(key=None), "does not hold a key, a signature and a statement"),
        (tampered(more=1), "does not hold"),
        (tampered(key=RAW[:31]), "does not hold"),
        (tampered(signature="text"), "does not hold"),
        (with_record(SIGNATURE, MetricRecord({"key": 1})), "does not hold"),
        (with_record(SIGNATURE, ArrayRecord()), "does not hold"),
        (tampered(key=bytes(32)), "not registered: SHA256:"),
        (tampered(signature=bytes(64)), "the signature is not one of the key SHA256:"),
        (tampered(signature=b""), "the signature is not one of the key"),
        (tampered(statement=GOOD + b"x"), "the signature is not one of the key"),
        (
            with_record("arrays", record(w=np.ones(3, np.float32))),
            "the arrays are not those that were signed",
        ),
        (with_record("other", record(w=np.ones(3, np.float32))), "the arrays are not those"),
        (
            with_record("metrics", MetricRecord({"num-examples": 11, "loss": 0.5})),
            "'metrics.num-examples' is",
        ),
        (with_record("metrics", MetricRecord({"num-examples": 10})), "'metrics.loss' is not what was signed"),
        (with_record("extra", ConfigRecord({"a": "b"})), "'extra.a' is not what was signed"),
        (with_record("extra", ConfigRecord()), "'extra' is not what was signed"),
        (oddly_signed(b"I owe you 5"), "no statement about a reply"),
        (oddly_signed(b""), "no statement about a reply"),
        (oddly_signed(packed(b"another program's tag")), "no statement about a reply"),
        (oddly_signed(GOOD + GOOD), "is not what was signed"),
        (oddly_signed(GOOD + packed(unpacked(GOOD)[-1])), "signed otherwise"),
    ],
)
def test_what_is_wrong_is_told(content: RecordDict, reason: str) -> None:
    with pytest.raises(ReplyRefused, match=reason.replace(".", r"\.")):
        verified(content, OCCASION, {RAW})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"run_id": 6}, "signed for run 5, not 6"),
        ({"message_type": "train.x"}, "signed for kind of message train, not train.x"),
        ({"server_round": 3}, "signed for round 2, not 3"),
        ({"node_id": 4}, "signed for node 18446744073709551615, not 4"),
        ({"challenge": b"d" * 16}, "signed for another challenge"),
    ],
)
def test_a_reply_of_another_occasion_is_told(change, reason: str) -> None:
    with pytest.raises(ReplyRefused, match=reason):
        verified(sign(reply(), OCCASION, KEY), Occasion(**{**vars(OCCASION), **change}), {RAW})


@pytest.mark.parametrize("data", [b"", b"\x93NUMPY\x01\x00\x03\x00'''", b"\x93NUMPY\x01\x00\x04\x00{1:\n"])
def test_arrays_that_cannot_be_read_are_refused_whatever_reading_them_raises(data: bytes) -> None:
    # Trap: such a header makes NumPy raise an error of Python's tokenizer.
    broken = ArrayRecord({"w": Array(dtype="float32", shape=(3,), stype="numpy.ndarray", data=data)})
    with pytest.raises(ReplyRefused, match="its content cannot be read"):
        verified(with_record("arrays", broken), OCCASION, {RAW})


# Keys ------------------------------------------------------------------------------------------------------


def test_public_keys_are_read_in_every_form() -> None:
    other = simulation_key(1, 1)
    read = read_public_keys([KEY.public_key(), line(other, "second of all")])
    assert read == {RAW: fingerprint(RAW), other.public_key().public_bytes_raw(): "second of all"}
    assert raw_public_key(RAW) == raw_public_key(line(KEY)) == raw_public_key(line(KEY).encode()) == RAW


def test_a_folder_of_public_keys_names_the_clients_by_file(tmp_path: Path) -> None:
    for i in (0, 1):
        (tmp_path / f"site-{i}.pub").write_text(line(simulation_key(1, i), "whatever"))
    (tmp_path / "README").write_text("no key")
    assert list(read_public_keys(tmp_path).values()) == ["site-0", "site-1"]
    assert read_public_keys(str(tmp_path)) == read_public_keys(tmp_path)


def test_no_two_clients_share_a_key() -> None:
    with pytest.raises(UserError, match="'a' and 'b' have the same public key"):
        read_public_keys([line(KEY, "a"), line(KEY, "b")])


def test_keys_that_are_none_are_refused_with_what_is_allowed(tmp_path: Path) -> None:
    elliptic = ec.generate_private_key(ec.SECP384R1()).public_key()
    other = elliptic.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    for wrong in (b"short", "ssh-ed25519 AAAA", other, 7):
        with pytest.raises(UserError, match="expected an Ed25519 public key"):
            read_public_keys([wrong])  # type: ignore[list-item]
    with pytest.raises(UserError, match="no public key given"):
        read_public_keys([])
    with pytest.raises(UserError, match=r"no \*\.pub file there"):
        read_public_keys(tmp_path / "nowhere")
    (tmp_path / "x.pub").write_bytes(other)
    with pytest.raises(UserError, match=r"x\.pub: expected an Ed25519 public key"):
        read_public_keys(tmp_path)


def test_the_fingerprint_is_that_of_openssh() -> None:
    wire = base64.b64decode(line(KEY).split()[1])
    expected = base64.b64encode(hashlib.sha256(wire).digest()).decode().rstrip("=")
    assert fingerprint(RAW) == f"SHA256:{expected}"


def test_a_private_key_is_read_and_one_that_others_may_read_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "signing.pem"
    path.write_bytes(pem(KEY))
    path.chmod(0o600)
    with caplog.at_level(logging.WARNING, "fedplat"):
        assert read_private_key(path).public_key() == KEY.public_key()
        assert not caplog.records
        path.chmod(0o644)
        read_private_key(path)
    if os.name == "posix":
        assert "chmod 600" in caplog.text


def test_private_keys_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.pem: No such file"):
        read_private_key(tmp_path / "gone.pem")
    path = tmp_path / "key.pem"
    for content, words in (
        (b"no key", "expected an unencrypted PEM file"),
        (pem(KEY, BestAvailableEncryption(b"secret")), "expected an unencrypted PEM file"),
        (pem(ec.generate_private_key(ec.SECP256R1())), "expected an Ed25519 key"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=words):
            read_private_key(path)


def test_the_keys_of_a_simulation_follow_from_seed_and_partition() -> None:
    raw = [key.public_bytes_raw() for key in simulation_keys(3, 5)]
    assert raw[4] == simulation_key(3, 4).public_key().public_bytes_raw()
    assert len({*raw, *(key.public_bytes_raw() for key in simulation_keys(4, 5))}) == 10
    # Never to change, or runs would not resume.
    assert simulation_key(1, 0).private_bytes_raw().hex() == (
        "5b478bf168ef1b5599c3f4849de8f944c2b6a4cd048d0b9c0d589a697e0ccae0"
    )


def test_the_identity_fits_into_64_bits_and_depends_on_the_key_alone() -> None:
    assert identity_of(RAW) == int(hashlib.sha256(RAW).hexdigest()[:16], 16)
    assert 0 <= identity_of(RAW) < 2**64


# The mod ---------------------------------------------------------------------------------------------------


def question(kind: str = "train", challenge: object = b"c" * 16) -> Message:
    content = RecordDict({"arrays": record(w=np.zeros(3, np.float32))})
    if challenge is not None:
        content[CHALLENGE] = ConfigRecord({"challenge": challenge, "server-round": 2})  # type: ignore[dict-item]
    set_task_identity(5)
    return Message(content, 77, kind)


def context(**config) -> Context:
    return Context(5, 77, config, RecordDict(), {})


def train(message: Message, context: Context) -> Message:
    return Message(reply(), reply_to=message)


def test_the_mod_signs_what_the_client_answers() -> None:
    answer = SigningMod(KEY)(question(), context(), train)
    assert verified(answer.content, Occasion(5, "train", 2, 77, b"c" * 16), {RAW}) == RAW
    assert answer.metadata.dst_node_id == train(question(), context()).metadata.dst_node_id


def test_a_mod_travels_to_other_processes() -> None:
    # Trap: a key object cannot be copied.
    answer = copy.deepcopy(SigningMod(KEY))(question(), context(), train)
    assert answer.content[SIGNATURE]["key"] == RAW


@pytest.mark.parametrize(
    "asked", [{"kind": "evaluate"}, {"kind": "query"}, {"challenge": None}, {"challenge": "text"}]
)
def test_what_the_server_does_not_ask_for_is_not_signed(asked) -> None:
    answer = SigningMod(KEY)(question(**asked), context(), train)
    assert list(answer.content) == ["arrays", "metrics"]


def test_an_error_passes_as_it_is() -> None:
    failed = Message(Error(2, "boom"), reply_to=question())
    assert SigningMod(KEY)(question(), context(), lambda m, c: failed) is failed


def test_the_key_is_read_from_the_file_that_the_node_names(tmp_path: Path) -> None:
    path = tmp_path / "signing.pem"
    path.write_bytes(pem(KEY))
    answer = SigningMod.from_node_config()(question(), context(**{"signing-key": str(path)}), train)
    assert answer.content[SIGNATURE]["key"] == RAW


def test_a_node_without_a_key_is_told_what_to_do_before_it_trains() -> None:
    def never(message: Message, context: Context) -> Message:
        raise AssertionError("trained in vain")

    with pytest.raises(UserError, match="--node-config 'signing-key="):
        SigningMod.from_node_config()(question(), context(), never)
    with pytest.raises(UserError, match=r"gone\.pem"):
        SigningMod.from_node_config("k")(question(), context(k="gone.pem"), never)
    with pytest.raises(UserError, match="need a partition-id"):
        SigningMod.for_simulation(1)(question(), context(), never)


def test_a_key_may_depend_on_the_context() -> None:
    keys = SigningMod(lambda context: simulation_key(1, int(context.node_config["partition-id"])))
    by_seed = SigningMod.for_simulation(1)
    for mod in (keys, by_seed):
        answer = mod(question(), context(**{"partition-id": 3}), train)
        assert answer.content[SIGNATURE]["key"] == simulation_key(1, 3).public_key().public_bytes_raw()
    with pytest.raises(UserError, match="not str"):
        SigningMod("key")  # type: ignore[arg-type]
