"""Each recipe still applies to its scripts, runs, and does what it promises.

What it promises is worked out here by hand, in NumPy or by Gymnasium.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_probes
from conftest import ROOT, one_run, watch

RECIPES = ROOT / "tests" / "recipes"
PATCHES = sorted(path.stem for path in RECIPES.glob("*.patch"))
FOLDER = tempfile.TemporaryDirectory()  # of the changed scripts
FEW = "--num-intervals 2 --eval-episodes 2 --total-timesteps 640"  # steps
TD = f"{FEW} --num-centers 7"


def scripts_of(recipe):
    """The scripts that a recipe says it applies to. The first one is the one in its diff."""
    sentence = re.search(r"^Made for [^:]*?\.$", (RECIPES / f"{recipe}.patch").read_text(), re.M)
    return re.findall(r"\w+\.py", sentence[0])


def apply(recipe, script):
    """Copy a script into an empty folder, and change it there as a user would. Return its path."""
    patch = RECIPES / f"{recipe}.patch"
    copy = Path(tempfile.mkdtemp(dir=FOLDER.name)) / script
    shutil.copy(ROOT / script, copy)
    first = script == scripts_of(recipe)[0]
    command = ["git", "apply", "--verbose", patch] if first else ["patch", "-F0", script, patch]
    process = subprocess.run(command, cwd=copy.parent, capture_output=True, text=True)
    if process.returncode:
        said = process.stderr + process.stdout
        pytest.fail(f"{patch.name} no longer applies to {script}:\n{said}", pytrace=False)
    return copy


@cache
def changed(recipe):
    """Import a copy of a script that was changed by a recipe."""
    path = apply(recipe, scripts_of(recipe)[0])
    spec = importlib.util.spec_from_file_location(f"{recipe}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.COMPILER_OPTIONS = {}  # compiles faster
    return module


@pytest.mark.parametrize("recipe", PATCHES)
def test_applies_to_the_scripts_that_it_names(recipe):
    for script in scripts_of(recipe):
        compile(apply(recipe, script).read_text(), script, "exec")


@pytest.mark.parametrize("probe", [test_probes.Memory, test_probes.Endless])
def test_targets_of_three_steps_find_the_values_of(probe):
    test_probes.learn(changed("n_step_returns"), probe, "--n-step 3 --batch-size 40")


def test_a_return_of_three_steps_ends_with_its_episode():
    """Two environments. In the second one, an episode ends after two steps."""
    one_step = jnp.array([[10, 10], [20, 20], [30, 30], [40, 40.0]])  # targets
    ended = jnp.array([[0, 0], [0, 1], [0, 0], [0, 0]], bool)
    run = SimpleNamespace(n_step=3, gamma=0.5)
    targets = changed("n_step_returns").n_step_targets(run, one_step, jnp.ones((4, 2)), ended)
    assert targets.T.tolist() == [[9, 11.5, 21, 40], [11, 20, 21, 40]]  # 9 = 1 + (1 + 30 / 2) / 2


def test_double_q_learning_takes_the_averaged_value_of_the_newest_best_action(monkeypatch):
    """The only center is at 0. Action 0 is the newest best one, and action 1 the averaged one."""
    script = changed("double_q_learning")
    run = one_run(script, "--num-centers 1")
    state = jax.jit(partial(script.init_state, run))()
    newest = {"centers": jnp.zeros((4, 1)), "weights": jnp.array([[1.0], [0.0]])}
    averaged = {"centers": jnp.zeros((4, 1)), "weights": jnp.array([[2.0], [5.0]])}
    losses = watch(monkeypatch, script, "td_loss")
    train_step = jax.jit(partial(script.train_step, run))
    train_step(state._replace(params=newest, target_params=averaged), None)
    jax.effects_barrier()
    next_obs = losses[0].batch.next_obs / [2.4, 3.0, 0.2, 3.0]  # no pole falls in the first step
    phi = np.exp(-np.sum(next_obs**2, axis=1) / (2 * 0.5**2))
    np.testing.assert_allclose(losses[0].targets, 1 + 0.99 * 2 * phi, rtol=1e-5)


def test_expected_sarsa_learns_the_mean_value_of_the_next_action():
    script = changed("expected_sarsa")
    run = one_run(script, epsilon=0.2, learning_rate=0.5, gamma=0.9)
    table = np.random.default_rng(0).normal(size=(8, 12, 4))
    table[4, 5] = [2.0, 3.0, 5.0, 1.0]  # the best action, 2, leads to cell (4, 4)
    table[4, 4] = [1.0, 2.0, 6.0, 3.0]  # 0.8 * 6 + 0.2 * 3 = 5.4
    state = script.TrainState(jax.random.key(0), jnp.array(table), jnp.array([4, 5]))
    state, _ = script.train_step(run, state, (jnp.array(False), 0.5))
    assert state.q_table[4, 5, 2] == pytest.approx(5.0 + 0.5 * (0.9 * 5.4 - 5.0))


def test_a_flax_network_is_learned_and_saved_under_joined_names(tmp_path):
    script = changed("flax_network")
    script.main(f"{FEW} --learning-rate 0.001 --save {tmp_path / 'x.npz'}".split())
    saved = np.load(tmp_path / "x.npz")
    assert saved["learned.params.params.Dense_0.kernel"].shape == (1, 4, 64)
    assert np.all(saved["learned.params.params.Dense_1.bias"] != 0)  # as it was before training


def test_the_last_greedy_returns_are_those_of_the_evaluation():
    results = changed("greedy_returns").main(f"{TD} --num-seeds 3".split())
    last = results["curves"]["greedy_return"][-1]
    np.testing.assert_array_equal(last, results["learned"]["greedy_return"].mean(axis=1))


def test_gravity_reaches_training_and_evaluation():
    """Nothing is learned: actions of training are random, and greedy ones push left."""
    flags = "--num-intervals 1 --num-centers 7 --eval-episodes 300 --num-envs 64"
    flags += " --total-timesteps 12800 --learning-rate 0 --epsilon 1 --gravity 9.8 200"
    results = changed("sweep_gravity").main(flags.split())
    weak, strong = results["curves"]["returns"][-1]  # means of 300 episodes or more
    assert weak > strong + 5
    weak, strong = results["learned"]["greedy_return"]  # of the same seed, so of the same starts
    assert not np.array_equal(weak, strong)


def test_the_logger_gets_means_of_each_setting(monkeypatch):
    logged = []
    wandb = SimpleNamespace(init=lambda **_: None, log=lambda means, step: logged.append(means))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    flags = f"{TD} --num-intervals 1 --epsilon 0.1 1 --num-seeds 3"
    returns = changed("logger").main(flags.split())["curves"]["returns"]
    assert {"returns epsilon 0.1": pytest.approx(returns[0, :3].mean())} in logged
    assert {"returns epsilon 1": pytest.approx(returns[0, 3:].mean())} in logged


def test_saved_weights_are_those_of_run_0_and_with_learning_rate_0_stay_so(tmp_path):
    weights = np.arange(28.0).reshape(2, 2, 7)  # of two runs
    params = {"learned.params.centers": np.ones((2, 4, 7)), "learned.params.weights": weights}
    np.savez(tmp_path / "x.npz", **params)
    flags = f"{FEW} --load {tmp_path / 'x.npz'} --learning-rate 0 --num-seeds 2"
    learned = changed("saved_weights").main(flags.split())["learned"]["params"]
    np.testing.assert_array_equal(learned["weights"], [weights[0], weights[0]])
    assert np.all(learned["centers"] == 1)


def test_clipping_and_adamw_do_not_see_the_centers():
    """Two steps. The second gradient of the weights is clipped, so moments and norms matter."""
    script = changed("clipping_and_adamw")
    run = one_run(script, TD, learning_rate=0.1, max_grad_norm=10.0, weight_decay=0.01)
    adamw = optax.adamw(optax.linear_schedule(0.1, 0.0, run.num_updates), weight_decay=0.01)
    expected, opt = optax.chain(optax.clip_by_global_norm(10.0), adamw), script.optimizer(run)
    weights, params = jnp.ones(5), {"centers": jnp.ones(3), "weights": jnp.ones(5)}
    expected_state, opt_state = expected.init(weights), opt.init(params)
    for gradient in jnp.array([1.0, 2.0, -1.0, 0.5, 1.0]), jnp.arange(5) * 20.0:
        step, expected_state = expected.update(gradient, expected_state, weights)
        grad = {"centers": jnp.full(3, 1e6), "weights": gradient}
        updates, opt_state = opt.update(grad, opt_state, params)
        np.testing.assert_allclose(updates["weights"], step, rtol=1e-5)
        assert not updates["centers"].any()


def test_reinforce_with_a_baseline_and_entropy_finds_a_softmax_and_its_value():
    """The best policy for rewards of -1, 0 and 1, plus its entropy, is a softmax of the rewards.

    The probe ends after one of ten steps, so nine are padding.
    """
    script, env = changed("baseline_and_entropy"), test_probes.Choice()
    flags = "--num-intervals 1 --num-envs 100 --num-iterations 100 --learning-rate 0.1"
    run = one_run(script, flags, env=env, env_params=env.default_params, ent_coef=1.0)
    state, _ = jax.jit(lambda: script.train_interval(run, script.init_state(run)))()
    policy = jax.nn.softmax(script.network(state.params, jnp.zeros(1)))
    rewards = np.array([-1, 0, 1])
    expected = np.exp(rewards) / np.exp(rewards).sum()
    np.testing.assert_allclose(policy, expected, atol=0.05)
    value = script.value(state.params, jnp.zeros(1))
    np.testing.assert_allclose(value, expected @ rewards, atol=0.1)


def test_moves_slip_with_the_probability_that_is_asked_for():
    script = changed("slippery_moves")
    run = one_run(script, "--grid-size 1 3 --eval-episodes 2000", slip=0.4)
    table = jnp.zeros((1, 3, 4)).at[:, :, 2].set(1.0)  # left, always
    state = script.TrainState(jax.random.key(0), table, jnp.array([0, 2]))
    # Left: 0.6 + 0.1; right: 0.1; up or down, into a wall: 0.2. So the mean steps to the goal are
    # s1 = 1 + 0.1 s2 + 0.2 s1 from cell 1, and s2 = 1 + 0.7 s1 + 0.3 s2 from cell 2.
    _, s2 = np.linalg.solve([[0.8, -0.1], [-0.7, 0.7]], [1, 1])
    steps_from_2 = jax.jit(partial(script.evaluate, run))(state)["greedy_steps"]
    assert float(steps_from_2) == pytest.approx(s2, abs=0.15)  # 3.06; five deviations


def test_random_pairs_are_a_run_each_with_each_seed():
    script = changed("random_pairs")
    flags = "--paired --learning-rate 0.1 0.2 0.3 --sigma 0.4 0.5 0.6 --num-seeds 2"
    runs, settings = script.make_runs(script.parse_args(flags.split()))
    np.testing.assert_array_equal(runs["learning_rate"], [0.1, 0.1, 0.2, 0.2, 0.3, 0.3])
    np.testing.assert_array_equal(runs["sigma"], [0.4, 0.4, 0.5, 0.5, 0.6, 0.6])
    np.testing.assert_array_equal(runs["gamma"], [0.99] * 6)
    np.testing.assert_array_equal(runs["seed"], [0, 1] * 3)
    assert list(settings.values()) == [slice(0, 2), slice(2, 4), slice(4, 6)]


def test_the_pendulum_steps_as_that_of_gymnasium():
    script = changed("pendulum")
    env = gymnasium.make("Pendulum-v1").unwrapped
    draws = np.random.default_rng(0)
    step = jax.jit(script.ENV.step_env)
    for angle, velocity, torque in draws.uniform([-9, -8, -3], [9, 8, 3], (50, 3)):
        env.state = np.array([angle, velocity])
        expected_obs, expected_reward, _, _, _ = env.step([torque])
        state = script.EnvState(angle=angle, velocity=velocity, time=0)
        obs, _, reward, terminated, _ = step(jax.random.key(0), state, torque, script.PARAMS)
        assert not terminated
        np.testing.assert_allclose(obs, expected_obs, atol=1e-5)
        assert reward == pytest.approx(expected_reward, rel=1e-4, abs=1e-4)


def test_a_learner_learns_an_environment_of_ones_own(monkeypatch):
    monkeypatch.syspath_prepend(RECIPES)
    module = importlib.import_module("own_environment")
    monkeypatch.setattr(module.replay_td, "COMPILER_OPTIONS", {})  # compiles faster
    env = module.OwnCar()
    state = module.EnvState(position=jnp.array(0.5), velocity=jnp.array(0.0), time=jnp.array(99))
    _, _, _, terminated, truncated, _ = env.step(jax.random.key(0), state, 1, env.default_params)
    assert (terminated, truncated) == (False, True)
    results = module.replay_td.main([*module.FLAGS.split(), "--num-intervals", "2"])
    # Random actions have a return of about -75. The best possible is -8.6.
    assert results["learned"]["greedy_return"].mean() > -35
