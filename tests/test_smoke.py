"""Each script runs for a few steps as a user runs it: copied alone into an empty folder.

This file needs nothing else of this repository. Copy it together with a script, and keep the
script's line in COMMANDS.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

SCRIPTS = Path(__file__).parent.parent  # the folder of the scripts
TD = "--total-timesteps 2000 --num-centers 9 --eval-episodes 2 --save run.npz --plot curve.png"
COMMANDS = {
    "parallel_td.py": TD,
    "replay_td.py": TD,
    "epsilon_decay_td.py": TD,
    "gridworld_qlearning.py": "--total-timesteps 6000 --save run.npz --plot grid.pdf",
    "reinforce_parallel.py": "--num-envs 2 --num-iterations 5 --eval-episodes 2"
    " --save run.npz --plot curve.svg --gif episode.gif",
    "mountaincar_env.py": "--num-envs 3 --num-episodes 7 --save run.npz",
}
SWEEP = "--num-seeds 2 --gamma 0.5 0.75"  # four runs
SWEPT = [script for script in COMMANDS if script != "mountaincar_env.py"]  # which has no such flags


@pytest.mark.parametrize("script", COMMANDS)
def test_runs_alone_writes_the_files_that_were_asked_for_and_prints_what_it_saves(script, tmp_path):
    # Without the settings that other tests make for themselves.
    env = {name: text for name, text in os.environ.items() if not name.startswith(("JAX", "XLA"))}
    env["JAX_CHECK_TRACER_LEAKS"] = "1"
    shutil.copy(SCRIPTS / script, tmp_path)
    flags = f"--seed 5 --num-intervals 3 {SWEEP if script in SWEPT else ''} {COMMANDS[script]}"
    command = [sys.executable, script, *flags.split()]
    process = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")
    asked = [word for word in COMMANDS[script].split() if "." in word]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([script, *asked])
    assert all((tmp_path / name).stat().st_size > 2000 for name in asked)  # not empty pictures
    with np.load(tmp_path / "run.npz") as saved:
        check_what_is_saved(script, dict(saved))
        check_what_is_printed(process.stdout.splitlines(), dict(saved))


def check_what_is_saved(script, saved):
    """The flags of the command, the versions of its packages, and each seed with each gamma."""
    assert not any(".." in name for name in saved)
    flags, versions = json.loads(saved["args"].item()), json.loads(saved["versions"].item())
    assert versions.pop("script") == script
    imported = re.findall(
        r"^(?:import|from) (gymnax|jax|optax)\b", (SCRIPTS / script).read_text(), re.M
    )
    assert versions == {name: version(name) for name in [*imported, "jaxlib"]}
    seeds = 5 + np.arange(3)
    if script in SWEPT:
        seeds = np.tile(5 + np.arange(2), 2)
        assert (flags["num_seeds"], flags["gamma"]) == (2, [0.5, 0.75])
        np.testing.assert_allclose(saved["runs.gamma"], [0.5, 0.5, 0.75, 0.75])
    assert (flags["seed"], saved["runs.seed"].tolist()) == (5, seeds.tolist())
    assert saved["curves.timesteps"].shape == (3, len(seeds))  # lines, runs


def check_what_is_printed(output, saved):
    """Means over all runs, but the grid world's steps of an episode are pooled."""
    lines = [line.split("  ") for line in output if line.startswith("step ")]
    assert 0 < float(re.search(r"compiled in ([\d.]+) s", output[0])[1]) < 100
    for i, line in enumerate(lines):
        shown = {name: float(text.replace(",", "")) for name, text in map(str.split, line[:-1])}
        timesteps, seconds = saved["curves.timesteps"][i], saved["curves.seconds"][i]
        assert shown.pop("step") == pytest.approx(timesteps.mean(), abs=0.5)
        speed = int(line[-1].split()[0].replace(",", ""))
        assert speed == pytest.approx(timesteps.sum() / seconds, rel=1e-3)
        if "curves.episode_steps" in saved:
            pooled = saved["curves.episode_steps"][i].sum() / saved["curves.episodes"][i].sum()
            assert shown.pop("steps/episode") == pytest.approx(pooled, abs=0.05)
        assert shown  # more than steps and speed
        for name, number in shown.items():
            np.testing.assert_allclose(number, saved[f"curves.{name}"][i].mean(), rtol=1e-3)
    assert len(lines) == 3
