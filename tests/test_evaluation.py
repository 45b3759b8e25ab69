"""Greedy episodes after training: those of Gymnasium, and nan where a return would mean nothing.

In all learners but the grid world. Those whose evaluation has the same text are tested in one.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import NETWORKS, PPO, PQN, REINFORCE, REPLAY, TRIO, jit, load, train, watch
from environments import Noise, Pole, noise_run, play_in_gymnasium, pole_run
from oracles import normalized_network, radial_features, random_params, tanh_network

SMALL = dict.fromkeys(TRIO, "--num-centers 9") | dict.fromkeys(NETWORKS, "--hidden-size 8")


def linear_values(learned, obs):
    return learned["weights"] @ radial_features(0.5, learned["centers"], obs)


VALUES = {  # of actions, or how probable they are: a function of what `evaluate` returns
    REPLAY: linear_values,
    REINFORCE: lambda learned, obs: tanh_network(learned["params"], obs),
    PPO: lambda learned, obs: tanh_network(learned["params"]["actor"], obs),
    PQN: lambda learned, obs: normalized_network(learned["bounds"], learned["params"], obs),
}


@pytest.mark.parametrize("name", VALUES)
def test_what_was_learned_plays_in_gymnasium_as_it_was_evaluated(name, monkeypatch):
    """Its best actions, up to the end of the first episode. It is not what targets come from."""
    script = load(name)
    resets = watch(monkeypatch, Pole, "reset", "params", ordered=False)
    run = pole_run(script, f"{SMALL.get(name, '')} --eval-episodes 3")
    first, evaluate = script.init_state(run), jit(script.evaluate, run)
    [part] = {"weights", "params"} & set(first._fields)
    for seed in range(10):
        resets.clear()
        changes = {part: random_params(seed, getattr(first, part)), "key": jax.random.key(seed)}
        if name == PQN:
            changes["bounds"] = jnp.array([2.0, 3, 4, 5])
        learned = jax.device_get(evaluate(first._replace(**changes)))
        jax.effects_barrier()
        jax.tree.map(np.testing.assert_array_equal, learned[part], changes[part])

        def policy(t, obs, learned=learned):
            return np.argmax(VALUES[name](learned, obs))

        returns = [sum(play_in_gymnasium(reset.out[0], policy)[1]) for reset in resets]
        np.testing.assert_allclose(np.sort(learned["greedy_return"]), np.sort(returns), rtol=1e-5)


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
