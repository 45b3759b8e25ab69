"""A greedy return is nan where it would mean nothing: in all learners but the grid world."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import NETWORKS, REINFORCE, TRIO, jit, load, train
from environments import Noise, noise_run

SMALL = dict.fromkeys(TRIO, "--num-centers 3") | dict.fromkeys(NETWORKS, "--hidden-size 3")


@pytest.mark.parametrize("name", [*SMALL, REINFORCE])
def test_the_greedy_return_of_parameters_that_are_not_finite_is_nan(name):
    """One is enough. The greedy policy takes an action nevertheless, and its return is a number."""
    script = load(name)
    run = noise_run(script, f"{SMALL.get(name, '')} --eval-episodes 2")
    state, evaluate = script.init_state(run), jit(script.evaluate, run)
    assert evaluate(state)["greedy_return"].tolist() == [5, 5]  # 1 in each of five steps
    [part] = {"weights", "params"} & set(state._fields)
    arrays, structure = jax.tree.flatten(getattr(state, part))
    for i, number in itertools.product(range(len(arrays)), [np.nan, np.inf, -np.inf]):
        one_changed = np.array(arrays[i])
        one_changed[(-1,) * one_changed.ndim] = number
        changed = jax.tree.unflatten(structure, [*arrays[:i], one_changed, *arrays[i + 1 :]])
        assert np.isnan(evaluate(state._replace(**{part: changed}))["greedy_return"]).all()


@pytest.mark.parametrize("name", SMALL)
def test_returns_are_nan_where_no_episode_ends(name, monkeypatch):
    monkeypatch.setattr(Noise, "is_truncated", lambda self, state, params: jnp.array(False))
    script = load(name)
    flags = f"{SMALL[name]} --num-intervals 1 --eval-episodes 2 --total-timesteps 200"
    run = noise_run(script, flags)
    state, [line] = train(script, run, script.init_state(run))
    assert np.isnan(line["returns"]) and line["episodes"] == 0
    assert np.isnan(jit(script.evaluate, run)(state)["greedy_return"]).all()
