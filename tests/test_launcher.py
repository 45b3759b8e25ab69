"""What all scripts do the same way: sweeps, devices, what is printed, drawn and saved, Ctrl-C."""

import argparse
import importlib
import io
import itertools
import json
import os
import re
import runpy
import sys
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import pytest
from conftest import LEARNERS, ROOT, SCRIPTS, TRIO

RATES, GAMMAS = [0.1, 0.025, 0.05], [0.5, 0.75, 1.0]
SWEEP = "--learning-rate 0.1 0.025 0.05 --gamma 0.5 0.75 1 --num-seeds 3 --seed 4 --num-intervals 4"
TD = f"{SWEEP} --total-timesteps 150 --num-envs 4 --num-centers 9 --eval-episodes 3"
# All actions are random, so that rounding cannot change them.
FLAGS = dict.fromkeys(TRIO, f"{TD} --epsilon 1") | {"epsilon_decay_td.py": f"{TD} --end-e 1"}
FLAGS["gridworld_qlearning.py"] = f"{SWEEP} --total-timesteps 4000 --grid-size 2 3"
FLAGS["reinforce_parallel.py"] = (
    f"{SWEEP} --num-envs 2 --num-iterations 8 --hidden-size 6 --eval-episodes 3"
)
each = partial(pytest.mark.parametrize, "name")
close, equal = (
    partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4),
    np.testing.assert_array_equal,
)


def module(name):
    return importlib.import_module(name[:-3])


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
    learned = of_all(script.evaluate)(own, state)
    return own, learned, {key: np.array([line[key] for line in lines]) for key in lines[0]}


def numbers(text):
    return [float(n.replace(",", "")) for n in re.findall(r"-?\d[\d,]*\.?\d*(?:e[+-]?\d+)?", text)]


def shown(value, text, slack=6e-3):
    """Whether a number is in a text, to three digits."""
    slack = max(slack, 1e-3 * abs(value))
    return not np.isfinite(value) or any(abs(n - value) <= slack for n in numbers(text))


def compare(results, expected):
    """Allow for rounding: few greedy actions change, and then few greedy returns."""
    for key, values in expected.items():
        if key == "greedy_return":
            assert np.mean(results[key] == values) > 0.8
        elif key != "timesteps":
            close(results[key], values, err_msg=key)


@each(LEARNERS)
def test_each_run_has_its_own_values_and_all_is_printed_drawn_and_saved(
    name, capsys, monkeypatch, tmp_path
):
    """All 27 runs on the devices there are, each as if alone; a metric of one's own is shown."""
    script, figures, path = module(name), [], tmp_path / "x.npz"
    train_interval = script.train_interval

    def with_metric(run, state):
        state, metrics = train_interval(run, state)
        return state, metrics | {"marker": run.gamma * 1000 + run.seed}

    monkeypatch.setattr(script, "train_interval", with_metric)
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda figure, *_: figures.append(figure)
    )
    plot = f"--save {path} --plot {tmp_path / 'x.svg'}"
    results, printed = script.main(f"{FLAGS[name]} {plot}".split()), capsys.readouterr().out
    np.testing.assert_equal(dict(np.load(path)), results)
    own, learned, lines = by_hand(script, FLAGS[name], 4)
    timesteps = lines.pop("timesteps").reshape(4, 27, -1).sum(axis=2).cumsum(axis=0)
    equal(results["timesteps"], timesteps)
    compare(results, {**own, **learned, **lines})
    assert not results["interrupted"] and json.loads(results["args"])["gamma"] == GAMMAS

    progress = [line for line in printed.splitlines() if "steps/s" in line]
    assert "27" in printed.splitlines()[0] and len(progress) == 4
    for i, line in enumerate(progress):
        assert shown(timesteps[i].mean(), line, slack=0.6)
        assert all(shown(float(jnp.nanmean(values[i])), line) for values in lines.values()), line
    assert shown(timesteps[-1].sum() / results["train_seconds"], progress[-1])
    assert shown(results["compile_seconds"], printed, slack=0.06)
    assert ("learning_rate 0.025, gamma 0.75" in printed) and figures
    if name == "gridworld_qlearning.py":
        images = [axes.images[0].get_array() for axes in figures[0].axes if axes.images]
        equal(images[3], results["q_table"][9:12].mean(axis=0).max(axis=-1))
        return
    means = results["greedy_return"].mean(axis=1).reshape(9, 3)
    for text, setting in zip(printed.splitlines()[-9:], means, strict=True):
        assert shown(setting.mean(), text, 0.06) and shown(setting.min(), text, 0.06)
    drawn = [line.get_xydata() for axes in figures[0].axes for line in axes.get_lines()]
    returns, medians = (
        results["returns"],
        jnp.nanmedian(results["returns"].reshape(4, 9, 3), axis=2),
    )
    for x, y in [
        *zip(timesteps.T, returns.T, strict=True),
        *zip(np.median(timesteps.reshape(4, 9, 3), axis=2).T, medians.T, strict=True),
    ]:
        assert any(np.allclose(curve, np.stack([x, y], axis=1), equal_nan=True) for curve in drawn)


@each(LEARNERS)
def test_25_settings_can_be_told_apart_or_the_figure_names_a_limit(name, monkeypatch, tmp_path):
    script, figures = module(name), []
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda figure, *_: figures.append(figure)
    )
    args = script.parse_args(["--plot", str(tmp_path / "x.png")])
    curve = np.arange(50.0).reshape(2, 25)
    results = {"timesteps": curve, "returns": curve, "q_table": np.ones((25, 2, 3, 4))}
    script.draw(args, [f"gamma {i}" for i in range(25)], results)
    texts = [text.get_text() for text in figures[0].findobj(matplotlib.text.Text)]
    named = [text for text in texts if "25" in numbers_of(text)]
    colors = {line.get_color() for axes in figures[0].axes for line in axes.get_lines()}
    assert named or len(colors) == 25


def numbers_of(text):
    return re.findall(r"\d+", text)


class Interrupting(io.StringIO):
    """Standard output without `reconfigure`, on which Ctrl-C follows a line of progress."""

    def __init__(self, line):
        super().__init__()
        self.line = line

    def write(self, text):
        super().write(text)
        if self.getvalue().count("steps/s") == self.line and "steps/s" in text:
            self.line = None
            raise KeyboardInterrupt
        return len(text)


@each(LEARNERS)
def test_ctrl_c_keeps_what_the_last_line_shows(name, monkeypatch):
    script = module(name)
    monkeypatch.setattr(sys, "stdout", Interrupting(2))
    results = script.main(FLAGS[name].split())
    printed = sys.stdout.getvalue()
    _, learned, lines = by_hand(script, FLAGS[name], 2)
    assert results["interrupted"] and len(results["timesteps"]) == 2 == printed.count("steps/s")
    compare(results, {**learned, **lines})


@each(SCRIPTS)
def test_ctrl_c_in_a_job_fails(name, monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(sys, "stdout", Interrupting(1))
    few = "--num-envs 2 --num-episodes 3" if name == "mountaincar_env.py" else FLAGS[name]
    with pytest.raises(KeyboardInterrupt):
        module(name).main([*few.split(), "--distributed"])


def test_the_car_keeps_the_episodes_of_its_last_line(monkeypatch, tmp_path):
    car = module("mountaincar_env.py")
    flags = f"--num-envs 3 --num-episodes 6 --num-intervals 3 --save {tmp_path / 'x.npz'}".split()
    complete = car.main(flags)
    monkeypatch.setattr(sys, "stdout", Interrupting(2))
    results = car.main(flags)
    assert results["interrupted"] and results["obs"].shape[1] == results["episodes"][-1] == 4
    equal(results["obs"], complete["obs"][:, :4])


def test_intervals_are_equal_and_overshoot_by_less_than_one():
    td, reinforce = module("parallel_td.py"), module("reinforce_parallel.py")
    for flags, updates in (
        ("--total-timesteps 100", 7),
        ("--total-timesteps 336", 22),
        ("--num-envs 32 --batch-size 40", 3125),
    ):
        assert td.parse_args(flags.split()).num_updates in (updates, 3140)
    assert reinforce.parse_args("--num-iterations 21".split()).num_updates == 22


def test_counts_beyond_32_bits_are_added_up(monkeypatch, capsys):
    """As REINFORCE reports them: in parts, each of which 32 bits can hold."""
    script = module("gridworld_qlearning.py")
    train_interval = script.train_interval

    def many(run, state):
        state, metrics = train_interval(run, state)
        return state, metrics | {"timesteps": jnp.full(3, 2**30)}

    monkeypatch.setattr(script, "train_interval", many)
    results = script.main("--total-timesteps 2000 --num-intervals 2".split())
    equal(results["timesteps"][:, 0], [3 * 2**30, 6 * 2**30])
    assert "6,442,450,944" in capsys.readouterr().out


@each(SCRIPTS)
def test_a_module_of_that_name_runs_with_any_output_and_leaves_a_backend_alone(name, monkeypatch):
    """Output has no `reconfigure`. An import changes no backend; a command needs no screen."""
    monkeypatch.setenv("MPLBACKEND", "svg")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "argv", [name, "--num-seeds", "0"])
    runpy.run_path(str(ROOT / name))
    assert os.environ["MPLBACKEND"] == "svg"
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / name), run_name="__main__")
    assert os.environ["MPLBACKEND"] == "agg"


@each([name for name in LEARNERS if name != "gridworld_qlearning.py"])
def test_no_traced_value_leaks(name):
    with jax.checking_leaks():
        script = module(name)
        own, *_ = by_hand(script, FLAGS[name], 1)
    assert len(own["seed"]) == 27
