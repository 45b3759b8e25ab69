"""What the scripts do the same way: runs on devices, sweeps, curves, Ctrl-C, one that reports."""

import argparse
import importlib
import sys
import warnings
from unittest.mock import DEFAULT, Mock

import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest
from conftest import FLAGS, SCRIPTS, TRIO
from matplotlib.colors import to_rgba

LEARNERS = [script for script in SCRIPTS if script != "mountaincar_env.py"]
TIMES = {"args", "compile_seconds", "train_seconds", "rollout_seconds", "interrupted"}
equal = np.testing.assert_array_equal


@pytest.fixture
def script(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(request.param[:-3])
    module.flags = FLAGS[request.param].split()
    return module


def each(names):
    return pytest.mark.parametrize("script", names, indirect=True)


def press_ctrl_c(interval, script, monkeypatch):
    """Let Ctrl-C arrive while the results of a log interval are awaited."""
    waits = 2 if script.__name__ == "mountaincar_env" else 1  # for sums and for the trajectory
    outcomes = [DEFAULT] * waits * (interval - 1) + [KeyboardInterrupt] + [DEFAULT] * 3
    wait = Mock(wraps=script.process_allgather, side_effect=outcomes)
    monkeypatch.setattr(script, "process_allgather", wait)


@each(SCRIPTS)
def test_ctrl_c_keeps_what_the_last_line_shows(script, capsys, monkeypatch):
    """In the third interval: saved is what a run returns that has only two of the same length."""
    two = script.parse_args(script.flags)
    two.num_intervals = 2
    with monkeypatch.context() as patch:
        patch.setattr(script, "parse_args", lambda _: two)
        complete = script.main()
    capsys.readouterr()
    press_ctrl_c(3, script, monkeypatch)
    results = script.main([*script.flags, "--save", "x.npz"])
    assert "\ninterrupted: the results are those of the last line\n" in capsys.readouterr().out
    saved = np.load("x.npz")
    assert results["interrupted"] and saved["interrupted"] and not complete["interrupted"]
    assert len(results["timesteps"]) == 2 and {*saved.files} >= complete.keys()
    for name in complete.keys() - TIMES:
        equal(results[name], complete[name], err_msg=name)
        equal(saved[name], complete[name], err_msg=name)


@each(SCRIPTS)
def test_ctrl_c_before_the_first_line_is_an_error(script, monkeypatch):
    press_ctrl_c(1, script, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        script.main(script.flags)


@each(SCRIPTS)
def test_ctrl_c_in_a_distributed_job_is_an_error(script, monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    press_ctrl_c(2, script, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        script.main([*script.flags, "--distributed"])


@each(SCRIPTS)
def test_process_1_neither_prints_nor_writes(script, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # is restored at the end
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    files = "--save x.npz --plot x.png --gif x.gif".split()
    known = {name for name in vars(script.parse_args([])) if name in ("save", "plot", "gif")}
    results = script.main([*script.flags, *files[: 2 * len(known)]])
    assert len(results["timesteps"]) == 3
    assert not any(tmp_path.iterdir()) and capsys.readouterr().out == ""


@each(LEARNERS)
def test_no_key_is_used_twice(script):
    """JAX checks the keys when it traces a program; nothing has to run."""
    args = script.parse_args(script.flags)

    def learn_and_play(own):
        run = argparse.Namespace(**vars(args) | own)
        return script.evaluate(run, script.train_interval(run, script.init_state(run))[0])

    runs, _ = script.sweep(args)
    with jax.debug_key_reuse(True):
        jax.jit(learn_and_play).trace({name: values[0] for name, values in runs.items()})


@each(LEARNERS)
def test_a_sweep_by_hand(script):
    """Each value with each other one and with each seed, which varies fastest."""
    flags = "--learning-rate 0.25 0.125 --gamma 1 0 0.5 --seed 7 --num-seeds 2"
    runs, labels = script.sweep(script.parse_args(flags.split()))
    equal(runs["seed"], [7, 8] * 6)
    equal(runs["learning_rate"], [0.25] * 6 + [0.125] * 6)
    equal(runs["gamma"], [1, 1, 0, 0, 0.5, 0.5] * 2)
    assert {*runs} == {*script.SWEPT, "seed"}
    assert all(len(values) == 12 for values in runs.values())
    rates, gammas = (
        ["learning_rate 0.25", "learning_rate 0.125"],
        ["gamma 1", "gamma 0", "gamma 0.5"],
    )
    assert labels == [f"{rate}, {gamma}" for rate in rates for gamma in gammas]
    runs, labels = script.sweep(script.parse_args(["--num-seeds", "3"]))
    assert labels == [""] and runs["seed"].tolist() == [0, 1, 2]


@each(LEARNERS)
@pytest.mark.parametrize(
    ("devices", "runs", "needed", "length"),
    [(16, 20, 10, 20), (4, 1, 1, 1), (4, 6, 3, 6), (4, 7, 4, 8), (2, 7, 2, 8), (4, 4, 4, 4)],
)
def test_runs_are_spread_over_no_more_devices_than_needed(
    script, devices, runs, needed, length, monkeypatch
):
    """Of a job, all devices are used. Copies of the last run fill them."""
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    values = {"seed": np.arange(runs), "gamma": np.arange(runs) ** 2}
    for in_a_job, expected in (False, (needed, length)), (True, (devices, -(-runs // devices))):
        used, padded = script.spread(values, in_a_job)
        total = expected[1] * devices if in_a_job else expected[1]
        assert (used, len(padded["seed"])) == (expected[0], total)
        copied = np.minimum(np.arange(total), runs - 1)
        equal(padded["seed"], copied)
        equal(padded["gamma"], copied**2)


@each(LEARNERS)
def test_runs_have_their_own_arguments_and_keep_their_order(script, monkeypatch):
    """On each device as many runs as given. The grid world takes 70 in batches, and 6 in turn."""
    args = argparse.Namespace(gamma=None, size=10)
    for runs in (6, 70) if script.__name__ == "gridworld_qlearning" else (6,):
        own = {"gamma": np.arange(runs * min(2, jax.device_count()))}
        function = script.over_runs(
            lambda run, x: run.gamma + run.size * x, args, len(own["gamma"]) // runs
        )
        x = np.array(own["gamma"]) ** 2
        equal(script.gather(function(own, x), 5), (own["gamma"] + 10 * x)[:5])
        equal(function(own, x), own["gamma"] + 10 * x)
    assert args.gamma is None


@each(SCRIPTS)
@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_compiler_options_are_for_cpus(script, backend, monkeypatch):
    monkeypatch.setattr(jax, "jit", jit := Mock())
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    if script.__name__ == "mountaincar_env":
        script.over_devices(None, 1)
    else:
        script.over_runs(None, argparse.Namespace(), 1)
    options = script.COMPILER_OPTIONS if backend == "cpu" else None
    assert jit.call_args.kwargs == {"compiler_options": options}


@each([*TRIO, "reinforce_parallel.py"])
def test_the_figure_shows_the_returns(script, tmp_path):
    """Thin lines for runs, a bold one for each setting's median; a single point has a marker."""
    nan = np.nan
    steps = np.array([[1, 2, 3, 4], [6, 7, 6, 9], [9] * 4])  # (K, R) of REINFORCE
    returns = np.array([[3.0, 4, 4, 8], [7, 5, 1, 6], [9.0, 8, 2, 8]])
    if script.__name__ != "reinforce_parallel":
        steps, returns[0], returns[1, 1] = np.repeat([[10], [20], [30]], 4, axis=1), nan, nan
    x = steps if script.__name__ == "reinforce_parallel" else steps[:, 0]
    open_before = plt.get_fignums()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(plt, "close", lambda: None)
        script.plot("x.png", ["gamma 0.1", "gamma 0.3"], x, returns)
    axes = plt.gca()
    plt.close()
    assert plt.get_fignums() == open_before
    lines = axes.get_lines()
    assert len(lines) == 6 and {line.get_marker() for line in lines} == {"."}
    for drawn, color, runs in (lines[:3], "C0", [0, 1]), (lines[3:], "C1", [2, 3]):
        medians = np.array(
            [
                np.median(row[~np.isnan(row)]) if not np.isnan(row).all() else nan
                for row in returns[:, runs]
            ]
        )
        equal([line.get_xdata() for line in drawn], [*steps.T[runs], np.median(steps[:, runs], 1)])
        equal([line.get_ydata() for line in drawn], [*returns.T[runs], medians])
        assert {line.get_color() for line in drawn} <= {color, to_rgba(color)}
        *thin, bold = [line.get_linewidth() for line in drawn]
        assert max(thin) < 1 < bold
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == ["median  gamma 0.1", "median  gamma 0.3"]
    assert axes.get_xlabel() == "environment steps"
    assert axes.get_ylabel() == "return of training episodes"
    assert axes.xaxis.get_major_formatter()(100_000) == "100k"
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    script.plot("x.png", [""], x, returns)
    assert plt.get_fignums() == open_before
