"""The command line: wrong values, Ctrl-C, and one job of two processes."""

import importlib
import os
import re
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, SCRIPTS, USER_ENV
from test_consistency import flags

# Of each flag, values that are taken and values that are refused.
NUMBER = "x, nan, inf, -inf, 1e400, 0x10"
COUNT = f"{NUMBER}, 0, -1, 0.5, 1e13"
SHARE = f"{NUMBER}, -0.1, 1.1, 1e39"
GRID = "8, x 8, nan 8, -8 12, 0 12, 8 0, 8 12.5, 1e9 1e9, 8 12 1"
VALUES = {
    "--seed": ("0, 2e9", f"{NUMBER}, -1, 0.5, 1e10"),
    "--num-seeds": ("1, 1e3", COUNT),
    "--num-envs": ("16", f"{COUNT}, 1e9"),
    "--total-timesteps": ("1, 2e6", COUNT),
    "--num-iterations": ("1, 1e3", COUNT),
    "--log-interval": ("1, 1e5", COUNT),
    "--learning-rate": ("0.1, 1, 0.1 0.2 0.3", f"{SHARE}, 0.1 x, 0.1 nan 0.2"),
    "--batch-size": ("16, 1024", COUNT),
    "--buffer-size": ("16, 1e6", f"{COUNT}, 8"),
    "--learning-starts": ("1, 1e5", COUNT),
    "--num-centers": ("1, 1e3", COUNT),
    "--hidden-size": ("1, 1e3", COUNT),
    "--eval-episodes": ("1, 1e3", COUNT),
    "--gamma": ("0, 1", SHARE),
    "--epsilon": ("0, 1", SHARE),
    "--start-e": ("0, 1", SHARE),
    "--end-e": ("0, 1", SHARE),
    "--epsilon-decay": ("0, 1", SHARE),
    "--tau": ("0, 1", SHARE),
    "--sigma": ("0.1, 2", f"{NUMBER}, 0, -1, 1e39"),
    "--grid-size": ("8 12, 20 30", GRID),
    "--env-id": ("Pendulum-v1", "nonsense, cartpole-v1"),
    "--policy": ("random, rocking", "nonsense, 0"),
    "--sync": ("padding, truncation", "nonsense, 0"),
    "--distributed": ("", "1"),
    "--save": ("x.npz", "missing/x.npz"),
    "mountaincar_env.py --save": ("x.npz --total-timesteps 1e5", "x.npz, missing/x.npz"),
    "--plot": ("x.png", "missing/x.png"),
    "--gif": ("x.gif", "missing/x.gif"),
}
TIMING = {"args", "compile_seconds", "train_seconds"}


def refusal(script, argv, capsys):
    """The one line that follows the usage where a command line is refused; None if it is taken."""
    try:
        importlib.import_module(script[:-3]).parse_args(argv)
    except SystemExit as end:
        error = capsys.readouterr().err.partition(f"{os.path.basename(sys.argv[0])}: error: ")[2]
        assert end.code == 2 and error.count("\n") == 1
        return error
    return None


@pytest.mark.parametrize("script", SCRIPTS)
def test_values_are_taken_or_refused_by_name(script, capsys):
    for flag in flags(script):
        good, bad = VALUES.get(f"{script} {flag}") or VALUES[flag]  # a new flag needs a row
        for value in good.split(", "):
            assert refusal(script, [flag, *value.split()], capsys) is None, (flag, value)
        for value in bad.split(", "):
            error = refusal(script, [flag, *value.split()], capsys)
            assert error, f"{script} takes {flag} {value}"
            too_many = f"arguments: {value.split()[-1]}"
            assert any(name in error for name in (flag, too_many, "missing/x")), error
            allowed = r" in \[|choose from|must be|at (least|most)|expected|unrecognized|no such"
            assert re.search(allowed, error), error


def test_every_row_is_of_a_flag():
    assert {row.split()[-1] for row in VALUES} == {
        flag for script in SCRIPTS for flag in flags(script)
    }


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_abbreviations_and_flags_that_must_agree(script, capsys):
    with pytest.raises(SystemExit) as end:
        importlib.import_module(script[:-3]).parse_args(["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0 and all(f"  {flag} " in text for flag in flags(script))
    assert "unrecognized" in refusal(script, ["--see", "3"], capsys)
    if script == "parallel_td.py":
        assert "multiple of --num-envs" in refusal(script, ["--batch-size", "24"], capsys)
        assert refusal(script, ["--batch-size", "24", "--num-envs", "8"], capsys) is None


def test_ctrl_c_ends_with_a_report(tmp_path):
    command = [sys.executable, "-u", ROOT / "parallel_td.py", "--save", tmp_path / "run.npz"]
    command += "--total-timesteps 1e9 --log-interval 1600 --eval-episodes 3".split()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=USER_ENV, **pipes)
    try:
        first = next(line for line in process.stdout if line.startswith("step"))
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, stderr) == (130, "")
    *progress, last = [first, *stdout.splitlines()]
    assert re.match("learning rate .*: greedy return", last)
    saved = dict(np.load(tmp_path / "run.npz"))
    assert len(saved["returns"]) == len(saved["timesteps"]) == len(progress)
    assert saved["weights"].any() and saved["greedy_return"].shape == (1, 3)


@pytest.mark.parametrize(
    "script, devices, few_steps",
    [
        ("parallel_td.py", 1, "--total-timesteps 3200 --log-interval 1600 --num-centers 50"),
        ("reinforce_parallel.py", 4, "--num-iterations 4 --log-interval 2 --hidden-size 8"),
    ],
)
def test_a_slurm_job_of_two_tasks_gives_the_bits_of_one_process(
    script, devices, few_steps, tmp_path
):
    """Four runs on two devices in each of two tasks, and on so many devices in one process."""
    job = os.getpid()
    while socket.socket().connect_ex(("127.0.0.1", 61440 + job % 4096)) == 0:
        job += 1  # jax takes the port from the number of the job
    slurm = {"SLURM_JOB_ID": job, "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": 2}
    tasks = [slurm | {"SLURM_PROCID": i, "SLURM_LOCALID": i} for i in range(2)]
    flags = [*few_steps.split(), "--num-seeds", "4", "--eval-episodes", "3"]

    def begin(name, devices, task, *more):
        env = {"JAX_NUM_CPU_DEVICES": devices, **task}
        command = [sys.executable, ROOT / script, *flags, "--save", tmp_path / name, *more]
        env = USER_ENV | {name: str(value) for name, value in env.items()}
        return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)

    processes = [begin("one.npz", devices, {})]
    processes += [begin("two.npz", 2, task, "--distributed") for task in tasks]
    ends = [(process.communicate(timeout=120)[1], process.returncode) for process in processes]
    assert ends == [("", 0)] * 3
    one, two = dict(np.load(tmp_path / "one.npz")), dict(np.load(tmp_path / "two.npz"))
    assert one.keys() == two.keys() and len(one.keys() - TIMING) >= 7
    for name in one.keys() - TIMING:
        np.testing.assert_array_equal(two[name], one[name], err_msg=name)
