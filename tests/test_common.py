"""What the scripts do the same way: sweeps, devices, curves, Ctrl-C, one process that reports."""

import argparse
import importlib
import json
import re
import sys
import warnings
from unittest.mock import DEFAULT, Mock

import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest
from conftest import FLAGS, ROOT, SCRIPTS, TRIO
from matplotlib.colors import to_rgba

LEARNERS = [script for script in SCRIPTS if script != "mountaincar_env.py"]
equal = np.testing.assert_array_equal


@pytest.fixture
def script(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(request.param[:-3])
    module.flags = FLAGS[request.param].split()
    return module


def each(names):
    return pytest.mark.parametrize("script", names, indirect=True)


def numbers_and_form(text):
    """Numbers in a text, and its form: each digit 0, and a single 0 before a point."""
    numbers = [float(found.replace(",", "")) for found in re.findall(r"\d[\d,]*\.?\d*", text)]
    return numbers, re.sub(r"(?<!\.)\b0+", "0", re.sub(r"\d", "0", text))


@each(LEARNERS)
def test_a_sweep_is_printed_drawn_and_saved(script, capsys, monkeypatch):
    """The output is that of tests/reports, up to rounding. Some runs have no return at first.

    Tables of the grid world are shown for four of five settings. Of nine (15) runs on two devices,
    the last has a copy. The clock shows 3.25 s for compiling, then intervals of 1, 2 and 4 s.
    """
    drawn, grid = [], script.__name__ == "gridworld_qlearning"
    monkeypatch.setattr(script, "plot", lambda *call: drawn.extend(call))
    monkeypatch.setattr(script, "animate", None, raising=False)  # without --gif, it is not called
    ticks = iter([10, 13.25, 20, 21, 30, 32, 40, 44])
    monkeypatch.setattr(script, "time", Mock(perf_counter=ticks.__next__))
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    results = script.main([*script.flags, *"--seed 2 --save x.npz --plot x.png".split()])
    printed = capsys.readouterr().out
    numbers, form = numbers_and_form(printed)
    expected = (ROOT / f"tests/reports/{script.__name__}.txt").read_text()
    assert form == numbers_and_form(expected)[1], printed
    np.testing.assert_allclose(numbers, numbers_and_form(expected)[0], 0.01, 1e-3, err_msg=printed)
    last = [line.split("  ", 1) for line in printed.splitlines()[-5 if grid else -3 :]]
    assert len({learned for _, learned in last}) == len(last)  # the settings differ
    np.testing.assert_equal(dict(np.load("x.npz")), results)
    times = results["compile_seconds"], results["train_seconds"], results["interrupted"]
    assert times == (3.25, 7, False) and json.loads(results["args"])["seed"] == 2
    curve = [results["timesteps"], results["returns"]]
    if grid:
        curve = [[table.mean(axis=0) for table in np.split(results["q_table"], 5)][:4]]
    np.testing.assert_equal(drawn, ["x.png", [label for label, _ in last[:4]], *curve])


def press_ctrl_c(interval, script, monkeypatch):
    """Let Ctrl-C arrive while the results of a log interval are awaited."""
    waits = 2 if script.__name__ == "mountaincar_env" else 1  # for sums and for the trajectory
    outcomes = [DEFAULT] * waits * (interval - 1) + [KeyboardInterrupt] + [DEFAULT] * 3
    wait = Mock(wraps=script.process_allgather, side_effect=outcomes)
    monkeypatch.setattr(script, "process_allgather", wait)


@each(SCRIPTS)
def test_ctrl_c_keeps_what_the_last_line_shows(script, capsys, monkeypatch):
    """In the third interval: what is saved is what a run of only the first two returns."""
    two = script.parse_args(script.flags)
    two.num_intervals = 2
    with monkeypatch.context() as patch:
        patch.setattr(script, "parse_args", lambda _: two)
        complete = script.main()
    press_ctrl_c(3, script, monkeypatch)
    results = script.main([*script.flags, "--save", "x.npz"])
    assert "\ninterrupted: the results are those of the last line\n" in capsys.readouterr().out
    saved = np.load("x.npz")
    assert results["interrupted"] and saved["interrupted"] and not complete.pop("interrupted")
    assert len(saved["timesteps"]) == 2 and {*saved.files} > complete.keys()
    for name, value in complete.items():
        if name != "args" and not name.endswith("seconds"):
            equal(saved[name], value, err_msg=name)


@each(SCRIPTS)
@pytest.mark.parametrize(("interval", "flags"), [(1, []), (2, ["--distributed"])])
def test_ctrl_c_before_the_first_line_or_in_a_job_is_an_error(interval, flags, script, monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    press_ctrl_c(interval, script, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        script.main([*script.flags, *flags])


@each(SCRIPTS)
def test_process_1_neither_prints_nor_writes(script, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # is restored at the end
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    files = {"save": "x.npz", "plot": "x.png", "gif": "x.gif"}
    known = [name for name in files if name in vars(script.parse_args([]))]
    flags = [word for name in known for word in (f"--{name}", files[name])]
    assert len(script.main([*script.flags, *flags])["timesteps"]) == 3
    assert not any(tmp_path.iterdir()) and capsys.readouterr().out == ""


@each(LEARNERS)
def test_no_key_is_used_twice(script):
    """JAX checks the keys when it traces a program; nothing has to run."""
    args = script.parse_args(script.flags)

    def learn_and_play(own):
        run = argparse.Namespace(**vars(args) | own)
        return script.evaluate(run, script.train_interval(run, script.init_state(run))[0])

    with jax.debug_key_reuse(True):
        own = {name: values[0] for name, values in script.sweep(args)[0].items()}
        jax.jit(learn_and_play).trace(own)


@each(LEARNERS)
def test_a_setting_is_named_by_the_flags_that_vary(script):
    args = script.parse_args("--gamma 0 1 --learning-rate 0.5 0.25".split())
    rates, gammas = ["learning_rate 0.5", "learning_rate 0.25"], ["gamma 0", "gamma 1"]
    assert script.sweep(args)[1] == [f"{rate}, {gamma}" for rate in rates for gamma in gammas]


@each(LEARNERS)
def test_runs_are_spread_over_no_more_devices_than_needed(script, monkeypatch):
    """21 runs need 11 of 16 devices, two on each. A job uses all. The rest is the last run."""
    monkeypatch.setattr(jax, "device_count", lambda: 16)
    runs = {"seed": np.arange(21), "gamma": np.arange(21) ** 2}
    for in_a_job, used in (False, 11), (True, 16):
        num_devices, padded = script.spread(runs, in_a_job)
        equal(padded["gamma"], np.minimum(np.arange(2 * used), 20) ** 2)
        assert num_devices == used


@each([*TRIO, "mountaincar_env.py", "reinforce_parallel.py"])
def test_compiler_options_are_for_cpus(script, monkeypatch):
    """Where they are used, a wrong one is an error."""
    monkeypatch.setattr(script, "COMPILER_OPTIONS", {"no_such_option": 1})
    double = script.over_runs(lambda run: 2 * run.seed, argparse.Namespace(), 1)
    with pytest.raises(Exception, match="no_such_option"):
        double({"seed": np.arange(3)})
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    double = script.over_runs(lambda run: 2 * run.seed, argparse.Namespace(), 1)
    equal(double({"seed": np.arange(3)}), [0, 2, 4])


@each([*TRIO, "reinforce_parallel.py"])
def test_the_figure_shows_the_returns(script, monkeypatch):
    """Thin lines for runs, a bold one for each setting's median; a single point has a marker."""
    nan, steps, middles = np.nan, np.array([10, 20]), [[10, 20], [10, 20]]
    returns, medians = np.array([[nan, nan, nan, 8], [7, 5, 1, 6]]), [[nan, 6], [8, 3.5]]
    if script.__name__ == "reinforce_parallel":  # its runs differ in their steps, (K, R)
        steps, middles = np.array([[1, 2, 3, 4], [6, 7, 6, 9]]), [[1.5, 6.5], [3.5, 7.5]]
        returns, medians = np.array([[3, 4, 4, 8], [7, 5, 1, 6]]), [[3.5, 6], [6, 3.5]]
    with monkeypatch.context() as patch, warnings.catch_warnings(action="error"):
        patch.setattr(plt, "close", lambda: None)
        script.plot("x.png", ["gamma 0.1", "gamma 0.3"], steps, returns)
    axes, _ = plt.gca(), plt.close()
    lines, x = axes.get_lines(), np.broadcast_to(steps.T, (4, 2))
    for i, drawn in enumerate([lines[:3], lines[3:]]):
        runs = slice(2 * i, 2 * i + 2)
        equal([line.get_xdata() for line in drawn], [*x[runs], middles[i]])
        equal([line.get_ydata() for line in drawn], [*returns.T[runs], medians[i]])
        looks = {(line.get_color(), line.get_marker()) for line in drawn}
        assert looks == {(to_rgba(f"C{i}"), ".")}
        assert drawn[0].get_linewidth() < 1 < drawn[2].get_linewidth()
    texts = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert texts == ["median  gamma 0.1", "median  gamma 0.3"]
    assert axes.get_xlabel() == "environment steps"
    assert axes.get_ylabel() == "return of training episodes"
    script.plot("x.png", [""], steps, returns)
    assert not plt.get_fignums()
