"""Whether a federation's run lost anything: every check is made on what it left on disk."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedplat.deployment.plan import Federation
from fedplat.results.folder import StrategyLog
from fedplat.security.signatures import read_public_keys

from .federation_runs import lines_of

DECAY = 0.5
Model = Mapping[str, torch.Tensor]
_START = 1.0
_CLOSE = 1e-6
_ONLINE = "online"


@dataclass
class Story:
    """What a run of so many rounds left: its status, its lines, and who is who.

    ``keys`` are, by SuperNode, the registered signing key and the one the run took its replies from, in hex;
    ``asked`` is how many clients each round from 1 on sent its model to, by the bytes that it counted.
    """

    total: int
    status: str = ""
    online: dict[int, str] = field(default_factory=dict)
    node_ids: dict[str, int] = field(default_factory=dict)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    clients: list[dict[str, Any]] = field(default_factory=list)
    asked: dict[int, float] = field(default_factory=dict)
    keys: dict[str, tuple[str, str]] = field(default_factory=dict)

    def of(self, client: int) -> dict[int, dict[str, Any]]:
        """Return a client's lines by round; of several in a round, the last."""
        return {line["round"]: line for line in self.clients if line["client"] == client}

    def read(self, result: Path, node_ids: Mapping[str, int], federation: Federation) -> None:
        """Take in a strategy's part of the run folder; ``node_ids`` are those from before the run."""
        self.node_ids = dict(node_ids)
        self.rounds, self.clients = lines_of(result / "rounds.jsonl"), lines_of(result / "clients.jsonl")
        log = StrategyLog(result)
        if not log.started:
            return
        state = log.load_checkpoint()
        size = sum(a.numel() * a.element_size() for a in state["arrays"].values())
        self.asked = {line["round"]: line["bytes_down"] / size for line in self.rounds if line["round"]}
        bound = state["strategy"]["own"]["keys"]
        registered = {name: key.hex() for key, name in _keys(federation).items()}
        self.keys = {
            name: (registered.get(name, "not registered"), bound.get(node, "none"))
            for name, node in node_ids.items()
        }


def _keys(federation: Federation) -> dict[bytes, str]:
    return read_public_keys(federation.superlink / "signing-keys")


def trouble_of(story: Story) -> list[str]:
    """Say what is not as it should be; nothing if nothing was lost."""
    found: list[str] = []
    if story.status != "finished:completed":
        found.append(f"the run is {story.status}")
    numbers = [line["round"] for line in story.rounds]
    if numbers != list(range(story.total + 1)):
        found.append(f"rounds on disk are {numbers}, not 0 to {story.total} once each")
    found += _trouble_with_lines(story)
    for name, node in story.node_ids.items():
        if story.online.get(node) != _ONLINE:
            found.append(f"{name}, node {node}, is {story.online.get(node, 'not known any more')}")
    if len(story.online) != len(story.node_ids):
        found.append(f"{len(story.online)} nodes are registered, not {len(story.node_ids)}")
    for name, (registered, bound) in story.keys.items():
        if registered != bound:
            found.append(f"{name} is bound to the signing key {bound[:16]}, and its own is {registered[:16]}")
    return found + credibility_trouble(story)[0]


def _trouble_with_lines(story: Story) -> list[str]:
    found = []
    by_round: dict[int, list[dict[str, Any]]] = {}
    for line in story.clients:
        by_round.setdefault(line["round"], []).append(line)
    for number, asked in story.asked.items():
        lines = by_round.pop(number, [])
        clients = [line["client"] for line in lines]
        if len(set(clients)) != len(clients) or len(clients) != asked:
            found.append(f"round {number} asked {asked:g} clients and has lines for {clients}")
    if by_round:
        found.append(f"there are lines on clients for rounds {sorted(by_round)}, which are not there")
    for line in story.clients:
        if line["status"] == "refused" or (line["status"] == "failed" and not line["reason"]):
            reason = line["reason"] or "without a reason"
            found.append(f"round {line['round']}: client {line['client']} {line['status']}: {reason}")
    return found


def credibility_trouble(story: Story) -> tuple[list[str], int]:
    """Compare credibilities with what follows from those before; return what differs, and how many there are.

    Without an attitude, c ← e^−decay·c + max(s, 0) from 1, with s = 0 in a round without a reply; a client
    that has never replied keeps the 1.
    """
    found: list[str] = []
    count = 0
    kept = math.exp(-DECAY)
    for client in sorted({line["client"] for line in story.clients}):
        lines, credibility, known = story.of(client), _START, False
        for number in range(1, story.total + 1):
            line = lines.get(number)
            if line is None or line["status"] != "accepted":
                credibility *= kept if known else 1.0
                continue
            credibility, known = kept * credibility + max(line["similarity"] or 0.0, 0.0), True
            count += 1
            if not math.isclose(line["credibility"], credibility, rel_tol=_CLOSE, abs_tol=_CLOSE):
                found.append(
                    f"round {number}: client {client} has a credibility of {line['credibility']:.6g}, and "
                    f"from the rounds before follows {credibility:.6g}"
                )
                credibility = line["credibility"]
    return found, count


def count_lines(story: Story) -> Counter[str]:
    """Return how many lines on clients there are by status, and how many have a credibility."""
    counts = Counter(line["status"] for line in story.clients)
    counts["credibilities"] = credibility_trouble(story)[1]
    return counts


def named(lines: Mapping[int, Mapping[str, Any]], first: int, last: int) -> str:
    """Say how a client's lines by round name its loss, from the round in which it was lost to its return.

    >>> named({2: {"status": "failed", "reason": "Error: gone — so"}, 4: {"status": "accepted"}}, 2, 5)
    'failed in 2 (Error: gone), not asked in 3, accepted in 4'
    """
    words: list[str] = []
    for number in range(max(first, 1), last + 1):
        line = lines.get(number)
        if line is None:
            words.append(f"not asked in {number}")
        elif line["status"] == "accepted":
            words.append(f"accepted in {number}")
            if number > first:
                break
        else:
            reason = str(line["reason"]).split("—")[0].strip()
            words.append(f"{line['status']} in {number} ({reason})")
    return ", ".join(words)


def same_bits(ours: Model, theirs: Model) -> bool:
    """Whether two models have the same arrays, to the last bit; numbers that are none count as equal.

    >>> same_bits({"w": torch.ones(2)}, {"w": torch.ones(2)}), same_bits({"w": torch.ones(2)}, {})
    (True, False)
    """
    return ours.keys() == theirs.keys() and all(
        a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
        for a, b in ((ours[name], theirs[name]) for name in ours)
    )
