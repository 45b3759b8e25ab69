"""What the tests share. A test observes what a script drew and computes what must follow.

No test draws by itself: it asks which actions, episodes and batches there were, whatever the keys.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
TRIO = ["parallel_td.py", "replay_td.py", "epsilon_decay_td.py"]
LEARNERS = [*TRIO, "gridworld_qlearning.py", "reinforce_parallel.py"]
SCRIPTS = [*LEARNERS, "mountaincar_env.py"]
USER_ENV = dict(os.environ)  # before an imported script adds its settings

sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # compiles faster
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # reading the cache causes false alarms
cache = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # compile each program once
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache.name)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


def one_run(script, flags, **own):
    """Flags as a function of one run takes them: the first value of what is swept, or your own."""
    args = vars(script.parse_args(flags.split()))
    first = {name: values[0] for name, values in args.items() if isinstance(values, list)}
    return argparse.Namespace(**{**args, **first, **own})


def watch(monkeypatch, script, name):
    """Return a list that will hold (arrays that a function got, what it returned) of each call."""
    import jax

    calls, function = [], getattr(script, name)

    def watched(run, *arrays):
        result = function(run, *arrays)
        jax.debug.callback(lambda *call: calls.append(call), arrays, result, ordered=True)
        return result

    monkeypatch.setattr(script, name, watched)
    return calls
