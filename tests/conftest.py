"""What the tests share: the scripts, the flags of one run, and ways to watch what a script does.

environments.py has the environments in which they run.

The tests never draw random numbers for a script. They watch what the script drew, and compute what
must follow from it. Bounds on frequencies are at least five standard deviations wide, and a p-value
must exceed RARE, so that a test also passes after a change of the keys, or of the order in which
they are split.
"""

import importlib
import inspect
import os
import sys
import tempfile
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "tests" / "recipes"
PARALLEL, REPLAY, DECAY = TRIO = ["parallel_td.py", "replay_td.py", "epsilon_decay_td.py"]
GRID, REINFORCE, CAR = "gridworld_qlearning.py", "reinforce_parallel.py", "mountaincar_env.py"
PPO, PQN, DQN = "ppo.py", "pqn.py", "dqn.py"
NETWORKS = [PPO, PQN, DQN]  # in tests/recipes/
LEARNERS = [*TRIO, GRID, REINFORCE, *NETWORKS]
SCRIPTS = [*LEARNERS, CAR]

# The real-valued flags of each learner, which take several values: from 0 to 1, or positive.
FRACTIONS = {
    PARALLEL: ["--gamma", "--epsilon"],
    REPLAY: ["--gamma", "--epsilon", "--tau"],
    DECAY: ["--gamma", "--start-e", "--end-e", "--epsilon-decay", "--tau"],
    GRID: ["--learning-rate", "--gamma", "--epsilon"],
    REINFORCE: ["--gamma"],
    PPO: ["--gamma", "--gae-lambda", "--ent-coef"],
    PQN: ["--gamma", "--q-lambda", "--epsilon"],
    DQN: ["--gamma", "--start-e", "--end-e", "--epsilon-decay", "--tau"],
}
POSITIVE = {
    PARALLEL: ["--learning-rate", "--sigma"],
    REPLAY: ["--learning-rate", "--sigma"],
    DECAY: ["--learning-rate", "--sigma"],
    GRID: [],
    REINFORCE: ["--learning-rate"],
    PPO: ["--learning-rate", "--clip-coef"],
    PQN: ["--learning-rate"],
    DQN: ["--learning-rate"],
}
# The flags that are numbers of something, so integers of at least 1.
RUN = ["--num-seeds", "--num-intervals", "--num-envs", "--eval-episodes"]
STEPS = [*RUN, "--total-timesteps"]
BUFFER = ["--buffer-size", "--batch-size"]
EPOCHS = ["--num-steps", "--update-epochs", "--num-minibatches"]
COUNTS = {
    PARALLEL: [*STEPS, "--num-centers", "--num-steps"],
    REPLAY: [*STEPS, "--num-centers", *BUFFER],
    DECAY: [*STEPS, "--num-centers", *BUFFER],
    GRID: ["--num-seeds", "--num-intervals", "--total-timesteps", "--num-rows", "--num-columns"],
    REINFORCE: [*RUN, "--num-iterations", "--hidden-size"],
    PPO: [*STEPS, "--hidden-size", *EPOCHS],
    PQN: [*STEPS, "--hidden-size", *EPOCHS],
    DQN: [*STEPS, "--hidden-size", *BUFFER],
    CAR: ["--num-episodes", "--num-envs"],
}

RARE = 5e-7  # how probable it is to be five standard deviations off

sys.path[:0] = [str(ROOT), str(RECIPES)]
os.environ["JAX_NUM_CPU_DEVICES"] = "4"
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # also where there is a GPU; some tests count devices
# What tests compile runs for a moment: compile it quickly, with little optimization, and keep it.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
if version("jax").startswith("0.10."):  # jax 0.11 does not know this flag
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
CACHE = tempfile.TemporaryDirectory()
os.environ["JAX_COMPILATION_CACHE_DIR"] = CACHE.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
import jax
import numpy as np


def pytest_addoption(parser):
    parser.addoption("--script", help="test_probes.py: try this file, not the collection")
    parser.addoption("--flags", default="", help="test_probes.py: flags of that file")
    parser.addoption(
        "--on-policy",
        action="store_true",
        help="test_probes.py: values are those of the policy that explores",
    )


def pytest_configure(config):
    """Fail where an array is stored in one of another type: integers would cut rewards."""
    config.addinivalue_line("filterwarnings", "error:scatter inputs have incompatible types")


def path_of(script):
    """The path of a script: it is in the top folder, or in tests/recipes/."""
    return (RECIPES if script in NETWORKS else ROOT) / script


def load(script):
    """Import a script by the name of its file."""
    return importlib.import_module(script.removesuffix(".py"))


def one_run(script, flags="", **values):
    """Make what a function of one run takes as `run`: of swept flags, the first value.

    `values` are other ones: of flags, of the environment `env`, or of its parameters `env_params`.
    """
    args = script.parse_args(flags.split())
    run = {name: x[0] if isinstance(x, list) else x for name, x in vars(args).items()}
    if hasattr(script, "make_env"):
        run["env"], run["env_params"] = script.make_env(args)
    if unknown := values.keys() - run.keys():
        raise TypeError(f"{script.__name__} has no {unknown}")
    return SimpleNamespace(**{**run, **values})


def jit(function, run):
    """Compile function(run, ...) for one run."""
    return jax.jit(partial(function, run))


def train(script, run, state):
    """Train from a state on. Return the last state, and what each progress line shows."""
    train_interval, lines = jit(script.train_interval, run), []
    for _ in range(run.num_intervals):
        state, metrics = train_interval(state)
        lines.append(metrics)
    jax.effects_barrier()
    return state, lines


def watch(monkeypatch, owner, name, names="", ordered=True):
    """Return a list that gets a record of each call of a function of a script (or of a class).

    A record has what was returned as `out`, and the arguments by name, all as NumPy arrays. Names
    for the last arguments can be given, so that a test does not depend on those of the script. Wait
    for the last record by jax.effects_barrier(). Under vmap, say ordered=False: there is a record
    for each of the many, in any order.
    """
    records, function = [], getattr(owner, name)
    signature = inspect.signature(function)

    def plain(leaf):  # NumPy has no typed keys
        is_key = hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(leaf) if is_key else leaf

    def watched(*args, **kwargs):
        out = function(*args, **kwargs)
        named = dict(signature.bind(*args, **kwargs).arguments)
        if names:
            last = list(named.values())[-len(names.split()) :]
            named = dict(zip(names.split(), last, strict=True))
        arrays = {name: array for name, array in named.items() if name not in ("run", "self")}
        jax.debug.callback(
            lambda arrays: records.append(SimpleNamespace(**jax.device_get(arrays))),
            jax.tree.map(plain, {**arrays, "out": out}),
            ordered=ordered,
        )
        return out

    monkeypatch.setattr(owner, name, watched)
    return records


def places_of(record):
    """The number of each transition of each update (U, B), in the order in which they were seen.

    A transition is found by the observation in which it began: no two began in the same one.
    """
    rows = record.seen.obs.reshape(record.seen.reward.size, -1)
    number = {row.tobytes(): i for i, row in enumerate(rows)}
    assert len(number) == len(rows)
    return np.array([[number[obs.tobytes()] for obs in x.batch.obs] for x in record.updates])


def assert_batches_are_as_they_were_seen(record):
    """Each transition of each update is one of those that were seen, in all its fields."""
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), record.seen)
    for update, places in zip(record.updates, places_of(record), strict=True):
        for column, seen in zip(update.batch, rows, strict=True):
            np.testing.assert_array_equal(column, seen[places])


def halves(records):
    """Divide a list of what two equal intervals did."""
    middle = len(records) // 2
    return records[:middle], records[middle:]


def assert_lines_show_returns(lines, rewards, ended):
    """Lines of two equal intervals show the mean return, and the number, of episodes that ended.

    Given the rewards, and where an episode ended, (N,) for each step.
    """
    total = np.zeros(len(ended[0]))
    for line, steps in zip(lines, halves([*zip(rewards, ended, strict=True)]), strict=True):
        returns = []
        for reward, over in steps:
            total += reward
            returns += total[over].tolist()
            total[over] = 0
        np.testing.assert_allclose(line["returns"], np.mean(returns), rtol=1e-5)
        assert line["episodes"] == len(returns)


def assert_independent(one, other, probabilities):
    """Two arrays of actions agree as often as independent draws: the sum of p^2.

    They may be the same actions, moved by some steps. Then an action stands in two pairs, and two
    such pairs agree with a probability of the sum of p^3.
    """
    p = np.array(probabilities)
    expected, both = np.sum(p**2), np.sum(p**3)
    variance = expected * (1 - expected) + 2 * (both - expected**2)
    agreement = np.mean(np.asarray(one) == np.asarray(other))
    assert abs(agreement - expected) < 5 * np.sqrt(variance / np.size(one))
