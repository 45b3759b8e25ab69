"""What the scripts do the same way: runs on devices, curves, Ctrl-C, one process that reports."""

import importlib
import runpy
import sys
from unittest.mock import DEFAULT, Mock

import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest
from jax.experimental import multihost_utils
from matplotlib.colors import to_rgba

# Three progress lines of three runs, or cars, on two devices: there is one copy to cut off.
TD = "--num-seeds 3 --num-envs 4 --num-centers 5 --eval-episodes 2 --total-timesteps 96"
TD += " --log-interval 32 --plot x.png"
RING = f"{TD} --learning-starts 20 --buffer-size 50"
FLAGS = {
    "parallel_td": TD,
    "replay_td": RING,
    "epsilon_decay_td": RING,
    "reinforce_parallel": "--num-seeds 3 --num-iterations 3 --log-interval 1 --eval-episodes 2"
    " --num-envs 2 --hidden-size 3 --env-id DeepSea-bsuite --plot x.png",
    "gridworld_qlearning": "--num-seeds 3 --total-timesteps 3e3 --log-interval 1e3 --plot x.png",
    "mountaincar_env": "--num-envs 3 --total-timesteps 900 --log-interval 300",
}
WITH_CURVES, LEARNERS = list(FLAGS)[:4], list(FLAGS)[:5]
NOT_THE_SAME = {"args", "compile_seconds", "train_seconds", "rollout_seconds", "interrupted"}
equal = np.testing.assert_array_equal


@pytest.fixture
def script(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return importlib.import_module(request.param)


def each(names):
    return pytest.mark.parametrize("script", names, indirect=True)


def press_ctrl_c(line, module, patch):
    """Let Ctrl-C arrive while the results of a progress line are awaited."""
    outcomes = [DEFAULT] * (line - 1) + [KeyboardInterrupt, DEFAULT]
    wait = Mock(wraps=module.process_allgather, side_effect=outcomes)
    patch.setattr(module, "process_allgather", wait)


@each(FLAGS)
@pytest.mark.parametrize(("more", "line"), [("", 1), ("--distributed", 2)])
def test_ctrl_c_is_an_error_before_the_first_line_and_in_a_job(script, more, line, monkeypatch):
    press_ctrl_c(line, script, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        script.main([*FLAGS[script.__name__].split(), *more.split()])


@each(FLAGS)
def test_ctrl_c_keeps_what_the_last_line_shows(script, tmp_path, capsys, monkeypatch):
    """The script, run as a shell would, saves what process 1 of two returns after two lines.

    That process neither prints nor writes. Its learning rates are those of three lines.
    """
    flags = [*FLAGS[script.__name__].split(), "--save", "x.npz"]
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
    assert saved["interrupted"] and not complete["interrupted"]
    assert saved.files == [*complete]
    for name in complete.keys() - NOT_THE_SAME:
        equal(saved[name], complete[name], err_msg=name)
    assert (tmp_path / "x.png").exists() == hasattr(two, "plot")


@each(LEARNERS)
def test_no_key_is_used_twice(script):
    """JAX checks the keys when it traces a program; nothing has to run."""
    args = script.parse_args(FLAGS[script.__name__].split())

    def learn_and_play(seed):
        state = script.init_state(args, seed, 0.01)
        return script.evaluate(args, script.train_chunk(args, state)[0])

    with jax.debug_key_reuse(True):
        jax.jit(learn_and_play).trace(0)


@each(LEARNERS)
def test_runs_are_spread_over_devices_by_hand(script, monkeypatch):
    """Devices, runs at once on each of them, copies that fill them."""
    grid = script.__name__ == "gridworld_qlearning"
    assert (script.RUNS_AT_ONCE, getattr(script, "MIN_AT_ONCE", 0)) == (
        (128, 64) if grid else (16, 0)
    )
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    monkeypatch.setattr(script, "RUNS_AT_ONCE", 16)
    monkeypatch.setattr(script, "MIN_AT_ONCE", 5, raising=False)
    assert script.spread(1, False) == (1, 1, 0)
    assert script.spread(3, True) == (4, 1, 1)
    assert script.spread(14, False) == (4, 1 if grid else 4, 2)  # less than MIN_AT_ONCE: 1
    assert script.spread(18, False) == (4, 5, 2)
    assert script.spread(64, False) == (4, 16, 0)
    assert script.spread(65, False) == (4, 9, 7)  # 17 on a device: two batches of 9
    assert script.spread(400, True) == (4, 15, 20)  # 100 on a device: seven batches of 15


@each(LEARNERS)
def test_runs_keep_their_order(script):
    """Each device takes six runs, two at once."""
    devices = min(2, jax.device_count())
    a, b = np.arange(6 * devices), np.arange(6 * devices) ** 2
    more, less = script.over_runs(lambda a, b: (a + 2 * b, b - a), devices, 2)(a, b)
    equal([more, less], [a + 2 * b, b - a])


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
