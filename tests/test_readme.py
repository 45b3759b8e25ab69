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
LOAD = "w0, b0, w1, b1 = (np.load('learned.npz')[name][0] for name in ['w0', 'b0', 'w1', 'b1'])\n"
BY_POLICY = f"{LOAD}action = {re.search(r'`(np.argmax.*?)`', README)[1]}"


def recipe(script, diff):
    exec(changed(script, diff).read_text(), scope := {"__name__": "changed"})
    return SimpleNamespace(**scope)


def test_double_q_learning_asks_one_for_the_action_and_the_other_for_its_value():
    run = SimpleNamespace(env_id="MountainCar-v0", sigma=1.0, gamma=0.5)
    names = {"params": [[0], [3], [1]], "target_params": [[8], [4], [6]]}
    state = {n: {"centers": np.zeros((2, 1)), "weights": np.array(w)} for n, w in names.items()}
    at_center = SimpleNamespace(next_obs=np.zeros(2), reward=1.0, terminated=False)
    double_q = recipe("replay_td.py", DOUBLE_Q)
    assert double_q.td_target(run, SimpleNamespace(**state), at_center) == 1 + 0.5 * 4


def test_expected_sarsa_takes_the_risk_of_random_actions_into_account():
    results = recipe("gridworld_qlearning.py", SARSA).main([])
    assert np.isfinite(results["greedy_steps"]) and 0.1 < results["q_table"][0, -1, -1].max() < 0.16


@pytest.mark.parametrize("script", ["parallel_td", "reinforce_parallel"])
def test_what_a_run_learns_balances_gymnasiums_pole(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = "--seed 100 --num-intervals 1 --save learned.npz"
    assert importlib.import_module(script).main(flags.split())["greedy_return"].mean() >= 475
    env, over, steps = gymnasium.make("CartPole-v1"), [False], 0
    obs, _ = env.reset(seed=0)
    while not any(over):
        exec(ACT if script == "parallel_td" else BY_POLICY, scope := {"np": np, "obs": obs})
        obs, _, *over, _ = env.step(scope["action"])
        steps += 1
    assert steps > 400


def test_an_environment_of_ones_own_goes_into_the_learner(capsys):
    """Shortened from 500,000 steps; tests/benchmark.py runs the same flags on MountainCar-v0."""
    exec(OWN_CAR.replace("5e5", "3200").replace("1000 ", "10 "), scope := {})
    gymnax.registered_envs.remove("OwnCar-v0")  # other tests go through these lists
    del scope["replay_td"].OBS_SCALE["OwnCar-v0"]
    assert -200 <= float(capsys.readouterr().out.split()[-1]) < -80
