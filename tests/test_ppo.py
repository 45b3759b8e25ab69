"""ppo.py: what it does with the transitions that it saw, recomputed in NumPy.

`recorded` trains for two intervals and records every vector step and every minibatch: on the pole
of environments.py, whose episodes end both ways, and on Echo, whose actions have two real numbers.
Networks, actions and their probabilities have the same text in reinforce_parallel.py, and are
tested there; test_evaluation.py has its greedy episodes.
"""

from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import ppo
import pytest
from conftest import (
    RARE,
    assert_batches_are_as_they_were_seen,
    assert_lines_show_returns,
    halves,
    places_of,
    train,
    watch,
)
from environments import (
    Echo,
    assert_episodes_go_on_until_they_end,
    follow_in_gymnasium,
    pole_run,
    run_in,
)
from oracles import random_params, tanh_network
from scipy.special import softmax
from scipy.stats import kstest, norm

close, equal = (
    partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
    np.testing.assert_array_equal,
)
# An iteration has 7 steps of 6 environments, and 2 epochs of 3 minibatches with 14 transitions.
# 930 steps are 23 iterations, which are rounded up to two intervals of 12.
FLAGS = "--num-envs 6 --num-steps 7 --update-epochs 2 --num-minibatches 3 --hidden-size 8"
FLAGS += " --total-timesteps 930 --num-intervals 2 --learning-rate 0.005 --gamma 0.8"
FLAGS += " --gae-lambda 0.6 --clip-coef 0.05 --ent-coef 0.3"
ENVS = {"the pole": pole_run, "Echo": partial(run_in, Echo((1, 2)), Echo.default_params)}


@cache
def recorded(env):
    run = ENVS[env](ppo, FLAGS)
    first = ppo.init_state(run)
    first = first._replace(params=random_params(0, first.params))
    with pytest.MonkeyPatch.context() as patch:
        steps = watch(patch, ppo, "vector_step")
        updates = watch(patch, ppo, "ppo_loss", "params batch advantage")
        last, lines = train(ppo, run, first)
    return SimpleNamespace(
        run=run,
        seen=jax.tree.map(lambda *columns: np.stack(columns), *[step.out[1][0] for step in steps]),
        updates=updates,
        # The parameters after each update: those before the next one.
        after=[update.params for update in updates[1:]] + [jax.device_get(last.params)],
        old=[update.params for update in updates[::6] for _ in range(7)],  # of each vector step
        lines=lines,
    )


def test_steps_are_rounded_up_to_two_equal_intervals():
    """930 steps are 23 iterations of 42, so 24 of six minibatches each."""
    record = recorded("the pole")
    assert record.seen.reward.size == record.run.interval_timesteps * 2 == 1008
    assert (len(record.updates), len(record.lines)) == (144, 2)


def test_transitions_are_those_of_gymnasium_with_the_reward_of_the_action():
    seen = recorded("the pole").seen
    equal(seen.ended, follow_in_gymnasium(seen).ended)
    equal(seen.reward, 2 - 3 * seen.action)
    assert_episodes_go_on_until_they_end(seen)


def test_values_are_those_of_the_critic_before_the_update():
    """That of the true last observation counts where time ran out; where a pole fell, it is 0."""
    seen, old = recorded("the pole").seen, recorded("the pole").old
    pole = follow_in_gymnasium(seen)
    for t, params in enumerate(old):
        close(seen.value[t], tanh_network(params["critic"], seen.obs[t])[:, 0])
        next_value = tanh_network(params["critic"], pole.next_obs[t])[:, 0]
        expected = np.where(pole.fell[t], 0, next_value)
        close(seen.next_value[t], expected, rtol=1e-3, atol=1e-4)


def log_prob(actor, obs, action):
    """Logarithm of the probability (or of the density) of actions."""
    output = tanh_network(actor, obs)
    if "log_std" in actor:
        return norm.logpdf(action, output, np.exp(actor["log_std"])).sum(axis=1)
    return np.log(softmax(output, axis=1)[np.arange(len(action)), action])


@pytest.mark.parametrize("env", ENVS)
def test_the_probability_of_an_action_is_that_of_the_actor_before_the_update(env):
    """In Echo, that of the action as it was drawn, not as it was clipped."""
    record = recorded(env)
    for t, params in enumerate(record.old):
        expected = log_prob(params["actor"], record.seen.obs[t], record.seen.action[t])
        close(record.seen.log_prob[t], expected)


def test_the_reward_of_an_echo_is_that_of_its_clipped_and_scaled_actions():
    """Their bounds are -1 and 3, -1 and 7. They are kept as they were drawn."""
    seen = recorded("Echo").seen
    assert np.abs(seen.action).max() > 1
    from_0_to_1 = (seen.action.clip(-1, 1) + 1) / 2  # (168, 6, 2)
    close(seen.reward, (-1 + np.array([4, 8]) * from_0_to_1).sum(axis=2))


def test_advantages_are_sums_of_td_errors_up_to_the_end_of_the_episode_or_of_the_steps():
    """gamma is 0.8, lambda is 0.6. A sum has at most seven terms."""
    record, expected = recorded("the pole"), np.zeros((168, 6))
    seen = record.seen
    td_error = seen.reward + 0.8 * seen.next_value - seen.value
    for t, i in np.ndindex(168, 6):
        factor, k = 1, t
        expected[t, i] = td_error[t, i]
        while not seen.ended[k, i] and k % 7 < 6:
            k += 1
            factor *= 0.8 * 0.6
            expected[t, i] += factor * td_error[k, i]
    for update, places in zip(record.updates, places_of(record), strict=True):
        close(update.advantage, expected.ravel()[places])
    # Both ends are in the middle of the seven steps of an iteration, and at the last one.
    pole = follow_in_gymnasium(seen)
    for end in pole.fell, pole.out_of_time:
        last_step = np.argwhere(end)[:, 0] % 7 == 6
        assert set(last_step.tolist()) == {True, False}


def test_an_epoch_has_each_transition_of_its_iteration_once_in_an_order_of_its_own():
    record = recorded("the pole")
    places = np.reshape(places_of(record), (48, 42))  # of each epoch
    for i, epoch in enumerate(places):
        equal(np.sort(epoch), i // 2 * 42 + np.arange(42))
    assert len(np.unique(places % 42, axis=0)) == 48
    assert_batches_are_as_they_were_seen(record)


def ratios(update):
    """Probability of each action, divided by that before the iteration."""
    batch = update.batch
    return np.exp(log_prob(update.params["actor"], batch.obs, batch.action) - batch.log_prob)


def test_the_first_minibatch_of_an_iteration_is_learned_with_the_policy_that_played():
    """Its ratios are 1, so nothing is clipped. Later ones have others."""
    updates = recorded("the pole").updates
    for update in updates[::6]:
        _, metrics = update.out
        close(ratios(update), 1)
        close(metrics["approx_kl"], 0, atol=1e-6)
        assert metrics["clip_fraction"] == 0
    assert np.abs(ratios(updates[5]) - 1).max() > 0.01


def expected_loss(params, batch, advantage):
    """The loss of a minibatch, with clip-coef 0.05 and ent-coef 0.3."""
    actor, critic = params["actor"], params["critic"]
    output = jnp.tanh(batch.obs @ actor["w0"] + actor["b0"]) @ actor["w1"] + actor["b1"]
    value = jnp.tanh(batch.obs @ critic["w0"] + critic["b0"]) @ critic["w1"] + critic["b1"]
    if "log_std" in actor:
        std = jnp.exp(actor["log_std"])
        log_pi = jax.scipy.stats.norm.logpdf(batch.action, output, std).sum(axis=1)
        entropy = jnp.log(std * np.sqrt(2 * np.pi * np.e)).sum()
    else:
        logs = jax.nn.log_softmax(output)
        log_pi = (jax.nn.one_hot(batch.action, 2) * logs).sum(axis=1)
        entropy = -(jnp.exp(logs) * logs).sum(axis=1).mean()
    ratio = jnp.exp(log_pi - batch.log_prob)
    weight = (advantage - advantage.mean()) / advantage.std()
    gain = jnp.where(weight > 0, jnp.minimum(ratio, 1.05), jnp.maximum(ratio, 0.95)) * weight
    errors = value[:, 0] - (batch.value + advantage)
    return -gain.mean() + (errors**2).mean() / 2 - 0.3 * entropy


@pytest.mark.parametrize("env", ENVS)
def test_each_update_is_an_adam_step_along_the_gradient_of_the_expected_loss(env):
    """By all parameters. Its size falls to 0 in the 23 * 6 updates that were asked for."""
    record = recorded(env)
    loss_and_slope = jax.jit(jax.value_and_grad(expected_loss))
    adam = optax.adam(lambda count: 0.005 * jnp.maximum(0, 1 - count / 138))
    moments, update_of = adam.init(record.after[0]), jax.jit(adam.update)
    for update, params in zip(record.updates, record.after, strict=True):
        loss, gradient = loss_and_slope(update.params, update.batch, update.advantage)
        close(update.out[0], loss)
        step, moments = update_of(gradient, moments)
        jax.tree.map(partial(close, atol=2e-5), params, jax.tree.map(np.add, update.params, step))


def test_the_clip_stops_the_gradient_where_the_ratio_has_moved_far_enough():
    """Up where the advantage is positive, down where it is negative, and not the other way.

    The loss depends on the old logarithm of a probability by the ratio r of its transition alone:
    the derivative is r A / 6, or 0 where the clip holds.
    """
    run = pole_run(ppo, FLAGS)
    params = random_params(1, ppo.init_state(run).params)
    obs, action = np.random.default_rng(2).normal(size=(6, 4)), np.array([0, 1, 1, 0, 1, 0])
    advantage, ratio = np.array([1, 1, 1, -1, -1, -1.0]), np.array([1.2, 0.8, 1.02, 1.2, 0.8, 0.98])
    now, zero = log_prob(params["actor"], obs, action), np.zeros(6)

    def loss(old):
        batch = ppo.Transition(obs, action, old, zero, zero, zero, zero)
        return ppo.ppo_loss(run, params, batch, advantage)

    slope, metrics = jax.grad(loss, has_aux=True)(now - np.log(ratio))
    close(slope, np.array([0, 0.8, 1.02, -1.2, 0, -0.98]) / 6)
    close(metrics["clip_fraction"], 4 / 6)


def test_large_advantages_that_are_nearly_equal_are_standardized():
    """E[A^2] - E[A]^2 would be rounded to nothing, or below 0."""
    run = pole_run(ppo, FLAGS)
    params = jax.tree.map(jnp.zeros_like, ppo.init_state(run).params)
    advantage = 4096 + np.array([1, 2, 4, 9]) / 1024
    old, zero = np.log([0.5, 0.52, 0.5, 0.48]), np.zeros(4)  # now, each probability is 0.5
    batch = ppo.Transition(np.zeros((4, 4)), np.zeros(4, int), old, -advantage, zero, zero, zero)
    loss, _ = ppo.ppo_loss(run, params, batch, advantage)
    gain = (advantage - advantage.mean()) / advantage.std() * 0.5 / np.exp(old)
    close(loss, -gain.mean() - 0.3 * np.log(2))


def entropies(update):
    actor = update.params["actor"]
    if "log_std" in actor:
        return norm.entropy(scale=np.exp(actor["log_std"])).sum()
    p = softmax(tanh_network(actor, update.batch.obs), axis=1)
    return -np.sum(p * np.log(p), axis=1)


@pytest.mark.parametrize("env", ENVS)
def test_a_progress_line_shows_means_over_all_minibatches(env):
    record = recorded(env)
    for line, updates in zip(record.lines, halves(record.updates), strict=True):
        ratio = np.array([ratios(update) for update in updates])
        close(line["approx_kl"], np.mean(ratio - 1 - np.log(ratio)), atol=1e-5)
        close(line["clip_fraction"], np.mean(np.abs(ratio - 1) > 0.05))
        close(line["entropy"], np.mean([entropies(update) for update in updates]))
    assert record.lines[0]["clip_fraction"] > 0


def test_a_progress_line_shows_the_mean_return_of_the_episodes_that_ended():
    record = recorded("the pole")
    assert_lines_show_returns(record.lines, record.seen.reward, record.seen.ended)


def test_two_networks_start_with_random_weights_of_known_size():
    runs = [ENVS["Echo"](ppo, "--hidden-size 999", seed=seed) for seed in (3, 4)]
    state, other = map(ppo.init_state, runs)
    actor, critic = state.params["actor"], state.params["critic"]
    for network in actor, critic:
        assert kstest(np.ravel(network["w0"]) * 4**0.5, norm.cdf).pvalue > RARE  # four inputs
        assert kstest(np.ravel(network["w1"]) / 0.01, norm.cdf).pvalue > RARE
        assert not network["b0"].any() and not network["b1"].any()
    assert (actor["w1"].shape, critic["w1"].shape) == ((999, 2), (999, 1))
    assert actor["log_std"].tolist() == [0, 0]  # one for each number of an action
    first_layers = [np.ravel(x["w0"]) for x in (actor, critic, other.params["actor"])]
    assert np.all(np.abs(np.corrcoef(first_layers) - np.eye(3)) < 5 / np.sqrt(4 * 999))
