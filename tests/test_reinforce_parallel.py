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


def to_go(gamma, rewards):
    """Discounted sum of the rewards from each step of an episode on."""
    return [sum(gamma**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]


def numpy_gradient(gamma, params, episodes):
    """Minus the estimate of the policy gradient; an episode is (obs, action, reward), (L, ...)."""
    returns = np.zeros((len(episodes), 40))  # 0 after the end
    for i, (*_, reward) in enumerate(episodes):
        returns[i, : len(reward)] = to_go(gamma, reward)
    gradient = {name: np.zeros(np.shape(value)) for name, value in params.items()}
    for i, (obs, action, reward) in enumerate(episodes):
        advantage = (returns[i] - np.delete(returns, i, axis=0).mean(axis=0))[: len(reward)]
        hidden, logits = forward(params, obs)
        slope = -advantage[:, None] * (np.eye(2)[action] - softmax(logits, axis=1)) / len(episodes)
        back = slope @ params["w1"].T * (1 - hidden**2)
        parts = {"w0": obs.T @ back, "b0": back.sum(axis=0)}
        parts |= {"w1": hidden.T @ slope, "b1": slope.sum(axis=0)}
        gradient = {name: gradient[name] + part for name, part in parts.items()}
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
    obs, noise = rng.normal(size=3), np.array(jax.random.normal(key, 4))
    for name, shape in ("w0", (3, 8)), ("b0", 8), ("w1", (8, 4)), ("b1", 4), ("log_std", 4):
        params[name] = rng.normal(size=shape) / 2
    mean, std = forward(params, obs)[1], np.exp(params["log_std"])
    action = mean + std * noise
    np.testing.assert_allclose(rp.sample(params, obs, key), action, rtol=1e-4)
    log_density = norm.logpdf(action, mean, std).sum()
    np.testing.assert_allclose(rp.log_prob(params, obs, action), log_density, rtol=1e-4)
    np.testing.assert_allclose(rp.greedy_action(params, obs), mean, rtol=1e-4)


def test_gradient_is_unbiased_for_unequal_lengths_by_enumeration():
    """Action 0 ends an episode, action 1 goes on, at most 3 steps: 4 episodes, 16 pairs of them.

    The expectation over all pairs is the exact gradient of a single episode's discounted returns
    to go. A mean over the episodes still alive, or over all with one's own, is not.
    """
    action = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]])  # of each episode, a row
    mask = np.array([[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1]], bool)
    reward = np.array([[5.0, 1.0], [-2.0, 3.0], [4.0, 7.0]])[[0, 1, 2], action]
    pi, exact, expected = np.array([0.6, 0.4]), np.zeros(2), np.zeros(2)
    probability = np.prod(pi[action], axis=1, where=mask)
    for i, length in enumerate(mask.sum(axis=1)):
        for t, return_to_go in enumerate(to_go(0.5, reward[i, :length])):
            exact += probability[i] * return_to_go * (np.eye(2)[action[i, t]] - pi)
    args, grad = SimpleNamespace(gamma=0.5), jax.grad(rp.policy_loss)
    gradient = jit(lambda params, pair: grad(params, pair, rp.advantages(args, pair)))
    params = {"w0": np.zeros((1, 1)), "b0": np.zeros(1), "w1": np.zeros((1, 2)), "b1": np.log(pi)}
    for pair in map(list, itertools.product(range(4), repeat=2)):
        episodes = rp.Step(np.zeros((2, 3, 1)), action[pair], reward[pair], mask[pair])
        expected -= np.prod(probability[pair]) * np.asarray(gradient(params, episodes)["b1"])
    np.testing.assert_allclose(expected, exact, rtol=1e-5)


def test_equal_rewards_of_equally_long_episodes_have_no_advantage():
    """--sync truncation learns nothing from them: a rounding error would give Adam full steps."""
    episodes = rp.Step(obs=None, action=None, reward=np.full((7, 99), 0.1), mask=np.ones((7, 99)))
    assert not jit(partial(rp.advantages, SimpleNamespace(gamma=0.99)))(episodes).any()


def test_pendulums_torque_is_the_action_scaled_and_clipped():
    """First parameters; the reward of each step is the formula that Gymnasium documents."""
    args = rp.parse_args(["--env-id", "Pendulum-v1"])
    run = SimpleNamespace(**vars(args) | {"seed": 3, "learning_rate": 0.01})
    params, (expected, _) = rp.init_state(run).params, first_params(jax.random.key(3), 3, 1)
    assert params.keys() - expected.keys() == {"log_std"} and params["log_std"].tolist() == [0]
    for name, value in expected.items():
        np.testing.assert_allclose(params[name], value, rtol=1e-6)
    play = jit(jax.vmap(partial(rp.play, run, params)))
    episodes = play(jax.random.split(jax.random.key(0), 16))[0]
    cosine, sine, speed = np.moveaxis(episodes.obs, 2, 0)
    torque = 2 * episodes.action[..., 0].clip(-1, 1)
    cost = np.arctan2(sine, cosine) ** 2 + 0.1 * speed**2 + 0.001 * torque**2
    assert cost.shape == (16, 200) and np.std(episodes.action) > 0.9
    np.testing.assert_allclose(episodes.reward, -cost, rtol=1e-3, atol=1e-4)


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


@jax.jit
def draws(key):
    """Random numbers of an episode: where it starts, Gumbel noise, what rewards show.

    The key is split into the next one and one for the start; in each step, into the next one, one
    for the action and one for gymnax, which uses the first half of it.
    """
    key, key_reset = jax.random.split(key)

    def step(key, _):
        key, key_action, key_step = jax.random.split(key, 3)
        shown = jax.random.uniform(jax.random.split(key_step)[0])
        return key, (jax.random.gumbel(key_action, 2), shown)

    return LEANING.reset(key_reset, LEANING_PARAMS)[0], *jax.lax.scan(step, key, length=40)[1]


def play_by_hand(params, key, greedy=False):
    """An episode that Gymnasium steps: observations, actions, rewards, (L, ...) each."""
    start, noise, shown = map(np.asarray, draws(key))
    env = gymnasium.make("CartPole-v1").unwrapped
    env.gravity, env.theta_threshold_radians = 50.0, 0.3
    env.reset()
    env.state, observed, actions = start.astype(float), [], []
    for t in range(40):
        observed.append(env.state)
        logits = forward(params, np.array(env.state))[1]
        actions.append(np.argmax(logits if greedy else logits + noise[t]))
        if env.step(actions[t])[2]:
            break
    return np.array(observed), np.array(actions), 1 + shown[: len(actions)]


def replay(seed, rate, gamma, sync):
    """Four updates by hand: returns and steps of whole episodes, parameters and key."""
    params, key = first_params(jax.random.key(seed), 4, 2)
    returns, steps, moments = [], [], dict.fromkeys(params, (0.0, 0.0))
    for count in range(4):
        key, key_play = jax.random.split(key)
        episodes = [play_by_hand(params, one) for one in jax.random.split(key_play, 4)]
        returns.append(np.mean([reward.sum() for *_, reward in episodes]))
        steps.append(sum(len(action) for _, action, _ in episodes))
        if sync == "truncation":
            shortest = min(len(action) for _, action, _ in episodes)
            episodes = [[array[:shortest] for array in episode] for episode in episodes]
        for name, grad in numpy_gradient(gamma, params, episodes).items():
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
        episodes = [play_by_hand(params, one, greedy=True) for one in jax.random.split(key, 3)]
        expected = [reward.sum() for *_, reward in episodes]
        np.testing.assert_allclose(results["greedy_return"][i], expected, rtol=1e-6)
        if i == 0:
            assert animated[0].seed == 7 and animated[1] == "x.gif"
            np.testing.assert_equal(animated[2], {name: results[name][0] for name in params})
            assert np.array_equal(jax.random.key_data(animated[3]), jax.random.key_data(key))


def test_learns(capsys):
    assert rp.main("--seed 6 --log-interval 1e6".split())["greedy_return"].mean() >= 475
    assert capsys.readouterr().out.startswith("CartPole-v1, 1 run on 1 x ")
