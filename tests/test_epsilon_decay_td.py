"""epsilon_decay_td.py: the schedule by hand, and its use: an offset by one step would be seen."""

import jax
import jax.numpy as jnp
import numpy as np

import epsilon_decay_td as td


def test_schedule_by_hand():
    args = td.parse_args([])
    assert td.epsilon(args, 0) == 1.0
    np.testing.assert_allclose(td.epsilon(args, 1), 0.999, rtol=1e-6)
    np.testing.assert_allclose(td.epsilon(args, 1000), 0.36769542, rtol=1e-5)  # exp(1000 ln 0.999)
    late = td.epsilon(args, jnp.array([4602, 4603, 10**6]))  # the floor is reached in step 4,603
    np.testing.assert_allclose(late, [0.01000868, 0.01, 0.01], rtol=1e-4)


def test_first_two_steps_explore_as_the_schedule_says():
    """1,000 evenly spread uniform numbers: epsilon is the share of environments that explore.

    Action 0 is greedy, since all values are 0; action 1 is the random one. Epsilon is 1 in the
    first vector step, 0.5 in the second, 0.25 in the third.
    """
    args = td.parse_args(["--num-envs", "1000", "--num-centers", "3", "--epsilon-decay", "0.5"])
    state = td.init_state(args, 0, 0.01)
    keys = jax.random.split(jax.random.key(0), 1000)
    uniform = (jnp.arange(1000) + 0.5) / 1000
    explored = []
    for _ in range(3):
        random = jnp.zeros(args.batch_size), keys, uniform, jnp.ones(1000, int)
        state, _ = td.train_step(args, state._replace(weights=0 * state.weights), random)
        slots = (state.written - 1000 + jnp.arange(1000)) % args.buffer_size
        explored.append(int(state.buffer.action[slots].sum()))
    assert explored == [1000, 500, 250]


def test_evaluation_is_greedy_also_while_epsilon_is_1():
    """Weights that push right wherever the pole stands: it falls within 8 to 11 steps."""
    args = td.parse_args(["--num-centers", "3", "--sigma", "1000", "--eval-episodes", "50"])
    state = td.init_state(args, 0, 0.01)._replace(weights=jnp.array([[0.0] * 3, [1.0] * 3]))
    returns = td.evaluate(args, state)
    assert td.epsilon(args, state.vector_steps) == 1
    assert 8 <= returns.min() and returns.max() <= 11
