"""What the tests share: the scripts, the flags of one run, and a way to watch what a function does.

The tests never draw random numbers for a script. They watch what the script drew, and compute what
must follow from it. Bounds on frequencies are at least five standard deviations wide, so that a
test also passes after a change of the keys, or of the order in which they are split.
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
# What tests compile runs for a moment: compile it quickly, with little optimization, and keep it.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
if version("jax").startswith("0.10."):  # jax 0.11 does not know this flag
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
CACHE = tempfile.TemporaryDirectory()
os.environ["JAX_COMPILATION_CACHE_DIR"] = CACHE.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # no word when a program comes from the cache
import jax
import pytest
from diffs import changed_text


def load(script):
    """Import a script by the name of its file."""
    return importlib.import_module(script.removesuffix(".py"))


def changed(script, *diffs, **names):
    """Import a copy of a script, changed by diffs. Names given, as a class, are globals of it."""
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
    and cannot be watched in order: with ordered=False, there is a record for each of the many, in
    any order.
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


def refuse_to_train(*_):
    """Stands in for `describe`, which describes the first progress line: nothing may be trained."""
    pytest.fail("it was trained")  # raises what `main` does not catch, unlike AssertionError


def is_key(leaf):
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


# Some tests wait for programs, as a user runs them. `in_background` makes a function that runs one.
# Its `start` puts it into a queue, which is worked off beside the tests; a call waits for its end.
# A test says @pytest.mark.starts(program=...), so that its program is started before all tests.
QUEUE = ThreadPoolExecutor(1)  # one program at a time, because the tests need the other core


def in_background(function):
    """Make a function that can `start` beside the tests. A call waits for what it returns."""

    @cache
    def start(*args):
        return QUEUE.submit(function, *args)

    def wait(*args):
        return start(*args).result()

    wait.start = start
    return wait


def pytest_configure(config):
    config.addinivalue_line("markers", "starts(program): is started before the first test")


@pytest.fixture(scope="session", autouse=True)
def programs(request):
    """Start the programs of all selected tests. At the end, drop those that have not begun."""
    global QUEUE
    items = request.session.items
    smoke = [item for item in items if item.module.__name__ == "test_smoke"]
    if smoke == items:
        QUEUE = ThreadPoolExecutor(2)  # no other test needs a core
    for item in items:
        for mark in item.iter_markers("starts"):
            mark.kwargs["program"].start()
    for item in smoke:  # they come last, and do not know conftest.py
        if not hasattr(item.module.run, "start"):
            item.module.run = in_background(item.module.run)
        item.module.run.start(item.callspec.params["script"])
    yield
    QUEUE.shutdown(wait=False, cancel_futures=True)
