"""The recipes of the grid world do what they promise.

Most tests choose the actions, from (1, 2) to the goal (0, 0). Values are worked out by hand.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GRID, jit, load, one_run
from patches import changed
from probes import Cliff, Corridor, tabulate

RIGHT, DOWN, LEFT, UP = range(4)
TWO_BY_THREE = "--num-rows 2 --num-columns 3"
BEST = [UP, LEFT, LEFT]  # a shortest path
ZEROS = jnp.zeros((2, 3, 4))
UPWARDS = ZEROS.at[1, 2, UP].set(5.0).at[0, 2].set(jnp.array([1, 2, 6, 3]))
EQUAL = (ZEROS + 0.4).at[0, 0].set(0.0)  # all values but those of the goal


def act(script, run, actions, *more_draws, **state):
    """Take these actions. The agent explores: a uniform number chooses among all four actions."""
    step, state = jit(script.train_step, run), script.init_state(run)._replace(**state)
    for action in actions:
        state, _ = step(state, (jnp.array(True), (action + 0.5) / 4, *more_draws))
    return state


def assert_table(state, expected, others=ZEROS):
    """The table has the `expected` values of (row, column, action), and those of `others`."""
    table = np.array(others)
    for place, value in expected.items():
        table[place] = value
    np.testing.assert_allclose(state.q_table, table, atol=1e-6)


def test_expected_sarsa_learns_the_mean_value_of_the_next_action():
    script = changed("expected_sarsa")
    run = one_run(script, TWO_BY_THREE, epsilon=0.2, learning_rate=0.5, gamma=0.9)
    state = act(script, run, [UP], q_table=UPWARDS)
    assert state.q_table[1, 2, UP] == pytest.approx(5.0 + 0.5 * (0.9 * (0.8 * 6 + 0.2 * 3) - 5.0))


def test_sarsa_learns_the_value_of_the_action_that_it_takes_next():
    script = changed("sarsa")
    run = one_run(script, TWO_BY_THREE, learning_rate=0.5, gamma=0.9)
    state = act(script, run, [DOWN], q_table=UPWARDS, action=jnp.array(UP))  # up, and then down
    assert (state.cell.tolist(), state.action) == ([0, 2], DOWN)
    assert state.q_table[1, 2, UP] == pytest.approx(5.0 + 0.5 * (0.9 * 2.0 - 5.0))


SOLUTIONS = {
    "expected_sarsa": (Cliff, "", True),
    "sarsa": (Cliff, "", True),
    "monte_carlo": (Corridor, "", True),
    "dyna_q": (Cliff, "--planning-steps 100 --total-timesteps 1000", False),
    "eligibility_traces": (Cliff, "", False),
    "slippery_moves": (Corridor, "--slip 0.4", False),
}


@pytest.mark.parametrize("recipe", SOLUTIONS)
def test_a_solution_finds_the_values_of_a_probe(recipe):
    probe, flags, on_policy = SOLUTIONS[recipe]
    tabulate(changed(recipe), probe, flags, on_policy=on_policy)


def test_a_probe_says_that_exploration_was_left_out_of_an_expected_target():
    with pytest.raises(AssertionError, match="as if random actions did not count"):
        tabulate(load(GRID), Corridor, on_policy=True)


def exact_return(table, epsilon):
    """Expected return of the epsilon-greedy policy on the cliff, by linear algebra."""
    best = table > table.max(axis=-1, keepdims=True) - 0.01  # equal values, but for roundings
    policy = epsilon / 4 + (1 - epsilon) * best / best.sum(axis=-1, keepdims=True)
    transitions, rewards = np.zeros((48, 48)), np.zeros(48)
    for (row, column, action), probability in np.ndenumerate(policy):
        next_row = np.clip(row + [0, 1, 0, -1][action], 0, 3)
        next_column = np.clip(column + [1, 0, -1, 0][action], 0, 11)
        falls = next_row == 3 and 0 < next_column < 11
        cell, next_cell = 12 * row + column, 36 if falls else 12 * next_row + next_column
        rewards[cell] += probability * (-100 if falls else -1)
        if next_cell != 47:  # the goal
            transitions[cell, next_cell] += probability
    return np.linalg.solve(np.eye(48) - transitions, rewards)[36]


@pytest.mark.parametrize("recipes, path", [(["cliff"], [13]), (["cliff", "sarsa"], [15, 16, 17])])
def test_the_return_on_the_cliff_is_that_of_the_greedy_path_with_random_actions(recipes, path):
    """Q-learning walks along the cliff, and SARSA keeps away from it."""
    flags = "--total-timesteps 3e5 --num-intervals 2 --num-seeds 4 --learning-rate 0.03"
    results = changed(*recipes).main(flags.split())
    learned, curves = results["learned"], results["curves"]
    assert set(learned["greedy_steps"]) <= set(path)
    exact = np.mean([exact_return(table, epsilon=0.1) for table in learned["q_table"]])
    online = curves["returns"][-1].sum() / curves["episodes"][-1].sum()
    assert online == pytest.approx(exact, abs=2.5)  # about -51, and between -23 and -20


def test_moves_slip_with_the_probability_that_is_asked_for():
    script = changed("slippery_moves")
    run = one_run(script, "--num-rows 1 --num-columns 3 --eval-episodes 2000", slip=0.4)
    left = jnp.zeros((1, 3, 4)).at[:, :, LEFT].set(1.0)
    state = script.init_state(run)._replace(q_table=left)  # the policy: left, always
    # Left: 0.6 + 0.1; right: 0.1; up or down, into a wall: 0.2. So the mean steps to the goal are
    # s1 = 1 + 0.1 s2 + 0.2 s1 from cell 1, and s2 = 1 + 0.7 s1 + 0.3 s2 from cell 2.
    _, s2 = np.linalg.solve([[0.8, -0.1], [-0.7, 0.7]], [1, 1])
    steps_from_2 = jit(script.evaluate, run)(state)["greedy_steps"]
    assert steps_from_2 == pytest.approx(s2, abs=0.15)  # 3.06; five deviations
    state = act(script, run, [UP], (jnp.array(True), LEFT), q_table=left)
    assert state.cell.tolist() == [0, 1]  # it slipped to the left, and learned about up
    assert np.argwhere(state.q_table != left).tolist() == [[0, 2, UP]]


@pytest.mark.filterwarnings("error")
def test_slippery_agents_that_never_arrive_take_infinitely_many_steps():
    learned = {"greedy_steps": np.full(2, np.inf), "start_value": np.zeros(2)}
    text = changed("slippery_moves").report(learned | {"q_table": np.zeros((2, 1, 3, 4))}, ...)
    assert "0 of 2 greedy agents reach the goal in all episodes  mean steps inf" in text


def test_dyna_q_makes_as_many_planned_updates_as_it_is_asked_for():
    """One action is tried: down, into the wall. Its target is 0.5 * 0.4."""
    script = changed("dyna_q")
    run = one_run(script, f"{TWO_BY_THREE} --planning-steps 3", learning_rate=0.5, gamma=0.5)
    state = act(script, run, [DOWN], jax.random.key(0), q_table=EQUAL)
    assert_table(state, {(1, 2, DOWN): 0.2 + 0.2 / 2**4}, others=EQUAL)  # one real, three planned


def test_dyna_q_plans_the_values_of_its_model_and_of_no_other_action():
    """Four actions are tried, the last one reaches the goal. One real update each is not enough."""
    script = changed("dyna_q")
    run = one_run(script, f"{TWO_BY_THREE} --planning-steps 1000", learning_rate=0.5, gamma=0.5)
    state = act(script, run, [DOWN, *BEST], jax.random.key(0), q_table=EQUAL)
    expected = {(0, 1, LEFT): 1.0, (0, 2, LEFT): 0.5, (1, 2, UP): 0.25}
    assert_table(state, expected | {(1, 2, DOWN): 0.5 * 0.4}, others=EQUAL)


def traces(*actions, q_table=ZEROS):
    script = changed("eligibility_traces")
    run = one_run(script, TWO_BY_THREE, learning_rate=0.5, gamma=0.8, trace_decay=0.5)
    return act(script, run, actions, q_table=q_table)


def test_a_reward_follows_the_traces_back_to_the_start_of_its_episode():
    """Equal values are all best, so nothing is cut. To run into the wall twice counts once."""
    expected = {(0, 1, LEFT): 0.5, (0, 2, LEFT): 0.5 * 0.4, (1, 2, DOWN): 0.5 * 0.4**3}
    # The last step is one of the next episode. It changes nothing before.
    expected[1, 2, UP] = 0.08 + 0.5 * (0.8 * 0.2 - 0.08)
    assert_table(traces(DOWN, DOWN, *BEST, UP), expected)


def test_an_action_that_is_not_a_best_one_cuts_the_traces():
    """The second action is worth 0, and another one 0.1. Two more actions lead to the goal."""
    state = traces(LEFT, UP, LEFT, q_table=ZEROS.at[1, 1, DOWN].set(0.1))
    # The first error is 0.8 * 0.1, the second 0, the third 1. It does not reach (1, 2, LEFT).
    others = {(1, 1, DOWN): 0.1, (1, 1, UP): 0.2, (0, 1, LEFT): 0.5}
    assert_table(state, others | {(1, 2, LEFT): 0.04})


def test_monte_carlo_learns_the_return_after_the_first_visit():
    """On a small cliff: the agent falls twice, and then walks around it. The goal is (1, 2)."""
    script = changed("monte_carlo", "cliff")
    run = one_run(script, TWO_BY_THREE, learning_rate=0.5, gamma=0.5)
    around = [UP, RIGHT, RIGHT, DOWN]
    assert_table(act(script, run, [RIGHT, RIGHT, *around[:3]]), {})  # not before the end
    state = act(script, run, [RIGHT, RIGHT, *around, *around])
    returns = {(0, 2, DOWN): -1.0, (0, 1, RIGHT): -1.5, (0, 0, RIGHT): -1.75, (1, 0, UP): -1.875}
    twice = {place: 0.75 * value for place, value in returns.items()}
    assert_table(state, twice | {(1, 0, RIGHT): 0.5 * (-100 - 50 - 1.875 / 4)})
