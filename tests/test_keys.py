"""What all learners have in common: random numbers, pictures, schedules, extreme flags.

No random key is used twice, as jax's own checker sees it (it sees more since jax 0.11). The checker
refuses keys[i] in a while_loop, and a scan over keys under vmap. Split a key in the loop there, and
carry it.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    CAR,
    DECAY,
    DQN,
    FRACTIONS,
    GRID,
    LEARNERS,
    NETWORKS,
    PARALLEL,
    POSITIVE,
    PPO,
    PQN,
    REINFORCE,
    REPLAY,
    assert_independent,
    jit,
    load,
    one_run,
    train,
    watch,
)
from environments import NOISE_PARAMS, Columns, Noise, noise_run, pole_run, run_in

TD = "--num-intervals 1 --num-envs 4 --total-timesteps 100 --num-centers 9"
SMALL = {
    PARALLEL: f"{TD} --epsilon 0.6",
    REPLAY: f"{TD} --epsilon 0.6 --buffer-size 5000",
    DECAY: f"{TD} --start-e 0.6 --end-e 0.6 --buffer-size 5000",
    GRID: "--num-intervals 1 --total-timesteps 100",
    REINFORCE: "--num-intervals 1 --num-envs 4 --num-iterations 2 --hidden-size 8",
}
NETWORK = "--num-intervals 1 --num-envs 4 --total-timesteps 100 --hidden-size 8"
EPOCHS = f"{NETWORK} --num-steps 5 --update-epochs 2 --num-minibatches 5"
SMALL |= {
    PPO: EPOCHS,
    PQN: f"{EPOCHS} --epsilon 1",
    DQN: f"{NETWORK} --start-e 1 --end-e 1 --buffer-size 5000",
}
# Of the linear learners, epsilon_decay_td.py does most: it also has a buffer and a schedule.
DISTINCT = [DECAY, GRID, REINFORCE, *NETWORKS]


def small_run(name, flags="", run_of=pole_run, **values):
    """A short run: on the pole of environments.py, or in the grid."""
    run_of = one_run if name == GRID else run_of
    return run_of(load(name), f"{SMALL[name]} {flags}", **values)


def one_draw(*arguments):
    """Stand in for an episode. The last argument is its key."""
    return jax.random.normal(arguments[-1])


@pytest.mark.parametrize("name", LEARNERS)
def test_no_key_is_used_twice_in_evaluation_and_in_the_training_after_it(name, monkeypatch):
    script, run = load(name), small_run(name)
    if hasattr(script, "greedy_return"):  # the checker cannot follow it under vmap: see below
        monkeypatch.setattr(script, "greedy_return", one_draw)

    @jax.jit
    def evaluate_and_train():
        state = script.init_state(run)
        results, (after, _) = script.evaluate(run, state), script.train_interval(run, state)
        return state.key, after.key, results

    with jax.debug_key_reuse(True):
        before, after, _ = evaluate_and_train()
    assert before != after  # the next interval has other keys


PLAYED = [(REPLAY, ["centers", "weights"]), (PPO, ["params"]), (PQN, ["bounds", "params"])]


@pytest.mark.parametrize(("name", "learned"), PLAYED)
def test_no_key_is_used_twice_in_a_greedy_episode(name, learned):
    script, run = load(name), small_run(name)
    state = script.init_state(run)
    with jax.debug_key_reuse(True):
        greedy_return = jit(script.greedy_return, run)
        greedy_return(*[getattr(state, part) for part in learned], jax.random.key(0))


@pytest.mark.parametrize("name", [DECAY, REINFORCE, *NETWORKS])
def test_evaluation_has_no_key_that_training_gets_from_the_same_state(name, monkeypatch):
    """Training splits the key of the state, and may split each part again."""
    script, run = load(name), small_run(name, "--eval-episodes 5")
    if name == REINFORCE:
        monkeypatch.setattr(script, "play", lambda *one, **_: Rewards(key_number(one[-1])))
    else:
        monkeypatch.setattr(script, "greedy_return", lambda *one: key_number(one[-1]))
    state = script.init_state(run)
    used = np.asarray(script.evaluate(run, state)["greedy_return"])
    parts = jax.random.split(state.key, 8)
    again = jax.vmap(partial(jax.random.split, num=5))(parts)
    of_training = [key_number(key) for key in [state.key, *parts, *again.ravel()]]
    assert len(set(used)) == 5
    assert not set(used) & set(map(float, of_training))


class Rewards(NamedTuple):
    """An episode of one step."""

    number: jax.Array

    @property
    def reward(self):
        return self.number[:, None]


def key_number(key):
    """Return a number that names a key. (Two keys have the same one time in 2**24.)"""
    return (jax.random.key_data(key)[0] >> 8).astype(float)


def test_no_key_is_used_twice_in_an_episode_of_the_car(monkeypatch):
    """Whose steps may be noisy. Those of MountainCar use no key."""
    monkeypatch.setattr(load(CAR), "ENV", Noise())
    with jax.debug_key_reuse(True):
        jit(load(CAR).play, one_run(load(CAR)))(jax.random.key(0))


@pytest.mark.parametrize("name", DISTINCT)
def test_a_run_is_the_same_alone_and_beside_others(name):
    script = load(name)

    def line(seed):
        run = small_run(name, run_of=noise_run, seed=seed)
        return script.train_interval(run, script.init_state(run))[1]

    beside, alone = jax.jit(jax.vmap(line))(jnp.arange(3)), jax.jit(line)(2)
    for many, one in zip(jax.tree.leaves(beside), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(many[2], one, rtol=1e-3, atol=1e-4)  # other roundings


@pytest.mark.parametrize("name", [PARALLEL, REPLAY, REINFORCE, *NETWORKS])
def test_a_picture_is_read_as_its_numbers_in_a_row(name):
    script, learned = load(name), []
    [part] = {"weights", "params"} & set(script.TrainState._fields)
    for env in Noise(), Columns():
        run = run_in(env, env.default_params, script, SMALL[name])
        state, _ = jit(script.train_step, run)(script.init_state(run), None)
        learned.append(jax.tree.leaves(getattr(state, part)))
    for one, other in zip(*learned, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert learned[0][-1].any()  # linear weights start at 0


def noisy_run(name, num_envs, seed):
    """A run that learns nothing, of 50 steps of each environment (in REINFORCE, ten episodes)."""
    few = "--num-iterations 10" if name == REINFORCE else f"--total-timesteps {50 * num_envs}"
    flags = f"{SMALL[name]} --num-envs {num_envs} --eval-episodes 4 {few}"
    return noise_run(load(name), flags, seed=seed, learning_rate=0.0)


@pytest.mark.parametrize("name", [PARALLEL, DECAY, REINFORCE, *NETWORKS])
def test_environments_never_get_the_same_random_numbers_twice(name, monkeypatch):
    """Neither in other steps, environments, updates or runs, nor in evaluation."""
    script = load(name)
    starts = watch(monkeypatch, Noise, "reset_env", "params", ordered=False)
    steps = watch(monkeypatch, Noise, "step_env", "params", ordered=False)

    @jax.jit
    def train_and_evaluate(seed):
        run = noisy_run(name, 5, seed)
        state, line = script.train_interval(run, script.init_state(run))
        return line["returns"], script.evaluate(run, state)["greedy_return"]

    returns = [np.hstack(train_and_evaluate(seed)) for seed in (1, 2)]
    jax.effects_barrier()
    seen = [record.out[0] for record in starts + steps]
    assert len(np.unique(seen, axis=0)) == len(seen) > 2 * (50 * 5 + 4 * 5)
    assert np.all(np.equal(returns, NOISE_PARAMS.max_steps_in_episode))  # 1 in each step


@pytest.mark.parametrize("name", [PARALLEL, DECAY, REINFORCE, *NETWORKS])
def test_actions_of_other_steps_updates_environments_and_runs_are_independent(name, monkeypatch):
    script, p = load(name), [1 / 3] * 3
    if name in (PARALLEL, DECAY):
        p = [0.6, 0.2, 0.2]  # all values are equal, so the first action is best
    if name == REINFORCE:
        records = watch(monkeypatch, script, "policy_loss", "params episodes advantage")
    else:
        records = watch(monkeypatch, script, "vector_step", "epsilon")

    @jax.jit
    def train_once(seed):
        run = noisy_run(name, 100, seed)
        return script.train_interval(run, script.init_state(run))[1]

    jax.block_until_ready([train_once(seed) for seed in (1, 2)])
    jax.effects_barrier()
    if name == REINFORCE:
        actions = np.concatenate([record.episodes.action.T for record in records])
    else:
        actions = np.stack([record.out[1][0].action for record in records])
    one, other = np.split(actions, 2)  # (50, 100) each
    assert_independent(one[1:], one[:-1], p)
    assert_independent(one[5:], one[:-5], p)  # in REINFORCE, in the next update
    assert_independent(one[:, 1:], one[:, :-1], p)
    assert_independent(one, other, p)


FIFTY = {  # updates, or blocks of the grid world
    DECAY: "--total-timesteps 200",
    REINFORCE: "--num-iterations 50",
    GRID: "--total-timesteps 49500",
    PPO: "--total-timesteps 1000",
    PQN: "--total-timesteps 1000",
    DQN: "--total-timesteps 200",
}


@pytest.mark.parametrize("name", DISTINCT)
def test_the_number_of_intervals_changes_nothing_that_is_learned(name):
    """Fifty updates are asked for. In 17 intervals, 51 are made, and the last one has no effect.

    So the schedule of the learning rate ends with the fiftieth.
    """
    script, learned = load(name), []
    for num_intervals, rounded in (1000, 50), (20, 17):
        run = small_run(name, f"{FIFTY[name]} --num-intervals {num_intervals}", noise_run)
        assert run.num_intervals == rounded
        state, _ = train(script, run, script.init_state(run))
        [part] = {"weights", "params", "q_table"} & set(state._fields)
        learned.append(getattr(state, part))
    # Programs of one and of three updates may round otherwise.
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), *learned)


def test_the_last_step_of_the_grid_world_learns_and_the_next_one_does_not():
    script = load(GRID)
    run = small_run(GRID, "--total-timesteps 50")
    draws = jnp.array(True), jnp.array(0.9)
    state = script.init_state(run)._replace(q_table=script.init_state(run).q_table + 1)
    for timesteps, learns in (49, True), (50, False):
        before = state._replace(timesteps=jnp.array(timesteps))
        after, _ = script.train_step(run, before, draws)
        assert np.array_equal(after.q_table, before.q_table) != learns


@pytest.mark.parametrize("name", [PARALLEL, *DISTINCT])  # the first has --epsilon
def test_the_ends_of_each_range_of_values_and_the_largest_seeds_stay_finite(name):
    """All combinations, as one program."""
    script, flags = load(name), ["--seed", str(2**31 - 2), "--num-seeds", "2"]
    for flag in FRACTIONS[name]:
        flags += [flag, "0", "1"]
    for flag in POSITIVE[name]:
        flags += [flag, "1e-6", "3"]
    runs, _ = script.make_runs(script.parse_args(flags))

    @jax.jit
    @jax.vmap
    def last_state_and_line(own):
        run = small_run(name, **own)
        state, line = script.train_interval(run, script.init_state(run))
        return state._replace(key=0), line

    for array in jax.tree.leaves(last_state_and_line(runs)):
        assert np.all(np.isfinite(array))
