"""reinforce_parallel.py against NumPy, exact gradients by enumeration, and Gymnasium."""

import itertools
from functools import partial
from types import SimpleNamespace

import gymnasium
import gymnax
import jax
import numpy as np
import pytest
from conftest import adam
from scipy.special import softmax
from scipy.stats import norm

import reinforce_parallel as rp

jit = partial(jax.jit, compiler_options=rp.COMPILER_OPTIONS)  # compiles in half the time


def forward(params, obs):
    """Hidden units and outputs of the policy network."""
    hidden = np.tanh(obs @ params["w0"] + params["b0"])
    return hidden, hidden @ params["w1"] + params["b1"]


def numpy_advantages(gamma, reward, mask):
    """Return to go minus the mean of the others', by loops over steps and episodes."""
    returns = np.zeros((len(mask) + 1, mask.shape[1]))
    for t, i in np.argwhere(mask)[::-1]:
        returns[t, i] = reward[t, i] + gamma * returns[t + 1, i]  # 0 after the end
    result = np.zeros(mask.shape)
    for t, i in np.argwhere(mask):
        result[t, i] = returns[t, i] - np.mean(np.delete(returns[t], i))
    return result


def numpy_gradient(gamma, params, obs, action, reward, mask):
    """Minus the estimate of the policy gradient, by the chain rule."""
    hidden, outputs = forward(params, obs)
    weight = -numpy_advantages(gamma, reward, mask)[..., None] / mask.shape[1]
    slope = weight * (np.eye(outputs.shape[-1])[action] - softmax(outputs, axis=-1))
    back = slope @ params["w1"].T * (1 - hidden**2)
    gradient = {"w0": np.einsum("tnd,tnh->dh", obs, back), "b0": back.sum(axis=(0, 1))}
    gradient |= {"w1": np.einsum("tnh,tna->ha", hidden, slope), "b1": slope.sum(axis=(0, 1))}
    return gradient


def first_params(key, inputs, outputs):
    """Normal numbers, so scaled that the outputs are near 0; the key that is left."""
    key, key_hidden, key_output = jax.random.split(key, 3)
    w0 = np.array(jax.random.normal(key_hidden, (inputs, 64))) / inputs**0.5
    w1 = np.array(jax.random.normal(key_output, (64, outputs))) / 100
    return {"w0": w0, "b0": np.zeros(64), "w1": w1, "b1": np.zeros(outputs)}, key


def test_actions_are_mapped_to_unequal_bounds():
    space = gymnax.environments.spaces.Box(np.array([-1, 0]), np.array([3, 1]), (2,))
    actions = np.array([[-2, -1, 0, 0.5, 1, 7]] * 2).T
    expected = np.array([[-1, -1, 1, 2, 3, 3], [0, 0, 0.5, 0.75, 1, 1]]).T
    np.testing.assert_allclose(rp.to_bounds(space, actions), expected)
    assert rp.to_bounds(gymnax.environments.spaces.Discrete(9), 7) == 7


def test_continuous_actions_by_hand():
    """Of four dimensions: the mean plus noise, SciPy's density of it, and the mean alone."""
    rng, key, params = np.random.default_rng(0), jax.random.key(1), {}
    obs, noise = rng.normal(size=(5, 3)), np.array(jax.random.normal(key, (5, 4)))
    for name, shape in ("w0", (3, 8)), ("b0", 8), ("w1", (8, 4)), ("b1", 4), ("log_std", 4):
        params[name] = rng.normal(size=shape) / 2
    mean, std = forward(params, obs)[1], np.exp(params["log_std"])
    action = mean + std * noise
    np.testing.assert_allclose(rp.sample(params, obs, key), action, rtol=1e-4)
    log_density = norm.logpdf(action, mean, std).sum(axis=1)
    np.testing.assert_allclose(rp.log_prob(params, obs, action), log_density, rtol=1e-4)
    np.testing.assert_allclose(rp.greedy_action(params, obs), mean, rtol=1e-4)


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
    args, grad = SimpleNamespace(gamma=0.5), jax.grad(rp.policy_loss)
    gradient = jit(lambda params, batch: grad(params, batch, rp.advantages(args, batch)))
    params = {"w0": np.zeros((1, 1)), "b0": np.zeros(1), "w1": np.zeros((1, 2)), "b1": np.log(pi)}
    expected = np.zeros(2)
    for pair in map(list, itertools.product(range(4), repeat=2)):
        batch = rp.Batch(np.zeros((3, 2, 1)), action[:, pair], reward[:, pair], mask[:, pair])
        expected -= np.prod(probability[pair]) * np.asarray(gradient(params, batch)["b1"])
    np.testing.assert_allclose(expected, exact, rtol=1e-5)


def test_equal_rewards_of_equally_long_episodes_have_no_advantage():
    """--sync truncation learns nothing from them: a rounding error would give Adam full steps."""
    batch = rp.Batch(obs=None, action=None, reward=np.full((99, 7), 0.1), mask=np.ones((99, 7)))
    assert not jit(partial(rp.advantages, SimpleNamespace(gamma=0.99)))(batch).any()


def test_pendulums_torque_is_the_action_scaled_and_clipped():
    """First parameters; the reward of each step is the formula that Gymnasium documents."""
    args = rp.parse_args(["--env-id", "Pendulum-v1"])
    run = SimpleNamespace(**vars(args) | {"seed": 3, "learning_rate": 0.01})
    params, (expected, _) = rp.init_state(run).params, first_params(jax.random.key(3), 3, 1)
    assert params.keys() - expected.keys() == {"log_std"} and params["log_std"].tolist() == [0]
    for name, value in expected.items():
        np.testing.assert_allclose(params[name], value, rtol=1e-6)
    play = jit(partial(rp.play, run, num_envs=16, greedy=False))
    batch = play(params, jax.random.key(0))[0]
    cosine, sine, speed = np.moveaxis(batch.obs, 2, 0)
    torque = 2 * batch.action[..., 0].clip(-1, 1)
    cost = np.arctan2(sine, cosine) ** 2 + 0.1 * speed**2 + 0.001 * torque**2
    assert cost.shape == (200, 16) and np.std(batch.action) > 0.9
    np.testing.assert_allclose(batch.reward, -cost, rtol=1e-3, atol=1e-4)


class Leaning(gymnax.environments.CartPole):
    """A pole whose start depends on a parameter; its rewards, 1 to 2, show the steps' keys."""

    def reset_env(self, key, params):
        _, state = super().reset_env(key, params)
        state = state.replace(theta=params.gravity / 1000 + 0 * state.theta)
        return self.get_obs(state), state

    def step_env(self, key, state, action, params):
        obs, state, _, terminated, info = super().step_env(key, state, action, params)
        return obs, state, 1 + jax.random.uniform(key), terminated, info


LEANING = Leaning()
CHANGES = {"max_steps_in_episode": 40, "gravity": 50.0, "theta_threshold_radians": 0.3}
LEANING_PARAMS = LEANING.default_params.replace(**CHANGES)


@partial(jax.jit, static_argnums=1)
def draws(key, n):
    """Random numbers of n episodes: where they start, Gumbel noise, what rewards show."""
    key, key_reset = jax.random.split(key)
    start, _ = jax.vmap(LEANING.reset, (0, None))(jax.random.split(key_reset, n), LEANING_PARAMS)

    def step(key, _):
        keys = jax.random.split(key, n + 2)
        shown = jax.vmap(lambda key: jax.random.uniform(jax.random.split(key)[0]))(keys[2:])
        return keys[0], (jax.random.gumbel(keys[1], (n, 2)), shown)

    return start, *jax.lax.scan(step, key, length=40)[1]


def play_by_hand(params, key, n, greedy):
    """Episodes that Gymnasium steps: observations, actions, rewards, mask (40, n)."""
    start, noise, shown = map(np.asarray, draws(key, n))
    env = gymnasium.make("CartPole-v1").unwrapped
    env.gravity, env.theta_threshold_radians = 50.0, 0.3
    obs, action = np.zeros((40, n, 4)), np.zeros((40, n), int)
    mask = np.zeros((40, n), bool)
    for i in range(n):
        env.reset()
        env.state = start[i].astype(float)
        for t in range(40):
            obs[t, i], mask[t, i] = env.state, True
            logits = forward(params, obs[t, i])[1]
            action[t, i] = np.argmax(logits if greedy else logits + noise[t, i])
            if env.step(action[t, i])[2]:
                break
    return obs, action, 1 + shown, mask


def replay(seed, rate, gamma, sync):
    """Four updates by hand: returns and steps of whole episodes, parameters and key."""
    params, key = first_params(jax.random.key(seed), 4, 2)
    returns, steps, moments = [], [], dict.fromkeys(params, (0.0, 0.0))
    for count in range(4):
        key, key_play = jax.random.split(key)
        obs, action, reward, mask = play_by_hand(params, key_play, 4, greedy=False)
        returns.append(np.sum(mask * reward) / 4)
        steps.append(mask.sum())
        if sync == "truncation":
            mask = mask & mask.all(axis=1, keepdims=True)
        for name, grad in numpy_gradient(gamma, params, obs, action, reward, mask).items():
            step_size = rate * (1 - count / 4)  # it falls to 0
            moved = adam(params[name], moments[name], grad, count, step_size)
            params[name], moments[name] = moved
    return returns, steps, params, key


@pytest.mark.parametrize("sync", ["padding", "truncation"])
def test_learning_is_that_of_an_independent_replay(sync, monkeypatch):
    """Three updates are two lines of 2 updates. Replaced parameters of the environment rule."""
    animated = []
    monkeypatch.setattr(rp, "animate", lambda *call: animated.extend(call))
    monkeypatch.setattr(rp, "make_env", lambda _: (LEANING, LEANING_PARAMS))
    flags = "--num-iterations 3 --log-interval 2 --num-envs 4 --eval-episodes 3 --seed 7"
    flags += f" --learning-rate 0.02 0.05 --gamma 0.9 0.5 --num-seeds 2 --sync {sync} --gif x.gif"
    results = rp.main(flags.split())
    runs = list(itertools.product([0.02, 0.05], [0.9, 0.5], [7, 8]))
    assert results["timesteps"].dtype == np.int64
    assert len(np.unique(results["w0"], axis=0)) == 8
    for i in 0, 3, 6:
        rate, gamma, seed = runs[i]
        assert [results[name][i] for name in ("learning_rate", "gamma", "seed")] == [*runs[i]]
        returns, steps, params, key = replay(seed, rate, gamma, sync)
        means = np.mean(returns[:2]), np.mean(returns[2:])
        np.testing.assert_allclose(results["returns"][:, i], means, rtol=1e-6)
        np.testing.assert_array_equal(results["timesteps"][:, i], np.cumsum(steps)[1::2])
        for name, param in params.items():
            np.testing.assert_allclose(results[name][i], param, atol=2e-3)
        _, _, reward, mask = play_by_hand(params, key, 3, greedy=True)
        expected = (mask * reward).sum(axis=0)
        np.testing.assert_allclose(results["greedy_return"][i], expected, rtol=1e-6)
        if i == 0:
            assert animated[0].seed == 7 and animated[1] == "x.gif"
            np.testing.assert_equal(animated[2], {name: results[name][0] for name in params})
            assert np.array_equal(jax.random.key_data(animated[3]), jax.random.key_data(key))


def test_learns(capsys):
    assert rp.main("--seed 6 --log-interval 1e9".split())["greedy_return"].mean() >= 475
    assert capsys.readouterr().out.startswith("CartPole-v1, 1 run on 1 x ")
