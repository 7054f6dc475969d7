"""Mistakes that a user can mend, told without a traceback."""

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """Something the user can put right; the command line prints it alone and exits with status 2."""


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed name closest to ``name``, or None if nothing is close.

    >>> nearest("medain", ["mean", "median"])
    'median'
    """
    matches = get_close_matches(name, list(allowed), n=1, cutoff=0.5)
    return matches[0] if matches else None


def unknown_name(what: str, name: str, allowed: Iterable[str]) -> UserError:
    """Build the error for a name that does not exist: what was found, the nearest one, all allowed ones.

    >>> print(unknown_name("strategy", "medain", ["mean", "median"]))
    unknown strategy 'medain': did you mean 'median'? Allowed: mean, median
    """
    options = sorted(allowed)
    close = nearest(name, options)
    hint = f"did you mean '{close}'? " if close else ""
    return UserError(f"unknown {what} '{name}': {hint}Allowed: {', '.join(options)}")
