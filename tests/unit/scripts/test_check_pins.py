"""Pins read from requirement files, compared with what an interpreter has."""

import importlib.util
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
spec = importlib.util.spec_from_file_location("check_pins", ROOT / "scripts" / "check_pins.py")
assert spec and spec.loader
check_pins = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_pins)


def test_pins_are_read_without_comments() -> None:
    assert check_pins.read_pins("# head\n\na==1.0  # why\nb == 2.0+cu\n") == {"a": "1.0", "b": "2.0+cu"}


def test_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'a>=1' is not an exact pin"):
        check_pins.read_pins("a>=1\n")


def test_every_requirement_is_an_exact_pin() -> None:
    for path in ROOT.glob("requirements*.txt"):
        assert check_pins.read_pins(path.read_text(encoding="utf-8")), path


def test_shortfall_names_what_is_there() -> None:
    have = metadata.version("pytest")
    assert check_pins.unmet({"pytest": have}) == []
    assert check_pins.unmet({"pytest": "0.1", "no-such-thing": "1"}) == [
        f"pytest is {have}, not 0.1",
        "no-such-thing is missing",
    ]


def test_local_build_tag_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "2.13.0+cpu")
    assert check_pins.unmet({"torch": "2.13.0"}) == []
    assert check_pins.unmet({"torch": "2.13"}) == ["torch is 2.13.0+cpu, not 2.13"]


def test_exit_code_and_short_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pins = tmp_path / "requirements.txt"
    pins.write_text("a-1==1\na-2==1\na-3==1\na-4==1\n")
    assert check_pins.main([str(pins)]) == 1
    assert capsys.readouterr().out == "a-1 is missing; a-2 is missing and 2 more\n"
    pins.write_text(f"pytest=={metadata.version('pytest')}\n")
    assert check_pins.main([str(pins)]) == 0
