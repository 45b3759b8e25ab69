"""reinforce_parallel.py: episodes against Gymnasium, gradients by enumeration and in NumPy."""

import itertools
from functools import partial
from types import SimpleNamespace

import gymnasium
import gymnax
import jax
import numpy as np
import pytest
from conftest import adam, one_run, watch
from gymnax.environments import spaces
from scipy.special import log_softmax, softmax
from scipy.stats import kstest, norm

import reinforce_parallel as rp

close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)  # sums in single precision
RNG = np.random.default_rng(0)


def random_params(inputs, hidden, outputs, continuous=False):
    shapes = {"w0": (inputs, hidden), "b0": hidden, "w1": (hidden, outputs), "b1": outputs}
    shapes |= {"log_std": outputs} if continuous else {}
    return {name: RNG.normal(size=shape) / 2 for name, shape in shapes.items()}


def forward(params, obs):
    return np.tanh(obs @ params["w0"] + params["b0"]) @ params["w1"] + params["b1"]


def numpy_loss(gamma, params, episodes):
    """Its slopes are minus the estimate of the policy gradient. The baseline leaves one out."""
    obs, action, reward, mask = episodes
    output, size = forward(params, obs), len(reward)
    if "log_std" in params:
        log_pi = norm.logpdf(action, output, np.exp(params["log_std"])).sum(axis=2)
    else:
        log_pi = np.sum(np.eye(output.shape[2])[action] * log_softmax(output, axis=2), axis=2)
    later = np.subtract.outer(*[np.arange(mask.shape[1])] * 2)
    returns = np.where(mask, reward, 0) @ np.tril(gamma ** np.maximum(later, 0))  # to go
    others = [np.delete(returns, i, axis=0).mean(axis=0) for i in range(size)]
    return (1 - size) / size**2 * np.sum((returns - others) * log_pi, where=mask)


def numpy_gradient(gamma, params, episodes):
    """Central differences."""
    gradient = {name: np.zeros(value.shape) for name, value in params.items()}
    for name, slopes in gradient.items():
        for place, step in itertools.product(np.ndindex(slopes.shape), [1e-5, -1e-5]):
            moved = {**params, name: params[name].copy()}
            moved[name][place] += step
            slopes[place] += numpy_loss(gamma, moved, episodes) / (2 * step)
    return gradient


def test_actions_are_as_likely_as_their_log_probabilities_say():
    keys, obs = jax.random.split(jax.random.key(0), 20000), RNG.normal(size=3)
    params = random_params(3, 8, 4)
    p, draw = softmax(forward(params, obs)), jax.vmap(rp.sample, (None, None, 0))
    counts = np.bincount(draw(params, obs, keys), minlength=4)
    assert np.all(np.abs(counts - 20000 * p) < 5 * np.sqrt(20000 * p * (1 - p)))
    close([rp.log_prob(params, obs, action) for action in range(4)], np.log(p))
    assert rp.greedy_action(params, obs) == p.argmax()
    params = random_params(3, 8, 2, continuous=True)
    mean, std = forward(params, obs), np.exp(params["log_std"])
    noise = (np.asarray(draw(params, obs, keys)) - mean) / std
    assert all(kstest(column, norm.cdf).statistic < 2.5 / 20000**0.5 for column in noise.T)
    assert abs(np.corrcoef(noise.T)[0, 1]) < 5 / 20000**0.5
    close(rp.log_prob(params, obs, mean + np.array([1, -2])), norm.logpdf([1, -2], 0, std).sum())
    close(rp.greedy_action(params, obs), mean)


@pytest.mark.parametrize("shape", [(), (1,), (2, 2)])
def test_actions_have_the_bounds_and_the_shape_of_their_space(shape):
    low, high = np.full(shape, -1.0), np.full(shape, 3.0)
    size = low.size
    for inside, outside in (-2, -1), (-1, -1), (0.5, 2), (7, 3):
        for space in spaces.Box(low, high, shape), spaces.Box(-1.0, 3.0, shape):
            action = rp.to_bounds(space, np.full(size, inside))
            assert action.shape == shape
            close(action, np.full(shape, outside))


def test_actions_that_it_cannot_choose_are_refused(monkeypatch, capsys):
    for space in spaces.Box(-np.inf, np.inf, (1,)), spaces.Tuple([spaces.Discrete(2)]):
        env = SimpleNamespace(name="x", action_space=lambda params, space=space: space)
        monkeypatch.setattr(rp, "make_env", lambda env_id, env=env: (env, None))
        with pytest.raises(SystemExit):
            rp.parse_args([])
        assert "CartPole-v1: actions must be discrete, or" in capsys.readouterr().err


def test_gradient_is_unbiased_for_unequal_lengths_by_enumeration():
    """Action 0 ends an episode, action 1 goes on, at most 3 steps: 4 episodes, 64 triples of them.

    The expectation over all triples is 2 / 3 of the exact gradient of a single episode's
    discounted returns to go. With a mean over the episodes still alive, it is not. What is in the
    padding, nan, has no effect.
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
    obs, reward = np.where(mask, 0, np.nan)[..., None], np.where(mask, reward, np.nan)
    episodes = rp.Step(obs[three], action[three], reward[three], mask[three])
    loss = partial(rp.policy_loss, SimpleNamespace(gamma=0.5))
    slopes = jax.vmap(lambda each: jax.grad(loss)(params, each))(episodes)["b1"]
    close(-probability[three].prod(axis=1) @ slopes, exact * 2 / 3)


def test_gradient_of_a_gaussian_policy_is_that_of_numpy():
    """Episodes of 1, 3 and 4 steps, two actions, a standard deviation that learns, too."""
    params = random_params(3, 8, 2, continuous=True)
    obs, action, reward = (RNG.normal(size=shape) for shape in [(3, 4, 3), (3, 4, 2), (3, 4)])
    episodes = rp.Step(obs, action, reward, np.arange(4) < np.array([[1], [3], [4]]))
    gradient = jax.grad(partial(rp.policy_loss, SimpleNamespace(gamma=0.5)))(params, episodes)
    jax.tree.map(close, gradient, numpy_gradient(0.5, params, episodes))


def test_equal_rewards_of_equally_long_episodes_have_no_advantage():
    """--sync truncation learns nothing from them: a rounding error would give Adam full steps."""
    episodes = rp.Step(obs=None, action=None, reward=np.full((7, 99), 0.1), mask=np.ones((7, 99)))
    assert not jax.jit(partial(rp.advantages, SimpleNamespace(gamma=0.99)))(episodes).any()


class Pole(gymnax.environments.CartPole):
    """A pole with rewards of 3.25 or 4.75, by action."""

    def step_env(self, key, state, action, params):
        obs, state, _, terminated, info = super().step_env(key, state, action, params)
        return obs, state, 3.25 + 1.5 * action, terminated, info


POLE = Pole(), Pole().default_params.replace(max_steps_in_episode=40)


def check_episode(episode, params=None):
    """Gymnasium plays the actions from the first observation; they are greedy if params say so."""
    env = gymnasium.make("CartPole-v1").unwrapped
    env.reset()
    env.state, over = np.array(episode.obs[0], float), False
    for obs, action, reward, mask in zip(*map(np.asarray, episode), strict=True):
        assert mask != over
        if over:
            continue
        close(obs, env.state)
        assert reward == 3.25 + 1.5 * action
        assert params is None or action == np.argmax(forward(params, obs))
        over = env.step(int(action))[2]


def test_pendulums_torque_is_the_action_scaled_and_clipped():
    """First parameters; the reward of each step is the formula that Gymnasium documents."""
    run = one_run(rp, "--env-id Pendulum-v1 --hidden-size 1000", seed=3)
    params = rp.init_state(run).params
    for name, shape, scale in ("w0", (3, 1000), 3**-0.5), ("w1", (1000, 1), 0.01):
        assert params[name].shape == shape
        assert kstest(np.ravel(params[name]) / scale, norm.cdf).pvalue > 1e-5
    assert not any(np.any(params[name]) for name in ("b0", "b1", "log_std"))
    play = jax.jit(jax.vmap(partial(rp.play, run, params)))
    episodes = play(jax.random.split(jax.random.key(0), 16))[0]
    cosine, sine, speed = np.moveaxis(episodes.obs, 2, 0)
    torque = 2 * episodes.action[..., 0].clip(-1, 1)
    cost = np.arctan2(sine, cosine) ** 2 + 0.1 * speed**2 + 0.001 * torque**2
    assert cost.shape == (16, 200) and np.std(episodes.action) > 0.9
    close(episodes.reward, -cost, rtol=1e-3)  # near the top, the angle loses digits


@pytest.mark.parametrize("sync", ["padding", "truncation"])
def test_learning_is_reinforce_on_the_episodes_that_were_played(sync, monkeypatch):
    """Gradients, Adam and its schedule, what progress lines show, and then greedy episodes."""
    monkeypatch.setattr(rp, "make_env", lambda _: POLE)
    calls, plays = watch(monkeypatch, rp, "advantages"), []
    flags = f"--num-iterations 8 --num-intervals 2 --num-envs 5 --hidden-size 8 --sync {sync}"
    run = one_run(rp, f"{flags} --eval-episodes 5", learning_rate=0.05, gamma=0.9, seed=7)
    play, starts = rp.play, []

    def watched_play(run, params, key, greedy=False):
        episode, states = play(run, params, key, greedy)
        jax.debug.callback(lambda *call: plays.append(rp.Step(*call)), *episode)
        return episode, states

    monkeypatch.setattr(rp, "play", watched_play)
    state, moments, count = rp.init_state(run), None, 0
    params = {name: np.array(value, float) for name, value in state.params.items()}
    moments = dict.fromkeys(params, (0.0, 0.0))
    for _ in range(2):
        calls.clear(), plays.clear()
        state, metrics = jax.jit(partial(rp.train_interval, run))(state)
        jax.effects_barrier()
        assert (len(calls), len(plays)) == (4, 20)
        for ((episodes,), _), whole in zip(calls, np.split(np.arange(20), 4), strict=True):
            episodes = rp.Step(*map(np.asarray, episodes))
            lengths = sorted(plays[i].mask.sum() for i in whole)
            shown = sorted(episodes.mask.sum(axis=1))
            assert shown == (lengths if sync == "padding" else [lengths[0]] * 5)
            for name, slopes in numpy_gradient(0.9, params, episodes).items():
                step, moments[name] = adam(moments[name], slopes, count, 0.05 * (1 - count / 8))
                params[name] += step
            count += 1
        jax.tree.map(partial(close, atol=5e-3), dict(state.params), params)
        params = {name: np.array(value, float) for name, value in state.params.items()}
        returns = [np.sum(episode.reward, where=episode.mask) for episode in plays]
        close(metrics["returns"], np.mean(returns))
        assert np.sum(metrics["timesteps"]) == sum(episode.mask.sum() for episode in plays)
        for episode in plays:
            check_episode(episode)
            starts.append(episode.obs[0].tobytes())
    plays.clear()
    greedy = jax.jit(partial(rp.evaluate, run))(state)["greedy_return"]
    jax.effects_barrier()
    for episode in plays:
        check_episode(episode, params)
        starts.append(episode.obs[0].tobytes())
    close(sorted(greedy), sorted(np.sum(e.reward, where=e.mask) for e in plays))
    assert len({*starts}) == len(starts) == 45
    assert plays[0].mask.shape == (40,)


def test_steps_are_counted_in_parts_below_32_bits():
    """Traced, not run: 2.3e9 steps in one interval. The launcher adds the parts up."""
    flags = "--env-id Pendulum-v1 --num-envs 8192 --num-iterations 1400 --num-intervals 1"
    run = one_run(rp, flags)
    _, metrics = jax.eval_shape(partial(rp.train_interval, run), rp.init_state(run))
    assert 8192 * 1400 * 200 / np.prod(metrics["timesteps"].shape, initial=1) < 2**31


def test_it_runs_on_all_environments_of_gymnax_but_one():
    """Traced, not run: shapes and types of observations, actions and rewards."""
    for env_id in gymnax.registered_envs:
        if env_id != "MNISTBandit-bsuite":
            run = one_run(rp, f"--env-id {env_id} --num-envs 2")
            state = jax.eval_shape(lambda run=run: rp.init_state(run))
            jax.eval_shape(partial(rp.train_interval, run), state)
