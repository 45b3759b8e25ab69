"""The three linear learners: what they do with the transitions that they saw, recomputed in NumPy.

The fixture `learning` trains a script for two intervals on a pole that falls within 12 steps, and
records every vector step and every update. Each test then checks one fact of that record.
"""

import collections
from types import SimpleNamespace

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import TRIO, jit, load, one_run, watch

close, equal = np.testing.assert_allclose, np.testing.assert_array_equal
LIMIT = 12  # steps: some episodes reach it, others end before
SCALE = [2.4, 3.0, 0.2, 3.0]  # of CartPole-v1


class Pole(gymnax.environments.CartPole):
    """A pole with rewards of 3.25 or 4.75, by action; what is observed after its fall is nan.

    A reward tells its action, and nan shows wherever a terminal state is not cut off.
    """

    def step_env(self, key, state, action, params):
        obs, state, _, terminated, info = super().step_env(key, state, action, params)
        return jnp.where(terminated, jnp.nan, obs), state, 3.25 + 1.5 * action, terminated, info


def run_of(script, flags, **own):
    """Flags of a run with four environments in which poles fall."""
    env, params = Pole(), Pole().default_params.replace(max_steps_in_episode=LIMIT)
    return one_run(script, f"--num-envs 4 {flags}", **{"env": env, "env_params": params, **own})


def with_weights(state, weights):
    return state._replace(params=state.params | {"weights": jnp.float32(weights)})


def features(run, params, obs):
    """Radial basis functions of observations (..., D), as the book defines them."""
    scaled = np.asarray(obs, float) / SCALE
    difference = scaled[..., None] - np.asarray(params["centers"])  # (..., D, F)
    return np.exp(-np.sum(difference**2, axis=-2) / (2 * run.sigma**2))


@pytest.fixture(scope="module", params=TRIO)
def learning(request):
    """A record of two intervals of training."""
    script, patch = load(request.param), pytest.MonkeyPatch()
    on_line = request.param == "parallel_td.py"
    # parallel_td.py needs three vector steps for 10 transitions, so it learns from 12 at a time;
    # 130 steps are 11 updates, so 12. The others learn from 10 after each step: 153 are 40 updates.
    flags = "--total-timesteps 130" if on_line else "--total-timesteps 153 --buffer-size 200"
    flags += " --batch-size 10 --num-centers 9 --num-intervals 2"
    own = {"learning_rate": 0.3, "gamma": 0.8, "sigma": 0.7, "tau": 0.3, "epsilon": 0.5}
    run = run_of(script, flags, **own)
    steps, updates = watch(patch, script, "vector_step"), watch(patch, script, "td_loss")
    first = jit(script.init_state, run)()
    # Weights that are not 0, so that targets differ and would have gradients.
    first = with_weights(first, np.random.default_rng(0).normal(size=(2, 9)))
    train, state, halves = jit(script.train_interval, run), first, []
    for _ in range(2):
        state, metrics = train(state)
        jax.effects_barrier()
        halves.append(SimpleNamespace(metrics=metrics, steps=steps[:], updates=updates[:]))
        steps.clear(), updates.clear()
    patch.undo()
    updates = halves[0].updates + halves[1].updates
    # The parameters after each update: those before the next one.
    after = [update.params for update in updates[1:]] + [jax.device_get(state.params)]
    return SimpleNamespace(
        on_line=on_line,
        run=run,
        first=first,
        last=state,
        halves=halves,
        steps=halves[0].steps + halves[1].steps,
        updates=updates,
        after=after,
    )


def test_the_steps_asked_for_are_rounded_up_to_equal_intervals(learning):
    steps = 144 if learning.on_line else 160  # 12 updates of 12, 40 updates of 4
    assert [int(half.metrics["timesteps"]) for half in learning.halves] == [steps // 2, steps // 2]
    assert len(learning.steps) * 4 == steps
    assert [len(half.updates) for half in learning.halves] == [len(learning.updates) // 2] * 2


def test_transitions_are_what_the_environments_did(learning):
    for step in learning.steps:
        transitions, _ = step.out[1]
        equal(transitions.obs, step.state.obs)
        close(transitions.reward, 3.25 + 1.5 * transitions.action)
        equal(transitions.terminated, np.isnan(transitions.next_obs).any(axis=1))


def test_an_episode_goes_on_from_its_next_observation_until_it_ends(learning):
    length = np.zeros(4, int)
    for step, following in zip(learning.steps[:-1], learning.steps[1:], strict=True):
        transitions, _ = step.out[1]
        length += 1
        ended = transitions.terminated | (length == LIMIT)
        equal(following.state.obs[~ended], transitions.next_obs[~ended])
        assert np.all(np.abs(following.state.obs[ended]) <= 0.05)  # where Gymnasium's poles start
        length[ended] = 0


@pytest.mark.parametrize("learning", ["parallel_td.py"], indirect=True)
def test_the_on_line_learner_learns_from_each_transition_once(learning):
    for i, update in enumerate(learning.updates):
        seen = [step.out[1][0] for step in learning.steps[3 * i : 3 * i + 3]]
        jax.tree.map(equal, update.batch, jax.tree.map(lambda *parts: np.concatenate(parts), *seen))


def test_targets_bootstrap_from_what_follows_unless_it_is_terminal(learning):
    """parallel_td.py bootstraps from its weights, the others from their running average."""
    first = learning.first.params if learning.on_line else learning.first.target_params
    weights = np.float64(first["weights"])
    for update, after in zip(learning.updates, learning.after, strict=True):
        next_q = features(learning.run, update.params, update.batch.next_obs) @ weights.T
        value = np.where(update.batch.terminated, 0, next_q.max(axis=1))
        close(update.targets, update.batch.reward + 0.8 * value, rtol=1e-4)
        rate = 1 if learning.on_line else 0.3  # tau
        weights = weights + rate * (after["weights"] - weights)


def test_each_update_is_a_step_of_adam_on_half_the_mean_squared_error(learning):
    """The step size falls linearly to 0, and the targets have no gradient."""
    total = len(learning.updates)
    adam = optax.adam(lambda count: 0.3 * (1 - count / total))
    update_of = jax.jit(adam.update)
    moments = adam.init(np.zeros((2, 9)))
    for update, after in zip(learning.updates, learning.after, strict=True):
        weights, action = update.params["weights"], update.batch.action
        phi = features(learning.run, update.params, update.batch.obs)  # (B, F)
        error = update.targets - np.sum(weights[action] * phi, axis=1)  # (B,)
        gradient = np.zeros((2, 9))
        for b in range(len(error)):
            gradient[action[b]] -= error[b] * phi[b] / len(error)
        step, moments = update_of(gradient, moments)
        close(after["weights"], weights + step, atol=1e-4)


def test_centers_stay_where_they_are(learning):
    equal(learning.last.params["centers"], learning.first.params["centers"])


def test_a_progress_line_shows_mean_errors_and_values(learning):
    for half in learning.halves:
        errors, values = [], []
        for update in half.updates:
            q = features(learning.run, update.params, update.batch.obs) @ update.params["weights"].T
            values.append(q[np.arange(len(q)), update.batch.action])
            errors.append(np.abs(update.targets - values[-1]))
        close(half.metrics["td_error"], np.mean(errors), rtol=1e-4)
        close(half.metrics["q_value"], np.mean(values), rtol=1e-4)


def test_a_progress_line_shows_the_mean_return_of_the_episodes_that_ended(learning):
    total, length = np.zeros(4), np.zeros(4, int)
    for half in learning.halves:
        returns = []
        for step in half.steps:
            transitions, _ = step.out[1]
            total, length = total + transitions.reward, length + 1
            ended = transitions.terminated | (length == LIMIT)
            returns += total[ended].tolist()
            total[ended], length[ended] = 0, 0
        close(half.metrics["returns"], np.mean(returns), rtol=1e-5)


@pytest.mark.parametrize("name", TRIO)
def test_a_run_starts_with_weights_of_0_and_centers_spread_over_the_unit_cube(name):
    script = load(name)
    first = [jit(script.init_state, run_of(script, "", seed=seed))() for seed in (1, 2)]
    centers = np.asarray(first[0].params["centers"])  # (4, 500)
    assert not first[0].params["weights"].any()
    assert -1 <= centers.min() < -0.99 and 0.99 < centers.max() <= 1
    assert np.all(np.abs(centers.mean(axis=1)) < 5 * np.sqrt(1 / 3 / 500))
    assert not np.any(centers == first[1].params["centers"])  # the seed decides


@pytest.mark.parametrize("name", TRIO[1:])
def test_batches_are_drawn_evenly_from_the_last_ten_transitions(name, monkeypatch):
    script = load(name)
    # Four transitions a step; ten are kept: after three steps, the oldest ones are overwritten.
    run = run_of(script, "--buffer-size 10 --batch-size 20000 --num-centers 3", learning_rate=0.0)
    updates = watch(monkeypatch, script, "td_loss")
    state, train_step = jit(script.init_state, run)(), jit(script.train_step, run)
    began = []  # the observations in which the transitions so far began, which no two share
    for _ in range(7):
        began += [obs.tobytes() for obs in np.asarray(state.obs)]
        state, _ = train_step(state, None)
        jax.effects_barrier()
        drawn = collections.Counter(obs.tobytes() for obs in updates[-1].batch.obs)
        assert drawn.keys() == set(began[-10:])
        expected = 20000 / len(drawn)
        assert all(abs(times - expected) < 5 * expected**0.5 for times in drawn.values())


@pytest.mark.parametrize("name", TRIO[1:])
def test_batches_hold_transitions_as_they_were_stored(name, monkeypatch):
    script = load(name)
    run = run_of(script, "--buffer-size 10 --batch-size 50 --num-centers 3", learning_rate=0.0)
    steps = watch(monkeypatch, script, "vector_step")
    updates = watch(monkeypatch, script, "td_loss")
    state, train_step = jit(script.init_state, run)(), jit(script.train_step, run)
    for _ in range(7):
        state, _ = train_step(state, None)
    jax.effects_barrier()
    seen = [zip(*step.out[1][0], strict=True) for step in steps]
    stored = {row[0].tobytes(): row for rows in seen for row in rows}
    for row in zip(*updates[-1].batch, strict=True):
        for drawn, kept in zip(row, stored[row[0].tobytes()], strict=True):
            equal(drawn, kept)


@pytest.mark.parametrize("name", TRIO)
def test_actions_are_random_with_probability_epsilon(name, monkeypatch):
    script = load(name)
    buffer = "" if name == "parallel_td.py" else "--buffer-size 4000"
    flags = f"--num-envs 4000 --batch-size 4000 --num-centers 3 {buffer}"
    own = {"epsilon": 0.6, "start_e": 0.8, "end_e": 0.15, "epsilon_decay": 0.5}
    run = run_of(script, flags, learning_rate=0.0, **own)
    steps = watch(monkeypatch, script, "vector_step")
    state, train_step = jit(script.init_state, run)(), jit(script.train_step, run)
    state = with_weights(state, [[0.0] * 3, [1.0] * 3])  # action 1 is better everywhere
    decays = [0.8, 0.4, 0.2, 0.15]  # halved in each vector step, but at least 0.15
    for epsilon in decays if name == "epsilon_decay_td.py" else [0.6] * 4:
        state, metrics = train_step(state, None)
        jax.effects_barrier()
        transitions, _ = steps[-1].out[1]
        worse = np.sum(transitions.action == 0)  # half of the random actions
        assert abs(worse - 2000 * epsilon) < 5 * np.sqrt(2000 * epsilon)
        close(metrics.get("epsilon", epsilon), epsilon, rtol=1e-6)


@pytest.mark.parametrize("name", TRIO)
def test_greedy_returns_are_those_of_gymnasium(name, monkeypatch):
    script = load(name)
    run = run_of(script, "--num-centers 9 --eval-episodes 3")
    first, evaluate = jit(script.init_state, run)(), jit(script.evaluate, run)
    starts = watch(monkeypatch, Pole, "reset", ordered=False)
    env, lengths = gymnasium.make("CartPole-v1").unwrapped, set()
    for weights in np.random.default_rng(1).normal(size=(20, 2, 9)):
        starts.clear()
        returns = evaluate(with_weights(first, weights))["greedy_return"]
        jax.effects_barrier()
        expected = []
        for start in starts:
            obs, _ = start.out
            total, length = play_greedily(
                env, obs, lambda s, w=weights: w @ features(run, first.params, s)
            )
            expected.append(total)
            lengths.add(length)
        equal(np.sort(returns), np.sort(expected))
    assert LIMIT in lengths and min(lengths) < LIMIT  # both kinds of end were there


def play_greedily(env, obs, q_values):
    """Play in Gymnasium from an observation on. Return the return and the length."""
    env.reset()
    env.state = np.float64(obs)
    total, length, terminated = 0.0, 0, False
    while not terminated and length < LIMIT:
        action = np.argmax(q_values(env.state))
        terminated = env.step(action)[2]
        total, length = total + 3.25 + 1.5 * action, length + 1
    return total, length


@pytest.mark.parametrize("name", TRIO)
def test_every_run_and_every_episode_starts_somewhere_else(name, monkeypatch):
    script = load(name)
    starts = watch(monkeypatch, Pole, "reset", ordered=False)

    @jax.jit
    def start_and_evaluate(seed):
        run = run_of(script, "--num-centers 3 --eval-episodes 6", seed=seed)
        return script.evaluate(run, script.init_state(run))

    for seed in range(5):
        start_and_evaluate(seed)
    jax.effects_barrier()
    places = {start.out[0].tobytes() for start in starts}
    assert len(starts) == len(places) == 5 * (4 + 6)  # environments, and greedy episodes
