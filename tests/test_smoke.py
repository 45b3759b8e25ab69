"""Each script as a user runs it: in a subprocess, for a few steps, copied alone into an empty folder."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FEW_STEPS = {
    "epsilon_decay_td.py": ["--total-timesteps", "4000", "--log-interval", "2000", "--eval-episodes", "4"],
    "gridworld_qlearning.py": ["--total-timesteps", "2000", "--log-interval", "1000"],
    "mountaincar_env.py": ["--num-envs", "8", "--total-timesteps", "3200", "--log-interval", "1600", "--policy", "rocking"],
    "parallel_td.py": ["--total-timesteps", "4000", "--log-interval", "2000", "--eval-episodes", "4"],
    "reinforce_parallel.py": ["--num-iterations", "4", "--log-interval", "2", "--eval-episodes", "4"],
    "replay_td.py": ["--total-timesteps", "4000", "--log-interval", "2000", "--eval-episodes", "4"],
}


def run(script, *flags, cwd=None):
    """Run a script to its end; returns the finished process, its output as text."""
    env = os.environ | dict(XLA_FLAGS="--xla_backend_optimization_level=0")  # compiles sooner
    return subprocess.run([sys.executable, str(script), *flags], cwd=cwd, env=env, capture_output=True, text=True, timeout=240)


def test_every_script_is_smoke_tested():
    assert set(FEW_STEPS) == {path.name for path in ROOT.glob("*.py")}


@pytest.mark.parametrize("script", sorted(FEW_STEPS))
def test_runs_alone_in_an_empty_folder(script, tmp_path):
    shutil.copy(ROOT / script, tmp_path)
    runs = [] if script == "mountaincar_env.py" else ["--num-seeds", "2"]
    process = run(script, *FEW_STEPS[script], *runs, "--save", "out.npz", "--plot", "out.png", cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    lines = process.stdout.splitlines()
    assert lines[0].startswith(script) and any(line.startswith("compiled in") for line in lines[1:3])
    assert {path.name for path in tmp_path.iterdir()} == {script, "out.npz", "out.png"}
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
