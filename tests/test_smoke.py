"""Each script as a user runs it: copied alone into an empty folder, a few steps, with its files."""

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, SCRIPTS, TRIO, USER_ENV

SWEEP = "--num-seeds 2 --learning-rate 0.1 0.2 --plot curve.png"  # four runs
TD = f"{SWEEP} --total-timesteps 1430 --log-interval 480 --num-centers 50 --eval-episodes 5"
REPLAY = f"{TD} --buffer-size 64 --learning-starts 32"
FLAGS = dict.fromkeys(TRIO, REPLAY) | {
    "parallel_td.py": TD,
    "gridworld_qlearning.py": f"{SWEEP} --total-timesteps 3000 --log-interval 1000 --grid-size 3 4",
    "mountaincar_env.py": "--num-envs 8 --total-timesteps 4800 --log-interval 1600",
    "reinforce_parallel.py": f"{SWEEP} --num-iterations 3 --log-interval 1 --hidden-size 3"
    " --eval-episodes 5 --gif episode.gif",
}


def run(folder, script):
    """Copy a script into an empty folder and run it there. Return the folder and the process."""
    shutil.copy(ROOT / script, folder)
    command = [sys.executable, script, *FLAGS[script].split(), "--save", "run.npz"]
    pipes = {"capture_output": True, "text": True}
    return folder, subprocess.run(command, cwd=folder, env=USER_ENV, **pipes)


@pytest.mark.parametrize("script", SCRIPTS)
def test_runs_alone_in_an_empty_folder(script, smoke_runs):
    folder, process = smoke_runs[script].result()
    assert (process.returncode, process.stderr) == (0, "")
    devices, compiled, *lines = process.stdout.splitlines()
    assert re.search(r" on \d+ x ", devices)
    assert re.fullmatch(r"compiled in [\d.]+ s", compiled)
    assert sum(line.endswith(" steps/s") for line in lines) == 3
    rates = sum(line.startswith("learning rate ") for line in lines)
    assert rates == (0 if script == "mountaincar_env.py" else 2)
    pictures = {word for word in FLAGS[script].split() if word.endswith((".png", ".gif"))}
    assert {path.name for path in folder.iterdir()} == {script, "run.npz", *pictures}
    assert all((folder / picture).stat().st_size > 5000 for picture in pictures)
    saved = dict(np.load(folder / "run.npz", allow_pickle=False))
    assert all(np.isfinite(array).all() for array in saved.values() if array.dtype.kind == "f")
    assert json.loads(str(saved["args"]))["save"] == "run.npz"
    assert saved["obs" if script == "mountaincar_env.py" else "seed"].any()
