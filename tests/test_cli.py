"""The command line: values that are taken, values that are refused."""

import importlib
import os

import pytest
from conftest import SCRIPTS
from test_consistency import FLAGS

BAD = ["x", "nan", "inf", "-1", "1e400", "0x10", ""]
COUNTS = "batch-size eval-episodes hidden-size num-centers num-episodes num-iterations num-seeds"
COUNTS += " buffer-size num-intervals num-envs total-timesteps"
UNITS, COUNT = "end-e epsilon gamma start-e tau learning-rate", [*BAD, "0", "0.5", "1e13"]
FILES = ["missing/x{}", ".", "x", "x.txt", "missing{}/", "a{}", "file/x{}", "read{}", ""]
WRONG = {f"--{name}": COUNT for name in COUNTS.split()}  # of each flag: values that are refused
WRONG |= {f"--{name}": [*BAD, "1.1", "0.1 x", "0.1 nan 0.2"] for name in UNITS.split()}
for flag, ending in ("--gif", ".gif"), ("--save", ".npz"), ("--plot", ".npz"):
    WRONG[flag] = [name.format(ending) for name in FILES]
WRONG |= {"--epsilon-decay": [*BAD, "0", "0.999999"], "--sigma": [*BAD, "0", "1e39"]}
WRONG |= {"--seed": [*BAD, "0.5", "1e10"], "--distributed": ["1"], "--policy": ["nonsense", "0"]}
WRONG |= {"--env-id": ["", "cartpole-v1", "MNISTBandit-bsuite"], "--sync": ["nonsense", "0"]}
WRONG |= {"--grid-size": ["8", "x 8", "nan 8", "-8 12", "0 12", "8 12.5", "8 12 1"]}
RIGHT = {"--gamma": "0 1 0.5", "--total-timesteps": "2e6", "--seed": "2e9", "--grid-size": "2 1e3"}
RIGHT |= {
    "--epsilon-decay": "1e-6 0.99999",
    "--sigma": "2 3",
    "--plot": "./x.svg",
    "--gif": "x.gif",
}
RIGHT |= {"--buffer-size": "16", "--num-envs": "16", "--save": "x.npz", "--num-episodes": "1"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_values_are_taken_or_refused_by_name(name, capsys, tmp_path, monkeypatch):
    """A refusal is one line that names the flag or the value. No file is created.

    Of the files, "a" is a folder, "file" is none, and "read" can only be read.
    """
    monkeypatch.chdir(tmp_path)
    for file in "file", "read.npz", "read.gif":
        (tmp_path / file).touch()
    for folder in "a.npz", "a.gif":
        (tmp_path / folder).mkdir()
    access, files = os.access, {*tmp_path.iterdir()}  # root could write anywhere
    monkeypatch.setattr(os, "access", lambda path, mode: access(path, mode) and "read" not in path)
    parse_args = importlib.import_module(name[:-3]).parse_args

    def refusal(*argv):
        with pytest.raises(SystemExit) as end:
            parse_args(argv)
        error = capsys.readouterr().err.partition(": error: ")[2]
        assert end.value.code == 2 and error.count("\n") == 1
        return error

    parse_args([x for flag in FLAGS[name] if flag in RIGHT for x in (flag, *RIGHT[flag].split())])
    assert "unrecognized" in refusal("--see", "3")  # no abbreviations
    assert "jax.distributed.initialize" in refusal("--distributed")
    for flag in FLAGS[name]:
        for value in WRONG[flag]:
            words = value.split() or [""]
            error = refusal(flag, *words)
            assert flag in error or words[-1] in error, (flag, value)
    if name in ("replay_td.py", "epsilon_decay_td.py"):
        assert "--buffer-size" in refusal("--buffer-size", "15")
    if name == "reinforce_parallel.py":  # the baseline is a mean of several episodes
        assert "int in [2, " in refusal("--num-envs", "1")
        assert "no picture of Reacher" in refusal(*"--gif x.gif --env-id Reacher-misc".split())
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    assert capsys.readouterr().out.count("(default:") == len(FLAGS[name])
    assert {*tmp_path.iterdir()} == files
