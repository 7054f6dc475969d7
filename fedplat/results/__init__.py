"""The run folder, tables, pictures and progress."""
