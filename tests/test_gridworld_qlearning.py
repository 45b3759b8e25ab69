"""gridworld_qlearning.py against value iteration, a replay in NumPy, and steps by hand."""

import itertools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import gridworld_qlearning as grid

MOVES = np.array([(0, 1), (1, 0), (0, -1), (-1, 0)])
RIGHT, DOWN, LEFT, UP = range(4)
RANKINGS = list(itertools.permutations(range(4)))


def move(shape, cell, action):
    """Return the cell (row, column) that an action leads to. Walls are in the way."""
    return tuple(np.clip(cell + MOVES[action], 0, np.array(shape) - 1))


def run(flags, *files):
    return grid.main([*flags.split(), *map(str, files)])


def test_one_update_into_the_goal_by_hand():
    """The goal's own values and the start's do not count. The goal is cell 0, the start cell 5."""
    args = grid.parse_args("--grid-size 2 3 --gamma 0.5".split())
    first = grid.init_state(args, 0, 0.1)
    q_table = np.full((6, 4), 9.0, np.float32)
    q_table[1] = [1.0, 0.0, 2.0, 1.0]
    before = first._replace(q_table=jnp.array(q_table), cell=jnp.array(1))
    after, _ = grid.train_step(args, before, (False, 0))
    q_table[1, LEFT] = 2.0 + 0.1 * (1.0 - 2.0)
    np.testing.assert_allclose(after.q_table, q_table, rtol=1e-6)
    assert (first.cell, after.cell, after.episodes) == (5, 5, 1)


def test_greedy_steps_by_hand():
    """On a 3 x 3 grid: the longest path through all cells, a circle, and ties."""
    args = grid.parse_args("--grid-size 3 3".split())
    longest = {8: LEFT, 7: LEFT, 6: UP, 3: RIGHT, 4: RIGHT, 5: UP, 2: LEFT, 1: LEFT}
    short, circle = {8: UP, 5: UP, 2: LEFT, 1: LEFT}, {8: LEFT, 7: UP, 4: RIGHT, 5: DOWN}
    for path, steps in (longest, 8), (short, 4), (circle, np.inf), ({}, np.inf):
        q_table = np.zeros((9, 4))
        for cell, action in path.items():
            q_table[cell, action] = 1.0
        state = grid.init_state(args, 0, 0.1)._replace(q_table=jnp.array(q_table))
        assert grid.evaluate(args, state) == steps


def replay(args, seed, learning_rate):
    """Replay 6 blocks in NumPy with their random draws: Q (H, W, A), episodes per block."""
    q_table = np.zeros((*args.grid_size, 4), np.float32)
    episodes = np.zeros(6)
    start = cell = (args.grid_size[0] - 1, args.grid_size[1] - 1)
    key = jax.random.key(seed)
    for block in range(6):
        key, key_explore, key_ranking = jax.random.split(key, 3)
        explore = np.asarray(jax.random.uniform(key_explore, 1000)) < np.float32(args.epsilon)
        rankings = np.floor(np.float32(24) * jax.random.uniform(key_ranking, 1000)).astype(int)
        for explores, ranking in zip(explore.tolist(), rankings.tolist(), strict=True):
            best = q_table[cell] == q_table[cell].max()
            candidates = range(4) if explores else np.flatnonzero(best)
            action = max(candidates, key=RANKINGS[ranking].__getitem__)
            to = move(args.grid_size, cell, action)
            target = 1 if to == (0, 0) else np.float32(args.gamma) * q_table[to].max()
            q_table[cell][action] += np.float32(learning_rate) * (target - q_table[cell][action])
            episodes[block] += to == (0, 0)
            cell = start if to == (0, 0) else to
    return q_table, episodes


def test_learning_is_that_of_an_independent_replay(capsys):
    """Halves are exact in float32. Five blocks are three lines of two, rounded up."""
    flags = "--grid-size 4 3 --epsilon 0.3 --gamma 0.5 --total-timesteps 4001 --log-interval 1001"
    results = run(f"{flags} --num-seeds 2 --seed 5 --learning-rate 0 0.5")
    args = grid.parse_args(flags.split())
    np.testing.assert_array_equal(results["timesteps"], [2000, 4000, 6000])
    for i, (learning_rate, seed) in enumerate(itertools.product([0, 0.5], [5, 6])):
        q_table, episodes = replay(args, seed, learning_rate)
        np.testing.assert_array_equal(results["q_table"][i], q_table)
        steps_per_episode = 2000 / episodes.reshape(3, 2).sum(axis=1)
        np.testing.assert_allclose(results["steps_per_episode"][:, i], steps_per_episode, rtol=1e-6)
    np.testing.assert_array_equal(results["greedy_steps"], [np.inf, np.inf, 5, 5])
    table, value = results["q_table"].mean(axis=0), results["q_table"][2:, 3, 2].max(axis=1).mean()
    cells = [f"{'>v<^'[table[cell].argmax()]} {table[cell].max():.3f}" for cell in np.ndindex(4, 3)]
    cells = [". 0.000" if cell.endswith(" 0.000") else cell for cell in cells]
    assert capsys.readouterr().out.splitlines()[5:] == [
        *["  ".join(cells[i : i + 3]) for i in (0, 3, 6, 9)],
        "learning rate 0: value of the start 0.00000, goal reached by 0 of 2 greedy agents",
        f"learning rate 0.5: value of the start {value:.5f}, goal reached by 2 of 2 greedy agents,"
        " in at most 5 steps",
    ]


def test_one_run_prints_its_rate_and_draws_its_table(tmp_path, capsys):
    """The image is the greatest value of each cell; an arrow points where the greedy agent goes."""
    flags = "--grid-size 2 4 --total-timesteps 1000 --epsilon 1 --seed 3"
    table = run(flags, "--plot", tmp_path / "x.png")["q_table"][0]
    assert capsys.readouterr().out.startswith("grid world, 1 run on 1 x ")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    (axes, bar), _ = plt.gcf().axes, plt.close()
    np.testing.assert_array_equal(axes.images[0].get_array(), table.max(axis=-1))
    [arrows] = axes.collections
    assert (arrows.angles, arrows.pivot) == ("xy", "middle")
    drawn = np.stack([arrows.Y, arrows.X, arrows.V, arrows.U], axis=1).tolist()
    cells = [*np.ndindex(2, 4)][1:]  # the goal has no values
    assert sorted(drawn) == [[*cell, *MOVES[table[cell].argmax()]] for cell in cells]
    assert bar.get_xlabel() == "max_a of the agents' mean Q"


def test_the_printed_summary_by_hand(capsys):
    """Three agents of a rate, one of which never arrives, on a grid of 1 x 3 cells."""
    table = np.zeros((3, 1, 3, 4))
    table[:, 0, 2, LEFT], table[0, 0, 2, DOWN] = [0.1, 0.2, 0.6], 0.4
    table[:, 0, 2, UP] = -1.0
    table[:, 0, 0] = 9.0
    grid.print_rate(0.25, table, np.array([7.0, np.inf, 12.0]))
    start = "learning rate 0.25: value of the start 0.40000"
    reached = "goal reached by 2 of 3 greedy agents, in at most 12 steps"
    assert capsys.readouterr().out == f"{start}, {reached}\n"


def test_exploration_alone_is_a_random_walk():
    """Its mean number of steps to the goal solves a linear system."""
    matrix, cells = np.eye(12), list(np.ndindex(3, 4))
    for i, cell in enumerate(cells[1:], 1):
        for action in range(4):
            to = cells.index(move((3, 4), cell, action))
            matrix[i, to] -= 0.25 * (to > 0)
    mean_steps = np.linalg.solve(matrix, np.arange(12) > 0)[-1]
    results = run("--grid-size 3 4 --total-timesteps 400000 --epsilon 1 --learning-rate 0.5")
    error = np.mean(1 / results["steps_per_episode"]) * mean_steps - 1
    assert abs(error) < 4 / (4e5 / mean_steps) ** 0.5  # the deviation is about the mean


def test_whole_table_equals_value_iteration():
    """With much exploration every action is tried often enough in every cell."""
    exact = np.zeros((4, 5, 4))
    for _ in range(9):
        for row, column, action in np.ndindex(exact.shape):
            to = move((4, 5), (row, column), action)
            exact[row, column, action] = 1.0 if to == (0, 0) else 0.8 * exact[to].max()
    exact[0, 0] = 0.0  # the goal is terminal
    flags = "--grid-size 4 5 --epsilon 0.9 --learning-rate 0.5 --total-timesteps 4e5 --gamma 0.8"
    np.testing.assert_allclose(run(flags)["q_table"][0], exact, atol=1e-5)


def test_default_runs_are_exact_at_the_start_and_the_same_alone(monkeypatch):
    """A run has the same bits alone, among seven on two devices, and in longer progress lines."""
    alone = run("--seed 3 --log-interval 1e9")
    assert alone["greedy_steps"] == 18
    assert abs(alone["q_table"][0, 7, 11].max() - 0.9**17) < 1e-5
    monkeypatch.setattr(grid, "RUNS_AT_ONCE", 3)
    monkeypatch.setattr(grid, "MIN_AT_ONCE", 0)
    many = run("--num-seeds 7 --total-timesteps 1e4 --log-interval 5000")
    assert many["q_table"].shape == (7, 8, 12, 4) and len(many["timesteps"]) == 2
    assert len(np.unique(many["q_table"], axis=0)) == 7
    alone = run("--seed 6 --total-timesteps 1e4")
    np.testing.assert_array_equal(alone["q_table"][0], many["q_table"][6])
