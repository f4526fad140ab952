"""What lies under the views of a source: the stored splits, and the words in which their indexes say where they came from."""

from vitctl.data.source.read import ShardSource, Source


def split_sources(source: Source) -> tuple[ShardSource, ...]:
    """The indexed splits that a source takes its samples from, in order; none when it is not stored."""
    if isinstance(source, ShardSource):
        return (source,)
    return tuple(found for part in source.parts for found in split_sources(part))


def origins(source: Source) -> tuple[str, ...]:
    """The source texts of all shards behind a source, each once; they also tell copies that are partial or re-encoded."""
    return tuple(dict.fromkeys(split.index.source for split in split_sources(source)))


def source_text(source: Source) -> str:
    """All of its origins in one line; empty where nothing is known."""
    return "; ".join(filter(None, origins(source)))
