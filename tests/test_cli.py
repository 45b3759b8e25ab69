"""The command line: wrong values, Ctrl-C, any number of runs, one job of two processes."""

import importlib
import os
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import ROOT, SCRIPTS, USER_ENV
from test_consistency import flags

NOT_A_NUMBER = ["x", "nan", "inf", "-inf", "1e400", "0x10"]
COUNT = (["1", "1e3"], [*NOT_A_NUMBER, "0", "-1", "0.5", "1e13"])
FRACTION = (["0", "0.5", "1"], [*NOT_A_NUMBER, "-0.1", "1.1", "1e39"])
FILE = (["x.npz"], ["missing/x.npz", "", ".", "/proc/x.npz"])
# Of each flag: values that are taken, values that are refused.
VALUES = {
    **dict.fromkeys(["--batch-size", "--eval-episodes", "--hidden-size", "--num-centers"], COUNT),
    **dict.fromkeys(["--learning-starts", "--num-iterations", "--num-seeds"], COUNT),
    **dict.fromkeys(["--end-e", "--epsilon", "--epsilon-decay", "--gamma"], FRACTION),
    **dict.fromkeys(["--start-e", "--tau"], FRACTION),
    **dict.fromkeys(["--gif", "--plot", "--save"], FILE),
    "--buffer-size": (["16", "1e6"], [*COUNT[1], "8"]),
    "--distributed": ([""], ["1"]),
    "--env-id": (["CartPole-v1"], ["nonsense", "cartpole-v1", "MNISTBandit-bsuite"]),
    "--grid-size": (["8 12", "20 30"], ["8", "x 8", "nan 8", "-8 12", "0 12", "8 12.5", "8 12 1"]),
    "--learning-rate": (["0.1", "0.1 0.2 0.3"], [*FRACTION[1], "0.1 x", "0.1 nan 0.2"]),
    "--log-interval": (["1", "1e9"], COUNT[1]),
    "--num-envs": (["16", "32"], [*COUNT[1], "1e9"]),
    "--policy": (["random", "rocking"], ["nonsense", "0"]),
    "--seed": (["0", "2e9"], [*NOT_A_NUMBER, "-1", "0.5", "1e10"]),
    "--sigma": (["0.1", "2"], [*NOT_A_NUMBER, "0", "-1", "1e39"]),
    "--sync": (["padding", "truncation"], ["nonsense", "0"]),
    "--total-timesteps": (["1", "2e6"], COUNT[1]),
}
TIMING = {"args", "compile_seconds", "train_seconds"}


def refusal(script, argv, capsys):
    """Return the error line of a refused command line, or None if it is accepted."""
    try:
        importlib.import_module(script[:-3]).parse_args(argv)
    except SystemExit as end:
        error = capsys.readouterr().err.partition(": error: ")[2]
        assert end.code == 2 and error.count("\n") == 1
        return error
    return None


@pytest.mark.parametrize("script", SCRIPTS)
def test_values_are_taken_or_refused_by_name(script, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "unrecognized" in refusal(script, ["--see", "3"], capsys)  # no abbreviations
    assert set(VALUES) == {flag for script in SCRIPTS for flag in flags(script)}
    for flag in flags(script):
        good, bad = VALUES[flag]
        for value in good:
            assert refusal(script, [flag, *value.split()], capsys) is None, (flag, value)
        for value in bad:
            words = value.split() or [""]
            error = refusal(script, [flag, *words], capsys)
            assert error, f"{script} takes {flag} {value}"
            assert flag in error or f" {words[-1]}" in f" {error}"
            allowed = r" in \[|choose from|at least|expected|unrecognized|cannot write|would"
            assert re.search(allowed, error), error


def begin(script, *flags, **env):
    """Start a script, its output in pipes."""
    env = USER_ENV | {name: str(value) for name, value in env.items()}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, ROOT / script, *map(str, flags)], env=env, **pipes)


def test_ctrl_c_ends_with_a_report(tmp_path):
    """The progress line comes through the pipe at once; the signal follows it."""
    few = "--total-timesteps 1e9 --log-interval 1600 --eval-episodes 3".split()
    process = begin("parallel_td.py", *few, "--save", tmp_path / "run.npz")
    next(line for line in process.stdout if line.startswith("step"))
    process.send_signal(signal.SIGINT)
    *later, last = process.stdout.read().splitlines()
    assert (process.wait(), process.stderr.read()) == (130, "")
    assert re.match("learning rate .*: greedy return", last)
    saved = np.load(tmp_path / "run.npz")
    assert len(saved["returns"]) == len(saved["timesteps"]) == 1 + len(later)
    assert saved["weights"].any() and saved["greedy_return"].shape == (1, 3)


@pytest.mark.parametrize(
    ("script", "few", "number"),
    [
        ("gridworld_qlearning.py", "--num-seeds=20", signal.SIGINT),
        ("mountaincar_env.py", "--num-envs=1", signal.SIGTERM),
    ],
)
def test_the_second_signal_ends_the_process_at_once(script, few, number):
    """In the middle of one chunk of half a minute or more. No traceback: Python does not end it."""
    process = begin(script, few, "--total-timesteps=1e9", "--log-interval=1e9")
    next(line for line in process.stdout if line.startswith("compiled"))
    for _ in range(2):
        assert process.poll() is None
        process.send_signal(number)
        time.sleep(0.5)  # for the first handler to run
    assert process.wait(timeout=5) == -number
    assert process.stdout.read() == process.stderr.read() == ""


def assert_same_results(commands, tmp_path):
    """Run (script, flags, environment) side by side. All that save must save the same bits."""
    paths = [tmp_path / f"{i}.npz" for i in range(len(commands))]
    processes = [
        begin(script, *few.split(), "--save", path, **env)
        for path, (script, few, env) in zip(paths, commands, strict=True)
    ]
    printed = []
    for process in processes:
        stdout, stderr = process.communicate(timeout=120)
        assert (process.returncode, stderr) == (0, "")
        printed.append(stdout)
    first, *others = [dict(np.load(path)) for path in paths if path.stat().st_size]
    assert len(first.keys() - TIMING) >= 5 and others
    for other in others:
        assert other.keys() == first.keys()
        for name in first.keys() - TIMING:
            np.testing.assert_array_equal(other[name], first[name], err_msg=name)
    return first, printed


def test_any_number_of_runs_on_any_number_of_devices(tmp_path):
    """Seven runs on 1 and 6 devices: the surplus is cut, the bits are the same."""
    few = "--num-seeds 7 --total-timesteps 1600 --num-centers 20 --eval-episodes 3"
    commands = [("parallel_td.py", few, {"JAX_NUM_CPU_DEVICES": n}) for n in [1, 6]]
    saved, (one, six) = assert_same_results(commands, tmp_path)
    assert "7 runs on 1 x" in one and "7 runs on 4 x" in six
    assert saved["returns"].shape == (1, 7)


@pytest.mark.parametrize(
    "script, few",
    [
        ("parallel_td.py", "--num-seeds 3 --total-timesteps 3200 --num-centers 50"),
        ("mountaincar_env.py", "--num-envs 8 --total-timesteps 1600 --log-interval 800"),
        ("reinforce_parallel.py", "--num-seeds 3 --num-iterations 4 --hidden-size 8"),
    ],
)
def test_a_slurm_job_of_two_tasks_gives_the_bits_of_one_process(script, few, tmp_path):
    """Three runs, or eight cars, on two devices in each task, and in one process with six."""
    job = os.getpid()
    while socket.socket().connect_ex(("127.0.0.1", 61440 + job % 4096)) == 0:
        job += 1  # jax takes the port from the number of the job
    slurm = {"SLURM_JOB_ID": job, "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": 2}
    slurm |= {"JAX_NUM_CPU_DEVICES": 2}
    tasks = [slurm | {"SLURM_PROCID": i, "SLURM_LOCALID": i} for i in range(2)]
    commands = [(script, f"{few} --distributed", task) for task in tasks]
    assert_same_results([*commands, (script, few, {"JAX_NUM_CPU_DEVICES": 6})], tmp_path)
