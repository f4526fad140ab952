"""`vitctl data`: from a folder of pictures to checked shards."""

from pathlib import Path

from PIL import Image

from tests.cli.conftest import Vitctl


def plant(root: Path) -> None:
    for split in ("train", "test"):
        for number, name in enumerate(("cat [b16]", "dog")):
            for image in range(3):
                path = root / split / name / f"{image}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (8, 8), (number * 200, image * 50, 0)).save(path)


def test_shards_check_index(vitctl: Vitctl, tmp_path: Path) -> None:
    plant(tmp_path / "photos")
    said = vitctl("data", "shards", "photos", "out [x]")
    assert (said.code, said.err) == (0, "")
    assert "train: 6 images of 2 classes in 1 shard(s)" in said.out
    assert "ready in out [x]; train on them with --data out [x]" in said.out

    said = vitctl("data", "check", "out [x]", "--images", "all")
    assert (said.code, said.err) == (0, "")
    assert "cat [b16]" in said.out
    assert "all is well" in said.out

    [shard] = (tmp_path / "out [x]" / "train").glob("*.tar")
    content = bytearray(shard.read_bytes())
    content[700] ^= 255
    shard.write_bytes(bytes(content))
    said = vitctl("data", "check", "out [x]")
    assert said.code == 2
    assert said.err.startswith("vitctl: out [x]: ")
    assert "problem(s), listed above" in said.err
    assert str(shard.name) in said.out


def test_index__of_nothing(vitctl: Vitctl, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    said = vitctl("data", "index", "empty")
    assert (said.code, said.err) == (
        2,
        "vitctl: empty: no .tar files here; give the shards or the folder that holds them\n",
    )


def test_check__images_takes_three_words(vitctl: Vitctl, tiny_data: Path) -> None:
    assert (
        vitctl("data", "check", tiny_data, "--images", "some").err
        == "vitctl: --images some: choose all, sample or none\n"
    )
