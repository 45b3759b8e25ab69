"""README.md: its Python lines run as they stand."""

import re

import gymnax
from conftest import ROOT

import parallel_td

SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_saved_weights_balance_gymnasiums_pole(tmp_path, monkeypatch):
    """Also with another width of the features: the lines read it from the file."""
    monkeypatch.chdir(tmp_path)
    parallel_td.main(["--sigma", "0.4", "--seed", "100", "--save", "weights.npz"])
    scope = {}
    exec(SNIPPETS[1], scope)
    assert scope["total"] >= 475


def test_an_environment_of_ones_own_goes_into_reinforce(capsys):
    exec(SNIPPETS[0], {})
    gymnax.registered_envs.remove("OwnCar-v0")  # other tests go through this list
    out = capsys.readouterr().out
    assert out.startswith("OwnCar-v0, 1 run on ") and "greedy return -200.0" in out
