"""What the scripts do the same way: sweeps, devices, curves, Ctrl-C, one process that reports."""

import argparse
import importlib
import json
import sys
import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest
from conftest import FLAGS, SCRIPTS, TRIO
from matplotlib.colors import to_rgba

LEARNERS = [script for script in SCRIPTS if script != "mountaincar_env.py"]
equal = np.testing.assert_array_equal


@pytest.fixture
def script(request, tmp_path, monkeypatch):
    """A script in an empty folder. It is told of a single device; jax itself knows of two."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind="abacus")])
    module = importlib.import_module(request.param[:-3])
    module.flags = FLAGS[request.param].split()
    return module


def each(names):
    return pytest.mark.parametrize("script", names, indirect=True)


@pytest.fixture
def seconds(script, monkeypatch):
    """Seconds that each run of a program took, by its function. Only they move the script's clock.

    Compiling and printing take time, too. What is done takes 1 s at first, then 2 s, then 4 s.
    """
    spent, over_runs = defaultdict(list), script.over_runs

    def take(name):
        spent[name].append(2 ** len(spent[name]))

    def watched(function, args, num_devices):
        program = over_runs(function, args, num_devices)

        def run(*arrays):
            take(function.__name__)
            return program(*arrays)

        run.lower = lambda *_: SimpleNamespace(compile=lambda: take("compile") or run)
        return run

    def show(*words, **options):
        take("print")
        print(*words, **options)

    clock = SimpleNamespace(perf_counter=lambda: sum(map(sum, spent.values())))
    monkeypatch.setattr(script, "over_runs", watched)
    monkeypatch.setattr(script, "time", clock)
    monkeypatch.setattr(script, "print", show, raising=False)
    return spent


class State(NamedTuple):
    """State of a run of which everything is made up."""

    key: jax.Array
    line: int
    params: dict
    q_table: jax.Array


@pytest.fixture
def made_up(script, monkeypatch):
    """Instead of what learners learn: numbers that are exact, and differ in each line and run.

    The mean of an agent's table has each sign; the best action at the start differs between agents.
    """

    def number(args, line):
        return 10.0 * line + args.seed + 8 * args.gamma

    def state_at(line, args):
        table = jnp.zeros((2, 3, 4)).at[[0, 0, 1], [1, 2, 0], [2, 3, 1]].set(1.0)
        table = args.gamma * table.at[1, 2, args.seed - 2].set(3.0)
        return State(jax.random.key(0), line, {"w": number(args, line)}, table * (line == 3))

    def init_state(args):
        return state_at(jnp.array(0), args)

    def train_interval(args, state):
        line = state.line + 1
        learned = number(args, line)
        if script.__name__ == "reinforce_parallel":
            metrics = {"returns": learned, "timesteps": 1000 * line + args.seed}
        else:  # no episode ends at first, then some of the run with the first seed
            ended = jnp.where(line >= args.seed, learned, jnp.nan)
            metrics = {"returns": ended, "steps_per_episode": ended + 1}
            metrics |= {"td_error": learned / 100, "q_value": -learned / 10}
        return state_at(line, args), metrics

    def evaluate(args, state):
        learned = number(args, state.line)
        if script.__name__ == "gridworld_qlearning":
            return jnp.where((args.gamma > 0) & (args.seed != 3), learned, jnp.inf)
        return learned + jnp.arange(7) - 3

    if script.__name__ != "mountaincar_env":
        for function in init_state, train_interval, evaluate:
            monkeypatch.setattr(script, function.__name__, function)


TD_LINES = """
step 3,008  return nan  td_error 0.168  q_value -1.68  45,120 steps/s
step 6,016  return 25.8  td_error 0.268  q_value -2.68  30,080 steps/s
step 9,024  return 36.3  td_error 0.368  q_value -3.68  19,337 steps/s"""
LINES = dict.fromkeys(["parallel_td", "replay_td", "epsilon_decay_td"], TD_LINES)
LINES["gridworld_qlearning"] = """
step 4,000  steps per episode nan  return nan  60,000 steps/s
step 8,000  steps per episode 26.8  return 25.80  40,000 steps/s
step 12,000  steps per episode 37.3  return 36.30  25,714 steps/s"""
LINES["reinforce_parallel"] = """
iteration 4  return 16.8  15,045 steps/s
iteration 8  return 26.8  15,030 steps/s
iteration 12  return 36.8  12,876 steps/s"""
TABLE = """
gamma {0}  mean of the agents' tables
. 0.000  < {0:.3f}  ^ {0:.3f}
v {0:.3f}  . 0.000  > {0:.3f}"""


@each(LEARNERS)
def test_a_sweep_is_printed_drawn_and_saved(script, seconds, made_up, capsys, monkeypatch):
    """Of 15 runs on two devices, the last has a copy. The grid world shows four of five tables."""
    drawn, grid, gammas = [], script.__name__ == "gridworld_qlearning", [0, 0.125, 0.5, 0.75, 1]
    monkeypatch.setattr(script, "plot", lambda *call: drawn.extend(call))
    monkeypatch.setattr(script, "animate", None, raising=False)  # without --gif, it is not called
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    results = script.main([*script.flags, *"--seed 2 --save x.npz --plot x.png".split()])

    compiling = sum(seconds["compile"] + seconds["init_state"])
    text = "grid world" if grid else "CartPole-v1"
    text += f", 15 runs on 2 x abacus\ncompiled in {compiling:.1f} s" + LINES[script.__name__]
    if grid:
        zero = TABLE.format(0).translate(str.maketrans("<^v>", "...."))
        text += "".join([zero, *map(TABLE.format, gammas[1:4])])
        text += "\nthe first 4 of 5 tables are shown"
    for gamma in gammas:
        text += f"\ngamma {gamma}  "
        if grid:
            reach = f"2 of 3 greedy agents reach the goal, in at most {34 + 8 * gamma:.0f} steps"
            reach = reach if gamma else "0 of 3 greedy agents reach the goal"
            text += f"value of the start {3 * gamma:.5f}  {reach}"
        else:
            text += f"greedy return {33 + 8 * gamma:.1f}  worst run {32 + 8 * gamma:.1f}"
    assert capsys.readouterr().out == text + "\n"

    np.testing.assert_equal(dict(np.load("x.npz")), results)
    times = results["compile_seconds"], results["train_seconds"], results["interrupted"]
    assert times == (compiling, sum(seconds["train_interval"]), False)
    assert json.loads(results["args"])["swept"]["gamma"] == gammas
    equal(results["gamma"], np.repeat(gammas, 3))
    equal(results["seed"], [2, 3, 4] * 5)
    learned = [[10], [20], [30]] + results["seed"] + 8 * results["gamma"]  # (K, R)
    if script.__name__ != "reinforce_parallel":
        learned[[[1], [2], [3]] < results["seed"]] = np.nan
    equal(results["returns"], learned)
    labels, curve = [f"gamma {gamma}" for gamma in gammas], [results["timesteps"], learned]
    if grid:
        labels.pop()
        curve = [[table.mean(axis=0) for table in np.split(results["q_table"], 5)][:4]]
    np.testing.assert_equal(drawn, ["x.png", labels, *curve])


def press_ctrl_c(interval, script, seconds, monkeypatch):
    """Let Ctrl-C arrive while the results of a log interval are awaited."""
    gather = script.process_allgather

    def wait(*call, **options):
        begun = len(seconds["train_interval"] + seconds["rollout"])
        if begun == interval and not seconds["evaluate"]:
            raise KeyboardInterrupt
        return gather(*call, **options)

    monkeypatch.setattr(script, "process_allgather", wait)


@each(SCRIPTS)
def test_ctrl_c_keeps_what_the_last_line_shows(script, seconds, made_up, capsys, monkeypatch):
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
    for name in complete.keys() - {"args"}:  # the seconds, too
        equal(saved[name], complete[name], err_msg=name)


@each(SCRIPTS)
@pytest.mark.parametrize(("interval", "flags"), [(1, []), (2, ["--distributed"])])
def test_ctrl_c_before_the_first_line_or_in_a_job_is_an_error(
    interval, flags, script, seconds, made_up, monkeypatch
):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    press_ctrl_c(interval, script, seconds, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        script.main([*script.flags, *flags])


@each(SCRIPTS)
def test_process_1_neither_prints_nor_writes(script, made_up, tmp_path, capsys, monkeypatch):
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
