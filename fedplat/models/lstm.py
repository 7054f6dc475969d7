"""Recurrent models for text."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from .shapes import text_length

Width = Annotated[int, Field(ge=1)]


class CharLSTM(nn.Module):
    """Predicts the next character at every position: tokens (n, T) int64 to logits (n, T, V)."""

    def __init__(self, vocabulary: int, embedding: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, num_layers=layers, batch_first=True)
        self.fc = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits; the state starts at zero for every sample."""
        states, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.fc(states)
        return logits


def char_lstm(
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    embedding: Annotated[Width, Field(description="numbers per character")] = 8,
    hidden: Annotated[Width, Field(description="units per LSTM layer")] = 256,
    layers: Annotated[Width, Field(description="LSTM layers")] = 2,
) -> nn.Module:
    """Two-layer character LSTM: 815,945 parameters for a vocabulary of 65; ``num_classes`` is the vocabulary.

    Takes tokens (n, T) int64 and returns logits (n, T, V), one prediction per position. Any T is accepted at
    run time. Raises UserError for images.

    Source: McMahan et al., AISTATS 2017, section 3 (8-dimensional embedding, two layers of 256).
    """
    text_length("char-lstm", input_shape)
    return CharLSTM(num_classes, embedding, hidden, layers)
