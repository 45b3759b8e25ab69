"""What the tests share. They observe what a script drew and compute what must follow."""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent
TRIO = ["parallel_td.py", "replay_td.py", "epsilon_decay_td.py"]
LEARNERS = [*TRIO, "gridworld_qlearning.py", "reinforce_parallel.py"]
SCRIPTS = [*LEARNERS, "mountaincar_env.py"]
USER_ENV = dict(os.environ)  # before jax and an imported script add their settings

sys.path.insert(0, str(ROOT))
os.environ["JAX_NUM_CPU_DEVICES"] = "2"
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # compiles faster
import jax


def one_run(script, flags, **own):
    """Flags as a function of one run takes them: the first value of what is swept, or your own."""
    args = vars(script.parse_args(flags.split()))
    first = {name: values[0] for name, values in args.items() if isinstance(values, list)}
    return argparse.Namespace(**{**args, **first, **own})


def jit(function, run):
    return jax.jit(partial(function, run))


def watch(monkeypatch, script, name, ordered=True):
    """Return a list that will hold (arrays that a function got, what it returned) of each call."""
    calls, function = [], getattr(script, name)

    def watched(run, *args, **more):
        out = function(run, *args, **more)
        got = *args, *more.values()
        jax.debug.callback(lambda *x: calls.append(jax.device_get(x)), got, out, ordered=ordered)
        return out

    monkeypatch.setattr(script, name, watched)
    return calls
