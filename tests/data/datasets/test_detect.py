import tarfile
from pathlib import Path

import numpy as np
import pytest

from vitctl.data.datasets.detect import open_originals
from vitctl.data.datasets.readers.png import encode_png
from vitctl.errors import DataError


def test_open_originals__picks_the_reader(tmp_path: Path) -> None:

    image = tmp_path / "tree/cat/1.png"
    image.parent.mkdir(parents=True)
    image.write_bytes(encode_png(np.zeros((2, 2), np.uint8)))
    with tarfile.open(tmp_path / "tree.tar", "w") as tar:
        tar.add(image, "cat/1.png")
    (tmp_path / "tree.csv").write_text("path,label\ntree/cat/1.png,cat\n")
    (tmp_path / "tree.tsv").write_text("path\tlabel\ntree/cat/1.png\tcat\n")
    for name in ("tree", "tree.tar", "tree.csv", "tree.tsv"):
        (split,) = open_originals(str(tmp_path / name)).values()
        assert [(item.label, item.read()) for item in split.items] == [(0, image.read_bytes())]
        assert split.class_names == ("cat",)


def test_open_originals__refuses(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none: no such file or folder"):
        open_originals(str(tmp_path / "none"))
    (tmp_path / "a.zip").touch()
    with pytest.raises(DataError, match=r"a.zip: should be a folder of class folders, a .tar of them"):
        open_originals(str(tmp_path / "a.zip"))
    with pytest.raises(DataError, match="torchvision:nothing is unknown"):
        open_originals("torchvision:nothing", root=tmp_path)
