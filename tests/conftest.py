"""What the tests share: the scripts can be imported, as a user's shell would run them."""

import os
import signal
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(path.name for path in ROOT.glob("*.py"))
USER_ENV = dict(os.environ)  # before a script that a test imports writes its settings into it

sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
os.environ.setdefault(  # or the first script imported would decide for all
    "XLA_FLAGS", "--xla_backend_optimization_level=1 --xla_cpu_use_fusion_emitters=false"
)


@pytest.fixture(autouse=True)
def keep_ctrl_c():
    """A script's main listens to Ctrl-C in its own way."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)
