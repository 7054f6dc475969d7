"""Federated learning under attack and on uneven devices, built on Flower."""

__version__ = "0.1.0"
