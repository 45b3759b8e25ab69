"""What the scripts do the same way: runs on devices, curves, Ctrl-C, one process that reports."""

import importlib
import json
import runpy
import sys
from functools import partial
from unittest.mock import DEFAULT, Mock

import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest
from conftest import FLAGS, SCRIPTS, TRIO, clock
from jax.experimental import multihost_utils
from matplotlib.colors import to_rgba

LEARNERS = [script for script in SCRIPTS if script != "mountaincar_env.py"]
WITH_CURVES = [*TRIO, "reinforce_parallel.py"]
NOT_THE_SAME = {"args", "compile_seconds", "train_seconds", "rollout_seconds", "interrupted"}
TD_LINE = "step {steps:,.0f}  return {returns:.1f}  td_error {td_error:.3f}  q_value {q_value:.2f}"
LINE = dict.fromkeys(["parallel_td", "replay_td", "epsilon_decay_td"], TD_LINE) | {
    "gridworld_qlearning": "step {steps:,.0f}  steps per episode {steps_per_episode:.1f}",
    "reinforce_parallel": "iteration {iteration}  return {returns:.1f}",
}
CURVES = "returns", "td_error", "q_value", "steps_per_episode"
equal = np.testing.assert_array_equal


@pytest.fixture
def script(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(request.param[:-3])
    module.flags = FLAGS[request.param].split()
    return module


def each(names):
    return pytest.mark.parametrize("script", names, indirect=True)


def press_ctrl_c(line, module, patch):
    """Let Ctrl-C arrive while the results of a progress line are awaited."""
    outcomes = [DEFAULT] * (line - 1) + [KeyboardInterrupt, DEFAULT]
    wait = Mock(wraps=module.process_allgather, side_effect=outcomes)
    patch.setattr(module, "process_allgather", wait)


@each(LEARNERS)
@pytest.mark.filterwarnings("ignore:Mean of empty slice")
def test_what_is_printed_drawn_and_saved_is_what_happened(script, capsys, monkeypatch):
    """Three learning rates, five seeds, three lines. In some lines, no episode of a run ended."""
    drawn, rates = [], [0.3, 0.1, 0.2]
    monkeypatch.setattr(script, "plot", lambda *call: drawn.extend(call))
    monkeypatch.setattr(script, "animate", None, raising=False)  # without --gif, it is not called
    monkeypatch.setattr(script, "time", clock(10, 13.25, 20, 21, 30, 32, 40, 44))
    results = script.main([*script.flags, "--seed", "9", "--save", "x.npz"])
    np.testing.assert_equal(dict(np.load("x.npz")), results)
    args = json.loads(results["args"])
    times = results["compile_seconds"], results["train_seconds"], results["interrupted"]
    assert (args["seed"], args["learning_rate"], times) == (9, rates, (3.25, 7, False))
    equal(results["seed"], [9, 10, 11, 12, 13] * 3)
    equal(results["learning_rate"], np.repeat(rates, 5))
    devices = f"{min(15, jax.device_count())} x {jax.devices()[0].device_kind}"
    task = args.get("env_id", "grid world")
    lines, curves = [f"{task}, 15 runs on {devices}", "compiled in 3.2 s"], {*CURVES} & {*results}
    for line, seconds in enumerate([1, 3, 7]):
        steps = np.mean(results["timesteps"][line])  # REINFORCE's runs differ in their steps
        shown = {name: np.nanmean(results[name][line]) for name in curves}
        shown |= {"iteration": 4 * line + 4, "steps": steps, "speed": 15 * steps / seconds}
        lines.append((LINE[script.__name__] + "  {speed:,.0f} steps/s").format_map(shown))
    if "greedy_return" in results:
        means = results["greedy_return"].mean(axis=1).reshape(3, 5)
        for rate, runs in zip(rates, means, strict=True):
            line = f"greedy return {runs.mean():.1f}, worst run {runs.min():.1f}"
            lines.append(f"learning rate {rate}: {line}")
        expected = [results[name] for name in ("learning_rate", "timesteps", "returns")]
    else:  # its own tests tell what the grid world prints after the lines
        expected = [results["q_table"].mean(axis=0)]
    assert capsys.readouterr().out.splitlines()[: len(lines)] == lines
    np.testing.assert_equal(drawn, ["curve.png", *expected])
    nans = [np.isnan(results[name]).sum(axis=1) for name in curves]
    assert "hidden_size" in args or {*np.ravel(nans)} - {0, 15}


@each(SCRIPTS)
@pytest.mark.parametrize(("more", "line"), [("", 1), ("--distributed", 2)])
def test_ctrl_c_is_an_error_before_the_first_line_and_in_a_job(script, more, line, monkeypatch):
    press_ctrl_c(line, script, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        script.main([*script.flags, *more.split()])


@each(SCRIPTS)
def test_ctrl_c_keeps_what_the_last_line_shows(script, tmp_path, capsys, monkeypatch):
    """The script, run as a shell would, saves what process 1 of two returns after two lines.

    That process neither prints nor writes. Its learning rates are those of three lines.
    """
    flags = [*script.flags, "--save", "x.npz"]
    two = script.parse_args(flags)
    two.num_chunks, two.gif = 2, "x.gif"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", sys.stdout)  # is restored at the end
        patch.setattr(jax, "process_index", lambda: 1)
        patch.setattr(script, "parse_args", lambda _: two)
        complete = script.main()
    assert not any(tmp_path.iterdir()) and capsys.readouterr().out == ""
    press_ctrl_c(3, multihost_utils, monkeypatch)
    monkeypatch.setattr(sys, "argv", [script.__file__, *flags])
    with pytest.raises((SystemExit, KeyboardInterrupt)) as end:
        runpy.run_path(script.__file__, run_name="__main__")
    assert end.type is SystemExit and end.value.code == 130 and sys.stdout.line_buffering
    lines, saved = capsys.readouterr().out.splitlines(), np.load("x.npz")
    assert sum(line.endswith("steps/s") for line in lines) == len(saved["timesteps"]) == 2
    assert "interrupted: the results are those of the last line" in lines
    assert saved["interrupted"] and not complete["interrupted"] and saved.files == [*complete]
    for name in complete.keys() - NOT_THE_SAME:
        equal(saved[name], complete[name], err_msg=name)
    assert (tmp_path / "curve.png").exists() == hasattr(two, "plot")


@each(LEARNERS)
def test_no_key_is_used_twice(script):
    """JAX checks the keys when it traces a program; nothing has to run."""
    args = script.parse_args(script.flags)

    def learn_and_play(seed):
        state = script.init_state(args, seed, 0.01)
        return script.evaluate(args, script.train_chunk(args, state)[0])

    with jax.debug_key_reuse(True):
        jax.jit(learn_and_play).trace(0)


@each(LEARNERS)
def test_runs_are_spread_over_devices_by_hand(script, monkeypatch):
    """Devices, runs at once on each of them, copies that fill them."""
    grid = script.__name__ == "gridworld_qlearning"
    for backend, expected in ("cpu", (128, 64) if grid else (16, 0)), ("gpu", (10**6, 0)):
        monkeypatch.setattr(jax, "default_backend", lambda name=backend: name)
        constants = runpy.run_path(script.__file__)
        assert (constants["RUNS_AT_ONCE"], constants.get("MIN_AT_ONCE", 0)) == expected
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    monkeypatch.setattr(script, "RUNS_AT_ONCE", 16)
    monkeypatch.setattr(script, "MIN_AT_ONCE", 5, raising=False)
    assert script.spread(1, False) == (1, 1, 0)
    assert script.spread(3, True) == (4, 1, 1)
    assert script.spread(14, False) == (4, 1 if grid else 4, 2)  # less than MIN_AT_ONCE: 1
    assert script.spread(18, False) == (4, 5, 2)
    assert script.spread(65, False) == (4, 9, 7)  # 17 on a device: two batches of 9
    assert script.spread(400, True) == (4, 15, 20)  # 100 on a device: seven batches of 15


@each(SCRIPTS)
def test_runs_keep_their_order_copies_are_cut_and_options_reach_the_compiler(script, monkeypatch):
    monkeypatch.setattr(jax, "jit", jit := Mock(wraps=jax.jit))
    devices, car = min(2, jax.device_count()), script.__name__ == "mountaincar_env"
    a, b = np.arange(6 * devices), np.arange(6 * devices) ** 2
    over = script.over_devices if car else partial(script.over_runs, at_once=2)
    compiled = over(lambda a, b: a + 2 * b, num_devices=devices)
    equal(script.gather(compiled(a, b), 5), (a + 2 * b)[:5])
    options = getattr(script, "COMPILER_OPTIONS", {"xla_cpu_prefer_vector_width": 512})
    assert jit.call_args.kwargs == {"compiler_options": options}


@each(WITH_CURVES)
@pytest.mark.parametrize("steps", [[10, 20, 30], [[1, 2, 3, 4, 5], [6, 7, 6, 9, 8], [9] * 5]])
def test_the_figure_shows_the_returns(script, steps, tmp_path):
    """Thin lines for runs, a bold one for each rate's median; what is nan is left out."""
    nan, learning_rate = np.nan, np.array([0.3, 0.1, 0.3, 0.1, 0.3])
    returns = np.array([[nan, nan, nan, nan, nan], [7, 5, 1, 6, nan], [9.0, 8, 2, 8, 4]])
    script.plot("x.png", learning_rate, np.array(steps), returns)
    axes, _ = plt.gca(), plt.close()
    x, lines = np.broadcast_to(np.transpose(steps), (5, 3)), axes.get_lines()
    for drawn, color, runs, median in [
        (lines[:3], "C0", [1, 3], [nan, 5.5, 8]),
        (lines[3:], "C1", [0, 2, 4], [nan, 4, 4]),
    ]:
        equal([line.get_xdata() for line in drawn], [*x[runs], np.median(x[runs], axis=0)])
        equal([line.get_ydata() for line in drawn], [*returns.T[runs], median])
        assert {line.get_color() for line in drawn} == {to_rgba(color)}
        *thin, bold = [line.get_linewidth() for line in drawn]
        assert max(thin) < 1 < bold
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == ["median, learning rate 0.1", "median, learning rate 0.3"]
    assert axes.get_xlabel() == "environment steps"
    assert axes.get_ylabel() == "return of training episodes"
    assert axes.xaxis.get_major_formatter()(100_000) == "100k"
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
