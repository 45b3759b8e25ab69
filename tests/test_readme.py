"""README.md: its Python lines run as they stand, or shortened."""

import re

import gymnax
from conftest import ROOT

import parallel_td
import replay_td

README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_saved_weights_balance_gymnasiums_pole(tmp_path, monkeypatch):
    """Also with another width of the features: the lines read it from the file."""
    monkeypatch.chdir(tmp_path)
    parallel_td.main(["--sigma", "0.4", "--seed", "100", "--save", "weights.npz"])
    scope = {}
    exec(SNIPPETS[1], scope)
    assert scope["total"] >= 475


def test_an_environment_of_ones_own_goes_into_the_learner(capsys, monkeypatch):
    """Shortened from 500,000 steps; tests/benchmark.py runs the same flags on MountainCar-v0."""
    monkeypatch.setattr(replay_td, "OBS_SCALE", dict(replay_td.OBS_SCALE))
    assert SNIPPETS[0].count("500000") == SNIPPETS[0].count("1000 ") == 1
    scope = {}
    exec(SNIPPETS[0].replace("500000", "3200").replace("1000 ", "10 "), scope)
    gymnax.registered_envs.remove("OwnCar-v0")  # other tests go through this list
    out = capsys.readouterr().out
    greedy_return = scope["results"]["greedy_return"]
    assert out.startswith("OwnCar-v0, 1 run on ") and out.endswith(f"{greedy_return.mean()}\n")
    assert greedy_return.shape == (1, 100) and -200 <= greedy_return.mean() < -80


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 120 and len(README.split()) <= 900
