"""epsilon_decay_td.py: the schedule by hand, its use in the policy, and the whole on its task."""
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import epsilon_decay_td as td


def test_schedule_by_hand():
    args = td.parse_args([])
    assert td.epsilon(args, 0) == 1.0
    np.testing.assert_allclose(td.epsilon(args, 1), 0.999, rtol=1e-6)
    np.testing.assert_allclose(td.epsilon(args, 1000), 0.36769542, rtol=1e-6)  # exp(1000 log 0.999)
    late = td.epsilon(args, jnp.array([4602, 4603, 10**6]))  # the floor is reached at step 4603
    np.testing.assert_allclose(late, [0.01000868, 0.01, 0.01], rtol=1e-4)
    assert td.epsilon(td.parse_args(["--end-e", "0.2"]), 5000) == np.float32(0.2)


@pytest.mark.parametrize("steps, explorers", [(0, 1000), (693, 500), (100_000, 10)])
def test_the_policy_explores_as_the_schedule_says(steps, explorers):
    """1,000 environments with evenly spread noise and greedy action 0: as many as epsilon says take the random action, 1."""
    args = td.parse_args(["--num-envs", "1000", "--num-centers", "3"])
    state = td.init_state(args, 0, 0.01)
    state = state._replace(written=jnp.int32(1000 * steps), weights=0 * state.weights)
    noise = (jnp.arange(1000) + 0.5) / 1000, jnp.ones(1000, int), jax.random.split(jax.random.key(0), 1000)
    _, (transition, _) = td.vector_step(args, state, noise)
    assert abs(int(transition.action.sum()) - explorers) <= 1


def test_the_first_step_of_the_warm_up_counts_as_step_0():
    args = td.parse_args(["--num-envs", "4", "--buffer-size", "2000", "--num-centers", "3"])
    state = td.init_state(args, 0, 0.01)
    assert int(state.written) == 0
    state, _ = td.train_chunk(args, args.warm_up, 0, state)
    assert int(state.written) // 4 == args.warm_up == 250


def test_learns_and_shows_epsilon():
    process = subprocess.run([sys.executable, td.__file__, "--num-seeds", "4", "--seed", "100", "--json"], capture_output=True, text=True)
    report = json.loads(process.stdout)
    assert all(row["solved_at"] and row["solved_at"] <= 250_000 for row in report["runs"]), report["runs"]
    assert sum(row["eval_mean"] >= 475 for row in report["runs"]) >= 3, report["runs"]
    lines = [line for line in process.stderr.splitlines() if line.startswith("step ")]
    assert [float(line.split("epsilon ")[-1]) for line in lines[:2]] == [0.502, 0.269]
