"""What all learners have in common: random numbers, time limits, schedules, extreme flags.

No random key is used twice, as jax's own checker sees it (it sees more since jax 0.11). The checker
refuses keys[i] in a while_loop. Split a key in the loop there, and carry it.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    CAR,
    DECAY,
    GRID,
    LEARNERS,
    PARALLEL,
    POLICY_LOSS,
    REINFORCE,
    REPLAY,
    TRIO,
    VECTOR_STEP,
    Noise,
    assert_independent,
    jit,
    load,
    noise_run,
    one_run,
    pole_run,
    train,
    watch,
)

TD = "--num-intervals 1 --num-envs 4 --total-timesteps 100 --num-centers 9"
SMALL = {
    PARALLEL: TD,
    REPLAY: f"{TD} --buffer-size 600",
    DECAY: f"{TD} --buffer-size 600",
    GRID: "--num-intervals 1 --total-timesteps 100",
    REINFORCE: "--num-intervals 1 --num-envs 4 --num-iterations 2 --hidden-size 8",
}


def small_run(name, flags="", **values):
    """A short run: on the pole of conftest.py, or in the grid."""
    run_of = one_run if name == GRID else pole_run
    return run_of(load(name), f"{SMALL[name]} {flags}", **values)


def one_draw(run, centers, weights, key):
    """Stand in for an episode."""
    return jax.random.normal(key)


@pytest.mark.parametrize("name", LEARNERS)
def test_no_key_is_used_twice_in_evaluation_and_in_the_training_after_it(name, monkeypatch):
    script, run = load(name), small_run(name)
    if name in TRIO:  # the checker cannot follow their episodes under vmap: the next test has one
        monkeypatch.setattr(script, "greedy_return", one_draw)

    @jax.jit
    def evaluate_and_train():
        state = script.init_state(run)
        results, (after, _) = script.evaluate(run, state), script.train_interval(run, state)
        return state.key, after.key, results

    with jax.debug_key_reuse(True):
        before, after, _ = evaluate_and_train()
    assert before != after  # the next interval has other keys


def test_no_key_is_used_twice_in_an_episode_that_is_only_played():
    run = small_run(REPLAY)
    state = jit(load(REPLAY).init_state, run)()
    with jax.debug_key_reuse(True):
        greedy_return = jit(load(REPLAY).greedy_return, run)
        greedy_return(state.centers, state.weights, jax.random.key(0))
        jit(load(CAR).play, one_run(load(CAR)))(jax.random.key(0))


@pytest.mark.parametrize("name", LEARNERS)
def test_a_run_is_the_same_alone_and_beside_others(name):
    script = load(name)

    def line(seed):
        run = small_run(name, seed=seed)
        return script.train_interval(run, script.init_state(run))[1]

    beside, alone = jax.jit(jax.vmap(line))(jnp.arange(3)), jax.jit(line)(2)
    for many, one in zip(jax.tree.leaves(beside), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(many[2], one, rtol=1e-3, atol=1e-4)  # other roundings


# Ten environments, sixty steps of each: in REINFORCE, twelve updates from episodes of five.
NOISY = "--num-envs 10 --eval-episodes 4"
EPSILON = {
    PARALLEL: {"epsilon": 0.6},
    REPLAY: {"epsilon": 0.6},
    DECAY: {"start_e": 0.6, "end_e": 0.6},
    REINFORCE: {},
}


@pytest.fixture(scope="module", params=[*TRIO, REINFORCE])
def noise(request):
    """What two runs do that learn nothing, where each observation is a random number."""
    name, patch = request.param, pytest.MonkeyPatch()
    script = load(name)
    few = "--num-iterations 12" if name == REINFORCE else "--total-timesteps 600"
    starts = watch(patch, Noise, "reset_env", "params", ordered=False)
    steps = watch(patch, Noise, "step_env", "params", ordered=False)
    if name == REINFORCE:
        updates = watch(patch, script, POLICY_LOSS, "params episodes advantage")
    else:
        vector_steps = watch(patch, script, VECTOR_STEP, "epsilon")

    @jax.jit
    def train_and_evaluate(seed):
        own = {"seed": seed, "learning_rate": 0.0, **EPSILON[name]}
        run = noise_run(script, f"{SMALL[name]} {NOISY} {few}", **own)
        state, line = script.train_interval(run, script.init_state(run))
        return line["returns"], script.evaluate(run, state)["greedy_return"]

    returns = [np.hstack(train_and_evaluate(seed)) for seed in (1, 2)]
    jax.effects_barrier()
    patch.undo()
    if name == REINFORCE:
        actions = np.concatenate([update.episodes.action.T for update in updates])
        probabilities = [1 / 3] * 3
    else:
        actions = np.stack([step.out[1][0].action for step in vector_steps])
        probabilities = [0.6, 0.2, 0.2]  # all values are equal, so the first action is best
    return SimpleNamespace(
        returns=returns,
        observations=[record.out[0] for record in starts + steps],
        runs=np.split(actions, 2),  # (60, 10) each
        probabilities=probabilities,
    )


def test_environments_never_get_the_same_random_numbers_twice(noise):
    """Neither in other steps, environments, updates or runs, nor in evaluation."""
    seen = noise.observations
    assert len(np.unique(seen, axis=0)) == len(seen) > 2 * (60 * 10 + 4 * 5)


def test_actions_of_other_steps_updates_environments_and_runs_are_independent(noise):
    one, other = noise.runs
    assert_independent(one[1:], one[:-1], noise.probabilities)
    assert_independent(one[5:], one[:-5], noise.probabilities)  # REINFORCE: in the next update
    assert_independent(one[:, 1:], one[:, :-1], noise.probabilities)
    assert_independent(one, other, noise.probabilities)


def test_episodes_that_only_the_time_limit_ends_pay_for_each_of_its_steps(noise):
    """In training and in evaluation."""
    assert np.all(np.equal(noise.returns, Noise.default_params.max_steps_in_episode))


@pytest.mark.parametrize("name", [*TRIO, REINFORCE])
def test_the_number_of_intervals_changes_nothing_that_is_learned(name):
    """Fifty updates are asked for. 7 times 8 or 17 times 3 are made, the last ones without effect.

    So the schedule of the learning rate ends with the fiftieth.
    """
    script, learned = load(name), []
    few = "--num-iterations 50" if name == REINFORCE else "--total-timesteps 200"
    for num_intervals, length in (7, 8), (20, 3):
        run = small_run(name, f"{few} --num-intervals {num_intervals}")
        assert run.interval_updates == length
        state, _ = train(script, run, jit(script.init_state, run)())
        learned.append(state.params if name == REINFORCE else state.weights)
    jax.tree.map(np.testing.assert_array_equal, *learned)


EXTREMES = {
    PARALLEL: "--learning-rate 1e-6 3 --epsilon 0 1",
    REPLAY: "--learning-rate 1e-6 3 --epsilon 0 1 --tau 0 1",
    DECAY: "--learning-rate 1e-6 3 --start-e 0 1 --end-e 0 1 --epsilon-decay 0 1 --tau 0 1",
    GRID: "--learning-rate 0 1 --epsilon 0 1",
    REINFORCE: "--learning-rate 1e-6 3",
}


@pytest.mark.parametrize("name", LEARNERS)
def test_the_ends_of_each_range_of_values_and_the_largest_seeds_stay_finite(name):
    """All combinations, as one program."""
    script = load(name)
    flags = f"{EXTREMES[name]} --gamma 0 1 --seed {2**31 - 2} --num-seeds 2"
    runs, _ = script.make_runs(script.parse_args(flags.split()))

    @jax.jit
    @jax.vmap
    def last_state_and_line(own):
        run = small_run(name, **own)
        state, line = script.train_interval(run, script.init_state(run))
        return state._replace(key=0), line

    for array in jax.tree.leaves(last_state_and_line(runs)):
        assert np.all(np.isfinite(array))


@pytest.mark.parametrize("name", LEARNERS)
def test_the_number_of_steps_fits_into_32_bits_however_it_is_rounded_up(name):
    script, most = load(name), f"--total-timesteps {2**30}"
    if name == REINFORCE:
        most = f"--num-iterations {2**30 // (16 * 500)}"  # 16 episodes of at most 500 steps
    for num_intervals in (1, 3, 7, 99_999, 2**29, 2**30):
        run = one_run(script, f"{most} --num-intervals {num_intervals}")
        if name == GRID:
            steps = run.num_intervals * run.interval_blocks * script.BLOCK
        else:
            limit = 500 if name == REINFORCE else 1
            steps = run.num_intervals * run.interval_updates * run.num_envs * limit
        assert 2**30 - 16 * 500 < steps < 2**31
