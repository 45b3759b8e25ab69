"""README.md: its recipes and its Python lines work as they stand, or with shorter runs."""

import re
from types import SimpleNamespace

import gymnasium
import gymnax
import numpy as np
from conftest import ROOT

import parallel_td
import replay_td

README = (ROOT / "README.md").read_text()
OWN_CAR, ACT = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
DOUBLE_Q, SARSA, NETWORK = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)


def changed(script, recipe):
    """Apply a recipe: "-" and " " are looked for, "+" and " " replace them. Return the module."""
    text = (ROOT / script).read_text()
    for part in re.findall(r"(?:^[ -].*\n)+(?:^\+.*\n)*", recipe, re.MULTILINE):
        old, new = ("".join(re.findall(rf"^[ {sign}](.*\n)", part, re.MULTILINE)) for sign in "-+")
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    exec(text, scope := {"__name__": "changed"})
    return SimpleNamespace(**scope)


def test_double_q_learning_asks_one_for_the_action_and_the_other_for_its_value():
    args = SimpleNamespace(env_id="MountainCar-v0", sigma=1.0, gamma=0.5)
    at_center = replay_td.Transition(np.zeros(2), 0, 1.0, np.zeros(2), terminated=False)
    state = SimpleNamespace(centers=np.zeros((2, 1)))
    state.weights, state.target_weights = np.array([[0], [3], [1]]), np.array([[8], [4], [6]])
    assert changed("replay_td.py", DOUBLE_Q).td_target(args, state, at_center) == 1 + 0.5 * 4


def test_sarsa_learns():
    """It takes the risk of random actions into account: the start is worth less than 0.167."""
    results = changed("gridworld_qlearning.py", SARSA).main([])
    assert np.isfinite(results["greedy_steps"]) and 0.1 < results["q_table"][0, -1, -1].max() < 0.16


def test_a_network_learns():
    """A fifteenth of the run in README. A random policy has a return of about 20."""
    [flags] = re.findall(r"`(--num-envs 4 .* --total-timesteps) 300000`", README)
    results = changed("replay_td.py", NETWORK).main(f"{flags} 20000 --seed 1".split())
    assert results["greedy_return"].mean() > 200


def test_saved_weights_balance_gymnasiums_pole(tmp_path, monkeypatch):
    """Also with another width of the features: the lines read it from the file."""
    monkeypatch.chdir(tmp_path)
    parallel_td.main(["--sigma", "0.4", "--seed", "100", "--save", "weights.npz"])
    env, steps, over = gymnasium.make("CartPole-v1"), 0, [False]
    scope = {"np": np, "obs": env.reset(seed=0)[0]}
    while not any(over):
        exec(ACT, scope)
        scope["obs"], _, *over, _ = env.step(scope["action"])
        steps += 1
    assert steps >= 475


def test_an_environment_of_ones_own_goes_into_the_learner(capsys, monkeypatch):
    """Shortened from 500,000 steps; tests/benchmark.py runs the same flags on MountainCar-v0."""
    monkeypatch.setattr(replay_td, "OBS_SCALE", dict(replay_td.OBS_SCALE))
    assert OWN_CAR.count("500000") == OWN_CAR.count("1000 ") == 1
    scope = {}
    exec(OWN_CAR.replace("500000", "3200").replace("1000 ", "10 "), scope)
    gymnax.registered_envs.remove("OwnCar-v0")  # other tests go through this list
    out = capsys.readouterr().out
    greedy_return = scope["results"]["greedy_return"]
    assert out.startswith("OwnCar-v0, 1 run on ") and out.endswith(f"{greedy_return.mean()}\n")
    assert greedy_return.shape == (1, 100) and -200 <= greedy_return.mean() < -80
