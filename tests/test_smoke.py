"""Each script runs for a few steps as a user runs it: copied alone into an empty folder.

This file needs nothing else of this repository. Copy it together with a script, and keep the
script's line in COMMANDS.
"""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest

SCRIPTS = Path(__file__).parent.parent  # the folder of the scripts
TD = "--total-timesteps 2000 --num-centers 9 --eval-episodes 2 --save run.npz --plot curve.png"
COMMANDS = {
    "parallel_td.py": TD,
    "replay_td.py": TD,
    "epsilon_decay_td.py": TD,
    "gridworld_qlearning.py": "--total-timesteps 5000 --save run.npz --plot grid.pdf",
    "reinforce_parallel.py": "--num-envs 2 --num-iterations 5 --eval-episodes 2"
    " --save run.npz --plot curve.svg --gif episode.gif",
    "mountaincar_env.py": "--num-envs 3 --num-episodes 7 --num-intervals 3 --save run.npz",
}
SWEEP = "--num-seeds 2 --gamma 0.5 0.75 --num-intervals 3"  # four runs
SWEPT = [script for script in COMMANDS if script != "mountaincar_env.py"]  # which has no such flags


@cache
def run(script):
    """Run a command. Return what it printed, its errors, its exit status, and its folder."""
    # Without the settings that other tests make for themselves.
    env = {name: text for name, text in os.environ.items() if not name.startswith(("JAX", "XLA"))}
    env["JAX_CHECK_TRACER_LEAKS"] = "1"
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    shutil.copy(SCRIPTS / script, folder)
    flags = f"{SWEEP} {COMMANDS[script]}" if script in SWEPT else COMMANDS[script]
    command = [sys.executable, script, *flags.split()]
    process = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    return process.stdout, process.stderr, process.returncode, folder


@pytest.mark.parametrize("script", COMMANDS)
def test_runs_alone_and_writes_the_files_that_were_asked_for(script):
    output, errors, status, folder = run(script)
    assert (status, errors) == (0, "")
    assert "compiled in" in output
    asked = [word for word in COMMANDS[script].split() if "." in word]
    assert sorted(path.name for path in folder.iterdir()) == sorted([script, *asked])
    assert all((folder / name).stat().st_size > 2000 for name in asked)  # not empty pictures


@pytest.mark.parametrize("script", SWEPT)
def test_saves_three_lines_of_four_runs(script):
    *_, folder = run(script)
    with np.load(folder / "run.npz") as saved:
        assert saved["curves.timesteps"].shape == (3, 4)
        assert saved["runs.seed"].tolist() == [0, 1, 0, 1]
        np.testing.assert_allclose(saved["runs.gamma"], [0.5, 0.5, 0.75, 0.75])
