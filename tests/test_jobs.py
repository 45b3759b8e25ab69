"""What takes processes of its own: a job of two tasks, and Ctrl-C in a terminal."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from conftest import GRID, ROOT, in_background

# Without the settings that other tests make for themselves.
ENV = {name: text for name, text in os.environ.items() if not name.startswith(("JAX", "XLA"))}
# What Slurm tells its tasks. jax takes its port from the number of the job.
SLURM = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": "2"}

# A shell that runs pytest in the background would have Ctrl-C ignored by all commands.
signal.signal(signal.SIGINT, signal.default_int_handler)


def start(folder, script, flags, **env):
    folder.mkdir()
    shutil.copy(ROOT / script, folder)
    return subprocess.Popen(
        [sys.executable, script, *flags.split()],
        cwd=folder,
        env={**ENV, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@in_background
def job():
    """Run a command alone, and as a job of two tasks. Return what each printed, and the folders."""
    folder = tempfile.TemporaryDirectory()  # removed when Python ends
    # Six runs do not divide evenly among four devices.
    flags = "--num-seeds 3 --gamma 0.5 0.75 --total-timesteps 2500 --num-intervals 3 --save x.npz"
    processes = [start(Path(folder.name, "alone"), GRID, flags)]
    for number in ("0", "1"):
        task = {**SLURM, "SLURM_PROCID": number, "SLURM_LOCALID": number}
        path = Path(folder.name, f"task {number}")
        processes.append(start(path, GRID, f"{flags} --distributed", **task))
    try:
        return [(process, *process.communicate(timeout=120)) for process in processes], folder
    finally:
        for process in processes:
            process.kill()  # one that waits for the other, for example


@pytest.mark.starts(program=job)
def test_a_job_of_two_tasks_gives_the_numbers_of_one_process():
    processes, folder = job()
    for process, _, errors in processes:
        assert process.returncode == 0 and errors == "", errors
    # Only the first task speaks. (Gloo, which connects them, prints a line of its own.)
    assert ["compiled in" in output for _, output, _ in processes] == [True, True, False]
    alone, first, second = (Path(folder.name, name) for name in ("alone", "task 0", "task 1"))
    assert not (second / "x.npz").exists()  # and only the first one writes
    expected, job_of_two = np.load(alone / "x.npz"), np.load(first / "x.npz")
    for name in set(expected) - {"args", "compile_seconds", "train_seconds"}:
        np.testing.assert_array_equal(job_of_two[name], expected[name], err_msg=name)


@in_background
def interrupted():
    """Press Ctrl-C after the second progress line of a command that has a thousand."""
    folder = tempfile.TemporaryDirectory()
    flags = "--total-timesteps 1e9 --num-intervals 1000 --save x.npz"
    process = start(Path(folder.name, "run"), GRID, flags)
    for _ in range(4):  # devices, compiling, two lines of progress
        process.stdout.readline()
    process.send_signal(signal.SIGINT)
    try:
        return process, *process.communicate(timeout=60), folder
    finally:
        process.kill()


@pytest.mark.starts(program=interrupted)
def test_ctrl_c_ends_a_command_with_a_report_and_a_file():
    process, output, errors, folder = interrupted()
    assert process.returncode == 130 and errors == "", errors
    assert "interrupted" in output
    saved = np.load(Path(folder.name, "run", "x.npz"))
    assert saved["interrupted"]
    assert 2 <= len(saved["timesteps"]) < 1000
