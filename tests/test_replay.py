"""The ring buffer of replay_td.py, epsilon_decay_td.py and dqn.py: what it keeps, what is drawn."""

import collections
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DECAY, DQN, RARE, REPLAY, jit, load, watch
from environments import Noise, noise_run
from scipy.stats import kstest

SMALL = {REPLAY: "--num-centers 3", DECAY: "--num-centers 3", DQN: "--hidden-size 2"}


def watch_batches(patch, script):
    return watch(patch, script, "td_loss", "batch targets")


@pytest.mark.parametrize("name", SMALL)
def test_batches_are_drawn_evenly_from_the_last_ten_transitions(name, monkeypatch):
    """Four transitions a step: after three steps, the oldest ones are overwritten."""
    script = load(name)
    flags = "--num-envs 4 --buffer-size 10 --batch-size 20000"
    updates = watch_batches(monkeypatch, script)
    run = noise_run(script, f"{flags} {SMALL[name]}", learning_rate=0.0)
    state, train_step = script.init_state(run), jit(script.train_step, run)
    began = []  # the observations in which the transitions so far began, which no two share
    for _ in range(7):
        began += [obs.tobytes() for obs in np.asarray(state.obs)]
        state, _ = train_step(state, None)
        jax.effects_barrier()
        times = collections.Counter(obs.tobytes() for obs in updates[-1].batch.obs)
        assert times.keys() == set(began[-10:])
        expected = 20000 / len(times)
        assert all(abs(number - expected) < 5 * expected**0.5 for number in times.values())


@pytest.mark.parametrize("name", SMALL)
def test_the_buffer_keeps_the_last_transitions_also_near_the_largest_number_of_steps(name):
    script = load(name)
    run = noise_run(script, f"--num-envs 4 --buffer-size 10 {SMALL[name]}")
    state, train_step = script.init_state(run), jit(script.train_step, run)
    state, began = state._replace(timesteps=jnp.array(2**31 - 22)), []
    for _ in range(5):
        began += [*np.asarray(state.obs)]
        state, _ = train_step(state, None)
    assert state.timesteps == 2**31 - 2
    np.testing.assert_array_equal(
        np.unique(state.buffer.obs, axis=0), np.unique(began[-10:], axis=0)
    )


@pytest.mark.parametrize("name", SMALL)
def test_the_buffer_keeps_observations_in_their_own_type(name, monkeypatch):
    """Pictures of bytes would take four times as much memory as floats."""
    reset_env = Noise.reset_env

    def reset_to_bytes(self, key, params):
        obs, state = reset_env(self, key, params)
        return (127 * obs).astype(jnp.int8), state

    monkeypatch.setattr(Noise, "reset_env", reset_to_bytes)
    run = noise_run(load(name), f"--num-envs 4 --buffer-size 10 {SMALL[name]}")
    buffer = load(name).init_state(run).buffer
    assert buffer.obs.dtype == buffer.next_obs.dtype == jnp.int8


@pytest.mark.parametrize("name", SMALL)
def test_each_update_of_each_run_draws_another_batch_from_all_places(name, monkeypatch):
    """Two updates of two runs, with batches of 5,000 from a large full buffer."""
    script, size = load(name), 200_000
    updates = watch_batches(monkeypatch, script)

    @jax.jit
    def learn_twice(seed):
        flags = f"--buffer-size {size} --batch-size 5000 {SMALL[name]}"
        run = noise_run(script, flags, seed=seed)
        state = script.init_state(run)
        numbered = state.buffer._replace(obs=jnp.tile(jnp.arange(float(size))[:, None], 4))
        state = state._replace(timesteps=size, buffer=numbered)
        return jax.lax.scan(partial(script.train_step, run), state, length=2)[1]

    jax.block_until_ready([learn_twice(seed) for seed in (1, 2)])
    jax.effects_barrier()
    places = [update.batch.obs[:, 0] / size for update in updates]
    for drawn in places:
        assert kstest(drawn, "uniform").pvalue > RARE
    assert np.all(np.abs(np.corrcoef(places) - np.eye(4)) < 5 / np.sqrt(5000))
