"""Data sources, the cache of decoded samples, and the partitioners that hand samples to clients."""
