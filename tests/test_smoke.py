"""Each script as a user runs it: a few steps in an empty folder, Ctrl-C, a job of two processes."""

import json
import math
import os
import re
import signal

import numpy as np
import pytest
from conftest import SCRIPTS, USER_ENV, start
from PIL import Image

import parallel_td

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `pytest &` would ignore it


@pytest.mark.parametrize("script", SCRIPTS)
def test_runs_alone_in_an_empty_folder(script, started):
    """With a sweep, a picture and a file, and REINFORCE with an animation.

    Each core is a device, if so many are needed: learners make 15 runs, and there are 3 cars.
    """
    folder, process = started[script]
    out, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    devices, compiled, *lines = out.splitlines()
    assert re.fullmatch(r"compiled in [\d.]+ s", compiled)
    if devices.endswith(" x cpu"):
        runs = 3 if script == "mountaincar_env.py" else 15
        cores = int(USER_ENV.get("JAX_NUM_CPU_DEVICES", parallel_td.CORES))
        assert f" on {math.ceil(runs / math.ceil(runs / cores))} x " in devices
    saved = dict(np.load(folder / "x.npz", allow_pickle=False))
    assert sum(line.endswith(" steps/s") for line in lines) == len(saved["timesteps"]) == 3
    for name in ("weights", "q_table", "w0", "obs"):
        assert np.isfinite(saved.get(name, 0)).all() and np.any(saved.get(name, 1))
    args = json.loads(str(saved["args"]))
    files = {args[name] for name in ("save", "plot", "gif") if name in args}
    assert {path.name for path in folder.iterdir()} == {script, *files}
    assert all((folder / name).stat().st_size > 2000 for name in files)
    if "gif" in args:  # a frame for each step, and each step of CartPole-v1 has a reward of 1
        assert Image.open(folder / args["gif"]).n_frames == saved["greedy_return"][0, 0]


def test_ctrl_c_ends_with_a_report(tmp_path):
    """The first of 100 lines comes through the pipe at once; the signal follows it."""
    flags = "--log-interval 1e7 --total-timesteps 1e9 --save run.npz"
    process = start(tmp_path, "gridworld_qlearning.py", flags)
    next(line for line in process.stdout if line.startswith("step"))
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate()
    assert (process.returncode, errors) == (130, "")
    lines, saved = 1 + f"\n{out}".count("\nstep"), np.load(tmp_path / "run.npz")
    assert lines <= len(saved["timesteps"]) <= lines + 1  # Ctrl-C may come before the print
    assert saved["interrupted"] and saved["q_table"].any() and "\ninterrupted: " in f"\n{out}"


def test_a_slurm_job_of_two_tasks_gives_the_bits_of_one_process(tmp_path):
    """Seven runs do not divide evenly: the surplus that fills the devices is cut."""
    script, flags = "gridworld_qlearning.py", "--num-seeds 7 --total-timesteps 2000"
    one = start(tmp_path, script, f"{flags} --save one.npz", JAX_NUM_CPU_DEVICES=1)
    slurm = {"SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": 2, "JAX_NUM_CPU_DEVICES": 2}
    slurm |= {"SLURM_JOB_ID": os.getpid()}  # jax takes its port from this number
    flags += " --distributed --save job.npz"
    tasks = [
        start(tmp_path, script, flags, **slurm, SLURM_PROCID=i, SLURM_LOCALID=i) for i in (0, 1)
    ]
    out, errors = zip(*[process.communicate(timeout=120) for process in [one, *tasks]], strict=True)
    assert errors == ("", "", "") and {process.returncode for process in [one, *tasks]} == {0}
    assert " on 1 x " in out[0] and " on 4 x " in out[1] and " on " not in out[2]
    alone, job = dict(np.load(tmp_path / "one.npz")), dict(np.load(tmp_path / "job.npz"))
    assert alone.keys() == job.keys()
    for name in alone.keys() - {"args", "compile_seconds", "train_seconds"}:
        np.testing.assert_array_equal(job[name], alone[name], err_msg=name)
