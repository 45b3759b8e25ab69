"""dqn.py: what it does with the transitions that it saw, recomputed in NumPy.

The fixture `learning` trains for two intervals on the pole of environments.py, whose episodes end
both ways, and records every vector step and every update. Its network is that of pqn.py, and is
tested there; test_replay.py has its buffer.
"""

from functools import partial
from types import SimpleNamespace

import dqn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import (
    assert_batches_are_as_they_were_seen,
    assert_lines_show_returns,
    halves,
    jit,
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
from oracles import normalized_network, random_params, value_loss, values_of_actions

close, equal = (
    partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
    np.testing.assert_array_equal,
)
# An update follows each step of 6 environments. 470 steps are 79 updates, which are rounded up to
# two intervals of 40. Most actions are random, so that some poles stand until the time limit.
FLAGS = "--num-envs 6 --batch-size 10 --buffer-size 500 --hidden-size 8 --total-timesteps 470"
FLAGS += " --num-intervals 2 --learning-rate 0.02 --gamma 0.8 --tau 0.4 --start-e 0.9 --end-e 0.8"


@pytest.fixture(scope="module")
def learning():
    run = pole_run(dqn, FLAGS)
    first = dqn.init_state(run)
    # The target network starts elsewhere, so that it is not taken for the other one.
    params, target_params = random_params(0, first.params), random_params(1, first.params)
    first = first._replace(params=params, target_params=target_params)
    with pytest.MonkeyPatch.context() as patch:
        steps = watch(patch, dqn, "vector_step")
        updates = watch(patch, dqn, "td_loss", "bounds params batch targets")
        last, lines = train(dqn, run, first)
    return SimpleNamespace(
        run=run,
        seen=jax.tree.map(lambda *columns: np.stack(columns), *[step.out[1][0] for step in steps]),
        updates=updates,
        # The parameters after each update: those before the next one.
        after=[update.params for update in updates[1:]] + [jax.device_get(last.params)],
        target_params=jax.device_get(target_params),
        last=last,
        lines=lines,
    )


def test_steps_are_rounded_up_to_two_equal_intervals(learning):
    """470 steps are 79 updates of six steps, so 80."""
    assert learning.seen.reward.size == learning.run.interval_timesteps * 2 == 480
    assert (len(learning.updates), len(learning.lines)) == (80, 2)
    assert learning.last.timesteps == 480


def test_transitions_are_those_of_gymnasium_with_the_reward_of_the_action(learning):
    """Also at the time limit, where the next episode has begun already."""
    seen, expected = learning.seen, follow_in_gymnasium(learning.seen)
    close(seen.next_obs, expected.next_obs)
    equal(seen.terminated, expected.fell)
    equal(seen.reward, 2 - 3 * seen.action)
    assert_episodes_go_on_until_they_end(seen)


def test_observations_are_divided_by_their_largest_absolute_values_so_far(learning):
    obs = np.abs([*learning.seen.obs, learning.last.obs])  # (81, 6, 4)
    for t, update in enumerate(learning.updates):
        equal(update.bounds, obs[: t + 2].max(axis=(0, 1)))


def test_replayed_transitions_are_as_they_were_seen(learning):
    """Not later ones. Some of them are of earlier steps."""
    assert_batches_are_as_they_were_seen(learning)
    places = places_of(learning)
    assert np.all(places.max(axis=1) < 6 * np.arange(1, 81))
    assert places[-1].min() < 240


def test_targets_bootstrap_from_the_averaged_network_unless_the_next_state_is_terminal(learning):
    """Of the action that is best for the network that learns (double Q-learning).

    After each update, the average moves by tau = 0.4 towards that network.
    """
    averaged = learning.target_params
    for update, after in zip(learning.updates, learning.after, strict=True):
        q_of = partial(normalized_network, update.bounds)
        best = q_of(update.params, update.batch.next_obs).argmax(axis=1)
        next_value = q_of(averaged, update.batch.next_obs)[np.arange(10), best]
        value = np.where(update.batch.terminated, 0, next_value)
        close(update.targets, update.batch.reward + 0.8 * value)
        averaged = jax.tree.map(lambda old, new: 0.6 * old + 0.4 * new, averaged, after)
    jax.tree.map(close, learning.last.target_params, averaged)


def test_each_update_is_a_step_of_adam_along_the_gradient_of_the_loss(learning):
    """By all parameters. Its size falls to 0 in the 79 updates that were asked for."""
    loss_and_slope = jax.jit(jax.value_and_grad(value_loss))
    adam = optax.adam(lambda count: 0.02 * jnp.maximum(0, 1 - count / 79), eps=1e-3)
    moments, update_of = adam.init(learning.after[0]), jax.jit(adam.update)
    for update, params in zip(learning.updates, learning.after, strict=True):
        loss, gradient = loss_and_slope(update.params, update.bounds, update.batch, update.targets)
        close(update.out[0], loss)
        step, moments = update_of(gradient, moments)
        jax.tree.map(partial(close, atol=2e-5), params, jax.tree.map(np.add, update.params, step))


def test_a_progress_line_shows_mean_errors_and_values(learning):
    for line, updates in zip(learning.lines, halves(learning.updates), strict=True):
        values = [values_of_actions(one.bounds, one.params, one.batch) for one in updates]
        close(line["q_value"], np.mean(values))
        errors = np.subtract([update.targets for update in updates], values)
        close(line["td_error"], np.mean(np.abs(errors)))


def test_a_progress_line_shows_the_mean_return_of_the_episodes_that_ended(learning):
    ended = follow_in_gymnasium(learning.seen).ended
    assert_lines_show_returns(learning.lines, learning.seen.reward, ended)


def test_both_networks_start_with_the_same_parameters_which_differ_between_runs():
    flags = "--num-envs 2 --buffer-size 3 --hidden-size 8"
    state, other = [dqn.init_state(noise_run(dqn, flags, seed=seed)) for seed in (3, 4)]
    jax.tree.map(equal, state.params, state.target_params)
    for layer, another in zip(state.params, other.params, strict=True):
        assert np.all(layer["w"] != another["w"])
    equal(state.bounds, np.abs(state.obs).max(axis=0))
    assert [layer["w"].shape for layer in state.params] == [(4, 8), (8, 8), (8, 3)]
    assert all(layer["w"].all() for layer in state.params)


@pytest.mark.parametrize(
    ("start", "end", "epsilons"), [(0.8, 0.15, [0.8, 0.4, 0.2, 0.15]), (0.1, 0.4, [0.4])]
)
def test_actions_are_random_with_a_probability_that_falls_in_each_vector_step(
    start, end, epsilons, monkeypatch
):
    """Of three actions, the second is best. The others are taken in a third of random steps."""
    flags = f"--num-envs 6000 --hidden-size 2 --start-e {start} --end-e {end} --epsilon-decay 0.5"
    run = noise_run(dqn, flags, learning_rate=0.0)
    steps = watch(monkeypatch, dqn, "vector_step")
    state, train_step = dqn.init_state(run), jit(dqn.train_step, run)
    output = {"w": jnp.zeros((2, 3)), "b": jnp.array([0.0, 1.0, 0.0])}
    state = state._replace(params=[*state.params[:2], output])  # not those of the targets
    for epsilon in epsilons:
        state, (metrics, _) = train_step(state, None)
        jax.effects_barrier()
        transitions = steps[-1].out[1][0]
        for worse in (0, 2):
            taken, expected = np.sum(transitions.action == worse), 2000 * epsilon
            assert abs(taken - expected) < 5 * np.sqrt(expected)
        close(metrics["epsilon"], epsilon)


def test_without_exploration_each_action_has_the_highest_value_in_its_observation():
    """Of the network that learns, not of the averaged one."""
    run = noise_run(dqn, "--num-envs 500 --hidden-size 8")
    state = dqn.init_state(run)
    params, target_params = random_params(2, state.params), random_params(3, state.params)
    state = state._replace(params=params, target_params=target_params)
    best = np.argmax(normalized_network(state.bounds, params, np.asarray(state.obs)), axis=1)
    assert len(np.unique(best)) > 1
    _, (transitions, _) = jit(dqn.vector_step, run)(state, 0.0)
    equal(transitions.action, best)
