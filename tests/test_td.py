"""The three linear learners: replayed step by step in NumPy, and played in Gymnasium."""

import itertools
from functools import cache, partial
from types import SimpleNamespace

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
from conftest import adam

import epsilon_decay_td
import parallel_td
import replay_td

equal, close = np.testing.assert_array_equal, np.testing.assert_allclose


class Moon(gymnax.environments.CartPole):
    """A pole with rewards of 3.25 or 4.75, by action. It starts at gravity / 10: at x = 0.5."""

    def reset_env(self, key, params):
        _, state = super().reset_env(key, params)
        state = state.replace(x=jnp.asarray(params.gravity / 10))
        return self.get_obs(state), state

    def step_env(self, key, state, action, params):
        obs, state, reward, terminated, info = super().step_env(key, state, action, params)
        return obs, state, (3.25 + 1.5 * action) * reward, terminated, info


MOON, LIMIT, MOON_SCALE = Moon(), 12, [2.0, 3.5, 0.25, 2.5]
FIRST_WEIGHTS = np.random.default_rng(0).normal(size=(2, 9)).astype(np.float32)
PARAMS = MOON.default_params.replace(gravity=5.0, max_steps_in_episode=LIMIT)


@cache
def vectorized(method):
    return jax.jit(jax.vmap(partial(getattr(MOON, method), params=PARAMS)))


class Poles:
    """Four poles of a run, stepped with the random numbers of its key."""

    def __init__(self, run):
        self.key, key_reset, key_centers = jax.random.split(jax.random.key(run.seed), 3)
        self.obs, self.env_state = vectorized("reset")(jax.random.split(key_reset, 4))
        self.centers = np.array(jax.random.uniform(key_centers, (4, 9), float, -1, 1), float)
        self.sigma, self.totals, self.returns, self.ends = run.sigma, np.zeros(4), [], set()

    def features(self, obs):
        """Features (F,) of one observation (D,), in float64."""
        distance = np.array(obs, float) / MOON_SCALE - self.centers.T
        return np.exp(-(distance**2).sum(axis=1) / (2 * self.sigma**2))

    def step(self, weights, epsilon):
        """Return (obs, action, reward, next_obs, terminated) of each. Note ended episodes."""
        self.key, key_explore, key_action, key_step = jax.random.split(self.key, 4)
        explore = np.asarray(jax.random.uniform(key_explore, 4)) < epsilon
        greedy = [np.argmax(weights @ self.features(obs)) for obs in self.obs]
        action = np.where(explore, jax.random.randint(key_action, 4, 0, 2), greedy)
        keys = jax.random.split(key_step, 4)
        before, stepped = self.obs, vectorized("step")(keys, self.env_state, action)
        self.obs, self.env_state, reward, terminated, truncated, info = stepped
        self.totals += np.array(reward)
        done = np.array(terminated | truncated)
        self.returns.append(self.totals[done])
        self.totals[done] = 0
        self.ends |= {*zip(terminated.tolist(), truncated.tolist(), strict=True)}
        columns = before, action, reward, info["final_observation"], terminated
        return list(zip(*map(np.asarray, columns), strict=True))

    def greedy_returns(self, weights):
        """Returns of six greedy episodes in Gymnasium. They start as gymnax's wrapper does."""
        keys = jnp.stack([jax.random.split(key)[0] for key in jax.random.split(self.key, 6)])
        env = gymnasium.make("CartPole-v1", max_episode_steps=LIMIT)
        env.unwrapped.gravity, returns = 5.0, [0] * 6
        for i, obs in enumerate(np.array(vectorized("reset")(keys)[0], float)):
            env.reset()
            env.unwrapped.state, over = obs, [False]
            while not any(over):
                action = np.argmax(weights @ self.features(obs))
                obs, _, *over, _ = env.step(action)
                returns[i] += 3.25 + 1.5 * action
        return returns


def semi_gradient(gamma, features, weights, next_weights, batch):
    """Gradient (A, F) of half the mean squared TD error; mean size of that error, Q-value, loss."""
    grad, errors, taken = np.zeros(weights.shape), [], []
    for obs, action, reward, next_obs, terminated in batch:
        target = reward if terminated else reward + gamma * max(next_weights @ features(next_obs))
        taken.append(weights[action] @ features(obs))
        errors.append(target - taken[-1])
        grad[action] -= errors[-1] * features(obs) / len(batch)
    return grad, np.mean(np.abs(errors)), np.mean(taken), np.mean(np.square(errors)) / 2


def learn_in_parallel(run):
    """Twelve updates, each from three steps of four poles. Three updates make a line."""
    poles, weights, moments, means = Poles(run), FIRST_WEIGHTS.astype(float), (0.0, 0.0), []
    for count in range(12):
        batch = [row for _ in range(3) for row in poles.step(weights, run.epsilon)]
        grad, *mean = semi_gradient(run.gamma, poles.features, weights, weights, batch)
        rate = run.learning_rate * (1 - count / 12)
        weights, moments = adam(weights, moments, grad, count, rate)
        means.append(mean)
    return poles, weights, curves(poles, means, num_lines=4)


def learn_from_the_past(run, epsilons):
    """35 steps, each followed by an update from ten stored transitions. Seven make a line.

    The ring has 38 places, so the tenth step overwrites the oldest two of the first.
    """
    poles, weights, moments, means = Poles(run), FIRST_WEIGHTS.astype(float), (0.0, 0.0), []
    average, stored = 0 * weights, []
    for count in range(35):
        stored = [*stored, *poles.step(weights, epsilons[count])][-38:]
        poles.key, key_batch = jax.random.split(poles.key)
        first = 4 * (count + 1) - len(stored)  # number of the oldest transition: it is at stored[0]
        places = jax.random.randint(key_batch, 10, 0, len(stored))
        batch = [stored[(int(place) - first) % 38] for place in places]
        grad, *mean = semi_gradient(run.gamma, poles.features, weights, average, batch)
        rate = run.learning_rate * (1 - count / 35)
        weights, moments = adam(weights, moments, grad, count, rate)
        average = average + run.tau * (weights - average)
        means.append(mean)
    return poles, weights, curves(poles, means, num_lines=5)


def curves(poles, means, num_lines):
    """What is saved of each line: mean return (nan if no episode ended), TD error, Q-value."""
    steps = len(poles.returns) // num_lines
    lines = [np.concatenate(poles.returns[i * steps :][:steps]) for i in range(num_lines)]
    errors, values, losses = np.reshape(means, (num_lines, -1, 3)).mean(axis=1).T
    returns = [line.mean() if line.size else np.nan for line in lines]
    return {"returns": returns, "td_error": errors, "q_value": values, "loss": losses}


def compare(td, flags, learn, monkeypatch):
    """A sweep of every flag. Its first and its last run, and two between, are replayed.

    A metric added to td_loss, its value, is saved under its name. Rounding makes 3e-5 of a
    difference; 1e-3 leaves room for other compilers. Greedy actions are better by 5e-3.
    """
    first_state, loss = td.init_state, td.td_loss
    scale = {"CartPole-v1": [2.4, 3.0, 0.2, 3.0], "MountainCar-v0": [1.2, 0.07]}
    assert td.OBS_SCALE == scale | {"Acrobot-v1": [1, 1, 1, 1, 6, 12]}

    def init_state(args):
        # From 0, all actions would have the same value after one step of Adam.
        state = first_state(args)
        return state._replace(params=state.params | {"weights": jnp.array(FIRST_WEIGHTS)})

    def td_loss(*call):
        value, metrics = loss(*call)
        return value, metrics | {"loss": value}

    monkeypatch.setitem(td.OBS_SCALE, "Moon", MOON_SCALE)
    monkeypatch.setattr(td, "make_env", lambda _: (MOON, PARAMS))
    monkeypatch.setattr(td, "init_state", init_state)
    monkeypatch.setattr(td, "td_loss", td_loss)
    results = td.main(flags.split())
    sweep = td.parse_args(flags.split()).swept | {"seed": [9, 10]}
    runs = [dict(zip(sweep, values, strict=True)) for values in itertools.product(*sweep.values())]
    for name in sweep:
        equal(results[name], [run[name] for run in runs])
    # If a flag had no effect, at most half of the runs would differ.
    assert len(np.unique(results["weights"], axis=0)) > len(runs) / 2
    ends, middle = set(), len(runs) // 3  # runs whose flags have the first, the last value in turn
    for i in 0, middle, len(runs) - 1 - middle, len(runs) - 1:
        poles, weights, lines = learn(SimpleNamespace(**runs[i]))
        for name, curve in lines.items():
            close(results[name][:, i], curve, rtol=1e-3, err_msg=f"{name} of run {i}")
        close(results["weights"][i], weights, atol=1e-3, err_msg=f"run {i}")
        close(results["centers"][i], poles.centers, rtol=1e-6)
        equal(results["obs_scale"][i], MOON_SCALE)
        equal(results["greedy_return"][i], poles.greedy_returns(weights))
        ends |= poles.ends
    assert ends >= {(True, False), (False, True)}  # terminated, truncated


SIZES = """--env-id Moon --num-envs 4 --batch-size 10 --num-centers 9 --eval-episodes 6 --seed 9
    --num-seeds 2 --total-timesteps 132 --log-interval 26
    --learning-rate 0.3 0.05 --gamma 0.8 0.5 --sigma 0.7 1.1"""
RING = "--tau 0.25 0.6 --buffer-size 38"


def test_parallel_td_learns_like_an_independent_replay(monkeypatch):
    compare(parallel_td, f"{SIZES} --epsilon 0.5 0.2", learn_in_parallel, monkeypatch)


def test_replay_td_learns_like_an_independent_replay(monkeypatch):
    def learn(run):
        return learn_from_the_past(run, [run.epsilon] * 35)

    compare(replay_td, f"{SIZES} {RING} --epsilon 0.5 0.2", learn, monkeypatch)


def test_epsilon_decay_td_learns_like_an_independent_replay(monkeypatch):
    def learn(run):
        epsilons = [max(run.end_e, run.start_e * run.epsilon_decay**t) for t in range(35)]
        return learn_from_the_past(run, epsilons)

    decay = "--start-e 0.9 0.3 --end-e 0.5 0.2 --epsilon-decay 0.95 0.8"
    compare(epsilon_decay_td, f"{SIZES} {RING} {decay}", learn, monkeypatch)
