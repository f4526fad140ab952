"""The doctor looks, and changes nothing."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vitctl.engine.computation import attention_kernel
from vitctl.engine.runtime import Computation
from vitctl.launch import doctor
from vitctl.launch.doctor import Finding, run_checks
from vitctl.models.variants import variant
from vitctl.recipe.schema import NetworkMachine


def test_examine__looks_at_everything_a_run_stands_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    findings = {finding.what: finding for finding in run_checks()}
    assert {
        "python",
        "torch",
        "torchvision",
        "accelerate",
        "onnxruntime",
        "cpu",
        "precision",
        "data",
        "disk",
    } <= set(findings)
    assert findings["torch"].ok
    assert "digits" in findings["data"].said
    assert list(tmp_path.iterdir()) == []


def test_examine__says_the_first_results_before_it_imports_torch() -> None:
    code = (
        "import sys; from vitctl.launch.doctor import run_checks; found = run_checks(); "
        "said = [next(found).what for _ in range(5)]; print(*said, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["python", "extras", "data", "disk", "folder", "False"]


def test_examine__names_the_extras_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    requires = ["torch>=2.11", "pip; extra == 'gs'", "no-such>=1,<2; extra == 'gs'", "none; extra == 'gs'"]
    requires += ["neither>=1; extra == 's3'", "nor; extra == 'test'", 'nothing; extra == "docs"']
    monkeypatch.setattr("importlib.metadata.requires", lambda _: requires)
    (extras,) = (finding for finding in run_checks() if finding.what == "extras")
    assert extras.ok and "gs (no-such, none); s3 (neither)" in extras.said
    assert not any(name in extras.said for name in ("torch", "pip,", "nor;", "nothing"))


def test_examine__tells_what_speed_depends_on() -> None:
    """The kernels are those that a training takes."""
    findings = {finding.what: finding.said for finding in run_checks()}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    used = attention_kernel(
        NetworkMachine(), variant("B/16"), Computation(device, findings["precision"].split()[-2])
    )
    assert f"takes {used} " in findings["kernels"]
    flags = Path("/proc/cpuinfo").read_text()
    for name in ("avx2", "avx512f", "amx_bf16"):
        assert (name in findings["instructions"].split()) == (name in flags.split())


def test_examine__a_package_that_cannot_be_imported_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    (onnx,) = [finding for finding in run_checks() if finding.what == "onnx"]
    assert not onnx.ok and "cannot be imported" in onnx.said


def test_examine__a_folder_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write everywhere, and yet no file can be made in /proc."""
    monkeypatch.chdir("/proc")
    (folder,) = [finding for finding in run_checks() if finding.what == "folder"]
    assert not folder.ok


def test_examine__a_look_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def _torch() -> Iterator[Finding]:
        raise RuntimeError("operator torchvision::nms does not exist")
        yield

    monkeypatch.setattr(doctor, "_torch", _torch)
    bad = [finding for finding in run_checks() if finding.what == "torch"]
    assert [(f.ok, f.said) for f in bad] == [
        (False, "RuntimeError: operator torchvision::nms does not exist")
    ]
