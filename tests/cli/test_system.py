"""`vitctl doctor`."""

import pytest

from tests.cli.conftest import Vitctl
from vitctl.launch import doctor
from vitctl.launch.doctor import Finding


def test_doctor__exits_2_when_something_needs_attention(vitctl: Vitctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "run_checks", lambda: [Finding(True, "torch", "2"), Finding(False, "disk", "[full]")])
    said = vitctl("doctor")
    assert said.code == 2
    assert "[full]" in said.out
    assert "1 of 2 need attention" in said.out
    monkeypatch.setattr(doctor, "run_checks", lambda: [Finding(True, "torch", "2")])
    said = vitctl("doctor")
    assert (said.code, said.out.splitlines()[-1]) == (0, "all is well")
