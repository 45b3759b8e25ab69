"""What the tests share: the scripts can be imported, as a user's shell would run them."""

import importlib
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TRIO = ["parallel_td.py", "replay_td.py", "epsilon_decay_td.py"]
SCRIPTS = [*TRIO, "gridworld_qlearning.py", "mountaincar_env.py", "reinforce_parallel.py"]
USER_ENV = dict(os.environ)  # copied before an imported script adds its settings

pytest.register_assert_rewrite("td_tests")
sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
os.environ.setdefault("XLA_FLAGS", "")  # or the first script imported would decide for all


@pytest.fixture
def td(request):
    """The script that the test file is named after."""
    return importlib.import_module(request.module.__name__.removeprefix("test_"))
