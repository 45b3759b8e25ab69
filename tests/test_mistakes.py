"""A copy of a learner with a planted mistake does not solve the probes of probes.py."""

import probes
import pytest
from conftest import DQN, GRID, PARALLEL, PPO, PQN, REPLAY, path_of
from probes import Apart, Bandit, Cliff, Coin, Corridor, Endless, Fork, Later, Lengths


def with_mistake(path, right, wrong, folder):
    """Import a copy of a script in which one text is replaced."""
    text = path.read_text()
    assert text.count(right) == 1, f"{path.name} has changed: change this text of MISTAKES, too"
    copy = folder / path.name
    copy.write_text(text.replace(right, wrong))
    return probes.import_file(copy)


MAXIMUM = "jnp.where(terminated, 0.0, jnp.max(state.q_table[*next_cell]))"
ALL_BEST = (
    "jnp.where(terminated, 0.0, jnp.sum(state.q_table[*next_cell],"
    " where=state.q_table[*next_cell] == jnp.max(state.q_table[*next_cell])))"
)
NEXT_START = "jnp.max(state.q_table[*jnp.where(terminated, start(run), next_cell)])"
RATE = "jnp.where(state.timesteps < run.total_timesteps, run.learning_rate, 0.0)"
BATCH = "key, key_batch = jax.random.split(state.key)"
ACTIONS = "uniform = jax.random.uniform(key_uniform,"
STEPS = "step_keys = jax.random.split(key_step,"
RESET = "keys = jax.random.split(key_reset, run.num_envs)"
ENDS = "        terminated=terminated,\n"
MISTAKES = {
    "no discount": (GRID, Corridor, "+ run.gamma * next_value", "+ next_value"),
    "a value beyond the end": (GRID, Bandit, MAXIMUM, NEXT_START),
    "a wrong next action": (GRID, Cliff, MAXIMUM, "state.q_table[*next_cell][action]"),
    "random actions count": (GRID, Corridor, MAXIMUM, "jnp.mean(state.q_table[*next_cell])"),
    "two best actions count twice": (GRID, Fork, MAXIMUM, ALL_BEST),
    "learning goes on beyond the end of the run": (GRID, Cliff, RATE, "run.learning_rate"),
    "one key for all batches": (
        REPLAY,
        Apart,
        BATCH,
        "key, key_batch = state.key, jax.random.key(0)",
    ),
    "one key for all actions": (
        PARALLEL,
        Apart,
        ACTIONS,
        ACTIONS.replace("key_uniform", "jax.random.key(0)"),
    ),
    "one key for all steps": (
        PARALLEL,
        Coin,
        STEPS,
        STEPS.replace("key_step", "jax.random.key(0)"),
    ),
    "one key for all environments": (
        PARALLEL,
        Apart,
        RESET,
        "keys = jnp.repeat(key_reset[None], run.num_envs)",
    ),
    "a time limit taken for an end": (
        PPO,
        Endless,
        "jnp.where(terminated, 0.0, values(next_obs))",
        "jnp.where(terminated | truncated, 0.0, values(next_obs))",
    ),
    "a return that crosses a time limit": (
        PQN,
        Endless,
        "jnp.where(transition.truncated, next_value, later)",
        "later",
    ),
    "the value of the observation before": (
        DQN,
        Later,
        "q_values(bounds, target_params, transition.next_obs)",
        "q_values(bounds, target_params, transition.obs)",
    ),
    "the end of another environment": (
        PARALLEL,
        Lengths,
        ENDS,
        ENDS.replace("=t", "=jnp.roll(t").replace(",", ", 1),"),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_probe_finds(mistake, tmp_path):
    script, probe, right, wrong = MISTAKES[mistake]
    copy = with_mistake(path_of(script), right, wrong, tmp_path)
    [attempt] = [attempt for attempt, of in probes.attempts_of(copy) if of is probe]
    with pytest.raises(AssertionError):
        attempt(copy, probe)
