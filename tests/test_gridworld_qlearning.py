"""gridworld_qlearning.py against value iteration in NumPy and moves worked out by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gridworld_qlearning as grid

RIGHT, DOWN, LEFT, UP = range(4)


def value_iteration(rows, columns, gamma):
    """Exact Q (H, W, A), one cell at a time; the goal (0, 0) is terminal."""
    q_table = np.zeros((rows, columns, 4))
    for _ in range(rows * columns):
        new = np.zeros_like(q_table)
        for row, column in np.ndindex(rows, columns):
            for action, (down, right) in enumerate([(0, 1), (1, 0), (0, -1), (-1, 0)]):
                to = min(max(row + down, 0), rows - 1), min(max(column + right, 0), columns - 1)
                new[row, column, action] = 1.0 if to == (0, 0) else gamma * q_table[to].max()
        new[0, 0] = 0.0
        q_table = new
    return q_table


def train(args, num_devices, seed):
    """The state of runs with these seeds after their first chunk."""
    num_devices = min(num_devices, jax.device_count())
    learning_rate = np.full(len(seed), args.learning_rate[0])
    init = grid.over_runs(partial(grid.init_state, args), num_devices)
    chunk = grid.over_runs(partial(grid.train_chunk, args), num_devices)
    return chunk(init(np.array(seed), learning_rate))[0]


@pytest.mark.parametrize(
    ("cell", "action", "target", "to"),
    [
        (4, LEFT, 0.5 * 3.0, 3),  # an ordinary step
        (5, RIGHT, 0.5 * 2.0, 5),  # into the wall
        (1, LEFT, 1.0, 5),  # to the goal, whose own values and the start's count for nothing
    ],
)
def test_one_update_by_hand(cell, action, target, to):
    """Cells of a 2 x 3 grid are 0 1 2 / 3 4 5; the goal is 0."""
    args = grid.parse_args("--grid-size 2 3 --gamma 0.5".split())
    q_table = np.zeros((6, 4), np.float32)
    q_table[0] = 9.0
    q_table[3, DOWN] = 3.0
    q_table[cell, action] = 2.0
    q_table[5, RIGHT] = 2.0
    before = grid.TrainState(None, 0.1, jnp.array(q_table), jnp.array(cell))
    after, terminated = grid.train_step(args, before, jnp.uint32(2**32 - 1))
    q_table[cell, action] += 0.1 * (target - 2.0)
    np.testing.assert_allclose(after.q_table, q_table, rtol=1e-6)
    assert after.cell == to
    assert terminated == (cell == 1)


@pytest.mark.parametrize(
    ("values", "epsilon", "share"),
    [
        ([0, 0, 0, 0], 0.0, [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
        ([1, 2, 2, 0], 0.0, [0, 1 / 2, 1 / 2, 0]),
        ([5, 0, 5, 5], 0.0, [1 / 3, 0, 1 / 3, 1 / 3]),
        ([0, 0, 0, 7], 0.2, [0.05, 0.05, 0.05, 0.85]),
        ([0, 3, 0, 3], 1.0, [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
    ],
)
def test_shares_of_actions(values, epsilon, share):
    """Chi-square with at most 3 degrees of freedom stays below its 99.9 % point."""
    words = jax.random.bits(jax.random.key(0), 40_000)
    select = jax.vmap(grid.select_action, in_axes=(None, 0, None))
    counts = np.bincount(select(jnp.array(values), words, epsilon), minlength=4)
    expected = 40_000 * np.array(share)
    assert np.all(counts[expected == 0] == 0)
    assert np.sum((counts - expected) ** 2 / np.maximum(expected, 1)) < 16.3


def test_whole_table_equals_value_iteration():
    """With much exploration every action is tried often enough in every cell."""
    flags = "--grid-size 4 5 --epsilon 0.9 --learning-rate 0.5"
    args = grid.parse_args([*flags.split(), "--total-timesteps=4e5", "--log-interval=4e5"])
    state = train(args, 1, [0])
    learned = np.reshape(state.q_table, (4, 5, 4))
    np.testing.assert_allclose(learned, value_iteration(4, 5, 0.9), atol=1e-5)
    assert grid.evaluate(args, jax.tree.map(lambda leaf: leaf[0], state)) == 7


def test_default_run_is_exact_at_the_start_for_every_seed():
    args = grid.parse_args(["--log-interval=1e6"])
    state = train(args, 2, range(20))
    exact = value_iteration(8, 12, 0.9)[7, 11].max()
    np.testing.assert_allclose(exact, 0.9**17)
    np.testing.assert_allclose(state.q_table[:, -1].max(axis=1), exact, atol=1e-5)
    assert np.all(jax.vmap(partial(grid.evaluate, args))(state) == 18)


def test_a_run_is_the_same_alone_among_others_and_again():
    args = grid.parse_args(["--total-timesteps=20000"])
    many = np.asarray(train(args, 2, range(8)).q_table)
    assert len(np.unique(many, axis=0)) == 8
    np.testing.assert_array_equal(train(args, 1, [3]).q_table[0], many[3])
    np.testing.assert_array_equal(train(args, 2, range(8)).q_table, many)


def test_no_key_is_used_twice():
    args = grid.parse_args(["--total-timesteps=2000"])
    with jax.debug_key_reuse(True):
        state, _ = jax.jit(lambda seed: grid.train_chunk(args, grid.init_state(args, seed, 0.1)))(0)
        jax.jit(lambda state: grid.train_chunk(args, state))(state)


def test_a_policy_that_never_arrives_takes_all_steps():
    args = grid.parse_args([])
    state = grid.init_state(args, 0, 0.1)  # all values equal: always right, into the wall
    assert grid.evaluate(args, state) == 96
