"""reinforce_parallel.py: episodes against Gymnasium, the gradient by enumeration, Adam's steps."""

import itertools
from functools import partial
from types import SimpleNamespace

import gymnasium
import jax
import numpy as np
import optax
import pytest
from conftest import jit, one_run, watch
from gymnax.environments import spaces
from scipy.special import softmax
from scipy.stats import kstest, norm

import reinforce_parallel as rp

close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)  # sums in single precision


def forward(params, obs):
    return np.tanh(obs @ params["w0"] + params["b0"]) @ params["w1"] + params["b1"]


def test_actions_are_as_likely_as_their_log_probabilities_say():
    keys, rng = jax.random.split(jax.random.key(0), 20000), np.random.default_rng(0)
    draw, obs = jax.jit(jax.vmap(rp.sample, (None, None, 0))), np.ones(3)
    shapes = {"w0": (3, 8), "b0": 8, "w1": (8, 4), "b1": 4}
    params = {name: rng.normal(size=shape) / 2 for name, shape in shapes.items()}
    p = softmax(forward(params, obs))
    counts = np.bincount(draw(params, obs, keys), minlength=4)
    assert np.all(np.abs(counts - 20000 * p) < 5 * np.sqrt(20000 * p * (1 - p)))
    close([rp.log_prob(params, obs, action) for action in range(4)], np.log(p))
    params |= {"w1": params["w1"][:, :2], "b1": params["b1"][:2], "log_std": rng.normal(size=2)}
    mean, std = forward(params, obs), np.exp(params["log_std"])
    noise = (np.asarray(draw(params, obs, keys)) - mean) / std
    assert all(kstest(column, norm.cdf).statistic < 2.5 / 20000**0.5 for column in noise.T)
    assert abs(np.corrcoef(noise.T)[0, 1]) < 5 / 20000**0.5
    other = mean + np.array([1, -2])
    value, slope = jax.jit(jax.value_and_grad(rp.log_prob))(params, obs, other)
    close(value, norm.logpdf(other, mean, std).sum())
    close(slope["log_std"], ((other - mean) / std) ** 2 - 1)
    close(rp.greedy_action(params, obs), mean)


@pytest.mark.parametrize("shape", [(), (1,), (2, 2)])
def test_actions_fit_their_space_or_are_refused(shape, monkeypatch, capsys):
    low, high = np.full(shape, -1.0), np.full(shape, 3.0)
    for space in spaces.Box(low, high, shape), spaces.Box(-1.0, 3.0, shape):
        for inside, outside in (-2, -1), (-1, -1), (0.5, 2), (7, 3):
            action = rp.to_bounds(space, np.full(low.size, inside))
            assert action.shape == shape and np.all(action == outside)
    for space in spaces.Box(low, np.inf * high, shape), spaces.Tuple([spaces.Discrete(2)]):
        env = SimpleNamespace(name="x", action_space=lambda params, space=space: space), None
        monkeypatch.setattr(rp, "make_env", lambda env_id, env=env: env)
        with pytest.raises(SystemExit):
            rp.parse_args([])
        assert "CartPole-v1: actions must be discrete, or" in capsys.readouterr().err


def test_gradient_is_unbiased_for_unequal_lengths_by_enumeration():
    """Action 0 ends an episode, action 1 goes on, at most 3 steps: 4 episodes, 64 triples."""
    # The expectation over all triples is 2 / 3 of the exact gradient. Padding, nan, has no effect.
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
    slope = jax.grad(partial(rp.policy_loss, run := SimpleNamespace(gamma=0.5)))
    slopes = jax.jit(jax.vmap(partial(slope, params)))(episodes)["b1"]
    close(-probability[three].prod(axis=1) @ slopes, exact * 2 / 3)
    close(jax.vmap(partial(rp.advantages, run))(episodes)[:, :, 0].sum(axis=1), 0)  # all live
    # Equal episodes have no advantage at all: a rounding error would give Adam full steps.
    equal = rp.Step(None, None, reward=np.full((7, 99), 0.1), mask=np.ones((7, 99), bool))
    assert not jit(rp.advantages, run)(equal).any()


def test_pendulums_reward_is_that_of_its_torque_and_two_billion_steps_are_counted():
    flags = "--env-id Pendulum-v1 --hidden-size 999 --num-envs 8192 --num-iterations 1400"
    run, other = (one_run(rp, f"{flags} --num-intervals 1", seed=seed) for seed in (3, 4))
    state, other = (jit(rp.init_state, each)() for each in (run, other))
    assert state.key != other.key and np.all(state.params["w0"] != other.params["w0"])
    for name, scale in ("w0", 3**-0.5), ("w1", 0.01):
        assert kstest(np.ravel(state.params[name]) / scale, norm.cdf).pvalue > 1e-5
    _, metrics = jax.eval_shape(partial(rp.train_interval, run), state)
    assert 8192 * 1400 * 200 / metrics["timesteps"].size < 2**31
    episode, _ = jit(rp.play, run)(state.params, jax.random.key(0))
    cosine, sine, speed = episode.obs.T
    torque = 2 * episode.action[:, 0].clip(-1, 1)
    cost = np.arctan2(sine, cosine) ** 2 + 0.1 * speed**2 + 0.001 * torque**2
    close(episode.reward, -cost, rtol=1e-3)  # near the top, the angle loses digits


def follow(obs, act):
    """Play in Gymnasium from an observation on. Return the observations before each action."""
    env, seen, over = gymnasium.make("CartPole-v1").unwrapped, [], False
    env.reset()
    env.state = obs.astype(float)
    while not over and len(seen) < 40:
        seen.append(env.state)
        over = env.step(int(act(len(seen) - 1, env.state)))[2]
    return seen


@pytest.mark.parametrize("sync", ["padding", "truncation"])
def test_learning_is_adam_on_the_episodes_that_were_played(sync, monkeypatch):
    env, params = rp.make_env("CartPole-v1")
    params = params.replace(max_steps_in_episode=40)
    monkeypatch.setattr(rp, "make_env", lambda env_id, params=params: (env, params))
    calls, plays = watch(monkeypatch, rp, "advantages"), watch(monkeypatch, rp, "play", False)
    starts = watch(monkeypatch, type(env), "reset", ordered=False)
    flags = "--num-iterations 7 --num-intervals 2 --num-envs 5 --eval-episodes 5 --hidden-size 8"
    run = one_run(rp, f"{flags} --sync {sync}", learning_rate=0.05, gamma=0.9)
    state, train = jit(rp.init_state, run)(), jit(rp.train_interval, run)
    slope, adam = jit(jax.grad(rp.policy_loss, 1), run), optax.adam(lambda n: 0.05 * (1 - n / 8))
    params, moments, update = state.params, adam.init(state.params), jax.jit(adam.update)
    for _ in range(2):
        calls.clear(), plays.clear()  # `slope` adds to them
        state, metrics = train(state)
        jax.effects_barrier()
        assert (len(plays), len(calls)) == (20, 4)
        lengths = {}
        for _, (episode, _) in plays:
            seen = follow(episode.obs[0], lambda t, _, action=episode.action: action[t])
            lengths[episode.obs[0].tobytes()] = n = len(seen)
            assert episode.mask.tolist() == [True] * n + [False] * (40 - n)
            close(episode.obs[:n], seen)
            close(episode.reward[:n], 1)
        for (episodes,), _ in calls[:]:
            wanted = [lengths[obs.tobytes()] for obs in episodes.obs[:, 0]]
            cut = wanted if sync == "padding" else min(wanted)
            assert np.all(episodes.mask.sum(axis=1) == cut)
            steps, moments = update(slope(params, episodes), moments)
            params = jax.tree.map(np.add, params, steps)
        jax.tree.map(partial(close, atol=5e-3), state.params, params)
        close(metrics["returns"], np.mean([*lengths.values()]))
        assert np.sum(metrics["timesteps"]) == sum(lengths.values())
    greedy = jit(rp.evaluate, run)(state)["greedy_return"]
    jax.effects_barrier()
    assert len({obs.tobytes() for _, (obs, _) in starts}) == 45
    best = partial(follow, act=lambda _, obs: forward(state.params, obs).argmax())
    close(sorted(greedy), sorted(len(best(obs)) for _, (obs, _) in starts[40:]))
