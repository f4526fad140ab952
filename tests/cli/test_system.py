"""`vitctl doctor` and `quickstart`."""

from pathlib import Path

import pytest

from tests.cli.conftest import Vitctl
from vitctl.launch import doctor
from vitctl.launch.doctor import Finding


def test_doctor__exits_2_when_something_needs_attention(
    vitctl: Vitctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        doctor, "run_checks", lambda: [Finding(True, "torch", "2"), Finding(False, "disk", "[full]")]
    )
    said = vitctl("doctor")
    assert said.code == 2
    assert "[full]" in said.out
    assert "1 of 2 need attention" in said.out
    monkeypatch.setattr(doctor, "run_checks", lambda: [Finding(True, "torch", "2")])
    said = vitctl("doctor")
    assert (said.code, said.out.splitlines()[-1]) == (0, "all is well")


def test_quickstart__stopped_says_how_to_continue(vitctl: Vitctl, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(_out: Path, _seed: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vitctl.cli.quickstart.run_quickstart", stopped)
    monkeypatch.setattr("os.getloadavg", lambda: (1000.0, 0.0, 0.0))
    said = vitctl("quickstart", "--out", "q", "--seed", 1)
    assert (said.code, said.err) == (
        3,
        "vitctl: stopped; continue with: vitctl quickstart --out q --seed 1\n",
    )
    assert "this machine is busy (load 1000.0 on " in said.out
