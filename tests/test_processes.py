"""Runs spread over devices and processes: the same bits as on one; and what happens when a process is interrupted or lost.

(mountaincar_env.py spreads environments, and has a timeout of its own: test_mountaincar_env.py.)
"""
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
TD = "--total-timesteps 4000 --log-interval 2000 --num-centers 100 --eval-episodes 3 --num-seeds 4".split()
FEW_STEPS = {
    "epsilon_decay_td.py": TD,
    "gridworld_qlearning.py": "--total-timesteps 2000 --log-interval 1000 --num-seeds 4".split(),
    "parallel_td.py": TD,
    "reinforce_parallel.py": "--num-iterations 4 --log-interval 2 --hidden-size 8 --eval-episodes 3 --num-seeds 4".split(),
    "replay_td.py": TD,
}
OF_TIME = {"seconds_to_compile", "seconds_to_run", "steps_per_second", "peak_memory_mb"}


@pytest.fixture
def begin():
    """Gives a function that starts a script; kills what still runs at the end."""
    processes = []

    def begin(script, *flags):
        processes.append(subprocess.Popen([sys.executable, str(ROOT / script), *map(str, flags)], text=True,
                                          stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        return processes[-1]
    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def begin_two(begin, script, *flags):
    """Start a program of two processes, at a port of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = f"--num-processes 2 --coordinator 127.0.0.1:{probe.getsockname()[1]} --process-id".split()
    return [begin(script, *flags, *where, number) for number in (0, 1)]


def end(process, code=0, seconds=240):
    """Wait for a process that should end with this code in this time; returns what it wrote."""
    stdout, stderr = process.communicate(timeout=seconds)
    assert process.returncode == code, stderr
    return stdout, stderr


@pytest.mark.parametrize("script", sorted(FEW_STEPS))
def test_same_bits_on_any_number_of_devices_and_processes(script, begin, tmp_path):
    """Four runs on one device, and on two in each of two processes, of which the first prints, saves and draws."""
    flags = *FEW_STEPS[script], "--json", "--save"
    alone = begin(script, *flags, tmp_path / "one.npz")
    first, second = begin_two(begin, script, *flags, tmp_path / "four.npz", "--num-devices", 2, "--plot", tmp_path / "four.png")
    assert end(second) == ("", "")
    reports = [json.loads(end(process)[0]) for process in (first, alone)]
    assert [report["num_devices"] for report in reports] == [4, 1] and reports[0]["runs"] == reports[1]["runs"]
    one, four = (dict(np.load(tmp_path / f"{name}.npz")) for name in ("one", "four"))
    compared = set(one) - OF_TIME - {"args"}
    assert len(compared) >= 6 and set(four) == set(one)
    for name in compared:
        np.testing.assert_array_equal(four[name], one[name], err_msg=name)
    parameters = next(one[name] for name in ("weights", "q_table", "w0") if name in one)
    assert len(np.unique(parameters.reshape(4, -1), axis=0)) == 4  # each seed has its own run
    assert {path.name for path in tmp_path.iterdir()} == {"one.npz", "four.npz", "four.png"}


def begin_for_hours(begin, tmp_path):
    """Two processes of the grid world, which compiles soonest, in the midst of their run."""
    flags = "--total-timesteps 1e9 --log-interval 1000 --num-seeds 2 --save".split()
    processes = begin_two(begin, "gridworld_qlearning.py", *flags, tmp_path / "x.npz")
    next(line for line in processes[0].stdout if line.startswith("step       2,000"))  # by now the first interval is saved
    return processes


def test_ctrl_c_in_one_process_stops_all(begin, tmp_path):
    first, second = begin_for_hours(begin, tmp_path)
    second.send_signal(signal.SIGINT)
    assert end(second, 130) == ("", "")
    stdout, stderr = end(first, 130)
    assert stderr == "" and "learning rate 0.1: greedy path" in stdout
    assert 1000 <= np.load(tmp_path / "x.npz")["curve_timesteps"][-1] < 1e9


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_process_ends_the_other_and_leaves_what_was_saved(lost, begin, tmp_path):
    processes = begin_for_hours(begin, tmp_path)
    processes[lost].kill()
    stdout, stderr = processes[1 - lost].communicate(timeout=20)
    assert f"processes cannot go on; saved so far: {tmp_path / 'x.npz'}; " in stderr and "Traceback" not in stderr
    if lost == 1:  # without process 0, jax ends the others itself, perhaps a moment sooner
        assert len(stderr.splitlines()) == processes[0].returncode == 1
    assert np.load(tmp_path / "x.npz")["q_table"].shape == (2, 8, 12, 4)
