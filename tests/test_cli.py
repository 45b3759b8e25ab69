"""The command line: values that are taken, values that are refused."""

import importlib
import os

import pytest
from conftest import SCRIPTS
from test_consistency import FLAGS

NOT_A_NUMBER = ["x", "nan", "inf", "-inf", "1e400", "0x10"]
COUNT = (["1", "1e3"], [*NOT_A_NUMBER, "0", "-1", "0.5", "1e13"])
UNIT = (["0", "1", "0.1 0.2 0.3"], [*NOT_A_NUMBER, "-0.1", "1.1", "0.1 x", "0.1 nan 0.2"])
FILES = ["missing/x{}", "", ".", "x", "x.txt", "missing{}/", "a{}", "file/x{}", "read{}"]
FILE = {end: ([f"./x{end}"], [file.format(end) for file in FILES]) for end in (".gif", ".npz")}
VALUES = {  # of each flag: values that are taken, values that are refused
    **dict.fromkeys(["--batch-size", "--eval-episodes", "--hidden-size", "--num-centers"], COUNT),
    **dict.fromkeys(["--num-episodes", "--num-iterations", "--num-seeds"], COUNT),
    **dict.fromkeys(["--end-e", "--epsilon", "--gamma", "--start-e", "--tau"], UNIT),
    **{"--gif": FILE[".gif"], "--save": FILE[".npz"], "--learning-rate": UNIT},
    "--plot": (["x.png", "x.pdf", "./x.svg"], FILE[".npz"][1]),
    "--buffer-size": (["16", "1e6"], [*COUNT[1], "8"]),
    "--distributed": ([], ["", "1"]),
    "--env-id": (["CartPole-v1"], ["nonsense", "cartpole-v1", "MNISTBandit-bsuite"]),
    "--epsilon-decay": (["1e-6", "0.5", "0.99999"], [*UNIT[1], "0", "0.999999"]),
    "--grid-size": (["8 12", "20 30"], ["8", "x 8", "nan 8", "-8 12", "0 12", "8 12.5", "8 12 1"]),
    "--num-intervals": (["1", "1e6"], [*COUNT[1], "2e9"]),
    "--num-envs": (["16", "32"], [*COUNT[1], "1e9"]),
    "--policy": (["random", "rocking"], ["nonsense", "0"]),
    "--seed": (["0", "2e9"], [*NOT_A_NUMBER, "-1", "0.5", "1e10"]),
    "--sigma": (["0.1", "2 3"], [*NOT_A_NUMBER, "0", "-1", "1e39"]),
    "--sync": (["padding", "truncation"], ["nonsense", "0"]),
    "--total-timesteps": (["1000", "2e6"], COUNT[1]),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_values_are_taken_or_refused_by_name(name, capsys, tmp_path, monkeypatch):
    """A refusal is one line that names the flag or the value. No file is created.

    Of the files, "a" is a folder, "file" is none, and "read" can only be read.
    """
    monkeypatch.chdir(tmp_path)
    for file in ("file", "read.npz", "read.gif"):
        (tmp_path / file).touch()
    for folder in ("a.npz", "a.gif"):
        (tmp_path / folder).mkdir()
    access, files = os.access, {*tmp_path.iterdir()}  # root could write anywhere
    monkeypatch.setattr(os, "access", lambda path, mode: access(path, mode) and "read" not in path)

    def refusal(*argv):
        try:
            importlib.import_module(name[:-3]).parse_args([*few, *argv])
        except SystemExit as end:
            error = capsys.readouterr().err.partition(": error: ")[2]
            assert end.code == 2 and error.count("\n") == 1
            return error
        return ""

    # By default, the car takes more steps than --save allows.
    few = ["--num-episodes", "1"] if name == "mountaincar_env.py" else []
    assert "unrecognized" in refusal("--see", "3")  # no abbreviations
    assert "jax.distributed.initialize" in refusal("--distributed")
    with pytest.raises(SystemExit):
        importlib.import_module(name[:-3]).parse_args(["--help"])
    assert capsys.readouterr().out.count("(default:") == len(FLAGS[name])
    for flag in FLAGS[name]:
        good, bad = VALUES[flag]
        for value in good:
            assert refusal(flag, *value.split()) == "", (flag, value)
        for value in bad:
            words = value.split() or [""]
            error = refusal(flag, *words)
            assert error and (flag in error or words[-1] in error), (flag, value)
    assert {*tmp_path.iterdir()} == files
    if name == "reinforce_parallel.py":  # the baseline is a mean of several episodes
        assert "int in [2, " in refusal("--num-envs", "1")
        assert "no picture of Reacher" in refusal(*"--gif x.gif --env-id Reacher-misc".split())
