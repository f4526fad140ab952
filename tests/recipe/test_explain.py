"""Every key of every recipe can be explained."""

import pytest

from vitctl.errors import RecipeError
from vitctl.recipe.load import every_key
from vitctl.recipe.schema import JOBS
from vitctl.recipe.write import explain

# columns: tables that name theirs as nobody does were refused; test_split; deterministic; test_images;
# profile: which steps, for the processes that a launcher starts
# 259: checkpoint.store keeps the run elsewhere; export.opset for older runtimes; export.web, push and public
# write something beside the files.
MOST_KEYS = 258


def test_keys__of_all_recipes_are_no_more_than_were_decided() -> None:
    """A new one is a decision: raise the number with the reason for the key. Lower it where one goes."""
    assert len({key for schema in JOBS.values() for key in every_key(schema)}) == MOST_KEYS


def test_explain__every_key_of_every_job() -> None:
    keys = {key for schema in JOBS.values() for key in every_key(schema)}
    for key in keys:
        lines = explain(key)
        assert lines[0] == key
        assert [line.split()[0] for line in lines[2:6]] == ["type", "default", "source", "jobs"], key
        assert len(lines[1].strip()) > 10, key
        assert " or  " not in lines[2] and not lines[2].endswith(" or"), key


def test_explain__type_unit_default_source() -> None:
    assert explain("optimizer.weight_decay") == [
        "optimizer.weight_decay",
        "  on every parameter, or those of decay_on; adam: decoupled, p -= lr_t * weight_decay * p; sgd: "
        "coupled, gradient += weight_decay * p before the "
        "momentum, as torch.optim.SGD and BiT; lamb: update += weight_decay * p before the trust ratio",
        "  type     number, at least 0",
        "  default  0.0",
        "  source   Table 3; D.1; BiT",
        "  jobs     pretrain, finetune, vtab",
    ]
    words = "\n".join(explain("schedule.warmup_steps") + explain("model.depth") + explain("data.mean"))
    assert "whole number, at least -1 [steps]" in words
    assert "default  unset" in words
    assert "3 numbers" in words


def test_explain__a_key_with_another_default_per_job_has_an_entry_for_each() -> None:
    lines = explain("data.image_size")
    pairs = list(zip(lines, lines[2:], strict=False))
    assert ("  default  224", "  jobs     pretrain") in pairs
    assert ("  default  384", "  jobs     vtab") in pairs
    assert ("  default  0", "  jobs     finetune") in pairs


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("every_steps", "no recipe has a key 'every_steps'; did you mean evaluation.every_steps or "),
        (
            "optimizer.weight_dekay",
            "no recipe has a key 'optimizer.weight_dekay'; did you mean optimizer.weight_decay",
        ),
        ("cifar10_vit", "no recipe has a key 'cifar10_vit'; `vitctl recipes show cifar10_vit` lists"),
        ("zzz", "no recipe has a key 'zzz'; `vitctl recipes show smoke` lists the keys of a recipe"),
    ],
)
def test_explain__refuses(key: str, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        explain(key)
    assert str(caught.value).startswith(said)
