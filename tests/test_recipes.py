"""Each recipe still applies to its scripts, runs, and does what it promises.

What it promises is worked out here by hand, in NumPy or by Gymnasium.
"""

import importlib.util
import math
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
import pytest
from conftest import ROOT, load, one_run

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
    own = script == scripts_of(recipe)[0]
    command = ["git", "apply", "--verbose", patch] if own else ["patch", "-F0", script, patch]
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


def q_of(params, obs):
    """Values (..., A) of observations (..., 4) of CartPole-v1, in NumPy."""
    scaled = obs / np.array([2.4, 3.0, 0.2, 3.0])
    distance = np.sum((scaled[..., None] - params["centers"]) ** 2, axis=-2)
    return np.exp(-distance / (2 * 0.5**2)) @ params["weights"].T


def random_params(seed):
    """Parameters of 7 centers and 2 actions."""
    draws = np.random.default_rng(seed)
    return {"centers": draws.uniform(-1, 1, (4, 7)), "weights": draws.normal(0, 3, (2, 7))}


def learned_from(script, run, state, monkeypatch):
    """Make one update. Return the batch and the targets that the loss was given, in NumPy."""

    def loss(run, params, batch, targets):
        return jnp.sum(params["weights"]) * 0.0, {"batch": batch, "targets": targets}

    monkeypatch.setattr(script, "td_loss", loss)
    _, metrics = jax.jit(partial(script.train_step, run))(state, None)
    return jax.device_get((metrics["batch"], metrics["targets"]))


@pytest.mark.parametrize("recipe", PATCHES)
def test_applies_to_the_scripts_that_it_names_and_says_how(recipe):
    assert f"git apply tests/recipes/{recipe}.patch " in (RECIPES / f"{recipe}.patch").read_text()
    for script in scripts_of(recipe):
        compile(apply(recipe, script).read_text(), script, "exec")


def test_double_q_learning_takes_the_averaged_value_of_the_newest_best_action(monkeypatch):
    script = changed("double_q_learning")
    run = one_run(script, f"{TD} --buffer-size 100")
    newest, averaged = random_params(0), random_params(1)
    averaged["centers"] = newest["centers"]
    state = jax.jit(partial(script.init_state, run))()
    state = state._replace(params=newest, target_params=averaged)
    batch, targets = learned_from(script, run, state, monkeypatch)
    best = q_of(newest, batch.next_obs).argmax(axis=1)
    value = q_of(averaged, batch.next_obs)[np.arange(len(best)), best]
    expected = batch.reward + 0.99 * np.where(batch.terminated, 0, value)
    np.testing.assert_allclose(targets, expected, rtol=1e-4)
    assert np.any(best != q_of(averaged, batch.next_obs).argmax(axis=1))


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


def test_the_last_of_the_greedy_returns_at_every_line_is_that_of_the_evaluation():
    results = changed("greedy_returns").main(f"{TD} --num-seeds 3".split())
    last = results["curves"]["greedy_return"][-1]
    np.testing.assert_array_equal(last, results["learned"]["greedy_return"].mean(axis=1))


def test_gravity_reaches_training_and_evaluation():
    """Actions are random, since epsilon is 1. The greedy policy, without learning, pushes left."""
    flags = "--num-intervals 1 --num-centers 7 --eval-episodes 300 --num-envs 64"
    flags += " --total-timesteps 12800 --learning-rate 0 --epsilon 1 --gravity 9.8 200"
    results = changed("sweep_gravity").main(flags.split())
    weak, strong = results["curves"]["returns"][-1]  # means of 300 episodes or more
    assert weak > strong + 5
    weak, strong = results["learned"]["greedy_return"]  # of the same seed, so of the same starts
    assert not np.array_equal(weak, strong)


def test_the_logger_gets_means_of_each_setting_over_the_runs_that_ended_an_episode(monkeypatch):
    logged = {}
    wandb = SimpleNamespace(init=lambda **_: None)
    wandb.log = lambda means, step: logged.setdefault(step, {}).update(means)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    flags = "--num-envs 1 --batch-size 1 --total-timesteps 40 --num-intervals 2 --num-centers 7"
    flags += " --epsilon 0 1 --num-seeds 12 --eval-episodes 1"
    returns = changed("logger").main(flags.split())["curves"]["returns"]
    assert list(logged) == [20, 40]
    greedy, random = returns[0, :12], returns[0, 12:]  # of one run each
    known = ~np.isnan(random)
    assert 0 < known.sum() < 12  # in 20 random steps, some of the poles fall, but not all
    assert logged[20]["returns epsilon 0"] == pytest.approx(greedy.mean())
    assert logged[20]["returns epsilon 1"] == pytest.approx(random[known].mean())


def test_saved_weights_are_those_of_run_0_and_with_learning_rate_0_stay_so(tmp_path):
    params = {name: np.stack([x, x + 1]) for name, x in random_params(0).items()}  # of two runs
    np.savez(tmp_path / "x.npz", **{f"learned.params.{name}": x for name, x in params.items()})
    flags = f"{FEW} --load {tmp_path / 'x.npz'} --learning-rate 0 --num-seeds 2"
    learned = changed("saved_weights").main(flags.split())["learned"]["params"]
    for name, expected in params.items():
        for run in range(2):
            np.testing.assert_allclose(learned[name][run], expected[0], rtol=1e-6)


def test_clipping_and_adamw_do_not_see_the_centers():
    """Two steps. The second gradient of the weights has norm 50, so it is scaled to norm 10."""
    script = changed("clipping_and_adamw")
    run = one_run(script, TD, learning_rate=0.1, max_grad_norm=10.0, weight_decay=0.01)
    params = jax.tree.map(jnp.array, random_params(0))
    weights, m, v = np.array(params["weights"]), np.zeros((2, 7)), np.zeros((2, 7))
    opt = script.optimizer(run)
    opt_state = opt.init(params)
    for t, norm in enumerate([1.0, 50.0], start=1):
        gradient = np.random.default_rng(t).normal(size=(2, 7))
        gradient *= norm / np.linalg.norm(gradient)
        grad = {"centers": jnp.full((4, 7), 1e6), "weights": jnp.array(gradient)}
        updates, opt_state = opt.update(grad, opt_state, params)
        params = jax.tree.map(jnp.add, params, updates)
        clipped = gradient * min(1, 10 / norm)
        m, v = 0.9 * m + 0.1 * clipped, 0.999 * v + 0.001 * clipped**2
        step = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8) + 0.01 * weights
        weights = weights - 0.1 * (1 - (t - 1) / run.num_updates) * step
    np.testing.assert_allclose(params["weights"], weights, rtol=1e-4)
    np.testing.assert_array_equal(params["centers"], random_params(0)["centers"].astype("f"))


def test_n_step_targets_are_right_where_episodes_end_at_time_limits_and_at_the_end(monkeypatch):
    script = changed("n_step_returns")
    params = random_params(0)
    run = one_run(script, f"{TD} --n-step 3 --num-envs 8 --batch-size 160", epsilon=1.0)
    run.env_params = run.env_params.replace(theta_threshold_radians=0.08, max_steps_in_episode=5)
    state = jax.jit(partial(script.init_state, run))()._replace(params=params)
    batch, targets = learned_from(script, run, state, monkeypatch)
    obs, next_obs, reward, terminated = (
        array.reshape(20, 8, *array.shape[1:])
        for array in (batch.obs, batch.next_obs, batch.reward, batch.terminated)
    )
    ended = np.any(next_obs[:-1] != obs[1:], axis=-1)  # the next observation is of a new episode
    assert np.any(ended & terminated[:-1])
    assert np.any(ended & ~terminated[:-1])  # by the time limit
    for t, i in np.ndindex(20, 8):
        last = t
        while last < min(t + 2, 19) and not ended[last, i]:
            last += 1
        expected = sum(0.99 ** (k - t) * reward[k, i] for k in range(t, last + 1))
        if not terminated[last, i]:
            expected += 0.99 ** (last + 1 - t) * q_of(params, next_obs[last, i]).max()
        assert targets.reshape(20, 8)[t, i] == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_reinforce_learns_a_baseline_and_is_paid_for_entropy_but_not_in_the_padding():
    script = changed("baseline_and_entropy")
    run, draws = one_run(script, ent_coef=0.7, gamma=0.5), np.random.default_rng(0)
    policy = {"w0": (4, 3), "b0": (3,), "w1": (3, 2), "b1": (2,)}
    value = {**policy, "w1": (3, 1), "b1": (1,)}
    params = {name: draws.normal(size=shape) for name, shape in policy.items()}
    params["value"] = {name: draws.normal(size=shape) for name, shape in value.items()}
    obs, action = draws.normal(size=(2, 3, 4)), np.array([[0, 1, 1], [1, 0, 0]])
    mask = np.array([[True, True, True], [True, False, False]])
    episodes = script.Step(obs=obs, action=action, reward=np.where(mask, 2.0, 0.0), mask=mask)
    returns, advantage = jax.device_get(script.advantages(run, params, episodes))

    def network(of):
        return np.tanh(obs @ of["w0"] + of["b0"]) @ of["w1"] + of["b1"]

    values = network(params["value"])[..., 0]
    np.testing.assert_allclose(returns, [[3.5, 3, 2], [2, 0, 0]])  # 2 + 0.5 (2 + 0.5 * 2), ...
    np.testing.assert_allclose(advantage, returns - values, rtol=1e-5)
    log_pi = network(params) - np.log(np.exp(network(params)).sum(axis=-1, keepdims=True))
    entropy = -np.sum(np.exp(log_pi) * log_pi, axis=-1)
    taken = np.take_along_axis(log_pi, action[..., None], axis=-1)[..., 0]
    losses = -(returns - values) * taken - 0.7 * entropy + (returns - values) ** 2 / 2
    loss = script.policy_loss(run, params, episodes, returns, advantage)
    assert float(loss) == pytest.approx(np.sum(losses[mask]) / 2, rel=1e-4)  # of two episodes


def test_reinforce_with_a_baseline_learns_values():
    flags = "--num-intervals 1 --eval-episodes 2 --num-iterations 2 --num-envs 4"
    value = changed("baseline_and_entropy").main(flags.split())["learned"]["params"]["value"]
    assert np.all(value["b1"] > 0)  # all returns are positive, and it was 0 before training


def test_slippery_moves_are_random_with_the_probability_slip():
    """3,000 steps far from the walls, with a table that says: left, always."""
    script = changed("slippery_moves")
    run = one_run(script, "--grid-size 401 3001", slip=0.4, epsilon=0.0, learning_rate=0.0)
    table = jnp.zeros((401, 3001, 4)).at[:, :, 2].set(1.0)
    state = script.TrainState(jax.random.key(0), table, jnp.array([200, 2500]))
    train_block, rows = jax.jit(partial(script.train_block, run)), []
    for _ in range(3):
        state, _ = train_block(state, None)
        rows.append(int(state.cell[0]))
    # Left: 0.6 + 0.1 of the steps. Right, up, down: 0.1 each. The bounds are 5 deviations.
    assert int(state.cell[1]) == pytest.approx(700, abs=5 * math.sqrt(3000 * (0.8 - 0.6**2)))
    assert rows[-1] == pytest.approx(200, abs=5 * math.sqrt(3000 * 0.2))
    assert rows != [200, 200, 200]


def test_greedy_steps_on_slippery_ground_are_the_mean_of_several_episodes():
    script = changed("slippery_moves")
    run = one_run(script, "--grid-size 1 3 --eval-episodes 2000", slip=0.5)
    table = jnp.zeros((1, 3, 4)).at[:, :, 2].set(1.0)  # left, always
    state = script.TrainState(jax.random.key(0), table, jnp.array([0, 2]))
    # Left: 5/8; right: 1/8; up or down, into a wall: 2/8. So the steps from cells 1 and 2 to the
    # goal are s1 = 1 + 1/8 s2 + 2/8 s1 and s2 = 1 + 5/8 s1 + 3/8 s2.
    _, s2 = np.linalg.solve([[6 / 8, -1 / 8], [-5 / 8, 5 / 8]], [1, 1])
    steps_from_2 = jax.jit(partial(script.evaluate, run))(state)["greedy_steps"]
    assert float(steps_from_2) == pytest.approx(s2, abs=0.25)  # 3.52; five deviations


def test_random_pairs_are_a_run_each_with_each_seed():
    flags = f"{TD} --paired --learning-rate 0.1 0.2 0.3 --sigma 0.4 0.5 0.6 --num-seeds 2"
    results = changed("random_pairs").main(flags.split())
    runs = results["runs"]
    np.testing.assert_array_equal(runs["learning_rate"], [0.1, 0.1, 0.2, 0.2, 0.3, 0.3])
    np.testing.assert_array_equal(runs["sigma"], [0.4, 0.4, 0.5, 0.5, 0.6, 0.6])
    np.testing.assert_array_equal(runs["gamma"], [0.99] * 6)
    np.testing.assert_array_equal(runs["seed"], [0, 1] * 3)
    assert results["learned"]["greedy_return"].shape == (6, 2)


def test_the_pendulum_steps_as_that_of_gymnasium():
    script = changed("pendulum")
    env = gymnasium.make("Pendulum-v1").unwrapped
    draws = np.random.default_rng(0)
    step = jax.jit(script.ENV.step_env)
    for angle, velocity, torque in draws.uniform([-9, -8, -3], [9, 8, 3], (50, 3)):
        env.state = np.array([angle, velocity])
        expected_obs, expected_reward, _, _, _ = env.step([torque])
        state = script.EnvState(angle=angle, velocity=velocity, time=0)
        obs, _, reward, _, _ = step(jax.random.key(0), state, torque, script.PARAMS)
        np.testing.assert_allclose(obs, expected_obs, atol=1e-5)
        assert reward == pytest.approx(expected_reward, rel=1e-4, abs=1e-4)


def test_pendulums_run_to_the_time_limit_which_is_not_terminal():
    flags = "--num-envs 3 --num-episodes 2 --num-intervals 1"
    curves = changed("pendulum").main(flags.split())["curves"]
    np.testing.assert_array_equal(curves["timesteps"], [[400] * 3])
    np.testing.assert_array_equal(curves["truncated"], [[1] * 3])


def test_an_environment_of_ones_own_is_learned_and_does_not_end_at_its_time_limit(monkeypatch):
    replay_td = load("replay_td.py")
    monkeypatch.setattr(replay_td, "OBS_SCALE", dict(replay_td.OBS_SCALE))
    monkeypatch.setattr(replay_td, "COMPILER_OPTIONS", {})
    monkeypatch.syspath_prepend(RECIPES)
    own = importlib.import_module("own_environment")
    env = own.OwnCar()
    state = own.EnvState(position=jnp.array(0.5), velocity=jnp.array(0.0), time=jnp.array(99))
    _, _, _, terminated, truncated, _ = env.step(jax.random.key(0), state, 1, env.default_params)
    assert (terminated, truncated) == (False, True)
    results = replay_td.main([*own.FLAGS.split(), "--num-intervals", "2"])
    # Random actions have a return of about -75. The best possible is -8.6.
    assert results["learned"]["greedy_return"].mean() > -35
