"""The recipe highway.py passes on what HighJax returns, and ends episodes as gymnax does.

It needs a package that is in no requirements: see the first lines of tests/recipes/highway.py.
"""

import importlib
import sys

import jax
import numpy as np
import pytest
from conftest import ROOT

pytest.importorskip("highjax", reason="pip install --ignore-requires-python --no-deps highjax")
sys.path.append(str(ROOT / "tests" / "recipes"))
highway = importlib.import_module("highway")

FASTER, SLOWER = 3, 4
ENV = highway.Highway()
PARAMS = ENV.default_params
# With both limits at 30 s, an adapter that passes on `done` would terminate at the limit.
PARAMS = PARAMS.replace(inner=PARAMS.inner.replace(duration=30.0))
STEP = jax.jit(ENV.step)
INNER_RESET, INNER_STEP = jax.jit(ENV.inner.reset), jax.jit(ENV.inner.step_env)


@pytest.mark.parametrize("action, crashes", [(FASTER, True), (SLOWER, False)])
def test_a_crash_terminates_and_the_time_limit_truncates(action, crashes):
    """All else is what HighJax returns. The last observation of an episode is in `info`."""
    key = jax.random.key(0)
    obs, state = ENV.reset(key, PARAMS)
    inner_obs, inner_state = INNER_RESET(key, PARAMS.inner)
    np.testing.assert_allclose(obs, highway.SCALE * inner_obs, rtol=1e-6)
    ended, length = False, 0
    while not ended:
        _, state, reward, terminated, truncated, info = STEP(key, state, action, PARAMS)
        inner = INNER_STEP(key, inner_state, action, PARAMS.inner)
        inner_obs, inner_state, inner_reward, _, _ = inner
        last_obs = highway.SCALE * inner_obs
        np.testing.assert_allclose(info["final_observation"], last_obs, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(reward, inner_reward, rtol=1e-5)
        length, ended = length + 1, terminated | truncated
    assert (terminated, truncated, inner_state.crashed) == (crashes, not crashes, crashes)
    assert (length < 30) == crashes
    assert state.time == 0  # the next episode has begun


def test_five_physics_steps_are_a_second():
    """Idle at 25 m/s, far from all others."""
    _, state = ENV.reset(jax.random.key(0), PARAMS)
    far = state.npc_states.at[:, 0].add(5000.0)
    state = state.replace(npc_states=far)
    _, after, reward, _, _ = ENV.step_env(jax.random.key(0), state, 1, PARAMS)
    assert float(after.ego_state[0] - state.ego_state[0]) == pytest.approx(25, abs=0.01)
    assert after.time == 1
    lane = float(state.ego_state[4]) / 2  # 0 left, 1 right
    assert float(reward) == pytest.approx((1 + 0.4 * 0.5 + 0.1 * lane) / 1.5, abs=1e-5)
