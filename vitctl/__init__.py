"""vitctl: the ViT paper (Dosovitskiy et al. 2021) as a command-line toolkit."""

__version__ = "0.1.0"
