"""Learners solve the probes of probes.py.

    python -m pytest -q tests/test_probes.py                          # six scripts, hard probes
    python -m pytest -q tests/test_probes.py --script my_copy.py      # a changed copy of a learner
    python -m pytest -q tests/test_probes.py --script my_copy.py --flags "--my-flag 3"
    python -m pytest -q tests/test_probes.py --script my_copy.py --on-policy    # SARSA, Monte Carlo

The path is relative to the folder in which the command is called. A copy whose state has a
`q_table` is taken for a grid world, and its functions `start` and `env_step` are replaced. In any
other copy, `make_env` gets the probe from gymnax.make. If it has `q_values`, these are compared
with values of actions, else its greedy actions must be best. If it has `state_value(params, obs)`,
the critic's values are compared, too.
"""

import probes
import pytest
from conftest import DECAY, GRID, NETWORKS, REINFORCE, load
from probes import Apart, Best, Endless, Lengths, Match, Memory

HARD = [Best, Match, Memory, Endless, Lengths, Apart]


def pytest_generate_tests(metafunc):
    """Try the file that the command names, or six scripts."""
    own = metafunc.config.getoption("script")
    if own:
        scripts = {own: probes.import_file(metafunc.config.invocation_params.dir / own)}
    else:
        scripts = {name: load(name) for name in [GRID, DECAY, REINFORCE, *NETWORKS]}
    cases = []
    for name, script in scripts.items():
        for attempt, probe in probes.attempts_of(script):
            if own or attempt is not probes.learn or probe in HARD:
                cases.append(pytest.param(attempt, script, probe, id=f"{name}-{probe.__name__}"))
    metafunc.parametrize(("attempt", "script", "probe"), cases)


def test_a_learner_solves_the_probe(attempt, script, probe, request):
    flags, on_policy = map(request.config.getoption, ["flags", "on_policy"])
    attempt(script, probe, flags, **({"on_policy": True} if on_policy else {}))
