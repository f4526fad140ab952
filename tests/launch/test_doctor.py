"""The doctor looks, and changes nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from vitctl.launch import doctor
from vitctl.launch.doctor import Finding, run_checks


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


def test_examine__a_look_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def _torch() -> Iterator[Finding]:
        raise RuntimeError("operator torchvision::nms does not exist")
        yield

    monkeypatch.setattr(doctor, "_torch", _torch)
    bad = [finding for finding in run_checks() if finding.what == "torch"]
    assert [(f.ok, f.said) for f in bad] == [
        (False, "RuntimeError: operator torchvision::nms does not exist")
    ]
