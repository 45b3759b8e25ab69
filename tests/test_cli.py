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
    "--batch-size": COUNT,
    "--buffer-size": (["16", "1e6"], [*COUNT[1], "8"]),
    "--distributed": ([""], ["1"]),
    "--end-e": FRACTION,
    "--env-id": (["CartPole-v1"], ["nonsense", "cartpole-v1", "MNISTBandit-bsuite"]),
    "--epsilon": FRACTION,
    "--epsilon-decay": FRACTION,
    "--eval-episodes": COUNT,
    "--gamma": FRACTION,
    "--gif": FILE,
    "--grid-size": (["8 12", "20 30"], ["8", "x 8", "nan 8", "-8 12", "0 12", "8 12.5", "8 12 1"]),
    "--hidden-size": COUNT,
    "--learning-rate": (["0.1", "0.1 0.2 0.3"], [*FRACTION[1], "0.1 x", "0.1 nan 0.2"]),
    "--learning-starts": COUNT,
    "--log-interval": (["1", "1e9"], COUNT[1]),
    "--num-centers": COUNT,
    "--num-envs": (["16", "32"], [*COUNT[1], "1e9"]),
    "--num-iterations": COUNT,
    "--num-seeds": COUNT,
    "--plot": FILE,
    "--policy": (["random", "rocking"], ["nonsense", "0"]),
    "--save": FILE,
    "--seed": (["0", "2e9"], [*NOT_A_NUMBER, "-1", "0.5", "1e10"]),
    "--sigma": (["0.1", "2"], [*NOT_A_NUMBER, "0", "-1", "1e39"]),
    "--start-e": FRACTION,
    "--sync": (["padding", "truncation"], ["nonsense", "0"]),
    "--tau": FRACTION,
    "--total-timesteps": (["1", "2e6"], COUNT[1]),
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
def test_values_are_taken_or_refused_by_name(script, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "unrecognized" in refusal(script, ["--see", "3"], capsys)  # no abbreviations
    for flag in flags(script):
        good, bad = VALUES[flag]  # a new flag needs a row
        few = ["--total-timesteps", "1e5"] if script == "mountaincar_env.py" else []
        for value in good:
            few = [] if flag == "--total-timesteps" else few
            assert refusal(script, [*few, flag, *value.split()], capsys) is None, (flag, value)
        for value in bad:
            words = value.split() or [""]
            error = refusal(script, [flag, *words], capsys)
            assert error, f"{script} takes {flag} {value}"
            assert flag in error or f"arguments: {words[-1]}" in error or words[0] in error
            allowed = r" in \[|choose from|at (least|most)|expected|unrecognized|cannot write|would"
            assert re.search(allowed, error), error


def test_every_row_is_of_a_flag():
    assert set(VALUES) == {flag for script in SCRIPTS for flag in flags(script)}


def begin(script, flags, env=None):
    """Start a script, its output in pipes."""
    env = USER_ENV | {name: str(value) for name, value in (env or {}).items()}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, ROOT / script, *map(str, flags)], env=env, **pipes)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_with_a_report(number, tmp_path):
    """The progress line comes through the pipe at once; the signal follows it."""
    few = "--total-timesteps 1e9 --log-interval 1600 --eval-episodes 3".split()
    process = begin("parallel_td.py", [*few, "--save", tmp_path / "run.npz"])
    progress = [next(line for line in process.stdout if line.startswith("step"))]
    process.send_signal(number)
    *later, last = process.stdout.read().splitlines()
    assert (process.wait(), process.stderr.read()) == (130, "")
    progress += later
    assert re.match("learning rate .*: greedy return", last)
    saved = np.load(tmp_path / "run.npz")
    assert len(saved["returns"]) == len(saved["timesteps"]) == len(progress)
    assert saved["weights"].any() and saved["greedy_return"].shape == (1, 3)


@pytest.mark.parametrize("script", ["gridworld_qlearning.py", "mountaincar_env.py"])
def test_a_second_ctrl_c_ends_the_process_at_once(script):
    """In the middle of one chunk of a minute. No traceback: it is not Python that ends."""
    chunk = "--total-timesteps 1e9 --log-interval 1e9"
    few = "--num-envs 1" if script == "mountaincar_env.py" else "--num-seeds 20"
    process = begin(script, f"{chunk} {few}".split())
    next(line for line in process.stdout if line.startswith("compiled"))
    for _ in range(2):
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)  # for the first handler to run
    try:
        assert process.wait(timeout=5) == -signal.SIGINT
        assert process.stdout.read() == process.stderr.read() == ""
    finally:
        process.kill()


def test_any_number_of_runs_on_any_number_of_devices(tmp_path):
    """Seven runs on 1 and 6 devices: the surplus is cut, the bits are the same."""
    few = "--num-seeds 7 --total-timesteps 1600 --num-centers 20 --eval-episodes 3".split()
    processes, saved = [], []
    for devices in [1, 6]:
        flags = [*few, "--save", tmp_path / f"{devices}.npz"]
        processes.append(begin("parallel_td.py", flags, {"JAX_NUM_CPU_DEVICES": devices}))
    for devices, used, process in zip([1, 6], [1, 4], processes, strict=True):
        stdout, stderr = process.communicate(timeout=120)
        assert (process.returncode, stderr) == (0, "")
        assert f"7 runs on {used} x" in stdout
        saved.append(np.load(tmp_path / f"{devices}.npz"))
    one, six = saved
    assert one["returns"].shape == (1, 7)
    for name in set(one) - TIMING:
        np.testing.assert_array_equal(six[name], one[name], err_msg=name)


LEARNERS = "--num-seeds 3 --eval-episodes 3"


@pytest.mark.parametrize(
    "script, few_steps",
    [
        ("parallel_td.py", f"{LEARNERS} --total-timesteps 3200 --num-centers 50"),
        ("mountaincar_env.py", "--num-envs 8 --total-timesteps 1600 --log-interval 800"),
        ("reinforce_parallel.py", f"{LEARNERS} --num-iterations 4 --hidden-size 8"),
    ],
)
def test_a_slurm_job_of_two_tasks_gives_the_bits_of_one_process(script, few_steps, tmp_path):
    """Three runs on two devices in each of two tasks, and on four devices in one process."""
    job = os.getpid()
    while socket.socket().connect_ex(("127.0.0.1", 61440 + job % 4096)) == 0:
        job += 1  # jax takes the port from the number of the job
    slurm = {"SLURM_JOB_ID": job, "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": 2}
    tasks = [slurm | {"SLURM_PROCID": i, "SLURM_LOCALID": i} for i in range(2)]
    flags = few_steps.split()

    save = tmp_path / "one.npz"
    processes = [begin(script, [*flags, "--save", save], {"JAX_NUM_CPU_DEVICES": 4})]
    flags += ["--distributed", "--save", tmp_path / "two.npz"]
    processes += [begin(script, flags, {"JAX_NUM_CPU_DEVICES": 2} | task) for task in tasks]
    ends = [(process.communicate(timeout=120)[1], process.returncode) for process in processes]
    assert ends == [("", 0)] * 3
    one, two = dict(np.load(tmp_path / "one.npz")), dict(np.load(tmp_path / "two.npz"))
    assert one.keys() == two.keys() and len(one.keys() - TIMING) >= 5
    for name in one.keys() - TIMING:
        np.testing.assert_array_equal(two[name], one[name], err_msg=name)
