"""The generated pages of the documentation: parts from the registry, the command line, the configuration."""
