"""What a client can be, and what a rule can take it for: the words that attacks, rules and results share."""

HONEST = "honest"
UNRELIABLE = "unreliable"
UNTARGETED = "malicious-untargeted"
TARGETED = "malicious-targeted"
VERDICTS = (HONEST, UNRELIABLE, UNTARGETED, TARGETED)


def is_malicious(verdict: str) -> bool:
    """Whether a verdict, or a client's true kind, is one of the malicious ones.

    >>> [verdict for verdict in VERDICTS if is_malicious(verdict)]
    ['malicious-untargeted', 'malicious-targeted']
    """
    return verdict.startswith("malicious")
