"""Download URLs of known data sets, for those that need no account.

Digests are those that TensorFlow Datasets keeps of the same files, or that torchvision does for the CIFAR
archives and EuroSAT.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Archive:
    """A file on the web.

    Args:
        url: its https address.
        digest: `sha256:...` or `md5:...` of the whole file; empty when none is published.
        num_bytes: its size; 0 when not known.
        into: folder below the originals that it is unpacked into.
        inner: archives within it that are unpacked too.
        packed: it is read as it is.
    """

    url: str
    digest: str = ""
    num_bytes: int = 0
    into: str = ""
    inner: tuple[str, ...] = ()
    packed: bool = False

    @property
    def name(self) -> str:
        """The file's name."""
        return self.url.partition("?")[0].rpartition("/")[2]


def _sha(url: str, sha256: str, num_bytes: int, into: str = "", *, packed: bool = False) -> Archive:
    return Archive(url, f"sha256:{sha256}", num_bytes, into, packed=packed)


_CIFAR = "https://www.cs.toronto.edu/~kriz/cifar"
_FLOWERS = "https://www.robots.ox.ac.uk/~vgg/data/flowers/102"
_PETS = "https://thor.robots.ox.ac.uk/~vgg/data/pets"
_SVHN = "https://ufldl.stanford.edu/housenumbers"
_PCAM = "https://zenodo.org/record/2546921/files/camelyonpatch_level_2_split"
_KITTI = "https://s3.eu-central-1.amazonaws.com/avg-kitti"
_NORB = "https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/smallnorb-5x"
_NORB_TEST, _NORB_TRAIN = f"{_NORB}01235x9x18x6x2x96x96-testing", f"{_NORB}46789x9x18x6x2x96x96-training"
_CLEVR = (
    _sha(
        "https://dl.fbaipublicfiles.com/clevr/CLEVR_v1.0.zip",
        "5cd61cf1096ed20944df93c9adb31e74d189b8459a94f54ba00090e5c59936d1",
        19_021_600_724,
    ),
)
_DSPRITES = (
    Archive(
        "https://github.com/google-deepmind/dsprites-dataset/raw/master/dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz",
        packed=True,
    ),
)
_SMALLNORB = tuple(
    _sha(url, sha256, num_bytes, packed=True)
    for url, sha256, num_bytes in (
        (
            f"{_NORB_TEST}-dat.mat.gz",
            "cf7104eed3e51174d2f65b66d1e5878b9da233b886f161b0d88f4510ba2c7474",
            130_799_817,
        ),
        (
            f"{_NORB_TEST}-info.mat.gz",
            "16adf314226327ee006d1a44db8cfef52773c06c829951d5653a9f6f310248a2",
            10_428,
        ),
        (
            f"{_NORB_TRAIN}-dat.mat.gz",
            "5ffd6272a07d32695ee1082a26a41a93a37aab8c28da047f8c34ed348d214873",
            131_896_188,
        ),
        (
            f"{_NORB_TRAIN}-info.mat.gz",
            "de7eb932ebe7a4ee16217fead60660d0eb3d23632c2f4d1c51f88c501c17bf32",
            71_052,
        ),
    )
)
_PCAM_FILES = tuple(
    _sha(f"{_PCAM}_{part}.h5.gz", sha256, num_bytes)
    for part, sha256, num_bytes in (
        ("train_x", "d619e741468a7ab35c7e4a75e6821b7e7e6c9411705d45708f2a0efc8960656c", 6_421_353_462),
        ("train_y", "b74126d2c01b20d3661f9b46765d29cf4e4fba6faba29c8e0d09d406331ab75a", 21_378),
        ("valid_x", "f82ee1670d027b4ec388048d9eabc2186b77c009655dae76d624c0ecb053ccb2", 805_965_320),
        ("valid_y", "ce1ae30f08feb468447971cfd0472e7becd0ad96d877c64120c72571439ae48c", 3_038),
        ("test_x", "79174c2201ad521602a5888be8f36ee10875f37403dd3f2086caf2182ef87245", 800_875_929),
        ("test_y", "0a522005fccc8bbd04c5a117bfaf81d8da2676f03a29d7499f71d0a0bd6068ef", 3_040),
    )
)

# Data set -> its archives. What is not here needs a login, a password or a program: see the set's `obtain`.
DOWNLOADS: dict[str, tuple[Archive, ...]] = {
    "caltech101": (
        Archive(
            "https://data.caltech.edu/records/mzrjq-6wc02/files/caltech-101.zip?download=1",
            "sha256:331234750fc7f77520e50d9565e8b6907b03565e30320da1401130db08c61f91",
            137_414_764,
            inner=("caltech-101/101_ObjectCategories.tar.gz",),
        ),
    ),
    "cifar10": (Archive(f"{_CIFAR}-10-python.tar.gz", "md5:c58f30108f718f92721af3b95e74349a", 170_498_071),),
    "cifar100": (
        Archive(f"{_CIFAR}-100-python.tar.gz", "md5:eb9058c3a382ffc7106e4002c42a8d85", 169_001_437),
    ),
    "dtd": (
        _sha(
            "https://www.robots.ox.ac.uk/~vgg/data/dtd/download/dtd-r1.0.1.tar.gz",
            "e42855a52a4950a3b59612834602aa253914755c95b0cff9ead6d07395f8e205",
            625_239_812,
        ),
    ),
    "flowers102": (
        _sha(
            f"{_FLOWERS}/102flowers.tgz",
            "2d01ecc807db462958cfe3d92f57a8c252b4abd240eb955770201e45f783b246",
            344_862_509,
        ),
        _sha(
            f"{_FLOWERS}/imagelabels.mat",
            "4903e94206bac23bf772aadf06451916df56b58fc483a62db32a97b82656651d",
            502,
            packed=True,
        ),
        _sha(
            f"{_FLOWERS}/setid.mat",
            "46b8678f91fd95d3c8f4feab80d271a6c834a1dd896fe29fd3e6ad9ce5c8dccd",
            14_989,
            packed=True,
        ),
    ),
    "pets": (
        _sha(
            f"{_PETS}/annotations.tar.gz",
            "52425fb6de5c424942b7626b428656fcbd798db970a937df61750c0f1d358e91",
            19_173_078,
        ),
        _sha(
            f"{_PETS}/images.tar.gz",
            "67195c5e1c01f1ab5f9b6a5d22b8c27a580d896ece458917e61d459337fa318d",
            791_918_971,
        ),
    ),
    "svhn": (
        _sha(
            f"{_SVHN}/train_32x32.mat",
            "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
            182_040_794,
            packed=True,
        ),
        _sha(
            f"{_SVHN}/test_32x32.mat",
            "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
            64_275_384,
            packed=True,
        ),
    ),
    "patch_camelyon": _PCAM_FILES,
    "eurosat": (
        Archive(
            "https://huggingface.co/datasets/torchgeo/eurosat/resolve/c877bcd43f099cd0196738f714544e355477f3fd/EuroSAT.zip",
            "md5:c8fa014336c82ac7804f0398fcb19387",
            94_280_567,
        ),
    ),
    "clevr-count": _CLEVR,
    "clevr-dist": _CLEVR,
    "dmlab": (
        _sha(
            "https://storage.googleapis.com/dmlab-vtab/dmlab.tar.gz",
            "638b18fa69a5d61bbc310cd0b87ac603a39f41de0fdb07b6e77de274a24480a4",
            3_017_022_789,
        ),
    ),
    "kitti-dist": (
        _sha(
            f"{_KITTI}/data_object_image_2.zip",
            "351c5a2aa0cd9238b50174a3a62b846bc5855da256b82a196431d60ff8d43617",
            12_569_945_557,
        ),
        _sha(
            f"{_KITTI}/data_object_label_2.zip",
            "4efc76220d867e1c31bb980bbf8cbc02599f02a9cb4350effa98dbb04aaed880",
            5_601_213,
        ),
        _sha(
            f"{_KITTI}/devkit_object.zip",
            "ce0b76b69c0c5f89690a0d65b7302bbbdb962a0c7e8aba6efc7050d1b04b4cf1",
            63_794,
            "devkit_object",
        ),
    ),
    "dsprites-loc": _DSPRITES,
    "dsprites-ori": _DSPRITES,
    "smallnorb-azim": _SMALLNORB,
    "smallnorb-elev": _SMALLNORB,
    "birds": (
        _sha(
            "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz?download=1",
            "0c685df5597a8b24909f6a7c9db6d11e008733779a671760afef78feb49bf081",
            1_150_585_339,
        ),
    ),
    "colorectal": (
        _sha(
            "https://zenodo.org/record/53169/files/Kather_texture_2016_image_tiles_5000.zip",
            "936d0b95ae0f04f1f7b18a2b7e8c55776c3e887d102f645bcee752d1a6626a32",
            258_098_431,
        ),
    ),
    "imagenet_v2": (
        _sha(
            "https://huggingface.co/datasets/vaishaal/ImageNetV2/resolve/main/imagenetv2-matched-frequency.tar.gz",
            "f0c37fdf925916b19ea1323cd9a2208cdb6959ba2c32eef2a7fc393835c9ca7c",
            1_264_079_360,
        ),
    ),
}


def originals_folder(name: str) -> str:
    """Below `ROOT/originals`: sets that are two questions about the same images share a folder."""
    family = name.partition("-")[0]
    return family if family in ("clevr", "dsprites", "smallnorb") else name
