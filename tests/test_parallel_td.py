"""parallel_td.py against NumPy, numbers worked out by hand, and Gymnasium's own CartPole-v1."""

from functools import partial

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from conftest import ROOT

import parallel_td as td


def features(obs, centers):
    """Features (F,) of one observation, in float64."""
    distance = obs / np.array([2.4, 3.0, 0.2, 3.0]) - centers
    return np.exp(-(distance**2).sum(axis=1) / (2 * 0.5**2))


def gradient(args, weights, centers, batch):
    """The semi-gradient (A, F) of half the mean squared TD error, transition by transition."""
    grad = np.zeros(weights.shape)
    for obs, action, reward, next_obs, terminated in zip(*batch, strict=True):
        bootstrap = 0 if terminated else args.gamma * max(weights @ features(next_obs, centers))
        phi = features(obs, centers)
        grad[action] += (weights[action] @ phi - (reward + bootstrap)) * phi / len(batch.obs)
    return grad


def state_of(args, obs, time):
    """A state whose environments (N,) stand as given; weights are 0, and so is the best action."""
    state = td.init_state(args, 0, 0.04)
    fields = dict(zip(["x", "x_dot", "theta", "theta_dot"], jnp.array(obs).T, strict=True))
    return state._replace(
        env_state=state.env_state.replace(time=jnp.array(time), **fields),
        obs=jnp.array(obs),
        episode_return=jnp.array(time, float),  # a reward of 1 a step
    )


def greedy(*shape):
    """What vector_step takes as random, for greedy actions."""
    return jax.random.split(jax.random.key(0), shape), jnp.ones(shape), jnp.zeros(shape, int)


def test_features_and_gradient_equal_numpy():
    args, rng = td.parse_args([]), np.random.default_rng(0)
    centers, weights = rng.uniform(-1, 1, (5, 4)), rng.normal(size=(2, 5))
    obs, next_obs = rng.normal(scale=0.5, size=(2, 6, 4))
    terminated = np.arange(6) % 3 == 0
    batch = td.Transition(obs, rng.integers(0, 2, 6), rng.uniform(size=6), next_obs, terminated)
    phi = td.rbf_features(obs, centers, 0.5).T
    np.testing.assert_allclose(phi, [features(row, centers) for row in obs], rtol=1e-5)
    grad = jax.grad(td.td_loss)(jnp.array(weights), centers, batch, args)
    np.testing.assert_allclose(grad, gradient(args, weights, centers, batch), rtol=1e-4, atol=1e-6)


def test_targets_of_a_terminated_a_truncated_and_an_ordinary_transition():
    """Each step, and what it bootstraps from, as Gymnasium has it: also at the time limit."""
    args = td.parse_args([])
    weights = np.random.default_rng(0).normal(size=(2, 500))
    obs = np.array([[2.39, 1.0, 0.0, 0.0], [0.3, 0.5, 0.1, -0.5], [0.3, 0.5, 0.1, -0.5]])
    state = state_of(args, obs, [7, 499, 7])._replace(weights=jnp.array(weights))
    after, (transition, returns) = td.vector_step(args, state, greedy(3))
    np.testing.assert_array_equal(transition.terminated, [True, False, False])
    env = gymnasium.make("CartPole-v1")
    for i in range(3):
        env.reset()
        env.unwrapped.state = obs[i]
        next_obs, *_ = env.step(int(transition.action[i]))
        np.testing.assert_allclose(transition.next_obs[i], next_obs, rtol=1e-5)
    grad = jax.grad(td.td_loss)(state.weights, state.centers, transition, args)
    by_hand = gradient(args, weights, state.centers, transition)
    np.testing.assert_allclose(grad, by_hand, rtol=1e-3, atol=1e-5)
    np.testing.assert_array_equal(returns, [8, 500, np.nan])
    np.testing.assert_array_equal(after.episode_return, [0, 0, 8])
    assert np.abs(after.obs[:2]).max() <= 0.05  # reset


def test_evaluation_plays_one_whole_episode_from_each_start(monkeypatch):
    """Who always pushes left falls after as many steps as in Gymnasium, and is counted once."""
    args = td.parse_args(["--eval-episodes", "20"])
    starts = np.random.default_rng(1).uniform(-0.05, 0.05, (20, 4))
    state = state_of(args, starts, [0] * 20)
    monkeypatch.setattr(td, "env_reset", lambda keys: (state.obs, state.env_state))
    env, lengths = gymnasium.make("CartPole-v1"), []
    for start in starts:
        env.reset()
        env.unwrapped.state = start
        lengths.append(next(step for step in range(1, 500) if env.step(0)[2]))
    np.testing.assert_array_equal(td.evaluate(args, state), lengths)


def test_epsilon_is_the_share_of_random_actions():
    args = td.parse_args([])
    random = greedy(1000)[0], jnp.arange(0.5, 1000) / 1000, jnp.ones(1000, int)
    _, (transition, _) = td.vector_step(
        args, state_of(args, np.zeros((1000, 4)), [0] * 1000), random
    )
    np.testing.assert_array_equal(transition.action, np.arange(1000) < 100)


def test_updates_learn_from_exactly_their_batch_and_the_learning_rate_falls_to_zero():
    """Three Adam steps in NumPy, each from two vector steps of four environments."""
    args = td.parse_args("--num-envs 4 --batch-size 8 --total-timesteps 24 --num-centers 9".split())
    weights, m, v = np.zeros((3, 2, 9))
    state, action = td.init_state(args, 5, 0.04), jnp.array([[0, 1, 1, 0], [1, 1, 0, 0]])
    random = greedy(2, 4)[0], jnp.zeros((2, 4)), action
    train_step = jax.jit(partial(td.train_step, args))
    for n in [1, 2, 3]:
        _, (steps, _) = jax.lax.scan(partial(td.vector_step, args), state, random)
        batch = td.Transition(*(np.reshape(leaf, (8, *leaf.shape[2:])) for leaf in steps))
        grad = gradient(args, weights, state.centers, batch)
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
        adam = m / (1 - 0.9**n) / (np.sqrt(v / (1 - 0.999**n)) + 1e-8)
        weights = weights - 0.04 * (4 - n) / 3 * adam
        state, _ = train_step(state, random)
        np.testing.assert_allclose(state.weights, weights, rtol=1e-3, atol=1e-6)
    np.testing.assert_array_equal(train_step(state, random)[0].weights, state.weights)


def test_no_key_is_used_twice():
    """One run, from its seed to its evaluation, under jax's checker."""
    args = td.parse_args("--total-timesteps 320 --log-interval 160 --eval-episodes 2".split())

    def whole_run(seed):
        state, _ = td.train_chunk(args, td.init_state(args, seed, 0.04))
        return td.evaluate(args, td.train_chunk(args, state)[0])

    with jax.debug_key_reuse(True):
        jax.jit(whole_run)(0)


def test_learned_weights_balance_gymnasiums_pole_as_readme_says(tmp_path, monkeypatch):
    """README's own lines play what the run with seed 100 has learned."""
    monkeypatch.chdir(tmp_path)
    td.main(["--seed", "100", "--save", "weights.npz"])
    lines = (ROOT / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    scope = {}
    exec(lines, scope)
    assert scope["total"] >= 475


def test_a_run_alone_equals_the_run_among_others(tmp_path):
    flags = "--total-timesteps 6400 --log-interval 3200 --eval-episodes 5 --save".split()
    td.main([*flags, f"{tmp_path}/8.npz", "--num-seeds", "8"])
    td.main([*flags, f"{tmp_path}/1.npz", "--seed", "3"])
    among, alone = np.load(tmp_path / "8.npz"), np.load(tmp_path / "1.npz")
    for name in ["seed", "learning_rate", "greedy_return", "centers", "weights"]:
        np.testing.assert_array_equal(among[name][3], alone[name][0], err_msg=name)
    np.testing.assert_array_equal(among["returns"][:, 3], alone["returns"][:, 0])


def test_jax_issue_39103():
    rows = jnp.stack((jnp.arange(32_769.0), jnp.zeros(32_769), jnp.zeros(32_769)), axis=1)
    last = jax.jit(jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2)))(rows)[-1]
    assert last == 32_768.0**2, "jax issue 39103: this one miscompiles on a CPU, use the pinned one"
