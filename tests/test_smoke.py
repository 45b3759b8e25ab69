"""Each script as a user runs it: a few steps in an empty folder, Ctrl-C, a job of two processes."""

import os
import re
import shutil
import signal
import sys
from subprocess import PIPE, Popen

import numpy as np
import pytest
from conftest import ROOT, SCRIPTS, TRIO, USER_ENV

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `pytest &` would ignore it
SWEEP = "--num-seeds 3 --gamma 0.5 0.75 --num-intervals 3 --save x.npz"
POLE = f"{SWEEP} --eval-episodes 2"
FLAGS = dict.fromkeys(TRIO, f"{POLE} --total-timesteps 70 --num-centers 9")
FLAGS["gridworld_qlearning.py"] = f"{SWEEP} --total-timesteps 2500 --grid-size 2 3 --plot x.pdf"
FLAGS["reinforce_parallel.py"] = f"{POLE} --num-envs 2 --num-iterations 3 --plot x.pdf --gif x.gif"
FLAGS["mountaincar_env.py"] = "--num-envs 3 --num-episodes 7 --num-intervals 3 --save x.npz"


def start(folder, script, flags, **env):
    shutil.copy(ROOT / script, folder)
    command = ["nice", sys.executable, script, *flags.split()]
    return Popen(command, cwd=folder, env=USER_ENV | env, stdout=PIPE, stderr=PIPE, text=True)


@pytest.fixture(scope="module")  # all at once, and the tests of other processes come first
def started(tmp_path_factory):
    folders = {script: tmp_path_factory.mktemp("run") for script in SCRIPTS}
    env = {"MPLBACKEND": "module://none", "JAX_CHECK_TRACER_LEAKS": "1", "JAX_NUM_CPU_DEVICES": "1"}
    return {script: (f, start(f, script, FLAGS[script], **env)) for script, f in folders.items()}


@pytest.mark.parametrize("script", ["gridworld_qlearning.py", "mountaincar_env.py"])
def test_a_slurm_job_of_two_tasks_gives_the_bits_of_one_process(script, started, tmp_path):
    """Neither six runs nor three cars divide evenly: copies that fill up devices are cut."""
    slurm = {"SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": "2", "JAX_NUM_CPU_DEVICES": "2"}
    own = [{"SLURM_PROCID": i, "SLURM_LOCALID": i, "SLURM_JOB_ID": str(os.getpid())} for i in "01"]
    flags = f"{FLAGS[script]} --distributed"  # jax takes its port from SLURM_JOB_ID
    tasks = [start(tmp_path, script, flags, **slurm, **each) for each in own]
    out, errors = zip(*[process.communicate(timeout=120) for process in tasks], strict=True)
    assert errors == ("", "") and "compiled" in out[0] and "compiled" not in out[1]
    started[script][1].wait()
    alone, job = np.load(started[script][0] / "x.npz"), np.load(tmp_path / "x.npz")
    for name in {name for name in alone if "seconds" not in name} - {"args"}:
        np.testing.assert_array_equal(job[name], alone[name], err_msg=name)


def test_ctrl_c_ends_gridworld_qlearning_with_a_report(tmp_path):
    """Lines come through a pipe at once. The signal follows the second; 998 are to come."""
    flags = "--num-intervals 1000 --total-timesteps 1e9 --save run.npz"
    process = start(tmp_path, "gridworld_qlearning.py", flags)
    [process.stdout.readline() for _ in range(4)]
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate()
    assert (process.returncode, errors) == (130, "")
    more, _, text = out.partition("interrupted")
    steps = np.load(tmp_path / "run.npz")["timesteps"]
    assert len(steps) == 2 + more.count("\n") < 1000 and f"{steps[-1, 0]:,}" in text


@pytest.mark.parametrize("script", SCRIPTS)
def test_runs_alone_in_an_empty_folder(script, started):
    folder, process = started[script]
    assert process.communicate()[1] == "" and process.returncode == 0
    files = re.findall(r"x\.\w+", FLAGS[script])
    assert {path.name for path in folder.iterdir()} == {script, *files}
    assert all((folder / name).stat().st_size > 2000 for name in files)
