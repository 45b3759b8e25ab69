"""What all scripts do the same way: sweeps, devices, what is printed, drawn and saved, Ctrl-C."""

import argparse
import importlib
import io
import itertools
import json
import os
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LEARNERS, SCRIPTS, TRIO, USER_ENV
from matplotlib.figure import Figure
from matplotlib.text import Text

RATES, GAMMAS, PART = [0.1, 0.025, 0.05], [0.5, 0.75, 1.0], 2**30
SWEEP = "--learning-rate 0.1 0.025 0.05 --gamma 0.5 0.75 1 --num-seeds 3 --seed 4 --num-intervals 4"
TD = f"{SWEEP} --total-timesteps 150 --num-envs 4 --num-centers 9 --eval-episodes 3"
# All actions are random, so that rounding cannot change them.
FLAGS = dict.fromkeys(TRIO, f"{TD} --epsilon 1") | {"epsilon_decay_td.py": f"{TD} --end-e 1"}
FLAGS["gridworld_qlearning.py"] = f"{SWEEP} --total-timesteps 4000 --grid-size 2 3"
SMALL = "--num-envs 2 --num-iterations 8 --hidden-size 6 --eval-episodes 3"
FLAGS["reinforce_parallel.py"] = f"{SWEEP} {SMALL}"
FLAGS["mountaincar_env.py"] = "--num-envs 2 --num-episodes 6 --num-intervals 3"


class Output(io.StringIO):
    """Standard output without `reconfigure`, on which Ctrl-C follows a line of progress."""

    def __init__(self, interrupted):
        super().__init__()
        self.line = interrupted

    def write(self, text):
        super().write(text)
        if self.line and self.getvalue().count("\n") == 2 + self.line:  # two lines come before
            self.line = None
            raise KeyboardInterrupt


@pytest.fixture
def figures(monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_: drawn.append(figure))
    return drawn


def by_hand(script, flags, num_intervals):
    """What each of 27 runs ends with, and its metrics (K, R): its functions, called directly."""
    args = vars(script.parse_args(flags.split()))
    rate, gamma, seed = np.array([*itertools.product(RATES, GAMMAS, [4, 5, 6])]).T
    own = {"learning_rate": rate, "gamma": gamma, "seed": seed.astype(int)}
    first = {key: value[0] for key, value in args.items() if isinstance(value, list)}

    def of_all(function):
        def of_one(own, *arrays):
            return function(argparse.Namespace(**{**args, **first, **own}), *arrays)

        return jax.jit(script.vectorize(of_one), compiler_options=script.COMPILER_OPTIONS)

    state, train, lines = of_all(script.init_state)(own), of_all(script.train_interval), []
    for _ in range(num_intervals):
        state, metrics = train(own, state)
        lines.append(metrics)
    curves = {key: np.array([line[key] for line in lines]) for key in lines[0]}
    return {**own, **of_all(script.evaluate)(own, state), **curves}, curves


def shown(value, text, slack=6e-3):
    """Whether a number is in a text, to three digits."""
    numbers = re.findall(r"-?\d[\d,]*\.?\d*(?:e[+-]?\d+)?", text)
    off = [abs(float(number.replace(",", "")) - value) for number in numbers]
    return not np.isfinite(value) or min(off) <= max(slack, 1e-3 * abs(value))


@pytest.mark.parametrize("num_lines", [4, 2])
@pytest.mark.parametrize("name", LEARNERS)
def test_each_run_is_printed_drawn_and_saved(name, num_lines, figures, monkeypatch, tmp_path):
    """27 runs, a metric of one's own, counts beyond 32 bits; in whole, or up to Ctrl-C."""
    script, path = importlib.import_module(name[:-3]), str(tmp_path / "x.npz")
    train_interval = script.train_interval

    def with_metric(run, state):
        state, metrics = train_interval(run, state)
        own = {"marker": run.gamma * 1000 + run.seed, "timesteps": jnp.full(3, PART)}
        return state, metrics | own

    monkeypatch.setattr(script, "train_interval", with_metric)
    monkeypatch.setattr(sys, "stdout", Output(num_lines % 4))
    flags = f"{FLAGS[name]} --save {path} --plot {tmp_path / 'x.svg'}"
    results, printed = script.main(flags.split()), sys.stdout.getvalue()
    np.testing.assert_equal(dict(np.load(path)), results)
    with jax.checking_leaks():
        expected, curves = by_hand(script, FLAGS[name], num_lines)
    timesteps = expected["timesteps"] = (
        3 * PART * np.arange(1, num_lines + 1)[:, None].repeat(27, 1)
    )
    returns = expected.pop("greedy_return", np.zeros(1))  # rounding changes some greedy actions
    assert np.mean(results.get("greedy_return", returns) == returns) > 0.8
    for key, values in expected.items():
        np.testing.assert_allclose(results[key], values, 1e-3, 1e-4, err_msg=key)
    assert results["interrupted"] == (num_lines == 2)
    assert os.environ.get("MPLBACKEND") == USER_ENV.get("MPLBACKEND")  # an import changes nothing
    assert json.loads(results["args"])["gamma"] == GAMMAS

    lines = printed.splitlines()  # devices, compiling, progress, settings
    progress = lines[2 : 2 + num_lines]
    assert "27" in lines[0] and "rate 0.025, gamma 0.75" in printed
    assert jax.device_count() == 1 or " on 1 x " not in lines[0]
    for i, line in enumerate(progress):
        values = [jnp.nanmean(curve[i]) for key, curve in curves.items() if key != "timesteps"]
        assert all(shown(float(value), line) for value in [*values, timesteps[i].mean()]), line
    assert shown(results["timesteps"][-1].sum() / results["train_seconds"], progress[-1])
    assert shown(results["compile_seconds"], printed, 0.06) and len(figures) == 1
    axes = figures[0].axes
    if name == "gridworld_qlearning.py":  # the mean table of the fourth setting
        image = [one.images[0].get_array() for one in axes if one.images][3]
        np.testing.assert_array_equal(image, results["q_table"][9:12].mean(axis=0).max(axis=-1))
        return
    for text, means in zip(lines[-9:], results["greedy_return"].reshape(9, 9), strict=True):
        worst = means.reshape(3, 3).mean(axis=1).min()
        assert shown(means.mean(), text, 0.06) and shown(worst, text, 0.06)
    drawn = [line.get_xydata() for one in axes for line in one.get_lines()]
    medians = jnp.nanmedian(results["returns"].reshape(num_lines, 9, 3), axis=2)
    for y in [*results["returns"].T, *medians.T]:
        curve = np.stack([timesteps[:, 0], y], axis=1)
        assert any(np.allclose(curve, other, equal_nan=True) for other in drawn)


@pytest.mark.parametrize("name", SCRIPTS)
def test_ctrl_c_keeps_nothing_in_a_job_and_what_was_saved_in_the_car(name, monkeypatch, tmp_path):
    script, flags = importlib.import_module(name[:-3]), f"{FLAGS[name]} --save {tmp_path / 'x.npz'}"
    if name == "mountaincar_env.py":
        whole = script.main(flags.split())
        monkeypatch.setattr(sys, "stdout", Output(2))
        results = script.main(flags.split())
        assert results["interrupted"] and results["episodes"][-1] == 4
        np.testing.assert_array_equal(results["obs"], whole["obs"][:, :4])
        assert shown(whole["returns"][1], sys.stdout.getvalue().splitlines()[3], 0.06)
        assert shown(whole["terminations"][1] * 100, sys.stdout.getvalue(), 0.06)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(sys, "stdout", Output(1))
    with pytest.raises(KeyboardInterrupt):
        script.main([*flags.split(), "--distributed"])


@pytest.mark.parametrize("name", LEARNERS)
def test_of_25_settings_the_figure_names_those_that_it_shows(name, figures, tmp_path):
    script, curve = importlib.import_module(name[:-3]), np.arange(50.0).reshape(2, 25)
    args = script.parse_args(["--plot", str(tmp_path / "x.png")])
    results = {"timesteps": curve, "returns": curve, "q_table": np.ones((25, 2, 3, 4))}
    script.draw(args, [f"gamma {i}" for i in range(25)], results)
    assert any("25" in text.get_text() for text in figures[0].findobj(Text))


def test_intervals_are_equal_and_overshoot_by_less_than_one():
    td = importlib.import_module("parallel_td")
    for flags, updates in ("--total-timesteps 100", 7), ("--total-timesteps 336", 22):
        assert td.parse_args(flags.split()).num_updates == updates
    args = td.parse_args("--num-envs 6 --batch-size 16 --total-timesteps 100".split())
    assert (args.num_intervals, args.interval_timesteps) == (6, 18)
