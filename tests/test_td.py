"""The three linear learners: what they do with the transitions that they saw, in NumPy."""

import collections
import importlib

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import TRIO, jit, one_run, watch

close, equal = np.testing.assert_allclose, np.testing.assert_array_equal
LIMIT, NAMES = 12, [name[:-3] for name in TRIO]


class Pole(gymnax.environments.CartPole):
    """A pole with rewards of 3.25 or 4.75, by action; what is observed after its fall is nan."""

    def step_env(self, key, state, action, params):
        obs, state, _, terminated, info = super().step_env(key, state, action, params)
        return jnp.where(terminated, jnp.nan, obs), state, 3.25 + 1.5 * action, terminated, info


@pytest.fixture(params=NAMES)
def td(request, monkeypatch):
    script = importlib.import_module(request.param)
    params = Pole().default_params.replace(max_steps_in_episode=LIMIT)
    monkeypatch.setattr(script, "make_env", lambda env_id: (Pole(), params))
    return script


def rows(transitions):
    return list(zip(*jax.device_get(transitions), strict=True))  # each: (obs, action, ...)


def features(run, state, obs):
    scaled = np.asarray(obs, float) / [2.4, 3.0, 0.2, 3.0]
    squared = np.sum((scaled[..., None] - np.asarray(state.params["centers"])) ** 2, axis=-2)
    return np.exp(-squared / (2 * run.sigma**2))


def ended_returns(seen):
    """Returns of all episodes that ended: a step follows another if it begins where that ended."""
    leads_to = {row[3].tobytes(): row for row in seen.values()}

    def so_far(row):  # return and length
        before = leads_to.get(row[0].tobytes())
        total, length = so_far(before) if before else (0, 0)
        return total + row[2], length + 1

    rows = [(*so_far(row), row[4]) for row in seen.values()]
    return [total for total, length, terminated in rows if terminated or length == LIMIT]


def test_learning_is_semi_gradient_q_learning_on_what_was_seen(td, monkeypatch):
    on_line = td.__name__ == "parallel_td"  # below: 11 and 39 updates are rounded up to two halves
    updates, size, steps, total = (12, 12, 144, 130) if on_line else (40, 10, 160, 153)
    flags = "--num-envs 4 --num-centers 9 --batch-size 10 --num-intervals 2 --total-timesteps"
    own = {"learning_rate": 0.3, "gamma": 0.8, "sigma": 0.7, "tau": 0.3, "epsilon": 0.5}
    run, calls = one_run(td, f"{flags} {total}", **own), watch(monkeypatch, td, "td_loss")
    state, train = jit(td.init_state, run)(), jit(td.train_interval, run)
    centers, average, seen, ended = state.params["centers"], np.zeros((2, 9)), {}, 0
    assert len(np.unique(centers)) == 36 and -1 < centers.min() < -0.7 < 0.7 < centers.max() < 1
    equal(state.params["weights"], average)
    weights = np.random.default_rng(0).normal(size=(2, 9))  # so that targets have gradients
    state = state._replace(params=state.params | {"weights": jnp.float32(weights)})
    adam = optax.adam(lambda count: 0.3 * (1 - count / updates))
    moments, update = adam.init(weights), jax.jit(adam.update)
    for _ in range(2):
        calls.clear()
        state, metrics = train(state)
        jax.effects_barrier()
        errors, values = [], []
        for (_, batch, targets), _ in calls:
            obs, action, reward, next_obs, ends = batch
            next_q = features(run, state, next_obs) @ (weights if on_line else average).T
            close(targets, reward + 0.8 * np.where(ends, 0, next_q.max(axis=1)), 1e-3, 1e-3)
            phi = features(run, state, obs)
            values.append(np.sum(weights[action] * phi, axis=1))
            errors.append(targets - values[-1])
            gradient = -(np.eye(2)[action] * errors[-1][:, None]).T @ phi / size
            step, moments = update(gradient, moments)
            weights = weights + step
            average = average + 0.3 * (weights - average)
        close(state.params["weights"], weights, atol=2e-3)
        close(metrics["td_error"], np.mean(np.abs(errors)), rtol=1e-3)
        close(metrics["q_value"], np.mean(values), rtol=1e-3, atol=1e-3)
        # All transitions so far, by their first observation.
        held = [call[0][1] for call in calls] if on_line else [state.buffer]
        seen |= {row[0].tobytes(): row for part in held for row in rows(part) if np.any(row[0])}
        returns = ended_returns(seen)  # the new ones are the last
        close(metrics["returns"], np.mean(returns[ended:]), rtol=1e-5)
        ended = len(returns)
        assert (metrics["timesteps"], len(calls)) == (steps / 2, updates / 2)
    equal(state.params["centers"], centers)
    assert len(seen) == steps
    for _, action, reward, next_obs, terminated in seen.values():
        assert reward == 3.25 + 1.5 * action and terminated == np.isnan(next_obs).any()


@pytest.mark.parametrize("td", NAMES[1:], indirect=True)
def test_batches_are_drawn_evenly_from_the_last_ten_transitions(td, monkeypatch):
    flags = "--num-envs 4 --num-centers 3 --buffer-size 10 --batch-size 20000 --learning-rate 0"
    run, calls, began = one_run(td, flags), watch(monkeypatch, td, "td_loss"), []
    state, step = jit(td.init_state, run)(), jit(td.train_step, run)
    for _ in range(7):
        began += [obs.tobytes() for obs in np.asarray(state.obs)]
        state, _ = step(state, None)
        jax.effects_barrier()
        held = {row[0].tobytes(): row for row in rows(state.buffer) if np.any(row[0])}
        assert len(held) == min(len(began), 10)  # the last eight, and two of the four before
        assert {*began[-8:]} <= held.keys() <= {*began[-12:]}
        batch = rows(calls[-1][0][1])
        assert all(str(row) == str(held[row[0].tobytes()]) for row in batch[:200])
        drawn, expected = collections.Counter(row[0].tobytes() for row in batch), 20000 / len(held)
        assert drawn.keys() == held.keys()
        assert all(abs(times - expected) < 5 * expected**0.5 for times in drawn.values())


def test_actions_are_random_as_often_as_epsilon_says(td, monkeypatch):
    flags = "--num-envs 4000 --num-centers 3 --learning-rate 0 --batch-size 4000"
    flags += " --buffer-size 4000" * (td.__name__ != "parallel_td")
    own = {"epsilon": 0.6, "start_e": 0.8, "end_e": 0.15, "epsilon_decay": 0.5}
    run, calls = one_run(td, flags, **own), watch(monkeypatch, td, "td_loss")
    step, state = jit(td.train_step, run), jit(td.init_state, run)()
    state = state._replace(params=state.params | {"weights": jnp.array([[0.0] * 3, [1.0] * 3])})
    for epsilon in [0.8, 0.4, 0.2, 0.15] if td.__name__ == "epsilon_decay_td" else [0.6] * 4:
        state, metrics = step(state, None)
        jax.effects_barrier()
        action = state.buffer.action if hasattr(state, "buffer") else calls[-1][0][1].action
        assert abs(np.sum(action == 0) - 2000 * epsilon) < 5 * (2000 * epsilon) ** 0.5
        close(metrics.get("epsilon", epsilon), epsilon, rtol=1e-6)


def test_greedy_returns_are_those_of_gymnasium_and_no_two_starts_are_alike(td, monkeypatch):
    env, lengths = gymnasium.make("CartPole-v1").unwrapped, set()
    starts = watch(monkeypatch, Pole, "reset", ordered=False)
    flags = "--num-envs 2 --num-centers 9 --eval-episodes 3"
    init = jax.jit(lambda seed: td.init_state(one_run(td, flags, seed=seed)))
    run, evaluate = one_run(td, flags), jit(td.evaluate, one_run(td, flags))
    for seed, weights in enumerate(np.random.default_rng(1).normal(size=(20, 2, 9))):
        state = init(seed)
        state = state._replace(params=state.params | {"weights": jnp.float32(weights)})
        jax.effects_barrier()
        returns, expected = evaluate(state)["greedy_return"], []
        jax.effects_barrier()
        for _, (obs, _) in starts[-3:]:
            env.reset()
            env.state, total, falls, length = obs.astype(float), 0, False, 0
            while not falls and length < LIMIT:
                action = np.argmax(weights @ features(run, state, env.state))
                falls, length = env.step(action)[2], length + 1
                total += 3.25 + 1.5 * action
            expected.append(total)
            lengths.add(length)
        equal(np.sort(returns), np.sort(expected))
    assert {LIMIT} < lengths and len({obs.tobytes() for _, (obs, _) in starts}) == 20 * (2 + 3)
