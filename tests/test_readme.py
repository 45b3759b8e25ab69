"""README.md: its recipes and its Python lines work as they stand, or with shorter runs."""

import importlib
import re
from types import SimpleNamespace

import gymnasium
import gymnax
import numpy as np
import pytest
from benchmark import DOUBLE_Q, README, SARSA, changed

OWN_CAR, ACT = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
[BY_POLICY] = re.findall(r"`(np.argmax.*?)`", README)
LOAD = "w0, b0, w1, b1 = (np.load('learned.npz')[name][0] for name in ['w0', 'b0', 'w1', 'b1'])\n"


def recipe(script, diff):
    exec(changed(script, diff).read_text(), scope := {"__name__": "changed"})
    return SimpleNamespace(**scope)


def test_double_q_learning_asks_one_for_the_action_and_the_other_for_its_value():
    run = SimpleNamespace(env_id="MountainCar-v0", sigma=1.0, gamma=0.5)
    params, target_params = (
        {"centers": np.zeros((2, 1)), "weights": np.array([[w] for w in weights])}
        for weights in ([0, 3, 1], [8, 4, 6])
    )
    double_q = recipe("replay_td.py", DOUBLE_Q)
    at_center = double_q.Transition(np.zeros(2), 0, 1.0, np.zeros(2), False)
    state = SimpleNamespace(params=params, target_params=target_params)
    assert double_q.td_target(run, state, at_center) == 1 + 0.5 * 4


def test_expected_sarsa_takes_the_risk_of_random_actions_into_account():
    results = recipe("gridworld_qlearning.py", SARSA).main([])
    assert np.isfinite(results["greedy_steps"]) and 0.1 < results["q_table"][0, -1, -1].max() < 0.16


@pytest.mark.parametrize("script", ["parallel_td", "reinforce_parallel"])
def test_what_a_run_learns_balances_gymnasiums_pole(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = ACT if script == "parallel_td" else f"{LOAD}action = {BY_POLICY}"
    flags = "--seed 100 --num-intervals 1 --save learned.npz"
    results = importlib.import_module(script).main(flags.split())
    assert results["greedy_return"].mean() >= 475
    env, steps = gymnasium.make("CartPole-v1"), 0
    (obs, _), over = env.reset(seed=0), [False]
    while not any(over):
        exec(lines, scope := {"np": np, "obs": obs})
        obs, _, *over, _ = env.step(scope["action"])
        steps += 1
    assert steps > 400


def test_an_environment_of_ones_own_goes_into_the_learner(capsys):
    """Shortened from 500,000 steps; tests/benchmark.py runs the same flags on MountainCar-v0."""
    assert OWN_CAR.count("5e5") == OWN_CAR.count("1000 ") == 1
    exec(OWN_CAR.replace("5e5", "3200").replace("1000 ", "10 "), scope := {})
    gymnax.registered_envs.remove("OwnCar-v0")  # other tests go through these lists
    del scope["replay_td"].OBS_SCALE["OwnCar-v0"]
    assert -200 <= float(capsys.readouterr().out.split()[-1]) < -80
