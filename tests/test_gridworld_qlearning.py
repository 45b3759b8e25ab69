"""gridworld_qlearning.py against value iteration in NumPy and moves worked out by hand."""

import itertools
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
    """The state of runs with these seeds after one log interval."""
    num_devices = min(num_devices, jax.device_count())
    learning_rate = np.full(len(seed), args.learning_rate[0])
    init = grid.over_runs(partial(grid.init_state, args), num_devices)
    chunk = grid.over_runs(partial(grid.train_chunk, args, args.log_blocks), num_devices)
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
    before = grid.TrainState(None, 0.1, jnp.array(q_table), jnp.array(cell), jnp.array(0))
    after, _ = grid.train_step(args, before, jnp.uint32(2**32 - 1))
    q_table[cell, action] += 0.1 * (target - 2.0)
    np.testing.assert_allclose(after.q_table, q_table, rtol=1e-6)
    assert after.cell == to
    assert after.episodes == (cell == 1)


@pytest.mark.parametrize(
    ("values", "epsilon", "fraction"),
    [
        ([0, 0, 0, 0], 0.0, [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
        ([1, 2, 2, 0], 0.0, [0, 1 / 2, 1 / 2, 0]),
        ([5, 0, 5, 5], 0.0, [1 / 3, 0, 1 / 3, 1 / 3]),
        ([0, 0, 0, 7], 0.2, [0.05, 0.05, 0.05, 0.85]),
        ([0, 3, 0, 3], 1.0, [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
    ],
)
def test_fractions_of_actions(values, epsilon, fraction):
    """Chi-square with at most 3 degrees of freedom stays below its 99.9 % point."""
    bits = jax.random.bits(jax.random.key(0), 40_000)
    select = jax.vmap(grid.select_action, in_axes=(None, 0, None))
    counts = np.bincount(select(jnp.array(values), bits, epsilon), minlength=4)
    expected = 40_000 * np.array(fraction)
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
    args = grid.parse_args(["--log-interval=20000"])
    many = np.asarray(train(args, 2, range(8)).q_table)
    assert len(np.unique(many, axis=0)) == 8
    np.testing.assert_array_equal(train(args, 1, [3]).q_table[0], many[3])
    np.testing.assert_array_equal(train(args, 2, range(8)).q_table, many)


def test_no_key_is_used_twice():
    args = grid.parse_args(["--log-interval=2000"])
    with jax.debug_key_reuse(True):
        state, _ = jax.jit(
            lambda seed: grid.train_chunk(args, 2, grid.init_state(args, seed, 0.1))
        )(0)
        jax.jit(lambda state: grid.train_chunk(args, 2, state))(state)


def greedy_walk(q_table):
    """Steps from the last cell to the first one of a table (H, W, A), or inf."""
    row, column = np.array(q_table.shape[:2]) - 1
    for step in range(1, q_table[..., 0].size + 1):
        down, right = [(0, 1), (1, 0), (0, -1), (-1, 0)][q_table[row, column].argmax()]
        row = min(max(row + down, 0), q_table.shape[0] - 1)
        column = min(max(column + right, 0), q_table.shape[1] - 1)
        if row == column == 0:
            return step
    return np.inf


def test_report_is_that_of_a_replay(tmp_path, capsys):
    """Every step is played again in NumPy, from the bits that the run draws."""
    flags = "--num-seeds 3 --grid-size 4 3 --learning-rate 0 0.5 --epsilon 0.3 --gamma 0.5"
    flags += " --total-timesteps 4001 --log-interval 2000 --save"
    assert grid.main([*flags.split(), str(tmp_path / "run.npz")]) == 0
    saved = np.load(tmp_path / "run.npz")
    np.testing.assert_array_equal(saved["timesteps"], [2000, 4000, 5000])
    for run, (seed, rate) in enumerate(zip(saved["seed"], saved["learning_rate"], strict=True)):
        key, q_table, at, episodes = (
            jax.random.key(seed),
            np.zeros((4, 3, 4), np.float32),
            (3, 2),
            [],
        )
        for block in range(5):
            key, key_bits = jax.random.split(key)
            for bits in np.asarray(jax.random.bits(key_bits, 1000)):
                action = int(grid_action(q_table[at], int(bits)))
                down, right = [(0, 1), (1, 0), (0, -1), (-1, 0)][action]
                to = min(max(at[0] + down, 0), 3), min(max(at[1] + right, 0), 2)
                target = 1 if to == (0, 0) else np.float32(0.5) * q_table[to].max()
                td_error = target - q_table[at][action]
                q_table[at][action] += np.float32(rate) * td_error  # halves: exact in float32
                episodes += [block] * (to == (0, 0))
                at = (3, 2) if to == (0, 0) else to
        np.testing.assert_array_equal(saved["q_table"][run], q_table)
        counts = np.bincount(episodes, minlength=5)
        per_line = [2000 / sum(counts[:2]), 2000 / sum(counts[2:4]), 1000 / counts[4]]
        np.testing.assert_allclose(saved["steps_per_episode"][:, run], per_line, rtol=1e-6)
        assert saved["greedy_steps"][run] == greedy_walk(saved["q_table"][run])
    printed = capsys.readouterr().out
    assert "learning rate 0: value of the start 0.00000, goal reached by 0 of 3" in printed
    value = saved["q_table"][3:, -1, -1].max(axis=1).mean()
    assert f"learning rate 0.5: value of the start {value:.5f}, goal reached by 3 of 3" in printed
    assert "in at most 5 steps" in printed


def grid_action(values, bits):
    """The action that these bits choose with an epsilon of 0.3."""
    best = [a for a in range(4) if bits / 2**32 < 0.3 or values[a] == values.max()]
    return max(best, key=lambda a: list(itertools.permutations(range(4)))[bits % 24][a])


def test_a_policy_that_never_arrives():
    args = grid.parse_args([])
    state = grid.init_state(args, 0, 0.1)  # all values equal: always right, into the wall
    assert grid.evaluate(args, state) == np.inf
