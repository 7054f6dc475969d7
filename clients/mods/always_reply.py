"""A client always answers: whatever goes wrong in a handler becomes an error that the server sees."""

from __future__ import annotations

from flwr.app import Context, Error, Message
from flwr.clientapp.typing import ClientAppCallable

from fedplat.compat import ErrorCode


def always_reply(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Run the client; return an error where it raises anything or returns something that is no message.

    For apps that are to run in Flower's simulation or deployment: there a handler that forgets its ``return``
    blocks a worker, or its SuperNode, for good, and one that ends the process costs a round its timeout. To
    be the first, outermost mod. Ctrl-C passes through, and so does every message, errors included.

        app = ClientApp(mods=[always_reply])
    """
    try:
        reply = call_next(message, context)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return _error(message, text)
    if not isinstance(reply, Message):
        return _error(message, f"the ClientApp returned {type(reply).__name__} instead of a Message")
    return reply


def _error(message: Message, reason: str) -> Message:
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


__all__ = ["always_reply"]
