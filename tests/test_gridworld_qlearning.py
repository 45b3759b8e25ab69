"""gridworld_qlearning.py: learning replayed in NumPy, exact values, its policy and its report.

The fixture `learning` trains in a grid with a trap, and records every step. Each test then checks
one fact of that record.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import jit, one_run, watch
from matplotlib.figure import Figure
from matplotlib.quiver import Quiver

import gridworld_qlearning as grid

close = np.testing.assert_allclose
RIGHT, DOWN, LEFT, UP = range(4)
MOVES = {RIGHT: (0, 1), DOWN: (1, 0), LEFT: (0, -1), UP: (-1, 0)}
ROWS, COLUMNS = 3, 4
START, GOAL, TRAP = (2, 3), (0, 0), (1, 0)
FLAGS = "--grid-size 3 4 --total-timesteps 4000 --num-intervals 2 --seed 5"
env_step = grid.env_step


def with_trap(run, cell, action):
    """Below the goal is a trap, worth -1. A step costs 0.25, but the last one is free."""
    next_cell, reward, terminated = env_step(run, cell, action)
    trapped = jnp.all(next_cell == jnp.array(TRAP))
    over = terminated | trapped
    return next_cell, jnp.where(over, reward - trapped, reward - 0.25), over


@pytest.fixture(scope="module")
def learning():
    """A record of two intervals of training in the grid with a trap."""
    patch = pytest.MonkeyPatch()
    patch.setattr(grid, "env_step", with_trap)
    steps = watch(patch, grid, "env_step")
    run = one_run(grid, FLAGS, learning_rate=0.5, gamma=0.5, epsilon=0.4)
    train, state = jit(grid.train_interval, run), jit(grid.init_state, run)()
    halves = []
    for _ in range(2):
        state, metrics = train(state)
        jax.effects_barrier()
        halves.append(SimpleNamespace(metrics=metrics, steps=steps[:]))
        steps.clear()
    patch.undo()
    return SimpleNamespace(halves=halves, steps=halves[0].steps + halves[1].steps, last=state)


def test_moves_stay_inside_the_grid_and_end_at_the_goal(learning):
    for step in learning.steps:
        next_cell, reward, terminated = step.out
        row, column = np.add(step.cell, MOVES[int(step.action)])
        expected = (np.clip(row, 0, ROWS - 1), np.clip(column, 0, COLUMNS - 1))
        assert tuple(next_cell) == expected
        assert reward == {GOAL: 1, TRAP: -1}.get(expected, -0.25)
        assert terminated == (expected in (GOAL, TRAP))


def test_an_episode_goes_on_from_its_next_cell_until_it_ends(learning):
    assert tuple(learning.steps[0].cell) == START
    for step, following in zip(learning.steps[:-1], learning.steps[1:], strict=True):
        next_cell, _, terminated = step.out
        assert tuple(following.cell) == (START if terminated else tuple(next_cell))


def test_each_step_is_an_update_of_q_learning(learning):
    q = np.zeros((ROWS, COLUMNS, 4))
    for step in learning.steps:
        next_cell, reward, terminated = step.out
        entry = (*step.cell, step.action)
        target = reward + 0.5 * q[tuple(next_cell)].max() * (not terminated)  # gamma 0.5
        q[entry] += 0.5 * (target - q[entry])  # learning rate 0.5
    close(learning.last.q_table, q, atol=1e-6)


def test_a_progress_line_shows_steps_and_rewards_per_episode(learning):
    for half in learning.halves:
        _, rewards, terminated = zip(*[step.out for step in half.steps], strict=True)
        assert half.metrics["timesteps"] == len(half.steps) == 2000  # two blocks of 1,000
        close(half.metrics["steps_per_episode"], 2000 / np.sum(terminated), rtol=1e-5)
        close(half.metrics["returns"], np.sum(rewards) / np.sum(terminated), rtol=1e-4)


def test_a_run_in_which_no_episode_ended_counts_in_no_mean(monkeypatch):
    """Otherwise its infinite number of steps would make the mean of all runs infinite."""
    monkeypatch.setattr(grid, "env_step", lambda run, cell, action: (cell, -1.0, jnp.array(False)))
    run = one_run(grid, FLAGS)
    _, metrics = jax.jit(lambda: grid.train_interval(run, grid.init_state(run)))()
    assert np.isnan(metrics["steps_per_episode"]) and np.isnan(metrics["returns"])


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_actions_are_random_with_probability_epsilon_and_ties_favor_none(epsilon, monkeypatch):
    steps = watch(monkeypatch, grid, "env_step")
    run = one_run(grid, FLAGS, learning_rate=0.0, epsilon=epsilon)  # the table stays as it is
    q = np.random.default_rng(0).integers(0, 2, (ROWS, COLUMNS, 4)).astype(float)
    q[START], q[1, 1] = 0, [1, 0, 1, 0]  # so that some cell has four best actions, some has two
    state = jit(grid.init_state, run)()._replace(q_table=jnp.array(q, jnp.float32))
    jit(grid.train_interval, run)(state)
    jax.effects_barrier()
    cells, actions = np.array([step.cell for step in steps]), np.array([s.action for s in steps])
    for row, column in np.unique(cells, axis=0):
        taken = actions[np.all(cells == [row, column], axis=1)]
        best = q[row, column] == q[row, column].max()
        p = (1 - epsilon) * best / best.sum() + epsilon / 4
        deviation = np.sqrt(len(taken) * p * (1 - p))
        off = np.abs(np.bincount(taken, minlength=4) - len(taken) * p)
        assert np.all(off <= 5 * deviation + 1e-9), (row, column)


@pytest.fixture(scope="module")
def default_runs():
    """Three whole runs. The goal is 18 steps from the start."""
    return grid.main("--num-seeds 3".split())


def test_default_runs_find_the_exact_value_of_the_start(default_runs):
    close(default_runs["q_table"][:, 7, 11].max(axis=1), 0.9**17, rtol=1e-4)  # gamma^(18 - 1)
    np.testing.assert_array_equal(
        default_runs["start_value"], default_runs["q_table"][:, 7, 11].max(axis=1)
    )


def test_default_runs_find_a_shortest_path(default_runs):
    assert default_runs["greedy_steps"].tolist() == [18] * 3


def test_each_seed_plays_on_its_own(default_runs):
    assert len(np.unique(default_runs["q_table"], axis=0)) == 3


def greedy_steps(*rows):
    """Steps to the goal of a policy, given the greedy action of each cell."""
    run = SimpleNamespace(grid_size=(len(rows), len(rows[0])))
    state = SimpleNamespace(q_table=jnp.eye(4)[jnp.array(rows)])
    return grid.evaluate(run, state)["greedy_steps"]


def test_greedy_steps_are_counted_along_a_path():
    assert greedy_steps([LEFT, LEFT, LEFT], [RIGHT, RIGHT, UP], [UP, LEFT, LEFT]) == 8


def test_greedy_steps_are_infinite_in_a_circle():
    assert greedy_steps([LEFT, LEFT], [UP, DOWN]) == np.inf


def test_greedy_steps_are_infinite_if_the_episode_ends_elsewhere(monkeypatch):
    monkeypatch.setattr(grid, "env_step", with_trap)
    assert greedy_steps([LEFT, LEFT], [UP, LEFT]) == np.inf  # into the trap, then to the goal
    assert greedy_steps([LEFT, LEFT], [UP, UP]) == 2


def test_arrows_of_a_picture_point_where_greedy_actions_lead(monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
    q_table = np.zeros((2, 3, 4))
    q_table[0, 2, DOWN] = q_table[1, 1, LEFT] = 1
    grid.plot("x.png", [""], q_table[None])
    arrows = figures[0].axes[0].findobj(Quiver)[0]
    drawn = zip(arrows.X, arrows.Y, arrows.U, arrows.V, strict=True)  # column, row, right, down
    assert sorted(drawn) == [(1, 1, -1, 0), (2, 0, 0, 1)]


def report_of(q_table, greedy_steps):
    learned = {"q_table": q_table, "greedy_steps": np.array(greedy_steps)}
    return grid.report({**learned, "start_value": q_table[:, -1, -1].max(axis=-1)})


def test_the_report_describes_all_agents_and_the_mean_of_their_tables():
    q_table = np.zeros((3, 1, 2, 4))  # three agents, two cells
    q_table[0, 0, 1, LEFT] = 0.25
    q_table[1, 0, 1, DOWN] = 0.5
    q_table[2, 0, 1, UP] = 1.5
    text = report_of(q_table, [7, np.inf, 3])
    assert "0.75000" in text  # the mean of the agents' best values
    assert "2 of 3" in text and " 7 steps" in text  # those that arrive, and the longest path
    assert ". 0.000" in text and "^ 0.500" in text  # of the mean table: nothing known; up, 1.5 / 3


def test_the_report_does_not_print_a_grid_of_many_pages():
    text = report_of(np.ones((1, 100, 100, 4)), [198])
    assert "1.00000" in text and len(text) < 200
