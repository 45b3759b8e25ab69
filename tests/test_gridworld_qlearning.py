"""gridworld_qlearning.py: what it does with the steps that were seen, exact values, its report."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import jit, one_run, watch

import gridworld_qlearning as grid

MOVES = np.array([(0, 1), (1, 0), (0, -1), (-1, 0)])
RIGHT, DOWN, LEFT, UP = range(4)
FLAGS = "--grid-size 3 4 --total-timesteps 4000 --num-intervals 2 --seed 5"
close, env_step = np.testing.assert_allclose, grid.env_step


def with_trap(run, cell, action):
    """Below the goal is a trap. A step costs 0.25, the last one does not."""
    next_cell, reward, terminated = env_step(run, cell, action)
    trap = jnp.all(next_cell == jnp.array([1, 0]))
    over = terminated | trap
    return next_cell, jnp.where(over, reward - trap, reward - 0.25), over


def test_learning_is_q_learning_on_the_steps_that_were_seen(monkeypatch):
    monkeypatch.setattr(grid, "env_step", with_trap)
    calls = watch(monkeypatch, grid, "env_step")
    run = one_run(grid, FLAGS, learning_rate=0.5, gamma=0.5, epsilon=0.4)
    train, state = jit(grid.train_interval, run), jit(grid.init_state, run)()
    q, cell = np.zeros((3, 4, 4)), (2, 3)
    for _ in range(2):
        calls.clear()
        state, metrics = train(state)
        jax.effects_barrier()
        rewards, ends = [], 0
        for (before, action), (after, reward, end) in calls:
            to = tuple(np.clip(np.add(cell, MOVES[action]), 0, [2, 3]).tolist())
            rewards.append({(0, 0): 1, (1, 0): -1}.get(to, -0.25))
            over = to in [(0, 0), (1, 0)]
            assert (tuple(before), tuple(after), reward, end) == (cell, to, rewards[-1], over)
            target = rewards[-1] + 0.5 * q[to].max() * (not over)
            q[cell][action] += 0.5 * (target - q[cell][action])
            ends, cell = ends + over, (2, 3) if over else to
        close(state.q_table, q, atol=1e-6)
        assert len(calls) == metrics["timesteps"] == 2000
        close(metrics["steps_per_episode"], 2000 / ends, rtol=1e-5)
        close(metrics["returns"], sum(rewards) / ends, rtol=1e-4)


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_ties_and_random_actions_favor_none(epsilon, monkeypatch):
    run = one_run(grid, FLAGS, learning_rate=0.0, epsilon=epsilon)
    calls = watch(monkeypatch, grid, "env_step")
    q = np.random.default_rng(0).integers(0, 2, (3, 4, 4)).astype(float)
    q[2, 3], q[1, 1] = 0, [1, 0, 1, 0]  # a cell has one to four best actions
    state = jit(grid.init_state, run)()._replace(q_table=jnp.array(q, jnp.float32))
    jit(grid.train_interval, run)(state)
    jax.effects_barrier()
    cells, actions = (np.array([call[0][i] for call in calls]) for i in (0, 1))
    for row, column in np.unique(cells, axis=0):
        taken = actions[np.all(cells == [row, column], axis=1)]
        best, size = q[row, column] == q[row, column].max(), len(taken)
        p = (1 - epsilon) * best / best.sum() + epsilon / 4  # (A,)
        off = np.abs(np.bincount(taken, minlength=4) - size * p)
        assert np.all(off <= 5 * np.sqrt(size * p * (1 - p)) + 1e-9), (row, column)


def test_default_runs_are_exact_at_the_start_and_all_differ():
    results = grid.main("--num-seeds 3".split())
    close(results["q_table"][:, 7, 11].max(axis=1), 0.9**17, rtol=1e-4)
    assert results["greedy_steps"].tolist() == [18] * 3
    assert len(np.unique(results["q_table"], axis=0)) == 3


def test_greedy_steps_lead_to_the_goal_and_not_to_a_trap(monkeypatch):
    def greedy_steps(size, *moves):
        state = SimpleNamespace(q_table=np.eye(4)[list(moves)])
        return grid.evaluate(SimpleNamespace(grid_size=size), state)["greedy_steps"]

    snake = [LEFT, LEFT, LEFT], [RIGHT, RIGHT, UP], [UP, LEFT, LEFT]
    assert greedy_steps((3, 3), *snake) == 8
    assert greedy_steps((2, 2), [LEFT, LEFT], [UP, DOWN]) == np.inf
    monkeypatch.setattr(grid, "env_step", with_trap)
    assert greedy_steps((2, 2), [LEFT, LEFT], [UP, LEFT]) == np.inf
    assert greedy_steps((2, 2), [LEFT, LEFT], [UP, UP]) == 2


def test_the_report_describes_all_agents_and_the_mean_of_their_tables():
    q_table = np.zeros((3, 1, 2, 4))
    q_table[range(3), 0, 1, [LEFT, DOWN, UP]] = [0.25, 0.5, 1.5]
    learned = {"q_table": q_table, "greedy_steps": np.array([7, np.inf, 3])}
    text = grid.report(SimpleNamespace(grid_size=(1, 2)), learned)
    parts = "0.75000", "2 of 3", " 7 steps", ". 0.000", "^ 0.500"  # the mean: 1.5 / 3, up
    assert all(part in text for part in parts)
