"""``meshwright train --config``: options from TOML files."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.train import TrainConfig, launch


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    seen: list[TrainConfig] = []
    monkeypatch.setattr(launch, "run_processes", lambda config, emit: seen.append(config))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return seen


def test_later_files_win_and_the_command_line_wins_over_all(tmp_path: Path, started: list[TrainConfig]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some text\n" * 50)
    (tmp_path / "a.toml").write_text(f'data = ["{text}"]\nsteps = 7\nlr = 1\nseq = 8\nmesh = {{ dp = 2, tp = 2 }}\n')
    (tmp_path / "b.toml").write_text('steps = 9\nsave_every = 2\nsave = "runs"\npass = "recompute"\nstatic = true\n')
    files = ["--config", str(tmp_path / "a.toml"), "--config", str(tmp_path / "b.toml")]
    result = CliRunner().invoke(app, ["train", *files, "--seq", "16", "--no-plot"])
    assert len(started) == 1, result.output
    (config,) = started
    assert (config.steps, config.seq, config.lr, config.save_every) == (9, 16, 1.0, 2)
    assert config.mesh == (("dp", 2), ("tp", 2))
    assert config.data == (str(text),)
    assert config.passes == ("recompute",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stpes = 3", "there is no option 'stpes'; did you mean 'steps'?"),
        ('steps = "three"', "steps = 'three': int was expected"),
        ("mesh = 3", "mesh = 3: str was expected"),
        ("static = 1", "static = 1: bool was expected"),
        ("steps =", "is no TOML"),
    ],
)
def test_bad_files(tmp_path: Path, started: list[TrainConfig], text: str, message: str) -> None:
    (tmp_path / "a.toml").write_text(text)
    result = CliRunner().invoke(app, ["train", "--config", str(tmp_path / "a.toml")])
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", " ")
    assert not started
