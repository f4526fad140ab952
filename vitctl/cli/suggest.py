"""For an unknown option, suggest the flag, or the `--set`, that does the same."""

import shlex
from collections.abc import Sequence
from typing import Any

from vitctl.cli.completion import RECIPE_OF
from vitctl.system.text import nearest

# Names of our flags in other programs.
OTHER_FLAGS = {
    "--lr": ("learning_rate", "base_lr", "blr"),
    "--batch-size": ("batch", "bs", "global_batch_size", "train_batch_size", "per_device_train_batch_size"),
    "--batch": ("batch_size", "bs"),
    "--epochs": ("epoch", "num_epochs", "max_epochs", "num_train_epochs", "total_epochs"),
    "--steps": ("num_steps", "max_steps", "train_steps", "total_steps", "iterations", "max_iter"),
    "--out": ("output", "output_dir", "out_dir", "save_dir", "log_dir", "logdir", "workdir", "run_dir"),
    "--from": (
        "pretrained",
        "checkpoint",
        "ckpt",
        "init",
        "init_from",
        "model_path",
        "resume",
        "weights_path",
    ),
    "--data": ("data_dir", "data_path", "dataset_path", "train_dir", "data_root"),
    "--dataset": ("dataset_name", "data_set"),
    "--res": ("resolution", "image_size", "img_size", "input_size", "imgsz", "size"),
    "--seed": ("random_seed", "manual_seed"),
    "--processes": ("num_processes", "nproc_per_node", "nproc", "num_gpus", "gpus", "world_size"),
    "--nodes": ("nnodes", "num_nodes", "num_machines"),
    "--restarts": ("max_restarts",),
    "--precision": ("dtype", "mixed_precision", "amp"),
    "--model": ("arch", "model_name", "architecture"),
    "--recipe": ("config", "cfg", "config_file"),
    "--workers": ("num_workers", "jobs", "num_proc"),
    "--top": ("topk", "top_k", "k"),
    "--shots": ("num_shots", "k_shot"),
}
# Names of keys in other programs.
OTHER_NAMES = {
    "wd": "optimizer.weight_decay",
    "learning_rate": "optimizer.lr",
    "warmup": "schedule.warmup_steps",
    "grad_clip": "optimizer.clip_norm",
    "num_workers": "machine.workers",
    "img_size": "data.image_size",
    "steps": "schedule.total_steps",
    "epochs": "schedule.total_epochs",
    "ema_decay": "averaging.decay",
}
SWITCHES = {"no_sweep": "sweep.lrs=[]"}
MOST = 3
_TRAINED = ["pretrain", "finetune"]  # what `bench` measures


def instead(error: Any, arguments: Sequence[str]) -> str:
    """The command's flag, or else the `--set section.key=value`, for an option that is unknown; "" where
    there is neither.

    Args:
        error: of the command line; only the error of an unknown option has `option_name`.
        arguments: the whole command line, to find the option's value.
    """
    option, context = getattr(error, "option_name", ""), getattr(error, "ctx", None)
    if not option or context is None:
        return ""
    word = option.lstrip("-").replace("-", "_").lower()
    flags = {flag for parameter in context.command.params for flag in parameter.opts}
    same = ["--" + word.replace("_", "-"), *(flag for flag, others in OTHER_FLAGS.items() if word in others)]
    if found := next((flag for flag in same if flag in flags), ""):
        return f"{found} {shlex.quote(_value(option, arguments))}"
    if all(parameter.name != "set_" for parameter in context.command.params):
        return ""
    from vitctl.recipe.load import every_key
    from vitctl.recipe.schema import JOBS

    job = RECIPE_OF.get(context.command.name, context.command.name)
    jobs = (
        [job]
        if job in JOBS
        else _TRAINED
        if context.parent and context.parent.info_name == "bench"
        else list(JOBS)
    )
    schemas = [JOBS[job] for job in jobs]
    known = list(dict.fromkeys(key for schema in schemas for key in every_key(schema)))
    if word in SWITCHES and SWITCHES[word].partition("=")[0] in known:
        return f"--set {shlex.quote(SWITCHES[word])}"
    value = _value(option, arguments)
    return " or ".join(f"--set {shlex.quote(f'{key}={value}')}" for key in _keys(word, known)[:MOST])


def _keys(word: str, known: Sequence[str]) -> list[str]:
    """The name of a section `word`; keys that end in it; the key of this name in other programs; the nearest
    last part.
    """
    if f"{word}.name" in known:
        return [f"{word}.name"]
    if same := [key for key in known if key.rpartition(".")[2] == word or key.replace(".", "_") == word]:
        return same
    if OTHER_NAMES.get(word) in known:
        return [OTHER_NAMES[word]]
    near = nearest(word, sorted({key.rpartition(".")[2] for key in known}), 1)
    return [key for key in known if key.rpartition(".")[2] in near]


def _value(option: str, arguments: Sequence[str]) -> str:
    """The value of the option, after a space or `=`; VALUE where there is none."""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, found, value = argument.partition("=")
        if name == option:
            return value if found else following if following and not following.startswith("--") else "true"
    return "VALUE"
