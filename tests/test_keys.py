"""No random key is used twice, as jax's own checker sees it (it sees more since jax 0.11).

The checker refuses keys[i] in a while_loop. Split a key in the loop there, and carry it.
"""

import jax
import numpy as np
import pytest
from conftest import CAR, GRID, LEARNERS, REINFORCE, TRIO, jit, load, one_run

FEW_STEPS = "--num-intervals 1 --total-timesteps 100"
FLAGS = {REINFORCE: "--num-intervals 1 --num-iterations 2", GRID: "--num-intervals 1"}


@pytest.mark.parametrize("name", LEARNERS)
def test_training_uses_no_key_twice(name):
    script = load(name)
    run = one_run(script, FLAGS.get(name, FEW_STEPS))

    @jax.jit
    def train():
        return script.train_interval(run, script.init_state(run))

    with jax.debug_key_reuse(True):
        train()


@pytest.mark.parametrize("name", TRIO)
def test_a_greedy_episode_uses_no_key_twice(name):
    script = load(name)
    run = one_run(script, FEW_STEPS)

    @jax.jit
    def play():
        params = script.init_state(run).params
        return script.greedy_return(run, params, jax.random.key(0))

    with jax.debug_key_reuse(True):
        play()


def test_a_rollout_of_a_car_uses_no_key_twice():
    car = load(CAR)
    run = one_run(car, "--num-episodes 2 --num-intervals 1")

    @jax.jit
    def roll_out():
        return car.rollout(run, car.init_state(run))

    with jax.debug_key_reuse(True):
        roll_out()


def first_word(key):
    return jax.random.key_data(key)[:1]


@pytest.mark.parametrize("name", [*TRIO, REINFORCE])
def test_evaluation_uses_no_key_that_training_will_use(name, monkeypatch):
    """Training splits the key of the state. So evaluating between two updates changes nothing."""
    script = load(name)
    run = one_run(script, FLAGS.get(name, FEW_STEPS))
    state = jit(script.init_state, run)()
    if name == REINFORCE:  # its evaluation returns sums of rewards: here, of words of the keys
        monkeypatch.setattr(
            script,
            "play",
            lambda run, params, key, greedy: (script.Step(None, None, first_word(key), None), None),
        )
    else:
        monkeypatch.setattr(script, "greedy_return", lambda run, params, key: first_word(key)[0])
    used = script.evaluate(run, state)["greedy_return"]
    of_training = jax.vmap(first_word)(jax.random.split(state.key, len(used)))
    assert len(np.unique(used)) == len(used) and not np.isin(used, of_training).any()
