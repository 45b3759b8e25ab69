"""What the tests share: where the scripts are, flags of short runs, and a clock."""

import atexit
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np

ROOT = Path(__file__).parent.parent
TRIO = ["parallel_td.py", "replay_td.py", "epsilon_decay_td.py"]
SCRIPTS = [*TRIO, "gridworld_qlearning.py", "mountaincar_env.py", "reinforce_parallel.py"]
USER_ENV = dict(os.environ)  # copied before an imported script adds its settings

# Three log intervals. Numbers differ where they can: what is confused with another one shows.
TD = "--num-envs 4 --num-centers 7 --eval-episodes 6 --total-timesteps 70 --log-interval 22"
FLAGS = dict.fromkeys(TRIO, f"{TD} --learning-starts 20 --buffer-size 50") | {
    "parallel_td.py": TD,
    "gridworld_qlearning.py": "--total-timesteps 8600 --log-interval 2900 --grid-size 20 25",
    "mountaincar_env.py": "--num-envs 3 --total-timesteps 700 --log-interval 250",
    "reinforce_parallel.py": "--num-envs 2 --hidden-size 6 --eval-episodes 8"
    " --num-iterations 11 --log-interval 4",
}

sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
os.environ.setdefault("XLA_FLAGS", "")  # or the first script imported would decide for all

# Tests compile the same programs over and over: in this process, each is compiled once.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder = tempfile.mkdtemp()
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    atexit.register(shutil.rmtree, folder, ignore_errors=True)

import jax
import pytest


def start(folder, script, flags, **env):
    """Start a copy of a script in a folder of its own, as a user would."""
    shutil.copy(ROOT / script, folder)
    env = USER_ENV | {name: str(value) for name, value in env.items()}
    command = [sys.executable, script, *flags.split()]
    return Popen(command, cwd=folder, env=env, stdout=PIPE, stderr=PIPE, text=True)


@pytest.fixture(scope="session", autouse=True)
def started(request, tmp_path_factory):
    """Folder and process of each script: test_smoke.py waits for them. That saves half a minute."""
    sweep, processes = "--num-seeds 2 --gamma 0.5 0.9 --plot curve.png", {}
    own = {"mountaincar_env.py": "", "reinforce_parallel.py": f"{sweep} --gif episode.gif --seed 3"}
    for script in SCRIPTS:
        if f"test_runs_alone_in_an_empty_folder[{script}]" in {
            i.name for i in request.session.items
        }:
            folder, flags = (
                tmp_path_factory.mktemp("run"),
                f"{FLAGS[script]} {own.get(script, sweep)}",
            )
            processes[script] = folder, start(folder, script, f"{flags} --save run.npz")
    return processes


def clock(*seconds):
    """Replace the module `time`: its clock shows these seconds, one after the other."""
    return SimpleNamespace(perf_counter=iter(seconds).__next__)


def report_known_results(script, monkeypatch, flags, state, intervals, evaluated):
    """Run `main` with results that are known in the place of all that would be compiled.

    There are two settings (gamma) of two seeds, and three intervals of 1, 2 and 4 seconds. Checks
    what all learners save, and returns it, and what is drawn.
    """
    train, drawn = Mock(side_effect=[(state, metrics) for metrics in intervals]), []
    train.lower.return_value.compile.return_value = train
    compiled = {"init_state": lambda runs: state, "train_interval": train}
    compiled["evaluate"] = lambda runs, state: evaluated
    monkeypatch.setattr(script, "over_runs", lambda function, **_: compiled[function.__name__])
    monkeypatch.setattr(script, "plot", lambda *call: drawn.extend(call))
    monkeypatch.setattr(script, "animate", None, raising=False)  # without --gif, it is not called
    monkeypatch.setattr(script, "time", clock(10, 13.25, 20, 21, 30, 32, 40, 44))
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind="cpu")])
    flags += " --gamma 0.5 0.75 --seed 8 --num-seeds 2 --save x.npz --plot x.png"
    results = script.main(flags.split())
    saved = dict(np.load("x.npz"))
    np.testing.assert_equal(saved, results)
    assert saved["gamma"].tolist() == [0.5, 0.5, 0.75, 0.75] and not saved["interrupted"]
    assert saved["seed"].tolist() == [8, 9, 8, 9]
    assert saved["compile_seconds"] == 3.25 and saved["train_seconds"] == 7
    assert json.loads(str(saved["args"]))["gamma"] == [0.5, 0.75]
    assert drawn[:2] == ["x.png", ["gamma 0.5", "gamma 0.75"]]
    return results, drawn[2:]


def adam(param, moments, grad, count, learning_rate):
    """Step number `count` (0, 1, ...) of Adam. Returns the parameter and its two moments."""
    mean, square = 0.9 * moments[0] + 0.1 * grad, 0.999 * moments[1] + 0.001 * grad**2
    scale = np.sqrt(square / (1 - 0.999 ** (count + 1))) + 1e-8
    return param - learning_rate * mean / (1 - 0.9 ** (count + 1)) / scale, (mean, square)
