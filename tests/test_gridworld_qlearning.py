"""gridworld_qlearning.py against value iteration in NumPy, against moves worked out by hand, and on its task."""
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gridworld_qlearning as grid

SCRIPT = Path(grid.__file__)


def run(*flags, **options):
    """Run the script to its end; returns the finished process, its output as text."""
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, flags)], capture_output=True, text=True, timeout=240, **options)


def value_iteration(rows, columns, goal, gamma):
    """Exact Q (H, W, A) of the grid: moves right, down, left, up, clipped at the walls; the goal is terminal."""
    q_table = np.zeros((rows, columns, 4))
    for _ in range(rows * columns):
        new = np.zeros_like(q_table)
        for row, column in np.ndindex(rows, columns):
            for action, (down, right) in enumerate([(0, 1), (1, 0), (0, -1), (-1, 0)]):
                to = min(max(row + down, 0), rows - 1), min(max(column + right, 0), columns - 1)
                new[row, column, action] = 1.0 if to == goal else gamma * q_table[to].max()
        new[goal] = 0.0
        q_table = new
    return q_table


def test_moves_and_walls_by_hand():
    """Cells of a 2 x 3 grid are 0 1 2 / 3 4 5; the goal is 0."""
    world = grid.make_grid_world(2, 3, (1, 2), (0, 0))
    moves = {(4, 0): 5, (4, 1): 4, (4, 2): 3, (4, 3): 1, (5, 0): 5, (5, 1): 5, (2, 3): 2, (2, 0): 2, (3, 2): 3, (2, 1): 5}
    for (cell, action), expected in moves.items():
        cell, next_cell, reward, terminated = grid.step(world, cell, action, jnp.uint32(7))
        assert (cell, next_cell, reward, terminated) == (expected, expected, 0.0, False)
    cell, next_cell, reward, terminated = grid.step(world, 1, 2, jnp.uint32(7))
    assert (cell, next_cell, reward, terminated) == (5, 0, 1.0, True)  # reached 0, was paid, goes on from the start


def test_random_starts_are_all_cells_but_the_goal():
    world = grid.make_grid_world(3, 4, (2, 3), (1, 1), random_start=True)
    cells = np.asarray(grid.reset(world, jax.random.bits(jax.random.key(0), (20_000,))))
    counts = np.bincount(cells, minlength=12)
    assert counts[5] == 0 and np.all(np.abs(np.delete(counts, 5) - 20_000 / 11) < 200)


def test_ties_are_broken_uniformly():
    """Chi-square statistics with 3, 1 and 2 degrees of freedom stay below their 99.9 % points."""
    bits = jax.random.bits(jax.random.key(0), (40_000,))
    choose = jax.vmap(grid.select_action, in_axes=(None, 0, None))
    for values, best, limit in ([0, 0, 0, 0], [0, 1, 2, 3], 16.3), ([1, 2, 2, 0], [1, 2], 10.8), ([5, 0, 5, 5], [0, 2, 3], 13.8):
        counts = np.bincount(choose(jnp.array(values, float), bits, 0.0), minlength=4)
        assert counts.sum() == counts[best].sum() == 40_000
        expected = 40_000 / len(best)
        assert ((counts[best] - expected) ** 2 / expected).sum() < limit


def test_first_actions_of_many_seeds_are_uniform():
    """In the table of zeros: where the first step leads from the middle of a 3 x 3 grid, over 2,000 seeds."""
    args = grid.parse_args(["--grid-size", "3", "3", "--start", "1", "1"])
    world = grid.make_grid_world(3, 3, args.start, args.goal)
    first = jax.vmap(lambda seed: grid.q_step(args, world, grid.init_state(args, world, seed, 0.1), jax.random.bits(jax.random.key(seed), (1,)))[0].cell)
    counts = np.bincount(first(jnp.arange(2000)), minlength=9)[[5, 7, 3, 1]]
    assert counts.sum() == 2000 and ((counts - 500) ** 2 / 500).sum() < 16.3


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0])
def test_epsilon_is_the_share_of_random_actions(epsilon):
    bits = jax.random.bits(jax.random.key(1), (100_000,))
    other = jax.vmap(grid.select_action, in_axes=(None, 0, None))(jnp.array([0.0, 1.0, 0.0, 0.0]), bits, epsilon) != 1
    assert abs(other.mean() - 0.75 * epsilon) < 0.005  # a random action is the greedy one in a quarter of the cases


def test_one_update_by_hand_and_no_leak_from_the_reset():
    args = grid.parse_args(["--grid-size", "1", "3", "--gamma", "0.5"])
    world = grid.make_grid_world(1, 3, (0, 2), (0, 0))
    q_table = jnp.array([9.0, 9, 9, 9, 0, 0, 0.4, 0, 0, 0, 7, 0])  # a wrong table: the goal's own values and the start's are high
    state = grid.TrainState(None, 0.1, q_table, jnp.int32(1), jnp.int32(0))
    after, _ = grid.q_step(args, world, state, jnp.array([2**32 - 1], jnp.uint32))
    np.testing.assert_allclose(after.q_table, q_table.at[6].set(0.4 + 0.1 * (1 - 0.4)), rtol=1e-6)
    assert after.cell == 2 and after.episodes == 1
    after, _ = grid.q_step(args, world, after._replace(q_table=q_table), jnp.array([2**32 - 1], jnp.uint32))
    np.testing.assert_allclose(after.q_table, q_table.at[10].set(7 + 0.1 * (0.5 * 0.4 - 7)), rtol=1e-6)


@pytest.mark.parametrize("rows, columns, start, goal", [(4, 4, (3, 3), (0, 0)), (3, 7, (0, 6), (2, 1)), (1, 6, (0, 5), (0, 0)), (5, 2, (1, 0), (0, 0))])
def test_learned_values_equal_value_iteration(rows, columns, start, goal):
    """Random starts and much exploration, so that every pair is visited often."""
    args = grid.parse_args(["--grid-size", str(rows), str(columns), "--start", *map(str, start), "--goal", *map(str, goal), "--random-start",
                            "--epsilon", "0.5", "--learning-rate", "0.5", "--total-timesteps", "200000", "--log-interval", "200000"])
    world = grid.make_grid_world(rows, columns, start, goal, True)
    state = jax.jit(lambda: grid.train_chunk(args, world, grid.init_state(args, world, 0, 0.5)))()
    learned, exact = np.asarray(state.q_table).reshape(rows, columns, 4), value_iteration(rows, columns, goal, 0.9)
    np.testing.assert_allclose(learned, exact, atol=1e-5)
    distance = abs(start[0] - goal[0]) + abs(start[1] - goal[1])
    np.testing.assert_allclose(exact[start].max(), 0.9 ** (distance - 1))
    assert grid.greedy_path_lengths(args, learned[None]) == [distance]


def test_a_path_that_goes_in_circles_has_no_length():
    args = grid.parse_args(["--grid-size", "2", "3"])
    q_table = np.zeros((2, 2, 3, 4))
    q_table[1, ..., 3], q_table[1, 0, :, 2] = 1.0, 2.0  # up, and to the left in the first row
    np.testing.assert_array_equal(grid.greedy_path_lengths(args, q_table), [np.nan, 3])


def test_default_run_is_right_and_the_same_on_two_devices(tmp_path):
    reports = []
    for devices in (1, 2):
        process = run("--num-seeds", 30, "--json", "--num-devices", devices, "--save", tmp_path / f"{devices}.npz")
        reports.append(json.loads(process.stdout))
    assert all(row["path_length"] == 18 and abs(row["start_value"] - 0.9**17) < 1e-4 for row in reports[0]["runs"])
    one, two = np.load(tmp_path / "1.npz"), np.load(tmp_path / "2.npz")
    np.testing.assert_array_equal(one["q_table"], two["q_table"])
    assert one["q_table"].shape == (30, 8, 12, 4) and reports[0]["runs"] == reports[1]["runs"]
    assert len(np.unique(one["q_table"].reshape(30, -1), axis=0)) == 30
    again = json.loads(run("--evaluate", tmp_path / "1.npz", "--json").stdout)
    assert again["runs"] == reports[0]["runs"]


def test_no_key_is_used_twice():
    args = grid.parse_args(["--total-timesteps", "2000"])
    world = grid.make_grid_world(8, 12, args.start, args.goal)
    with jax.debug_key_reuse(True):
        jax.jit(lambda seed: grid.train_chunk(args, world, grid.train_chunk(args, world, grid.init_state(args, world, seed, 0.1))))(0)
