"""Each script as a user runs it: a few steps in an empty folder, Ctrl-C, a job of two processes."""

import json
import os
import re
import shutil
import signal
import sys
from subprocess import PIPE, Popen

import numpy as np
import pytest
from conftest import FLAGS, ROOT, SCRIPTS, USER_ENV

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `pytest &` would ignore it


def begin(folder, script, flags, **env):
    shutil.copy(ROOT / script, folder)
    env = USER_ENV | {name: str(value) for name, value in env.items()}
    command = [sys.executable, script, *flags.split()]
    return Popen(command, cwd=folder, env=env, stdout=PIPE, stderr=PIPE, text=True)


def run(folder, script):
    flags = f"{FLAGS[script]} --save run.npz"
    if script == "reinforce_parallel.py":
        flags += " --gif episode.gif --seed 3"  # whose episode is short
    process = begin(folder, script, flags)
    return folder, script, *process.communicate(), process.returncode


@pytest.mark.parametrize("ended", [(run, script) for script in SCRIPTS], indirect=True, ids=SCRIPTS)
def test_runs_alone_in_an_empty_folder(ended):
    folder, script, out, errors, exit_code = ended
    assert (exit_code, errors) == (0, "")
    devices, compiled, *lines = out.splitlines()
    assert re.search(r" on \d+ x ", devices) and re.fullmatch(r"compiled in [\d.]+ s", compiled)
    saved = dict(np.load(folder / "run.npz", allow_pickle=False))
    assert sum(line.endswith(" steps/s") for line in lines) == len(saved["timesteps"]) == 3
    for name in ("weights", "q_table", "w0", "obs"):
        assert np.isfinite(saved.get(name, 0)).all() and np.any(saved.get(name, 1))
    args = json.loads(str(saved["args"]))
    files = {args[name] for name in ("save", "plot", "gif") if name in args}
    assert {path.name for path in folder.iterdir()} == {script, *files}
    assert all((folder / name).stat().st_size > 2000 for name in files)


def press_ctrl_c(folder, script):
    process = begin(folder, script, "--log-interval 1e5 --total-timesteps 1e9 --save run.npz")
    next(line for line in process.stdout if line.startswith("step"))
    process.send_signal(signal.SIGINT)
    return process.stdout.read(), process.stderr.read(), process.wait(), np.load(folder / "run.npz")


@pytest.mark.parametrize("ended", [(press_ctrl_c, SCRIPTS[3])], indirect=True, ids=SCRIPTS[3:4])
def test_ctrl_c_ends_with_a_report(ended):
    """A progress line comes through the pipe at once; the signal follows it."""
    out, errors, exit_code, saved = ended
    assert (exit_code, errors) == (130, "")
    lines = 1 + sum(line.startswith("step") for line in out.splitlines())
    assert lines <= len(saved["timesteps"]) <= lines + 1  # Ctrl-C may come before the print
    assert saved["interrupted"] and saved["q_table"].any() and "\ninterrupted: " in f"\n{out}"


def slurm_job(folder, script, devices, flags):
    """Two tasks with two devices each; beside them one process with more or fewer devices."""
    slurm = {"SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": 2}
    slurm |= {"SLURM_JOB_ID": os.getpid()}  # jax takes its port from this number
    processes = [begin(folder, script, f"{flags} --save one.npz", JAX_NUM_CPU_DEVICES=devices)]
    for task in range(2):
        slurm |= {"JAX_NUM_CPU_DEVICES": 2, "SLURM_PROCID": task, "SLURM_LOCALID": task}
        processes.append(begin(folder, script, f"{flags} --distributed --save job.npz", **slurm))
    ended = [(*process.communicate(timeout=120), process.returncode) for process in processes]
    return folder, f" on {devices} x ", ended


JOBS = [
    (slurm_job, "gridworld_qlearning.py", 1, "--num-seeds 7 --total-timesteps 2000"),
    (slurm_job, "mountaincar_env.py", 6, "--num-envs 8 --total-timesteps 1600 --log-interval 800"),
]


@pytest.mark.parametrize("ended", JOBS, indirect=True, ids=SCRIPTS[3:5])
def test_a_slurm_job_of_two_tasks_gives_the_bits_of_one_process(ended):
    """Seven runs, or eight cars, do not divide evenly: copies fill the devices, and are cut."""
    folder, on_devices, processes = ended
    out, errors, exit_codes = zip(*processes, strict=True)
    assert (exit_codes, errors) == ((0, 0, 0), ("", "", ""))
    assert on_devices in out[0] and " on 4 x " in out[1] and " on " not in out[2]
    one, job = dict(np.load(folder / "one.npz")), dict(np.load(folder / "job.npz"))
    assert one.keys() == job.keys()
    for name in one.keys() - {"args", "compile_seconds", "train_seconds", "rollout_seconds"}:
        np.testing.assert_array_equal(job[name], one[name], err_msg=name)
