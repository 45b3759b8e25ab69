"""Each script runs for a few steps as a user runs it: copied alone into an empty folder.

This file needs nothing else of this repository. Copy it together with a script, and keep the
script's line in COMMANDS.
"""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
FEW_STEPS = "--total-timesteps 2000 --num-centers 9 --eval-episodes 2"
COMMANDS = {
    "parallel_td.py": f"{FEW_STEPS} --plot curve.png",
    "replay_td.py": f"{FEW_STEPS} --plot curve.pdf",
    "epsilon_decay_td.py": f"{FEW_STEPS} --plot curve.png",
    "gridworld_qlearning.py": "--total-timesteps 6000 --plot grid.pdf",
    "reinforce_parallel.py": "--env-id Catch-bsuite --num-envs 2 --num-iterations 5"
    " --eval-episodes 2 --plot curve.svg --gif episode.gif",
    "mountaincar_env.py": "--num-envs 3 --num-episodes 7",
}
# Names of scripts in recipes/ that learn with a network.
NETWORKS = ["ppo.py", "pqn.py", "dqn.py"]
COMMANDS |= dict.fromkeys(
    NETWORKS, "--total-timesteps 6000 --hidden-size 8 --eval-episodes 2 --plot curve.png"
)
SWEEP = "--num-seeds 2 --gamma 0.5 0.75 --num-intervals 3"  # four runs
CAR = "mountaincar_env.py"  # which has no such flags
GRID = "gridworld_qlearning.py"
TWICE = ["epsilon_decay_td.py", GRID, "reinforce_parallel.py"]
OTHER_PROGRAM = """
import pickle, sys, {0}
with open("returned.pickle", "wb") as file:
    pickle.dump({0}.main(sys.argv[1:]), file)
"""


def path_of(script):
    """The path of a script: it is in the folder above, or in recipes/."""
    [path] = [path for path in (HERE.parent / script, HERE / "recipes" / script) if path.exists()]
    return path


def run_python(folder, command, **settings):
    """Run Python in a folder as a user does: with no setting of jax from the other tests.

    So it compiles as it does for users, and takes no compiled program from another process.
    """
    env = {name: text for name, text in os.environ.items() if name[:4] not in ("JAX_", "XLA_")}
    env |= settings
    command = [sys.executable, *command]
    process = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert "RuntimeWarning" not in process.stderr  # NumPy's, of a mean of nothing, for example
    return process.stdout


@pytest.fixture(scope="module", params=COMMANDS)
def script(request):
    return request.param


@pytest.fixture(scope="module")
def flags(script):
    return f"--seed 5 --save run.npz {'' if script == CAR else SWEEP} {COMMANDS[script]}".split()


@pytest.fixture(scope="module")
def folder(script, flags, tmp_path_factory):
    """A folder with a copy of the script, what it wrote, and what it printed."""
    folder = tmp_path_factory.mktemp(script) / "user"
    folder.mkdir()
    shutil.copy(path_of(script), folder)
    output = run_python(folder, [script, *flags], PYTHONHASHSEED="1")
    assert len(re.findall("^step ", output, re.MULTILINE)) == (0 if script == CAR else 3)
    folder.with_name("printed.txt").write_text(output)
    return folder


def test_a_run_has_no_setting_of_the_other_tests(tmp_path):
    names = run_python(tmp_path, ["-c", "import os; print(*os.environ)"]).split()
    assert not [name for name in names if name[:4] in ("JAX_", "XLA_")]


def test_all_cores_are_used_as_far_as_there_are_runs(script, folder):
    """There are four runs. The car plays at least one episode on each core."""
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = len(os.sched_getaffinity(0))
    devices = re.search(r"devices: (\d+) x (.*?)  ", folder.with_name("printed.txt").read_text())
    if devices[2] != "cpu":
        pytest.skip("This is a GPU.")
    assert int(devices[1]) == (cores if script == CAR else min(4, cores))


def test_the_car_uses_as_many_devices_as_the_user_sets(tmp_path):
    """test_flags.py has the other scripts, which set devices when they are imported, too."""
    flags = "--num-envs 3 --num-episodes 7".split()
    assert "devices: 3 x" in run_python(tmp_path, [path_of(CAR), *flags], JAX_NUM_CPU_DEVICES="3")


def load_saved(folder):
    with np.load(folder / "run.npz") as saved:
        return dict(saved)


def test_it_runs_alone_and_writes_the_files_that_were_asked_for(script, folder):
    asked = ["run.npz", *(word for word in COMMANDS[script].split() if "." in word)]
    assert sorted(path.name for path in folder.iterdir()) == sorted([script, *asked])
    assert all((folder / name).stat().st_size > 2000 for name in asked)  # no empty pictures


def test_the_file_has_the_flags_of_the_command_and_the_versions_of_its_packages(script, folder):
    saved = load_saved(folder)
    flags, versions = json.loads(saved["args"].item()), json.loads(saved["versions"].item())
    packages = {"jax", "jaxlib", "gymnax", "optax"}
    packages -= {GRID: {"gymnax", "optax"}, CAR: {"optax"}}.get(script, set())  # they need fewer
    assert versions == {name: version(name) for name in packages}
    assert (flags["seed"], flags["save"]) == (5, "run.npz")
    if script != CAR:
        assert (flags["num_seeds"], flags["gamma"]) == (2, [0.5, 0.75])
        np.testing.assert_allclose(saved["runs.gamma"], [0.5, 0.5, 0.75, 0.75])
        assert saved["runs.seed"].tolist() == [5, 6, 5, 6]
        assert saved["curves.timesteps"].shape == (3, 4)  # lines, runs


def leaves(results, prefix=""):
    """The arrays of nested dictionaries, with joined names."""
    if not isinstance(results, dict):
        return {prefix: np.asarray(results)}
    parts = [leaves(part, f"{prefix}.{name}".lstrip(".")) for name, part in results.items()]
    return {name: array for part in parts for name, array in part.items()}


@pytest.mark.parametrize("script", TWICE, indirect=True)
def test_main_returns_what_it_saves_and_the_bits_are_those_of_another_process(
    script, flags, folder
):
    """The other process hashes texts otherwise, so sets have another order.

    The linear learners and the networks have the same `main`, and the car has a test.
    """
    other, flags = folder.with_name("other"), flags[: flags.index("--plot")]  # no pictures again
    other.mkdir()
    shutil.copy(path_of(script), other)
    program = OTHER_PROGRAM.format(script.removesuffix(".py"))
    run_python(other, ["-c", program, *flags], PYTHONHASHSEED="2", JAX_CHECK_TRACER_LEAKS="1")
    returned = leaves(pickle.loads((other / "returned.pickle").read_bytes()))
    saved, before = load_saved(other), load_saved(folder)
    assert set(returned) == set(saved) == set(before)
    for name, array in saved.items():
        np.testing.assert_array_equal(array, returned[name])
        assert array.dtype == returned[name].dtype
        if name not in ("args", "curves.seconds"):  # --plot is missing here; clocks differ
            np.testing.assert_array_equal(array, before[name])
