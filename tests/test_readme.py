"""README.md: its recipes and its Python lines work as they stand, or with shorter runs."""

import importlib
import re
from types import SimpleNamespace

import gymnasium
import gymnax
import numpy as np
import pytest
from benchmark import DOUBLE_Q, NETWORK, NETWORK_FLAGS, README, SARSA, apply
from conftest import ROOT, TRIO

import replay_td

OWN_CAR, ACT = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
[BY_POLICY] = re.findall(r"`(np.argmax.*?)`", README)
LOAD = "w0, b0, w1, b1 = (np.load('learned.npz')[name][0] for name in ['w0', 'b0', 'w1', 'b1'])\n"


def changed(script, recipe):
    """Apply a recipe. Return the module."""
    exec(apply(recipe, (ROOT / script).read_text()), scope := {"__name__": "changed"})
    return SimpleNamespace(**scope)


def test_double_q_learning_asks_one_for_the_action_and_the_other_for_its_value():
    args = SimpleNamespace(env_id="MountainCar-v0", sigma=1.0, gamma=0.5)
    at_center = replay_td.Transition(np.zeros(2), 0, 1.0, np.zeros(2), terminated=False)
    params, target_params = (
        {"centers": np.zeros((2, 1)), "weights": np.array([[w] for w in weights])}
        for weights in ([0, 3, 1], [8, 4, 6])
    )
    state = SimpleNamespace(params=params, target_params=target_params)
    assert changed("replay_td.py", DOUBLE_Q).td_target(args, state, at_center) == 1 + 0.5 * 4


def test_sarsa_learns():
    """It takes the risk of random actions into account: the start is worth less than 0.167."""
    results = changed("gridworld_qlearning.py", SARSA).main([])
    assert np.isfinite(results["greedy_steps"]) and 0.1 < results["q_table"][0, -1, -1].max() < 0.16


def test_a_network_learns_is_swept_saved_and_acts_in_numpy(tmp_path):
    """A fifteenth of the run in README. A random policy has a return of about 20."""
    flags = NETWORK_FLAGS.replace("300000", "20000") + " --seed 1 --tau 0 0.01"
    file = tmp_path / "x.npz"
    results = changed("replay_td.py", NETWORK).main([*flags.split(), "--save", str(file)])
    saved = dict(np.load(file))
    assert results["greedy_return"][1].mean() > 200 and "centers" not in saved
    w0, b0, w1, b1 = (saved[name][1] for name in ("w0", "b0", "w1", "b1"))

    def act(obs):
        return np.argmax(np.maximum(obs / saved["obs_scale"][1] @ w0 + b0, 0) @ w1 + b1)

    assert steps_in_gymnasium(act) > 200


def steps_in_gymnasium(act):
    """Mean number of steps for which a policy balances Gymnasium's pole: five episodes."""
    env, steps = gymnasium.make("CartPole-v1"), 0
    for seed in range(5):
        (obs, _), over = env.reset(seed=seed), [False]
        while not any(over):
            obs, _, *over, _ = env.step(act(obs))
            steps += 1
    return steps / 5


@pytest.mark.parametrize("script", [*TRIO, "reinforce_parallel.py"])
def test_one_run_learns_and_balances_gymnasiums_pole(script, tmp_path, capsys, monkeypatch):
    """With a width of the features that is no default: README's lines read it from the file."""
    monkeypatch.chdir(tmp_path)
    flags, lines = ("--sigma 0.65", ACT) if script in TRIO else ("", f"{LOAD}action = {BY_POLICY}")
    main = importlib.import_module(script[:-3]).main
    results = main(f"{flags} --seed 100 --log-interval 1e6 --save learned.npz".split())
    first, *_, last = capsys.readouterr().out.splitlines()
    greedy = results["greedy_return"].mean()
    assert first.startswith("CartPole-v1, 1 run on 1 x ") and greedy >= 475
    assert last == f"greedy return {greedy:.1f}  worst run {greedy:.1f}"

    def act(obs):
        exec(lines, scope := {"np": np, "obs": obs})
        return scope["action"]

    assert steps_in_gymnasium(act) > 400


def test_an_environment_of_ones_own_goes_into_the_learner(capsys, monkeypatch):
    """Shortened from 500,000 steps; tests/benchmark.py runs the same flags on MountainCar-v0."""
    monkeypatch.setattr(replay_td, "OBS_SCALE", dict(replay_td.OBS_SCALE))
    assert OWN_CAR.count("500000") == OWN_CAR.count("1000 ") == 1
    exec(OWN_CAR.replace("500000", "3200").replace("1000 ", "10 "), scope := {})
    gymnax.registered_envs.remove("OwnCar-v0")  # other tests go through this list
    out = capsys.readouterr().out
    greedy_return = scope["results"]["greedy_return"]
    assert out.startswith("OwnCar-v0, 1 run on ") and out.endswith(f"{greedy_return.mean()}\n")
    assert greedy_return.shape == (1, 100) and -200 <= greedy_return.mean() < -80
