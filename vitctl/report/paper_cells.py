"""Which experiments a cell of the paper's tables may show."""

from vitctl.jobs.inputs.network import model_config
from vitctl.models.configs import ResNetConfig
from vitctl.recipe.load import load_recipe
from vitctl.recipe.schema import Pretrain
from vitctl.recipe.sections import Model

VTAB, FIVE_SHOT, REAL = "vtab", "5-shot", "real of "
_DATA_SETS = {
    "ImageNet": "imagenet",
    "CIFAR-10": "cifar10",
    "CIFAR-100": "cifar100",
    "Pets": "pets",
    "Flowers": "flowers102",
}
# Section 4.1: ImageNet of Table 2 at 512, of ViT-H/14 at 518; BiT 3.3: R152x4 at 480.
_TABLE_2_IMAGENET = {
    "jft_h14": "finetune_imagenet_518",
    "jft_l16_14ep": "finetune_imagenet_512",
    "in21k_l16": "finetune_imagenet_512",
}
_R152X4_AT_480 = (
    "imagenet",
    "pets",
    "flowers102",
)  # BiT 3.3; CIFAR's small images go to 128 as for every network


def experiments_for(number: str, recipe: str, column: str) -> tuple[str, ...]:
    """The experiments of a cell; with two, the better one counts.

    Args:
        number: of the table.
        recipe: of the pre-training.
        column: of the table.

    Returns:
        recipes of the fine-tuning; "vtab"; "5-shot" for linear 5-shot on ImageNet; "real of RECIPE" for that
        network under the ReaL labels. Empty where we have no recipe of the experiment.

    Paper: Section 4.1, Appendix B.1.1: ResNets are also fine-tuned by BiT's rule, and the best result is
    taken
    """
    if column == "ReaL":
        return tuple(REAL + experiment for experiment in experiments_for(number, recipe, "ImageNet"))
    network = _model(recipe)
    if column == "VTAB":
        return () if network.version == "v2" else (VTAB,)  # BiT's were scored by BiT's rule for 1,000 images
    if column not in _DATA_SETS:
        return (FIVE_SHOT,)
    name = _DATA_SETS[column]
    if network.version == "v2":  # a network of BiT's, not one of the paper's
        return (f"bit_{name}_480" if network.name == "R152x4" and name in _R152X4_AT_480 else f"bit_{name}",)
    if number == "2" and column == "ImageNet":
        return (_TABLE_2_IMAGENET[recipe],)
    return (f"finetune_{name}", f"bit_{name}") if is_resnet(recipe) else (f"finetune_{name}",)


def _model(name: str) -> Model:
    recipe = load_recipe(name).recipe
    assert isinstance(recipe, Pretrain)
    return recipe.model


def is_resnet(name: str) -> bool:
    """Whether a pre-training recipe trains a ResNet, for which the better of two protocols counts."""
    recipe = load_recipe(name).recipe
    return isinstance(recipe, Pretrain) and isinstance(model_config(recipe, 1000), ResNetConfig)
