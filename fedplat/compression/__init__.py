"""Compressed updates: what a client sends in the place of its model, and how many bytes that is.

``simple``, ``top_k`` and ``qsgd`` turn updates into arrays and back, ``envelope`` does so with whole replies,
``grid`` undoes it on the server, and ``wire`` tells what was really sent. The client's side is
``fedplat.clients.mods.compression``.
"""

from .base import Compressor, EncodingError
from .grid import CompressionGrid
from .qsgd import QSGD
from .simple import HalfPrecision, Sparse, Uncompressed
from .top_k import TopK
from .wire import wire_bytes

__all__ = [
    "QSGD", "CompressionGrid", "Compressor", "EncodingError", "HalfPrecision", "Sparse", "TopK",
    "Uncompressed", "wire_bytes",
]  # fmt: skip
