"""Each recipe runs on every script that its head names, and does what it promises.

What those for the grid world promise is in test_grid_recipes.py.
"""

import builtins
import dis
import importlib.util
import itertools
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_probes
from conftest import GRID, REINFORCE, ROOT, TRIO, jit, load, one_run, train, watch
from environments import Noise, pole_run, step_in_gymnasium
from test_reinforce_parallel import forward
from test_td import features

RECIPES = ROOT / "tests" / "recipes"
WIDTH = SimpleNamespace(sigma=0.5)  # of the features
FOLDER = tempfile.TemporaryDirectory()  # of the changed scripts
sys.path.append(str(RECIPES))
LOGGED = []  # what the recipe `logger` gives to Weights & Biases, which need not be installed
sys.modules["wandb"] = SimpleNamespace(init=dict, log=lambda means, step: LOGGED.append(means))
TD = "--num-intervals 2 --total-timesteps 640 --eval-episodes 2"
FLAGS = {
    GRID: "--num-intervals 2 --total-timesteps 4000 --plot x.png",
    REINFORCE: "--num-intervals 2 --num-iterations 4 --num-envs 2 --eval-episodes 2",
}


def scripts_of(recipe):
    """The scripts that a recipe says it is made for. The first one is the one in its diff."""
    sentence = re.search(r"^Made for [^:]*?\.$", (RECIPES / f"{recipe}.patch").read_text(), re.M)
    return re.findall(r"\w+\.py", sentence[0])


PATCHES = sorted(path.stem for path in RECIPES.glob("*.patch"))
SINGLE = [(script, recipe) for recipe in PATCHES for script in scripts_of(recipe)]
COMBINATIONS = []  # (script, recipe, recipe) in the rows of the index. Others are not promised.
INDEX = (RECIPES / "README.md").read_text().replace("| grid world |", f"| `{GRID}` |")
for script, first, second in re.findall(r"^\| `(.+?)` \| (`.+?), then (.+?) \|", INDEX, re.M):
    pairs = itertools.product(re.findall(r"\w+(?=`)", first), re.findall(r"\w+(?=`)", second))
    COMBINATIONS += [(script, *pair) for pair in pairs]
PAIRED = {(script in TRIO, recipe) for script, *pair in COMBINATIONS for recipe in pair}


@cache
def changed(*recipes, script=None):
    """Copy a script into an empty folder, change it there as a user would, and import it."""
    script = script or scripts_of(recipes[0])[0]
    copy = Path(tempfile.mkdtemp(dir=FOLDER.name)) / script
    shutil.copy(ROOT / script, copy)
    for recipe in recipes:
        patch = RECIPES / f"{recipe}.patch"
        first = script == scripts_of(recipe)[0]
        command = ["git", "apply", "--verbose", patch] if first else ["patch", "-F0", script, patch]
        process = subprocess.run(command, cwd=copy.parent, capture_output=True, text=True)
        if process.returncode:
            pytest.fail(f"{recipe}, {script}:\n{process.stderr}{process.stdout}", pytrace=False)
    spec = importlib.util.spec_from_file_location("_".join([*recipes, copy.stem]), copy)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.COMPILER_OPTIONS = {}  # compiles faster
    return module


def names_read(code):
    """The global names that compiled code reads, with those of the functions in it."""
    names = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    return names.union(*(names_read(x) for x in code.co_consts if hasattr(x, "co_consts")))


@pytest.mark.parametrize("names", [*SINGLE, *COMBINATIONS], ids=" ".join)
def test_a_changed_script_runs(names, monkeypatch, tmp_path):
    script, *recipes = names
    module = changed(*recipes, script=script)
    code = compile(Path(module.__file__).read_text(), script, "exec")
    assert names_read(code) <= {*vars(module), *vars(builtins)}  # also where nothing runs below
    with pytest.raises(SystemExit, match="0"):
        module.main(["--help"])
    if (script in TRIO, *recipes) in PAIRED:
        return  # it runs below beside another recipe, in this script or one with the same `main`
    monkeypatch.setattr(gymnax, "make", lambda _: (Noise(), Noise.default_params))
    monkeypatch.chdir(tmp_path)
    flags = f"{FLAGS.get(script, TD)} --save x.npz"
    if "resume" in recipes:
        flags += " --resume state.npz"
    module.main(flags.split())
    assert len(np.load("x.npz")["curves.timesteps"]) == 2


@pytest.mark.parametrize("probe", [test_probes.Memory, test_probes.Endless])
def test_targets_of_three_steps_find_the_values_of(probe):
    test_probes.learn(changed("n_step_returns"), probe, "--n-step 3 --num-steps 5")


def test_a_return_of_three_steps_ends_with_its_episode():
    one_step, rewards = jnp.array([10, 20, 30, 40.0]), jnp.ones(4)
    run = SimpleNamespace(n_step=3, gamma=0.5)
    targets = partial(changed("n_step_returns").n_step_targets, run, one_step, rewards)
    never, second = jnp.zeros(4, bool), jnp.array([0, 1, 0, 0], bool)
    assert targets(never).tolist() == [9, 11.5, 21, 40]  # 9 = 1 + (1 + 30 / 2) / 2
    assert targets(second).tolist() == [11, 20, 21, 40]


def update(script, flags, monkeypatch, watched, **fields):
    """Make the first update, in which no pole falls, from a state with these fields.

    Return the only call of the function that is watched, and the states before and after.
    """
    run = one_run(script, f"{flags} --gamma 0.8")
    before = script.init_state(run)._replace(**fields)
    calls = watch(monkeypatch, script, watched)
    after, _ = jit(script.train_step, run)(before, None)
    jax.effects_barrier()
    return calls[0], before, after


def test_double_q_learning_takes_the_averaged_value_of_the_newest_best_action(monkeypatch):
    """The only center is at 0. Action 0 is the newest best one, and action 1 the averaged one."""
    script, flags = changed("double_q_learning"), "--num-centers 1 --sigma 0.5"
    fields = {"weights": jnp.array([[1.0], [0]]), "target_weights": jnp.array([[2.0], [5]])}
    loss, _, _ = update(script, flags, monkeypatch, "td_loss", centers=jnp.zeros((4, 1)), **fields)
    phi = features(WIDTH, np.zeros((4, 1)), loss.batch.next_obs)[:, 0]
    np.testing.assert_allclose(loss.targets, 1 + 0.8 * 2 * phi, rtol=1e-5)


WEIGHTS = np.array([[1.0, 3.0, 2.0], [2.0, 1.0, 3.0]])  # of two actions and three centers


def test_the_full_gradient_is_that_of_the_squared_td_error(monkeypatch):
    script, flags = changed("full_gradient"), "--num-centers 3 --num-envs 5 --sigma 0.5"
    monkeypatch.setattr(script, "optimizer", lambda run: optax.sgd(1.0))
    weights = jnp.array(WEIGHTS)
    step, before, after = update(script, flags, monkeypatch, "vector_step", weights=weights)
    _, (batch, _) = step.out
    gradient = np.zeros((2, 3))
    phi, next_phi = (features(WIDTH, before.centers, x) for x in (batch.obs, batch.next_obs))
    for i, action in enumerate(batch.action):
        best = np.argmax(WEIGHTS @ next_phi[i])
        error = 1 + 0.8 * WEIGHTS[best] @ next_phi[i] - WEIGHTS[action] @ phi[i]
        gradient[best] += 0.8 * error * next_phi[i] / 5
        gradient[action] -= error * phi[i] / 5
    np.testing.assert_allclose(after.weights, WEIGHTS - gradient, rtol=1e-4)


def test_a_state_activates_the_tile_of_each_tiling_that_it_is_in():
    """Two tilings of the car's states. Each has 5 * 5 tiles, since offsets move 4 by up to one."""
    script = changed("tile_coding")
    run = one_run(script, "--env-id MountainCar-v0 --num-tilings 2 --num-tiles 4")
    offsets = jnp.array([[0.0, 0.75], [0.0, 0.5]])  # of positions, of speeds
    q_values = partial(jit(script.q_values, run), offsets, jnp.arange(150.0).reshape(3, 2, 25))
    obs = jnp.array([-0.49 * 1.2, 0.6 * 0.07])  # tiles 1.02 and 3.2; 1.77 and 3.7
    assert q_values(obs).tolist() == [8 + 33, 58 + 83, 108 + 133]
    obs = jnp.array([0.51 * 1.2, -2 * 0.07])  # 3.02 and -2; 3.77 and -1.5
    assert q_values(obs).tolist() == [15 + 40, 65 + 90, 115 + 140]


def test_semi_gradient_sarsa_learns_the_value_of_the_action_that_is_taken_next(monkeypatch):
    script, weights = changed("semi_gradient_sarsa"), jnp.array(WEIGHTS)
    flags = "--num-centers 3 --num-envs 50 --num-steps 2 --epsilon 0.5 --sigma 0.5"
    loss, state, after = update(script, flags, monkeypatch, "td_loss", weights=weights)
    taken_next = np.append(loss.batch.action[50:], after.action)  # 50 first steps, 50 second ones
    next_q = features(WIDTH, state.centers, loss.batch.next_obs) @ WEIGHTS.T  # (B, A)
    assert 10 < np.sum(taken_next != next_q.argmax(axis=1)) < 45  # a quarter
    expected = 1 + 0.8 * next_q[np.arange(100), taken_next]
    np.testing.assert_allclose(loss.targets, expected, rtol=1e-5)


def test_an_actor_critic_learns_from_td_errors_of_one_step(monkeypatch):
    script, rate = changed("actor_critic"), 0.1
    monkeypatch.setattr(script, "optimizer", lambda run: optax.sgd(rate))
    run = pole_run(script, "--num-iterations 30 --num-intervals 1 --value-factor 2", gamma=0.8)
    losses, num_fell = watch(monkeypatch, script, "actor_critic_loss"), 0
    train(script, run, script.init_state(run))
    for loss, after in itertools.pairwise(losses):
        values = forward(loss.params["value"], loss.obs)[:, 0]
        for i, action in enumerate(loss.action):
            next_obs, fell = step_in_gymnasium(loss.obs[i], action)
            next_value = 0 if fell else forward(loss.params["value"], next_obs)[0]
            expected = 2 - 3 * action + 0.8 * next_value - values[i]  # also at the time limit
            assert loss.td_errors[i] == pytest.approx(expected, rel=1e-3, abs=1e-4)
            num_fell += fell
        # The derivative of v by its last bias is 1. That of log pi is 1 - pi for the action taken.
        v1, v0 = after.params["value"]["b1"], loss.params["value"]["b1"]
        assert v1 - v0 == pytest.approx(2 * rate * loss.td_errors.mean(), rel=1e-3, abs=1e-4)
        pi = jax.nn.softmax(forward(loss.params, loss.obs))
        expected = rate * np.mean(loss.td_errors[:, None] * (np.eye(2)[loss.action] - pi), axis=0)
        change = after.params["b1"] - loss.params["b1"]
        np.testing.assert_allclose(change, expected, rtol=1e-2, atol=1e-5)
    assert num_fell > 5


@pytest.mark.parametrize("probe", [test_probes.Light, test_probes.Endless])
def test_an_actor_critic_finds_the_values_of(probe):
    test_probes.criticize(changed("actor_critic"), probe)


def test_a_deep_q_network_learns_from_the_values_of_the_averaged_one(monkeypatch):
    script, flags = changed("dqn"), "--hidden-size 5"
    weights = script.init_state(one_run(script, flags)).weights
    averaged = {name: 2 * array + i for i, (name, array) in enumerate(weights.items())}
    loss, _, _ = update(script, flags, monkeypatch, "td_loss", target_weights=averaged)
    hidden = loss.batch.next_obs / [2.4, 3.0, 0.2, 3.0]  # (B, D)
    for i in range(2):
        hidden = hidden @ averaged[f"w{i}"] + averaged[f"b{i}"]  # (B, H)
        hidden = hidden / (1 + np.exp(-hidden))
    best = np.max(hidden @ averaged["w2"] + averaged["b2"], axis=1)
    np.testing.assert_allclose(loss.targets, 1 + 0.8 * best, rtol=1e-4)


def test_the_last_greedy_returns_are_those_of_the_evaluation():
    results = changed("greedy_returns").main(f"{TD} --num-seeds 3".split())
    last = results["curves"]["greedy_return"][-1]
    np.testing.assert_array_equal(last, results["learned"]["greedy_return"].mean(axis=1))


def test_the_logger_gets_means_of_each_setting():
    flags = f"{TD} --num-intervals 1 --epsilon 0.1 1 --num-seeds 3"
    returns = changed("logger").main(flags.split())["curves"]["returns"]
    assert {"returns, epsilon 0.1": pytest.approx(returns[0, :3].mean())} in LOGGED
    assert {"returns, epsilon 1.0": pytest.approx(returns[0, 3:].mean())} in LOGGED


def test_a_run_that_was_stopped_and_resumed_equals_one_that_was_not(tmp_path, monkeypatch):
    monkeypatch.setattr(gymnax, "make", lambda _: (Noise(), Noise.default_params))
    script = changed("resume")
    flags = f"{TD} --num-envs 16 --num-seeds 5 --resume {tmp_path}/"
    whole = script.main(f"{flags}whole.npz --num-intervals 4".split())

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop = Mock(side_effect=[None, None, None, KeyboardInterrupt])  # by the line of step 320
        patch.setattr(script, "print", stop, raising=False)
        script.main(f"{flags}stopped.npz --num-intervals 4".split())
    shutil.copy(tmp_path / "stopped.npz", tmp_path / "other.npz")  # after 160 steps
    resumed = script.main(f"{flags}stopped.npz --num-intervals 4".split())
    resumed["curves"]["seconds"] = whole["curves"]["seconds"]
    for part in "learned", "curves":
        jax.tree.map(np.testing.assert_array_equal, resumed[part], whole[part])
    other = script.main(f"{flags}other.npz --num-intervals 8".split())
    assert other["curves"]["timesteps"][:, 0].tolist() == [160, *range(240, 641, 80)]
    jax.tree.map(np.testing.assert_array_equal, other["learned"], whole["learned"])


def test_ppo_with_one_epoch_is_reinforce():
    learned = []
    for script, flags in (load(REINFORCE), ""), (changed("ppo"), "--update-epochs 1"):
        run = one_run(script, f"--num-intervals 1 --num-envs 4 --num-iterations 3 {flags}")
        state, _ = train(script, run, script.init_state(run))
        learned.append(state.params)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6), *learned)


# Two actions of equal probability, 1 / 2. The derivative of the log of the first one is 1 / 2.
CASES = [(1.1, 3.0, -1.65), (1.3, 3.0, 0), (1.3, -3.0, 1.95), (0.7, -3.0, 0), (0.7, 3.0, -1.05)]


@pytest.mark.parametrize("ratio, advantage, expected", CASES)
def test_ppo_has_no_gradient_beyond_the_bounds_to_the_good_side(ratio, advantage, expected):
    script, one = changed("ppo"), jnp.zeros((1, 1))
    params = {"w0": one, "b0": jnp.zeros(1), "w1": jnp.zeros((1, 2)), "b1": jnp.zeros(2)}
    steps = script.Step(one[None], one.astype(int), one, one == 0, None)
    old = one + jnp.log(0.5 / ratio)
    loss = partial(script.policy_loss, one_run(script, clip_coef=0.2))
    gradient = jax.grad(loss)(params, steps, one + advantage, old)["b1"]
    np.testing.assert_allclose(gradient, [expected, -expected], rtol=1e-5)


def test_reinforce_with_a_baseline_and_entropy_finds_a_softmax_and_its_value():
    """The best policy for rewards of -1, 0 and 1, plus its entropy, is a softmax of the rewards.

    The probe ends after one of ten steps, so nine are padding.
    """
    script, env = changed("baseline_and_entropy"), test_probes.Choice()
    flags = "--num-intervals 1 --num-envs 100 --num-iterations 100 --learning-rate 0.1"
    run = one_run(script, flags, env=env, env_params=env.default_params, ent_coef=1.0)
    state, _ = jit(script.train_interval, run)(script.init_state(run))
    policy = jax.nn.softmax(script.network(state.params, jnp.zeros(1)))
    rewards = np.array([-1, 0, 1])
    expected = np.exp(rewards) / np.exp(rewards).sum()
    np.testing.assert_allclose(policy, expected, atol=0.05)
    value = script.value(state.params, jnp.zeros(1))
    np.testing.assert_allclose(value, expected @ rewards, atol=0.1)


def test_a_learner_learns_an_environment_of_ones_own(monkeypatch, tmp_path):
    """As a program, whose name may be followed by flags of the script."""
    monkeypatch.setattr(sys, "argv", ["", "--num-intervals", "2", "--save", f"{tmp_path}/x.npz"])
    runpy.run_path(str(RECIPES / "own_environment.py"), run_name="__main__")
    # Random actions have a return of about -75. The best possible is -8.6.
    assert np.load(tmp_path / "x.npz")["learned.greedy_return"].mean() > -35


@pytest.fixture
def highway():
    """It needs a package that is in no requirements: see the first lines of highway.py."""
    pytest.importorskip("highjax", reason="pip install --ignore-requires-python --no-deps highjax")
    return importlib.import_module("highway")


def test_a_crash_terminates_and_the_time_limit_truncates(highway):
    """All else is what HighJax returns. The last observation of an episode is in `info`."""
    env, key = highway.Highway(), jax.random.key(0)
    # With both limits at 30 s, an adapter that passes on `done` would terminate at the limit.
    params = env.default_params.replace(inner=env.default_params.inner.replace(duration=30.0))
    assert env.inner.n_sub_ts_per_t * params.inner.seconds_per_sub_t == 1  # a step is a second
    reset, step = jax.jit(env.reset), jax.jit(env.step)
    inner_reset, inner_step = jax.jit(env.inner.reset), jax.jit(env.inner.step_env)
    for action, crashes in (3, True), (4, False):  # faster, slower
        obs, state = reset(key, params)
        inner_obs, inner_state = inner_reset(key, params.inner)
        np.testing.assert_allclose(obs, highway.SCALE * inner_obs, rtol=1e-5)
        ended, length = False, 0
        while not ended:
            _, state, reward, terminated, truncated, info = step(key, state, action, params)
            inner = inner_step(key, inner_state, action, params.inner)
            inner_obs, inner_state, inner_reward, *_ = inner
            last_obs = highway.SCALE * inner_obs
            np.testing.assert_allclose(info["final_observation"], last_obs, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(reward, inner_reward, rtol=1e-5)
            length, ended = length + 1, terminated | truncated
        assert (terminated, truncated, inner_state.crashed) == (crashes, not crashes, crashes)
        assert (length < 30) == crashes
        assert state.time == 0  # the next episode has begun
