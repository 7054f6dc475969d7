"""Everything that fedplat takes from Flower's non-public modules, in one place.

A Flower release that moves one of these names breaks here, with a message that says so, and nowhere else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

from flwr.app import Array, ArrayRecord, Error, Message, Metadata, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from .errors import UserError

TESTED_FLOWER_VERSIONS = ("1.42.0",)

try:
    from flwr.app.message.message import make_message
    from flwr.app.message_type import MessageType
    from flwr.common.constant import ErrorCode, SType
    from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
    from flwr.proto.recorddict_pb2 import RecordDict as RecordDictProto
    from flwr.supercore.run import Run
    from flwr.supercore.task_identity import TaskIdentity
except ImportError as error:
    raise UserError(
        f"fedplat cannot use Flower {version('flwr')}: {error}. "
        f"Tested with {', '.join(TESTED_FLOWER_VERSIONS)}: "
        f"pip install 'flwr[simulation]=={TESTED_FLOWER_VERSIONS[-1]}'"
    ) from error

SERVER_NODE_ID = 1


def set_task_identity(run_id: int) -> None:
    """Give this process the ids that Flower reads when a ``Message`` is created outside one of its runs."""
    TaskIdentity.run_id = run_id
    TaskIdentity.task_id = 0
    TaskIdentity.node_id = SERVER_NODE_ID


def make_error_message(metadata: Metadata, error: Error) -> Message:
    """Return a message that carries an error instead of content."""
    return make_message(metadata, None, error)


def is_simulated(grid: Grid) -> bool:
    """Whether a grid is that of a Flower simulation; importing its module takes a second, so not before."""
    module = sys.modules.get("flwr.superlink.grid")
    return module is not None and isinstance(grid, module.InMemoryGrid)


def array_record(arrays: Mapping[str, Array]) -> ArrayRecord:
    """Return a record of these very arrays; Flower's constructor would serialise each of them."""
    record = ArrayRecord()
    record.__dict__["_data"].update(arrays)
    return record


def keep_arrays_unserialised(record_of: Callable[[dict[str, NDArray[Any]]], ArrayRecord]) -> None:
    """Build this process's ``ArrayRecord(list)`` and ``ArrayRecord(state_dict)`` by ``record_of``.

    Flower serialises every array of a record at once, which costs several copies; a worker that shares memory
    with its server never needs the bytes. ``record_of`` copies the arrays, so that a record does not change
    with them. Only for processes of our own: it replaces Flower's class methods.
    """

    def from_numpy_ndarrays(
        cls: type[ArrayRecord], ndarrays: list[NDArray[Any]], *, keep_input: bool = True
    ) -> ArrayRecord:
        record = record_of({str(i): array for i, array in enumerate(ndarrays)})
        if not keep_input:
            ndarrays.clear()
        return record

    def from_torch_state_dict(
        cls: type[ArrayRecord], state_dict: dict[str, Any], *, keep_input: bool = True
    ) -> ArrayRecord:
        record = record_of({name: tensor.detach().cpu().numpy() for name, tensor in state_dict.items()})
        if not keep_input:
            state_dict.clear()
        return record

    ArrayRecord.from_numpy_ndarrays = classmethod(from_numpy_ndarrays)  # type: ignore[assignment,method-assign]
    ArrayRecord.from_torch_state_dict = classmethod(from_torch_state_dict)  # type: ignore[assignment,method-assign]


def records_to_bytes(records: RecordDict) -> bytes:
    """Serialise records in Flower's wire format, which holds data only and never code."""
    return recorddict_to_proto(records).SerializeToString()


def records_from_bytes(data: bytes) -> RecordDict:
    """Read records written by :func:`records_to_bytes`; empty bytes are empty records."""
    return recorddict_from_proto(RecordDictProto.FromString(data)) if data else RecordDict()


__all__ = [
    "SERVER_NODE_ID",
    "TESTED_FLOWER_VERSIONS",
    "ErrorCode",
    "MessageType",
    "Run",
    "SType",
    "array_record",
    "is_simulated",
    "keep_arrays_unserialised",
    "make_error_message",
    "make_message",
    "records_from_bytes",
    "records_to_bytes",
    "set_task_identity",
]
