"""The stored splits behind a source, through all its views, and their provenance as recorded in their
indexes.
"""

from vitctl.data.source.read import ShardSource, Source


def split_sources(source: Source) -> tuple[ShardSource, ...]:
    """The indexed splits that hold the samples of a source, in order; empty when it is not stored in shards."""
    if isinstance(source, ShardSource):
        return (source,)
    return tuple(found for part in source.parts for found in split_sources(part))


def source_texts(source: Source) -> tuple[str, ...]:
    """The provenance texts of all splits behind a source, each once; they also say whether a copy is partial
    or re-encoded.
    """
    return tuple(dict.fromkeys(split.index.source for split in split_sources(source)))


def source_text(source: Source) -> str:
    """The provenance of a source in one line; empty where unknown."""
    return "; ".join(filter(None, source_texts(source)))
