"""Attacks: what a malicious or unreliable client does to its data, its training or its reply."""

from .ascent import GradientAscent
from .base import Attack, ReplyAttack, Scene, Schedule, dispatch
from .choice import Wanted, choose_attackers
from .collusion import ALittleIsEnough, Collusion, InnerProduct, Mimic
from .data import Backdoor, LabelFlip, LabelReverse, NoisyFeatures, RandomLabels
from .optimised import FangKrum, FangMedian, MinMax, MinSum
from .reply import FreeRider, GaussianNoise, InflatedCount, NotFinite, RandomWeights, SameValue, Scaling
from .sign_flip import SignFlip
from .unreliable import Blur, FewSteps, LowResolution

__all__ = [
    "ALittleIsEnough",
    "Collusion",
    "FangKrum",
    "FangMedian",
    "InnerProduct",
    "Mimic",
    "MinMax",
    "MinSum",
    "Attack",
    "Backdoor",
    "Blur",
    "FewSteps",
    "FreeRider",
    "GaussianNoise",
    "GradientAscent",
    "InflatedCount",
    "LabelFlip",
    "LabelReverse",
    "LowResolution",
    "NoisyFeatures",
    "NotFinite",
    "RandomLabels",
    "RandomWeights",
    "ReplyAttack",
    "SameValue",
    "Scaling",
    "Scene",
    "Schedule",
    "SignFlip",
    "Wanted",
    "choose_attackers",
    "dispatch",
]
