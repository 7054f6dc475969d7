"""Tables: many runs of scenarios, described by a TOML file, run in one go, and written side by side."""
