"""The server's side of secure aggregation for one group in one round, without any messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

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
)
from .secure_member import OWN_MASK, SEED, Peer, agreement, pair_mask_key
from .shamir import SHARE_BYTES, combine

SEALED_BYTES = 12 + 2 * SHARE_BYTES + 16
"""Length of a message with two shares: nonce, shares, tag."""


class SecureGroup:
    """A group whose members' vectors are summed: who is still in it, and what they have sent so far.

    The steps are ``take_keys``, ``take_shares``, ``take_masked``, ``take_revealed`` and ``total``. Each takes
    one member's answer and raises ProtocolError if it is not a possible one; ``listed``, ``sharing`` and
    ``survivors`` are those who have come so far, in the order of ids. :meth:`lacking` says why the group
    cannot go on, if it cannot. The server only ever holds sums: a masked vector is added as it comes.
    """

    def __init__(self, members: Sequence[int], threshold: int, session: Session) -> None:
        self.members = tuple(sorted(members))
        self.threshold = threshold
        self.session = session
        self._keys: dict[int, Peer] = {}
        self._sealed: dict[int, dict[int, bytes]] = {}
        self._commitments: dict[int, bytes] = {}
        self._survivors: set[int] = set()
        self._sum: Ring | None = None
        self._revealed: dict[int, dict[int, bytes]] = {}

    # Keys --------------------------------------------------------------------------------------------------

    def take_keys(self, node_id: int, encryption_key: bytes, mask_key: bytes) -> None:
        """Take the public keys of a member; a copy of another member's key is refused."""
        for key in (encryption_key, mask_key):
            if len(key) != KEY_BYTES:
                raise ProtocolError("a public key does not have 32 bytes")
            # A point of small order gives every partner the same secret; honest members would have to stop.
            pair_key(new_private_key(), key, b"")
        taken = {key for peer in self._keys.values() for key in (peer.encryption_key, peer.mask_key)}
        if encryption_key == mask_key or {encryption_key, mask_key} & taken:
            raise ProtocolError("a public key appears twice")
        self._keys[node_id] = Peer(node_id, encryption_key, mask_key)

    @property
    def listed(self) -> tuple[Peer, ...]:
        """The members who sent keys."""
        return tuple(self._keys[node_id] for node_id in sorted(self._keys))

    # Shares ------------------------------------------------------------------------------------------------

    def take_shares(self, node_id: int, sealed: Sequence[bytes], committed: bytes) -> None:
        """Take a member's sealed shares for the other listed members, in their order, and its commitment."""
        others = [peer.node_id for peer in self.listed if peer.node_id != node_id]
        if len(sealed) != len(others) or any(len(one) != SEALED_BYTES for one in sealed):
            raise ProtocolError("the shares are not those that were asked for")
        if len(committed) != KEY_BYTES:
            raise ProtocolError("the commitment does not have 32 bytes")
        self._sealed[node_id] = dict(zip(others, sealed, strict=True))
        self._commitments[node_id] = committed

    @property
    def sharing(self) -> tuple[int, ...]:
        """The members who shared their secrets: those whose masks will be in the sum."""
        return tuple(sorted(self._sealed))

    def sealed_for(self, node_id: int) -> dict[int, bytes]:
        """Return the messages sealed for a member, by sender."""
        return {sender: to[node_id] for sender, to in self._sealed.items() if node_id in to}

    # Masked vectors ----------------------------------------------------------------------------------------

    def take_masked(self, node_id: int, vector: Ring) -> None:
        """Add a member's masked vector (d,) to the sum; it is left as it is."""
        if node_id not in self._sealed:
            raise ProtocolError("a masked update of a member who shared no secrets")
        if node_id in self._survivors:
            raise ProtocolError("a second masked update")
        if self._sum is None:
            self._sum = vector.copy()
        elif vector.shape != self._sum.shape or vector.dtype != self._sum.dtype:
            raise ProtocolError("a masked update of another length or type")
        else:
            np.add(self._sum, vector, out=self._sum)
        self._survivors.add(node_id)

    @property
    def survivors(self) -> tuple[int, ...]:
        """The members whose masked vectors are in the sum."""
        return tuple(sorted(self._survivors))

    def lacking(self, come: Sequence[object], what: str) -> str:
        """Return why the group cannot go on with those who have come so far; empty if it can."""
        if len(come) >= self.threshold:
            return ""
        return f"{len(come)} of at least {self.threshold} members {what}"

    # The sum -----------------------------------------------------------------------------------------------

    def take_revealed(self, node_id: int, shares: Mapping[int, bytes]) -> None:
        """Take the shares that a survivor reveals, by the member whose they are."""
        if node_id not in self._survivors:
            raise ProtocolError("an answer of a member who is not in the sum")
        if any(len(share) != SHARE_BYTES for share in shares.values()):
            raise ProtocolError("a share does not have the right length")
        self._revealed[node_id] = dict(shares)

    @property
    def revealing(self) -> tuple[int, ...]:
        """The survivors who revealed shares."""
        return tuple(sorted(self._revealed))

    def total(self, terms: bytes) -> Ring:
        """Return the sum (d,) of the survivors' vectors, free of masks. Takes O(n·d), and O(n·d) per dropout.

        ``terms`` are those that the members were told. Raises ProtocolError if shares are missing or do not
        belong together.
        """
        if self._sum is None:
            raise ProtocolError("there is no masked update")
        # Everything is restored before the first mask comes off, so that a failure leaves the sum as it was.
        seeds = {node_id: self._restored(node_id, self._is_seed) for node_id in self.survivors}
        gone = [node_id for node_id in self.sharing if node_id not in self._survivors]
        keys = {node_id: self._restored(node_id, self._is_mask_key) for node_id in gone}
        total, agreed = self._sum.copy(), agreement(self.sharing, terms)
        for node_id, seed in seeds.items():
            add_mask(total, derived(seed, self.session.info(OWN_MASK, node_id)), subtract=True)
        for node_id, key in keys.items():
            # What the survivors added for their partner who is gone is what it would have taken away.
            pairs = (
                (survivor, pair_mask_key(self.session, key, node_id, self._keys[survivor], agreed))
                for survivor in self.survivors
            )
            add_pair_masks(total, node_id, pairs)
        return total

    def release(self) -> None:
        """Forget the sum and everybody's shares; who was in it stays known."""
        self._sum = None
        self._sealed, self._revealed = {}, {}

    def _is_seed(self, node_id: int, secret: bytes) -> bool:
        return commitment(secret, self.session.info(SEED, node_id)) == self._commitments[node_id]

    def _is_mask_key(self, node_id: int, secret: bytes) -> bool:
        return public_key(secret) == self._keys[node_id].mask_key

    def _restored(self, node_id: int, right: Callable[[int, bytes], bool]) -> bytes:
        """Return the secret of a member that the survivors gave their shares of.

        Where more shares came than it takes, others are tried until the secret is right, so that one wrong
        share does no harm.
        """
        numbers = {peer.node_id: x for x, peer in enumerate(self.listed, start=1)}
        shares = sorted(
            (numbers[by], given[node_id]) for by, given in self._revealed.items() if node_id in given
        )
        if len(shares) < self.threshold:
            raise ProtocolError(
                f"{len(shares)} of at least {self.threshold} members gave a share of node {node_id}'s secret"
            )
        for first in range(len(shares) if len(shares) > self.threshold else 1):
            chosen = [*shares[first:], *shares[:first]][: self.threshold]
            try:
                secret = combine(dict(chosen))
            except ValueError:
                continue
            if right(node_id, secret):
                return secret
        raise ProtocolError(f"the shares of node {node_id}'s secret do not belong together")
