"""Training of many clients at once: their models are the rows of a matrix, a layer is one batched product."""

from .train_many import train_many
from .trainer import Learner, StackedTrainer

__all__ = ["Learner", "StackedTrainer", "train_many"]
