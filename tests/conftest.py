"""What the tests share: the scripts, the flags of one run, and a way to watch what a function does.

The tests never draw random numbers for a script. They watch what the script drew, and compute what
must follow from it. Bounds on frequencies are five standard deviations or as wide, so that a test
also passes after a change of the keys, or of the order in which they are split.
"""

import gc
import importlib
import inspect
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace

ROOT = Path(__file__).parent.parent
TRIO = ["parallel_td.py", "replay_td.py", "epsilon_decay_td.py"]
LEARNERS = [*TRIO, "gridworld_qlearning.py", "reinforce_parallel.py"]
SCRIPTS = [*LEARNERS, "mountaincar_env.py"]
PARALLEL, REPLAY, DECAY, GRID, REINFORCE, CAR = SCRIPTS

sys.path.insert(0, str(ROOT))
os.environ["JAX_NUM_CPU_DEVICES"] = "4"
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # also where there is a GPU; some tests count devices
gc.set_threshold(200_000)  # rarely: looking for garbage took a twentieth of the time
# Programs of tests are short: compile them fast rather than well, and the same one once.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
if version("jax").startswith("0.10."):  # jax 0.11 does not know this flag
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
CACHE = tempfile.TemporaryDirectory()
os.environ["JAX_COMPILATION_CACHE_DIR"] = CACHE.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # no word when a program comes from the cache
import jax
from diffs import changed_text


def load(script):
    """Import a script by the name of its file."""
    return importlib.import_module(script.removesuffix(".py"))


def changed(script, *diffs, **names):
    """Import a changed copy of a script, which also knows the names given, as a class of yours."""
    module = ModuleType("changed")
    vars(module).update(names)
    exec(compile(changed_text(script, *diffs), f"changed {script}", "exec"), vars(module))
    module.COMPILER_OPTIONS = {}  # compiles faster
    return module


def one_run(script, flags="", **own):
    """Flags as a function of one run takes them: of swept flags the first value, or your own."""
    args = script.parse_args(flags.split())
    first = {name: getattr(args, name)[0] for name in args.swept}
    return script.make_run(args, {**first, **own})


def jit(function, run):
    """Compile function(run, ...) for one run."""
    return jax.jit(partial(function, run))


def watch(monkeypatch, owner, name, ordered=True):
    """Return a list that gets a record of each call of a function of a script (or of a class).

    A record has the arguments by name, and what was returned as `out`, all as NumPy arrays. Wait
    for the last one by jax.effects_barrier(). A function that is vmapped is called once for many,
    and cannot be watched in order: with ordered=False, there is a record for each of the many.
    """
    records, function = [], getattr(owner, name)
    signature = inspect.signature(function)

    def plain(leaf):  # NumPy has no typed keys
        return jax.random.key_data(leaf) if is_key(leaf) else leaf

    def watched(*args, **kwargs):
        out = function(*args, **kwargs)
        named = dict(signature.bind(*args, **kwargs).arguments)
        arrays = {name: array for name, array in named.items() if name not in ("run", "self")}
        arrays = jax.tree.map(plain, {**arrays, "out": out})
        jax.debug.callback(
            lambda arrays: records.append(SimpleNamespace(**jax.device_get(arrays))),
            arrays,
            ordered=ordered,
        )
        return out

    monkeypatch.setattr(owner, name, watched)
    return records


def is_key(leaf):
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


POOL = ThreadPoolExecutor(1)  # one thing at a time: the tests need the other core


def in_background(function):
    """Run a function beside the tests from `start` on. A call waits for what it returns."""

    @cache
    def start(*args):
        return POOL.submit(function, *args)

    def wait(*args):
        return start(*args).result()

    wait.start = start
    return wait


def pytest_configure(config):
    config.addinivalue_line("markers", "starts(program): starts it before the first test")


def pytest_collection_finish(session):
    """Start what tests wait for, commands for example, so that it runs beside the other tests."""
    if session.config.option.collectonly:
        return
    smoke = [item for item in session.items if item.module.__name__ == "test_smoke"]
    if len(smoke) == len(session.items):
        global POOL
        POOL = ThreadPoolExecutor(2)  # there are no other tests
    for item in smoke:
        if not hasattr(item.module.run, "start"):
            item.module.run = in_background(item.module.run)
        item.module.run.start(item.callspec.params["script"])
    for item in session.items:
        for mark in item.iter_markers("starts"):
            mark.kwargs["program"].start()
