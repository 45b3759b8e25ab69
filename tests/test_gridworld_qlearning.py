"""gridworld_qlearning.py against value iteration, a replay in NumPy, and steps by hand."""

import itertools
import warnings
from types import SimpleNamespace

import jax
import matplotlib.pyplot as plt
import numpy as np

import gridworld_qlearning as grid

MOVES = np.array([(0, 1), (1, 0), (0, -1), (-1, 0)])
RIGHT, DOWN, LEFT, UP = range(4)
equal = np.testing.assert_array_equal


def run(flags):
    return grid.main(flags.split())


def replay(seed, learning_rate, gamma, epsilon):
    """Q after six blocks on 7 x 6 cells, and the mean episode length of each two blocks.

    A step to the goal is worth 1, each other one -0.25.
    """
    q_table, cell, length = np.zeros((7, 6, 4), np.float32), (6, 5), 0
    lengths, key = [[], [], []], jax.random.key(seed)
    for block in range(6):
        key, key_explore, key_ties = jax.random.split(key, 3)
        explore = np.asarray(jax.random.uniform(key_explore, 1000)) < np.float32(epsilon)
        uniforms = np.asarray(jax.random.uniform(key_ties, 1000))
        for explores, uniform in zip(explore, uniforms, strict=True):
            best = np.flatnonzero(q_table[cell] == q_table[cell].max())
            candidates = range(4) if explores else best
            action = candidates[int(uniform * np.float32(len(candidates)))]
            to = tuple(np.clip(cell + MOVES[action], 0, [6, 5]).tolist())  # walls are in the way
            length += 1
            target = 1 if to == (0, 0) else np.float32(gamma) * q_table[to].max() - np.float32(0.25)
            q_table[cell][action] += np.float32(learning_rate) * (target - q_table[cell][action])
            if to == (0, 0):
                lengths[block // 2].append(length)
                to, length = (6, 5), 0
            cell = to
    return q_table, [np.mean(lines) for lines in lengths]


def test_learning_is_that_of_an_independent_replay(monkeypatch, capsys):
    """A sweep of all flags. Halves are exact but for 1e-45. Five blocks become three lines of two.

    Episodes last longer than an interval where nothing is learned. Their earlier steps count.
    """
    env_step = grid.env_step

    def costly_step(*call):
        next_cell, reward, terminated = env_step(*call)
        return next_cell, reward - 0.25 * ~terminated, terminated

    monkeypatch.setattr(grid, "env_step", costly_step)
    monkeypatch.setattr(grid, "MAX_TABLES", 8)
    flags = "--grid-size 7 6 --total-timesteps 4001 --log-interval 1001 --num-seeds 2 --seed 5"
    results = run(f"{flags} --learning-rate 0 0.5 --gamma 0.5 0.25 --epsilon 0.3 0.75")
    equal(results["timesteps"], [2000, 4000, 6000])
    assert "are shown" not in capsys.readouterr().out  # no table is left out
    runs = list(itertools.product([0, 0.5], [0.5, 0.25], [0.3, 0.75], [5, 6]))
    for i in 0, 3, 9, 10, 12, 15:
        rate, gamma, epsilon, seed = runs[i]
        q_table, lengths = replay(seed, rate, gamma, epsilon)
        np.testing.assert_allclose(results["q_table"][i], q_table, rtol=0, atol=1e-30)
        np.testing.assert_allclose(results["steps_per_episode"][:, i], lengths, rtol=1e-6)
        saved = [results[name][i] for name in ("learning_rate", "gamma", "epsilon", "seed")]
        assert saved == [rate, gamma, epsilon, seed]
    np.testing.assert_allclose(results["returns"], 1.25 - results["steps_per_episode"] / 4, 1e-5)
    equal(results["greedy_steps"], [np.inf] * 8 + [11] * 8)


REPORT = """
gamma 0  mean of the agents' tables
. 0.000  < 1.000  . 0.000
^ 1.000  . 0.000  . 0.000
gamma 0.5  mean of the agents' tables
. 0.000  < 1.000  < 0.500
^ 1.000  < 0.500  < 0.250
the first 2 of 3 tables are shown
gamma 0  value of the start 0.00000  0 of 3 greedy agents reach the goal
gamma 0.5  value of the start 0.25000  3 of 3 greedy agents reach the goal, in at most 3 steps
gamma 0.25  value of the start 0.06250  3 of 3 greedy agents reach the goal, in at most 3 steps
"""


def test_tables_are_printed(capsys, monkeypatch):
    """With learning rate 1 they are exact. The last lines describe all agents, not their mean."""
    monkeypatch.setattr(grid, "MAX_TABLES", 2)
    run("--grid-size 2 3 --learning-rate 1 --gamma 0 0.5 0.25 --num-seeds 3 --total-timesteps 1e4")
    assert capsys.readouterr().out.endswith(REPORT)
    q_table = np.zeros((3, 1, 2, 4))
    q_table[range(3), 0, 1, [LEFT, DOWN, UP]] = [0.25, 0.5, 1.5]
    line = grid.summary(SimpleNamespace(grid_size=[1, 2]), q_table, np.array([7, np.inf, 3]))
    assert line.startswith("value of the start 0.75000  2 of 3 ")
    assert line.endswith(" in at most 7 steps")


def test_the_longest_path_is_walked_to_its_end():
    greedy = np.eye(4)[[[LEFT, LEFT, LEFT], [RIGHT, RIGHT, UP], [UP, LEFT, LEFT]]]  # a snake
    assert grid.evaluate(SimpleNamespace(grid_size=[3, 3]), SimpleNamespace(q_table=greedy)) == 8


def test_the_picture_has_an_arrow_where_something_is_known(tmp_path, monkeypatch):
    """The image is the greatest value of each cell; nothing known gives no arrow and no warning."""
    known = np.zeros((2, 3, 4))
    known[0, 1], known[1, 0], known[1, 2, DOWN] = [1, 2, 5, 4], [-2, -1, -2, -3], 0.5
    monkeypatch.setattr(plt, "close", lambda: None)
    with warnings.catch_warnings(action="error"):
        grid.plot(tmp_path / "x.png", ["gamma 1", "gamma 0"], [known, np.zeros((2, 3, 4))])
    axes, other, *_ = plt.gcf().axes
    assert (axes.get_title(), other.get_title()) == ("gamma 1", "gamma 0")
    equal(axes.images[0].get_array(), known.max(axis=-1))
    [arrows] = axes.collections
    assert not other.collections and (arrows.angles, arrows.pivot) == ("xy", "middle")
    drawn = np.stack([arrows.Y, arrows.X, arrows.V, arrows.U], axis=1).tolist()
    assert drawn == [[0, 1, 0, -1], [1, 0, 1, 0], [1, 2, 1, 0]]  # row, column, down, right


def test_default_runs_are_exact_at_the_start_and_the_same_alone(capsys, monkeypatch):
    """A run has the same bits alone, among seven on two devices, and in longer intervals.

    Vmapped, as on a GPU, it rounds differently.
    """
    assert abs(run("--seed 3")["q_table"][0, 7, 11].max() - 0.9**17) < 1e-5
    assert capsys.readouterr().out.startswith("grid world, 1 run on 1 x ")
    seven = "--num-seeds 7 --total-timesteps 1e4 --log-interval 5000"
    many = run(seven)
    assert many["q_table"].shape == (7, 8, 12, 4) and len(many["timesteps"]) == 2
    assert len(np.unique(many["q_table"], axis=0)) == 7
    alone = run("--seed 6 --total-timesteps 1e4")
    equal(alone["q_table"][0], many["q_table"][6])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    np.testing.assert_allclose(run(seven)["q_table"], many["q_table"], rtol=1e-4)
