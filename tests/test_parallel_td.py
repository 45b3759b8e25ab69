"""parallel_td.py against NumPy, against numbers worked out by hand, and against Gymnasium's own CartPole-v1."""
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import parallel_td as td

SCRIPT = Path(td.__file__)


def run(*flags, **options):
    """Run the script to its end; returns the finished process, its output as text."""
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, flags)], capture_output=True, text=True, timeout=240, **options)


def features_in_numpy(obs, centers, sigma):
    """The textbook's formula, one number at a time."""
    scaled = np.asarray(obs, np.float64) / [2.4, 3.0, 0.2, 3.0]
    return np.array([[np.exp(-sum((x - c) ** 2 for x, c in zip(row, center)) / (2 * sigma**2)) for center in centers] for row in scaled])


def some_batch(seed=0, size=6, features=5):
    """Random centres, weights and transitions, some of them terminal."""
    rng = np.random.default_rng(seed)
    centers, weights = rng.uniform(-1, 1, (features, 4)), rng.normal(size=(features, 2))
    obs, next_obs = rng.normal(scale=0.5, size=(2, size, 4))
    batch = td.Transition(obs, rng.integers(0, 2, size), rng.uniform(size=size), next_obs, np.arange(size) % 3 == 0)
    return centers.astype(np.float32), weights.astype(np.float32), jax.tree.map(jnp.asarray, batch)


# --- the algorithm


def test_features_equal_a_loop_in_numpy():
    centers, _, batch = some_batch(features=7)
    np.testing.assert_allclose(td.rbf_features(batch.obs, centers.T, 0.5), features_in_numpy(batch.obs, centers, 0.5), rtol=1e-5)


@pytest.mark.parametrize("residual", [False, True])
def test_gradient_equals_the_formula(residual):
    args = td.parse_args(["--residual-gradient"] if residual else [])
    centers, weights, batch = some_batch()
    phi, next_phi = (features_in_numpy(x, centers, args.sigma) for x in (batch.obs, batch.next_obs))
    expected = np.zeros_like(weights, np.float64)
    for i, action in enumerate(np.asarray(batch.action)):
        best = np.argmax(next_phi[i] @ weights)
        follows = 0.0 if batch.terminated[i] else args.gamma
        error = phi[i] @ weights[:, action] - (batch.reward[i] + follows * next_phi[i] @ weights[:, best])
        expected[:, action] += error * phi[i] / len(phi)
        if residual:
            expected[:, best] -= error * follows * next_phi[i] / len(phi)
    np.testing.assert_allclose(jax.grad(td.td_loss)(weights, weights, centers.T, batch, args), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("terminated, target", [(False, 1 + 0.5 * 3.0), (True, 1.0)])
def test_only_a_terminal_state_cuts_the_bootstrap(terminated, target):
    """One feature whose centre is the observation itself: phi = 1, Q = (2, 3), so max Q = 3."""
    obs = jnp.full((1, 4), 0.1)
    batch = td.Transition(obs, jnp.array([0]), jnp.array([1.0]), obs, jnp.array([terminated]))
    args = td.parse_args(["--gamma", "0.5"])
    weights = jnp.array([[2.0, 3.0]])
    loss = td.td_loss(weights, weights, (obs / td.OBS_SCALE).T, batch, args)
    np.testing.assert_allclose(loss, 0.5 * (2.0 - target) ** 2, rtol=1e-6)


def state_of(x, x_dot, theta, theta_dot, time, episode_return):
    """A training state whose environments stand as given; every Q-value is 0, so that the greedy action is 0 (left)."""
    args = td.parse_args(["--num-envs", str(len(x)), "--batch-size", str(len(x))])
    state = td.init_state(args, 0, 0.01)
    env_state = state.env_state.replace(**{k: jnp.array(v, jnp.float32) for k, v in
                                           dict(x=x, x_dot=x_dot, theta=theta, theta_dot=theta_dot).items()}, time=jnp.array(time))
    obs = jnp.stack([env_state.x, env_state.x_dot, env_state.theta, env_state.theta_dot], axis=1)
    state = state._replace(env_state=env_state, obs=obs, weights=0 * state.weights, episode_return=jnp.array(episode_return))
    noise = jnp.ones(len(x)), jnp.zeros(len(x), int), jax.random.split(jax.random.key(0), len(x))
    return args, state, noise


def test_terminated_truncated_and_ordinary_transitions():
    """Environment 0 falls off the track, 1 runs into the time limit, 2 goes on."""
    args, state, noise = state_of([2.39, 0.3, 0.3], [1.0, 0.5, 0.5], [0.0] * 3, [0.0] * 3, [7, 499, 7], [7.0, 499.0, 7.0])
    after, (transition, returns) = td.vector_step(args, state, noise)
    np.testing.assert_array_equal(transition.terminated, [True, False, False])
    np.testing.assert_array_equal(transition.action, [0, 0, 0])
    np.testing.assert_array_equal(transition.reward, [1.0, 1.0, 1.0])
    np.testing.assert_allclose(transition.next_obs[:, 0], [2.41, 0.31, 0.31], rtol=1e-6)  # x + 0.02 s * x_dot: not the reset one
    np.testing.assert_array_equal(returns, [8.0, 500.0, np.nan])
    np.testing.assert_array_equal(after.episode_return, [0.0, 0.0, 8.0])
    assert np.all(np.abs(after.obs[:2]) <= 0.05) and np.allclose(after.obs[2], transition.next_obs[2])
    np.testing.assert_array_equal(after.env_state.time, [0, 0, 8])


def test_an_episode_is_counted_once_with_its_return():
    """From rest, pushing left all the time, Gymnasium's pole falls after as many steps as ours."""
    args, state, (_, action, key) = state_of([0.0] * 2, [0.0] * 2, [0.0] * 2, [0.0] * 2, [0, 0], [0.0, 0.0])
    steps = 12
    noise = jnp.ones((steps, 2)), jnp.zeros((steps, 2), int), jax.random.split(jax.random.key(1), (steps, 2))
    _, (_, returns) = jax.lax.scan(partial(td.vector_step, args), state, noise)
    env = gymnasium.make("CartPole-v1")
    env.reset(seed=0)
    env.unwrapped.state = np.zeros(4)
    length = next(t for t in range(1, 100) if env.step(0)[2])
    returns = np.asarray(returns)
    assert length < steps
    np.testing.assert_array_equal(returns[length - 1], [length, length])
    assert np.isnan(np.delete(returns, length - 1, axis=0)).all()


def test_exploration_follows_epsilon():
    args, state, _ = state_of([0.0] * 1000, [0.0] * 1000, [0.0] * 1000, [0.0] * 1000, [0] * 1000, [0.0] * 1000)
    noise = (jnp.arange(1000) + 0.5) / 1000, jnp.ones(1000, int), jax.random.split(jax.random.key(0), 1000)
    _, (transition, _) = td.vector_step(args, state, noise)
    assert transition.action.sum() == 100  # exactly those with noise below 0.1 take the random action, 1


def test_one_update_learns_from_exactly_the_batch():
    """--batch-size 32 on 16 environments: two vector steps, one Adam step, whose first size is the learning rate."""
    args = td.parse_args(["--batch-size", "32", "--total-timesteps", "32", "--num-centers", "10"])
    assert args.updates == 1
    before = td.init_state(args, 3, 0.01)
    after, returns = td.train_chunk(args, before)
    assert returns.shape == (1, 2, 16)
    step = np.asarray(after.weights - before.weights)
    np.testing.assert_allclose(np.abs(step), 0.01, rtol=1e-3)
    np.testing.assert_allclose(after.average, before.average + 0.01 * step, rtol=1e-5, atol=1e-7)
    assert after.opt_state[0].count == 1 and np.all(after.env_state.time >= 1)


# --- reporting


def test_spread():
    assert td.spread([np.nan]) == "-" and td.spread([1.25]) == "1.2" and td.spread([1.0, np.nan, 4.0]) == "2.5 [1.0, 4.0]"


def test_evaluation_plays_whole_episodes():
    """Weights that always push left: every episode lasts 8 to 11 steps; none is counted twice or cut."""
    args = td.parse_args(["--eval-episodes", "50"])
    returns = np.asarray(td.evaluate(args, jnp.zeros((3, 2)), jnp.zeros((4, 3)), 0))
    assert returns.shape == (50,) and 8 <= returns.min() < returns.max() <= 11


# --- the program


def test_no_key_is_used_twice():
    """One run, from seed to evaluation, under jax's checker (which takes keys scanned under vmap for used: not vmapped)."""
    args = td.parse_args(["--total-timesteps", "320", "--batch-size", "32", "--eval-episodes", "2"])

    def whole_run(seed):
        state, _ = td.train_chunk(args, td.init_state(args, seed, 0.01))
        state, _ = td.train_chunk(args, state)
        return td.evaluate(args, state.average, state.centers, seed)

    with jax.debug_key_reuse(True):
        jax.jit(whole_run)(0)
        with pytest.raises(jax.errors.KeyReuseError):
            jax.jit(lambda key: jax.random.uniform(key) + jax.random.uniform(key))(jax.random.key(0))


def test_learns_and_its_weights_balance_gymnasiums_pole(tmp_path):
    path = tmp_path / "weights.npz"
    process = run("--num-seeds", 5, "--seed", 100, "--json", "--save", path)
    report = json.loads(process.stdout)
    assert all(row["solved_at"] and row["solved_at"] <= 250_000 for row in report["runs"]), report["runs"]
    assert sum(row["eval_mean"] >= 475 for row in report["runs"]) >= 4, report["runs"]
    saved = np.load(path)
    env, returns = gymnasium.make("CartPole-v1"), []
    best = int(np.argmax([row["eval_mean"] for row in report["runs"]]))
    for episode in range(10):
        obs, _ = env.reset(seed=episode)
        total, done = 0.0, False
        while not done:
            distance = ((obs / [2.4, 3.0, 0.2, 3.0] - saved["centers"][best]) ** 2).sum(axis=1)
            obs, reward, terminated, truncated, _ = env.step(int(np.argmax(np.exp(-distance / (2 * 0.5**2)) @ saved["weights"][best])))
            total, done = total + reward, terminated or truncated
        returns.append(total)
    assert np.mean(returns) >= 475, returns
    again = json.loads(run("--evaluate", path, "--json").stdout)
    assert [row["eval_mean"] for row in again["runs"]] == [row["eval_mean"] for row in report["runs"]]


def test_whole_numbers_may_be_written_in_any_common_way():
    assert td.parse_args(["--total-timesteps", "2e6"]).total_timesteps == td.parse_args(["--total-timesteps", "2_000_000"]).total_timesteps


def test_jax_issue_39103():
    rows = jnp.stack((jnp.arange(32_769.0), jnp.zeros(32_769), jnp.zeros(32_769)), axis=1)
    last = jax.jit(jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2)))(rows)[-1]
    assert last == 32_768.0**2, "this jax miscompiles vmapped matrix-vector products on a CPU (jax issue 39103): use the pinned version"
