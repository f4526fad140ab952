"""The [data] tables of a recipe: the source of images, and their pre-processing."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from vitctl.recipe.sections import Jitter, LocalPath, Names, Pair, Section, Triple, colour_problems, knob

Resample = Literal["bilinear", "bilinear_antialias", "bicubic_antialias"]
EvalResample = Literal[
    "", "bilinear", "bilinear_antialias", "bicubic_antialias", "area", "lanczos", "box", "hamming", "nearest"
]
EvalMethod = Literal["square", "shorter_side", "torchvision", "transformers", "letterbox"]
EVAL_METHOD = (
    "squash to a square, or resize the shorter side and crop the centre; torchvision: so with the rounding "
    "of torchvision and timm; transformers: with that of its processors that crop, of CLIP, BiT and small "
    "ConvNexts (those of ViT, DeiT, BEiT, SigLIP and DINOv3 are a square); letterbox: the whole image, its "
    "longer side resized to image_size, on a square of the mean colour of the weights, within half a level "
    "of 0 after normalisation"
)
# BiT's pre-processing of ObjectNet: the shorter side, and the square in its centre.
OBJECTNET_RESIZE, OBJECTNET_SIZE = 512, 480
_MAX_PATTERN = 1000
_TIMMS = "randaugment_probability", "randaugment_std", "randaugment_increasing"
_POLICIES = "imagenet", "cifar10", "svhn", "trivial", "original", "v0"
# As other programs call them: ultralytics, and torchvision's reference script.
_OTHER_NAMES = {"autoaugment": "imagenet", "ta_wide": "trivial", "none": ""}
_OF_RAND = {"m": "magnitude", "n": "layers", "p": "probability", "mstd": "std", "inc": "increasing"}
Orientation = Literal["auto", "apply", "ignore"]
Truncated = Literal["refuse", "pad"]
IMAGE_SIZE = "side of the square that the model sees; 0: as stored with the weights"
RESAMPLE = (
    "how images are resized; plain bilinear has no antialias, as in TensorFlow; the others are Pillow's"
)
EVAL_RESAMPLE = (
    "evaluation: as resample, or area, TensorFlow's: the mean of the pixels under each new one, or lanczos, "
    "box, hamming or nearest, as in Pillow"
)


def _resized_to(size: int) -> int:
    """Check a size before the centre crop. Earlier releases took 0 for an unset one."""
    if size < 1:
        raise ValueError(f"{size} is no size; leave it out, or set it to the image size, which crops nothing")
    return size


# None: unset, with a default by job.
EvalResize = Annotated[int, AfterValidator(_resized_to)] | None


def crop_problem(image_size: int, eval_resize: int | None) -> tuple[bool, str]:
    """Return whether evaluation has no room for its centre crop, and a fix, for `Section._refusing`."""
    text = f"eval_resize = {eval_resize} is smaller than image_size = {image_size}; "
    return 0 < (eval_resize or 0) < image_size, f"{text}set data.eval_resize to at least {image_size}"


def check_letterbox(method: str, image_size: int, eval_resize: int | None, unset: str = "'unset'") -> None:
    """Raise ValueError if eval_resize is set for a letterbox, which has no centre crop."""
    if method == "letterbox" and eval_resize not in (None, 0, image_size):
        raise ValueError(
            f"eval_resize = {eval_resize} does nothing for eval_method = 'letterbox', which keeps the whole "
            f"image; set data.eval_resize = {unset}"
        )


class Place(Section):
    """The source of images; shared by every job that reads data."""

    dataset: str = knob(
        "", "name of a known data set (digits, shapes, cifar10, pets, ...), found under data.root"
    )
    path: str = knob("", "folder of shards made by `vitctl data shards`, its address, or shards as "
                         "a/{000..127}.tar or @FILE; "
                         "overrides dataset")  # fmt: skip
    root: LocalPath = knob("data", "folder that holds known data sets, one folder each")
    classes: Names = knob((), "names of the classes that are kept, relabelled in this order; none: all")
    cache_gib: float = knob(
        64.0,
        "limit of the cache of remote shards; 0: training images are read one by one by byte range, "
        "unverified; scored splits are "
        "cached all the same",
        unit="GiB",
        ge=0,
    )
    patience: float = knob(
        600.0,
        "how long a run waits out an outage of a server; then it saves, and stops with exit code 3",
        unit="s",
        ge=0,
    )
    eval_split: str = knob(
        "test", "split that is scored, e.g. 'test' or 'train[98%:]'; '' for none", source="B.1.1"
    )
    group_by: str = knob(
        "",
        "images that belong together, such as bursts, stay on one side of parts of a split: a regular "
        "expression for their names, whose groups name the image's group, e.g. '^(.*)_[0-9]+' ; or "
        "TABLE.csv:COLUMN with the names in its column path; '': none",
        source="not in the paper",
    )
    columns: str = knob(
        "",
        "names the columns of a table that data.path is, image=FILE,label=CLASS, also split= and labels=, or "
        "the label of WebDataset samples without an index, label=caption; '': by their usual names",
        source="not in the paper",
    )
    exif_orientation: Orientation = knob(
        "auto",
        "apply: photographs are turned upright as their EXIF data says; ignore: used as stored, as in "
        "TensorFlow; "
        "auto: apply to data.path, ignore for known data sets, as in their published results; evaluate: "
        "as stored "
        "with the weights",
        source="authors' code",
    )

    truncated: Truncated = knob(
        "refuse",
        "JPEGs that end before the last row, or are damaged: refuse: they count as bad samples; pad: missing "
        "rows are filled by "
        "the decoder, as in earlier releases and other programs; for sets published with such files, "
        "such as Pets",
    )

    @model_validator(mode="after")
    def _groups_can_be_found(self) -> Self:
        if self.group_by and not self._is_own and (self.dataset or vars(self).get("datasets")):
            raise ValueError(
                f"group_by = '{self.group_by}' is for images of data.path; known data sets have splits of "
                f"their own: leave it out"
            )
        try:
            re.compile("" if re.search(r"\.[ct]sv:", self.group_by) else self.group_by[:_MAX_PATTERN])
        except re.error as error:
            raise ValueError(f"group_by = '{self.group_by}' is not a regular expression ({error})") from None
        return self._refusing(
            (
                len(self.group_by) > _MAX_PATTERN,
                f"group_by has {len(self.group_by):,} characters, should have {_MAX_PATTERN}",
            ),
        )

    @property
    def turns_upright(self) -> bool:
        """Return whether photos are rotated by their EXIF orientation."""
        return self.exif_orientation == "apply" or (self.exif_orientation == "auto" and self._is_own)

    @property
    def _is_own(self) -> bool:
        return bool(self.path)


class StoredTransform(Place):
    """[data] of the jobs whose default pre-processing is the one stored with the weights."""

    eval_method: Literal["", EvalMethod] = knob(
        "",
        f"{EVAL_METHOD}; '': as stored with the weights, for ObjectNet's labels shorter_side",
        source="BiT App. B",
    )
    eval_resize: EvalResize = knob(
        None,
        "size before the centre crop; unset: as stored with the weights, for ObjectNet's labels 512, in "
        "proportion to image_size",
        unit="pixels",
        source="BiT App. B",
    )
    eval_resample: EvalResample = knob("", EVAL_RESAMPLE + "; '': as stored with the weights")

    @model_validator(mode="after")
    def _letterbox_has_no_crop(self) -> Self:
        check_letterbox(self.eval_method, getattr(self, "image_size", 0), self.eval_resize)
        return self


class EvaluateImages(StoredTransform):
    """[data] of `evaluate`."""

    image_size: int = knob(
        0, IMAGE_SIZE + "; for ObjectNet's labels 480", unit="pixels", source="BiT App. B", ge=0
    )

    @model_validator(mode="after")
    def _crop_needs_room(self) -> Self:
        return self._refusing(crop_problem(self.image_size, self.eval_resize))


class ExportImages(StoredTransform):
    """[data] of `export`: images to verify a file on, and the pre-processing written with the weights."""

    calibration_split: str = knob(
        "train", "int8: split whose images set the ranges of activations; not the one that is scored"
    )


class Ingredient(Section):
    """One source of data.mixture."""

    path: str
    weight: float = Field(gt=0)


Mixture = Annotated[tuple[Ingredient, ...], Field(strict=False)]  # TOML arrays are lists


class TrainImages(Place):
    """[data] of the jobs that train."""

    train_split: str = knob(
        "train", "split that is trained on, e.g. 'train' or 'train[:98%]'", source="B.1.1"
    )
    test_split: str = knob(
        "",
        "split that the chosen weights are scored on once, after the last step, into the result's `test`; it "
        "is set where evaluation.select_best chooses by other images and the data has a test split; '': none",
        source="not in the paper",
    )
    mixture: Mixture = knob(
        (),
        "train on several sources in these shares: [{path = 'a', weight = 3}, {path = 'b', weight = 1}]; "
        "path is then scored",
    )
    subset_images: int = knob(
        0, "train on this many images drawn at random; 0: all", unit="images", source="4.3", ge=0
    )
    subset_fraction: float = knob(
        1.0, "train on this share of the images (of each source), drawn at random", gt=0, le=1
    )
    subset_seed: int = knob(
        0,
        "seed of that draw; with the same seed a smaller subset is part of a larger one",
        source="4.3",
        ge=0,
    )
    sampling: Literal["shuffle", "balanced"] = knob(
        "shuffle",
        "shuffle: every image once in an epoch; balanced: every class equally often, its images in turn. An "
        "epoch is still as many images as there are: those of small classes are drawn several times in it, "
        "not all of large ones are drawn",
        source="not in the paper",
    )
    order: Literal["exact", "windowed"] = knob(
        "exact",
        "exact: any image next; windowed: shards are read in one go, images shuffled within windows of them",
    )
    order_window_shards: int = knob(16, "windowed: shards that are shuffled together", unit="shards", ge=1)
    lanes: int = knob(
        0,
        "windowed: parts of the global batch that each read shards of their own, so that a node fetches its "
        "part of the data once; schedule.lanes takes precedence. 0: none, or, for a new run on several "
        "nodes, their number rounded up to a power of two; 1: none",
        ge=0,
        le=4096,
    )
    image_size: int = knob(0, IMAGE_SIZE, unit="pixels", source="B.1.1", ge=0)
    crop: Literal["inception", "random_resized", "random", "padded", "none", "letterbox"] = knob(
        "inception",
        "random area 5-100 % and aspect 0.75-1.33 by TensorFlow's rule; random_resized: random area and "
        "aspect by the rule of torchvision and timm; or resize and random crop; padded: resize to "
        "image_size, pad with black to train_resize, and random crop; or resize only; letterbox: as "
        "eval_method has it",
        source="issues 46, 53; MAE, DeiT: random_resized",
    )
    crop_scale: Pair = knob(
        (0.08, 1.0), "random_resized: smallest and largest share of the area", source="torchvision, timm"
    )
    crop_ratio: Pair = knob(
        (3 / 4, 4 / 3),
        "random_resized: smallest and largest aspect ratio, width / height",
        source="torchvision, timm",
    )
    train_resize: int = knob(
        0, "crop = 'random' and 'padded': size before the crop", unit="pixels", source="BiT 3.3", ge=0
    )
    flip: bool = knob(True, "left-right flip with probability one half", source="authors' code")
    resample: Resample = knob(
        "bilinear_antialias",
        RESAMPLE
        + ". The default is what other programs do with exported weights; the paper's recipes use bilinear",
    )
    decode: Literal["exact", "scaled"] = knob(
        "exact",
        "training: scaled decodes a large JPEG at a half, a quarter or an eighth of its size where the crop "
        "allows it, which is "
        "faster and changes pixels slightly; images that are scored are always decoded exactly",
    )
    randaugment_layers: int = knob(
        0,
        "RandAugment: operations on each training image; 0: off. AugReg: 2",
        source="AugReg; not in the paper",
        ge=0,
    )
    randaugment_magnitude: int = knob(
        9,
        "RandAugment: strength as its rules count it: torchvision 0 to 30, big_vision and timm 0 to 10",
        source="AugReg; not in the paper",
        ge=0,
        le=30,
    )
    randaugment_rules: Literal["torchvision", "big_vision", "timm"] = knob(
        "torchvision",
        "RandAugment: big_vision has the operations and magnitudes of the paper's authors, among them "
        "Invert, Cutout and SolarizeAdd; its magnitude 10 is the full strength, as torchvision's 30. timm: "
        "its rand-mM-nN-pP-mstdS-incI is magnitude M, N layers, probability P, std S and increasing",
        source="authors' code; AugReg; timm",
    )
    randaugment_probability: float = knob(
        0.5, "timm's RandAugment: probability that a drawn operation is applied", source="timm", ge=0, le=1
    )
    randaugment_std: float = knob(
        0.0,
        "timm's RandAugment: standard deviation of the magnitude, which is drawn for each operation and "
        "clipped to 0 to 10. MAE: 0.5",
        source="timm",
        ge=0,
        le=100,
    )
    randaugment_increasing: bool = knob(
        False,
        "timm's RandAugment: every operation changes more at a larger magnitude; false: some change less, as "
        "in AutoAugment. MAE: true",
        source="timm",
    )
    auto_augment: str = knob(
        "",
        "a policy instead of RandAugment: torchvision's AutoAugment of imagenet, cifar10 or svhn, or its "
        "TrivialAugmentWide, trivial; timm's original or v0. RandAugment as other programs write it, such as "
        "timm's rand-m9-mstd0.5-inc1 or torchvision's randaugment, sets the keys of RandAugment",
        source="arXiv 1805.09501, 2103.10158; torchvision; timm",
    )
    vertical_flip: bool = knob(
        False,
        "flip upside down with probability one half, for images without an up",
        source="not in the paper",
    )
    augment3: bool = knob(
        False,
        "3-Augment: each training image is made grey, solarized or blurred. The order of all: crop, flips, "
        "RandAugment or auto_augment, 3-Augment, color_jitter, normalisation, random_erasing, MixUp or "
        "CutMix",
        source="DeiT III; not in the paper",
    )
    color_jitter: Jitter = knob(
        (),
        "random brightness, contrast and saturation in drawn order: one strength for the three, or three, or "
        "four with hue (to 0.5); none: off. DeiT III: 0.3",
        source="DeiT III; torchvision's ColorJitter",
    )
    random_erasing: float = knob(
        0.0,
        "probability of filling a rectangle of a training image, 2 to 33 % of its area, with noise; 0: off. "
        "MAE: 0.25",
        source="arXiv 1708.04896; timm's mode pixel",
        ge=0,
        le=1,
    )
    erasing_mode: Literal["pixel", "rand", "const"] = knob(
        "pixel",
        "random_erasing fills with normal noise for each pixel; rand: one colour of it for a rectangle; "
        "const: the mean colour, which is 0 after normalisation",
        source="timm's --remode; const: torchvision, ultralytics",
    )
    erasing_count: int = knob(
        1,
        "random_erasing: most rectangles of an image, their number drawn from 1; they share the area",
        source="timm's --recount",
        ge=1,
        le=1000,
    )
    repeats: int = knob(
        1,
        "repeated augmentation: each image comes so many times in a global batch, augmented otherwise; an "
        "epoch keeps its length and has fewer different images. DeiT: 3",
        source="DeiT; arXiv 1901.09335",
        ge=1,
    )
    mixup_alpha: float = knob(
        0.0,
        "MixUp: blend images with Beta(alpha, alpha); 0: off. AugReg: 0 to 0.8",
        source="AugReg; not in the paper",
        ge=0,
    )
    cutmix_alpha: float = knob(
        0.0,
        "CutMix: patch images with Beta(alpha, alpha) of the area; 0: off. With MixUp, each batch gets "
        "one of them",
        ge=0,
    )
    mixup_probability: float = knob(
        1.0, "probability that a batch is blended, by MixUp or CutMix", source="timm: 1", gt=0, le=1
    )
    cutmix_share: float = knob(
        0.5, "with MixUp and CutMix: share of CutMix among blended batches", source="timm: 0.5", gt=0, lt=1
    )
    mixup_off_epoch: float = knob(
        0.0, "no MixUp or CutMix after so many epochs; 0: never off", unit="epochs", source="timm", ge=0
    )
    eval_method: EvalMethod = knob(
        "square",
        f"evaluation: {EVAL_METHOD}",
        source="authors' code",
    )
    eval_resize: int = knob(0, "evaluation: size before the centre crop; 0: image_size", unit="pixels", ge=0)
    eval_resample: EvalResample = knob("", EVAL_RESAMPLE + "; '': as resample", source="authors' code")
    synthetic: int = knob(
        0, "train on this many generated noise images instead of data; 0: off", unit="images", ge=0
    )
    max_bad_fraction: float = knob(
        0.001, "stop when more than this share of the images read is unreadable", ge=0, le=1
    )

    @property
    def _is_own(self) -> bool:
        return bool(self.path or self.mixture)

    @model_validator(mode="after")
    def _values_fit_together(self) -> Self:
        return self._refusing(
            (
                self.subset_images and (self.subset_fraction < 1 or self.mixture),
                "subset_images cannot be combined with subset_fraction or a mixture; set "
                "data.subset_fraction only",
            ),
            (
                self.order == "exact" and self.order_window_shards != 16,
                "order_window_shards does nothing for order = 'exact'; set data.order = 'windowed', or "
                "leave it out",
            ),
            (
                self.order == "exact" and self.lanes > 1,
                f"lanes = {self.lanes} does nothing for order = 'exact', in which every image has the same "
                f"chance everywhere; set data.order = 'windowed', or leave it out",
            ),
            (
                self.sampling == "balanced" and (self.order == "windowed" or self.mixture or self.synthetic),
                "sampling = 'balanced' draws any image next, by its class; set data.order = 'exact', and "
                "leave out data.mixture and data.synthetic",
            ),
            (
                self.mixture and self.synthetic,
                "synthetic images cannot be mixed; set data.synthetic = 0, or leave data.mixture out",
            ),
            (
                self.auto_augment not in ("", *_POLICIES),
                f"auto_augment = {self.auto_augment!r} should be randaugment, {', '.join(_POLICIES[:4])} "
                f"(torchvision's; autoaugment: imagenet, ta_wide: trivial), {' or '.join(_POLICIES[4:])} "
                f"(timm's), or as timm's rand-mM-nN-pP-mstdS-incI; for 3a set data.augment3 = true",
            ),
            (
                self.auto_augment and self.randaugment_layers,
                f"auto_augment = '{self.auto_augment}' goes instead of randaugment_layers = "
                f"{self.randaugment_layers}; set data.randaugment_layers = 0, or data.auto_augment = ''",
            ),
            (
                not self.randaugment_layers and self.randaugment_magnitude != 9,
                f"randaugment_magnitude = {self.randaugment_magnitude} does nothing without layers; "
                f"set data.randaugment_layers, e.g. to 2, or leave it out",
            ),
            (
                not self.randaugment_layers and self.randaugment_rules != "torchvision",
                f"randaugment_rules = '{self.randaugment_rules}' does nothing without layers; "
                f"set data.randaugment_layers, e.g. to 2, or leave it out",
            ),
            (
                self.randaugment_rules == "timm" and self.randaugment_magnitude > 10,
                f"randaugment_magnitude = {self.randaugment_magnitude} should be at most 10 for timm, as "
                f"strong as torchvision's 30; set data.randaugment_magnitude, e.g. to 9",
            ),
            (
                self.randaugment_rules != "timm" and self._sets(*_TIMMS),
                f"{self._sets(*_TIMMS)} belongs to randaugment_rules = 'timm'; set "
                f"data.randaugment_rules = 'timm', or leave it out",
            ),
            (
                not self.random_erasing and (self.erasing_mode, self.erasing_count) != ("pixel", 1),
                "erasing_mode and erasing_count do nothing without random_erasing; set data.random_erasing, "
                "e.g. to 0.25, or leave them out",
            ),
            (
                not (self.mixup_alpha or self.cutmix_alpha)
                and (self.mixup_probability, self.mixup_off_epoch) != (1, 0),
                "mixup_probability and mixup_off_epoch do nothing without MixUp or CutMix; set "
                "data.mixup_alpha, or leave them out",
            ),
            (
                not (self.mixup_alpha and self.cutmix_alpha) and self.cutmix_share != 0.5,
                "cutmix_share does nothing without both; set data.mixup_alpha and data.cutmix_alpha, or "
                "leave it out",
            ),
            (
                self.crop != "random_resized" and self._sets("crop_scale", "crop_ratio"),
                f"{self._sets('crop_scale', 'crop_ratio')} belongs to crop = 'random_resized'; set data.crop "
                f"= 'random_resized', or leave it out",
            ),
            (
                self.crop_scale[1] > 1,
                f"crop_scale = {list(self.crop_scale)} should be shares of the area, at most 1",
            ),
            (
                self.repeats > 1 and self.order == "windowed",
                f"repeats = {self.repeats} deals the copies of an image over the whole batch, and order = "
                f"'windowed' gives each lane its own shards; set data.order = 'exact'",
            ),
            (
                self.synthetic and (self.repeats > 1 or self.crop == "letterbox"),
                "synthetic images are square noise: repeats and crop = 'letterbox' do nothing; leave them "
                "out",
            ),
        )

    @model_validator(mode="after")
    def _crop_needs_room(self) -> Self:
        self._refusing(
            (
                self.crop in ("random", "padded") and self.train_resize < self.image_size,
                f"crop = '{self.crop}' cuts image_size = {self.image_size} out of train_resize = "
                f"{self.train_resize}; set data.train_resize to at least {self.image_size}",
            ),
            (
                self.crop == "padded" and (self.train_resize - self.image_size) % 2,
                f"crop = 'padded' has the same border on all sides, which train_resize = {self.train_resize} "
                f"around image_size = {self.image_size} has not; set data.train_resize to "
                f"{self.train_resize + 1}",
            ),
            crop_problem(self.image_size, self.eval_resize),
        )
        check_letterbox(self.eval_method, self.image_size, self.eval_resize, unset="0")
        return self


def augment_keys(given: Any, below: Any) -> dict[str, Any]:
    """Return the keys of [data] that a value of auto_augment sets, and its own; those of RandAugment that
    `below`, the table that it overrides, has are undone. A value that is none stays, to be refused.
    """
    kind, *parts = str(given).split("-")
    found = [re.fullmatch("([a-z]+)([0-9]+(?:[.][0-9]+)?)", part) for part in parts]
    values: dict[str, Any] = {"auto_augment": ""}
    if given in ("randaugment", "ra"):
        values |= {"randaugment_layers": 2, "randaugment_magnitude": 9}
    elif kind == "rand" and all(one and one[1] in _OF_RAND for one in found):
        values |= {"randaugment_rules": "timm", "randaugment_layers": 2, "randaugment_magnitude": 10}
        values |= {f"randaugment_{_OF_RAND[one[1]]}": _typed(*one.groups()) for one in found if one}
    else:
        values["auto_augment"] = _OTHER_NAMES.get(given, given) if isinstance(given, str) else given
    undone = [name for name in TrainImages.model_fields if name.startswith("randaugment_") and name in below]
    return {name: TrainImages.model_fields[name].default for name in undone} | values


def _typed(letter: str, number: str) -> Any:
    """Return a number of timm's string as its key takes it."""
    value = float(number)
    return (
        bool(value) if letter == "inc" else value if letter in ("p", "mstd") or "." in number else int(value)
    )


class PretrainImages(TrainImages):
    """[data] of `pretrain`: it also sets the value range, which is stored with the weights."""

    image_size: int = knob(
        224, "side of the square that the model sees", unit="pixels", source="Table 3", ge=1
    )
    mean: Triple = knob(
        (0.5, 0.5, 0.5), "subtracted after scaling to 0..1; 0.5 gives the range -1..1", source="authors' code"
    )
    std: Triple = knob((0.5, 0.5, 0.5), "divided by after the mean", source="authors' code")

    @model_validator(mode="after")
    def _values_stay_numbers(self) -> Self:
        return self._refusing(*colour_problems(self.mean, self.std))


class FewshotImages(Place):
    """[data] of `fewshot`."""

    datasets: Names = knob(
        (), "several known data sets, scored together; override dataset and path", source="D.2"
    )
    train_split: str = knob(
        "", "split that the shots are drawn from; '': train, or the one of the authors' evaluator where "
            "it differs",
        source="big_vision fewshot_lsr",
    )  # fmt: skip
    eval_split: str = knob(
        "",
        "split that is scored; '': test, or the one of the authors' evaluator where it differs",
        source="big_vision fewshot_lsr",
    )
    image_size: int = knob(0, IMAGE_SIZE, unit="pixels", ge=0)
    eval_method: EvalMethod = knob("square", EVAL_METHOD, source="big_vision fewshot_lsr")
    eval_resize: EvalResize = knob(
        None,
        "size before the centre crop; unset: 8/7 of image_size, as 256 for 224",
        unit="pixels",
        source="big_vision fewshot_lsr",
    )
    resample: Resample = knob("bilinear", RESAMPLE, source="authors' code")
    eval_resample: EvalResample = knob("", EVAL_RESAMPLE + "; '': as resample")

    @property
    def _is_own(self) -> bool:
        return bool(self.path and not self.datasets)

    @model_validator(mode="after")
    def _crop_needs_room(self) -> Self:
        check_letterbox(self.eval_method, self.image_size, self.eval_resize)
        return self._refusing(crop_problem(self.image_size, self.eval_resize))


class ProbeImages(FewshotImages):
    """[data] of `probe`: like `fewshot`, but with all training images of ImageNet."""


class VtabImages(Section):
    """[data] of `vtab`: splits, crop and flip are those of each task."""

    path: str = knob("", "folder that holds a folder of shards for each task; unset: data.root")
    root: LocalPath = knob("data", "folder that holds known data sets, one folder each")
    image_size: int = knob(
        384, "side of the square that the model sees, for all tasks; 0: as stored with "
             "the weights", unit="pixels",
        source="B.1.1", ge=0,
    )  # fmt: skip
    augment: Literal["bit", "none"] = knob(
        "bit",
        "bit: random crop out of 7/6 of image_size and flip, each for the tasks where BiT has it; none: "
        "resize only",
        source="B.1.1; BiT App. F",
    )
    resample: Resample = knob("bilinear", RESAMPLE, source="authors' code")
    allow_partial: bool = knob(
        False, "use data sets that lack some of their images; the result is labelled accordingly"
    )
    max_bad_fraction: float = knob(
        0.0, "stop when more than this share of the images read is unreadable", ge=0, le=1
    )
