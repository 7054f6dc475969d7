"""The contract between an engine and a ``ClientApp`` that can run several clients in one call."""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp


class GroupApp(ClientApp):
    """A ``ClientApp`` that an engine may hand several training messages at once.

    ``group_limit`` is how many; ``group_exact`` says that a client's reply has the same bits whoever else is
    in the group. Called with one message it is an ordinary ``ClientApp``.
    """

    group_limit = 1
    group_exact = True

    def run_group(self, messages: list[Message], contexts: list[Context]) -> list[Message | None]:
        """Return a reply to each message, or None for a client that is to be called by itself."""
        return [None] * len(messages)
