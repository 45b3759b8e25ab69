"""The three linear learners: what they do with the transitions that they saw, recomputed in NumPy.

The fixture `learning` trains a script for two intervals on a pole with a time limit of 12 steps,
and records every vector step and every update: what `vector_step` and `td_loss` got and returned.
Each test then checks one fact of that record.
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
from conftest import DECAY, PARALLEL, TRIO, jit, load, one_run, watch
from gymnax.wrappers import LogWrapper

close, equal = np.testing.assert_allclose, np.testing.assert_array_equal
LIMIT = 12  # steps: some episodes reach it, others end before
GRAVITY = 30.0  # not the default
SCALE = [2.4, 3.0, 0.2, 3.0]  # of CartPole-v1


class Pole(gymnax.environments.CartPole):
    """A pole with rewards of 3.25 or 4.75, by action; what is observed after its fall is nan.

    A reward tells its action, and nan shows wherever a terminal state is not cut off. What is
    observed at the start is nan, too, if the script does not pass the run's own parameters.
    """

    def reset_env(self, key, params):
        obs, state = super().reset_env(key, params)
        return jnp.where(params.gravity == GRAVITY, obs, jnp.nan), state

    def step_env(self, key, state, action, params):
        obs, state, _, terminated, info = super().step_env(key, state, action, params)
        return jnp.where(terminated, jnp.nan, obs), state, 3.25 + 1.5 * action, terminated, info


def run_of(script, flags, **own):
    """Flags of a run with four environments in which poles fall."""
    params = Pole().default_params.replace(max_steps_in_episode=LIMIT, gravity=GRAVITY)
    return one_run(
        script, f"--num-envs 4 {flags}", env=LogWrapper(Pole()), env_params=params, **own
    )


def gymnasium_pole():
    """The same pole by Gymnasium, but for rewards and nan."""
    env = gymnasium.make("CartPole-v1").unwrapped
    env.gravity = GRAVITY
    env.reset()
    return env


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
    on_line = request.param == PARALLEL
    # Numbers that must be rounded up: batches of 10 to three steps of four environments, and steps
    # to two equal intervals. The buffer holds all 160 transitions.
    flags = "--total-timesteps 130" if on_line else "--total-timesteps 153 --buffer-size 200"
    flags += " --batch-size 10 --num-centers 9 --num-intervals 2"
    own = {"learning_rate": 0.3, "gamma": 0.8, "sigma": 0.7, "tau": 0.4, "epsilon": 0.5}
    run = run_of(script, flags, **own)
    steps, updates = watch(patch, script, "vector_step"), watch(patch, script, "td_loss")
    first = jit(script.init_state, run)()
    # Not weights of 0, with which all targets would be alike, and a gradient through them be 0.
    first = with_weights(first, np.random.default_rng(0).normal(size=(2, 9)))
    train, state, halves = jit(script.train_interval, run), first, []
    for _ in range(2):
        state, metrics = train(state)
        jax.effects_barrier()
        seen = [transitions for _, (transitions, _) in (step.out for step in steps)]
        before = [step.state.obs for step in steps]
        half = {"metrics": metrics, "transitions": seen, "obs": before, "updates": updates[:]}
        halves.append(SimpleNamespace(**half))
        steps.clear()
        updates.clear()
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
        transitions=halves[0].transitions + halves[1].transitions,  # of each vector step
        obs=halves[0].obs + halves[1].obs,  # before each vector step
        updates=updates,
        after=after,
    )


def test_steps_are_rounded_up_to_two_equal_intervals(learning):
    """parallel_td.py: 130 steps are 11 updates of 12, so 12. The others: 153 are 39 of 4, so 40."""
    steps, updates = (144, 12) if learning.on_line else (160, 40)
    assert len(learning.transitions) * 4 == steps
    assert len(learning.updates) == updates
    for half in learning.halves:
        assert half.metrics["timesteps"] == steps / 2 and len(half.updates) == updates / 2


def test_transitions_begin_where_the_environments_are_and_have_the_reward_of_the_action(learning):
    for obs, transitions in zip(learning.obs, learning.transitions, strict=True):
        equal(transitions.obs, obs)
        close(transitions.reward, 3.25 + 1.5 * transitions.action)


def test_transitions_end_where_those_of_gymnasium_end(learning):
    """Also at the time limit, where the next episode has begun already."""
    env = gymnasium_pole()
    for transitions in learning.transitions:
        for obs, action, _, next_obs, terminated in zip(*transitions, strict=True):
            env.state, env.steps_beyond_terminated = np.float64(obs), None
            expected, _, falls, *_ = env.step(int(action))
            assert terminated == falls
            close(next_obs, np.nan if falls else expected, rtol=1e-4, atol=1e-5)


def test_an_episode_goes_on_from_its_next_observation_until_it_ends(learning):
    length = np.zeros(4, int)
    for transitions, next_obs in zip(learning.transitions[:-1], learning.obs[1:], strict=True):
        length += 1
        ended = transitions.terminated | (length == LIMIT)
        equal(next_obs[~ended], transitions.next_obs[~ended])
        assert np.all(np.abs(next_obs[ended]) <= 0.05)  # where Gymnasium's poles start
        length[ended] = 0


def test_no_two_episodes_of_training_start_alike(learning):
    starts = [obs.tobytes() for array in learning.obs for obs in array if np.all(abs(obs) <= 0.05)]
    first = {obs.tobytes() for obs in learning.obs[0]}
    assert len(first) == 4  # environments
    assert len(starts) == len(set(starts)) > 12  # each environment has started three times and more


STEPS_OF_AN_UPDATE = 3  # at least 10 transitions, from four environments


@pytest.mark.parametrize("learning", [PARALLEL], indirect=True)
def test_the_on_line_learner_learns_from_each_transition_once(learning):
    for i, update in enumerate(learning.updates):
        first = STEPS_OF_AN_UPDATE * i
        seen = learning.transitions[first : first + STEPS_OF_AN_UPDATE]
        jax.tree.map(equal, update.batch, jax.tree.map(lambda *parts: np.concatenate(parts), *seen))


def test_targets_bootstrap_from_what_follows_unless_it_is_terminal(learning):
    """parallel_td.py bootstraps from its weights, the others from their running average."""
    first = learning.first.params if learning.on_line else learning.first.target_params
    weights = np.float64(first["weights"])
    for update, after in zip(learning.updates, learning.after, strict=True):
        next_q = features(learning.run, update.params, update.batch.next_obs) @ weights.T
        value = np.where(update.batch.terminated, 0, next_q.max(axis=1))
        close(update.targets, update.batch.reward + 0.8 * value, rtol=1e-4)
        rate = 1 if learning.on_line else 0.4  # tau
        weights = weights + rate * (after["weights"] - weights)


def errors_of(learning, update):
    """TD errors (B,) of an update, and the values (B,) of the actions that were taken."""
    q = features(learning.run, update.params, update.batch.obs) @ update.params["weights"].T
    values = q[np.arange(len(q)), update.batch.action]
    return update.targets - values, values


def test_the_loss_is_half_the_mean_squared_error(learning):
    for update in learning.updates:
        loss, _ = update.out
        errors, _ = errors_of(learning, update)
        close(loss, np.mean(errors**2) / 2, rtol=1e-4)


def test_each_update_is_a_step_of_adam_whose_size_falls_to_0(learning):
    """The gradient is that of the values alone: the targets have none."""
    total = len(learning.updates)
    adam = optax.adam(lambda count: 0.3 * (1 - count / total))
    update_of = jax.jit(adam.update)
    moments = adam.init(np.zeros((2, 9)))
    for update, after in zip(learning.updates, learning.after, strict=True):
        phi = features(learning.run, update.params, update.batch.obs)  # (B, F)
        errors, _ = errors_of(learning, update)
        gradient = np.zeros((2, 9))
        for b in range(len(errors)):
            gradient[update.batch.action[b]] -= errors[b] * phi[b] / len(errors)
        step, moments = update_of(gradient, moments)
        close(after["weights"], update.params["weights"] + step, atol=1e-4)


def test_centers_stay_where_they_are(learning):
    equal(learning.last.params["centers"], learning.first.params["centers"])


def test_a_progress_line_shows_mean_errors_and_values(learning):
    for half in learning.halves:
        errors, values = zip(*[errors_of(learning, update) for update in half.updates], strict=True)
        close(half.metrics["td_error"], np.mean(np.abs(errors)), rtol=1e-4)
        close(half.metrics["q_value"], np.mean(values), rtol=1e-4)


def test_a_progress_line_shows_the_mean_return_of_the_episodes_that_ended(learning):
    total, length = np.zeros(4), np.zeros(4, int)
    for half in learning.halves:
        returns = []
        for transitions in half.transitions:
            total, length = total + transitions.reward, length + 1
            ended = transitions.terminated | (length == LIMIT)
            returns += total[ended].tolist()
            total[ended], length[ended] = 0, 0
        close(half.metrics["returns"], np.mean(returns), rtol=1e-5)


@pytest.mark.parametrize("name", TRIO)
def test_a_run_starts_with_weights_of_0(name):
    script = load(name)
    assert not jit(script.init_state, run_of(script, ""))().params["weights"].any()


@pytest.mark.parametrize("name", TRIO)
def test_centers_are_spread_evenly_between_minus_1_and_1_and_depend_on_the_seed(name):
    script = load(name)
    states = [jit(script.init_state, run_of(script, "", seed=seed))() for seed in (1, 2)]
    centers, others = (np.asarray(state.params["centers"]) for state in states)  # (4, 500)
    assert -1 <= centers.min() < -0.99 and 0.99 < centers.max() <= 1
    assert np.all(np.abs(centers.mean(axis=1)) < 5 * np.sqrt(1 / 3 / 500))
    assert not np.any(centers == others)


@pytest.mark.parametrize("name", TRIO[1:])
def test_each_seed_and_each_update_draws_another_batch(name, monkeypatch):
    """The buffer holds one vector step, so the environments in a batch tell what was drawn."""
    script, drawn = load(name), []
    updates = watch(monkeypatch, script, "td_loss")
    for seed in (1, 2):
        run = run_of(script, "--buffer-size 4 --batch-size 20 --num-centers 3", seed=seed)
        state, train_step = jit(script.init_state, run)(), jit(script.train_step, run)
        for _ in range(3):
            began = [obs.tobytes() for obs in np.asarray(state.obs)]
            state, _ = train_step(state, None)
            jax.effects_barrier()
            drawn.append([began.index(obs.tobytes()) for obs in updates[-1].batch.obs])
    assert len(np.unique(drawn, axis=0)) == 6


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
    stored = {}
    for step in steps:
        _, (transitions, _) = step.out
        for row in zip(*transitions, strict=True):
            stored[row[0].tobytes()] = row  # by the observation in which it began
    for row in zip(*updates[-1].batch, strict=True):
        for drawn, kept in zip(row, stored[row[0].tobytes()], strict=True):
            equal(drawn, kept)


@pytest.mark.parametrize("name", TRIO)
def test_actions_are_random_with_probability_epsilon(name, monkeypatch):
    """One of three actions is best everywhere. The others are taken in a third of random steps."""
    script = load(name)
    flags = "--env-id MountainCar-v0 --num-envs 6000 --batch-size 1000 --num-centers 3"
    own = {"epsilon": 0.6, "start_e": 0.8, "end_e": 0.15, "epsilon_decay": 0.5}
    run = one_run(script, flags, learning_rate=0.0, **own)
    steps = watch(monkeypatch, script, "vector_step")
    state, train_step = jit(script.init_state, run)(), jit(script.train_step, run)
    state = with_weights(state, [[0.0] * 3, [1.0] * 3, [0.0] * 3])  # action 1 is best
    decays = [0.8, 0.4, 0.2, 0.15]  # halved in each vector step, but at least 0.15
    for epsilon in decays if name == DECAY else [0.6] * 4:
        state, metrics = train_step(state, None)
        jax.effects_barrier()
        _, (transitions, _) = steps[-1].out
        for worse in (0, 2):
            taken, expected = np.sum(transitions.action == worse), 2000 * epsilon
            assert abs(taken - expected) < 5 * np.sqrt(expected)
        close(metrics.get("epsilon", epsilon), epsilon, rtol=1e-6)


@pytest.mark.parametrize("name", TRIO)
def test_the_parameters_returned_play_in_gymnasium_as_they_were_evaluated(name, monkeypatch):
    """Not other ones, as the averaged weights of the targets."""
    script = load(name)
    run = run_of(script, "--num-centers 9 --eval-episodes 3")
    first, evaluate = jit(script.init_state, run)(), jit(script.evaluate, run)
    starts = watch(monkeypatch, Pole, "reset", ordered=False)
    env, lengths = gymnasium_pole(), set()
    for weights in np.random.default_rng(1).normal(size=(20, 2, 9)):
        starts.clear()
        learned = jax.device_get(evaluate(with_weights(first, weights)))
        jax.effects_barrier()
        episodes = [play_greedily(env, start.out[0], run, learned["params"]) for start in starts]
        returns, of_each = zip(*episodes, strict=True)
        equal(np.sort(learned["greedy_return"]), np.sort(returns))
        lengths.update(of_each)
    equal(learned["obs_scale"], np.float32(SCALE))
    assert LIMIT in lengths and min(lengths) < LIMIT  # both kinds of end were there


def play_greedily(env, obs, run, params):
    """Play in Gymnasium from an observation on. Return the return and the length."""
    env.state, env.steps_beyond_terminated = np.float64(obs), None
    total, length, terminated = 0.0, 0, False
    while not terminated and length < LIMIT:
        action = np.argmax(params["weights"] @ features(run, params, env.state))
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
