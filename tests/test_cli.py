"""The command line: defaults, values that are taken, values that are refused."""

import importlib
import os
import re

import pytest
from conftest import SCRIPTS

# README.md's figures were measured with these defaults.
ALL = "--seed 0 --num-seeds 1 --num-intervals 10"
POLE = f"{ALL} --num-intervals 20 --env-id CartPole-v1 --num-envs 16 --gamma 0.99"
TD = f"{POLE} --total-timesteps 2e5 --num-centers 500 --sigma 0.5 --eval-episodes 100"
REPLAY = f"{TD} --buffer-size 1e5 --batch-size 32 --tau 0.01 --learning-rate 0.03"
DEFAULTS = f"""{TD} --batch-size 16 --learning-rate 0.06 --epsilon 0.25
{REPLAY} --epsilon 0.25
{REPLAY} --start-e 1 --end-e 0.05 --epsilon-decay 0.9997
{ALL} --total-timesteps 1e6 --grid-size 8 12 --learning-rate 0.1 --gamma 0.9 --epsilon 0.1
{POLE} --num-iterations 100 --learning-rate 0.01 --hidden-size 64 --sync padding --eval-episodes 100
--seed 0 --num-episodes 500 --num-intervals 5 --num-envs 4096 --policy random"""
BAD = ["x", "nan", "inf", "-1", "1e400", "0x10", ""]  # for every flag, and more for some
MORE = {int: ["0", "0.5", "1e13"], list: ["1.1", "0.1 x", "0.1 nan 0.2"]}
MORE |= {"env-id": ["cartpole-v1", "MNISTBandit-bsuite"], "seed": ["0.5", "1e10"]}
MORE |= {"epsilon-decay": ["0", "0.999999"], "sigma": ["0", "1e39"], "grid-size": ["8 1", "8 2.5"]}
for name, ending in ("gif", ".gif"), ("save", ".npz"), ("plot", ".npz"):
    files = ["missing/x{}", ".", "x", "x.txt", "missing{}/", "a{}", "file/x{}", "read{}"]
    MORE[name] = [file.format(ending) for file in files]


@pytest.mark.parametrize("name", SCRIPTS)
def test_values_are_taken_or_refused_by_name(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [(tmp_path / file).touch() for file in ("file", "read.npz", "read.gif")]
    [(tmp_path / folder).mkdir() for folder in ("a.npz", "a.gif")]
    access, files = os.access, {*tmp_path.iterdir()}  # root could write anywhere
    monkeypatch.setattr(os, "access", lambda path, mode: access(path, mode) and "read" not in path)
    parse_args = importlib.import_module(name[:-3]).parse_args
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    flags = re.findall(r"^  --([\w-]+)", text := capsys.readouterr().out, re.MULTILINE)
    assert len(flags) == text.count("(default:")

    def refusal(*argv):
        with pytest.raises(SystemExit) as end:
            parse_args(argv)
        error = capsys.readouterr().err.partition(": error: ")[2]
        assert end.value.code == 2 and error.count("\n") == 1
        return error

    defaults = parse_args(DEFAULTS.splitlines()[SCRIPTS.index(name)].split())
    assert defaults == parse_args([])
    assert parse_args(["--num-intervals", "1e6"]).num_intervals < 1e6  # no more than updates
    for flag in flags:
        kind = type(getattr(defaults, flag.replace("-", "_")))
        for value in [*BAD, *MORE.get(flag, MORE.get(kind, []))]:
            words = value.split() or [""]
            error = refusal(f"--{flag}", *words)
            assert any(word in error for word in (*words, "expected 2 arguments")), (flag, value)
    assert "unrecognized" in refusal("--see", "3")  # no abbreviations
    assert "jax.distributed.initialize" in refusal("--distributed")
    assert "buffer-size" not in flags or "--buffer-size" in refusal("--buffer-size", "15")
    if "gif" in flags:  # REINFORCE, whose baseline is a mean of several episodes
        assert "int in [2, " in refusal("--num-envs", "1")
        assert "no picture of Reacher" in refusal(*"--gif x.gif --env-id Reacher-misc".split())
    assert {*tmp_path.iterdir()} == files
