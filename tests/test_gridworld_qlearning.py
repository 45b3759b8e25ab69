"""gridworld_qlearning.py: learning replayed in NumPy, exact values, its policy and its picture.

The fixture `learning` trains in a grid with a trap, and records every step. Each test then checks
one fact of that record.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_independent, halves, one_run, train, watch
from matplotlib.figure import Figure
from matplotlib.quiver import Quiver

import gridworld_qlearning as grid

close = np.testing.assert_allclose
RIGHT, DOWN, LEFT, UP = range(4)
MOVES = {RIGHT: (0, 1), DOWN: (1, 0), LEFT: (0, -1), UP: (-1, 0)}
ROWS, COLUMNS = 3, 5
START, GOAL, TRAP = (2, 4), (0, 0), (1, 0)
FLAGS = "--num-rows 3 --num-columns 5 --total-timesteps 2500 --num-intervals 2 --seed 5"
INTERVAL = 2000  # steps: 2,500 are rounded up to three blocks of 1,000, and these to twice two
env_step = grid.env_step


def with_trap(run, cell, action):
    """Each step costs 0.25. Below the goal is a trap: it costs 1 and ends the episode."""
    next_cell, reward, terminated = env_step(run, cell, action)
    trapped = jnp.all(next_cell == jnp.array(TRAP))
    return next_cell, reward - jnp.where(trapped, 1.0, 0.25), terminated | trapped


@pytest.fixture(scope="module")
def learning():
    run = one_run(grid, FLAGS, learning_rate=0.5, gamma=0.8, epsilon=0.4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "env_step", with_trap)
        steps = watch(patch, grid, "env_step", "cell action")
        last, lines = train(grid, run, grid.init_state(run))
    return SimpleNamespace(run=run, lines=lines, steps=steps, last=last)


def test_moves_stay_inside_the_grid_and_end_at_the_goal(learning):
    cell = START
    for step in learning.steps:
        assert tuple(step.cell) == cell
        next_cell, reward, terminated = step.out
        row, column = np.add(cell, MOVES[int(step.action)])
        cell = (np.clip(row, 0, ROWS - 1), np.clip(column, 0, COLUMNS - 1))
        assert tuple(next_cell) == cell
        assert reward == {GOAL: 0.75, TRAP: -1}.get(cell, -0.25)
        assert terminated == (cell in (GOAL, TRAP))
        cell = START if terminated else cell


def test_each_step_is_an_update_of_q_learning(learning):
    q = np.zeros((ROWS, COLUMNS, 4))
    for step in learning.steps[:2500]:  # those that are rounded up teach nothing
        next_cell, reward, terminated = step.out
        entry = (*step.cell, step.action)
        target = reward + 0.8 * q[tuple(next_cell)].max() * (not terminated)  # gamma 0.8
        q[entry] += 0.5 * (target - q[entry])  # learning rate 0.5
    close(learning.last.q_table, q, atol=1e-6)


def test_an_interval_counts_its_steps_and_the_episodes_that_ended_from_their_start(learning):
    length = 0
    for line, steps in zip(learning.lines, halves(learning.steps), strict=True):
        lengths = []
        for step in steps:
            length += 1
            if step.out[2]:  # terminated
                lengths.append(length)
                length = 0
        assert (line["episodes"], line["episode_steps"]) == (len(lengths), sum(lengths))
    assert len(learning.steps) == learning.last.timesteps == 2 * INTERVAL
    assert learning.run.interval_timesteps == INTERVAL


# The best actions in a column of the grid: one to four of them. They lead to each of the columns.
BEST = {1: [RIGHT], 2: [RIGHT, LEFT], 3: [RIGHT, LEFT, UP], 4: [RIGHT, DOWN, LEFT, UP]}


def test_exploring_actions_and_best_actions_are_equally_likely(monkeypatch):
    steps = watch(monkeypatch, grid, "env_step", "cell action")
    q = np.zeros((ROWS, COLUMNS, 4), np.float32)
    for column, best in BEST.items():
        q[:, column, best] = 0.5

    @jax.jit
    def train_once(epsilon):  # the table stays as it is
        run = one_run(grid, FLAGS, learning_rate=0.0, epsilon=epsilon)
        return grid.train_interval(run, grid.init_state(run)._replace(q_table=jnp.array(q)))[1]

    for epsilon in (0.0, 0.3):
        steps.clear()
        jax.block_until_ready(train_once(epsilon))
        jax.effects_barrier()
        for column, best in BEST.items():
            taken = [int(step.action) for step in steps if step.cell[1] == column]
            p = np.full(4, epsilon / 4)
            p[best] += (1 - epsilon) / len(best)
            off = np.abs(np.bincount(taken, minlength=4) - len(taken) * p)
            assert np.all(off <= 5 * np.sqrt(len(taken) * p * (1 - p)) + 1e-9)
            assert len(taken) > 100


def test_only_equal_values_are_equally_good():
    """Far from the goal, values of neighbors differ little."""
    values = 1e-30 * jnp.array([0.1, 0.11, 0.1, 0.0])
    taken = {int(grid.select_action(values, False, jnp.array(u))) for u in (0.0, 0.4, 0.99)}
    assert taken == {DOWN}


def test_actions_of_other_steps_blocks_and_runs_are_independent(monkeypatch):
    """One action is best everywhere, and 40 % of the steps explore."""
    steps = watch(monkeypatch, grid, "env_step", "cell action")

    @jax.jit
    def train_once(seed):
        run = one_run(grid, FLAGS, learning_rate=0.0, epsilon=0.4, seed=seed)
        table = jnp.zeros((ROWS, COLUMNS, 4)).at[..., DOWN].set(1.0)
        return grid.train_interval(run, grid.init_state(run)._replace(q_table=table))[1]

    jax.block_until_ready([train_once(seed) for seed in (1, 2)])
    jax.effects_barrier()
    p, (one, other) = [0.1, 0.7, 0.1, 0.1], np.split(np.array([x.action for x in steps]), 2)
    assert_independent(one[1:], one[:-1], p)
    assert_independent(one[1000:], one[:-1000], p)
    assert_independent(one, other, p)


def test_runs_find_a_shortest_path_and_the_exact_value_of_the_start():
    results = grid.main("--gamma 0.8 0.9 --num-seeds 2 --seed 3".split())
    exact = results["runs"]["gamma"] ** 17  # the goal is 7 + 11 steps away; the last one pays
    close(results["learned"]["start_value"], exact, rtol=1e-4)
    close(results["learned"]["q_table"][:, 7, 11].max(axis=1), exact, rtol=1e-4)
    assert results["learned"]["greedy_steps"].tolist() == [18] * 4


def test_steps_per_episode_are_nan_until_an_episode_ends(capsys):
    """The first random episode in a grid of 40 x 40 takes far more than 1,000 steps."""
    grid.main("--num-rows 40 --num-columns 40 --total-timesteps 1000".split())
    assert "episode_steps nan" in capsys.readouterr().out


def greedy_steps(*rows):
    """Steps to the goal of a policy, given the greedy action of each cell."""
    run = SimpleNamespace(num_rows=len(rows), num_columns=len(rows[0]))
    state = SimpleNamespace(q_table=jnp.eye(4)[jnp.array(rows)])
    return grid.evaluate(run, state)["greedy_steps"]


def test_greedy_steps_are_counted_along_a_path_or_infinite_if_it_never_arrives():
    """The longest path visits each of 28 cells."""
    up_and_back = [RIGHT, RIGHT, RIGHT, UP], [UP, LEFT, LEFT, LEFT]
    assert greedy_steps([LEFT, LEFT, LEFT, LEFT], *up_and_back, *up_and_back, *up_and_back) == 27
    assert greedy_steps([LEFT, LEFT], [UP, DOWN]) == np.inf


@pytest.fixture
def learned():
    """Four agents in two rows and three columns. Agent 0 belongs to another setting."""
    q_table = np.zeros((4, 2, 3, 4))
    q_table[0, 0, 2, UP] = 9
    q_table[1, 1, 1, LEFT] = 1
    q_table[2, 1, 1, DOWN] = 0.5  # so the mean of the largest values is 0.5, not 0.25
    q_table[2, 0, 2, DOWN] = 0.5
    q_table[1:, 1, 0, UP] = 1
    q_table[1:, 0, 1, RIGHT] = 0.25
    steps, start_value = np.array([80, np.inf, 5, 3]), np.array([9, 0.25, 2, 0])
    return {"q_table": q_table, "greedy_steps": steps, "start_value": start_value}


def test_a_setting_is_reported_with_mean_values_best_moves_and_its_longest_path(learned):
    summary, *rows = grid.report(learned, slice(1, 4)).splitlines()
    assert "value of the start 0.75000" in summary
    assert "2 of 3 greedy agents reach the goal" in summary
    assert "longest path 5 steps" in summary
    assert rows[0].split() == [".", "0.000", ">", "0.250", "v", "0.167"]
    assert rows[1].split() == ["^", "1.000", "<", "0.500", ".", "0.000"]
    assert "longest path nan" in grid.report(learned, slice(1, 2))  # none arrives


def test_a_setting_is_drawn_with_its_mean_values_and_best_moves(monkeypatch, learned):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    settings = [("gamma 0.8", slice(0, 1)), ("gamma 0.9", slice(1, 3))]
    grid.draw(SimpleNamespace(plot="x.png"), settings, {"learned": learned})
    grid.draw(SimpleNamespace(plot="x.png"), settings[:1], {"learned": learned})
    assert figures[0].get_figheight() > figures[1].get_figheight() + 1  # inches, for a second panel
    (panel,) = [axes for axes in figures[0].axes if axes.get_title() == "gamma 0.9"]
    assert panel.images[0].get_array().tolist() == [[0, 0.25, 0.25], [1, 0.75, 0]]
    for image in panel.images:
        assert "max_a Q" in image.colorbar.ax.get_ylabel()
    assert panel.images[0].get_extent() == [-0.5, 2.5, 1.5, -0.5]  # cells around the arrows
    arrows = panel.findobj(Quiver)[0]
    assert arrows.angles == "xy" and panel.yaxis_inverted()  # the next row is farther down
    drawn = zip(arrows.X, arrows.Y, arrows.U, arrows.V, strict=True)  # column, row, right, down
    assert sorted(drawn) == [(0, 1, 0, -1), (1, 0, 1, 0), (1, 1, -1, 0), (2, 0, 0, 1)]
