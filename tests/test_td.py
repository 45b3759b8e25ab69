"""The three linear learners: what they do with the transitions that they saw, recomputed in NumPy.

The fixture `learning` trains a script for two intervals on the pole of environments.py, and records
every vector step and every update: what these functions got and what they returned. Each test then
checks one fact of that record. Functions that are the same in all three are tested in one. The
buffer of two is tested in test_replay.py, and greedy episodes in test_evaluation.py.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import (
    DECAY,
    PARALLEL,
    RARE,
    REPLAY,
    TRIO,
    assert_batches_are_as_they_were_seen,
    assert_lines_show_returns,
    halves,
    jit,
    load,
    one_run,
    places_of,
    train,
    watch,
)
from environments import (
    assert_episodes_go_on_until_they_end,
    follow_in_gymnasium,
    noise_run,
    pole_run,
)
from oracles import radial_features
from scipy.stats import kstest

close, equal = np.testing.assert_allclose, np.testing.assert_array_equal
# Steps that must be rounded up to two equal intervals. The buffer holds all 160 transitions.
REPLAYED = "--total-timesteps 153 --batch-size 10 --buffer-size 200"
FLAGS = {PARALLEL: "--total-timesteps 130 --num-steps 3", REPLAY: REPLAYED, DECAY: REPLAYED}
# Mostly random actions, so that some poles stand until the time limit.
OWN = {
    PARALLEL: {"epsilon": 0.9},
    REPLAY: {"epsilon": 0.9, "tau": 0.4},
    DECAY: {"start_e": 0.9, "tau": 0.4},
}


@pytest.fixture(scope="module", params=TRIO)
def learning(request):
    name = request.param
    script, flags = load(name), f"--num-envs 4 --num-centers 9 --num-intervals 2 {FLAGS[name]}"
    run = pole_run(script, flags, learning_rate=0.3, gamma=0.8, sigma=0.7, **OWN[name])
    # With weights of 0, a gradient through the targets would be 0, and not be noticed.
    weights = np.random.default_rng(0).normal(size=(2, 9))
    first = script.init_state(run)._replace(weights=jnp.float32(weights))
    with pytest.MonkeyPatch.context() as patch:
        steps = watch(patch, script, "vector_step")
        updates = watch(patch, script, "td_loss", "centers weights batch targets")
        last, lines = train(script, run, first)
    transitions = [step.out[1][0] for step in steps]  # of the state, and (transitions, sums)
    # The weights after each update: those before the next one.
    after = [update.weights for update in updates[1:]] + [jax.device_get(last.weights)]
    return SimpleNamespace(
        on_line=name == PARALLEL,
        run=run,
        first=first,
        last=last,
        lines=lines,
        seen=jax.tree.map(lambda *columns: np.stack(columns), *transitions),
        updates=updates,
        after=after,
    )


def test_steps_are_rounded_up_to_two_equal_intervals(learning):
    """parallel_td.py: 130 steps are 11 updates of 12, so 12. The others: 153 are 39 of 4, so 40."""
    steps, updates = (144, 12) if learning.on_line else (160, 40)
    assert learning.seen.reward.size == steps
    assert len(learning.updates) == updates
    assert learning.run.interval_timesteps * len(learning.lines) == steps
    assert learning.on_line or learning.last.timesteps == steps  # parallel_td.py need not count


def test_transitions_are_those_of_gymnasium_with_the_reward_of_the_action(learning):
    """Also at the time limit, where the next episode has begun already."""
    seen, expected = learning.seen, follow_in_gymnasium(learning.seen)
    close(seen.next_obs, expected.next_obs, rtol=1e-4, atol=1e-5)
    equal(seen.terminated, expected.fell)
    equal(seen.reward, 2 - 3 * seen.action)
    assert_episodes_go_on_until_they_end(seen)


def test_it_learns_from_transitions_as_they_were_seen(learning):
    assert_batches_are_as_they_were_seen(learning)


@pytest.mark.parametrize("learning", [PARALLEL], indirect=True)
def test_the_on_line_learner_learns_from_each_transition_once(learning):
    """An update has three steps of four environments."""
    for i, places in enumerate(places_of(learning)):
        equal(np.sort(places), np.arange(12 * i, 12 * i + 12))


def test_targets_bootstrap_from_what_follows_unless_it_is_terminal(learning):
    """parallel_td.py bootstraps from its weights, the others from their running average."""
    first = learning.first.weights if learning.on_line else learning.first.target_weights
    weights = np.float64(first)
    for update, after in zip(learning.updates, learning.after, strict=True):
        phi = radial_features(0.7, update.centers, update.batch.next_obs)
        next_q = phi @ weights.T
        value = np.where(update.batch.terminated, 0, next_q.max(axis=1))
        close(update.targets, update.batch.reward + 0.8 * value, rtol=1e-4)
        rate = 1 if learning.on_line else 0.4  # tau
        weights = weights + rate * (after - weights)


def errors_of(learning, update):
    """TD errors (B,) of an update, and the values (B,) of the actions that were taken."""
    q = radial_features(0.7, update.centers, update.batch.obs) @ update.weights.T
    values = q[np.arange(len(q)), update.batch.action]
    return update.targets - values, values


def test_each_update_is_a_step_of_adam_whose_size_falls_to_0(learning):
    """It falls to 0 in as many updates as are asked for. The loss is half the mean squared error.

    Its gradient is that of the values alone: the targets have none, and the centers stay.
    """
    asked_for = 11 if learning.on_line else 39
    adam = optax.adam(lambda count: 0.3 * jnp.maximum(0, 1 - count / asked_for))
    update_of = jax.jit(adam.update)
    moments = adam.init(np.zeros((2, 9)))
    for update, after in zip(learning.updates, learning.after, strict=True):
        phi = radial_features(0.7, update.centers, update.batch.obs)  # (B, F)
        errors, _ = errors_of(learning, update)
        gradient = np.zeros((2, 9))
        for b in range(len(errors)):
            gradient[update.batch.action[b]] -= errors[b] * phi[b] / len(errors)
        close(update.out[0], np.mean(errors**2) / 2, rtol=1e-4)
        step, moments = update_of(gradient, moments)
        close(after, update.weights + step, atol=1e-5)
    equal(learning.last.centers, learning.first.centers)


def test_a_progress_line_shows_mean_errors_and_values(learning):
    for line, updates in zip(learning.lines, halves(learning.updates), strict=True):
        errors, values = zip(*[errors_of(learning, update) for update in updates], strict=True)
        close(line["td_error"], np.mean(np.abs(errors)), rtol=1e-4)
        close(line["q_value"], np.mean(values), rtol=1e-4)


def test_a_progress_line_shows_the_mean_return_of_the_episodes_that_ended(learning):
    ended = follow_in_gymnasium(learning.seen).ended
    assert_lines_show_returns(learning.lines, learning.seen.reward, ended)


@pytest.mark.parametrize("name", TRIO[:2])
def test_weights_start_at_0_and_centers_are_spread_over_a_cube_in_each_run_in_another_way(name):
    script = load(name)
    states = [script.init_state(one_run(script, seed=seed)) for seed in (1, 2)]
    for state in states:
        assert not state.weights.any()
        assert name == PARALLEL or not state.target_weights.any()
    centers = np.concatenate([state.centers for state in states])  # (2 * 4, 500)
    for coordinates in centers:
        assert kstest(coordinates, "uniform", args=(-1, 2)).pvalue > RARE
    assert -1 <= centers.min() < -0.99 and 0.99 < centers.max() <= 1
    assert np.all(np.abs(np.corrcoef(centers) - np.eye(8)) < 5 / np.sqrt(500))


EPSILONS = [
    (PARALLEL, {"epsilon": 0.6}, [0.6, 0.6]),
    (DECAY, {"start_e": 0.8, "end_e": 0.15, "epsilon_decay": 0.5}, [0.8, 0.4, 0.2, 0.15]),
    (DECAY, {"start_e": 0.1, "end_e": 0.4, "epsilon_decay": 0.5}, [0.4, 0.4]),
]


@pytest.mark.parametrize(("name", "own", "epsilons"), EPSILONS)
def test_actions_are_random_with_probability_epsilon(name, own, epsilons, monkeypatch):
    """Of three actions, the second is best. The others are taken in a third of random steps."""
    script = load(name)
    run = noise_run(script, "--num-envs 6000 --num-centers 3", learning_rate=0.0, **own)
    steps = watch(monkeypatch, script, "vector_step")
    state, train_step = script.init_state(run), jit(script.train_step, run)
    state = state._replace(weights=jnp.repeat(jnp.array([[0.0], [1.0], [0.0]]), 3, axis=1))
    for epsilon in epsilons:
        state, (metrics, _) = train_step(state, None)
        jax.effects_barrier()
        transitions = steps[-1].out[1][0]
        for worse in (0, 2):
            taken, expected = np.sum(transitions.action == worse), 2000 * epsilon
            assert abs(taken - expected) < 5 * np.sqrt(expected)
        if name == DECAY:
            close(metrics["epsilon"], epsilon, rtol=1e-6)


def test_scales_are_the_bounds_of_observations_or_about_half_of_them():
    """That of CartPole-v1 is in oracles.py, whose features the tests above compare with."""
    for script in map(load, TRIO):
        assert script.OBS_SCALE["MountainCar-v0"] == [1.2, 0.07]  # the left wall, the top speed
        *angles, first, second = script.OBS_SCALE["Acrobot-v1"]
        assert angles == [1, 1, 1, 1]  # cosines and sines
        assert 1.5 < 4 * np.pi / first < 2.5 and 1.5 < 9 * np.pi / second < 2.5  # top speeds


@pytest.mark.parametrize("name", TRIO)
@pytest.mark.parametrize("env_id", ["Acrobot-v1", "MountainCar-v0"])
def test_the_other_tasks_are_learned_from(name, env_id):
    """Here, each transition has an effect, since nothing is replaced."""
    script = load(name)
    run = one_run(script, f"--env-id {env_id} --num-centers 20 --num-envs 4")
    state, train_step = script.init_state(run), jit(script.train_step, run)
    assert len(state.weights) == 3  # both tasks have three actions
    for _ in range(2):  # the first targets are rewards of -1
        state, (metrics, _) = train_step(state, None)
    assert 0 < metrics["td_error"] < 2
    assert np.isfinite(state.weights).all() and state.weights.any()


def test_a_scale_of_another_length_than_the_observation_is_refused(monkeypatch):
    """One number for four would broadcast, and train on wrong features."""
    script = load(REPLAY)
    monkeypatch.setitem(script.OBS_SCALE, "CartPole-v1", [2.4])
    run = one_run(script, "--num-centers 3")
    with pytest.raises(TypeError):
        script.train_interval(run, script.init_state(run))
