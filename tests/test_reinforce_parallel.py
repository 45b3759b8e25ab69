"""reinforce_parallel.py against NumPy, exact gradients by enumeration, and Gymnasium."""

import itertools
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import gymnasium
import gymnax
import gymnax.visualize
import jax
import numpy as np
import pytest
from conftest import adam
from scipy.special import log_softmax
from scipy.stats import norm

import reinforce_parallel as rp

close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)  # sums in single precision


def forward(params, obs):
    """Outputs of the policy network."""
    return np.tanh(obs @ params["w0"] + params["b0"]) @ params["w1"] + params["b1"]


def numpy_loss(gamma, params, episodes):
    """Its slopes are minus the estimate of the policy gradient. The baseline leaves one out."""
    obs, action, reward, mask = episodes
    output, size = forward(params, obs), len(reward)
    if "log_std" in params:
        log_pi = norm.logpdf(action, output, np.exp(params["log_std"])).sum(axis=2)
    else:
        log_pi = np.sum(np.eye(2)[action] * log_softmax(output, axis=2), axis=2)
    later = np.subtract.outer(*[np.arange(mask.shape[1])] * 2)
    returns = (mask * reward) @ np.tril(gamma**later)  # to go
    others = [np.delete(returns, i, axis=0).mean(axis=0) for i in range(size)]
    return (1 - size) / size**2 * np.sum(mask * (returns - others) * log_pi)


def numpy_gradient(gamma, params, episodes):
    """Central differences."""
    gradient = {name: np.zeros(value.shape) for name, value in params.items()}
    for name, slopes in gradient.items():
        for place, step in itertools.product(np.ndindex(slopes.shape), [1e-5, -1e-5]):
            moved = {**params, name: params[name].copy()}
            moved[name][place] += step
            slopes[place] += numpy_loss(gamma, moved, episodes) / (2 * step)
    return gradient


def first_params(key, inputs, outputs):
    """Normal numbers, so scaled that the outputs are near 0; the key that is left."""
    key, key_hidden, key_output = jax.random.split(key, 3)
    w0 = np.array(jax.random.normal(key_hidden, (inputs, 8))) / inputs**0.5
    w1 = np.array(jax.random.normal(key_output, (8, outputs))) / 100
    return {"w0": w0, "b0": np.zeros(8), "w1": w1, "b1": np.zeros(outputs)}, key


def test_gaussian_policy_by_hand():
    """Actions, their density, unequal bounds; the gradient of episodes of 1, 3 and 4 steps."""
    space = gymnax.environments.spaces.Box(np.array([-1, 0]), np.array([3, 1]), (2,))
    for inside, outside in (-2, [-1, 0]), (-1, [-1, 0]), (0.5, [2, 0.75]), (7, [3, 1]):
        close(rp.to_bounds(space, np.full(2, inside)), outside)
    rng, key, params = np.random.default_rng(0), jax.random.key(1), {}
    for name, shape in ("w0", (3, 8)), ("b0", (8,)), ("w1", (8, 2)), ("b1", (2,)), ("log_std", 2):
        params[name] = rng.normal(size=shape) / 2
    obs, action, reward = (rng.normal(size=shape) for shape in [(3, 4, 3), (3, 4, 2), (3, 4)])
    one, mean = obs[0, 0], forward(params, obs[0, 0])
    std = np.exp(params["log_std"])
    close(rp.sample(params, one, key), mean + std * np.array(jax.random.normal(key, 2)))
    close(rp.greedy_action(params, one), mean)
    close(rp.log_prob(params, one, action[0, 0]), norm.logpdf(action[0, 0], mean, std).sum())
    episodes = rp.Step(obs, action, reward, np.arange(4) < np.array([[1], [3], [4]]))
    gradient = jax.grad(rp.policy_loss)(params, SimpleNamespace(gamma=0.5), episodes)
    jax.tree.map(close, gradient, numpy_gradient(0.5, params, episodes))


def test_gradient_is_unbiased_for_unequal_lengths_by_enumeration():
    """Action 0 ends an episode, action 1 goes on, at most 3 steps: 4 episodes, 64 triples of them.

    The expectation over all triples is 2 / 3 of the exact gradient of a single episode's
    discounted returns to go. With a mean over the episodes still alive, it is not.
    """
    action = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]])  # of each episode, a row
    mask = np.array([[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1]], bool)
    reward = np.array([[5.0, 1.0], [-2.0, 3.0], [4.0, 7.0]])[[0, 1, 2], action]
    pi, exact = np.array([0.6, 0.4]), np.zeros(2)
    probability = np.prod(pi[action], axis=1, where=mask)
    for i, t in np.argwhere(mask):
        to_go = 0.5 ** np.arange(3 - t) @ (mask * reward)[i, t:]
        exact += probability[i] * to_go * (np.eye(2)[action[i, t]] - pi)
    params = {"w0": np.zeros((1, 1)), "b0": np.zeros(1), "w1": np.zeros((1, 2)), "b1": np.log(pi)}
    three = np.array([*itertools.product(range(4), repeat=3)])  # (64, 3)
    episodes = rp.Step(np.zeros((64, 3, 3, 1)), action[three], reward[three], mask[three])
    loss = partial(rp.policy_loss, args=SimpleNamespace(gamma=0.5))
    slopes = jax.vmap(lambda each: jax.grad(loss)(params, episodes=each))(episodes)["b1"]
    close(-probability[three].prod(axis=1) @ slopes, exact * 2 / 3)


def test_equal_rewards_of_equally_long_episodes_have_no_advantage():
    """--sync truncation learns nothing from them: a rounding error would give Adam full steps."""
    episodes = rp.Step(obs=None, action=None, reward=np.full((7, 99), 0.1), mask=np.ones((7, 99)))
    assert not jax.jit(partial(rp.advantages, SimpleNamespace(gamma=0.99)))(episodes).any()


def test_pendulums_torque_is_the_action_scaled_and_clipped():
    """First parameters; the reward of each step is the formula that Gymnasium documents."""
    args = rp.parse_args("--env-id Pendulum-v1 --hidden-size 8".split())
    run = SimpleNamespace(**vars(args) | {"seed": 3, "learning_rate": 0.01})
    params, (expected, _) = rp.init_state(run).params, first_params(jax.random.key(3), 3, 1)
    jax.tree.map(partial(close, atol=1e-7), params, {**expected, "log_std": np.zeros(1)})
    play = jax.jit(jax.vmap(partial(rp.play, run, params)))
    episodes = play(jax.random.split(jax.random.key(0), 16))[0]
    cosine, sine, speed = np.moveaxis(episodes.obs, 2, 0)
    torque = 2 * episodes.action[..., 0].clip(-1, 1)
    cost = np.arctan2(sine, cosine) ** 2 + 0.1 * speed**2 + 0.001 * torque**2
    assert cost.shape == (16, 200) and np.std(episodes.action) > 0.9
    close(episodes.reward, -cost, rtol=1e-3)  # near the top, the angle loses digits


def test_an_animation_shows_what_was_played_up_to_200_steps(monkeypatch):
    """A constant torque never swings the acrobot up: it has 500 steps, each with reward -1."""
    show = Mock()
    monkeypatch.setattr(gymnax.visualize, "Visualizer", show)
    params = {"w0": np.zeros((6, 1)), "b0": np.zeros(1), "w1": np.zeros((1, 3)), "b1": np.zeros(3)}
    rp.animate(rp.parse_args(["--env-id", "Acrobot-v1"]), "x.gif", params, jax.random.key(0))
    _, _, states, rewards = show.call_args.args
    assert [state.time for state in states] == [*range(200)]
    np.testing.assert_array_equal(rewards[:200], -np.arange(1, 201))


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
@jax.vmap
def draws(key):
    """Start of an episode, Gumbel noise, and what rewards show: gymnax splits its keys, too."""
    key, key_reset = jax.random.split(key)

    def step(key, _):
        key, key_action, key_step = jax.random.split(key, 3)
        shown = jax.random.uniform(jax.random.split(key_step)[0])
        return key, (jax.random.gumbel(key_action, 2), shown)

    return LEANING.reset(key_reset, LEANING_PARAMS)[0], *jax.lax.scan(step, key, length=40)[1]


def play_by_hand(params, keys, greedy=False):
    """Episodes (N, 40) that Gymnasium steps."""
    obs, action = np.zeros((len(keys), 40, 4)), np.zeros((len(keys), 40), int)
    reward, env = np.zeros(action.shape), gymnasium.make("CartPole-v1").unwrapped
    env.gravity, env.theta_threshold_radians = 50.0, 0.3
    for i, (start, noise, shown) in enumerate(zip(*map(np.asarray, draws(keys)), strict=True)):
        env.reset()
        env.state = start.astype(float)
        for t in range(40):
            obs[i, t], reward[i, t] = env.state, 1 + shown[t]
            action[i, t] = np.argmax(forward(params, obs[i, t]) + (0 if greedy else noise[t]))
            if env.step(action[i, t])[2]:
                break
    return rp.Step(obs, action, reward, mask=reward > 0)


def replay(seed, rate, gamma, sync):
    """Four updates by hand: returns and steps of whole episodes, parameters and key."""
    params, key = first_params(jax.random.key(seed), 4, 2)
    returns, steps, moments = [], [], dict.fromkeys(params, (0.0, 0.0))
    for count in range(4):
        key, key_play = jax.random.split(key)
        episodes = play_by_hand(params, jax.random.split(key_play, 5))
        returns.append(episodes.reward.sum(axis=1).mean())
        steps.append(episodes.mask.sum())
        if sync == "truncation":
            episodes = episodes._replace(mask=episodes.mask & episodes.mask.all(axis=0))
        for name, grad in numpy_gradient(gamma, params, episodes).items():
            size = rate * (1 - count / 4)  # it falls to 0
            params[name], moments[name] = adam(params[name], moments[name], grad, count, size)
    return np.reshape(returns, (2, 2)), np.cumsum(steps)[1::2], params, key


@pytest.mark.parametrize("sync", ["padding", "truncation"])
def test_learning_is_that_of_an_independent_replay(sync, monkeypatch):
    """Three updates are two lines of 2 updates. Replaced parameters of the environment rule.

    A metric that someone adds is saved under its name: its mean over the updates of a line.
    """
    train_step = rp.train_step

    def with_squares(*of_run):
        state, metrics = train_step(*of_run)
        return state, metrics | {"squares": metrics["returns"] ** 2}

    monkeypatch.setattr(rp, "train_step", with_squares)
    monkeypatch.setattr(rp, "make_env", lambda _: (LEANING, LEANING_PARAMS))
    flags = "--num-iterations 3 --log-interval 2 --num-envs 5 --eval-episodes 3 --hidden-size 8"
    flags += f" --learning-rate 0.02 0.05 --gamma 0.9 0.5 --num-seeds 2 --seed 7 --sync {sync}"
    results = rp.main(flags.split())
    assert len(np.unique(results["w0"], axis=0)) == 8 and results["timesteps"].dtype == np.int64
    for i in 0, 3, 6:
        own = [results[name][i] for name in ("seed", "learning_rate", "gamma")]
        returns, steps, params, key = replay(*own, sync)
        close(results["returns"][:, i], returns.mean(axis=1))
        close(results["squares"][:, i], (returns**2).mean(axis=1))
        np.testing.assert_array_equal(results["timesteps"][:, i], steps)
        learned = {name: results[name][i] for name in params}
        jax.tree.map(partial(close, atol=2e-3), learned, params)  # Adam scales rounding errors up
        greedy = play_by_hand(params, jax.random.split(key, 3), greedy=True).reward
        close(results["greedy_return"][i], greedy.sum(axis=1))
