"""`vitctl pretrain`, `finetune`, `resume` as typed."""

import json
import math
import re
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.cli.conftest import Vitctl, words
from tests.conftest import TINY
from tests.data.conftest import CLASSES, make_items
from tests.data.server import Faults, serving
from tests.matrix import slow
from vitctl.cli.show.console import CONSOLE
from vitctl.data.writer.shard_writer import write_split
from vitctl.jobs import plan, resources
from vitctl.launch.worker import work
from vitctl.models.roofline import Step, estimate
from vitctl.models.variants import variant
from vitctl.recipe import load

SHORT = ("--set", "schedule.total_steps=6")
FOLDER = "runs/[b16] " + "x" * 200  # is neither markup nor broken into lines


def test_pretrain__plain_lines_a_result_and_again(vitctl: Vitctl, tiny_data: Path, tmp_path: Path) -> None:
    line = (
        *f"pretrain --recipe {TINY} --data {tiny_data} --out".split(),
        FOLDER,
        *SHORT,
        *["--set", "log.every_steps=3"],
    )
    said = vitctl(*line)
    assert (said.code, said.err) == (0, "")
    lines = said.out.splitlines()
    roles = "trained on 'train' (70 images), nothing chosen, scored on 'test' (23 images)"
    first = f"pretrain: Ti/4, {tiny_data}, CPU, float64"  # model, data, device and precision
    assert lines[:3] == [first, "checking data and weights ...", roles]
    assert lines[3:5] == [f"run folder: {FOLDER}", "reading weights and data ..."]
    assert [text.split()[1] for text in lines if text.startswith("step") and "loss" in text] == ["3/6", "6/6"]
    for word in ("lr ", "loss ", "images/s", "data-wait ", "left "):
        assert word in lines[5]
    assert any(text.startswith("accuracy ") and "of 23 images" in text for text in lines)
    assert lines[-3] == f"result: {FOLDER}/result.json"
    assert lines[-1] == f"next: vitctl finetune --data PHOTOS --from {shlex.quote(FOLDER)}"
    assert "\x1b" not in said.out
    again = vitctl(*line)
    assert again.code == 0
    assert "resuming from step 6 of 6" in again.out
    assert [text for text in again.out.splitlines() if text.startswith("accuracy")] == [
        text for text in lines if text.startswith("accuracy")
    ]
    assert json.loads((tmp_path / FOLDER / "result.json").read_text())["metrics"]["total"] == 23


def test_recipe__is_read_and_checked_once(
    vitctl: Vitctl, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a process that types it.

    One that others start reads what was written for it; one that goes on compares the two.
    """
    read: list[str] = []
    read_toml = load.read_toml

    def counted(path: Path, **named: Any) -> Any:
        read.append(path.name)
        return read_toml(path, **named)

    monkeypatch.setattr(load, "read_toml", counted)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "photos").symlink_to(tiny_data / "train")
    for data in (tiny_data, tmp_path / "own"):  # the second has other splits than the recipe names
        assert (
            vitctl(
                "pretrain", "--recipe", TINY, "--data", data, "--out", "runs" / Path(data.name), *SHORT
            ).code
            == 0
        )
        assert read == ["tiny.toml"]
        read.clear()
        work("runs" / Path(data.name))
        assert read == ["recipe.toml"]
        read.clear()
    assert vitctl("resume", "runs/own").code == 0
    assert read == ["recipe.toml"] * 2


def test_pretrain__flags_are_overrides_and_set_does_not_contradict_them(
    vitctl: Vitctl, tiny_data: Path, tmp_path: Path
) -> None:
    line = f"pretrain -r {TINY} --data {tiny_data} -o run --seed 4 -s log.every_steps=2".split()
    said = vitctl(*line, "-s", "seed=3")
    assert (said.code, "--seed sets seed = 4, and --set seed = 3; leave one" in said.err) == (2, True)
    assert vitctl(*line, "-s", "seed=4", *SHORT).code == 0
    text = (tmp_path / "run" / "recipe.toml").read_text()
    assert "seed = 4                                  # --seed" in text
    assert "every_steps = 2                           # --set" in text
    assert f'path = "{tiny_data}"' in text
    assert "# --data" in text


@pytest.mark.slow
def test_resume__the_start_records_name_the_kernels(vitctl: Vitctl, tiny_data: Path) -> None:
    three = ("--steps", 3, "--set", "machine.precision=bf16")
    assert vitctl("pretrain", "--recipe", TINY, "--data", tiny_data, *three, "--out", "a").code == 0
    four = words("--set schedule.total_steps=4 --allow schedule.total_steps --set machine.attention=fused")
    said = vitctl("resume", "a", *four)
    assert said.code == 0
    assert "computed with attention math, here fused" in said.out + said.err
    records = [json.loads(one) for one in Path("a/steps.jsonl").read_text().splitlines()]
    starts = [one["attention"] for one in records if one.get("kind") == "start"]
    assert starts == ["math", "fused"]


def test_dry_run__the_plan_is_one_screen_and_the_rest_is_asked_for(
    vitctl: Vitctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CONSOLE, "width", 80)
    line = ("pretrain", "--recipe", "jft_h14", "--dry-run", "--seed", 7)
    out = vitctl(*line, "--device", "H100").out
    assert len(out.splitlines()) <= 24 and max(map(len, out.splitlines())) <= 80
    for text in (
        "655,835,251 parameters",
        "257 tokens",
        "16x16 patches of 14 pixels",
        "1,035,644 of 4,096 images",
        "303,000,000 images",
        "4,158 exaFLOPs (4,259 exaFLOPs with all tokens in the",
        "85.5 days on 1 H100 at 57%",
        "does not fit 79.1 GiB (10% kept free)",
        "--processes 32 (56.6 GiB)",
        "TiB per process",
        "0.0003 at step 10,000, then linear to ",
    ):
        assert text in " ".join(out.split())
    assert "launch" in out and "accelerate" not in out and "# --seed" not in out
    assert len(vitctl(*line).out.splitlines()) <= 24
    whole = vitctl(*line, "--all").out
    assert "seed = 7                                  # --seed" in whole
    assert whole.count("# default") > 30
    assert "weight_decay = 0.1                        # jft_b16.toml:" in whole and "3.000e-04" in whole
    assert list(tmp_path.iterdir()) == []
    assert vitctl("pretrain", "--recipe", "jft_h14", "--all").err == (
        "vitctl: --all needs --dry-run: it is about the plan\n"
    )


def test_dry_run__names_the_images_that_the_loader_must_make(vitctl: Vitctl) -> None:
    """All images of the run in its time."""
    line = words("pretrain --recipe jft_h14 --dry-run --all --device H100 -n 64 --nodes 8@a:29400 --out x")
    out = " ".join(vitctl(*line).out.split())
    found = re.search(r"loader must make ([\d,]+) images/s on each machine \(([\d,]+) a process\)", out)
    assert found is not None
    node, process = (int(number.replace(",", "")) for number in found.groups())
    assert node == pytest.approx(8 * process, abs=4)
    assert f"about {math.ceil(node / 700)} core" in out
    recipe: Any = load.load_recipe("jft_h14", [("machine.processes", 64)]).recipe
    planned = plan.plan_training(recipe, nodes=8)
    assert node == round(planned.steps * 4096 / planned.run_seconds / 8)
    plan_of = "pretrain --recipe jft_h14 --dry-run --all"
    for without in ("--synthetic", "--device H100 --set machine.precision=tf32"):  # the last has no estimate
        assert "loader" not in vitctl(*words(f"{plan_of} {without}")).out.split()


def test_dry_run__of_a_gpu_that_is_named(vitctl: Vitctl) -> None:
    line = ("pretrain", "--recipe", "in1k_b16", "--dry-run", "--set", "machine.processes=8")
    said = vitctl(*line, "--device", "a100", "--set", "machine.micro_batch=256")
    assert (said.code, said.err) == (0, "")
    assert "fits 79.1 GiB" in said.out and "H100" not in said.out
    network = variant("B/16", num_classes=1000, representation_size=768, dropout=0.1)
    rate = estimate(network, "A100", Step(512, passes=2, compiled=True))
    assert f"A100 {rate.images_per_second:,.0f} ({rate.mfu:.0%}) images/s of one GPU" in said.out
    assert "20.1 GiB per process: fits 79.1 GiB" in said.out and "largest batch" in said.out
    hours = 93_835 * 4096 / 8 / rate.images_per_second / 3600
    words = " ".join(said.out.split())
    assert f"last block): {hours:.1f} hours on 8 A100 at {rate.mfu:.0%} of the bf16 peak" in words

    small = ("pretrain", "--recipe", "cifar10_vit", "--dry-run", "--device", "H100", "--set")
    for compiles, times in (
        ("false", "not compiled, this estimate is 4.4"),
        ("true", "compiled, this estimate is 1.6"),
    ):
        words = " ".join(vitctl(*small, f"machine.compile={compiles}").out.split())
        assert "the host starts kernels slower than the GPU computes them" in words and times in words
        assert ("--set machine.compile=true raises " in words) is (compiles == "false")

    frozen = vitctl(*line, "--device", "L4", "--set", "machine.precision=float32").out
    assert "no estimate: machine.precision is 'float32'" in frozen
    assert vitctl(*line, "--device", "TPU").err.startswith("vitctl: no GPU is known as 'TPU'")
    assert vitctl("pretrain", "--recipe", "smoke", "--device", "H100").code == 2


def test_dry_run__of_this_cpu_has_no_hours_of_a_gpu(vitctl: Vitctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "product_flops", lambda _: 1e15)
    line = ("pretrain", "--recipe", "in1k_b16", "--dry-run")
    said = vitctl(*line, "--all")
    words = " ".join(said.out.partition("note:")[0].split())
    assert said.code == 0 and "exaFLOPs" in words and "GiB for process 0" in words
    recipe: Any = load.load_recipe("in1k_b16").recipe
    seconds = plan.plan_training(recipe).computed_flops / 1e15 / resources.CPU_SHARE
    assert f"about {seconds / 86_400:.1f} days on this CPU" in words
    assert [word for word in ("H100", "A100", "images/s") if word in words] == []
    assert "days on 1 A100" in vitctl(*line, "--device", "a100").out
    scored = ("fewshot", "--from", "hf://nobody/nothing", "--dataset", "pets", "--model", "B/16", "--dry-run")
    assert "on this CPU" in vitctl(*scored).out
    assert "H100" in vitctl(*scored, "--set", "machine.device=cuda").out


@pytest.mark.parametrize(
    ("flag", "words", "advice"),
    [
        ("--slurm", "nodes=1,gpus=8,time=1:00:00", "--slurm nodes=4"),  # 32 processes
        (
            "--k8s",
            "nodes=1,gpus=5,image=i,claim=runs:/runs",
            "--k8s nodes=5",
        ),  # 25: no multiple of five divides the batch
        ("--processes", "8", "--processes 32"),
    ],
)
def test_dry_run__the_advice_is_taken(vitctl: Vitctl, flag: str, words: str, advice: str) -> None:
    line = ("pretrain", "--recipe", "jft_h14", "--dry-run", "--out", "/runs/x", flag)
    line = line if "=" in words else ("pretrain", "--device", "H100", *line[1:])
    said = vitctl(*line, words)
    assert said.code == 0 and "does not fit 79.1 GiB (10% kept free)" in said.out
    assert f"{advice} (" in said.out
    _, number = advice.replace("=", " ").rsplit(maxsplit=1)
    better = vitctl(*line, words.replace("nodes=1", f"nodes={number}") if "=" in words else number)
    assert better.code == 0 and "fits 79.1 GiB" in better.out and "not fit" not in better.out


@pytest.fixture
def deaf_server() -> Iterator[str]:
    """The address of one that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/set"


def test_dry_run__an_address_without_an_answer_is_not_waited_for(
    vitctl: Vitctl, deaf_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ("pretrain", "--recipe", TINY, "--data", deaf_server, "--dry-run")
    monkeypatch.setattr(plan, "LOOKUP_SECONDS", 0.3)
    said = vitctl(*line)
    assert said.code == 0
    note = f"note: {deaf_server} could not be looked up: no answer within 0.3 s; 1,000 classes are assumed"
    assert note in said.out
    assert "20 of 16 images" in said.out
    said = vitctl(*line, "--epochs", 2)
    assert said.code == 2
    assert said.err.startswith(
        f"vitctl: {deaf_server}: could not be looked up: no answer within 0.3 s; the plan needs the number "
        f"of images"
    )
    named = vitctl(*line, "--epochs", 2, "--set", "data.dataset=digits").err
    assert named.endswith("; leave --data out, to plan for digits\n")
    assert vitctl(*line[:3], "--epochs", 2, "--set", "data.dataset=digits", "--dry-run").code == 0


def test_dry_run__of_remote_shards_without_a_test_split_reads_no_shard(
    vitctl: Vitctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names, which decide what is held out, are in the shards; the number of images is not."""
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))
    write_split(make_items(20), tmp_path / "set/train", CLASSES, seed=0, source_text="noise")
    faults = Faults()
    with serving(tmp_path / "set", faults) as url:
        said = vitctl("pretrain", "--recipe", TINY, "--data", url, "--epochs", 2, "--dry-run")
    assert (said.code, said.err) == (0, "")
    assert "17 images, 3 classes" in said.out
    assert {path.rpartition("/")[2] for path, _ in faults.asked} >= {"index.json", "samples.npy"}
    assert not any(path.endswith(".tar") for path, _ in faults.asked)


@pytest.mark.slow
def test_dry_run__weights_far_away_are_not_fetched(
    vitctl: Vitctl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))
    asked: list[object] = []
    find = socket.getaddrinfo

    def ask(host: str, *given: Any, **named: Any) -> Any:
        if host != "127.0.0.1":  # that of the test before, whose call is left behind
            asked.append(host)
        return find(host, *given, **named)

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    for source in ("https://192.0.2.1/weights.safetensors", "hf://nobody/nothing"):
        line = ("finetune", "--dataset", "pets", "--from", source, "--dry-run")
        said = vitctl(*line)
        assert said.code == 2 and said.out.startswith("recipe finetune, the paper's: nothing tells")
        [line_of_error] = [one for one in said.err.splitlines() if "127.0.0.1" not in one]
        assert line_of_error == (
            f"vitctl: {source}: not downloaded yet, and --dry-run downloads nothing; name their model, "
            "too, e.g. --model B/16"
        )
        said = vitctl(*line, "--model", "B/16")
        assert said.code == 0
        assert f"note: weights from {source}, not downloaded yet: assumed to be a B/16" in said.out
    assert asked == []
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    for command, name in (("vtab", "ViT-L_16"), ("probe", "B_32-i21k"), ("vtab", "R50+ViT-B_16")):
        model = name.removesuffix("-i21k").replace("ViT-", "").replace("_", "/")
        said = vitctl(command, "--from", f"gs://vit_models/{name}.npz", "--dry-run")
        assert said.code == 2 and said.err.endswith(
            f"--dry-run downloads nothing; name their model, too, e.g. --model {model}\n"
        )
        assert "no such option" not in vitctl(command, "--from", "nowhere", "--model", model).err


@pytest.mark.parametrize("ask", [["--dry-run"], []])
def test_pretrain__one_process_is_not_sharded(
    vitctl: Vitctl, tiny_data: Path, tmp_path: Path, ask: list[str]
) -> None:
    """The plan refuses it like the run, and a resume leaves the run as it was."""
    line = ("pretrain", "--recipe", TINY, "--data", tiny_data, "--out", tmp_path / "run", "--steps", 2)
    if not ask:
        assert vitctl(*line).code == 0
    before = sorted((path, path.read_bytes()) for path in tmp_path.rglob("*") if path.is_file())
    said = vitctl(*line, *ask, "--set", "machine.sharding=fsdp")
    assert said.code == 2
    assert "there is one; give --processes" in said.err
    assert sorted((path, path.read_bytes()) for path in tmp_path.rglob("*") if path.is_file()) == before


def test_pretrain__synthetic_needs_no_data(vitctl: Vitctl) -> None:
    small = ("model.depth=1", "model.hidden_size=12", "model.mlp_size=12", "model.num_heads=3",
             "data.image_size=32",
             "schedule.total_epochs=0", "schedule.total_steps=2", "schedule.warmup_steps=1",
             "schedule.batch_size=4",
             "machine.workers=0", "machine.device=cpu", "model.pre_logits=false")  # fmt: skip
    sets = [part for text in small for part in ("--set", text)]
    said = vitctl("pretrain", "--recipe", "jft_b16", "--synthetic", "--out", "run", *sets)
    assert (said.code, said.err) == (0, "")
    assert "step 2/2" in said.out
    assert "accuracy" not in said.out


@pytest.mark.parametrize(
    ("line", "steps"),
    [
        ("fewshot --shots 5", ["vitctl fewshot --shots 5 --from gs://vit_models/imagenet21k/ViT-B_16.npz"]),
        (
            "fewshot --dataset imagenet,pets",
            [
                "vitctl data shards IMAGENET_FOLDER data/imagenet",
                "vitctl data prepare pets --root data",
                "vitctl fewshot --dataset imagenet,pets --from gs://vit_models/imagenet21k/ViT-B_16.npz",
            ],
        ),
        (
            "evaluate --dataset cifar10",
            [
                "vitctl data prepare cifar10 --root data",
                "vitctl finetune --dataset cifar10 --from gs://vit_models/imagenet21k/ViT-B_16.npz",
                "vitctl evaluate --dataset cifar10",
            ],
        ),
        (
            "vtab",
            [
                "vitctl data prepare NAME --root data",
                "vitctl vtab --from gs://vit_models/imagenet21k/ViT-B_16.npz",
            ],
        ),
        (
            "export --to onnx",
            ["vitctl export --to onnx --from gs://vit_models/imagenet21k+imagenet2012/ViT-B_16.npz"],
        ),
    ],
)
def test_as_typed__with_nothing_there_one_line_names_what_to_type(
    vitctl: Vitctl, line: str, steps: list[str]
) -> None:
    said = vitctl(*line.split())
    assert said.code == 2
    assert "recipe smoke" not in said.err and said.err.count("\n") == 1
    lines = said.err.rstrip().partition(" Type next: ")[2].split(", then ")
    assert sorted(lines[:-1]) == sorted(f"`{step}`" for step in steps[:-1])
    assert lines[-1] == f"`{steps[-1]}`"


@pytest.mark.parametrize(
    ("dataset", "recipe"), [("oxford_iiit_pet", "finetune_pets"), *slow(("digits", "finetune"))]
)
def test_finetune__takes_the_recipe_of_the_data_set(
    vitctl: Vitctl, pretrained: Path, dataset: str, recipe: str
) -> None:
    said = vitctl("finetune", "--dataset", dataset, "--from", pretrained, "--dry-run", "--all")
    assert said.code == 0
    assert f"# {recipe}, resolved" in said.out


@pytest.mark.parametrize(
    ("line", "texts"),
    [
        (
            ("evaluate", "--dataset", "shapes-shape"),
            ["test", "1,000 images", "note: images from shapes-shape, published"],
        ),
        (
            ("fewshot", "--dataset", "pets", "--shots", "1,5"),
            ["pets train", "3,680 images", "pets test", "3,669 images", "1, 5 of each class", "185 images"],
        ),
        (("vtab", "--suite", "mini", "--task", "digits"), ["digits", "360 images", "1, 60 steps in all"]),
    ],
)
def test_dry_run__of_jobs_that_score(
    vitctl: Vitctl, pretrained: Path, tmp_path: Path, line: tuple[str, ...], texts: list[str]
) -> None:
    said = vitctl(*line, "--from", pretrained, "--dry-run", "--all")
    assert (said.code, said.err) == (0, "")
    for text in (
        *texts,
        "step_00000020/model.safetensors",
        "parameters",
        "FLOPs: ",
        "vitctl.launch.worker",
    ):
        assert text in said.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            ("evaluate", "--data", "photos"),
            "its head has 6 classes (circle, square, triangle ...), the data has 2",
        ),
        (("evaluate", "--dataset", "pets"), "its head has 6 classes"),
        (
            ("fewshot", "--data", "photos", "--shots", 9),
            "class 'cat' has 3 training images, 9 are needed; use fewer --shots",
        ),
        (
            ("probe", "--data", "photos"),
            "photos: 13 training images, but 200 neighbours; use fewer: --set probe.k=10",
        ),
        (("vtab", "--task", "pet"), "vtab.tasks: pet not in suite 'vtab'; did you mean pets?"),
        (("vtab", "--suite", "mimi"), "should be 'vtab' or 'mini'; did you mean mini?"),
    ],
)
def test_dry_run__refuses_what_the_run_refuses_and_neither_leaves_a_folder(
    vitctl: Vitctl, pretrained: Path, tmp_path: Path, line: tuple[str, ...], said: str
) -> None:
    for name, number in (("cat", 4), ("dog", 12)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for n in range(number):
            Image.new("RGB", (8, 8), (n, 0, 9)).save(tmp_path / "photos" / name / f"{n}.png")
    plan = vitctl(*line, "--from", pretrained, "--dry-run")
    assert plan.code == 2 and said in plan.err
    if "pets" not in line:  # its images are not here
        run = vitctl(*line, "--from", pretrained, "--out", "runs/a")
        assert run.code == 2 and said in run.err
        assert not (tmp_path / "runs").exists()  # nor the shards of photographs


def test_finetune__without_its_weights_no_shards_are_written(vitctl: Vitctl, tmp_path: Path) -> None:
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "photos" / "cat" / "1.png")
    for source in ((), ("--from", "nowhere.safetensors")):
        assert vitctl("finetune", "--data", "photos", *source).code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_resume__goes_on_with_a_recipe_changed_on_purpose(
    vitctl: Vitctl, tiny_data: Path, tmp_path: Path
) -> None:
    assert vitctl("pretrain", "--recipe", TINY, "--data", tiny_data, "--out", "run", *SHORT).code == 0
    longer = ("resume", "run", "--set", "schedule.total_steps=9")
    said = vitctl(*longer)
    assert said.code == 2
    assert said.err.endswith("--set schedule.total_steps=9 --allow schedule.total_steps\n")
    said = vitctl(*longer, "--allow", "schedule.total_steps")
    assert (said.code, said.err) == (0, "")
    assert "step 9/9" in said.out
    assert (tmp_path / "run" / "checkpoints" / "step_00000009").is_dir()
    assert "schedule.total_steps was " in (tmp_path / "run" / "log.jsonl").read_text()


@pytest.mark.parametrize("flag", ["--slurm", *slow("--k8s")])
def test_batch__the_launch_line_submits_the_job(
    vitctl: Vitctl, tiny_data: Path, tmp_path: Path, flag: str
) -> None:
    """It named one machine, on which all processes of the job would have started."""
    words = {"--slurm": "nodes=2,tasks=2,time=10", "--k8s": f"nodes=2,tasks=2,image=a,claim=b:{tmp_path}"}
    line = ("pretrain", "--recipe", TINY, "--data", tiny_data, "--out", "run", flag, words[flag])
    planned = vitctl(*line, "--dry-run", "--all")
    assert planned.code == 0 and not (tmp_path / "run").exists()
    said = vitctl(*line)
    assert said.code == 0, said
    launched = (tmp_path / "run" / "launch.txt").read_text()
    assert launched.strip() == said.out.replace("\n", "").partition("submit it with: ")[2]
    assert launched in planned.out
    assert "processes = 4" in (tmp_path / "run" / "recipe.toml").read_text()
    assert not (tmp_path / "run" / "log.jsonl").exists()


@pytest.mark.parametrize(
    ("claim", "memory", "text"),
    [("/elsewhere", "1Gi", "not on the claim b"), ("", "1", "'memory=1' is not a valid memory")],
)
def test_k8s__what_is_refused_is_refused_before_anything_is_written(
    vitctl: Vitctl, tiny_data: Path, tmp_path: Path, claim: str, memory: str, text: str
) -> None:
    words = f"image=a,claim=b:{claim or tmp_path},memory={memory}"
    line = ("pretrain", "--recipe", TINY, "--data", tiny_data, "--out", "run", "--k8s", words)
    for more in ((), ("--dry-run",)):
        said = vitctl(*line, *more)
        assert (said.code, said.err.count("\n")) == (2, 1) and text in said.err
    assert not (tmp_path / "run").exists()


def test_slurm__a_job_with_gpus_does_not_compute_on_the_cpu(
    vitctl: Vitctl, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where the job was written for GPUs, nor where the batch system gave some."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    line = ("pretrain", "--recipe", TINY, "--data", tiny_data, "--set", "machine.workers=0", "--out")
    assert vitctl(*line, "job", "--slurm", "nodes=1,gpus=1,time=10").code == 0
    assert 'device = "cuda"' in (tmp_path / "job" / "recipe.toml").read_text()
    said = vitctl("resume", "job")
    assert (said.code, said.err.count("\n")) == (2, 1) and "PyTorch finds no GPU" in said.err
    on_cpu = vitctl(*line, "cpu", "--slurm", "gpus=2,time=10", "--set", "machine.device=cpu")
    assert (on_cpu.code, "--set machine.device=cpu, --slurm asks for 2 GPUs" in on_cpu.err) == (2, True)
    assert not (tmp_path / "cpu").exists()
    for name, value, code in (("CUDA_VISIBLE_DEVICES", "0,1", 2), ("SLURM_JOB_GPUS", "3", 2), ("", "", 0)):
        with monkeypatch.context() as patch:
            if name:
                patch.setenv(name, value)
            sets = ("machine.device=auto", "schedule.total_steps=1", "schedule.warmup_steps=0")
            said = vitctl(*line, f"run{code}", *(word for each in sets for word in ("--set", each)))
            assert (said.code, f"{name}={value} gives this process GPUs" in said.err) == (code, code == 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--nodes", "2@gpu01"), "--nodes 2@gpu01: give all machines the same run folder with --out"),
        (
            ("--nodes", "2", "--out", "run"),
            "--nodes 2: should be the number of machines and, if there are several, the address and port",
        ),
        (
            ("--nodes", "2@gpu01", "--out", "run"),
            "--nodes 2: 1 process cannot be spread evenly over the machines",
        ),
        (
            ("-n", "4", "--slurm", "nodes=1,tasks=2,time=10"),
            "--processes says 4 processes, --slurm starts 2",
        ),
        (("--steps", "0"), "vitctl: --steps 0: should be above 0"),
        (("--epochs", "-1"), "vitctl: --epochs -1: should be above 0"),
        (
            ("--restarts", "2", "--slurm", "time=10"),
            "--nodes and --restarts start processes, and so does --slurm",
        ),
    ],
)
def test_nodes__what_is_wrong_is_one_line_and_starts_nothing(
    vitctl: Vitctl, tiny_data: Path, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    done = vitctl("pretrain", "--recipe", TINY, "--data", tiny_data, *words)
    assert (done.code, done.err.count("\n")) == (2, 1), done
    assert said in done.err
    assert not (tmp_path / "run").exists()


def test_pretrain__most_of_whose_updates_were_skipped_is_not_done(
    vitctl: Vitctl, tiny_data: Path, tmp_path: Path
) -> None:
    """A rate that blows the weights up: what comes out is not the training that was asked for, and scripts
    must hear it.
    """
    values = (
        "optimizer.lr=1e38",
        "optimizer.name=sgd",
        "schedule.warmup_steps=0",
        "schedule.total_steps=6",
        "machine.workers=0",
    )
    sets = [word for value in values for word in ("--set", value)]
    said = vitctl(
        "pretrain", "-r", TINY, "--data", tiny_data, "--out", "run", "--set", "optimizer.clip_norm=0", *sets
    )
    assert said.code == 2
    assert "updates were not finite and were skipped" in said.err and said.err.count("\n") == 1
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "failed"


def test_missing_data__only_pretraining_is_told_what_needs_none(vitctl: Vitctl) -> None:
    assert vitctl(*words("pretrain --recipe jft_h14")).err.endswith(
        "--dry-run and --synthetic need no data\n"
    )
    assert "--synthetic" not in vitctl(*words("finetune --dataset pets --from x.npz")).err
