"""The three linear learners: what they do with the transitions that they saw, in NumPy."""

import collections
import importlib
from functools import partial

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import TRIO, one_run, watch

close, equal = np.testing.assert_allclose, np.testing.assert_array_equal
LIMIT, NAMES, STARTS = 12, [name[:-3] for name in TRIO], []


class Pole(gymnax.environments.CartPole):
    """A pole with rewards of 3.25 or 4.75, by action; what is observed after its fall is nan."""

    def step_env(self, key, state, action, params):
        obs, state, _, terminated, info = super().step_env(key, state, action, params)
        return jnp.where(terminated, jnp.nan, obs), state, 3.25 + 1.5 * action, terminated, info

    def reset(self, key, params):
        obs, state = super().reset(key, params)
        jax.debug.callback(lambda obs: STARTS.append(np.array(obs)), obs)
        return obs, state


@pytest.fixture(params=NAMES)
def td(request):
    return importlib.import_module(request.param)


def use(monkeypatch, td, env, limit=LIMIT):
    params = env.default_params.replace(max_steps_in_episode=limit)
    monkeypatch.setattr(td, "make_env", lambda env_id: (env, params))


def rows(transitions):
    """Transitions, one by one, as [obs, action, reward, next_obs, terminated]."""
    return list(zip(*map(np.asarray, transitions), strict=True))


def features(run, centers, obs):
    scaled = np.asarray(obs, float) / [2.4, 3.0, 0.2, 3.0]
    return np.exp(-np.sum((scaled[:, None] - centers) ** 2, axis=0) / (2 * run.sigma**2))


def with_weights(state, weights):
    return state._replace(params=state.params | {"weights": jnp.array(weights, jnp.float32)})


def ended_returns(seen):
    """Returns of all episodes that ended: a step follows another if it begins where that ended."""
    returns = []
    for first in seen.keys() - {row[3].tobytes() for row in seen.values()}:
        episode = [seen[first]]
        while episode[-1][3].tobytes() in seen:
            episode.append(seen[episode[-1][3].tobytes()])
        if episode[-1][4] or len(episode) == LIMIT:
            returns.append(sum(row[2] for row in episode))
    return returns


def test_learning_is_semi_gradient_q_learning_on_what_was_seen(td, monkeypatch):
    """Targets, gradients, Adam and its schedule, averages, what lines show; Gymnasium's steps."""
    use(monkeypatch, td, Pole())
    on_line = td.__name__ == "parallel_td"
    updates, size, total = (12, 12, 144) if on_line else (40, 10, 160)
    flags = "--num-envs 4 --num-centers 9 --batch-size 10 --num-intervals 2 --seed 3"
    own = {"learning_rate": 0.3, "gamma": 0.8, "sigma": 0.7, "tau": 0.3, "epsilon": 0.5}
    run = one_run(td, f"{flags} --total-timesteps {total}", **own)
    calls = watch(monkeypatch, td, "td_loss")
    state, weights = td.init_state(run), np.random.default_rng(0).normal(size=(2, 9))
    centers = np.asarray(state.params["centers"], float)
    assert len(np.unique(centers)) == 36 and -1 < centers.min() < -0.7 < 0.7 < centers.max() < 1
    assert not np.any(state.params["weights"])
    state = with_weights(state, weights)  # from 0, a gradient through the target would not be seen
    average, count, seen, ended = 0 * weights, 0, {}, [[]]
    adam = optax.adam(lambda count: 0.3 * (1 - count / updates))
    moments = adam.init(weights)
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
            step, moments = adam.update(gradient, moments)
            weights, count = weights + step, count + 1
            average = average + 0.3 * (weights - average)
        close(state.params["weights"], weights, atol=2e-3)
        close(metrics["td_error"], np.mean(np.abs(errors)), rtol=1e-3)
        close(metrics["q_value"], np.mean(values), rtol=1e-3, atol=1e-3)
        # All transitions so far, by their first observation.
        held = [call[0][1] for call in calls] if on_line else [state.buffer]
        seen |= {row[0].tobytes(): row for part in held for row in rows(part) if np.any(row[0])}
        ended.append(ended_returns(seen))
        fresh = sum(ended[-1]) - sum(ended[-2]), len(ended[-1]) - len(ended[-2])
        close(metrics["returns"], fresh[0] / fresh[1], rtol=1e-5)
        assert metrics["timesteps"] == total / 2
    assert (len(seen), count) == (total, updates)
    equal(state.params["centers"], np.float32(centers))
    env = gymnasium.make("CartPole-v1").unwrapped
    for obs, action, _, next_obs, terminated in seen.values():
        env.reset()
        env.state = obs.astype(float)
        expected, _, falls, _, _ = env.step(int(action))
        close(next_obs, np.nan * expected if falls else expected, atol=1e-5)
        assert terminated == falls


@pytest.mark.parametrize("td", NAMES[1:], indirect=True)
def test_batches_are_drawn_evenly_from_the_last_transitions(td, monkeypatch):
    """A ring of ten, four steps at a time. Each of those that it holds is as likely."""
    use(monkeypatch, td, Pole())
    flags = "--num-envs 4 --num-centers 3 --buffer-size 10 --batch-size 20000 --learning-rate 0"
    run, calls = one_run(td, flags), watch(monkeypatch, td, "td_loss")
    state, began, step = td.init_state(run), [], jax.jit(partial(td.train_step, run, _=None))
    for _ in range(7):
        began += [obs.tobytes() for obs in np.asarray(state.obs)]
        state, _ = step(state)
        jax.effects_barrier()
        held = {row[0].tobytes(): row for row in rows(state.buffer) if np.any(row[0])}
        assert len(held) == min(len(began), 10)  # the last eight, and two of the four before
        assert {*began[-8:]} <= held.keys() <= {*began[-12:]}
        for j, obs in enumerate(began[-4:]):  # where the new ones led to, if that is not the end
            ends = held[obs][4] or state.env_state.time[j] == 0
            assert ends or np.all(held[obs][3] == state.obs[j])
        batch = rows(calls[-1][0][1])
        assert all(str(row) == str(held[row[0].tobytes()]) for row in batch[:200])
        drawn, expected = collections.Counter(row[0].tobytes() for row in batch), 20000 / len(held)
        assert drawn.keys() == held.keys()
        assert all(abs(times - expected) < 5 * expected**0.5 for times in drawn.values())


def test_actions_are_random_as_often_as_epsilon_says(td, monkeypatch):
    """In each of four vector steps of 4,000 cars whose greedy action is 1. Nothing is learned."""
    flags = "--env-id MountainCar-v0 --num-envs 4000 --num-centers 3 --learning-rate 0"
    flags += " --batch-size 4000" + " --buffer-size 4000" * (td.__name__ != "parallel_td")
    own = {"epsilon": 0.6, "start_e": 0.8, "end_e": 0.15, "epsilon_decay": 0.5}
    run, calls = one_run(td, flags, **own), watch(monkeypatch, td, "td_loss")
    step = jax.jit(partial(td.train_step, run, _=None))
    state = with_weights(jax.jit(lambda: td.init_state(run))(), [[0] * 3, [1] * 3, [0] * 3])
    for epsilon in [0.8, 0.4, 0.2, 0.15] if td.__name__ == "epsilon_decay_td" else [0.6] * 4:
        state, metrics = step(state)
        jax.effects_barrier()
        action = state.buffer.action if hasattr(state, "buffer") else calls[-1][0][1].action
        for other in 0, 2:
            expected = 4000 * epsilon / 3
            assert abs(np.sum(action == other) - expected) < 5 * expected**0.5
        close(metrics.get("epsilon", epsilon), epsilon, rtol=1e-6)


def test_greedy_returns_are_those_of_gymnasium_and_no_two_starts_are_alike(td, monkeypatch):
    """They are not discounted, and end when the task or the time does."""
    use(monkeypatch, td, Pole(), limit=15)
    env, lengths, starts = gymnasium.make("CartPole-v1").unwrapped, set(), set()
    for seed in 5, 6:
        STARTS.clear()
        run = one_run(td, "--num-envs 2 --num-centers 9 --eval-episodes 3", seed=seed)
        state = td.init_state(run)
        centers, evaluate = np.asarray(state.params["centers"]), jax.jit(partial(td.evaluate, run))
        jax.effects_barrier()
        assert len(STARTS) == 2
        for weights in np.random.default_rng(1).normal(size=(10, 2, 9)):
            starts |= {obs.tobytes() for obs in STARTS}
            STARTS.clear()
            returns, expected = evaluate(with_weights(state, weights))["greedy_return"], []
            jax.effects_barrier()
            for obs in STARTS:
                env.reset()
                env.state, total, falls, length = np.array(obs, float), 0, False, 0
                while not falls and length < 15:
                    action = np.argmax(weights @ features(run, centers, env.state))
                    falls, length = env.step(action)[2], length + 1
                    total += 3.25 + 1.5 * action
                expected.append(total)
                lengths.add(length)
            equal(np.sort(returns), np.sort(expected))
    assert {15} < lengths and len(starts) == 2 * (2 + 3)
