"""The launcher, with a toy in the place of an algorithm: runs, devices, lines, files, Ctrl-C."""

import importlib
import io
import itertools
import json
import os
import re

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LEARNERS, USER_ENV
from matplotlib.figure import Figure
from matplotlib.text import Text

RATES, GAMMAS, PART = [0.5, 0.125, 0.25], [0.5, 0.75, 1.0, 0.25, 0.625], 2**30
FLAGS = "--learning-rate 0.5 0.125 0.25 --gamma 0.5 0.75 1 0.25 0.625 --num-seeds 3 --seed 4"


class Output(io.StringIO):
    """Standard output, without `reconfigure`. Ctrl-C follows so many lines."""

    def __init__(self, lines=None):
        super().__init__()
        self.lines = lines

    def write(self, text):
        super().write(text)
        if text.endswith("\n") and self.getvalue().count("\n") == self.lines:
            raise KeyboardInterrupt


def shown(value, text, slack=6e-3):
    """Whether a number is in a text, to three digits."""
    numbers = re.findall(r"-?\d[\d,]*\.?\d*(?:e[+-]?\d+)?", text)
    off = [abs(float(number.replace(",", "")) - value) for number in numbers]
    return not np.isfinite(value) or min(off) <= max(slack, 1e-3 * abs(value))


@pytest.fixture(params=LEARNERS)
def script(request, monkeypatch):
    """A learner whose runs make numbers that follow from their flags."""
    script = importlib.import_module(request.param[:-3])

    def train_interval(run, state):
        state = state + run.learning_rate
        unknown = (run.seed == 4) & (state <= 401 + run.learning_rate)
        returns = jnp.where(unknown, jnp.nan, state * run.gamma)
        metrics = {"timesteps": jnp.full(3, PART), "returns": returns, "none": jnp.nan}
        return state, {**metrics, "own": run.gamma + run.num_intervals}

    def evaluate(run, state):
        value = state + jnp.zeros((*getattr(run, "grid_size", [1, 1]), 4))
        return {"greedy_return": state + jnp.array([-9, 9]), "q_table": value, "greedy_steps": 1.0}

    monkeypatch.setattr(script, "init_state", lambda run: run.seed * 100.0 + 1)
    monkeypatch.setattr(script, "train_interval", train_interval)
    monkeypatch.setattr(script, "evaluate", evaluate)
    return script


@pytest.mark.parametrize("ctrl_c", [None, 3])  # after devices, compiling, a line of progress
def test_each_run_is_printed_drawn_and_saved(script, ctrl_c, monkeypatch, tmp_path):
    """45 runs, a metric of one's own, counts beyond 32 bits; in whole, or up to Ctrl-C."""
    figures, num_lines = [], 1 if ctrl_c else 4
    monkeypatch.setattr("sys.stdout", out := Output(ctrl_c))
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    files = f"--num-intervals 4 --save {tmp_path / 'x.npz'} --plot {tmp_path / 'x.svg'}"
    results, printed = script.main(f"{FLAGS} {files}".split()), out.getvalue()
    np.testing.assert_equal(dict(np.load(tmp_path / "x.npz")), results)
    rate, gamma, seed = np.array([*itertools.product(RATES, GAMMAS, [4, 5, 6])]).T  # (R,) each
    line = np.arange(1, num_lines + 1)[:, None]  # (K, 1)
    timesteps, state = line * np.full(45, 3 * PART), seed * 100 + 1 + line * rate  # (K, R)
    returns = np.where((seed == 4) & (line == 1), np.nan, state * gamma)
    own, greedy = 4 + gamma + 0 * line, state[-1]
    expected = {"learning_rate": rate, "gamma": gamma, "seed": seed, "timesteps": timesteps}
    expected |= {"returns": returns, "none": np.nan * state, "own": own}
    expected |= {"greedy_return": greedy[:, None] + [-9, 9], "interrupted": num_lines == 1}
    np.testing.assert_equal({name: results[name] for name in expected}, expected)
    assert json.loads(results["args"])["gamma"] == GAMMAS
    assert os.environ.get("MPLBACKEND") == USER_ENV.get("MPLBACKEND")  # an import changes nothing
    devices, compiled, *lines = printed.splitlines()  # what is printed
    assert shown(45, devices) and shown(2, devices)
    assert shown(results["compile_seconds"], compiled, 0.06) and results["compile_seconds"] < 99
    for i, text in enumerate(lines[:num_lines]):
        assert all(shown(np.nanmean(curve[i]), text) for curve in (timesteps, returns, own)), text
    speed = timesteps[-1].sum() / results["train_seconds"]
    assert shown(speed, lines[num_lines - 1]) and results["train_seconds"] < 1
    assert num_lines == 4 or shown(timesteps[0, 0], lines[1])  # "interrupted: ... of step"
    settings, texts = [*itertools.product(RATES, GAMMAS)], re.split("learning.rate", printed)[-15:]
    for setting, ends, text in zip(settings, greedy.reshape(15, 3), texts, strict=True):
        assert all(shown(value, text, 1e-3) for value in (*setting, ends.mean())), text
        assert shown(ends.min(), text) or hasattr(script, "grid_text")
    (figure,) = figures  # what is drawn
    assert any("15" in text.get_text() for text in figure.findobj(Text))  # of 15 settings, some
    if hasattr(script, "grid_text"):
        images = [axes.images[0].get_array() for axes in figure.axes if axes.images]
        assert [image[0, 0] for image in images[:4]] == greedy.reshape(15, 3)[:4].mean(1).tolist()
        return
    drawn = [line.get_xydata() for axes in figure.axes for line in axes.get_lines()]
    medians = np.nanmedian(returns.reshape(num_lines, 15, 3), axis=2)
    for y in [*returns.T[:30], *medians.T[:10]]:  # ten settings of three runs
        curve = np.stack([timesteps[:, 0], y], axis=1)
        assert any(np.allclose(curve, other, equal_nan=True) for other in drawn)


def test_one_run_takes_one_device_and_of_a_job_one_process_prints(script, monkeypatch):
    args = script.parse_args([])  # nothing to save, nothing to draw
    monkeypatch.setattr(script, "parse_args", lambda argv: args)

    def printed(stop=None):
        monkeypatch.setattr("sys.stdout", out := Output(stop))
        assert not script.main()["interrupted"]
        return out.getvalue()

    assert re.findall(r"\d+", printed().partition("\n")[0]) == ["1", "1"]  # run, device
    args.distributed = True
    with pytest.raises(KeyboardInterrupt):  # ends a job
        printed(3)
    monkeypatch.setattr("jax.process_index", lambda: 1)
    assert not printed()
