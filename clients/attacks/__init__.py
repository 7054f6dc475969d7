"""Attacks: what a malicious client does to its data or to its reply."""

from .base import Attack, choose_attackers, dispatch
from .sign_flip import SignFlip

__all__ = ["Attack", "SignFlip", "choose_attackers", "dispatch"]
