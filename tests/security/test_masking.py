from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import pytest

from fedplat.security.masking import (
    ProtocolError,
    Session,
    add_mask,
    add_pair_masks,
    new_private_key,
    pair_key,
    public_key,
    seal,
    unseal,
)
from fedplat.security.secure_group import SEALED_BYTES, SecureGroup
from fedplat.security.secure_member import Member, Peer, agreement, pair_mask_key
from fedplat.security.shamir import SHARE_BYTES

SESSION = Session(bytes(range(16)), 3)
TERMS = b"what everybody was told"
LARGE = 2**64 - 1  # the largest node id there is


class Play:
    """A group and its members, with everybody's vectors; members may leave after any step."""

    def __init__(self, n: int, threshold: int, length: int = 10, dtype: type = np.uint32) -> None:
        rng = np.random.default_rng(n)
        ids = [LARGE, *range(5, 5 + n - 1)]
        top = np.iinfo(dtype).max
        self.vectors = {i: rng.integers(0, top, length, dtype, endpoint=True) for i in ids}
        self.members = {i: Member.new(i, SESSION) for i in ids}
        self.group = SecureGroup(ids, threshold, SESSION)

    def keys(self, without: Collection[int] = ()) -> None:
        for i, member in self.members.items():
            if i not in without:
                self.group.take_keys(i, *member.public_keys())

    def shares(self, without: Collection[int] = ()) -> None:
        for peer in self.group.listed:
            if peer.node_id not in without:
                i = peer.node_id
                self.members[i], sealed, seed = self.members[i].share(self.group.listed, self.group.threshold)
                self.group.take_shares(i, sealed, seed)

    def train(self, without: Collection[int] = ()) -> None:
        for i in self.group.sharing:
            if i not in without:
                self.members[i], masked = self.members[i].masked(self.vectors[i], self.group.sharing, TERMS)
                self.group.take_masked(i, masked)

    def reveal(self, without: Collection[int] = ()) -> None:
        for i in self.group.survivors:
            if i not in without:
                shares = self.members[i].reveal(self.group.survivors, self.group.sealed_for(i))
                self.group.take_revealed(i, shares)

    def all_steps(self, *without: Collection[int]) -> np.ndarray:
        for step, gone in zip((self.keys, self.shares, self.train, self.reveal), without, strict=True):
            step(gone)
        return self.group.total(TERMS)

    def plain_sum(self, ids: Sequence[int]) -> np.ndarray:
        return np.sum([self.vectors[i] for i in ids], axis=0, dtype=self.vectors[LARGE].dtype)


# Masks -----------------------------------------------------------------------------------------------------


def test_a_mask_is_the_chacha20_keystream() -> None:
    # RFC 8439, A.1, test vector 1: the first block under a key, nonce and counter of zeros.
    block = bytes.fromhex(
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    for dtype in ("<u4", "<u8"):
        vector = np.zeros(64 // np.dtype(dtype).itemsize, dtype)
        add_mask(vector, bytes(32))
        assert vector.tobytes() == block


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 65_535, 65_536, 65_537, 200_001])
@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_a_mask_of_any_length_is_one_stream_and_comes_off_again(length: int, dtype: type) -> None:
    vector = np.arange(length, dtype=dtype)
    add_mask(vector, b"k" * 32)
    longer = np.arange(length + 100, dtype=dtype)
    add_mask(longer, b"k" * 32)
    np.testing.assert_array_equal(vector, longer[:length])
    add_mask(vector, b"k" * 32, subtract=True)
    np.testing.assert_array_equal(vector, np.arange(length, dtype=dtype))


def test_the_masks_of_a_pair_cancel_out() -> None:
    low, high = np.zeros(100, np.uint32), np.zeros(100, np.uint32)
    add_pair_masks(low, 3, [(LARGE, b"k" * 32)])
    add_pair_masks(high, LARGE, [(3, b"k" * 32)])
    assert low.any()
    assert not (low + high).any()
    add_pair_masks(high, LARGE, [(3, b"k" * 32)], undo=True)
    assert not high.any()


def test_both_owners_derive_the_same_key_and_nobody_else_or_for_another_purpose() -> None:
    a, b, c = (new_private_key() for _ in range(3))
    info = SESSION.info(b"purpose", 1, 2)
    key = pair_key(a, public_key(b), info)
    assert key == pair_key(b, public_key(a), info)
    others = [
        pair_key(c, public_key(b), info),
        pair_key(a, public_key(b), SESSION.info(b"other purpose", 1, 2)),
        pair_key(a, public_key(b), SESSION.info(b"purpose", 2, 1)),
        pair_key(a, public_key(b), replace(SESSION, server_round=4).info(b"purpose", 1, 2)),
        pair_key(a, public_key(b), replace(SESSION, token=bytes(16)).info(b"purpose", 1, 2)),
    ]
    assert len({key, *others}) == 6


@pytest.mark.parametrize("bad", [bytes(32), b"\x01" + bytes(31), bytes(31)])
def test_a_public_key_that_gives_everybody_the_same_secret_is_refused(bad: bytes) -> None:
    with pytest.raises(ProtocolError, match="public key is not valid"):
        pair_key(new_private_key(), bad, b"")


def test_a_sealed_message_opens_for_its_key_and_purpose_only() -> None:
    key = bytes(32)
    sealed = seal(key, b"share", b"purpose")
    assert sealed != seal(key, b"share", b"purpose")
    assert unseal(key, sealed, b"purpose") == b"share"
    assert unseal(key, sealed, b"another") is None
    assert unseal(b"k" * 32, sealed, b"purpose") is None
    assert unseal(key, sealed[:-1] + bytes([sealed[-1] ^ 1]), b"purpose") is None
    assert unseal(key, b"", b"purpose") is None
    assert len(seal(key, bytes(2 * SHARE_BYTES), b"")) == SEALED_BYTES


# A group ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("step", [None, 0, 1, 2, 3])
def test_the_sum_is_exact_whoever_drops_out_at_any_step_as_long_as_enough_stay(
    n: int, step: int | None
) -> None:
    threshold = n // 2 + 1
    everybody = [*range(5, 5 + n - 1), LARGE]
    for lost in range(1, n - threshold + 1) if step is not None else [0]:
        gone = everybody[:lost] if lost % 2 else everybody[-lost:]
        play = Play(n, threshold, length=37)
        total = play.all_steps(*(gone if i == step else () for i in range(4)))
        summed = everybody if step in (None, 3) else [i for i in everybody if i not in gone]
        np.testing.assert_array_equal(total, play.plain_sum(summed))


def test_some_may_drop_out_at_every_step_of_one_round() -> None:
    play = Play(7, 4, length=70_001, dtype=np.uint64)
    total = play.all_steps([5], [6], [7], ())
    np.testing.assert_array_equal(total, play.plain_sum([8, 9, 10, LARGE]))
    np.testing.assert_array_equal(total, play.group.total(TERMS))


def test_without_enough_members_there_is_no_sum_and_the_reason_says_how_many() -> None:
    play = Play(5, 3)
    with pytest.raises(ProtocolError, match="2 of at least 3 members gave a share"):
        play.all_steps((), (), (), [5, 6, LARGE])
    assert play.group.lacking(play.group.revealing, "answered") == "2 of at least 3 members answered"
    assert play.group.lacking(play.group.survivors, "answered") == ""


def test_masks_are_fresh_in_every_round_and_the_sum_is_the_same() -> None:
    sent, sums = [], []
    for _ in range(2):
        play = Play(3, 2, length=1000)
        play.keys()
        play.shares()
        sent.append(play.members[5].masked(np.zeros(1000, np.uint32), play.group.sharing, TERMS)[1])
        play.train()
        play.reveal()
        sums.append(play.group.total(TERMS))
    np.testing.assert_array_equal(*sums)
    assert not (sent[0] == sent[1]).any()
    # Of 32,000 bits of a masked vector of zeros, half are set: 16,000 ± 5 standard deviations of 89.
    assert abs(int(np.unpackbits(sent[0].view(np.uint8)).sum()) - 16_000) < 450


def test_one_masked_vector_stays_masked_when_all_that_the_others_reveal_is_known() -> None:
    # The mask of a survivor's own stays on even if the server learned all of its masks with others.
    play = Play(3, 2, length=1000)
    play.keys()
    play.shares()
    member = play.members[5]
    _, masked = member.masked(np.zeros(1000, np.uint32), play.group.sharing, TERMS)
    for peer in play.group.listed:
        if peer.node_id != 5:
            agreed = agreement(play.group.sharing, TERMS)
            key = pair_mask_key(SESSION, member.mask_key, 5, peer, agreed)
            add_pair_masks(masked, 5, [(peer.node_id, key)], undo=True)
    assert np.count_nonzero(masked) > 990


@pytest.mark.parametrize("changed", ["terms", "members"])
def test_members_who_were_told_different_things_give_noise_instead_of_a_sum(changed: str) -> None:
    # A server that sends one client a model of its own would otherwise learn what that one does with it.
    play = Play(4, 3, length=1000)
    play.keys()
    play.shares()
    for i in play.group.sharing:
        terms = b"another model" if changed == "terms" and i == 6 else TERMS
        summed = (5, 6, 7) if changed == "members" and i == 6 else play.group.sharing
        member, masked = play.members[i].masked(play.vectors[i], summed, terms)
        play.members[i] = replace(member, summed=play.group.sharing)
        play.group.take_masked(i, masked)
    play.reveal()
    noise = play.group.total(TERMS) - play.plain_sum(play.group.sharing)
    assert np.count_nonzero(noise) > 990


# What a client refuses -------------------------------------------------------------------------------------


def ready(n: int = 4, threshold: int = 3) -> Play:
    play = Play(n, threshold)
    play.keys()
    return play


def test_a_client_shares_its_secrets_once_and_only_in_a_list_that_is_right() -> None:
    play = ready()
    peers, member = play.group.listed, play.members[6]
    own = next(peer for peer in peers if peer.node_id == 6)
    others = tuple(peer for peer in peers if peer.node_id != 6)
    double = Peer(7, peers[0].encryption_key, peers[0].mask_key)
    for listed, words in [
        (others, "not in the list"),
        ((*others[:1], replace(own, mask_key=own.encryption_key), *others[1:]), "not in the list"),
        (tuple(reversed(peers)), "not in order"),
        ((peers[0], *peers), "not in order"),
        ((*peers[:2], double, peers[3]), "a key appears twice"),
    ]:
        with pytest.raises(ProtocolError, match=words):
            member.share(listed, 3)
    for threshold in (0, 1, 2, 5):  # more than half, at most all
        with pytest.raises(ProtocolError, match=f"a threshold of {threshold} among 4 members is refused"):
            member.share(peers, threshold)
    with pytest.raises(ProtocolError, match="at least 4"):
        member.share(peers, 3, least=4)
    shared, sealed, _ = member.share(peers, 3)
    assert len(sealed) == 3
    with pytest.raises(ProtocolError, match="shared already"):
        shared.share(peers, 3)


def test_a_client_sends_one_masked_vector_and_only_to_be_summed_with_enough_of_its_group() -> None:
    play = ready()
    vector = play.vectors[6]
    with pytest.raises(ProtocolError, match="no secrets have been shared"):
        play.members[6].masked(vector, (5, 6, 7), TERMS)
    play.shares()
    member = play.members[6]
    for summed, words in [
        ((5, 7, LARGE), "not those of this client's group"),
        ((5, 6, 99), "not those of this client's group"),
        ((5, 6), "2 members are fewer than the threshold, 3"),
        ((5, 6, 6), "2 members are fewer than the threshold, 3"),
    ]:
        with pytest.raises(ProtocolError, match=words):
            member.masked(vector, summed, TERMS)
    before = vector.copy()
    sent, masked = member.masked(vector, (5, 6, 7), TERMS)
    np.testing.assert_array_equal(vector, before)
    assert (masked != vector).all()
    with pytest.raises(ProtocolError, match="sent already"):
        sent.masked(vector, (5, 6, 7), TERMS)


def test_a_client_reveals_one_of_two_shares_per_member_and_only_about_a_right_set_of_survivors() -> None:
    play = ready()
    play.shares()
    sealed = play.group.sealed_for(6)
    with pytest.raises(ProtocolError, match="no masked update has been sent"):
        play.members[6].reveal((5, 6, 7), sealed)
    play.train(without=[LARGE])
    member = play.members[6]
    for survivors, words in [
        ((5, 7, LARGE), "not those among whom"),
        ((5, 6, 7, 99), "not those among whom"),
        ((5, 6), "2 survivors are fewer than the threshold, 3"),
    ]:
        with pytest.raises(ProtocolError, match=words):
            member.reveal(survivors, sealed)
    shares = member.reveal((5, 6, 7), sealed)
    everybody = member.reveal((5, 6, 7, LARGE), sealed)  # a mod forgets the member after the first answer
    assert all(len(share) == SHARE_BYTES for share in shares.values())
    assert {i for i in shares if shares[i] != everybody[i]} == {LARGE}


def test_what_cannot_be_opened_is_left_out_and_the_others_make_up_for_it() -> None:
    play = ready()
    play.shares()
    play.train()
    spoilt = {**play.group.sealed_for(6), 5: bytes(SEALED_BYTES)}
    shares = play.members[6].reveal(play.group.survivors, spoilt)
    assert sorted(shares) == [6, 7, LARGE]
    play.reveal(without=[6])
    play.group.take_revealed(6, shares)
    np.testing.assert_array_equal(play.group.total(TERMS), play.plain_sum([5, 6, 7, LARGE]))


# What the server refuses -----------------------------------------------------------------------------------


def test_bad_or_copied_keys_are_refused() -> None:
    play = Play(3, 2)
    encryption, mask = play.members[5].public_keys()
    play.group.take_keys(5, encryption, mask)
    for keys, words in [
        ((mask, public_key(new_private_key())), "appears twice"),
        ((public_key(new_private_key()),) * 2, "appears twice"),
        ((bytes(32), public_key(new_private_key())), "not valid"),
        ((b"short", mask), "32 bytes"),
    ]:
        with pytest.raises(ProtocolError, match=words):
            play.group.take_keys(6, *keys)
    assert [peer.node_id for peer in play.group.listed] == [5]


def test_shares_of_the_wrong_number_or_length_are_refused() -> None:
    play = ready()
    _, sealed, seed = play.members[5].share(play.group.listed, 3)
    for wrong in (sealed[:-1], [*sealed[:-1], b""], [*sealed, sealed[0]]):
        with pytest.raises(ProtocolError, match="not those that were asked for"):
            play.group.take_shares(5, wrong, seed)
    with pytest.raises(ProtocolError, match="commitment"):
        play.group.take_shares(5, sealed, b"")


def test_masked_vectors_of_strangers_of_other_lengths_and_second_ones_are_refused() -> None:
    play = ready()
    play.shares(without=[LARGE])
    vector = np.zeros(10, np.uint32)
    play.group.take_masked(5, vector)
    for node_id, sent, words in [
        (LARGE, vector, "shared no secrets"),
        (5, vector, "second"),
        (6, vector[1:], "another length"),
        (6, vector.astype(np.uint64), "another length or type"),
    ]:
        with pytest.raises(ProtocolError, match=words):
            play.group.take_masked(node_id, sent)
    with pytest.raises(ProtocolError, match="not in the sum"):
        play.group.take_revealed(6, {})
    with pytest.raises(ProtocolError, match="right length"):
        play.group.take_revealed(5, {5: b"x"})


@pytest.mark.parametrize("lost", [(), (LARGE,)])
@pytest.mark.parametrize("silent", [(), (7,), (7, 8)])
def test_a_wrong_share_is_noticed_and_worked_around_where_others_suffice(
    lost: tuple[int, ...], silent: tuple[int, ...]
) -> None:
    play = ready(6, 4)
    play.shares()
    play.train(without=lost)
    play.reveal(without=[5, *silent])
    about = lost[0] if lost else 7
    shares = play.members[5].reveal(play.group.survivors, play.group.sealed_for(5))
    number = int.from_bytes(shares[about], "big") ^ 1
    play.group.take_revealed(5, {**shares, about: number.to_bytes(SHARE_BYTES, "big")})
    come = 6 - len(lost) - len(silent)
    if come > 4:
        np.testing.assert_array_equal(play.group.total(TERMS), play.plain_sum(play.group.survivors))
    else:
        with pytest.raises(ProtocolError, match=f"shares of node {about}'s|3 of at least 4"):
            play.group.total(TERMS)


def test_a_seed_other_than_the_one_committed_to_is_noticed() -> None:
    play = ready()
    play.shares(without=[5])
    member, sealed, _ = play.members[5].share(play.group.listed, 3)
    play.members[5] = member
    play.group.take_shares(5, sealed, bytes(32))
    play.train()
    play.reveal()
    with pytest.raises(ProtocolError, match="node 5's secret do not belong together"):
        play.group.total(TERMS)
