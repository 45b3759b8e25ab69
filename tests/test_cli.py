"""The command line: values that are taken, values that are refused."""

import importlib
import os
import re

import pytest
from conftest import SCRIPTS
from test_consistency import flags

NOT_A_NUMBER = ["x", "nan", "inf", "-inf", "1e400", "0x10"]
COUNT = (["1", "1e3"], [*NOT_A_NUMBER, "0", "-1", "0.5", "1e13"])
FRACTION = (["0", "1", "0.1 0.2 0.3"], [*NOT_A_NUMBER, "-0.1", "1.1", "0.1 x", "0.1 nan 0.2"])
NOT_A_FILE = ["missing/x{}", "", ".", "x", "x.txt", "missing{}/", "a{}", "file/x{}", "read{}"]
FILE = {
    suffix: ([f"./x{suffix}"], [name.format(suffix) for name in NOT_A_FILE])
    for suffix in (".gif", ".png", ".npz")
}
ALLOWED = r" in \[|choose from|at least|at most|expected|unrecognized|can be written|would"
# Of each flag: values that are taken, values that are refused.
VALUES = {
    **dict.fromkeys(["--batch-size", "--eval-episodes", "--hidden-size", "--num-centers"], COUNT),
    **dict.fromkeys(["--num-episodes", "--num-iterations", "--num-seeds"], COUNT),
    **dict.fromkeys(["--end-e", "--epsilon", "--gamma", "--start-e", "--tau"], FRACTION),
    "--buffer-size": (["16", "1e6"], [*COUNT[1], "8"]),
    "--distributed": ([], ["1", ""]),
    **{"--gif": FILE[".gif"], "--plot": FILE[".png"], "--save": FILE[".npz"]},
    "--env-id": (["CartPole-v1"], ["nonsense", "cartpole-v1", "MNISTBandit-bsuite"]),
    "--epsilon-decay": (["1e-6", "0.5", "0.99999"], [*FRACTION[1], "0", "0.999999"]),
    "--grid-size": (["8 12", "20 30"], ["8", "x 8", "nan 8", "-8 12", "0 12", "8 12.5", "8 12 1"]),
    "--learning-rate": FRACTION,
    "--num-intervals": (["1", "1e6"], [*COUNT[1], "2e9"]),
    "--num-envs": (["16", "32"], [*COUNT[1], "1e9"]),
    "--policy": (["random", "rocking"], ["nonsense", "0"]),
    "--seed": (["0", "2e9"], [*NOT_A_NUMBER, "-1", "0.5", "1e10"]),
    "--sigma": (["0.1", "2 3"], [*NOT_A_NUMBER, "0", "-1", "1e39"]),
    "--sync": (["padding", "truncation"], ["nonsense", "0"]),
    "--total-timesteps": (["1000", "2e6"], COUNT[1]),
}


def refusal(script, argv, capsys):
    """Return the error line of a refused command line, or "" if it is accepted."""
    try:
        importlib.import_module(script[:-3]).parse_args(argv)
    except SystemExit as end:
        error = capsys.readouterr().err.partition(": error: ")[2]
        assert end.code == 2 and error.count("\n") == 1
        return error
    return ""


@pytest.mark.parametrize("script", SCRIPTS)
def test_values_are_taken_or_refused_by_name(script, capsys, tmp_path, monkeypatch):
    """One line that names the flag or the value and says what is allowed. No file is created.

    Of the files, "a" is a folder, "file" is none, and "read" can only be read.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for suffix in FILE:
        (tmp_path / f"read{suffix}").touch()
        (tmp_path / f"a{suffix}").mkdir()
    access = os.access  # root could write anywhere
    monkeypatch.setattr(os, "access", lambda path, mode: access(path, mode) and "read" not in path)
    assert "unrecognized" in refusal(script, ["--see", "3"], capsys)  # no abbreviations
    assert "from Python, call jax.distributed.init" in refusal(script, ["--distributed"], capsys)
    assert set(VALUES) == {flag for script in SCRIPTS for flag in flags(script)}
    # By default, the car takes more steps than --save allows.
    few = ["--num-episodes", "1"] if script == "mountaincar_env.py" else []
    files = {*tmp_path.iterdir()}
    with pytest.raises(SystemExit):
        importlib.import_module(script[:-3]).parse_args(["--help"])
    assert capsys.readouterr().out.count("(default:") == len(flags(script))
    for flag in flags(script):
        good, bad = VALUES[flag]
        for value in good:
            assert refusal(script, [*few, flag, *value.split()], capsys) == "", (flag, value)
        for value in bad:
            words = value.split() or [""]
            error = refusal(script, [*few, flag, *words], capsys)
            assert re.search(ALLOWED, error), f"{script} {flag} {value}: {error}"
            assert flag in error or f" {words[-1]}" in f" {error}"
    assert {*tmp_path.iterdir()} == files
    if script == "reinforce_parallel.py":  # the baseline is a mean of several episodes
        assert "int in [2, " in refusal(script, ["--num-envs", "1"], capsys)
        no_picture = refusal(script, "--gif x.gif --env-id Reacher-misc".split(), capsys)
        assert no_picture == "--gif: gymnax has no picture of Reacher-misc\n"
