"""The three linear learners: what they do with the transitions that they saw, in NumPy."""

import collections
import importlib
from functools import partial

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TRIO, adam, one_run, watch

close, equal = np.testing.assert_allclose, np.testing.assert_array_equal
LIMIT, NAMES = 12, [name[:-3] for name in TRIO]
STATES = {  # the state that Gymnasium has, of an observation
    "CartPole-v1": lambda obs: obs,
    "MountainCar-v0": lambda obs: obs,
    "Acrobot-v1": lambda obs: [np.arctan2(obs[1], obs[0]), np.arctan2(obs[3], obs[2]), *obs[4:]],
}


class Pole(gymnax.environments.CartPole):
    """A pole with rewards of 3.25 or 4.75, by action; what is observed after its fall is nan."""

    def step_env(self, key, state, action, params):
        obs, state, _, terminated, info = super().step_env(key, state, action, params)
        return jnp.where(terminated, jnp.nan, obs), state, 3.25 + 1.5 * action, terminated, info


class SamePole(Pole):
    """It always starts in the same state."""

    def reset_env(self, key, params):
        state = super().reset_env(key, params)[1].replace(x=1.5, x_dot=0.3, theta=0.04)
        return self.get_obs(state), state.replace(theta_dot=jnp.array(0.1))


class Teller(gymnax.environments.CartPole):
    """An episode is one step, and its return tells where it started."""

    def step_env(self, key, state, action, params):
        obs, next_state, _, terminated, info = super().step_env(key, state, action, params)
        return obs, next_state, state.x, terminated, info


@pytest.fixture(params=NAMES)
def td(request):
    return importlib.import_module(request.param)


def use(monkeypatch, td, env, limit=LIMIT):
    params = env.default_params.replace(max_steps_in_episode=limit)
    monkeypatch.setattr(td, "make_env", lambda env_id: (env, params))


def rows(transitions):
    """Transitions, one by one, as [obs, action, reward, next_obs, terminated]."""
    return list(zip(*map(np.asarray, transitions), strict=True))


def name(row):
    """What tells a transition from all others."""
    return b"".join(np.float32(column).tobytes() for column in row)


def features(run, centers, obs):
    scaled = np.asarray(obs, float) / [2.4, 3.0, 0.2, 3.0]
    return np.exp(-np.sum((scaled[:, None] - centers) ** 2, axis=0) / (2 * run.sigma**2))


def with_weights(state, weights):
    return state._replace(params=state.params | {"weights": jnp.array(weights, jnp.float32)})


@pytest.mark.parametrize("env_id", STATES)
def test_transitions_are_those_of_gymnasium(td, env_id, monkeypatch):
    """Observed before the reset; terminated where the task says so, and not at the time limit."""
    use(monkeypatch, td, gymnax.make(env_id)[0], limit=30)
    flags = f"--env-id {env_id} --num-envs 8 --num-centers 3 --seed 1"
    run = one_run(td, flags, epsilon=1.0, start_e=1.0)
    state, step = td.init_state(run), partial(td.vector_step, run)
    _, (seen, _) = jax.jit(lambda state: jax.lax.scan(step, state, length=70))(state)  # (T, N)
    env, time, ends = gymnasium.make(env_id).unwrapped, np.zeros(8, int), set()
    for t, j in np.ndindex(69, 8):
        env.reset()
        obs, action, reward, next_obs, terminated = (np.asarray(column)[t, j] for column in seen)
        env.state = np.array(STATES[env_id](obs.astype(float)))
        expected, paid, falls, _, _ = env.step(int(action))
        close(next_obs, expected, atol=1e-4)
        assert (reward, terminated) == (paid, falls)
        time[j] += 1
        over = bool(terminated) or time[j] == 30
        assert over == np.any(next_obs != np.asarray(seen.obs)[t + 1, j])
        time[j] *= not over
        ends.add((over, bool(terminated)))
    assert ends >= {(True, False), (True, True)} or env_id != "CartPole-v1"


def test_learning_is_semi_gradient_q_learning_on_what_was_seen(td, monkeypatch):
    """Batches, targets, gradients, Adam and its schedule, the average, what progress lines show.

    All weights are random at first, since from 0 a gradient through the target would not be seen.
    """
    use(monkeypatch, td, Pole())
    on_line = td.__name__ == "parallel_td"
    updates, size, total = (12, 12, 144) if on_line else (40, 10, 160)
    flags = "--num-envs 4 --num-centers 9 --batch-size 10 --num-intervals 2 --seed 3"
    own = {"learning_rate": 0.3, "gamma": 0.8, "sigma": 0.7, "tau": 0.3, "epsilon": 0.5}
    run, calls = (
        one_run(td, f"{flags} --total-timesteps {total}", **own),
        watch(monkeypatch, td, "td_loss"),
    )
    state, weights = td.init_state(run), np.random.default_rng(0).normal(size=(2, 9))
    centers = np.asarray(state.params["centers"], float)
    assert len(np.unique(centers)) == 36 and -1 < centers.min() < -0.7 < 0.7 < centers.max() < 1
    assert not np.any(state.params["weights"])
    state = with_weights(state, weights)
    average, moments, count, seen, ended = 0 * weights, (0.0, 0.0), 0, {}, [[]]
    for _ in range(2):
        calls.clear()
        state, metrics = jax.jit(partial(td.train_interval, run))(state)
        jax.effects_barrier()
        errors, values = [], []
        for (_, batch, targets), _ in calls:
            behind, gradient = weights if on_line else average, np.zeros((2, 9))
            for row, target in zip(rows(batch), targets, strict=True):
                obs, action, reward, next_obs, terminated = row
                best = 0 if terminated else max(behind @ features(run, centers, next_obs))
                close(target, reward + 0.8 * best, rtol=1e-3, atol=1e-3)
                phi = features(run, centers, obs)
                values.append(weights[action] @ phi)
                errors.append(target - values[-1])
                gradient[action] -= errors[-1] * phi / size
            step, moments = adam(moments, gradient, count, 0.3 * (1 - count / updates))
            weights, count = weights + step, count + 1
            average = average + 0.3 * (weights - average)
        close(state.params["weights"], weights, atol=2e-3)
        close(metrics["td_error"], np.mean(np.abs(errors)), rtol=1e-3)
        close(metrics["q_value"], np.mean(values), rtol=1e-3, atol=1e-3)
        # All transitions so far, by their first observation.
        held = [call[0][1] for call in calls] if on_line else [state.buffer]
        seen |= {row[0].tobytes(): row for part in held for row in rows(part) if np.any(row[0])}
        ended.append(returns_of_ended_episodes(seen))
        close(
            metrics["returns"],
            (sum(ended[-1]) - sum(ended[-2])) / (len(ended[-1]) - len(ended[-2])),
            rtol=1e-5,
        )
        assert metrics["timesteps"] == total / 2
    assert (len(seen), count) == (total, updates)
    equal(state.params["centers"], np.float32(centers))


def returns_of_ended_episodes(seen):
    """Returns of all episodes that ended: a step follows another if it begins where that ended."""
    later = {row[3].tobytes() for row in seen.values()}
    returns = []
    for first in seen.keys() - later:
        row, rewards = seen[first], []
        while row is not None:
            last = row
            rewards.append(row[2])
            row = seen.get(row[3].tobytes())
        if last[4] or len(rewards) == LIMIT:
            returns.append(sum(rewards))
    return returns


@pytest.mark.parametrize("name_of", ["replay_td", "epsilon_decay_td"])
def test_batches_are_drawn_evenly_from_the_last_transitions(name_of, monkeypatch):
    """A ring of ten, four steps at a time. Each of those that it holds is as likely."""
    td = importlib.import_module(name_of)
    use(monkeypatch, td, Pole())
    flags = "--num-envs 4 --num-centers 3 --buffer-size 10 --batch-size 20000 --learning-rate 0"
    run, calls = one_run(td, flags), watch(monkeypatch, td, "td_loss")
    state, began, step = td.init_state(run), [], jax.jit(partial(td.train_step, run, _=None))
    for _ in range(7):
        before, (state, _) = np.asarray(state.obs), step(state)
        jax.effects_barrier()
        began += [obs.tobytes() for obs in before]
        held = [row for row in rows(state.buffer) if np.any(row[0])]
        firsts = [row[0].tobytes() for row in held]
        must = began[-8:] if len(began) > 8 else began  # and two of the four before
        assert len({*firsts}) == len(firsts) == min(len(began), 10)
        assert {*must} <= {*firsts} <= {*began[-12:]}
        for row, obs in zip(held, firsts, strict=True):
            j = began[-4:].index(obs) if obs in began[-4:] else None
            if j is not None and not row[4]:  # not terminated: time limit, or it goes on from here
                assert state.env_state.time[j] == 0 or np.all(row[3] == state.obs[j])
        drawn = collections.Counter(map(name, rows(calls[-1][0][1])))
        assert drawn.keys() == {*map(name, held)}
        expected = 20000 / len(held)
        assert all(abs(times - expected) < 5 * expected**0.5 for times in drawn.values())


def test_actions_are_random_as_often_as_epsilon_says(td, monkeypatch):
    """In each of four vector steps of 4,000 cars whose greedy action is 1. Nothing is learned."""
    flags = "--env-id MountainCar-v0 --num-envs 4000 --num-centers 3 --learning-rate 0"
    flags += " --batch-size 4000" + " --buffer-size 4000" * (td.__name__ != "parallel_td")
    own = {"epsilon": 0.6, "start_e": 0.8, "end_e": 0.15, "epsilon_decay": 0.5}
    run, calls = one_run(td, flags, **own), watch(monkeypatch, td, "td_loss")
    state, step = (
        with_weights(td.init_state(run), [[0] * 3, [1] * 3, [0] * 3]),
        jax.jit(partial(td.train_step, run, _=None)),
    )
    for epsilon in [0.8, 0.4, 0.2, 0.15] if td.__name__ == "epsilon_decay_td" else [0.6] * 4:
        state, metrics = step(state)
        jax.effects_barrier()
        action = state.buffer.action if hasattr(state, "buffer") else calls[-1][0][1].action
        for other in 0, 2:
            expected = 4000 * epsilon / 3
            assert abs(np.sum(action == other) - expected) < 5 * expected**0.5
        close(metrics.get("epsilon", epsilon), epsilon, rtol=1e-6)


def test_greedy_returns_are_those_of_gymnasium(td, monkeypatch):
    """They are not discounted, and end when the task or the time does. All start alike here."""
    use(monkeypatch, td, SamePole(), limit=15)
    run = one_run(td, "--num-envs 2 --num-centers 9 --eval-episodes 3")
    state, env, lengths = td.init_state(run), gymnasium.make("CartPole-v1").unwrapped, set()
    centers, evaluate = np.asarray(state.params["centers"]), jax.jit(partial(td.evaluate, run))
    for weights in np.random.default_rng(1).normal(size=(20, 2, 9)):
        env.reset()
        obs, total, falls, length = np.array([1.5, 0.3, 0.04, 0.1]), 0, False, 0
        env.state = obs
        while not falls and length < 15:
            action = np.argmax(weights @ features(run, centers, obs))
            obs, _, falls, _, _ = env.step(action)
            total, length = total + 3.25 + 1.5 * action, length + 1
        lengths.add(length)
        equal(evaluate(with_weights(state, weights))["greedy_return"], [total] * 3)
    assert {15} < lengths


def test_no_two_episodes_of_a_run_or_of_two_runs_start_alike(td, monkeypatch):
    """Neither in training nor in evaluation."""
    use(monkeypatch, td, Teller(), limit=1)
    starts = []
    for seed in 5, 6:
        run = one_run(
            td, "--num-envs 50 --num-centers 3 --eval-episodes 50 --num-intervals 1", seed=seed
        )
        state = td.init_state(run)
        for _ in range(3):
            starts += [*np.asarray(state.obs[:, 0]), *td.evaluate(run, state)["greedy_return"]]
            state, _ = jax.jit(partial(td.train_step, run, _=None))(state)
    assert len({*map(float, starts)}) > 0.99 * len(starts)  # single precision
