"""Attacks: what a malicious or unreliable client does to its data, its training or its reply."""

from .base import Attack, ReplyAttack, Scene, Schedule, dispatch
from .choice import Wanted, choose_attackers
from .sign_flip import SignFlip

__all__ = [
    "Attack",
    "ReplyAttack",
    "Scene",
    "Schedule",
    "SignFlip",
    "Wanted",
    "choose_attackers",
    "dispatch",
]
