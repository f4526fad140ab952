"""Counterparts of other programs' options; docs/moving.md explains them.

The programs are timm, Hugging Face's Trainer, MAE, DeiT, BEiT, peft, torchvision, ultralytics, lightly-train
and getitune. A wrong guess trains a different network, so this table takes precedence over similar spelling.
"""

from typing import NamedTuple


class Synonym(NamedTuple):
    """The counterpart here of another program's option.

    `here` has recipe keys (with a value if it does the same), options or a command, separated by commas; ""
    if vitctl has nothing like it. `note` says how the value changes, or what differs.
    """

    here: str
    note: str = ""
    same: bool = False  # the value means the same, despite the note

    @property
    def keeps_value(self) -> bool:
        """Return whether a typed value can be used unchanged."""
        return self.same or not self.note

    @property
    def remark(self) -> str:
        """The note in parentheses, to append to a text."""
        return f" ({self.note})" if self.note else ""

    @property
    def places(self) -> list[str]:
        """The keys, options and commands."""
        return self.here.split(", ") if self.here else []


_PEAK = "base x batch / 256"
_OF_STEPS = "epochs x images / batch"
_PASS = "images of one pass: batch / processes / accumulation steps"
_FULL_BATCH = "images of all processes and accumulation steps together"
_DECAYED = "timm and MAE decay matrices alone: set optimizer.decay_on='matrices' too"
_NUMBERING = "MAE counts layers otherwise: optimizer.layer_decay_numbering"
_EMA = "0.9998 for 20,000 steps or more; averaging.debias leaves the first weights out"
_HEAD_DROPOUT = "timm's is before the head alone; dropout is in every block"
_SIGMOID = "summed over the classes: if theirs is a mean, multiply optimizer.eps and clip_norm by the classes"
_FROM_DATA = "the data say how many; data.classes chooses among them"
_RAND = "timm's rand-m9-mstd0.5-inc1, original and v0, without -mmax and -t; 3a is data.augment3=true"
_PIXELS = (
    "torchvision's and ultralytics' randaugment and autoaugment, with grey instead of black beside the image"
)
_SIDES = "with data.eval_method = 'torchvision'"

SYNONYMS = {
    # Rate and schedule
    "learning_rate": Synonym("optimizer.lr"),
    "lr0": Synonym("optimizer.lr"),
    "base_lr": Synonym("optimizer.lr", f"{_PEAK}; timm with AdamW: base x the root of batch / 256"),
    "lr_base": Synonym("optimizer.lr", f"{_PEAK}; timm with AdamW or LAMB: base x the root of batch / 256"),
    "lr_base_size": Synonym("optimizer.lr_batch"),
    "lr_base_scale": Synonym("", "linear for sgd, the root for the others: its default"),
    "blr": Synonym("optimizer.lr", _PEAK),
    "lrf": Synonym("schedule.end_lr", "lr0 x lrf; ultralytics falls linearly: schedule.decay = 'linear'"),
    "min_lr": Synonym("schedule.end_lr"),
    "eta_min": Synonym("schedule.end_lr"),
    "warmup_lr": Synonym("schedule.warmup_lr"),
    "warmup_epochs": Synonym("schedule.warmup_epochs"),
    "warmup_ratio": Synonym("schedule.warmup_steps", "ratio x steps; -1 is a tenth, 500 at most"),
    "warmup": Synonym("schedule.warmup_steps", "in steps; in epochs it is schedule.warmup_epochs"),
    "warmup_steps": Synonym("schedule.warmup_steps", "whole steps: share x steps", same=True),
    "lr_warmup_steps": Synonym("schedule.warmup_steps"),
    "num_warmup_steps": Synonym("schedule.warmup_steps"),
    "sched": Synonym("schedule.decay", "cosine, linear, steps or constant; timm's changes once an epoch"),
    "lr_scheduler": Synonym("schedule.decay", "cosine, linear, steps or constant"),
    "lr_scheduler_type": Synonym("schedule.decay", "cosine, linear or constant"),
    "scheduler": Synonym("schedule.decay", "cosine, linear, steps or constant"),
    "sched_on_updates": Synonym("", "the rate changes at every step, as with it"),
    "warmup_prefix": Synonym(
        "", "the warm-up comes first, as with it: add its epochs to schedule.total_epochs"
    ),
    "unscale_lr": Synonym("", "optimizer.lr is the rate itself, as with it"),
    "cos_lr": Synonym("schedule.decay=cosine"),
    "decay_milestones": Synonym("schedule.drops", "shares of the run, with schedule.decay = 'steps'"),
    "milestones": Synonym("schedule.drops", "shares of the run, with schedule.decay = 'steps'"),
    "decay_epochs": Synonym("schedule.drops", "list each drop as a share of the run"),
    "step_size": Synonym("schedule.drops", "list each drop as a share of the run"),
    "decay_rate": Synonym("", "each of schedule.drops divides the rate by ten"),
    "cooldown_epochs": Synonym("", "schedule.end_lr is the last rate"),
    "lr_noise": Synonym(""),
    "lr_k_decay": Synonym(""),
    "lr_cycle_mul": Synonym("", "the cosine falls once"),
    "patience_epochs": Synonym("", "no schedule waits for a plateau; evaluation.patience stops a run early"),
    "epochs": Synonym("schedule.total_epochs"),
    "epoch": Synonym("schedule.total_epochs"),
    "num_epochs": Synonym("schedule.total_epochs"),
    "num_train_epochs": Synonym("schedule.total_epochs"),
    "max_epochs": Synonym("schedule.total_epochs"),
    "steps": Synonym("schedule.total_steps"),
    "num_steps": Synonym("schedule.total_steps"),
    "max_steps": Synonym("schedule.total_steps"),
    "train_steps": Synonym("schedule.total_steps"),
    "iterations": Synonym("schedule.total_steps"),
    "max_iter": Synonym("schedule.total_steps"),
    "epoch_repeats": Synonym("schedule.total_epochs", "epochs x repeats"),
    # Batch
    "batch": Synonym("schedule.batch_size", "ultralytics accumulates 16 to 64: give 64"),
    "b": Synonym("schedule.batch_size", _FULL_BATCH),
    "bs": Synonym("schedule.batch_size", _FULL_BATCH),
    "nbs": Synonym("schedule.batch_size"),
    "global_batch_size": Synonym("schedule.batch_size"),
    "train_batch_size": Synonym("schedule.batch_size"),
    "batch_size": Synonym("schedule.batch_size", _FULL_BATCH),
    "per_device_train_batch_size": Synonym("schedule.batch_size", _FULL_BATCH),
    "per_device_eval_batch_size": Synonym("evaluation.batch_size", "of all processes together"),
    "validation_batch_size": Synonym("evaluation.batch_size", "of all processes together"),
    "gradient_accumulation_steps": Synonym("machine.micro_batch", _PASS),
    "grad_accum_steps": Synonym("machine.micro_batch", _PASS),
    "accum_iter": Synonym("machine.micro_batch", _PASS),
    # Optimizer
    "opt": Synonym(
        "optimizer.name",
        "adam (also AdamW), sgd or lamb; timm's sgd has optimizer.nesterov = true, its momentum not",
    ),
    "optim": Synonym("optimizer.name", "adam (also AdamW), sgd or lamb"),
    "optimizer": Synonym("optimizer.name", "adam (also AdamW), sgd or lamb"),
    "adamw": Synonym("optimizer.name=adam"),
    "sgd": Synonym("optimizer.name=sgd", "plain momentum"),
    "nesterov": Synonym("optimizer.nesterov"),
    "opt_eps": Synonym("optimizer.eps"),
    "adam_epsilon": Synonym("optimizer.eps"),
    "opt_betas": Synonym("optimizer.beta1, optimizer.beta2", "one each"),
    "betas": Synonym("optimizer.beta1, optimizer.beta2", "one each"),
    "adam_beta1": Synonym("optimizer.beta1"),
    "adam_beta2": Synonym("optimizer.beta2"),
    "momentum": Synonym("optimizer.momentum"),
    "weight_decay": Synonym("optimizer.weight_decay", _DECAYED, same=True),
    "wd": Synonym("optimizer.weight_decay", _DECAYED, same=True),
    "no_weight_decay": Synonym("optimizer.decay_on=matrices"),
    "clip_grad": Synonym(
        "optimizer.clip_norm", "with --clip-mode value it is optimizer.clip_value", same=True
    ),
    "grad_clip": Synonym("optimizer.clip_norm"),
    "max_grad_norm": Synonym("optimizer.clip_norm"),
    "gradient_clip_val": Synonym("optimizer.clip_norm"),
    "clip_mode": Synonym("optimizer.clip_value", "norm is optimizer.clip_norm instead; there is no agc"),
    "clip_value": Synonym("optimizer.clip_value", "and optimizer.clip_norm = 0", same=True),
    "layer_decay": Synonym("optimizer.layer_decay", _NUMBERING, same=True),
    "llrd": Synonym("optimizer.layer_decay"),
    "head_lr": Synonym("optimizer.head_lr_multiplier", "rate of the head / rate of the rest"),
    # Loss
    "smoothing": Synonym("loss.label_smoothing"),
    "label_smoothing_factor": Synonym("loss.label_smoothing"),
    "label_smoothing": Synonym("loss.label_smoothing"),
    "bce_loss": Synonym("loss.name=sigmoid", _SIGMOID),
    "bce_sum": Synonym("loss.name=sigmoid"),
    "bce_target_thresh": Synonym(""),
    "bce_pos_weight": Synonym("", "loss.class_weights weighs classes"),
    "class_weights": Synonym("loss.class_weights"),
    "class_weight": Synonym("loss.class_weights"),
    "focal_loss": Synonym("", "loss.class_weights and data.sampling = 'balanced' help rare classes"),
    # Augmentation
    "mixup": Synonym("data.mixup_alpha"),
    "cutmix": Synonym("data.cutmix_alpha"),
    "mixup_prob": Synonym("data.mixup_probability"),
    "mixup_switch_prob": Synonym("data.cutmix_share"),
    "mixup_mode": Synonym("", "one share for each image, drawn by batch"),
    "mixup_off_epoch": Synonym("data.mixup_off_epoch"),
    "cutmix_minmax": Synonym(""),
    "aa": Synonym("data.auto_augment", _RAND, same=True),
    "auto_augment": Synonym("data.auto_augment", _PIXELS, same=True),
    "randaugment": Synonym("data.auto_augment=randaugment", "2 operations of magnitude 9; timm's is rand-m9"),
    "autoaugment": Synonym("data.auto_augment", "imagenet, cifar10 or svhn; timm's is original"),
    "trivial_augment": Synonym("data.auto_augment=trivial"),
    "augmix": Synonym(""),
    "threeaugment": Synonym("data.augment3=true", "DeiT III also jitters: data.color_jitter = [0.3]"),
    "aug_splits": Synonym(""),
    "crop_mode": Synonym("data.eval_method", "squash is 'square'; center is 'torchvision'"),
    "aug_repeats": Synonym("data.repeats"),
    "repeated_aug": Synonym("data.repeats=3"),
    "ra_sampler": Synonym("data.repeats=3"),
    "color_jitter": Synonym("data.color_jitter", "a list, [0.4]; timm ignores its own where --aa is given"),
    "hsv_s": Synonym("data.color_jitter", "[v, v, s, h] of hsv_v, hsv_s and hsv_h"),
    "hsv_v": Synonym("data.color_jitter", "[v, v, s, h] of hsv_v, hsv_s and hsv_h"),
    "hsv_h": Synonym("data.color_jitter", "[v, v, s, h] of hsv_v, hsv_s and hsv_h"),
    "color_jitter_prob": Synonym("", "every image is jittered"),
    "grayscale_prob": Synonym("", "data.augment3 has it"),
    "gaussian_blur_prob": Synonym("", "data.augment3 has it"),
    "reprob": Synonym("data.random_erasing"),
    "erasing": Synonym("data.random_erasing", "ultralytics': with data.erasing_mode = 'const'", same=True),
    "remode": Synonym("data.erasing_mode"),
    "recount": Synonym("data.erasing_count"),
    "scale": Synonym(
        "data.crop_scale", "[smallest, largest] share of the area, with data.crop = 'random_resized'"
    ),
    "ratio": Synonym("data.crop_ratio", "[narrowest, widest], with data.crop = 'random_resized'"),
    "train_crop_mode": Synonym("data.crop", "rrc is 'random_resized'"),
    "src": Synonym("data.crop=random, data.train_resize", "resized to a square, without padding"),
    "crop_padding": Synonym("data.crop=padded, data.train_resize", "image_size and twice the padding"),
    "no_aug": Synonym("data.crop=none, data.flip=false"),
    "hflip": Synonym("data.flip", "true or false: half of the images"),
    "fliplr": Synonym("data.flip", "true or false: half of the images"),
    "vflip": Synonym("data.vertical_flip", "true or false: half of the images"),
    "flipud": Synonym("data.vertical_flip", "true or false: half of the images"),
    "degrees": Synonym("", "RandAugment rotates: data.randaugment_layers"),
    "translate": Synonym("", "RandAugment moves images: data.randaugment_layers"),
    "interpolation": Synonym("data.resample", "'bicubic_antialias' or 'bilinear_antialias'"),
    "train_interpolation": Synonym("data.resample", "'bicubic_antialias' or 'bilinear_antialias'"),
    # Size and pre-processing
    "crop_pct": Synonym("data.eval_resize", f"size / crop_pct, rounded down; {_SIDES}"),
    "eval_crop_ratio": Synonym("data.eval_resize", f"size / ratio, rounded down; {_SIDES}"),
    "img_size": Synonym("data.image_size"),
    "image_size": Synonym("data.image_size"),
    "input_size": Synonym("data.image_size", "one side in pixels"),
    "imgsz": Synonym("data.image_size"),
    "resolution": Synonym("data.image_size"),
    "size": Synonym("data.image_size"),
    "mean": Synonym("weights.mean", "three numbers: [0.485, 0.456, 0.406]"),
    "std": Synonym("weights.std", "three numbers: [0.229, 0.224, 0.225]"),
    # Network
    "drop": Synonym("", _HEAD_DROPOUT),
    "drop_rate": Synonym("", _HEAD_DROPOUT),
    "dropout": Synonym("dropout", "in every block, as in the paper", same=True),
    "drop_path": Synonym("drop_path"),
    "drop_path_rate": Synonym("drop_path"),
    "stochastic_depth": Synonym("drop_path"),
    "arch": Synonym("model.name", "B/16 is vit_base_patch16"),
    "model_name": Synonym("model.name", "B/16 is vit_base_patch16"),
    "architecture": Synonym("model.name", "B/16 is vit_base_patch16"),
    "model_name_or_path": Synonym("--from", "a file, a folder, a run, or hf://OWNER/NAME"),
    "pretrained": Synonym("--from", "a file, a folder, a run, or hf://timm/NAME"),
    "initial_checkpoint": Synonym("--from"),
    "checkpoint": Synonym("--from"),
    "ckpt": Synonym("--from"),
    "init": Synonym("--from"),
    "init_from": Synonym("--from"),
    "model_path": Synonym("--from"),
    "weights_path": Synonym("--from"),
    "finetune": Synonym("--from"),
    "gp": Synonym("weights.classifier", "token, patches or token_patches"),
    "global_pool": Synonym("weights.classifier=patches", "MAE's has a new norm: finetune.fresh_norm = true"),
    "cls_token": Synonym("weights.classifier=token"),
    "head_init_scale": Synonym("finetune.head_std", "timm's 0.02 times it, with finetune.head = 'random'"),
    "fc_norm": Synonym("finetune.fresh_norm=true", "with weights.classifier = 'patches'"),
    "reuse_class_head": Synonym("finetune.head=as_stored"),
    "num_classes": Synonym("", _FROM_DATA),
    "nb_classes": Synonym("", _FROM_DATA),
    "in_chans": Synonym("", "images have three channels"),
    "freeze": Synonym("finetune.freeze", 'none, embedding, "N blocks" or backbone'),
    "backbone_freeze": Synonym("finetune.freeze=backbone"),
    "freeze_backbone": Synonym("finetune.freeze=backbone"),
    "peft": Synonym("lora.rank", "the rank of LoRA, such as 8"),
    "r": Synonym("lora.rank"),
    "lora_r": Synonym("lora.rank"),
    "lora_rank": Synonym("lora.rank"),
    "lora_alpha": Synonym("lora.alpha"),
    "lora_dropout": Synonym("lora.dropout"),
    "target_modules": Synonym("lora.targets", "of q, k, v, out, fc1 and fc2"),
    # Averages and distillation
    "model_ema": Synonym("averaging.decay", _EMA),
    "ema": Synonym("averaging.decay", _EMA),
    "model_ema_decay": Synonym("averaging.decay"),
    "ema_decay": Synonym("averaging.decay"),
    "model_ema_warmup": Synonym("averaging.debias=true", "near: it leaves the first weights out"),
    "kd_model_name": Synonym("distillation.teacher", "a file, a folder or a run"),
    "teacher_path": Synonym("distillation.teacher"),
    "distillation_type": Synonym("distillation.kind"),
    "distillation_alpha": Synonym("distillation.weight"),
    "distillation_tau": Synonym("distillation.temperature"),
    "kd_temperature": Synonym("distillation.temperature"),
    "task_loss_weight": Synonym("distillation.weight", "1 - it"),
    # Data
    "class_map": Synonym("data.classes", "the names in their order"),
    "data_dir": Synonym("--data"),
    "data_path": Synonym("--data"),
    "dataset_path": Synonym("--data"),
    "data_root": Synonym("--data"),
    "train_dir": Synonym("--data", "the folder above train/ and validation/"),
    "validation_dir": Synonym("data.eval_split", "a folder beside train/: data.eval_split = 'validation'"),
    "dataset_name": Synonym("data.dataset", "or --data hf://datasets/OWNER/NAME"),
    "data_set": Synonym("data.dataset"),
    "val_split": Synonym("data.eval_split"),
    "train_split": Synonym("data.train_split"),
    "train_val_split": Synonym(
        "data.train_split, data.eval_split",
        "0.15: train with [:85% of each class] and with [85%: of each class]",
    ),
    "max_train_samples": Synonym("data.subset_images"),
    "fraction": Synonym("data.subset_fraction"),
    # Scores, checkpoints, logs
    "eval_metric": Synonym("evaluation.metric", "accuracy (top-1), mean_per_class, f1 or loss"),
    "metric_for_best_model": Synonym(
        "evaluation.metric", "loss is eval_loss; accuracy, mean_per_class or f1"
    ),
    "load_best_model_at_end": Synonym(
        "evaluation.select_best=true, checkpoint.keep_best=1",
        "and one number for evaluation.every_steps and checkpoint.every_steps",
    ),
    "patience": Synonym("evaluation.patience", "scores, not epochs; data.patience waits for a store"),
    **dict.fromkeys(
        ("early_stopping", "early_stopping_patience", "earlystoppingcallback"),
        Synonym("evaluation.patience", "scores without a better one; needs evaluation.select_best"),
    ),
    "eval_strategy": Synonym("evaluation.every_steps", "steps; 0: only at the end"),
    "save_strategy": Synonym("checkpoint.every_steps", "steps"),
    "eval_steps": Synonym("evaluation.every_steps"),
    "val_interval": Synonym("evaluation.every_steps", _OF_STEPS),
    "save_steps": Synonym("checkpoint.every_steps"),
    "save_period": Synonym("checkpoint.every_steps", _OF_STEPS),
    "recovery_interval": Synonym("checkpoint.every_steps"),
    "save_total_limit": Synonym("checkpoint.keep_last"),
    "checkpoint_hist": Synonym("checkpoint.keep_best"),
    "profiler": Synonym("--profile", "steps: 20, or 20-24"),
    "logging_steps": Synonym("log.every_steps"),
    "log_interval": Synonym("log.every_steps"),
    "print_freq": Synonym("log.every_steps"),
    "log_wandb": Synonym('log.trackers=["wandb"]'),
    "report_to": Synonym("log.trackers", 'a list: ["wandb"], ["tensorboard"]'),
    "tta": Synonym("evaluation.flip_average=true", "the image and its mirror image"),
    "output_dir": Synonym("--out"),
    "output": Synonym("--out"),
    "out_dir": Synonym("--out"),
    "save_dir": Synonym("--out"),
    "log_dir": Synonym("--out"),
    "logdir": Synonym("--out"),
    "workdir": Synonym("--out"),
    "run_dir": Synonym("--out"),
    "project": Synonym("--out"),
    "experiment": Synonym("--out"),
    "resume": Synonym("vitctl resume RUN"),
    "resume_from_checkpoint": Synonym("vitctl resume RUN"),
    "config": Synonym("--recipe", "a recipe's name or TOML file"),
    "cfg": Synonym("--recipe", "a recipe's name or TOML file"),
    "config_file": Synonym("--recipe", "a recipe's name or TOML file"),
    # Machine
    "seed": Synonym("seed"),
    "random_seed": Synonym("seed"),
    "manual_seed": Synonym("seed"),
    "data_seed": Synonym("seed", "one seed decides everything"),
    "workers": Synonym("machine.workers"),
    "num_workers": Synonym("machine.workers"),
    "dataloader_num_workers": Synonym("machine.workers"),
    "jobs": Synonym("--workers"),
    "num_proc": Synonym("--workers"),
    "device": Synonym("machine.device", "'cpu' or 'cuda'; --device is of --dry-run"),
    "num_processes": Synonym("machine.processes"),
    "nproc_per_node": Synonym("machine.processes"),
    "nproc": Synonym("machine.processes"),
    "num_gpus": Synonym("machine.processes"),
    "gpus": Synonym("machine.processes"),
    "world_size": Synonym("machine.processes"),
    "nnodes": Synonym("--nodes"),
    "num_nodes": Synonym("--nodes"),
    "num_machines": Synonym("--nodes"),
    "max_restarts": Synonym("--restarts"),
    "amp": Synonym("machine.precision=bf16"),
    "amp_dtype": Synonym("machine.precision", "bf16; there is no float16"),
    "mixed_precision": Synonym("machine.precision", "bf16; there is no float16"),
    "dtype": Synonym("machine.precision", "bf16, float32, tf32 or float64"),
    "bf16": Synonym("machine.precision=bf16"),
    "fp16": Synonym("", "bf16 has the range of float32: machine.precision"),
    "tf32": Synonym("machine.precision=tf32"),
    "torchcompile": Synonym("machine.compile=true"),
    "torch_compile": Synonym("machine.compile=true"),
    "gradient_checkpointing": Synonym("machine.checkpoint_blocks=1"),
    "grad_checkpointing": Synonym("machine.checkpoint_blocks=1"),
    "channels_last": Synonym("", "a ViT has one convolution"),
    "sync_bn": Synonym("", "a ViT has no batch norm"),
    "fsdp": Synonym("machine.sharding=fsdp"),
    "dist_eval": Synonym("", "it always is, and counts each image once"),
    "full_determinism": Synonym("machine.deterministic=true", "the default"),
    "use_deterministic_algorithms": Synonym("machine.deterministic=true", "the default"),
    "compile_mode": Synonym("machine.compile", "true, max-autotune or reduce-overhead"),
    "torchcompile_mode": Synonym("machine.compile", "true, max-autotune or reduce-overhead"),
    "worker_seeding": Synonym("", "each image has its own random numbers"),
    # vitctl's own commands and keys
    "lora": Synonym("lora.rank"),
    "no_sweep": Synonym("sweep.lrs=[]"),
    "topk": Synonym("--top"),
    "top_k": Synonym("--top"),
    "k": Synonym("--top"),
    "num_shots": Synonym("fewshot.shots"),
    "k_shot": Synonym("fewshot.shots"),
}


def synonym(word: str) -> Synonym | None:
    """Return the counterpart of another program's option, with any dashes and capitals."""
    return SYNONYMS.get(word.lstrip("-").replace("-", "_").lower())
