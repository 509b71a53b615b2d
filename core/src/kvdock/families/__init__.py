"""Model families: from a published ``config.json`` to a `ModelSpec`, and from layers to groups and spaces."""

from kvdock.families.reader import architectures, read_model

__all__ = ["architectures", "read_model"]
