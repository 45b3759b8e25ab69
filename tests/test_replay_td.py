"""replay_td.py: the ring against a deque, what is drawn from it, the warm-up, its memory."""

from collections import deque
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replay_td as td

SMALL = ["--num-envs", "4", "--buffer-size", "10", "--learning-starts", "1", "--num-centers", "3"]


def draws_of(args, seed=0, batch_uniform=None):
    """What one train_step takes: greedy actions."""
    keys = jax.random.split(jax.random.key(seed), args.num_envs)
    uniform = jax.random.uniform(jax.random.key(seed), (args.batch_size,))
    if batch_uniform is not None:
        uniform = jnp.full(args.batch_size, batch_uniform)
    return uniform, keys, jnp.ones(args.num_envs), jnp.zeros(args.num_envs, int)


def test_ring_equals_a_deque(monkeypatch):
    """A size that is no multiple of the environments: writes wrap around in the middle."""
    args = td.parse_args(SMALL)
    state, model = td.init_state(args, 0, 0.01), deque(maxlen=10)

    def numbered_step(args, state, draws):
        number = 100.0 * state.written + jnp.arange(4)
        wide = jnp.repeat(number[:, None], 4, axis=1)
        rows = td.Transition(wide, number.astype(int) % 2, number, wide + 0.5, number % 3 == 0)
        return state, (rows, rows.terminated, number)

    monkeypatch.setattr(td, "vector_step", numbered_step)
    step = jax.jit(partial(td.train_step, args))
    for count in range(1, 30):
        rows, *_ = numbered_step(args, state, None)[1]
        state, _ = step(state, draws_of(args))
        model.extend(zip(*map(np.asarray, rows), strict=True))
        assert state.written == 4 * count
        oldest = 4 * count % 10 if len(model) == 10 else 0
        for field, ring in enumerate(state.buffer):
            slots = (oldest + np.arange(len(model))) % 10
            np.testing.assert_array_equal(ring[slots], [row[field] for row in model])


@pytest.mark.parametrize("written", [4, 40])
def test_only_what_was_written_is_drawn_and_all_of_it(written, monkeypatch):
    """The greatest and the smallest uniform number; then many: a uniform distribution."""
    args = td.parse_args([*SMALL, "--batch-size", "5000"])
    seen = []

    def spy(args, weights, target_weights, centers, batch):
        seen.append(batch.reward)
        return jnp.sum(weights), (0.0, 0.0)

    monkeypatch.setattr(td, "td_loss", spy)
    state = td.init_state(args, 0, 0.01)
    ring = state.buffer._replace(reward=2 + jnp.arange(10.0))
    state = state._replace(buffer=ring, written=jnp.array(written - 4))
    filled, values = min(written, 10), 2 + np.arange(10)
    values[np.arange(written - 4, written) % 10] = 1  # a step of CartPole pays 1
    for uniform, slot in [(0.0, 0), (np.nextafter(np.float32(1), np.float32(0)), filled - 1)]:
        td.train_step(args, state, draws_of(args, batch_uniform=uniform))
        np.testing.assert_array_equal(seen[-1], values[slot])
    td.train_step(args, state, draws_of(args))
    for value in np.unique(values[:filled]):
        expected = np.mean(values[:filled] == value)
        assert abs(np.mean(seen[-1] == value) - expected) < 5 * np.sqrt(expected / 5000)


def test_warm_up_leaves_weights_and_moments_at_zero_and_the_schedule_ends_with_the_run():
    """Of five vector steps the first two only collect; the rate falls in the other three."""
    flags = ["--learning-starts", "11", "--total-timesteps", "20"]
    args = td.parse_args([*SMALL, *flags])
    assert (args.total_updates, args.learning_updates) == (5, 3)
    state = td.init_state(args, 0, 0.1)
    for step in range(1, 6):
        before = state
        state, _ = td.train_step(args, state, draws_of(args, step))
        moments, learned = state.opt_state[0], max(0, step - 2)
        assert state.written == 4 * step
        assert moments.count == state.opt_state[1].count == state.metrics[2] == learned
        for leaf in state.weights, moments.mu, moments.nu, state.target_weights:
            assert bool(jnp.any(leaf)) == (learned > 0)
        assert (state.metrics[3] > 0) == (learned > 0)
        if learned:
            assert jnp.any(state.weights != before.weights)
    after, _ = td.train_step(args, state, draws_of(args, 6))
    np.testing.assert_allclose(after.weights, state.weights, atol=1e-7)  # the rate is 0 now


def test_the_ring_is_updated_in_place():
    """Temporary memory of a compiled chunk does not grow with the ring, which is aliased."""
    temporary = []
    for size in 20_000, 200_000:
        args = td.parse_args(["--buffer-size", str(size)])
        state = td.over_runs(partial(td.init_state, args), 1)(np.zeros(1, int), np.ones(1))
        chunk = td.over_runs(partial(td.train_chunk, args, 20), 1, donate_argnums=0)
        memory = chunk.lower(state).compile().memory_analysis()
        temporary.append(memory.temp_size_in_bytes)
        assert memory.alias_size_in_bytes > 41 * size  # 10 numbers and a bool a transition
    assert temporary[1] - temporary[0] < 100_000, temporary
