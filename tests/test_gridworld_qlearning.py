"""gridworld_qlearning.py: learning replayed in NumPy, exact values, its policy and its picture.

The fixture `learning` trains in a grid with a trap, and records every step. Each test then checks
one fact of that record.
"""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import halves, jit, one_run, watch
from matplotlib.figure import Figure
from matplotlib.quiver import Quiver

import gridworld_qlearning as grid

close = np.testing.assert_allclose
RIGHT, DOWN, LEFT, UP = range(4)
MOVES = {RIGHT: (0, 1), DOWN: (1, 0), LEFT: (0, -1), UP: (-1, 0)}
ROWS, COLUMNS = 3, 5
START, GOAL, TRAP = (2, 4), (0, 0), (1, 0)
FLAGS = "--grid-size 3 5 --total-timesteps 6000 --num-intervals 2 --seed 5"
env_step = grid.env_step


def with_trap(run, cell, action):
    """Each step costs 0.25. Below the goal is a trap: it costs 1 and ends the episode."""
    next_cell, reward, terminated = env_step(run, cell, action)
    trapped = jnp.all(next_cell == jnp.array(TRAP))
    return next_cell, reward - jnp.where(trapped, 1.0, 0.25), terminated | trapped


@pytest.fixture(scope="module")
def learning():
    """A record of two intervals of training in the grid with a trap."""
    patch = pytest.MonkeyPatch()
    patch.setattr(grid, "env_step", with_trap)
    steps = watch(patch, grid, "env_step")
    run = one_run(grid, FLAGS, learning_rate=0.5, gamma=0.8, epsilon=0.4)
    train, state, lines = jit(grid.train_interval, run), jit(grid.init_state, run)(), []
    for _ in range(2):
        state, metrics = train(state)
        lines.append(metrics)
    jax.effects_barrier()
    patch.undo()
    return SimpleNamespace(lines=lines, steps=steps, last=state)


def test_moves_stay_inside_the_grid_and_end_at_the_goal(learning):
    for step in learning.steps:
        next_cell, reward, terminated = step.out
        row, column = np.add(step.cell, MOVES[int(step.action)])
        expected = (np.clip(row, 0, ROWS - 1), np.clip(column, 0, COLUMNS - 1))
        assert tuple(next_cell) == expected
        assert reward == {GOAL: 0.75, TRAP: -1}.get(expected, -0.25)
        assert terminated == (expected in (GOAL, TRAP))


def test_an_episode_goes_on_from_its_next_cell(learning):
    assert tuple(learning.steps[0].cell) == START
    for step, following in zip(learning.steps[:-1], learning.steps[1:], strict=True):
        next_cell, _, terminated = step.out
        assert tuple(following.cell) == (START if terminated else tuple(next_cell))


def test_each_step_is_an_update_of_q_learning(learning):
    q = np.zeros((ROWS, COLUMNS, 4))
    for step in learning.steps:
        next_cell, reward, terminated = step.out
        entry = (*step.cell, step.action)
        target = reward + 0.8 * q[tuple(next_cell)].max() * (not terminated)  # gamma 0.8
        q[entry] += 0.5 * (target - q[entry])  # learning rate 0.5
    close(learning.last.q_table, q, atol=1e-6)


def test_a_progress_line_shows_steps_and_rewards_per_episode(learning):
    for line, steps in zip(learning.lines, halves(learning.steps), strict=True):
        _, rewards, terminated = zip(*[step.out for step in steps], strict=True)
        assert line["timesteps"] == len(steps) == 3000  # three blocks of 1,000
        close(line["steps_per_episode"], 3000 / np.sum(terminated), rtol=1e-5)
        close(line["returns"], np.sum(rewards) / np.sum(terminated), rtol=1e-4)


# The best actions in a column of the grid: one to four of them. They lead to each of the columns.
BEST = {1: [RIGHT], 2: [RIGHT, LEFT], 3: [RIGHT, LEFT, UP], 4: [RIGHT, DOWN, LEFT, UP]}


@pytest.mark.parametrize("epsilon", [0.0, 0.3])
def test_exploring_actions_and_best_actions_are_equally_likely(epsilon, monkeypatch):
    steps = watch(monkeypatch, grid, "env_step")
    run = one_run(grid, FLAGS, learning_rate=0.0, epsilon=epsilon)  # the table stays as it is
    q = np.zeros((ROWS, COLUMNS, 4), np.float32)
    for column, best in BEST.items():
        q[:, column, best] = 0.5
    jit(grid.train_interval, run)(jit(grid.init_state, run)()._replace(q_table=jnp.array(q)))
    jax.effects_barrier()
    for column, best in BEST.items():
        taken = [int(step.action) for step in steps if step.cell[1] == column]
        p = np.full(4, epsilon / 4)
        p[best] += (1 - epsilon) / len(best)
        off = np.abs(np.bincount(taken, minlength=4) - len(taken) * p)
        assert np.all(off <= 5 * np.sqrt(len(taken) * p * (1 - p)) + 1e-9)
        assert len(taken) > 200


@pytest.fixture(scope="module")
def default_runs():
    """Four whole runs. The goal is 7 + 11 steps from the start."""
    return grid.main("--gamma 0.8 0.9 --num-seeds 2".split())


def test_default_runs_find_the_exact_value_of_the_start(default_runs):
    exact = default_runs["runs"]["gamma"] ** 17  # the reward comes in step 18
    close(default_runs["learned"]["start_value"], exact, rtol=1e-4)
    close(default_runs["learned"]["q_table"][:, 7, 11].max(axis=1), exact, rtol=1e-4)


def test_default_runs_find_a_shortest_path_each_in_its_own_way(default_runs):
    assert default_runs["learned"]["greedy_steps"].tolist() == [18] * 4
    first, second, *_ = default_runs["curves"]["steps_per_episode"][0]
    assert first != second  # of two seeds


def greedy_steps(*rows):
    """Steps to the goal of a policy, given the greedy action of each cell."""
    run = SimpleNamespace(grid_size=(len(rows), len(rows[0])))
    state = SimpleNamespace(q_table=jnp.eye(4)[jnp.array(rows)])
    return grid.evaluate(run, state)["greedy_steps"]


def test_greedy_steps_are_counted_along_a_path():
    """The longest one: it visits each cell."""
    rows = [LEFT, LEFT, LEFT, LEFT], [RIGHT, RIGHT, RIGHT, UP], [UP, LEFT, LEFT, LEFT]
    assert greedy_steps(*rows) == 11


def test_greedy_steps_are_infinite_if_an_episode_does_not_end_at_the_goal(monkeypatch):
    assert greedy_steps([LEFT, LEFT], [UP, DOWN]) == np.inf  # it never ends
    monkeypatch.setattr(grid, "env_step", with_trap)
    assert greedy_steps([LEFT, LEFT], [UP, LEFT]) == np.inf  # into the trap, then to the goal
    assert greedy_steps([LEFT, LEFT], [UP, UP]) == 2


def test_a_setting_is_reported_and_drawn_with_its_means(monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
    q_table = np.zeros((3, 2, 3, 4))  # three agents, two rows, three columns
    q_table[0, 0, 2, UP] = 9  # of another setting
    q_table[1, 1, 1, LEFT] = 1
    q_table[2, 0, 2, DOWN] = 1
    steps, start_value = np.array([8, np.inf, 3]), np.array([9, 0.25, 1.25])
    learned = {"q_table": q_table, "greedy_steps": steps, "start_value": start_value}
    numbers = re.findall(r"inf|\d+\.?\d*", grid.report(learned, slice(1, 3)))
    # Four cells are 0, and two 1 / 2. The mean of the start is 0.75, and 1 of 2 agents arrives.
    assert sorted(map(float, numbers)) == [0, 0, 0, 0, 0.5, 0.5, 0.75, 1, 2, np.inf]
    settings = {"gamma 0.8": slice(0, 1), "gamma 0.9": slice(1, 3)}
    grid.draw(SimpleNamespace(plot="x.png"), settings, {"learned": learned})
    (panel,) = [axes for axes in figures[0].axes if axes.get_title() == "gamma 0.9"]
    assert panel.images[0].get_array().tolist() == [[0, 0, 0.5], [0, 0.5, 0]]
    arrows = panel.findobj(Quiver)[0]
    drawn = zip(arrows.X, arrows.Y, arrows.U, arrows.V, strict=True)  # column, row, right, down
    assert sorted(drawn) == [(1, 1, -1, 0), (2, 0, 0, 1)]
