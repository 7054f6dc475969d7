"""Clients: local training, attacks, and the Flower ``ClientApp`` that joins them."""
