"""Client mods: what happens to a reply between training and sending."""
