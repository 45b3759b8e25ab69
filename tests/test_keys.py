"""No random key is used twice, as jax's own checker sees it (it sees more since jax 0.11)."""

import jax
import pytest
from conftest import GRID, LEARNERS, REINFORCE, TRIO, load, one_run

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
