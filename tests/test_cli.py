"""The command line: values that are taken, values that are refused."""

import importlib
import os

import pytest
from conftest import SCRIPTS
from test_consistency import FLAGS

BAD = ["x", "nan", "inf", "-1", "1e400", "0x10", ""]  # for every flag, and more for some
MORE = {"env-id": ["cartpole-v1", "MNISTBandit-bsuite"], "seed": ["0.5", "1e10"]}
MORE |= {"epsilon-decay": ["0", "0.999999"], "sigma": ["0", "1e39"], "grid-size": ["8", "0 12"]}
MORE["grid-size"] += ["x 8", "nan 8", "-8 12", "8 12.5", "8 12 1"]
for name in """batch-size buffer-size eval-episodes hidden-size num-centers num-envs num-episodes
        num-intervals num-iterations num-seeds total-timesteps""".split():
    MORE[name] = ["0", "0.5", "1e13"]
for name in "end-e epsilon gamma start-e tau learning-rate".split():
    MORE[name] = ["1.1", "0.1 x", "0.1 nan 0.2"]
for name, ending in ("gif", ".gif"), ("save", ".npz"), ("plot", ".npz"):
    files = ["missing/x{}", ".", "x", "x.txt", "missing{}/", "a{}", "file/x{}", "read{}"]
    MORE[name] = [file.format(ending) for file in files]
RIGHT = {"gamma": "0 1 0.5", "seed": "2e9", "grid-size": "2 1e3", "buffer-size": "16"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_values_are_taken_or_refused_by_name(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [(tmp_path / file).touch() for file in ("file", "read.npz", "read.gif")]
    [(tmp_path / folder).mkdir() for folder in ("a.npz", "a.gif")]
    access, files = os.access, {*tmp_path.iterdir()}  # root could write anywhere
    monkeypatch.setattr(os, "access", lambda path, mode: access(path, mode) and "read" not in path)
    parse_args, flags = importlib.import_module(name[:-3]).parse_args, [f[2:] for f in FLAGS[name]]

    def refusal(*argv):
        with pytest.raises(SystemExit) as end:
            parse_args(argv)
        error = capsys.readouterr().err.partition(": error: ")[2]
        assert end.value.code == 2 and error.count("\n") == 1
        return error

    parse_args([x for f in flags if f in RIGHT for x in (f"--{f}", *RIGHT[f].split())])
    for flag in flags:
        for value in [*BAD, *MORE.get(flag, [])]:
            words = value.split() or [""]
            error = refusal(f"--{flag}", *words)
            assert f"--{flag}" in error or words[-1] in error, (flag, value)
    assert "unrecognized" in refusal("--see", "3")  # no abbreviations
    assert "jax.distributed.initialize" in refusal("--distributed")
    assert "buffer-size" not in flags or "--buffer-size" in refusal("--buffer-size", "15")
    if "gif" in flags:  # REINFORCE, whose baseline is a mean of several episodes
        assert "int in [2, " in refusal("--num-envs", "1")
        assert "no picture of Reacher" in refusal(*"--gif x.gif --env-id Reacher-misc".split())
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    text, optional = capsys.readouterr().out, {"gif", "plot", "save"} & {*flags}
    assert (text.count("(default:"), text.count("None)")) == (len(flags), len(optional))
    assert {*tmp_path.iterdir()} == files
