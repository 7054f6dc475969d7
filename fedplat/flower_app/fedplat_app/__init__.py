"""The app that a SuperLink hands to its nodes."""
