"""reinforce_parallel.py against loops in NumPy, exact gradients by enumeration, and Gymnasium."""

import itertools
from functools import partial

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.stats import norm

import reinforce_parallel as rp

jit = partial(jax.jit, compiler_options=rp.COMPILER_OPTIONS)  # compiles in half the time


def gradient_of(args):
    """A compiled function of parameters and batch: what the optimizer gets."""
    return jit(lambda params, batch: jax.grad(rp.loss)(params, batch, rp.advantages(args, batch)))


def test_no_key_is_used_twice():
    args = rp.parse_args(["--env-id", "Pendulum-v1"])
    with jax.debug_key_reuse(True):
        state = jax.eval_shape(partial(rp.init_state, args), 0, 0.01)
        jax.jit(lambda state: rp.evaluate(args, rp.train_chunk(args, 2, state)[0])).trace(state)


def test_continuous_actions_follow_their_distribution():
    """100,000 draws against mean and standard deviation, log_prob against SciPy's."""
    rng, obs = np.random.default_rng(0), jnp.array([0.1, -0.4, 0.7])
    params = {"w0": rng.normal(size=(3, 8)), "b0": rng.normal(size=8)}
    params |= {"w1": rng.normal(size=(8, 4)) / 4, "b1": rng.normal(size=4) / 4}
    params["log_std"] = np.log([0.5, 1.5, 2.0, 0.7])
    draws = rp.sample(params, obs, jax.random.normal(jax.random.key(1), (100_000, 4)))
    mean, std = rp.policy(params, obs), np.exp(params["log_std"])
    np.testing.assert_allclose(draws.mean(axis=0), mean, atol=0.02)
    np.testing.assert_allclose(draws.std(axis=0), std, rtol=0.02)
    log_density = norm.logpdf(draws[0], mean, std).sum()
    np.testing.assert_allclose(rp.log_prob(params, obs, draws[0]), log_density, rtol=1e-4)


def test_gradient_is_unbiased_for_unequal_lengths_by_enumeration():
    """Action 0 ends an episode, action 1 goes on, at most 3 steps: 4 episodes, 16 pairs of them.

    The expectation over all pairs is the exact gradient of a single episode's discounted returns
    to go. A mean over the episodes still alive, or over all with one's own, is not.
    """
    action = np.array([[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]])  # of each episode, a column
    mask = np.array([[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1]], bool)
    reward = np.take_along_axis(np.array([[5.0, 1.0], [-2.0, 3.0], [4.0, 7.0]]), action, axis=1)
    to_go = np.array([[1, 0.5, 0.25], [0, 1, 0.5], [0, 0, 1]]) @ (mask * reward)
    pi = np.array([0.6, 0.4])
    probability = np.prod(pi[action], axis=0, where=mask)
    exact = np.einsum("n,tn,tna->a", probability, mask * to_go, np.eye(2)[action] - pi)
    gradient = gradient_of(rp.parse_args(["--gamma", "0.5"]))
    params = {"w0": np.zeros((1, 1)), "b0": np.zeros(1), "w1": np.zeros((1, 2)), "b1": np.log(pi)}
    expected = np.zeros(2)
    for pair in map(list, itertools.product(range(4), repeat=2)):
        batch = rp.Batch(np.zeros((3, 2, 1)), action[:, pair], reward[:, pair], mask[:, pair])
        expected -= np.prod(probability[pair]) * np.asarray(gradient(params, batch)["b1"])
    np.testing.assert_allclose(expected, exact, rtol=1e-5)


@pytest.fixture(scope="module", params=["CartPole-v1", "Pendulum-v1"])
def played(request):
    """Arguments, parameters, a batch of 16 episodes; Pendulum's, all of 200 steps, cut by hand."""
    args = rp.parse_args(["--env-id", request.param, "--gamma", "0.9", "--hidden-size", "8"])
    params = rp.init_state(args, 0, 0.01).params
    params["b1"] += 2.0 * np.arange(len(params["b1"]))  # action 1 more often than 0
    play = jit(partial(rp.play, args, num_envs=16, noise_scale=1.0))
    batch = jax.tree.map(np.asarray, play(params, jax.random.key(0))[0])
    if request.param == "Pendulum-v1":
        assert batch.mask.shape == (200, 16) and batch.mask.all()
        batch = batch._replace(mask=np.arange(200)[:, None] < np.linspace(1, 200, 16))
    return args, params, batch


def test_actions_are_the_policys_and_steps_are_gymnasiums(played):
    """Each step again there, from the observation; a torque is clipped and scaled to [-2, 2]."""
    args, params, batch = played
    pendulum = args.env_id == "Pendulum-v1"
    outputs = rp.policy(params, batch.obs)
    mean = outputs if pendulum else jax.nn.softmax(outputs)[..., 1]
    assert abs(np.mean(batch.action - mean)) < 0.03  # 0.04 with normal noise, 0.6 with Gumbel's
    action = 2 * np.clip(batch.action, -1, 1) if pendulum else batch.action
    space = rp.make(args.env_id)[0].action_space()
    np.testing.assert_allclose(rp.to_bounds(space, batch.action), action, atol=1e-6)
    env = gymnasium.make(args.env_id).unwrapped
    for t, i in np.argwhere(batch.mask[:-1]):
        env.reset()
        obs = batch.obs[t, i].astype(float)
        env.state = np.array([np.arctan2(obs[1], obs[0]), obs[2]]) if pendulum else obs
        reached, reward, terminated, _, _ = env.step(action[t, i])
        np.testing.assert_allclose(batch.reward[t, i], reward, rtol=1e-4)
        assert pendulum or batch.mask[t + 1, i] == (not terminated)
        if batch.mask[t + 1, i]:
            np.testing.assert_allclose(batch.obs[t + 1, i], reached, atol=1e-4)
    assert batch.mask[0].all() and np.all(batch.mask[1:] <= batch.mask[:-1])


def test_advantages_equal_a_loop_in_numpy(played):
    """Return to go minus the mean of the others'. Equal returns give exactly 0."""
    args, _, batch = played
    returns = np.zeros((len(batch.mask) + 1, 16))
    expected = np.zeros(batch.mask.shape)
    for t, i in np.argwhere(batch.mask)[::-1]:
        returns[t, i] = batch.reward[t, i] + 0.9 * returns[t + 1, i]  # 0 after the end
    for t, i in np.argwhere(batch.mask):
        expected[t, i] = returns[t, i] - np.mean(np.delete(returns[t], i))
    np.testing.assert_allclose(rp.advantages(args, batch), expected, rtol=1e-4, atol=1e-4)
    equal = jax.tree.map(lambda array: np.repeat(array[:, 1:2], 7, axis=1), batch)
    assert not np.any(rp.advantages(args, equal))


def test_what_stands_in_the_padding_changes_no_bit(played):
    args, params, batch = played

    def fill(array, value):
        mask = batch.mask.reshape(*batch.mask.shape, *[1] * (array.ndim - 2))
        return np.where(mask, array, np.array(value, array.dtype))

    filled = rp.Batch(fill(batch.obs, 9), fill(batch.action, 1), fill(batch.reward, 9), batch.mask)
    gradient = gradient_of(args)
    expected, seen = gradient(params, batch), gradient(params, filled)
    for name in params:
        assert np.any(expected[name])
        np.testing.assert_array_equal(seen[name], expected[name])


class Leaning(gymnax.environments.CartPole):
    """A pole whose start depends on a parameter; its rewards, nearly 1, show the steps' keys."""

    def reset_env(self, key, params):
        _, state = super().reset_env(key, params)
        state = state.replace(theta=params.gravity / 1000 + 0 * state.theta)
        return self.get_obs(state), state

    def step_env(self, key, state, action, params):
        obs, state, _, terminated, info = super().step_env(key, state, action, params)
        return obs, state, 1 + 1e-3 * jax.random.uniform(key), terminated, info


def greedy_steps(env, obs, w0, b0, w1, b1):
    """Length of an episode of the greedy policy in Gymnasium's CartPole-v1 from a given start."""
    env.reset()
    env.unwrapped.state = np.asarray(obs, float)
    for step in itertools.count(1):
        action = np.argmax(np.tanh(obs @ w0 + b0) @ w1 + b1)
        obs, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            return step


def replay(args, play, gradient, seed, rate):
    """Three updates by hand: mean returns, real steps, last parameters and key."""
    key, _, params, _ = rp.init_state(args, seed, rate)
    adam = optax.adam(lambda count: rate * (1 - count / 3))  # the learning rate falls to 0
    returns, steps, moments = [], [], adam.init(params)
    for _ in range(3):
        key, key_play = jax.random.split(key)
        batch, _ = play(params, key_play)
        assert batch.mask.shape == (40, 4) and len(np.unique(batch.obs[0], axis=0)) == 4
        assert len(np.unique(batch.reward)) > 150  # 40 or 4 if steps shared their keys
        np.testing.assert_allclose(batch.obs[0, :, 2], 0.05)
        batch = batch._replace(mask=batch.mask & batch.mask.all(axis=1, keepdims=True))
        returns.append(np.sum(batch.mask * batch.reward) / 4)
        steps.append(int(batch.mask.sum()))
        updates, moments = adam.update(gradient(params, batch), moments)
        params = optax.apply_updates(params, updates)
    return returns, steps, params, key


def test_the_report_is_that_of_an_independent_replay(tmp_path, capsys, monkeypatch):
    """Of updates with --sync truncation; replaced parameters of the environment rule all of it."""
    drawn, animated = [], []
    monkeypatch.setattr(rp, "plot", lambda *call: drawn.extend(call))
    monkeypatch.setattr(rp, "animate", lambda *call: animated.extend(call))
    changes = {"max_steps_in_episode": 40, "gravity": 50.0, "theta_threshold_radians": 0.3}
    env_params = Leaning().default_params.replace(**changes)
    monkeypatch.setattr(rp, "make", lambda _: (Leaning(), env_params))
    env = gymnasium.make("CartPole-v1", max_episode_steps=40)
    env.unwrapped.gravity, env.unwrapped.theta_threshold_radians = 50.0, 0.3
    flags = "--num-iterations 3 --log-interval 2 --num-envs 4 --eval-episodes 4 --seed 7"
    flags += " --learning-rate 0.02 0.05 --num-seeds 2 --sync truncation"
    files = [f"--{name}={tmp_path / 'run.npz'}" for name in ["save", "plot", "gif"]]
    assert rp.main([*flags.split(), *files]) == 0
    saved, lines = np.load(tmp_path / "run.npz"), capsys.readouterr().out.splitlines()
    args = rp.parse_args(flags.split())
    play = jit(partial(rp.play, args, num_envs=4, noise_scale=1.0))
    gradient = gradient_of(args)
    for run, (rate, seed) in enumerate(itertools.product([0.02, 0.05], [7, 8])):
        assert (saved["seed"][run], saved["learning_rate"][run]) == (seed, rate)
        returns, steps, params, key = replay(args, play, gradient, seed, rate)
        np.testing.assert_allclose(saved["returns"][:, run], [np.mean(returns[:2]), returns[2]])
        np.testing.assert_array_equal(saved["timesteps"][:, run], np.cumsum(steps)[1:])
        for name, param in params.items():
            np.testing.assert_allclose(saved[name][run], param, atol=1e-5)
        starts = np.asarray(play(params, key)[0].obs[0])  # the same for greedy actions
        weights = {name: saved[name][run] for name in params}
        greedy = [greedy_steps(env, obs, **weights) for obs in starts]
        np.testing.assert_array_equal(np.floor(saved["greedy_return"][run]), greedy)
        if run == 0:
            same_key = jax.random.key_data(animated[3]) == jax.random.key_data(key)
            assert same_key.all() and np.array_equal(animated[2]["w0"], weights["w0"])
    np.testing.assert_array_equal(drawn[2], saved["timesteps"])
    assert lines[3].startswith(f"iteration 3  return {saved['returns'][1].mean():.1f}  ")
    means = saved["greedy_return"].mean(axis=1)
    for line, rate, runs in (lines[4], 0.02, means[:2]), (lines[5], 0.05, means[2:]):
        expected = f"greedy return {runs.mean():.1f}, worst {runs.min():.1f}"
        assert line == f"learning rate {rate}: {expected}"


def test_learns_and_the_policy_balances_gymnasiums_pole(tmp_path):
    rp.main(f"--seed 6 --log-interval 1e9 --save {tmp_path / 'run.npz'}".split())
    saved, env = np.load(tmp_path / "run.npz"), gymnasium.make("CartPole-v1")
    weights = {name: saved[name][0] for name in ["w0", "b0", "w1", "b1"]}
    starts = np.random.default_rng(0).uniform(-0.05, 0.05, (5, 4))
    lengths = [greedy_steps(env, start, **weights) for start in starts]
    assert np.mean(lengths) >= 475, lengths
