"""What the tests share: where the scripts are, flags of short runs, and Adam.

Some tests replay runs in NumPy. A replay computes all that is learned by itself, but draws as the
script does, on purpose: keys are split in the same order, `uniform`, `normal`, `randint` and the
`gumbel` noise of `categorical` have the same shapes, and gymnax resets with the same keys. Runs
that draw other numbers can only be compared in the mean, which shows few faults. Who changes how a
script draws changes its replay, too.
"""

import inspect
import os
import shutil
import sys
import tempfile
from pathlib import Path
from subprocess import PIPE, Popen

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
TRIO = ["parallel_td.py", "replay_td.py", "epsilon_decay_td.py"]
SCRIPTS = [*TRIO, "gridworld_qlearning.py", "mountaincar_env.py", "reinforce_parallel.py"]
# Copied before an imported script adds its settings. Output is buffered, as it is for most users.
USER_ENV = os.environ | {"PYTHONUNBUFFERED": ""}

# Three log intervals; learners make 15 runs. Sizes and results differ, so that a mix-up shows.
SWEEP = "--num-seeds 3 --gamma 0 0.125 0.5 0.75 1"
TD = f"{SWEEP} --learning-rate 1 --num-envs 4 --num-centers 9 --eval-episodes 7 --log-interval 22"
FLAGS = {
    "parallel_td.py": f"{TD} --total-timesteps 70",
    "replay_td.py": f"{TD} --total-timesteps 70 --buffer-size 50",
    "epsilon_decay_td.py": f"{TD} --total-timesteps 70 --buffer-size 50",
    "gridworld_qlearning.py": f"--total-timesteps 8600 --log-interval 2900 --grid-size 2 3 {SWEEP}",
    "mountaincar_env.py": "--num-envs 3 --num-episodes 7 --log-interval 3",
    # With seed 2, the episode that is animated is not as long as others.
    "reinforce_parallel.py": "--num-envs 2 --hidden-size 6 --eval-episodes 7 --seed 2"
    f" --num-iterations 11 --log-interval 4 {SWEEP}",
}
FILES = dict.fromkeys(SCRIPTS, "--save x.npz --plot x.png")
FILES |= {"mountaincar_env.py": "--save x.npz"}
FILES["reinforce_parallel.py"] += " --gif x.gif"

sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
# Level 0 compiles faster. It is for programs that name no level: the tests' own.
# If XLA_FLAGS had no value here, the first script imported would choose one for all.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
# Tests compile the same programs over and over: in this process, each is compiled once.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    cache = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # what is read from the cache causes false alarms


def start(folder, script, flags, **env):
    """Start a copy of a script in a folder of its own, as a user would. Other tests go first."""
    if not (folder / script).exists():  # another process may be reading it
        shutil.copy(ROOT / script, folder)
    env = USER_ENV | {name: str(value) for name, value in env.items()}
    command = ["nice", sys.executable, script, *flags.split()]
    return Popen(command, cwd=folder, env=env, stdout=PIPE, stderr=PIPE, text=True)


@pytest.fixture(scope="session", autouse=True)
def started(request, tmp_path_factory):
    """Folder and process of each script that a chosen test waits for. Other tests run meanwhile."""
    processes = {}
    for item in request.session.items:
        if "started" in inspect.signature(item.function).parameters:
            script, folder = item.callspec.params["script"], tmp_path_factory.mktemp("run")
            processes[script] = folder, start(folder, script, f"{FLAGS[script]} {FILES[script]}")
    return processes


def adam(param, moments, grad, count, learning_rate):
    """Step number `count` (0, 1, ...) of Adam. Returns the parameter and its two moments."""
    mean, square = 0.9 * moments[0] + 0.1 * grad, 0.999 * moments[1] + 0.001 * grad**2
    scale = np.sqrt(square / (1 - 0.999 ** (count + 1))) + 1e-8
    return param - learning_rate * mean / (1 - 0.9 ** (count + 1)) / scale, (mean, square)
