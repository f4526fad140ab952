"""Where the images of a source came from, in the words that their indexes keep."""

from vitctl.data.read import Concat, ShardSource, Source, Subset


def origins(source: Source) -> tuple[str, ...]:
    """The source texts of all shards behind a source, each once; they also tell copies that are partial or re-encoded."""
    if isinstance(source, ShardSource):
        return (source.index.source,)
    inner: tuple[Source, ...] = ()
    if isinstance(source, Subset):
        inner = (source.source,)
    elif isinstance(source, Concat):
        inner = source.parts
    return tuple(dict.fromkeys(text for part in inner for text in origins(part)))
