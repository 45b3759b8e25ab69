"""gridworld_qlearning.py against value iteration in NumPy and steps worked out by hand."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gridworld_qlearning as grid

MOVES = np.array([(0, 1), (1, 0), (0, -1), (-1, 0)])
RIGHT, DOWN, LEFT, UP = range(4)


def move(shape, cell, action):
    """The cell (row, column) that an action leads to; walls are in the way."""
    return tuple(np.clip(cell + MOVES[action], 0, np.array(shape) - 1))


def run(flags, path):
    assert grid.main([*flags.split(), "--save", str(path)]) == 0
    return np.load(path)


@pytest.mark.parametrize(
    ("cell", "action", "target", "to"),
    [
        (4, LEFT, 0.5 * 3.0, 3),  # an ordinary step
        (5, RIGHT, 0.5 * 2.0, 5),  # into the wall
        (1, LEFT, 1.0, 5),  # to the goal, whose own values and the start's count for nothing
    ],
)
def test_one_update_by_hand(cell, action, target, to):
    """Cells of a 2 x 3 grid are 0 1 2 / 3 4 5; the goal is 0, the start 5."""
    args = grid.parse_args("--grid-size 2 3 --gamma 0.5".split())
    q_table = np.zeros((6, 4), np.float32)
    q_table[0] = 9.0
    q_table[3, DOWN] = 3.0
    q_table[5, RIGHT] = 2.0
    q_table[cell, action] = 2.0
    before = grid.init_state(args, 0, 0.1)
    assert before.cell == 5
    before = before._replace(q_table=jnp.array(q_table), cell=jnp.array(cell))
    after, _ = grid.train_step(args, before, jnp.uint32(2**32 - 1))
    q_table[cell, action] += 0.1 * (target - 2.0)
    np.testing.assert_allclose(after.q_table, q_table, rtol=1e-6)
    assert (after.cell, after.episodes) == (to, cell == 1)


@pytest.mark.parametrize(
    ("values", "epsilon", "fraction"),
    [
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
    assert np.sum((counts - expected) ** 2 / np.maximum(expected, 1e-9)) < 16.3


def test_no_key_is_used_twice():
    args = grid.parse_args([])
    with jax.debug_key_reuse(True):
        jax.jit(partial(grid.train_chunk, args, 2)).trace(grid.init_state(args, 0, 0.1))


def replay(args, seed, learning_rate):
    """One run of 3 blocks in NumPy, from the bits it draws: Q (H, W, A), episodes per block."""
    rankings = list(itertools.permutations(range(4)))
    q_table = np.zeros((*args.grid_size, 4), np.float32)
    episodes = np.zeros(3)
    key, cell = jax.random.key(seed), (3, 2)
    for block in range(3):
        key, key_bits = jax.random.split(key)
        for bits in np.asarray(jax.random.bits(key_bits, 1000)).tolist():
            best = q_table[cell] == q_table[cell].max()
            candidates = range(4) if bits / 2**32 < args.epsilon else np.flatnonzero(best)
            action = max(candidates, key=rankings[bits % 24].__getitem__)
            to = move(args.grid_size, cell, action)
            target = 1 if to == (0, 0) else np.float32(args.gamma) * q_table[to].max()
            q_table[cell][action] += np.float32(learning_rate) * (target - q_table[cell][action])
            episodes[block] += to == (0, 0)
            cell = (3, 2) if to == (0, 0) else to
    return q_table, episodes


def test_the_report_is_that_of_an_independent_replay(tmp_path, capsys):
    """With halves as learning rate and gamma, float32 is exact. Two lines: 2 blocks, then 1."""
    flags = "--num-seeds 2 --grid-size 4 3 --learning-rate 0 0.5 --epsilon 0.3 --gamma 0.5"
    flags += " --total-timesteps 2001 --log-interval 1001"
    saved = run(flags, tmp_path / "run.npz")
    np.testing.assert_array_equal(saved["timesteps"], [2000, 3000])
    for i, (learning_rate, seed) in enumerate(itertools.product([0, 0.5], range(2))):
        assert (saved["learning_rate"][i], saved["seed"][i]) == (learning_rate, seed)
        q_table, episodes = replay(grid.parse_args(flags.split()), seed, learning_rate)
        np.testing.assert_array_equal(saved["q_table"][i], q_table)
        steps_per_episode = [2000 / episodes[:2].sum(), 1000 / episodes[2]]
        np.testing.assert_allclose(saved["steps_per_episode"][:, i], steps_per_episode, rtol=1e-6)
    np.testing.assert_array_equal(saved["greedy_steps"], [np.inf, np.inf, 5, 5])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[2:4]] == ["step 2,000", "step 3,000"]
    assert f"  steps per episode {saved['steps_per_episode'][1].mean():.1f}  " in lines[3]
    nothing = "learning rate 0: value of the start 0.00000, goal reached by 0 of 2 greedy agents"
    value = saved["q_table"][2:, 3, 2].max(axis=1).mean()
    learned = f"learning rate 0.5: value of the start {value:.5f}, goal reached by 2 of 2"
    assert lines[-2:] == [nothing, f"{learned} greedy agents, in at most 5 steps"]


def test_whole_table_equals_value_iteration(tmp_path):
    """With much exploration every action is tried often enough in every cell."""
    exact = np.zeros((4, 5, 4))
    for _ in range(9):
        for row, column, action in np.ndindex(exact.shape):
            to = move((4, 5), (row, column), action)
            exact[row, column, action] = 1.0 if to == (0, 0) else 0.9 * exact[to].max()
    exact[0, 0] = 0.0  # the goal is terminal
    flags = "--grid-size 4 5 --epsilon 0.9 --learning-rate 0.5 --total-timesteps 4e5"
    learned = run(flags, tmp_path / "run.npz")["q_table"][0]
    np.testing.assert_allclose(learned, exact, atol=1e-5)


def test_default_runs_are_exact_at_the_start_and_the_same_alone(tmp_path):
    """A run's table is the same to the last bit alone and among others on two devices."""
    many = run("--num-seeds 8 --log-interval 1e6", tmp_path / "many.npz")
    np.testing.assert_allclose(many["q_table"][:, 7, 11].max(axis=1), 0.9**17, atol=1e-5)
    np.testing.assert_array_equal(many["greedy_steps"], 18)
    assert len(np.unique(many["q_table"], axis=0)) == 8
    alone = run("--seed 3 --log-interval 1e6", tmp_path / "alone.npz")
    np.testing.assert_array_equal(alone["q_table"][0], many["q_table"][3])
