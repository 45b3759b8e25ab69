"""What the tests share: the scripts can be imported, as a user's shell would run them."""

import atexit
import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TRIO = ["parallel_td.py", "replay_td.py", "epsilon_decay_td.py"]
SCRIPTS = [*TRIO, "gridworld_qlearning.py", "mountaincar_env.py", "reinforce_parallel.py"]
USER_ENV = dict(os.environ)  # copied before an imported script adds its settings

sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
os.environ.setdefault("XLA_FLAGS", "")  # or the first script imported would decide for all

# Tests compile the same programs over and over: in this process, each is compiled once.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder = tempfile.mkdtemp()
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def smoke_runs(request, tmp_path_factory):
    """{script: the future of its smoke run}. The runs begin before the first test.

    One after the other, they use the core that the other tests leave.
    """
    items = [item for item in request.session.items if item.module.__name__ == "test_smoke"]
    with ThreadPoolExecutor(1) as pool:
        yield {
            (script := item.callspec.params["script"]): pool.submit(
                item.module.run, tmp_path_factory.mktemp("smoke"), script
            )
            for item in items
        }
        pool.shutdown(cancel_futures=True)
