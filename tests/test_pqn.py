"""pqn.py: what it does with the transitions that it saw, recomputed in NumPy.

The fixture `learning` trains for two intervals on the pole of environments.py, whose episodes end
both ways, and records every vector step and every minibatch. The network has the same
text in dqn.py, and is tested here; test_evaluation.py has its greedy episodes.
"""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pqn
import pytest
from conftest import (
    RARE,
    assert_batches_are_as_they_were_seen,
    assert_lines_show_returns,
    halves,
    jit,
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
from oracles import normalized_network, random_params, value_loss, values_of_actions
from scipy.stats import kstest, norm

close, equal = (
    partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
    np.testing.assert_array_equal,
)
# An iteration has 7 steps of 6 environments, and 2 epochs of 3 minibatches with 14 transitions.
# 930 steps are 23 iterations, which are rounded up to two intervals of 12. Most actions are random,
# so that some poles stand until the time limit.
FLAGS = "--num-envs 6 --num-steps 7 --update-epochs 2 --num-minibatches 3 --hidden-size 8"
FLAGS += " --total-timesteps 930 --num-intervals 2 --learning-rate 0.02 --gamma 0.8"
FLAGS += " --q-lambda 0.6 --epsilon 0.9"


@pytest.fixture(scope="module")
def learning():
    run = pole_run(pqn, FLAGS)
    first = pqn.init_state(run)
    first = first._replace(params=random_params(0, first.params))
    with pytest.MonkeyPatch.context() as patch:
        steps = watch(patch, pqn, "vector_step")
        updates = watch(patch, pqn, "td_loss", "bounds params batch targets")
        last, lines = train(pqn, run, first)
    seen = jax.tree.map(lambda *columns: np.stack(columns), *[step.out[1][0] for step in steps])
    return SimpleNamespace(
        run=run,
        seen=seen,
        last_obs=jax.device_get(last.obs),  # in which no step began
        updates=updates,
        # The parameters after each update: those before the next one.
        after=[update.params for update in updates[1:]] + [jax.device_get(last.params)],
        old=[update for update in updates[::6] for _ in range(7)],  # the first after each step
        lines=lines,
    )


def test_steps_are_rounded_up_to_two_equal_intervals(learning):
    """930 steps are 23 iterations of 42, so 24 of six minibatches each."""
    assert learning.seen.reward.size == learning.run.interval_timesteps * 2 == 1008
    assert (len(learning.updates), len(learning.lines)) == (144, 2)


def test_transitions_are_those_of_gymnasium_with_the_reward_of_the_action(learning):
    """Also at the time limit, where the next episode has begun already."""
    seen, expected = learning.seen, follow_in_gymnasium(learning.seen)
    close(seen.next_obs, expected.next_obs)
    equal(seen.terminated, expected.fell)
    equal(seen.truncated & ~seen.terminated, expected.out_of_time)
    equal(seen.reward, 2 - 3 * seen.action)
    assert_episodes_go_on_until_they_end(seen)


def test_observations_are_divided_by_their_largest_absolute_values_so_far(learning):
    obs = np.abs([*learning.seen.obs, learning.last_obs])  # (169, 6, 4)
    for i, update in enumerate(learning.updates):
        steps = (i // 6 + 1) * 7
        equal(update.bounds, obs[: steps + 1].max(axis=(0, 1)))


def test_targets_are_lambda_returns_up_to_the_end_of_the_episode_or_of_the_steps(learning):
    """Mean n-step returns, gamma is 0.8 and lambda 0.6. Only an end by time is bootstrapped from.

    The values are those of the network with which the steps were made.
    """
    seen, expected = learning.seen, np.zeros((168, 6))
    next_q = [
        normalized_network(update.bounds, update.params, seen.next_obs[t])
        for t, update in enumerate(learning.old)
    ]
    next_value = np.where(seen.terminated, 0, np.max(next_q, axis=2))
    ended = seen.terminated | seen.truncated
    for t, i in np.ndindex(168, 6):
        rewards, weight, k = 0, 1, t  # weight: lambda to the power of the steps so far
        while True:
            rewards += 0.8 ** (k - t) * seen.reward[k, i]
            n_step_return = rewards + 0.8 ** (k - t + 1) * next_value[k, i]
            if ended[k, i] or k % 7 == 6:
                break
            expected[t, i] += (1 - 0.6) * weight * n_step_return
            weight *= 0.6
            k += 1
        expected[t, i] += weight * n_step_return
    for update, places in zip(learning.updates, places_of(learning), strict=True):
        close(update.targets, expected.ravel()[places])
    # Both ends are in the middle of the seven steps of an iteration, and at the last one.
    for end in seen.terminated, seen.truncated & ~seen.terminated:
        last_step = np.argwhere(end)[:, 0] % 7 == 6
        assert set(last_step.tolist()) == {True, False}


def test_an_epoch_has_each_transition_of_its_iteration_once_in_an_order_of_its_own(learning):
    places = np.reshape(places_of(learning), (48, 42))  # of each epoch
    for i, epoch in enumerate(places):
        equal(np.sort(epoch), i // 2 * 42 + np.arange(42))
    assert len(np.unique(places % 42, axis=0)) == 48
    assert_batches_are_as_they_were_seen(learning)


def test_each_update_is_a_step_of_radam_along_the_clipped_gradient_of_the_loss(learning):
    """By all parameters. The longest gradient is 1. The rate falls to 0 in the 23 * 6 updates."""
    loss_and_slope = jax.jit(jax.value_and_grad(value_loss))
    radam = optax.radam(lambda count: 0.02 * jnp.maximum(0, 1 - count / 138), eps=1e-3)
    moments, update_of = radam.init(learning.after[0]), jax.jit(radam.update)
    norms = []
    for update, params in zip(learning.updates, learning.after, strict=True):
        loss, gradient = loss_and_slope(update.params, update.bounds, update.batch, update.targets)
        close(update.out[0], loss)
        norms.append(np.sqrt(sum(np.sum(array**2) for array in jax.tree.leaves(gradient))))
        clipped = jax.tree.map(lambda array: array / max(1, norms[-1]), gradient)
        step, moments = update_of(clipped, moments)
        jax.tree.map(partial(close, atol=2e-5), params, jax.tree.map(np.add, update.params, step))
    assert min(norms) < 1 < max(norms)


def test_a_progress_line_shows_mean_errors_and_values_of_all_minibatches(learning):
    for line, updates in zip(learning.lines, halves(learning.updates), strict=True):
        values = [values_of_actions(one.bounds, one.params, one.batch) for one in updates]
        close(line["q_value"], np.mean(values))
        errors = np.subtract([update.targets for update in updates], values)
        close(line["error"], np.mean(np.abs(errors)))


def test_a_progress_line_shows_the_mean_return_of_the_episodes_that_ended(learning):
    ended = learning.seen.terminated | learning.seen.truncated
    assert_lines_show_returns(learning.lines, learning.seen.reward, ended)


def actions_of(state, run):
    _, (transitions, _) = jit(pqn.vector_step, run)(state, None)
    return np.asarray(transitions.action)


def test_actions_are_random_with_probability_epsilon():
    """Of three actions, the second is best. The others are taken in a third of random steps."""
    run = noise_run(pqn, "--num-envs 6000 --hidden-size 2 --epsilon 0.6")
    state = pqn.init_state(run)
    output = {"w": jnp.zeros((2, 3)), "b": jnp.array([0.0, 1.0, 0.0])}
    actions = actions_of(state._replace(params=[*state.params[:2], output]), run)
    for worse in (0, 2):
        assert abs(np.sum(actions == worse) - 1200) < 5 * np.sqrt(1200)


def test_without_exploration_each_action_has_the_highest_value_in_its_observation():
    run = noise_run(pqn, "--num-envs 500 --hidden-size 8 --epsilon 0")
    state = pqn.init_state(run)
    state = state._replace(params=random_params(1, state.params))
    q = normalized_network(state.bounds, state.params, np.asarray(state.obs))
    best = np.argmax(q, axis=1)
    assert len(np.unique(best)) > 1
    equal(actions_of(state, run), best)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 2)])
def test_values_are_those_of_a_normalized_network_of_the_scaled_observation(shape):
    """Also of pictures. Where only 0 was seen so far, an observation stays as it is."""
    rng, inputs = np.random.default_rng(2), int(np.prod(shape))
    sizes = [(inputs, 8), (8, 8), (8, 4)]
    params = [{"w": rng.normal(size=size), "b": rng.normal(size=size[1])} for size in sizes]
    bounds, obs = rng.integers(0, 3, size=shape), rng.integers(-9, 9, size=shape)
    divisor = np.where(bounds == 0, 1, bounds).reshape(-1)
    expected = normalized_network(divisor, params, obs.reshape(-1))
    close(pqn.q_values(jnp.array(bounds), params, jnp.array(obs)), expected, rtol=1e-3, atol=1e-3)


def test_a_network_starts_with_random_weights_and_biases_of_known_size():
    flags = "--env-id MountainCar-v0 --hidden-size 300"
    state, other = [pqn.init_state(one_run(pqn, flags, seed=seed)) for seed in (3, 4)]
    assert [layer["w"].shape for layer in state.params] == [(2, 300), (300, 300), (300, 3)]
    for layer, inputs in zip(state.params, [2, 300, 300], strict=True):
        drawn = [*np.ravel(layer["w"]), *layer["b"]]
        assert kstest(np.array(drawn) * (inputs / 2) ** 0.5, norm.cdf).pvalue > RARE
    equal(state.bounds, np.abs(state.obs).max(axis=0))
    hidden = [*state.params[:2], *other.params[:2]]
    drawn = [row for layer in hidden for row in [*layer["w"][:2], layer["b"]]]  # (300,) each
    assert np.all(np.abs(np.corrcoef(drawn) - np.eye(12)) < 5 / np.sqrt(300))
