"""A client's side of secure aggregation in one round, without any messages: what it knows, says and refuses.

The protocol is that of Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning,
CCS 2017, with double masking. A client draws two key pairs, one to encrypt shares and one for masks; shares
its mask key and the seed of a mask of its own among its group; sends its masked vector; and in the end
reveals, of every other member, either a share of the seed or a share of the mask key, never both.

Inferred: shares reach their receivers with the last question and not with the model, so that the messages of
a round are alike; members commit to their seeds, so that a wrong share is noticed; and pair masks depend on
what the members were told, so that a server which sends them different models gets noise. That last idea is
from Pasquini et al., Eluding Secure Aggregation in Federated Learning via Model Inconsistency, CCS 2022.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from .masking import (
    KEY_BYTES,
    ProtocolError,
    Ring,
    Session,
    add_mask,
    add_pair_masks,
    commitment,
    derived,
    new_private_key,
    pair_key,
    public_key,
    seal,
    unseal,
)
from .shamir import SHARE_BYTES, split

SEED = b"seed of own mask"
OWN_MASK = b"own mask"
PAIR_MASK = b"pair mask"
SHARES = b"shares"


@dataclass(frozen=True)
class Peer:
    """What everybody in a group knows of a member: its node id and its two public keys."""

    node_id: int
    encryption_key: bytes
    mask_key: bytes


@dataclass(frozen=True)
class Member:
    """What a client remembers of a round in progress: its secrets, and who is in its group.

    ``peers`` are all members of the group who sent keys, by id, this one included; ``summed`` those whose
    masks are in its vector, once it has sent one. ``own_shares`` are the shares it keeps of its own secrets.
    """

    node_id: int
    session: Session
    encryption_key: bytes
    mask_key: bytes
    seed: bytes
    peers: tuple[Peer, ...] = ()
    threshold: int = 0
    own_shares: bytes = b""
    summed: tuple[int, ...] = ()

    @classmethod
    def new(cls, node_id: int, session: Session) -> Member:
        """Begin a round with fresh keys and a fresh seed."""
        return cls(node_id, session, new_private_key(), new_private_key(), secrets.token_bytes(KEY_BYTES))

    def public_keys(self) -> tuple[bytes, bytes]:
        """Return the public key to encrypt shares for this member, and the one for masks with it."""
        return public_key(self.encryption_key), public_key(self.mask_key)

    def share(
        self, peers: Sequence[Peer], threshold: int, least: int = 2
    ) -> tuple[Member, list[bytes], bytes]:
        """Share the secrets among a group, so that ``threshold`` of its members can restore either.

        Returns the member as it is now, a sealed message to each of the others in the order of ``peers``, and
        the commitment to its seed. Raises ProtocolError if it has done so in this round, if it is not in
        the list as it is, if keys appear twice, or unless max(least, n/2 + 1/2) ≤ threshold ≤ n.
        """
        if self.peers:
            raise ProtocolError("the secrets of this round have been shared already")
        ids = [peer.node_id for peer in peers]
        if ids != sorted(set(ids)):
            raise ProtocolError("the list of members is not in order")
        if Peer(self.node_id, *self.public_keys()) not in peers:
            raise ProtocolError("this client is not in the list of members with the keys that it sent")
        keys = {key for peer in peers for key in (peer.encryption_key, peer.mask_key)}
        if len(keys) < 2 * len(peers):
            raise ProtocolError("a key appears twice in the list of members")
        if not (max(least, 2) <= threshold <= len(peers) < 2 * threshold):
            raise ProtocolError(
                f"a threshold of {threshold} among {len(peers)} members is refused: expected more than half "
                f"of them, and at least {max(least, 2)}"
            )
        seeds = split(self.seed, threshold, len(peers))
        keys_shares = split(self.mask_key, threshold, len(peers))
        pairs = {peer.node_id: a + b for peer, a, b in zip(peers, seeds, keys_shares, strict=True)}
        sealed = []
        for peer in peers:
            if peer.node_id != self.node_id:
                info = self.session.info(SHARES, self.node_id, peer.node_id)
                key = pair_key(self.encryption_key, peer.encryption_key, info)
                sealed.append(seal(key, pairs[peer.node_id], info))
        now = replace(self, peers=tuple(peers), threshold=threshold, own_shares=pairs[self.node_id])
        return now, sealed, commitment(self.seed, self.session.info(SEED, self.node_id))

    def check_sum(self, summed: Collection[int]) -> None:
        """Raise ProtocolError unless a masked vector may be sent to be summed with those of such members."""
        if not self.peers:
            raise ProtocolError("no secrets have been shared in this round")
        if self.summed:
            raise ProtocolError("the masked update of this round has been sent already")
        if self.node_id not in summed or not set(summed) <= {peer.node_id for peer in self.peers}:
            raise ProtocolError("the members to be summed are not those of this client's group")
        if len(set(summed)) < self.threshold or len(set(summed)) != len(summed):
            raise ProtocolError(f"{len(set(summed))} members are fewer than the threshold, {self.threshold}")

    def masked(self, vector: Ring, summed: Collection[int], terms: bytes) -> tuple[Member, Ring]:
        """Return the member as it is now and a vector (d,) of ring elements under masks, a new array.

        ``summed`` are the members who have shared their secrets; see :meth:`check_sum`. ``terms`` are what
        all of them were told, such as a digest of the model: the masks of two members who were told other
        members or other terms do not cancel out.
        """
        self.check_sum(summed)
        vector, agreed = vector.copy(), agreement(summed, terms)
        add_mask(vector, derived(self.seed, self.session.info(OWN_MASK, self.node_id)))
        add_pair_masks(
            vector,
            self.node_id,
            (
                (peer.node_id, pair_mask_key(self.session, self.mask_key, self.node_id, peer, agreed))
                for peer in self.peers
                if peer.node_id in summed and peer.node_id != self.node_id
            ),
        )
        return replace(self, summed=tuple(sorted(summed))), vector

    def reveal(self, survivors: Collection[int], sealed: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return, by node id, a share of the seed of every survivor and of the mask key of the others summed.

        ``survivors`` are those whose masked vectors arrived, ``sealed`` the messages sealed for this member,
        by sender; of one whose message cannot be opened there is no share. Forget the member afterwards: a
        second answer, about other survivors, would give both. Raises ProtocolError unless this member has
        sent its vector and is a survivor, and at least the threshold of those summed are.
        """
        if not self.summed:
            raise ProtocolError("no masked update has been sent in this round")
        alive = set(survivors)
        if self.node_id not in alive or not alive <= set(self.summed):
            raise ProtocolError("the survivors are not those among whom this client is summed")
        if len(alive) < self.threshold:
            raise ProtocolError(f"{len(alive)} survivors are fewer than the threshold, {self.threshold}")
        shares = {}
        for peer in self.peers:
            if peer.node_id in self.summed:
                pair = self._opened(peer, sealed.get(peer.node_id, b""))
                if pair is not None:
                    seed, key = pair[:SHARE_BYTES], pair[SHARE_BYTES:]
                    shares[peer.node_id] = seed if peer.node_id in alive else key
        return shares

    def _opened(self, peer: Peer, sealed: bytes) -> bytes | None:
        if peer.node_id == self.node_id:
            return self.own_shares
        info = self.session.info(SHARES, peer.node_id, self.node_id)
        pair = unseal(pair_key(self.encryption_key, peer.encryption_key, info), sealed, info)
        return pair if pair is not None and len(pair) == 2 * SHARE_BYTES else None


def agreement(summed: Collection[int], terms: bytes) -> bytes:
    """Return 32 bytes that are the same for all who were told the same members and the same terms."""
    ids = b"".join(node_id.to_bytes(8, "big") for node_id in sorted(summed))
    return hashlib.sha256(len(summed).to_bytes(8, "big") + ids + terms).digest()


def pair_mask_key(session: Session, private: bytes, node_id: int, peer: Peer, agreed: bytes) -> bytes:
    """Return the key of the mask between the owner of a private mask key and a peer; the same for both.

    ``agreed`` is the :func:`agreement` of the sum that the mask is for.
    """
    info = session.info(PAIR_MASK, *sorted((node_id, peer.node_id))) + agreed
    return pair_key(private, peer.mask_key, info)
