"""What the tests share: the scripts can be imported, as a user's shell would run them."""

import importlib
import os
import signal
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TRIO = ["parallel_td.py", "replay_td.py", "epsilon_decay_td.py"]
SCRIPTS = [*TRIO, "gridworld_qlearning.py", "mountaincar_env.py", "reinforce_parallel.py"]
USER_ENV = dict(os.environ)  # before a script that a test imports writes its settings into it

pytest.register_assert_rewrite("td_tests")
sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
os.environ.setdefault("XLA_FLAGS", "")  # or the first script imported would decide for all


@pytest.fixture
def td(request):
    """The script that the test file is named after."""
    return importlib.import_module(request.module.__name__.removeprefix("test_"))


@pytest.fixture(autouse=True)
def keep_signal_handlers():
    """A script's main handles Ctrl-C and SIGTERM in its own way."""
    of_pytest = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, of_pytest)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
