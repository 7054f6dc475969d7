"""A federation on real machines: keys, certificates, start commands, checks."""
