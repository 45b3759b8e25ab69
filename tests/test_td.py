"""The three linear learners: what they do with the transitions that they saw, recomputed in NumPy.

The fixture `learning` trains a script for two intervals on a pole with a time limit of 12 steps,
and records every vector step and every update: what these functions got and what they returned.
Each test then checks one fact of that record.
"""

import collections
import itertools
from types import SimpleNamespace

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import (
    DECAY,
    PARALLEL,
    REINFORCE,
    TD_LOSS,
    TRIO,
    VECTOR_STEP,
    Noise,
    assert_independent,
    halves,
    jit,
    load,
    one_run,
    watch,
)
from gymnax.wrappers import LogWrapper
from scipy.stats import kstest

close, equal = np.testing.assert_allclose, np.testing.assert_array_equal
LIMIT = 12  # steps: some episodes reach it, others end before
GRAVITY = 60.0  # not the default
SCALE = [2.4, 3.0, 0.2, 3.0]  # of CartPole-v1


class Pole(gymnax.environments.CartPole):
    """A pole with rewards of 33 or 47, by action; what is observed after its fall is nan.

    A reward tells its action, and nan shows wherever a terminal state is not cut off. What is
    observed at the start is nan, too, if the script does not pass the run's own parameters. Their
    time limits are longer than that of the environment.
    """

    default_params = gymnax.environments.CartPole().default_params.replace(max_steps_in_episode=5)

    def reset_env(self, key, params):
        obs, state = super().reset_env(key, params)
        return jnp.where(params.gravity == GRAVITY, obs, jnp.nan), state

    def step_env(self, key, state, action, params):
        obs, state, _, terminated, info = super().step_env(key, state, action, params)
        return jnp.where(terminated, jnp.nan, obs), state, 33 + 14 * action, terminated, info


def pole_run(script, flags, **own):
    """One run in four environments in which poles fall."""
    params = Pole().default_params.replace(max_steps_in_episode=LIMIT, gravity=GRAVITY)
    own |= {"env": LogWrapper(Pole()), "env_params": params}
    return one_run(script, f"--num-envs 4 {flags}", **own)


def gymnasium_pole():
    """The same pole by Gymnasium, but for rewards and nan."""
    env = gymnasium.make("CartPole-v1").unwrapped
    env.gravity = GRAVITY
    return env


def with_weights(state, weights):
    return state._replace(weights=jnp.float32(weights))


def features(run, centers, obs):
    """Radial basis functions of observations (..., D), as the book defines them."""
    scaled = np.asarray(obs, float) / SCALE
    difference = scaled[..., None] - np.asarray(centers)  # (..., D, F)
    return np.exp(-np.sum(difference**2, axis=-2) / (2 * run.sigma**2))


@pytest.fixture(scope="module", params=TRIO)
def learning(request):
    script, patch = load(request.param), pytest.MonkeyPatch()
    on_line = request.param == PARALLEL
    # Steps that must be rounded up to two equal intervals. The buffer holds all 160 transitions.
    if on_line:
        flags = "--total-timesteps 130 --num-steps 3"
    else:
        flags = "--total-timesteps 153 --batch-size 10 --buffer-size 200"
    flags += " --num-centers 9 --num-intervals 2"
    own = {"learning_rate": 0.3, "gamma": 0.8, "sigma": 0.7, "tau": 0.4, "epsilon": 0.5}
    run = pole_run(script, flags, **own)
    steps, updates = watch(patch, script, VECTOR_STEP), watch(patch, script, TD_LOSS)
    first = jit(script.init_state, run)()
    # With weights of 0, a gradient through the targets would be 0, and not be noticed.
    first = with_weights(first, np.random.default_rng(0).normal(size=(2, 9)))
    train, state, lines = jit(script.train_interval, run), first, []
    for _ in range(2):
        state, metrics = train(state)
        lines.append(metrics)
    jax.effects_barrier()
    patch.undo()
    # The weights after each update: those before the next one.
    after = [update.weights for update in updates[1:]] + [jax.device_get(state.weights)]
    return SimpleNamespace(
        on_line=on_line,
        run=run,
        first=first,
        last=state,
        lines=lines,
        transitions=[step.out[1][0] for step in steps],  # of the state, and (transitions, info)
        updates=updates,
        after=after,
    )


def test_steps_are_rounded_up_to_two_equal_intervals(learning):
    """parallel_td.py: 130 steps are 11 updates of 12, so 12. The others: 153 are 39 of 4, so 40."""
    steps, updates = (144, 12) if learning.on_line else (160, 40)
    assert len(learning.transitions) * 4 == steps
    assert len(learning.updates) == updates
    assert [line["timesteps"] for line in learning.lines] == [steps / 2, steps]


def test_transitions_are_those_of_gymnasium_with_the_reward_of_the_action(learning):
    """Also at the time limit, where the next episode has begun already."""
    env = gymnasium_pole()
    for transitions in learning.transitions:
        for obs, action, reward, next_obs, terminated in zip(*transitions, strict=True):
            env.state, env.steps_beyond_terminated = np.float64(obs), None
            expected, _, falls, *_ = env.step(int(action))
            assert terminated == falls
            close(next_obs, np.nan if falls else expected, rtol=1e-4, atol=1e-5)
            close(reward, 33 + 14 * action)


def test_an_episode_goes_on_from_its_next_observation_until_it_ends(learning):
    length, starts = np.zeros(4, int), [*learning.transitions[0].obs]
    for step, following in zip(learning.transitions[:-1], learning.transitions[1:], strict=True):
        length += 1
        ended = step.terminated | (length == LIMIT)
        equal(following.obs[~ended], step.next_obs[~ended])
        starts += [*following.obs[ended]]
        length[ended] = 0
    assert np.all(np.abs(starts) <= 0.05)  # where Gymnasium's poles start


def test_the_record_has_episodes_that_fall_and_episodes_that_reach_the_limit(learning):
    """Else the tests around this one would prove less than they say."""
    length, ends = np.zeros(4, int), set()
    for step in learning.transitions:
        length += 1
        ended = step.terminated | (length == LIMIT)
        ends.update(step.terminated[ended].tolist())
        length[ended] = 0
    assert ends == {True, False}


@pytest.mark.parametrize("learning", [PARALLEL], indirect=True)
def test_the_on_line_learner_learns_from_each_transition_once(learning):
    """An update has three steps: at least 10 transitions, from four environments."""
    for i, update in enumerate(learning.updates):
        seen = learning.transitions[3 * i : 3 * i + 3]
        jax.tree.map(equal, update.batch, jax.tree.map(lambda *parts: np.concatenate(parts), *seen))


@pytest.mark.parametrize("learning", TRIO[1:], indirect=True)
def test_replayed_transitions_are_as_they_were_seen(learning):
    seen = {}  # by the observation in which they began
    for transitions in learning.transitions:
        for transition in zip(*transitions, strict=True):
            seen[transition[0].tobytes()] = transition
    for update in learning.updates:
        for replayed in zip(*update.batch, strict=True):
            for array, expected in zip(replayed, seen[replayed[0].tobytes()], strict=True):
                equal(array, expected)


def test_targets_bootstrap_from_what_follows_unless_it_is_terminal(learning):
    """parallel_td.py bootstraps from its weights, the others from their running average."""
    first = learning.first.weights if learning.on_line else learning.first.target_weights
    weights = np.float64(first)
    for update, after in zip(learning.updates, learning.after, strict=True):
        next_q = features(learning.run, update.centers, update.batch.next_obs) @ weights.T
        value = np.where(update.batch.terminated, 0, next_q.max(axis=1))
        close(update.targets, update.batch.reward + 0.8 * value, rtol=1e-4)
        rate = 1 if learning.on_line else 0.4  # tau
        weights = weights + rate * (after - weights)


def errors_of(learning, update):
    """TD errors (B,) of an update, and the values (B,) of the actions that were taken."""
    q = features(learning.run, update.centers, update.batch.obs) @ update.weights.T
    values = q[np.arange(len(q)), update.batch.action]
    return update.targets - values, values


def test_the_loss_is_half_the_mean_squared_error(learning):
    for update in learning.updates:
        loss, _ = update.out
        errors, _ = errors_of(learning, update)
        close(loss, np.mean(errors**2) / 2, rtol=1e-4)


def test_each_update_is_a_step_of_adam_whose_size_falls_to_0(learning):
    """The gradient is that of the values alone: the targets have none. The centers stay."""
    total = len(learning.updates)
    adam = optax.adam(lambda count: 0.3 * (1 - count / total))
    update_of = jax.jit(adam.update)
    moments = adam.init(np.zeros((2, 9)))
    for update, after in zip(learning.updates, learning.after, strict=True):
        phi = features(learning.run, update.centers, update.batch.obs)  # (B, F)
        errors, _ = errors_of(learning, update)
        gradient = np.zeros((2, 9))
        for b in range(len(errors)):
            gradient[update.batch.action[b]] -= errors[b] * phi[b] / len(errors)
        step, moments = update_of(gradient, moments)
        close(after, update.weights + step, atol=1e-4)
    equal(learning.last.centers, learning.first.centers)


def test_a_progress_line_shows_mean_errors_and_values(learning):
    for line, updates in zip(learning.lines, halves(learning.updates), strict=True):
        errors, values = zip(*[errors_of(learning, update) for update in updates], strict=True)
        close(line["td_error"], np.mean(np.abs(errors)), rtol=1e-4)
        close(line["q_value"], np.mean(values), rtol=1e-4)


def test_a_progress_line_shows_the_mean_return_of_the_episodes_that_ended(learning):
    total, length = np.zeros(4), np.zeros(4, int)
    for line, steps in zip(learning.lines, halves(learning.transitions), strict=True):
        returns = []
        for transitions in steps:
            total, length = total + transitions.reward, length + 1
            ended = transitions.terminated | (length == LIMIT)
            returns += total[ended].tolist()
            total[ended], length[ended] = 0, 0
        close(line["returns"], np.mean(returns), rtol=1e-5)


def test_a_run_starts_with_weights_of_0_and_with_centers_of_its_seed():
    for script in map(load, TRIO):
        runs = [pole_run(script, "", seed=seed) for seed in (1, 2)]
        one, other = [jit(script.init_state, run)() for run in runs]
        assert not one.weights.any() and not getattr(one, "target_weights", one.weights).any()
        centers = np.asarray(one.centers)  # (4, 500)
        assert -1 <= centers.min() < -0.99 and 0.99 < centers.max() <= 1
        assert np.all(np.abs(centers.mean(axis=1)) < 5 * np.sqrt(1 / 3 / 500))  # spread evenly
        assert np.all(np.abs(np.corrcoef(centers) - np.eye(4)) < 5 / np.sqrt(500))
        assert not np.any(centers == other.centers)


@pytest.mark.parametrize("name", TRIO[1:])
def test_batches_are_drawn_evenly_from_the_last_ten_transitions(name, monkeypatch):
    script = load(name)
    # Four transitions a step; ten are kept: after three steps, the oldest ones are overwritten.
    flags = "--buffer-size 10 --batch-size 20000 --num-centers 3"
    updates = watch(monkeypatch, script, TD_LOSS)
    places = set()  # in the buffer, of the first twenty draws of each update
    for seed in (1, 2):
        run = pole_run(script, flags, learning_rate=0.0, seed=seed)
        state, train_step = jit(script.init_state, run)(), jit(script.train_step, run)
        began = []  # the observations in which the transitions so far began, which no two share
        for _ in range(7):
            began += [obs.tobytes() for obs in np.asarray(state.obs)]
            state, _ = train_step(state, None)
            jax.effects_barrier()
            drawn = [obs.tobytes() for obs in updates[-1].batch.obs]
            times = collections.Counter(drawn)
            assert times.keys() == set(began[-10:])
            expected = 20000 / len(times)
            assert all(abs(number - expected) < 5 * expected**0.5 for number in times.values())
            places.add(tuple(began.index(obs) % 10 for obs in drawn[:20]))
    assert len(places) == 14  # each update of each run has drawn others


@pytest.mark.parametrize("name", TRIO[1:])
def test_batches_are_drawn_from_all_places_of_a_large_buffer(name, monkeypatch):
    script, size = load(name), 200_000
    run = pole_run(script, f"--buffer-size {size} --batch-size 5000 --num-centers 3")
    updates = watch(monkeypatch, script, TD_LOSS)
    state = jit(script.init_state, run)()
    places = jnp.zeros((size, 4)).at[:, 0].set(jnp.arange(size))
    state = state._replace(timesteps=size, buffer=state.buffer._replace(obs=places))
    jit(script.train_step, run)(state, None)
    jax.effects_barrier()
    drawn = updates[0].batch.obs[:, 0]
    assert kstest(drawn, "uniform", args=(0, size)).pvalue > 1e-6


def test_the_optimizer_does_not_decay_weights_and_makes_whole_steps():
    """Adam divides a gradient by its size, to which it adds no more than 1e-8."""
    for script in map(load, [*TRIO, REINFORCE]):
        adam, weights = script.optimizer(one_run(script, learning_rate=0.3)), jnp.ones(2)
        step, _ = adam.update(jnp.array([0.0, 1e-6]), adam.init(weights), weights)
        close(step, [0.0, -0.3], rtol=0.02)


TASKS = ["CartPole-v1", "Acrobot-v1", "MountainCar-v0"]


def test_a_task_has_the_parameters_of_gymnax():
    for script, env_id in itertools.product(map(load, [*TRIO, REINFORCE]), TASKS):
        _, params = script.make_env(script.parse_args(["--env-id", env_id]))
        assert str(params) == str(gymnax.make(env_id)[1])  # some are arrays


@pytest.mark.parametrize("name", TRIO)
def test_actions_are_random_with_probability_epsilon(name, monkeypatch):
    """One of three actions is best everywhere. The others are taken in a third of random steps."""
    script = load(name)
    flags = "--env-id MountainCar-v0 --num-envs 6000 --num-centers 3"
    own = {"epsilon": 0.6, "start_e": 0.8, "end_e": 0.15, "epsilon_decay": 0.5}
    run = one_run(script, flags, learning_rate=0.0, **own)
    steps = watch(monkeypatch, script, VECTOR_STEP)
    state, train_step = jit(script.init_state, run)(), jit(script.train_step, run)
    state = with_weights(state, [[0.0] * 3, [1.0] * 3, [0.0] * 3])  # action 1 is best
    decaying = [0.8, 0.4, 0.2, 0.15]  # halved in each vector step, but at least 0.15
    constant = [0.6, 0.6]
    for epsilon in decaying if name == DECAY else constant:
        state, metrics = train_step(state, None)
        jax.effects_barrier()
        transitions = steps[-1].out[1][0]
        for worse in (0, 2):
            taken, expected = np.sum(transitions.action == worse), 2000 * epsilon
            assert abs(taken - expected) < 5 * np.sqrt(expected)
        if name == DECAY:
            close(metrics["epsilon"], epsilon, rtol=1e-6)


def noise_run(script, flags, **own):
    own |= {"env": LogWrapper(Noise()), "env_params": Noise().default_params, "env_id": "noise"}
    script.OBS_SCALE["noise"] = [1.0, 1.0]
    return one_run(script, f"--num-centers 3 --num-intervals 1 {flags}", **own)


@pytest.mark.parametrize("name", TRIO)
def test_actions_of_other_steps_environments_and_runs_are_independent(name, monkeypatch):
    script, of_run = load(name), []
    steps = watch(monkeypatch, script, VECTOR_STEP)
    for seed in (1, 2):
        steps.clear()
        own = {"seed": seed, "epsilon": 0.6, "start_e": 0.6, "end_e": 0.6, "learning_rate": 0.0}
        run = noise_run(script, "--num-envs 100 --total-timesteps 5000", **own)
        state = with_weights(jit(script.init_state, run)(), [[0.0] * 3, [1.0] * 3, [0.0] * 3])
        jit(script.train_interval, run)(state)
        jax.effects_barrier()
        of_run.append(np.stack([step.out[1][0].action for step in steps]))  # (50, 100)
    p = [0.2, 0.6, 0.2]  # action 1 is best
    one, other = of_run
    assert_independent(one[1:], one[:-1], p)
    assert_independent(one[:, 1:], one[:, :-1], p)
    assert_independent(one, other, p)


@pytest.mark.parametrize("name", TRIO)
def test_environments_never_get_the_same_random_numbers_twice(name, monkeypatch):
    """Neither in other steps, environments, updates or runs, nor in evaluation."""
    script = load(name)
    starts = watch(monkeypatch, Noise, "reset_env", ordered=False)
    steps = watch(monkeypatch, Noise, "step_env", ordered=False)
    for seed in (1, 2):
        run = noise_run(script, "--num-envs 3 --total-timesteps 60 --eval-episodes 4", seed=seed)
        state, _ = jit(script.train_interval, run)(jit(script.init_state, run)())
        jit(script.evaluate, run)(state)
        jax.effects_barrier()
    seen = [record.out[0] for record in starts + steps]
    assert len(np.unique(seen, axis=0)) == len(seen) > 2 * 80


def test_scales_are_the_bounds_of_observations_or_about_half_of_them():
    """That of CartPole-v1 is SCALE, with which the tests above compute features."""
    for script in map(load, TRIO):
        assert script.OBS_SCALE["MountainCar-v0"] == [1.2, 0.07]  # the left wall, the top speed
        *angles, first, second = script.OBS_SCALE["Acrobot-v1"]
        assert angles == [1, 1, 1, 1]  # cosines and sines
        assert 1.5 < 4 * np.pi / first < 2.5 and 1.5 < 9 * np.pi / second < 2.5  # top speeds


def play_greedily(env, obs, run, learned):
    """Play in Gymnasium from an observation on, and return the return."""
    env.state, env.steps_beyond_terminated = np.float64(obs), None
    total, length, terminated = 0.0, 0, False
    while not terminated and length < run.env_params.max_steps_in_episode:
        phi = features(run, learned["centers"], env.state)
        action = np.argmax(learned["weights"] @ phi)
        terminated = env.step(action)[2]
        total, length = total + 33 + 14 * action, length + 1
    return total


@pytest.mark.parametrize("name", TRIO)
def test_returned_weights_play_in_gymnasium_as_they_were_evaluated(name, monkeypatch):
    """Not other ones, as the averaged weights of the targets."""
    script = load(name)
    run = pole_run(script, "--num-centers 9 --eval-episodes 3")
    # Some poles fall within 10 steps. In 20 steps, two episodes can end: only the first counts.
    run.env_params = run.env_params.replace(max_steps_in_episode=20)
    first, evaluate = jit(script.init_state, run)(), jit(script.evaluate, run)
    resets = watch(monkeypatch, Pole, "reset", ordered=False)
    env = gymnasium_pole()
    for i, weights in enumerate(np.random.default_rng(1).normal(size=(20, 2, 9))):
        resets.clear()
        state = with_weights(first, weights)._replace(key=jax.random.key(i))
        learned = jax.device_get(evaluate(state))
        jax.effects_barrier()
        returns = [play_greedily(env, reset.out[0], run, learned) for reset in resets]
        close(np.sort(learned["greedy_return"]), np.sort(returns), rtol=1e-5)


class Forgetful(Noise):
    """Episodes never end: the time limit is forgotten."""

    def is_truncated(self, state, params):
        return jnp.array(False)


def test_returns_are_nan_where_no_episode_ends():
    for script in map(load, TRIO):
        run = noise_run(script, "--eval-episodes 2 --total-timesteps 200")
        run.env = LogWrapper(Forgetful())
        state, line = jit(script.train_interval, run)(jit(script.init_state, run)())
        assert np.isnan(line["returns"])
        assert np.isnan(jit(script.evaluate, run)(state)["greedy_return"]).all()


def test_a_scale_of_another_length_than_the_observation_is_refused(monkeypatch):
    """One number for four would broadcast, and train on wrong features."""
    for script in map(load, TRIO):
        monkeypatch.setitem(script.OBS_SCALE, "CartPole-v1", [2.4])
        run = one_run(script, "--num-centers 3")
        with pytest.raises(TypeError):
            script.train_interval(run, script.init_state(run))
