"""Public API, as `vitctl.as_webdataset`; imported on demand, because it imports torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitctl.data.pipeline import as_webdataset as as_webdataset
else:

    def __getattr__(name: str) -> Any:
        if name != "as_webdataset":
            raise AttributeError(f"module 'vitctl.data' has no attribute '{name}'")
        from vitctl.data import pipeline

        return pipeline.as_webdataset
