"""README.md: its recipes and its Python lines work as they stand, or with shorter runs."""

import re
import subprocess
import sys

import gymnasium
import gymnax
import numpy as np
from conftest import ROOT

import parallel_td
import replay_td

README = (ROOT / "README.md").read_text()
OWN_CAR, ACT = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SARSA, NETWORK = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)


def last_line(script, recipe, flags, folder):
    """Apply a recipe ("-" and " " are looked for, "+" and " " replace them), and run the script."""
    text = (ROOT / script).read_text()
    for part in re.findall(r"(?:^[ -].*\n)+(?:^\+.*\n)*", recipe, re.MULTILINE):
        old, new = ("".join(re.findall(rf"^[ {sign}](.*\n)", part, re.MULTILINE)) for sign in "-+")
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / script).write_text(text)
    command = [sys.executable, folder / script, *flags.split()]
    return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()[-1]


def test_sarsa_learns(tmp_path):
    """It takes the risk of random actions into account: the start is worth less than 0.167."""
    last = last_line("gridworld_qlearning.py", SARSA, "", tmp_path)
    assert "1 of 1 greedy agents reach the goal" in last and 0.1 < float(last.split()[4]) < 0.16


def test_a_network_learns(tmp_path):
    """A fifth of the run in README. A random policy has a return of about 20."""
    [flags] = re.findall(r"`(--num-envs 4 .* --total-timesteps) 300000`", README)
    last = last_line("replay_td.py", NETWORK, f"{flags} 60000 --seed 1", tmp_path)
    assert float(last.split()[2]) > 200


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
