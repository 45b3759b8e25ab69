"""replay_td.py: the ring against a deque, what is drawn from it, the warm-up, its memory."""

from collections import deque
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from td_tests import *  # noqa: F403  (what all three linear learners must pass)

SMALL = "--num-envs 4 --buffer-size 10 --learning-starts 1 --num-centers 3 --batch-size 2".split()
# What one train_step takes: the ends of the ring are drawn, and all actions are greedy.
ENDS = jnp.array([0, np.nextafter(np.float32(1), np.float32(0))])
DRAWS = ENDS, jax.random.split(jax.random.key(0), 4), jnp.ones(4), jnp.zeros(4, int)


def test_ring_equals_a_deque_and_all_of_it_is_drawn(td, monkeypatch):
    """A size that is no multiple of the environments: writes wrap around in the middle."""
    args, drawn = td.parse_args(SMALL), []
    state, model = td.init_state(args, 0, 0.01), deque(maxlen=10)

    def numbered_step(args, state, draws):
        number = 100.0 * state.written + jnp.arange(4)
        wide = jnp.repeat(number[:, None], 4, axis=1)
        rows = td.Transition(wide, number.astype(int) % 2, number, wide + 0.5, number % 3 == 0)
        return state, (rows, rows.terminated, number)

    def spy(args, weights, target_weights, centers, batch):
        drawn.append(batch.reward)
        return jnp.sum(weights), jnp.zeros(2)

    monkeypatch.setattr(td, "vector_step", numbered_step)
    monkeypatch.setattr(td, "td_loss", spy)
    for count in range(1, 12):
        rows, *_ = numbered_step(args, state, None)[1]
        state, _ = td.train_step(args, state, DRAWS)
        model.extend(zip(*map(np.asarray, rows), strict=True))
        assert state.written == 4 * count
        oldest = 4 * count % 10 if len(model) == 10 else 0
        slots = (oldest + np.arange(len(model))) % 10
        for field, ring in enumerate(state.buffer):
            np.testing.assert_array_equal(ring[slots], [row[field] for row in model])
        ends = state.buffer.reward[np.array([0, len(model) - 1])]
        np.testing.assert_array_equal(drawn[-1], ends)


def test_warm_up_leaves_weights_and_moments_at_zero_and_the_schedule_ends_with_the_run(td):
    """Of five vector steps the first two only collect; the rate falls in the other three."""
    args = td.parse_args([*SMALL, "--learning-starts", "11", "--total-timesteps", "20"])
    assert (args.total_updates, args.learning_updates) == (5, 3)
    state = td.init_state(args, 0, 0.1)
    for step in range(1, 6):
        before = state
        state, _ = td.train_step(args, state, DRAWS)
        moments, learned = state.opt_state[0], max(0, step - 2)
        assert state.written == 4 * step
        assert moments.count == state.opt_state[1].count == state.metrics[2] == learned
        for leaf in state.weights, moments.mu, moments.nu, state.target_weights:
            assert bool(jnp.any(leaf)) == (learned > 0)
        assert (state.metrics[3] > 0) == (learned > 0)
        assert not learned or jnp.any(state.weights != before.weights)
    after, _ = td.train_step(args, state, DRAWS)
    np.testing.assert_allclose(after.weights, state.weights, atol=1e-7)  # the rate is 0 now


def test_the_ring_is_updated_in_place(td):
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
