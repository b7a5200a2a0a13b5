"""`drafttrain plan`: tables and exit status, without loading a target."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafttrain.cli.main import main

CONFIG = Path(__file__).resolve().parents[2] / "fixtures" / "configs" / "qwen3-8b" / "config.json"
RECIPE = "recipes/eagle3_qwen3_8b.yaml"


def test_a_plan_names_sizes_and_assumptions(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["plan", RECIPE, "--gpus", "8xH200", "--target-config", str(CONFIG), "--samples", "5000"])
    out = capsys.readouterr().out
    assert status == 0
    for expected in (
        "8,190,735,360",
        "5,000",
        "draft, depth 6",
        "Adam moments, fp32",
        "It fits:",
        "ZeRO-3",
        "GPU-hours",
        "Assumed:",
    ):
        assert expected in out


def test_hours_in_turn_and_at_once_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["plan", RECIPE, "--gpus", "8xB200", "--target-config", str(CONFIG), "--samples", "5000"]
    expected = {
        "": ("run, one after the other", "run at best, both at once", "was not measured"),
        "training.prefetch=0": ("hours of the run ",),
        "features.source=stream features.urls=[http://a:1]": ("on 8 such devices elsewhere", "the longer of the two"),
    }
    for overrides, words in expected.items():
        main([*base, *overrides.split()])
        out = " ".join(capsys.readouterr().out.split())
        assert all(word in out for word in words), overrides
        assert ("at best" in out) == (not overrides)


def test_what_does_not_fit_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", RECIPE, "--gpus", "8xL4", "--target-config", str(CONFIG)]) == 1
    assert "It does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--gpus", "8xH999"], "no such hardware"),
        (["--nodes", "2"], "add --gpus"),
        (["--gpus", "8xH100", "--nodes", "0"], "0 nodes cannot train"),
        (["--samples", "0"], "too few"),
        (["--target-config", "nowhere.json"], "no such file"),
        (["training.lr=fast"], "training.lr"),
    ],
)
def test_mistakes(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["plan", RECIPE] if "--target-config" in arguments else ["plan", RECIPE, "--target-config", str(CONFIG)]
    words = [*base[:2], *arguments, *base[2:]] if "=" in arguments[0] else [*base, *arguments]
    assert main(words) == 2
    assert error in capsys.readouterr().err
