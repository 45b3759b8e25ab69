"""README.md: its recipes and its Python lines work as they stand, or with shorter runs."""

import re
from types import SimpleNamespace

import gymnasium
import numpy as np
from benchmark import DOUBLE_Q, README, SARSA, changed

import parallel_td

_, ACT = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_recipes_apply_and_double_q_learning_asks_one_for_the_action_the_other_for_its_value():
    changed("gridworld_qlearning.py", SARSA)  # it applies; what it learns is in RESULTS.md
    exec(changed("replay_td.py", DOUBLE_Q).read_text(), scope := {"__name__": "changed"})
    scope["q_values"] = lambda run, values, obs: np.add(values, 0 * obs)
    state = SimpleNamespace(params=[0, 3, 1], target_params=[8, 4, 6])
    for ends, obs, target in (False, 7.0, 1 + 0.5 * 4), (True, np.nan, 1):
        transition = SimpleNamespace(next_obs=obs, reward=1.0, terminated=ends)
        assert scope["td_target"](SimpleNamespace(gamma=0.5), state, transition) == target


def test_what_a_run_learns_balances_gymnasiums_pole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = "--seed 100 --num-intervals 1 --save learned.npz"
    assert parallel_td.main(flags.split())["greedy_return"].mean() >= 475
    env, over, steps = gymnasium.make("CartPole-v1"), [False], 0
    obs, _ = env.reset(seed=0)
    while not any(over):
        exec(ACT, scope := {"np": np, "obs": obs})
        obs, _, *over, _ = env.step(scope["action"])
        steps += 1
    assert steps > 400
