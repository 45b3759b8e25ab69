"""The command line: wrong values, Ctrl-C, one job of two processes."""

import importlib
import os
import re
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, SCRIPTS, TRIO, USER_ENV
from test_consistency import flags

NOT_A_NUMBER = ["x", "nan", "inf", "-inf", "1e400", "0x10"]
COUNT = (["1", "1e3"], [*NOT_A_NUMBER, "0", "-1", "0.5", "1e13"])
FRACTION = (["0", "0.5", "1"], [*NOT_A_NUMBER, "-0.1", "1.1", "1e39"])
NOT_A_FILE = ["missing/x{}", "", ".", "x", "x.txt", "missing{}/"]
# Of each flag: values that are taken, values that are refused.
VALUES = {
    **dict.fromkeys(["--batch-size", "--eval-episodes", "--hidden-size", "--num-centers"], COUNT),
    **dict.fromkeys(["--num-iterations", "--num-seeds"], COUNT),
    **dict.fromkeys(["--end-e", "--epsilon", "--gamma", "--start-e", "--tau"], FRACTION),
    **{
        flag: ([f"x{suffix}", f"./x{suffix}"], [name.format(suffix) for name in NOT_A_FILE])
        for flag, suffix in [("--gif", ".gif"), ("--plot", ".png"), ("--save", ".npz")]
    },
    "--buffer-size": (["16", "1e6"], [*COUNT[1], "8"]),
    "--distributed": ([""], ["1"]),
    "--env-id": (["CartPole-v1"], ["nonsense", "cartpole-v1", "MNISTBandit-bsuite"]),
    "--epsilon-decay": (["1e-6", "0.5", "1"], [*FRACTION[1], "0"]),
    "--grid-size": (["8 12", "20 30"], ["8", "x 8", "nan 8", "-8 12", "0 12", "8 12.5", "8 12 1"]),
    "--learning-rate": (["0.1", "0.1 0.2 0.3"], [*FRACTION[1], "0.1 x", "0.1 nan 0.2", "0.1 1e-1"]),
    "--learning-starts": (["1", "2e5"], [*COUNT[1], "200001"]),
    "--log-interval": (["1", "1e6"], COUNT[1]),
    "--num-envs": (["16", "32"], [*COUNT[1], "1e9"]),
    "--policy": (["random", "rocking"], ["nonsense", "0"]),
    "--seed": (["0", "2e9"], [*NOT_A_NUMBER, "-1", "0.5", "1e10"]),
    "--sigma": (["0.1", "2"], [*NOT_A_NUMBER, "0", "-1", "1e39"]),
    "--sync": (["padding", "truncation"], ["nonsense", "0"]),
    "--total-timesteps": (["1000", "2e6"], COUNT[1]),
}


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
    """One line that names the flag or the value and says what is allowed. No file is created."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) == (".", os.W_OK))
    assert "unrecognized" in refusal(script, ["--see", "3"], capsys)  # no abbreviations
    assert set(VALUES) == {flag for script in SCRIPTS for flag in flags(script)}
    few = ["--total-timesteps", "1e6"] if script == "mountaincar_env.py" else []
    for flag in flags(script):
        good, bad = VALUES[flag]
        for value in good:
            assert refusal(script, [*few, flag, *value.split()], capsys) is None, (flag, value)
        for value in bad:
            words = value.split() or [""]
            error = refusal(script, [*few, flag, *words], capsys)
            assert error, f"{script} takes {flag} {value}"
            assert flag in error or f" {words[-1]}" in f" {error}"
            allowed = (
                r" in \[|choose from|at least|at most|expected|unrecognized|in a writable|twice"
            )
            assert re.search(f"{allowed}|would", error), error
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_shows_the_defaults(script, capsys):
    with pytest.raises(SystemExit):
        importlib.import_module(script[:-3]).parse_args(["--help"])
    words = capsys.readouterr().out.split()
    assert words.count("(default:") == len(flags(script))


def test_log_intervals_are_limited_where_a_line_holds_its_random_numbers(capsys):
    for script in SCRIPTS:
        refused = refusal(script, ["--log-interval", "1e9"], capsys) is not None
        assert refused == (script in TRIO)


def begin(script, *flags, **env):
    """Start a script, its output in pipes."""
    env = USER_ENV | {name: str(value) for name, value in env.items()}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, ROOT / script, *map(str, flags)], env=env, **pipes)


@pytest.mark.parametrize(
    ("script", "few", "learned"),
    [
        ("parallel_td.py", "--log-interval 1600 --total-timesteps 1e9", "weights"),
        ("gridworld_qlearning.py", "--log-interval 1e5 --total-timesteps 1e9", "q_table"),
    ],
)
def test_ctrl_c_ends_with_a_report(script, few, learned, tmp_path):
    """A progress line comes through the pipe at once; the signal follows it."""
    process = begin(script, *few.split(), "--save", tmp_path / "run.npz")
    next(line for line in process.stdout if line.startswith("step"))
    process.send_signal(signal.SIGINT)
    *later, last = process.stdout.read().splitlines()
    assert (process.wait(), process.stderr.read()) == (130, "")
    saved = np.load(tmp_path / "run.npz")
    lines = 1 + sum(line.startswith("step") for line in later)
    assert lines <= len(saved["timesteps"]) <= lines + 1  # Ctrl-C may come before the print
    assert saved["interrupted"] and saved[learned].any()
    assert "interrupted: " in last or "interrupted: " in "".join(later)


@pytest.mark.parametrize(
    ("script", "few", "devices"),
    [
        ("parallel_td.py", "--num-seeds 7 --total-timesteps 1600 --num-centers 20", 1),
        ("mountaincar_env.py", "--num-envs 8 --total-timesteps 1600 --log-interval 800", 6),
    ],
)
def test_a_slurm_job_of_two_tasks_gives_the_bits_of_one_process(script, few, devices, tmp_path):
    """Runs or cars on two devices in each task, and in one process with more or fewer.

    They do not divide evenly, so copies are cut. The last bits of means in lines may differ.
    """
    job = os.getpid()
    while socket.socket().connect_ex(("127.0.0.1", 61440 + job % 4096)) == 0:
        job += 1  # jax takes the port from the number of the job
    slurm = {"SLURM_JOB_ID": job, "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": 2}
    slurm |= {"JAX_NUM_CPU_DEVICES": 2}
    tasks = [slurm | {"SLURM_PROCID": i, "SLURM_LOCALID": i} for i in range(2)]
    few, one = few.split(), {"JAX_NUM_CPU_DEVICES": devices}
    processes = [
        begin(script, *few, "--distributed", "--save", tmp_path / "job.npz", **task)
        for task in tasks
    ]
    processes.append(begin(script, *few, "--save", tmp_path / "one.npz", **one))
    ended = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert [errors for _, errors in ended] == ["", "", ""]
    first, second, alone = (out for out, _ in ended)
    assert " on 4 x " in first and f" on {devices} x " in alone and " on " not in second
    job, one = dict(np.load(tmp_path / "job.npz")), dict(np.load(tmp_path / "one.npz"))
    assert job.keys() == one.keys()
    for name in job.keys() - {"args", "compile_seconds", "train_seconds", "rollout_seconds"}:
        rtol = 1e-6 if name in ("td_error", "q_value") else 0
        np.testing.assert_allclose(job[name], one[name], rtol, atol=0, err_msg=name)
    assert len(job.get("weights", job["timesteps"])) == (7 if "weights" in job else 2)
