"""The three linear learners: replayed step by step in NumPy, and played in Gymnasium."""

import importlib
import itertools
from functools import cache, partial
from types import SimpleNamespace

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import adam

equal, close = np.testing.assert_array_equal, np.testing.assert_allclose
PARALLEL, REPLAY, DECAY = "parallel_td", "replay_td", "epsilon_decay_td"
SCALE = {"CartPole-v1": [2.4, 3.0, 0.2, 3.0], "MountainCar-v0": [1.2, 0.07]}
SCALE["Acrobot-v1"] = [1, 1, 1, 1, 6, 12]


@pytest.fixture(scope="module", params=[PARALLEL, REPLAY, DECAY])
def td(request):
    return importlib.import_module(request.param)


def one_run(td, flags, **own):
    """The arguments of one run: each swept flag has one value."""
    args = td.parse_args(flags.split())
    values = {name: vars(args)[name][0] for name in td.SWEPT}
    return SimpleNamespace(**{**vars(args), **values, **own})


def features(sigma, centers, obs):
    """Features (F,) of one observation (D,), in float64; centers (F, D)."""
    distance = np.array(obs, float) / MOON_SCALE - centers
    return np.exp(-(distance**2).sum(axis=1) / (2 * sigma**2))


def semi_gradient(run, phi_of, weights, next_weights, batch):
    """Gradient (F, A) of half the mean squared TD error; TD errors and Q-values taken (B,)."""
    grad, errors, taken = np.zeros(weights.shape), [], []
    for obs, action, reward, next_obs, terminated in batch:
        bootstrap = 0.0 if terminated else run.gamma * max(phi_of(next_obs) @ next_weights)
        phi = phi_of(obs)
        taken.append(phi @ weights[:, action])
        errors.append(taken[-1] - (reward + bootstrap))
        grad[:, action] += errors[-1] * phi / len(batch)
    return grad, np.array(errors), np.array(taken)


class Moon(gymnax.environments.CartPole):
    """A pole with rewards of 3. Its start depends on its parameters: x is 0.5 for gravity 5."""

    def reset_env(self, key, params):
        _, state = super().reset_env(key, params)
        state = state.replace(x=jnp.asarray(params.gravity / 10))
        return self.get_obs(state), state

    def step_env(self, key, state, action, params):
        obs, state, reward, terminated, info = super().step_env(key, state, action, params)
        return obs, state, 3 * reward, terminated, info


MOON, LIMIT, MOON_SCALE = Moon(), 12, [2.0, 3.5, 0.25, 2.5]
FIRST_WEIGHTS = np.random.default_rng(0).normal(size=(9, 2)).astype(np.float32)
PARAMS = MOON.default_params.replace(gravity=5.0, max_steps_in_episode=LIMIT)


@cache
def vectorized(method):
    return jax.jit(jax.vmap(partial(getattr(MOON, method), params=PARAMS)))


class Poles:
    """Four poles of a run, stepped with the random numbers of its key."""

    def __init__(self, run):
        self.key, key_reset, key_centers = jax.random.split(jax.random.key(run.seed), 3)
        self.obs, self.env_state = vectorized("reset")(jax.random.split(key_reset, 4))
        centers = np.array(jax.random.uniform(key_centers, (4, 9), float, -1, 1), float).T
        self.phi_of = partial(features, run.sigma, centers)
        self.totals, self.returns, self.ends = np.zeros(4), [], set()

    def step(self, weights, epsilon):
        """Return (obs, action, reward, next_obs, terminated) of each. Add to what ended."""
        keys = jax.random.split(self.key, 6)
        self.key = keys[0]
        coin, choice = np.array(jax.random.uniform(keys[1], (2, 4)))
        greedy = [np.argmax(self.phi_of(obs) @ weights) for obs in self.obs]
        action = np.where(coin < epsilon, np.floor(2 * choice).astype(int), greedy)
        before, stepped = self.obs, vectorized("step")(keys[2:], self.env_state, action)
        self.obs, self.env_state, reward, terminated, truncated, info = stepped
        self.totals += np.array(reward)
        for i in np.flatnonzero(terminated | truncated):
            self.returns.append(self.totals[i])
            self.totals[i] = 0
            self.ends.add((bool(terminated[i]), bool(truncated[i])))
        columns = before, action, reward, info["final_observation"], terminated
        return list(zip(*map(np.asarray, columns), strict=True))


def mean_of_each(lists):
    return [np.mean(one) if one else np.nan for one in lists]


def learn_in_parallel(run):
    """Four intervals of three updates, each from three steps of four poles."""
    poles, weights, moments = Poles(run), FIRST_WEIGHTS.astype(float), (0.0, 0.0)
    returns, errors, values = ([[] for _ in range(4)] for _ in range(3))
    for count in range(12):
        batch = [row for _ in range(3) for row in poles.step(weights, run.epsilon)]
        grad, error, value = semi_gradient(run, poles.phi_of, weights, weights, batch)
        rate = run.learning_rate * (1 - count / 12)
        weights, moments = adam(weights, moments, grad, count, rate)
        returns[count // 3] += poles.returns
        poles.returns = []
        errors[count // 3].append(np.abs(error).mean())
        values[count // 3].append(value.mean())
    return poles, weights, [mean_of_each(curve) for curve in (returns, errors, values)]


def learn_from_the_past(run):
    """Five intervals of seven steps. The ring has 18 places: fewer than --learning-starts 20.

    Learning starts with the fifth step: the last 31 of 35 are followed by an update from ten
    transitions. Adam and the falling learning rate count updates, so the first is a full one.
    """
    poles, weights, moments = Poles(run), FIRST_WEIGHTS.astype(float), (0.0, 0.0)
    average, ring = weights * 0, [None] * 18
    returns, errors, values = ([[] for _ in range(5)] for _ in range(3))
    for step in range(35):
        epsilon = run.epsilon
        if epsilon is None:  # epsilon_decay_td.py
            epsilon = max(run.end_e, run.start_e * run.epsilon_decay**step)
        for place, row in enumerate(poles.step(weights, epsilon), 4 * step):
            ring[place % 18] = row
        poles.key, key_batch = jax.random.split(poles.key)
        returns[step // 7] += poles.returns
        poles.returns = []
        if step < 4:
            continue
        uniform = np.array(jax.random.uniform(key_batch, 10))
        batch = [ring[int(number)] for number in uniform * np.float32(min(18, 4 * step + 4))]
        grad, error, value = semi_gradient(run, poles.phi_of, weights, average, batch)
        rate = run.learning_rate * (1 - (step - 4) / 31)
        weights, moments = adam(weights, moments, grad, step - 4, rate)
        average = average + run.tau * (weights - average)
        errors[step // 7].append(np.abs(error).mean())
        values[step // 7].append(value.mean())
    return poles, weights, [mean_of_each(curve) for curve in (returns, errors, values)]


def greedy_lengths(poles, weights):
    """Steps that six greedy episodes take in Gymnasium. They start as gymnax's wrapper does."""
    keys = jnp.stack([jax.random.split(key)[0] for key in jax.random.split(poles.key, 6)])
    env = gymnasium.make("CartPole-v1", max_episode_steps=LIMIT)
    env.unwrapped.gravity, lengths = 5.0, [0] * 6
    for i, obs in enumerate(np.array(vectorized("reset")(keys)[0], float)):
        env.reset()
        env.unwrapped.state, over = obs, [False]
        while not any(over):
            obs, _, *over, _ = env.step(np.argmax(poles.phi_of(obs) @ weights))
            lengths[i] += 1
    return lengths


SIZES = """--env-id Moon --num-envs 4 --batch-size 10 --num-centers 9 --eval-episodes 6 --seed 9
    --num-seeds 2 --total-timesteps 132 --log-interval 26
    --learning-rate 0.3 0.05 --gamma 0.8 0.5 --sigma 0.7 1.1"""
RING = "--tau 0.25 0.6 --buffer-size 18 --learning-starts 20"
FLAGS = {
    PARALLEL: f"{SIZES} --epsilon 0.5 0.2",
    REPLAY: f"{SIZES} {RING} --epsilon 0.5 0.2",
    DECAY: f"{SIZES} {RING} --start-e 0.9 0.7 --end-e 0.5 0.2 --epsilon-decay 0.95 0.8",
}


def test_learning_is_that_of_an_independent_replay(td, monkeypatch):
    """A sweep of every flag. Its first and its last run, and two between, are replayed."""
    learn, first_state = learn_in_parallel, td.init_state
    default = first_state(one_run(td, "", seed=0))
    assert not default.weights.any() and td.OBS_SCALE == SCALE
    if td.__name__ != PARALLEL:
        learn = learn_from_the_past
        assert len(default.buffer.action) == 100_000
    monkeypatch.setitem(td.OBS_SCALE, "Moon", MOON_SCALE)
    monkeypatch.setattr(td, "make_env", lambda _: (MOON, PARAMS))
    # After one step of Adam from 0, all actions would have the same value.
    weights = jnp.array(FIRST_WEIGHTS)
    monkeypatch.setattr(td, "init_state", lambda args: first_state(args)._replace(weights=weights))
    flags = FLAGS[td.__name__].split()
    results, args = td.main(flags), vars(td.parse_args(flags))
    sweep = {name: args[name] for name in td.SWEPT} | {"seed": [9, 10]}
    runs = [dict(zip(sweep, values, strict=True)) for values in itertools.product(*sweep.values())]
    for name in sweep:
        equal(results[name], [run[name] for run in runs])
    # If a flag had no effect, at most half of the runs would differ.
    assert len(np.unique(results["weights"], axis=0)) > len(runs) / 2
    ends, middle = set(), len(runs) // 3  # runs whose flags have the first, the last value in turn
    for i in 0, middle, len(runs) - 1 - middle, len(runs) - 1:
        run = SimpleNamespace(**{"epsilon": None} | runs[i])
        poles, weights, curves = learn(run)
        for name, curve in zip(["returns", "td_error", "q_value"], curves, strict=True):
            close(results[name][:, i], curve, rtol=2e-3, atol=1e-5, err_msg=f"{name} of run {i}")
        close(results["weights"][i], weights, rtol=1e-3, atol=1e-3)
        equal(results["greedy_return"][i] / 3, greedy_lengths(poles, weights))
        obs = np.array([0.3, -0.2, 0.1, 0.4])
        saved = obs * results["inverse_scale"][i] - results["centers"][i]  # (F, D)
        close(np.exp(-np.sum(saved**2, axis=1) / 2), poles.phi_of(obs), rtol=1e-5)
        ends |= poles.ends
    assert ends >= {(True, False), (False, True)}  # terminated, truncated


def test_a_scale_of_the_wrong_length_is_an_error(td, monkeypatch):
    monkeypatch.setitem(td.OBS_SCALE, "CartPole-v1", [2.4])  # would be used for all four
    with pytest.raises(ValueError, match=r"OBS_SCALE of CartPole-v1 needs the shape \(4,\)"):
        td.main([])


def test_learns(td, capsys):
    """The default run, with a seed of its own."""
    greedy = td.main(["--seed", "2"])["greedy_return"].mean()
    first, *_, last = capsys.readouterr().out.splitlines()
    assert greedy >= 475 and first.startswith("CartPole-v1, 1 run on 1 x ")
    assert last == f"greedy return {greedy:.1f}  worst run {greedy:.1f}"
