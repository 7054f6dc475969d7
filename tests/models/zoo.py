"""The models that need nothing but the shape of a sample: not those on a backbone, which has to be there."""

from fedplat import registry


def plain_models() -> list[str]:
    """Return their names."""
    settings = {n: registry.settings(registry.find("models", n).load()) for n in registry.entries("models")}
    return [name for name, known in settings.items() if not any(setting.required for setting in known)]
