"""What vitctl raises when the user can mend it.

VitctlError
  RecipeError       a recipe, an override or a flag is wrong
  DataError         shards, an index, an image or a data set is wrong or missing
  CheckpointError   weights or a checkpoint are wrong or missing
  LaunchError       processes, devices or the environment are wrong
"""


class VitctlError(Exception):
    """Something the user can fix. The message says where, what, and how to mend it.

    The command line prints the message without a traceback and leaves with exit code 2.
    """


class RecipeError(VitctlError):
    """A recipe, an override or a flag is wrong."""


class DataError(VitctlError):
    """Shards, an index, an image or a data set is wrong or missing."""


class CheckpointError(VitctlError):
    """Weights or a checkpoint are wrong or missing."""


class LaunchError(VitctlError):
    """Processes, devices or the environment are wrong."""
