"""The server of an edge that is a process of its own: it answers the cloud with what its clients trained."""

from __future__ import annotations

import copy
import json
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from .. import config as configuration
from .. import experiment
from ..clients.app import STRATEGY_KEY
from ..clients.attacks import ReplyAttack
from ..clients.attacks.base import round_of
from ..clients.stacked.execution import Execution
from ..compat import SERVER_NODE_ID, records_from_bytes, records_to_bytes
from ..compression import CompressionGrid
from ..config import ExperimentConfig
from ..engines import FederationEngine
from ..errors import UserError
from ..hierarchy_setup import build_hierarchy
from ..runtime.flower import FlowerGrid
from ..scenario_app import refuse_code
from ..security.validation import scalar_metrics
from ..strategies.hierarchy import Edge
from ..strategies.hierarchy.edge import EDGE_EMPTY_CODE
from ..strategies.wrapper import load_state, state_of
from .cloud import check
from .edge_bridge import Bridge, Header
from .edge_client import EDGE_SCENARIO, EDGE_TIMEOUT

log = logging.getLogger("fedplat")

EDGE_FAILED_CODE = 1005
"""Error code of the reply of an edge that could not even ask its clients."""

COUNT = "num-examples"

_POLL_SECONDS, _LOOK_SECONDS = 0.5, 1.0
# The cloud waits for the whole of an edge's answer, which also has to be handed over.
_SPARE = 0.9


@dataclass(frozen=True)
class Own:
    """What an edge knows better than the cloud.

    ``data_root`` is where its copy of the data lies, ``signing_keys`` the folder of its clients' public keys;
    a strategy begins when ``min_nodes`` clients are connected, for which it waits ``node_wait`` seconds.
    """

    data_root: Path | None = None
    signing_keys: Path | None = None
    min_nodes: int = 1
    node_wait: float = 300.0


@dataclass
class _Built:
    """An edge at work on one strategy of one scenario."""

    key: tuple[str, str, int]
    edge: Edge
    attack: ReplyAttack | None
    context: Context
    config: ExperimentConfig
    before: tuple[int, dict[str, Any]] = field(default_factory=lambda: (0, {}))

    def enter(self, server_round: int) -> None:
        """Begin a round; one that comes again, since the cloud was stopped in it, begins as it did before."""
        number, state = self.before
        if server_round == number:
            load_state(self.edge.strategy, copy.deepcopy(state))
        self.before = server_round, copy.deepcopy(state_of(self.edge.strategy))


class EdgeServer:
    """Answers messages of a cloud with the help of the clients of ``grid``.

    Every message brings the scenario, of which parts with a name in a catalogue are used and no others, as
    with clients. What the edge's rule remembers is kept from round to round; another scenario or strategy,
    and a first round, begin anew.
    """

    def __init__(self, grid: Grid, own: Own | None = None) -> None:
        self._grid = FlowerGrid(grid, poll_seconds=_POLL_SECONDS)
        self._own = own or Own()
        self._built: _Built | None = None

    def serve(self, bridge: Bridge) -> None:
        """Answer what comes over the bridge until it is closed; no message ends the server."""
        for request in bridge.requests():
            request.answer(*self.reply_to(request.header, request.content))

    def reply_to(self, header: Header, content: bytes) -> tuple[Header, bytes]:
        """Return the answer to a message in the form in which both travel; mistakes are errors in it."""
        try:
            kind, number = str(header["type"]), int(header["edge"])
            reply = self.answer(records_from_bytes(content), kind, number)
        except UserError as error:
            log.error("%s", error)
            return {"error": {"code": EDGE_FAILED_CODE, "reason": str(error)}}, b""
        except Exception as error:
            log.exception("a message of the cloud could not be answered")
            text = f"{type(error).__name__}: {error}"
            return {"error": {"code": EDGE_FAILED_CODE, "reason": text}}, b""
        if reply.has_error():
            return {"error": {"code": reply.error.code, "reason": reply.error.reason}}, b""
        return {}, records_to_bytes(reply.content)

    def answer(self, content: RecordDict, kind: str, number: int) -> Message:
        """Return the reply of edge ``number`` to a message of this type; raises UserError."""
        family, told = kind.split(".")[0], content.get("config")
        if family not in ("train", "evaluate"):
            raise UserError(f"an edge has no answer to a message of type '{kind}'")
        if not isinstance(told, ConfigRecord) or EDGE_SCENARIO not in told:
            raise UserError(
                f"the message brings no scenario for edges ('{EDGE_SCENARIO}' in its config): this edge "
                f'answers clouds that were started by fedplat with tier="cloud"'
            )
        server_round = int(told.get("server-round", 1))  # type: ignore[arg-type]
        built = self._edge(told, number, server_round)
        rest = {name: value for name, value in told.items() if name not in (EDGE_SCENARIO, EDGE_TIMEOUT)}
        asked = _message(RecordDict({**content, "config": ConfigRecord(rest)}), kind)
        grid: Grid = self._grid
        if built.config.compression.name != "none":
            grid = CompressionGrid(grid, built.config.compression.build())
        wait = _SPARE * built.config.timeout / built.edge.edge_rounds
        if family == "evaluate":
            return self._evaluated(built.edge, asked, grid, built.config.timeout * _SPARE)
        built.enter(server_round)
        reply = built.edge.run(asked, grid, timeout=wait)
        _tell(server_round, built.edge)
        if built.attack is None or reply.has_error():
            return reply
        return built.attack(asked, built.context, lambda message, context: reply)

    def _evaluated(self, edge: Edge, asked: Message, grid: Grid, timeout: float) -> Message:
        """Return the metrics of the cloud's model on all clients, weighted by their samples.

        An edge's strategy would ask whom a server that evaluates by itself asks: nobody.
        """
        kind, server_round = asked.metadata.message_type, round_of(asked)
        questions = [Message(asked.content, node, kind) for node in grid.get_node_ids()]
        answers = list(grid.send_and_receive(questions, timeout=timeout)) if questions else []
        metrics = edge.strategy.aggregate_evaluate(server_round, answers)
        if metrics is None:
            return Message(Error(EDGE_EMPTY_CODE, "no client of this edge evaluated"), reply_to=asked)
        counts = (scalar_metrics(answer).get(COUNT, 0) for answer in answers if answer.has_content())
        total = MetricRecord({**metrics, COUNT: max(sum(map(int, counts)), 1)})
        return Message(RecordDict({"metrics": total}), reply_to=asked)

    def _edge(self, told: ConfigRecord, number: int, server_round: int) -> _Built:
        """Return the edge at work on what the message is about: the one of before, or a new one."""
        key = str(told[EDGE_SCENARIO]), str(told.get(STRATEGY_KEY, "")), number
        built = self._built
        if built is None or built.key != key or (server_round == 1 and built.before[0]):
            config = self._config(key[0])
            if key[1] not in config.strategies:
                raise UserError(f"the scenario has no strategy '{key[1]}'")
            built = self._built_for(key, config)
            self._wait()
            self._built = built
        return built

    def _config(self, scenario: str) -> ExperimentConfig:
        raw = json.loads(scenario)
        refuse_code(raw)
        # No folder of this machine is read on a cloud's word.
        raw["data"].pop("root", None)
        raw["security"].pop("signing_keys", None)
        if self._own.data_root is not None:
            raw["data"]["root"] = str(self._own.data_root)
        if raw["security"].get("signed_updates") and self._own.signing_keys is not None:
            raw["security"]["signing_keys"] = str(self._own.signing_keys)
        config = configuration.load(raw, "scenario from the cloud")
        check(config)
        return config

    def _built_for(self, key: tuple[str, str, int], config: ExperimentConfig) -> _Built:
        _, strategy, number = key
        engine = FederationEngine(
            self._grid,
            device="cpu",
            min_nodes=self._own.min_nodes,
            node_wait=self._own.node_wait,
            simulated=False,
        )
        situation = experiment.build_situation(config, "cpu")
        # Clients are told how to train by the cloud; here it is of no consequence.
        situation = replace(situation, execution=Execution(False, 1, True, "given", {}))
        hierarchy = build_hierarchy(config, strategy, situation, engine)
        if hierarchy is None or number >= len(hierarchy.edges):
            there = len(hierarchy.edges) if hierarchy else 0
            raise UserError(f"this is edge {number}, and the scenario has {there} edges, counted from 0")
        attack = hierarchy.attacks.get(number)
        # Numbered after the clients, as in a simulation, so that an edge draws nothing that a client draws.
        node: dict[str, bool | float | int | str] = {"partition-id": situation.num_clients + number}
        context = Context(self._grid.run.run_id, SERVER_NODE_ID, node, RecordDict(), {})
        forging = attack if isinstance(attack, ReplyAttack) else None
        return _Built(key, hierarchy.edges[number], forging, context, config)

    def _wait(self) -> None:
        """Wait for the clients that were asked for; raises UserError if they do not come."""
        own, deadline = self._own, time.monotonic() + self._own.node_wait
        while (count := len(self._grid.get_node_ids())) < own.min_nodes:
            if time.monotonic() >= deadline:
                raise UserError(
                    f"{count} of at least {own.min_nodes} clients of this edge are connected after "
                    f"{own.node_wait:g} s"
                )
            time.sleep(_LOOK_SECONDS)


def run(grid: Grid, told: Mapping[str, Any]) -> None:
    """Serve the bridge that a run config names; raises UserError if it is none."""
    if not told.get("bridge"):
        raise UserError('tier="edge" needs bridge="FOLDER", the folder with the edge\'s secret')
    keys, root = str(told.get("signing-keys", "")), str(told.get("data-root", ""))
    own = Own(
        Path(root).expanduser() if root else None,
        Path(keys) if keys else None,
        int(told.get("min-nodes", 1)),
        float(told.get("node-wait", 300.0)),
    )
    logging.getLogger("flwr").setLevel(logging.WARNING)
    with Bridge(Path(str(told["bridge"]))) as bridge:
        print(
            f"edge: at work, for the SuperNode whose node config names {bridge.folder.resolve()}", flush=True
        )
        EdgeServer(grid, own).serve(bridge)


def _message(content: RecordDict, kind: str) -> Message:
    message = Message(content, SERVER_NODE_ID, kind)
    message.metadata.__dict__["_message_id"] = f"edge-{uuid4().hex}"
    return message


def _tell(server_round: int, edge: Edge) -> None:
    """Print what became of a round, and who had no part in it."""
    statuses = Counter(report.status for report in edge.reports)
    told = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items())) or "nobody was asked"
    print(f"round {server_round}: {told}; {edge.samples} samples{_reasons(edge)}", flush=True)


def _reasons(edge: Edge) -> str:
    bad: Iterable[str] = (f"client {r.client}: {r.reason}" for r in edge.reports if r.status != "accepted")
    why = [edge.why] if edge.why and not edge.samples else []
    return "".join(f"; {text}" for text in (*bad, *why))


__all__ = ["EDGE_FAILED_CODE", "EdgeServer", "Own", "run"]
