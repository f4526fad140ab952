"""vitctl: the ViT paper (Dosovitskiy et al. 2021) as a command-line toolkit.

The names of `__all__` are the public API. Each keeps its name, its arguments and what its docstring says
within a major version; while that is 0, within a minor one. CHANGELOG.md lists what changes. Everything else
is internal, the modules that these names come from too. Beside it the command line, the keys of recipes and
the files of a run are what to build on.

Names are imported when they are asked for, so that `import vitctl` costs nothing and imports no torch.
"""

import os
from typing import TYPE_CHECKING, Any

# onnxruntime, from 1.29 on, tells its maker which models are run, unless this is set before it starts.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__version__ = "0.1.0"
__all__ = (
    "VitctlError",
    "__version__",
    "as_webdataset",
    "finetune",
    "load_classifier",
    "load_model",
    "load_recipe",
    "open_split",
    "predict",
)

if TYPE_CHECKING:
    from vitctl.cli.from_python import finetune as finetune
    from vitctl.cli.from_python import predict as predict
    from vitctl.data.datasets.catalog import open_split as open_split
    from vitctl.data.pipeline import as_webdataset as as_webdataset
    from vitctl.errors import VitctlError as VitctlError
    from vitctl.jobs.inputs.weights import load_model as load_model
    from vitctl.jobs.predict import load_classifier as load_classifier
    from vitctl.recipe.load import load_recipe as load_recipe
else:
    _MODULES = {
        "VitctlError": "vitctl.errors",
        "as_webdataset": "vitctl.data.pipeline",
        "finetune": "vitctl.cli.from_python",
        "load_classifier": "vitctl.jobs.predict",
        "load_model": "vitctl.jobs.inputs.weights",
        "load_recipe": "vitctl.recipe.load",
        "open_split": "vitctl.data.datasets.catalog",
        "predict": "vitctl.cli.from_python",
    }

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module 'vitctl' has no attribute '{name}'")
        from importlib import import_module

        return getattr(import_module(_MODULES[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
