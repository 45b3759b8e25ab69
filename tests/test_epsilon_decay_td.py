"""epsilon_decay_td.py: the schedule by hand, and its use: an offset by one step would be seen."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from td_tests import *  # noqa: F403  (what all three linear learners must pass)


@pytest.mark.parametrize(
    ("decay", "steps", "by_hand"),
    [
        (0.999, [0, 1, 1000, 4602, 4603, 10**6], [1, 0.999, 0.36769542, 0.01000868, 0.01, 0.01]),
        (0, [0, 1, 10**9], [1, 0.01, 0.01]),
        (1, [0, 1, 10**9], [1, 1, 1]),
        (0.9999999, [0, 10**7], [1, 0.36787942]),
        (0.99999999, [0, 10**8], [1, 0.36787944]),  # float32 would round the decay to 1
    ],
)
def test_schedule_by_hand(td, decay, steps, by_hand):
    args = td.parse_args(["--end-e", "0.01", "--epsilon-decay", str(decay)])
    epsilon = jax.jit(lambda steps: td.epsilon(args, steps))(jnp.array(steps))
    np.testing.assert_allclose(epsilon, by_hand, rtol=1e-4)
    half = td.parse_args(["--start-e", "0.5", "--end-e", "0", "--epsilon-decay", str(decay)])
    assert td.epsilon(half, 0) == 0.5


def test_first_steps_explore_as_the_schedule_says(td):
    """Action 0 is greedy, since all values are 0; action 1 is the random one."""
    flags = "--num-envs 1000 --num-centers 3 --end-e 0.2 --epsilon-decay 0.5"
    args = td.parse_args(flags.split())
    state = td.init_state(args, 0, 0.01)
    keys = jax.random.split(jax.random.key(0), 1000)
    uniform = (jnp.arange(1000) + 0.5) / 1000  # evenly spread
    draws = jnp.zeros(args.batch_size), keys, uniform, jnp.ones(1000, int)
    train_step = jax.jit(partial(td.train_step, args))
    explored = []
    for _ in range(4):
        state, _ = train_step(state._replace(weights=0 * state.weights), draws)
        slots = (state.written - 1000 + jnp.arange(1000)) % args.buffer_size
        explored.append(int(state.buffer.action[slots].sum()))
    assert explored == [1000, 500, 250, 200]
