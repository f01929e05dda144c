"""Sources of records and streams of batches, which are told apart here: a `Pipeline` has all the members of a source."""


def source_within(given: object) -> str | None:
    """Where the source of a stream is, such as ``"its .source"``; ``None`` if what is given is no stream."""
    if not (hasattr(given, "iterate") and hasattr(given, "diff_next")):
        return None
    if hasattr(given, "source"):
        return "its .source"
    if hasattr(given, "parts"):
        return "the .source of one of its .parts"
    return "the source that it reads from"


def check_is_no_stream(source: object) -> None:
    """Checks that what is given as a source is no stream.

    Raises:
      TypeError: it is one; tells where its source is.
    """
    instead = source_within(source)
    if instead is not None:
        raise TypeError(
            f"a {type(source).__name__} is a stream of batches, and a source of records is wanted: use {instead}"
        )
