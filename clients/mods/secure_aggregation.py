"""The client half of secure aggregation: answers the protocol's questions and masks what training gives."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from fedplat.arrays import FlatArrays, Layout, LayoutError
from fedplat.compat import ErrorCode, MessageType
from fedplat.errors import UserError
from fedplat.security.fixed_point import FixedPoint, count_outside, encode_update
from fedplat.security.masking import ProtocolError, Ring, Session
from fedplat.security.secure_member import Member
from fedplat.security.secure_messages import (
    ACTIONS,
    KEYS,
    MASKED,
    RECORD,
    SHARES,
    UNMASK,
    bytes_in,
    list_in,
    number_in,
    pack_ids,
    peer_fields,
    peers_in,
    record_of,
    session_fields,
    session_in,
    unpack_ids,
)
from fedplat.security.validation import array_records, scalar_metrics

log = logging.getLogger("fedplat")

App = TypeVar("App", bound=ClientApp)

_COUNT = "num-examples"
_REFUSED = (ProtocolError, LayoutError, UserError, ValueError, OverflowError)


class SecureAggregationMod:
    """Lets the server see the sum of a group's updates, and this client's update in no other way.

    Goes with :class:`fedplat.strategies.secure_aggregation.SecureAggregation` on the server, is put on the
    whole app, and has to be registered, because Flower looks for a function for the protocol's questions
    before it calls any mod::

        secure = SecureAggregationMod()
        app = ClientApp(mods=[secure])
        secure.register(app)

    Mods inside it act on the plain update, such as noise for privacy; mods outside it on the masked one, such
    as a signature. ``least_members`` is the smallest number of updates, this one included, that the client
    lets itself be summed with. A training message without the protocol is refused unless ``required`` is
    False. Metrics other than the sample count are left out of the reply unless ``release_metrics`` is True:
    they travel in the clear.

    An update is trained − received, floats of all widths and integers; what lies outside ±clip, which the
    server says, is clipped. An update that is not finite becomes an error and is never masked. All that the
    client remembers lies in ``context.state``, from the question for keys to the answer that unmasks the sum.
    """

    def __init__(
        self, *, least_members: int = 2, required: bool = True, release_metrics: bool = False
    ) -> None:
        if least_members < 2:
            raise UserError(f"least_members must be at least 2, got {least_members}")
        self.least_members = least_members
        self.required = required
        self.release_metrics = release_metrics

    def register(self, app: App) -> App:
        """Let an app answer the protocol's questions; returns the app."""
        for action in ACTIONS:
            app.query(action)(self.answer)
        return app

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer a question of the protocol, mask a training reply, and pass everything else on."""
        kind = message.metadata.message_type
        if kind in (KEYS, SHARES, UNMASK):
            return self.answer(message, context)
        if kind.split(".")[0] != MessageType.TRAIN or (not self.required and RECORD not in message.content):
            return call_next(message, context)
        return self._train(message, context, call_next)

    # Questions ---------------------------------------------------------------------------------------------

    def answer(self, message: Message, context: Context) -> Message:
        """Answer a question of the protocol, or say why not."""
        handle = {KEYS: self._keys, SHARES: self._shares, UNMASK: self._unmask}
        try:
            fields = handle[message.metadata.message_type](record_of(message.content), context)
        except _REFUSED as error:
            return _refused(message, error)
        return Message(RecordDict({RECORD: ConfigRecord(dict(fields))}), reply_to=message)

    def _keys(self, record: ConfigRecord, context: Context) -> Mapping[str, bytes]:
        member = Member.new(context.node_id, session_in(record))
        encryption, mask = member.public_keys()
        _remember(context, member)
        return {"encryption-key": encryption, "mask-key": mask}

    def _shares(self, record: ConfigRecord, context: Context) -> Mapping[str, bytes | list[bytes]]:
        member = _recall(context, session_in(record))
        threshold = int(number_in(record, "threshold"))
        member, sealed, commitment = member.share(peers_in(record), threshold, self.least_members)
        _remember(context, member)
        return {"sealed": sealed, "commitment": commitment}

    def _unmask(self, record: ConfigRecord, context: Context) -> Mapping[str, bytes | list[bytes]]:
        member = _recall(context, session_in(record))
        senders = unpack_ids(bytes_in(record, "senders"))
        sealed = dict(zip(senders, list_in(record, "sealed"), strict=False))
        survivors = unpack_ids(bytes_in(record, "survivors"))
        shares = member.reveal(survivors, sealed)
        # From here on nobody, this client included, can answer for other survivors.
        del context.state[RECORD]
        return {"ids": pack_ids(list(shares)), "shares": list(shares.values())}

    # Training ----------------------------------------------------------------------------------------------

    def _train(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        try:
            plan = _Plan.of(message, context)
        except _REFUSED as error:
            return _refused(message, error)
        reply = call_next(message, context)
        try:
            if not reply.has_error():
                return self._masked(reply, message, context, plan)
        except _REFUSED as error:
            reply = _refused(message, error)
        # Out of the sum, this client has nothing left to unmask.
        context.state.pop(RECORD, None)
        return reply

    def _masked(self, reply: Message, message: Message, context: Context, plan: _Plan) -> Message:
        vector = _update(reply, plan.received, plan.codec)
        member, masked = plan.member.masked(vector, plan.summed, plan.terms)
        _remember(context, member)
        arrays = FlatArrays.copy_of({MASKED: masked}).to_record()
        released = scalar_metrics(reply) if self.release_metrics else {}
        metrics = MetricRecord({**released, _COUNT: 1})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@dataclass(frozen=True)
class _Plan:
    """What is known of a training reply before the training: the model sent, and with whom it is summed."""

    member: Member
    summed: tuple[int, ...]
    codec: FixedPoint
    received: FlatArrays
    terms: bytes

    @classmethod
    def of(cls, message: Message, context: Context) -> _Plan:
        """Read a training message; raises ProtocolError if the client must not answer it."""
        if RECORD not in message.content:
            raise ProtocolError("this client trains under secure aggregation only, and nobody asked for it")
        record = record_of(message.content)
        member = _recall(context, session_in(record))
        groups = [unpack_ids(group) for group in list_in(record, "groups")]
        summed = next((group for group in groups if member.node_id in group), ())
        member.check_sum(summed)
        sent = array_records(message)
        if len(sent) != 1:
            raise ProtocolError(f"expected one record of arrays to train, found {len(sent)}")
        received = FlatArrays.of_record(sent[0], Layout.of_record(sent[0], promote=True))
        codec = _codec(record, len(summed))
        terms = codec.digest(received)
        if terms != bytes_in(record, "terms"):
            raise ProtocolError("the model is not the one that the server says it has sent to everybody")
        return cls(member, summed, codec, received, terms)


def _update(reply: Message, received: FlatArrays, codec: FixedPoint) -> Ring:
    """Return what a training reply adds to the sum; raises ValueError if it is not finite or does not fit."""
    trained = array_records(reply)
    if len(trained) != 1:
        raise ProtocolError(f"expected one record of trained arrays, found {len(trained)}")
    model = FlatArrays.of_record(trained[0], received.layout)
    weight = 1
    if codec.max_weight > 1:
        count = scalar_metrics(reply).get(_COUNT, 0.0)
        weight = min(max(int(count), 1), codec.max_weight)
    vector = encode_update(model, received, codec, weight)
    if outside := count_outside(model, received, codec.clip):
        log.warning("%d of %d values of the update were clipped to %g", outside, len(vector), codec.clip)
    return vector


def _codec(record: ConfigRecord, summands: int) -> FixedPoint:
    codec = FixedPoint(
        clip=float(number_in(record, "clip")),
        bits=int(number_in(record, "bits")),
        summands=int(number_in(record, "summands")),
        max_weight=int(number_in(record, "max-weight")),
    )
    if codec.summands < summands:
        raise ProtocolError(f"a sum of {summands} updates could wrap around: room is for {codec.summands}")
    return codec


def _refused(message: Message, error: Exception) -> Message:
    return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, str(error)), reply_to=message)


# State -----------------------------------------------------------------------------------------------------


def _remember(context: Context, member: Member) -> None:
    fields: Mapping[str, bytes | int | list[bytes]] = {
        **session_fields(member.session),
        "encryption-key": member.encryption_key,
        "mask-key": member.mask_key,
        "seed": member.seed,
        "threshold": member.threshold,
        "own-shares": member.own_shares,
        "summed": pack_ids(member.summed),
        **peer_fields(member.peers),
    }
    context.state[RECORD] = ConfigRecord(dict(fields))


def _recall(context: Context, session: Session) -> Member:
    """Return what this client remembers of a session; raises ProtocolError if it is in none, or another."""
    record = context.state.get(RECORD)
    if not isinstance(record, ConfigRecord):
        raise ProtocolError("this client holds no keys of this round, or has answered for it already")
    if session_in(record) != session:
        raise ProtocolError("the message belongs to another round than this client's keys")
    return Member(
        node_id=context.node_id,
        session=session,
        encryption_key=bytes_in(record, "encryption-key"),
        mask_key=bytes_in(record, "mask-key"),
        seed=bytes_in(record, "seed"),
        peers=peers_in(record),
        threshold=int(number_in(record, "threshold")),
        own_shares=bytes_in(record, "own-shares"),
        summed=unpack_ids(bytes_in(record, "summed")),
    )
