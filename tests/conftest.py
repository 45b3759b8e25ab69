"""What the tests share: scripts that can be imported, short runs, runs in the background."""

import atexit
import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
TRIO = ["parallel_td.py", "replay_td.py", "epsilon_decay_td.py"]
SCRIPTS = [*TRIO, "gridworld_qlearning.py", "mountaincar_env.py", "reinforce_parallel.py"]
USER_ENV = dict(os.environ)  # copied before an imported script adds its settings

# Three progress lines; 15 runs, or three cars, on two devices: one copy is to be cut off.
# Numbers differ where they can: what is confused with another one shows.
RUNS = "--num-seeds 5 --learning-rate 0.3 0.1 0.2 --plot curve.png"
TD = f"{RUNS} --num-envs 4 --num-centers 7 --eval-episodes 6 --total-timesteps 70 --log-interval 22"
FLAGS = dict.fromkeys(TRIO, f"{TD} --learning-starts 20 --buffer-size 50") | {
    "parallel_td.py": TD,
    "gridworld_qlearning.py": f"{RUNS} --total-timesteps 8600 --log-interval 2900"
    " --grid-size 20 25",
    "mountaincar_env.py": "--num-envs 3 --total-timesteps 700 --log-interval 250",
    "reinforce_parallel.py": f"{RUNS} --num-envs 2 --hidden-size 6 --eval-episodes 8"
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


def pytest_collection_modifyitems(items):
    """Sort the tests that wait for a subprocess to the end."""
    items.sort(key=lambda item: "ended" in item.fixturenames)


@pytest.fixture(scope="session", autouse=True)
def background(request, tmp_path_factory):
    """Start all subprocesses before the first test: they use the core that other tests leave free.

    A test that needs one has a parameter `ended`: a function and its arguments after a folder.
    """
    items = [item for item in request.session.items if "ended" in item.fixturenames]
    runs = [item.callspec.params["ended"] for item in items]
    with ThreadPoolExecutor(1) as pool:
        yield {run: pool.submit(run[0], tmp_path_factory.mktemp("run"), *run[1:]) for run in runs}
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def ended(request, background):
    return background[request.param].result()


def clock(*seconds):
    """Replace the module `time`: its clock shows these seconds, one after the other."""
    return SimpleNamespace(perf_counter=iter(seconds).__next__)


def adam(param, moments, grad, count, learning_rate):
    """Step number `count` (0, 1, ...) of Adam. Returns the parameter and its two moments."""
    mean, square = 0.9 * moments[0] + 0.1 * grad, 0.999 * moments[1] + 0.001 * grad**2
    scale = np.sqrt(square / (1 - 0.999 ** (count + 1))) + 1e-8
    return param - learning_rate * mean / (1 - 0.9 ** (count + 1)) / scale, (mean, square)
