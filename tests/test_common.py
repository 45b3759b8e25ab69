"""What the scripts do the same way: sweeps, devices, curves, Ctrl-C, one process that reports."""

import argparse
import importlib
import json
import sys
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest
from conftest import FILES, FLAGS, SCRIPTS, TRIO
from matplotlib.colors import to_rgba

LEARNERS = [script for script in SCRIPTS if script != "mountaincar_env.py"]
TD_LINE = "step {step}  return {returns:.1f}  td_error {td_error:.3f}  q_value {q_value:.2f}"
LINES = {  # steps that progress lines name, and what follows
    "parallel_td": (["32", "64", "96"], TD_LINE),
    **dict.fromkeys(["replay_td", "epsilon_decay_td"], (["24", "48", "72"], TD_LINE)),
    "gridworld_qlearning": (
        ["3,000", "6,000", "9,000"],
        "step {step}  steps per episode {steps_per_episode:.1f}  return {returns:.2f}",
    ),
    "reinforce_parallel": (["4", "8", "12"], "iteration {step}  return {returns:.1f}"),
}
each = partial(pytest.mark.parametrize, "script", indirect=True)
equal = np.testing.assert_array_equal


@pytest.fixture
def script(request, tmp_path, monkeypatch):
    """A script in an empty folder. It is told of a single device; jax itself knows of two."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind="abacus")])
    module = importlib.import_module(request.param[:-3])
    module.flags = FLAGS[request.param].split()
    return module


@pytest.fixture
def seconds(script, monkeypatch):
    """Seconds of programs, by function: 1, 2, 4, ...; compiling: 1 each. No more on the clock."""
    spent, over_runs = defaultdict(list), script.over_runs

    def watched(function, args, num_devices):
        program, taken = over_runs(function, args, num_devices), spent[function.__name__]

        def run(*arrays):
            taken.append(2 ** len(taken))
            return program(*arrays)

        def compiled():
            spent["compile"].append(1)
            return run

        run.lower = lambda *_: SimpleNamespace(compile=compiled)
        return run

    clock = SimpleNamespace(perf_counter=lambda: sum(map(sum, spent.values())))
    monkeypatch.setattr(script, "over_runs", watched)
    monkeypatch.setattr(script, "time", clock)
    return spent


@each(LEARNERS)
def test_a_sweep_is_printed_drawn_and_saved(script, seconds, capsys, monkeypatch):
    """What is printed and drawn is what main returns. Of 15 runs on two devices, one has a copy."""
    drawn, grid, gammas = [], script.__name__ == "gridworld_qlearning", [0, 0.125, 0.5, 0.75, 1]
    monkeypatch.setattr(script, "plot", lambda *call: drawn.extend(call))
    monkeypatch.setattr(script, "animate", None, raising=False)  # without --gif, it is not called
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    results = script.main([*script.flags, *"--save x.npz --plot x.png".split()])
    np.testing.assert_equal(dict(np.load("x.npz")), results)
    assert json.loads(results["args"])["swept"]["gamma"] == gammas
    times = results["compile_seconds"], results["train_seconds"], results["interrupted"]
    compiling = sum(seconds["compile"] + seconds["init_state"])
    assert times == (compiling, 7, False)

    text = f"{'grid world' if grid else 'CartPole-v1'}, 15 runs on 2 x abacus\n"
    text += f"compiled in {compiling:.1f} s\n"
    all_steps = np.broadcast_to(results["timesteps"].T, (15, 3)).sum(axis=0)
    steps, line = LINES[script.__name__]
    for i, step in enumerate(steps):
        # Rounded in the same way, so that no digit may differ.
        names = {"returns", "td_error", "q_value", "steps_per_episode"} & results.keys()
        means = {name: jnp.nanmean(results[name][i]) for name in names}
        text += line.format(step=step, **means) + f"  {all_steps[i] / [1, 3, 7][i]:,.0f} steps/s\n"
    labels = [f"gamma {gamma}" for gamma in gammas]
    curve = [results["timesteps"], results["returns"]]
    if grid:  # of its tables, four are shown
        del labels[4:]
        curve = [list(results["q_table"].reshape(5, 3, 2, 3, 4).mean(axis=1)[:4])]
    else:
        for label, returns in zip(labels, results["greedy_return"].reshape(5, 3, 7), strict=True):
            means = returns.mean(axis=1)
            text += f"{label}  greedy return {means.mean():.1f}  worst run {means.min():.1f}\n"
    printed = capsys.readouterr().out
    assert printed.startswith(text) if grid else printed == text
    np.testing.assert_equal(drawn, ["x.png", labels, *curve])


def press_ctrl_c(count, script, seconds, monkeypatch):
    """Let Ctrl-C arrive while results are awaited: of an interval, then of the evaluation."""
    gather = script.process_allgather

    def wait(*call, **options):
        programs = "train_interval", "rollout", "evaluate"
        if count == sum(len(seconds[name]) for name in programs):
            raise KeyboardInterrupt
        return gather(*call, **options)

    monkeypatch.setattr(script, "process_allgather", wait)


@each(SCRIPTS)
def test_ctrl_c_keeps_what_the_last_line_shows(script, seconds, capsys, monkeypatch):
    """In the third interval: what is saved is what a run of only the first two returns."""
    two = script.parse_args([*script.flags, "--save", "two.npz"])
    two.num_intervals = 2
    with monkeypatch.context() as patch:
        patch.setattr(script, "parse_args", lambda _: two)
        complete = script.main()
    seconds.clear()
    press_ctrl_c(3, script, seconds, monkeypatch)
    results = script.main([*script.flags, "--save", "x.npz"])
    assert "\ninterrupted: the results are those of the last line\n" in capsys.readouterr().out
    saved = np.load("x.npz")
    assert results["interrupted"] and saved["interrupted"] and not complete.pop("interrupted")
    assert len(saved["timesteps"]) == 2 and {*saved.files} > complete.keys()
    for name in complete.keys() - {"args"}:
        equal(saved[name], complete[name], err_msg=name)


@each(SCRIPTS)
@pytest.mark.parametrize(("interval", "flags"), [(1, []), (2, ["--distributed"])])
def test_ctrl_c_before_a_line_or_in_a_job_fails(interval, flags, script, seconds, monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    press_ctrl_c(interval, script, seconds, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        script.main([*script.flags, *flags])


@each(LEARNERS)
def test_ctrl_c_after_the_last_line_ends_the_program(script, seconds, tmp_path, monkeypatch):
    press_ctrl_c(4, script, seconds, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        script.main([*script.flags, "--save", "x.npz"])
    assert not any(tmp_path.iterdir())


@each(SCRIPTS)
def test_process_1_neither_prints_nor_writes(script, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # is restored at the end
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    files = FILES[f"{script.__name__}.py"].split()
    assert len(script.main([*script.flags, *files])["timesteps"]) == 3
    assert not any(tmp_path.iterdir()) and capsys.readouterr().out == ""


@each(SCRIPTS)
def test_no_key_is_used_twice(script):
    """JAX checks the keys when it traces a program; nothing has to run."""
    args = script.parse_args([*script.flags, "--save", "x.npz"])

    def learn_and_play(own):
        run = argparse.Namespace(**vars(args) | own)
        if script.__name__ == "mountaincar_env":
            return script.rollout(run, script.init_state(run))
        return script.evaluate(run, script.train_interval(run, script.init_state(run))[0])

    with jax.debug_key_reuse(True):
        swept = {name: values[0] for name, values in getattr(args, "swept", {}).items()}
        jax.jit(learn_and_play).trace({"seed": 0} | swept)


@each(LEARNERS)
def test_swept_flags_are_in_one_place_and_name_the_settings(script):
    """Outside of a run, args.gamma does not exist. A default that is no list is a single value."""
    args = script.parse_args("--gamma 0 1 --learning-rate 0.5 0.25".split())
    assert tuple(args.swept) == script.SWEPT and not {*script.SWEPT} & vars(args).keys()
    rates, gammas = ["learning_rate 0.5", "learning_rate 0.25"], ["gamma 0", "gamma 1"]
    assert script.sweep(args)[1] == [f"{rate}, {gamma}" for rate in rates for gamma in gammas]
    args.swept["gamma"] = 0.75
    runs, labels = script.sweep(args)
    assert labels == rates and runs["gamma"].tolist() == [0.75, 0.75]


@each(LEARNERS)
def test_runs_are_spread_over_no_more_devices_than_needed(script, monkeypatch):
    """21 runs need 11 of 16 devices, two on each. A job uses all. The rest is the last run."""
    monkeypatch.setattr(jax, "device_count", lambda: 16)
    runs = {"seed": np.arange(21), "gamma": np.arange(21) ** 2}
    for in_a_job, used in (False, 11), (True, 16):
        num_devices, padded = script.spread(runs, in_a_job)
        equal(padded["gamma"], np.minimum(np.arange(2 * used), 20) ** 2)
        assert num_devices == used


@each([*TRIO, "reinforce_parallel.py"])
def test_the_figure_shows_the_returns(script, monkeypatch):
    """Thin lines for runs, a bold one for each setting's median, in one color."""
    steps, middles = np.array([10, 20]), [[10, 20], [10, 20]]
    returns, medians = np.array([[3, 4, 9, 2, 8, 7], [7, 5, 1, 1, 6, 3]]), [[4, 5], [7, 3]]
    if script.__name__ == "reinforce_parallel":  # its runs differ in their steps, (K, R)
        steps, middles = np.array([[1, 2, 4, 3, 4, 9], [6, 7, 9, 6, 9, 8]]), [[2, 7], [4, 8]]
    monkeypatch.setattr(plt, "close", lambda: None)
    script.plot("x.png", ["gamma 0.1", "gamma 0.3"], steps, returns)
    lines, x = plt.gca().get_lines(), np.broadcast_to(steps.T, (6, 2))
    for i, drawn in enumerate([lines[:4], lines[4:]]):
        runs = slice(3 * i, 3 * i + 3)
        equal([line.get_xdata() for line in drawn], [*x[runs], middles[i]])
        equal([line.get_ydata() for line in drawn], [*returns.T[runs], medians[i]])
        assert {line.get_color() for line in drawn} == {to_rgba(f"C{i}")}
        assert drawn[0].get_linewidth() < 1 < drawn[3].get_linewidth()
    texts = [text.get_text() for text in plt.gcf().legends[0].get_texts()]
    assert texts == ["median  gamma 0.1", "median  gamma 0.3"]
