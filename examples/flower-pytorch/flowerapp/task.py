"""Model, data, training and testing: nothing federated here."""

from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """A small CNN for grey images of 8x8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.fc1 = nn.Linear(8 * 4 * 4, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (n, 10) of images (n, 1, 8, 8)."""
        x = functional.max_pool2d(functional.relu(self.conv(x)), 2)
        return self.fc2(functional.relu(self.fc1(x.flatten(1))))


def initial_model(seed: int = 0) -> Net:
    """Return the model to start from, the same in every run."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net()


@cache
def load_split(part: str) -> TensorDataset:
    """Return the ``train`` (four fifths) or ``test`` part of the digits, shuffled in one fixed way."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    cut = len(order) * 4 // 5
    rows = order[:cut] if part == "train" else order[cut:]
    images = torch.from_numpy(digits.images[rows].astype(np.float32) / 16).unsqueeze(1)
    return TensorDataset(images, torch.from_numpy(digits.target[rows]).long())


def load_data(partition_id: int, num_partitions: int, batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Return a client's batches to train on and to evaluate on."""
    images, labels = load_split("train").tensors
    own = np.arange(partition_id, len(labels), num_partitions)
    cut = len(own) * 4 // 5
    train = TensorDataset(images[own[:cut]], labels[own[:cut]])
    held_out = TensorDataset(images[own[cut:]], labels[own[cut:]])
    shuffle = torch.Generator().manual_seed(partition_id)
    return (
        DataLoader(train, batch_size, shuffle=True, generator=shuffle),
        DataLoader(held_out, batch_size),
    )


def train(net: nn.Module, batches: DataLoader, epochs: int, lr: float) -> float:
    """Train the model in place and return the mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    total, steps = 0.0, 0
    for _ in range(epochs):
        for images, labels in batches:
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
            total, steps = total + loss.item(), steps + 1
    return total / max(steps, 1)


@torch.no_grad()
def test(net: nn.Module, batches: DataLoader) -> tuple[float, float]:
    """Return loss and accuracy."""
    net.eval()
    loss, right = 0.0, 0
    for images, labels in batches:
        logits = net(images)
        loss += functional.cross_entropy(logits, labels, reduction="sum").item()
        right += int((logits.argmax(1) == labels).sum())
    return loss / len(batches.dataset), right / len(batches.dataset)
