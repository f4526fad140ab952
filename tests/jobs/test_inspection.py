"""Short names of weights, and of the folders for their pictures."""

from vitctl.jobs.inspection import folder_name, short_names


def test_names__of_runs_and_files() -> None:
    step = "checkpoints/step_00000020/model.safetensors"
    assert short_names(
        [f"runs/a/{step}", "x/ViT-B_16.npz", "exports/timm/model.safetensors", "hf://org/name"]
    ) == [
        "a, step 20",
        "ViT-B_16",
        "timm",
        "name",
    ]
    assert short_names(["a/B.npz", "b/B.npz", "b/C.npz"]) == ["1: B", "2: B", "C"]
    assert short_names(["a/x y", "b/x_y"]) == ["1: x y", "2: x_y"]  # their folders would be one


def test_folder_name__is_one_part_of_a_path() -> None:
    assert folder_name("a, step 20") == "a__step_20"
    assert folder_name("../x/y") == "x_y"
    assert folder_name("..") == "weights"
