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

import reinforce_parallel as rp


def params_of(inputs, outputs, continuous=False, hidden=8):
    """Random parameters."""
    rng = np.random.default_rng(0)
    shapes = {"w0": (inputs, hidden), "b0": hidden, "w1": (hidden, outputs), "b1": outputs}
    if continuous:
        shapes["log_std"] = outputs
    params = {name: rng.normal(scale=0.5, size=shape) for name, shape in shapes.items()}
    return jax.tree.map(jnp.float32, params)


@pytest.fixture(scope="module", params=["CartPole-v1", "Pendulum-v1"])
def played(request):
    """Arguments, parameters, a batch of 4 episodes; Pendulum's, all of 200 steps, cut by hand."""
    args = rp.parse_args(["--env-id", request.param, "--gamma", "0.9"])
    continuous = request.param == "Pendulum-v1"
    params = params_of(3, 1, continuous) if continuous else params_of(4, 2)
    play = jax.jit(partial(rp.play, args, num_envs=4, noise_scale=1.0))
    batch, _ = jax.tree.map(np.asarray, play(params, jax.random.key(0)))
    if continuous:
        assert batch.mask.all()
        batch = batch._replace(mask=np.arange(200)[:, None] < [1, 200, 117, 50])
    assert len(set(batch.mask.sum(axis=0))) > 1
    return args, params, batch


def gradient(args, params, batch):
    """What the optimizer gets."""
    return jax.grad(rp.loss)(params, batch, rp.advantages(args, batch))


def test_advantages_equal_a_loop_in_numpy(played):
    args, _, batch = played
    lengths, num_envs = batch.mask.sum(axis=0), 4
    returns = np.zeros(batch.mask.shape)
    for t, i in np.argwhere(batch.mask):
        steps = np.arange(t, lengths[i])
        returns[t, i] = np.sum(0.9 ** (steps - t) * batch.reward[t : lengths[i], i])
    expected = np.zeros(batch.mask.shape)
    for t, i in np.argwhere(batch.mask):
        others = [returns[t, j] for j in range(num_envs) if j != i]  # 0 for those that have ended
        expected[t, i] = returns[t, i] - np.mean(others)
    np.testing.assert_allclose(rp.advantages(args, batch), expected, rtol=1e-4, atol=1e-4)


def test_what_stands_in_the_padding_changes_no_bit(played):
    args, params, batch = played
    rng = np.random.default_rng(0)

    def fill(array):
        noise = (
            rng.integers(0, 2, array.shape) if array.dtype == int else rng.normal(size=array.shape)
        )
        mask = batch.mask.reshape(*batch.mask.shape, *[1] * (array.ndim - 2))
        return np.where(mask, array, 1e3 * noise).astype(array.dtype)

    action = fill(batch.action) if "log_std" in params else batch.action
    filled = rp.Batch(fill(batch.obs), action, fill(batch.reward), batch.mask)
    expected, seen = gradient(args, params, batch), gradient(args, params, filled)
    for name in params:
        assert np.any(expected[name])
        np.testing.assert_array_equal(seen[name], expected[name])


def test_gradient_is_unbiased_for_unequal_lengths_by_enumeration():
    """Action 0 ends an episode, action 1 goes on, at most 3 steps: 4 episodes, 16 pairs of them.

    The expectation over all pairs is the exact gradient of a single episode's discounted returns
    to go. A mean over the episodes still alive, or over all with one's own, is not.
    """
    args = rp.parse_args(["--gamma", "0.5", "--num-envs", "2"])
    logits, episodes = np.array([0.3, -0.2]), [(0,), (1, 0), (1, 1, 0), (1, 1, 1)]
    pi = np.exp(logits) / np.exp(logits).sum()
    rewards = np.array([[5.0, 1.0], [-2.0, 3.0], [4.0, 7.0]])  # of each action at each time
    params = {"w0": jnp.zeros((1, 1)), "b0": jnp.zeros(1), "w1": jnp.zeros((1, 2)), "b1": logits}
    params = jax.tree.map(jnp.float32, params)

    exact = np.zeros(2)
    for episode in episodes:
        for t, action in enumerate(episode):
            to_go = sum(0.5 ** (s - t) * rewards[s, episode[s]] for s in range(t, len(episode)))
            exact += np.prod(pi[list(episode)]) * to_go * (np.eye(2)[action] - pi)

    expected = np.zeros(2)
    for pair in itertools.product(episodes, repeat=2):
        action, mask = np.zeros((3, 2), int), np.zeros((3, 2), bool)
        for i, episode in enumerate(pair):
            action[: len(episode), i] = episode
            mask[: len(episode), i] = True
        reward = np.take_along_axis(rewards, action, axis=1)
        batch = rp.Batch(
            jnp.zeros((3, 2, 1)), jnp.array(action), jnp.array(reward), jnp.array(mask)
        )
        probability = np.prod([np.prod(pi[list(episode)]) for episode in pair])
        expected -= probability * np.asarray(gradient(args, params, batch)["b1"])
    np.testing.assert_allclose(expected, exact, rtol=1e-5)


def test_equal_returns_move_nothing():
    args, num_envs = rp.parse_args([]), 7
    reward = jnp.repeat(jax.random.normal(jax.random.key(0), (500, 1)), num_envs, axis=1)
    batch = rp.Batch(None, None, reward, jnp.ones((500, num_envs), bool))
    assert not jnp.any(rp.advantages(args, batch))


def test_actions_follow_their_distribution():
    """Frequencies of 100,000 draws against probabilities, and log_prob against both."""
    params, obs = params_of(3, 4), jnp.array([0.1, -0.4, 0.7])
    probability = np.exp([rp.log_prob(params, obs, jnp.array(action)) for action in range(4)])
    np.testing.assert_allclose(probability.sum(), 1.0, rtol=1e-5)
    noise = jax.random.gumbel(jax.random.key(0), (100_000, 4))
    frequency = np.bincount(rp.sample(params, obs, noise)) / 100_000
    np.testing.assert_allclose(frequency, probability, atol=0.008)
    params = params_of(3, 2, continuous=True)
    draws = rp.sample(params, obs, jax.random.normal(jax.random.key(1), (100_000, 2)))
    mean, std = rp.policy(params, obs), np.exp(params["log_std"])
    np.testing.assert_allclose(draws.mean(axis=0), mean, atol=0.02)
    np.testing.assert_allclose(draws.std(axis=0), std, rtol=0.02)
    density = np.exp(-((draws[0] - mean) ** 2) / (2 * std**2)) / (std * np.sqrt(2 * np.pi))
    log_density = np.log(density).sum()
    np.testing.assert_allclose(rp.log_prob(params, obs, draws[0]), log_density, rtol=1e-4)


def test_masks_end_where_gymnasiums_episodes_end():
    """The same start and the same actions there: as many steps. One episode each, all of it."""
    args, params = rp.parse_args([]), params_of(4, 2)
    batch, _ = jax.jit(partial(rp.play, args, num_envs=16, noise_scale=1.0))(
        params, jax.random.key(3)
    )
    env = gymnasium.make("CartPole-v1").unwrapped
    assert batch.mask.shape == (500, 16)
    for i, length in enumerate(np.asarray(batch.mask).sum(axis=0)):
        np.testing.assert_array_equal(batch.mask[:, i], np.arange(500) < length)
        env.reset()
        env.state = np.asarray(batch.obs[0, i], float)
        ended = [env.step(int(action))[2] for action in batch.action[:length, i]]
        assert ended == [False] * (length - 1) + [True]


def test_truncation_ends_all_with_the_first(played, monkeypatch):
    args, params, batch = played
    masks = []
    monkeypatch.setattr(rp, "play", lambda *_, **__: (batch, None))
    monkeypatch.setattr(rp, "advantages", lambda args, batch: masks.append(batch.mask) or 1.0)
    state = rp.TrainState(jax.random.key(0), 0.01, params, rp.optimizer(args, 0.01).init(params))
    rp.train_step(args, state, None)
    args.sync = "truncation"
    rp.train_step(args, state, None)
    np.testing.assert_array_equal(masks[0], batch.mask)
    first = batch.mask.sum(axis=0).min()
    np.testing.assert_array_equal(
        masks[1], np.repeat(np.arange(len(batch.mask))[:, None] < first, 4, 1)
    )


def test_actions_are_stretched_to_the_bounds(played):
    space = rp.make("Pendulum-v1")[0].action_space()
    action = np.array([[-7.0], [-1.0], [0.0], [0.5], [3.0]])
    np.testing.assert_allclose(rp.to_bounds(space, action), [[-2], [-2], [0], [1], [2]])
    args, _, batch = played
    if args.env_id == "Pendulum-v1":  # the equation of motion, with the torque that was meant
        _, sine, speed = np.moveaxis(batch.obs, 2, 0)
        torque = 2 * np.clip(batch.action[..., 0], -1, 1)
        expected = np.clip(speed + 0.05 * (15 * sine + 3 * torque), -8, 8)
        np.testing.assert_allclose(speed[1:], expected[:-1], atol=1e-4)


class Leaning(gymnax.environments.CartPole):
    """A pole whose start depends on a parameter; its rewards, nearly 1, show the steps' keys."""

    def reset_env(self, key, params):
        _, state = super().reset_env(key, params)
        state = state.replace(theta=params.gravity / 1000 + 0 * state.theta)
        return self.get_obs(state), state

    def step_env(self, key, state, action, params):
        obs, state, _, terminated, info = super().step_env(key, state, action, params)
        return obs, state, 1 + 1e-3 * jax.random.uniform(key), terminated, info


def test_replaced_parameters_rule_reset_step_and_evaluation(monkeypatch):
    env = Leaning()
    changes = {"max_steps_in_episode": 20, "gravity": 50.0, "theta_threshold_radians": 100.0}
    env_params = env.default_params.replace(**changes)
    monkeypatch.setattr(rp, "make", lambda _: (env, env_params))
    args = rp.parse_args(["--num-envs", "4", "--hidden-size", "2"])
    state = rp.init_state(args, 0, 0.01)
    batch, _ = rp.play(args, state.params, state.key, 4, noise_scale=1.0)
    assert batch.mask.shape == (20, 4) and batch.mask.all()
    assert len(np.unique(batch.reward)) > 70  # 20 or 4 if steps shared their keys
    np.testing.assert_allclose(batch.obs[0, :, 2], 0.05)
    assert len(np.unique(batch.obs[0, :, 0])) == 4
    physics = gymnasium.make("CartPole-v1").unwrapped
    physics.gravity, physics.theta_threshold_radians = 50.0, 100.0
    physics.reset()
    physics.state = np.asarray(batch.obs[0, 0], float)
    path = [physics.step(int(action))[0] for action in batch.action[:, 0]]
    np.testing.assert_allclose(batch.obs[1:, 0], path[:-1], rtol=1e-3, atol=1e-3)
    _, (mean_return, steps) = rp.train_step(args, state, None)
    np.testing.assert_allclose([mean_return, steps / 4], 20, atol=0.03)
    np.testing.assert_allclose(rp.evaluate(args, state), 20, atol=0.03)


def episode_return(obs, w0, b0, w1, b1):
    """Return of the greedy policy in Gymnasium's CartPole-v1 from a given start."""
    env, over, total = gymnasium.make("CartPole-v1"), False, 0.0
    env.reset()
    env.unwrapped.state = np.asarray(obs, float)
    while not over:
        action = np.argmax(np.tanh(obs @ w0 + b0) @ w1 + b1)
        obs, reward, terminated, truncated, _ = env.step(action)
        over, total = terminated or truncated, total + reward
    return total


def replay(args, play, seed, rate):
    """Three iterations by hand: mean returns, real steps, last parameters and key."""
    key, _, params, _ = rp.init_state(args, seed, rate)
    adam, returns, steps = optax.scale_by_adam(), [], []
    moments = adam.init(params)
    for i in range(3):
        key, key_play = jax.random.split(key)
        batch, _ = play(params, key_play)
        assert len(np.unique(batch.obs[0], axis=0)) == args.num_envs
        rewards = [batch.reward[:n, j].sum() for j, n in enumerate(batch.mask.sum(axis=0))]
        returns.append(np.mean(rewards))
        steps.append(int(batch.mask.sum()))
        direction, moments = adam.update(gradient(args, params, batch), moments)
        now = rate * (1 - i / 3)  # the learning rate falls to 0
        params = jax.tree.map(lambda param, step, now=now: param - now * step, params, direction)
    return returns, steps, params, key


def test_the_report_is_that_of_an_independent_replay(tmp_path, capsys, monkeypatch):
    path, drawn, animated = str(tmp_path / "run.npz"), [], []
    monkeypatch.setattr(rp, "plot", lambda *call: drawn.extend(call))
    monkeypatch.setattr(rp, "animate", lambda *call: animated.extend(call))
    flags = "--num-iterations 3 --log-interval 2 --num-envs 4 --eval-episodes 5 --seed 7"
    flags += " --learning-rate 0.002 0.004 --num-seeds 2"
    files = ["--save", path, "--plot", str(tmp_path / "p"), "--gif", str(tmp_path / "g")]
    assert rp.main([*flags.split(), *files]) == 0
    saved, printed = np.load(path), capsys.readouterr().out
    args = rp.parse_args(flags.split())
    play = jax.jit(partial(rp.play, args, num_envs=4, noise_scale=1.0))
    for run, (rate, seed) in enumerate(itertools.product([0.002, 0.004], [7, 8])):
        assert (saved["seed"][run], saved["learning_rate"][run]) == (seed, rate)
        returns, steps, params, key = replay(args, play, seed, rate)
        np.testing.assert_allclose(saved["returns"][:, run], [np.mean(returns[:2]), returns[2]])
        np.testing.assert_array_equal(saved["timesteps"][:, run], np.cumsum(steps)[1:])
        for name, param in params.items():
            np.testing.assert_allclose(saved[name][run], param, atol=1e-5)
        batch, _ = rp.play(args, params, key, 5, noise_scale=0.0)
        assert len(np.unique(batch.obs[0], axis=0)) == 5
        weights = [saved[name][run] for name in ["w0", "b0", "w1", "b1"]]
        greedy = [episode_return(np.asarray(obs), *weights) for obs in batch.obs[0]]
        np.testing.assert_allclose(saved["greedy_return"][run], greedy)
        if run == 0:
            np.testing.assert_array_equal(
                jax.random.key_data(animated[3]), jax.random.key_data(key)
            )
            np.testing.assert_array_equal(animated[2]["w0"], weights[0])
    np.testing.assert_array_equal(drawn[2], saved["timesteps"])
    means = saved["greedy_return"].mean(axis=1)
    assert len(set(np.round(means, 1))) == 4
    lines = printed.splitlines()
    assert [line.split("  ")[0] for line in lines[2:4]] == ["iteration 2", "iteration 3"]
    assert f"return {saved['returns'][1].mean():.1f} " in lines[3]
    for line, rate, runs in (lines[4], 0.002, means[:2]), (lines[5], 0.004, means[2:]):
        expected = f"greedy return {runs.mean():.1f}, worst {runs.min():.1f}"
        assert line == f"learning rate {rate}: {expected}"


def test_an_environment_that_would_download_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        rp.parse_args(["--env-id", "MNISTBandit-bsuite"])
    assert stop.value.code == 2
    assert "MNISTBandit-bsuite would download its data" in capsys.readouterr().err


def test_no_key_is_used_twice():
    args = rp.parse_args(["--num-iterations", "2", "--env-id", "Pendulum-v1", "--hidden-size", "2"])
    with jax.debug_key_reuse(True):
        state, _ = jax.jit(partial(rp.train_chunk, args, 2))(rp.init_state(args, 0, 0.01))
        jax.jit(partial(rp.evaluate, args))(state)


def test_learns_and_the_policy_balances_gymnasiums_pole(tmp_path):
    path = str(tmp_path / "params.npz")
    rp.main(["--num-seeds", "2", "--seed", "5", "--log-interval", "1e9", "--save", path])
    saved = np.load(path)
    assert saved["timesteps"].shape == (1, 2)
    weights = [saved[name][1] for name in ["w0", "b0", "w1", "b1"]]
    starts = np.random.default_rng(0).uniform(-0.05, 0.05, (5, 4))
    returns = [episode_return(start, *weights) for start in starts]
    assert np.mean(returns) >= 475, returns
