"""Learners solve the probes of probes.py, and copies with a planted mistake do not.

    python -m pytest -q tests/test_probes.py                          # six scripts, hard probes
    python -m pytest -q tests/test_probes.py --script my_copy.py      # a changed copy of a learner
    python -m pytest -q tests/test_probes.py --script my_copy.py --flags "--my-flag 3"
    python -m pytest -q tests/test_probes.py --script my_copy.py --on-policy    # a SARSA in tables

The path is relative to the folder in which the command is called. A copy whose state has a
`q_table` is taken for a grid world, and its functions `start` and `env_step` are replaced. In any
other copy, `make_env` gets the probe from gymnax.make. If it has `q_values`, these are compared
with values of actions, else its greedy actions must be best. If it has `state_value(params, obs)`,
the critic's values are compared, too.
"""

import probes
import pytest
from conftest import (
    DECAY,
    DQN,
    GRID,
    NETWORKS,
    PARALLEL,
    PPO,
    PQN,
    REINFORCE,
    REPLAY,
    load,
    path_of,
)
from probes import (
    Apart,
    Bandit,
    Best,
    Cliff,
    Coin,
    Corridor,
    Endless,
    Later,
    Lengths,
    Match,
    Memory,
)

HARD = [Best, Match, Memory, Endless, Lengths, Apart]


def pytest_generate_tests(metafunc):
    """Try the file that the command names, or six scripts and all mistakes."""
    own = metafunc.config.getoption("script")
    if "mistake" in metafunc.fixturenames:
        reason = "mistakes are planted in the collection, not in --script"
        skipped = pytest.param(None, marks=pytest.mark.skip(reason=reason))
        metafunc.parametrize("mistake", [skipped] if own else MISTAKES)
        return
    scripts = {name: load(name) for name in [GRID, DECAY, REINFORCE, *NETWORKS]}
    if own:
        scripts = {own: probes.import_file(metafunc.config.invocation_params.dir / own)}
    cases = []
    for name, script in scripts.items():
        for attempt, probe in probes.attempts_of(script):
            if own or attempt is not probes.learn or probe in HARD:
                cases.append(pytest.param(attempt, script, probe, id=f"{name}-{probe.__name__}"))
    metafunc.parametrize(("attempt", "script", "probe"), cases)


def test_a_learner_solves_the_probe(attempt, script, probe, request):
    flags, on_policy = map(request.config.getoption, ["flags", "on_policy"])
    attempt(script, probe, flags, **({"on_policy": True} if on_policy else {}))


def with_mistake(path, right, wrong, folder):
    """Import a copy of a script in which one text is replaced."""
    text = path.read_text()
    assert text.count(right) == 1
    copy = folder / path.name
    copy.write_text(text.replace(right, wrong))
    return probes.import_file(copy)


MAXIMUM = "jnp.where(terminated, 0.0, jnp.max(state.q_table[*next_cell]))"
NEXT_START = "jnp.max(state.q_table[*jnp.where(terminated, start(run), next_cell)])"
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


def test_a_probe_finds(mistake, tmp_path):
    script, probe, right, wrong = MISTAKES[mistake]
    copy = with_mistake(path_of(script), right, wrong, tmp_path)
    [attempt] = [attempt for attempt, of in probes.attempts_of(copy) if of is probe]
    with pytest.raises(AssertionError):
        attempt(copy, probe)
