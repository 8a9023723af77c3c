"""Connections to other libraries; each module is imported only where its library is used."""

OLDEST_TRANSFORMERS = (5, 16)
"""Oldest release of Transformers with the names that the integration uses."""


def check_transformers() -> None:
    """Raise ImportError for a release of Transformers that is too old."""
    from transformers import __version__ as version

    if tuple(map(int, version.split(".")[:2])) < OLDEST_TRANSFORMERS:
        oldest = ".".join(map(str, OLDEST_TRANSFORMERS))
        raise ImportError(f"KVQCache needs transformers >= {oldest}, got {version}")
