"""What surrounds the algorithm: runs, devices, lines, files, figures and Ctrl-C.

A toy takes the place of the algorithm in parallel_td.py; the other learners have the same text. Its
numbers follow from the flags of a run, so each test knows what must be printed, saved or drawn. It
runs 15 settings of three seeds: three learning rates, five discount factors, seeds 7 to 9.
"""

import contextlib
import io
import json
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GRID, ROOT
from matplotlib.figure import Figure

import parallel_td as script

close, equal = np.testing.assert_allclose, np.testing.assert_equal
RATES, GAMMAS, SEEDS = [0.5, 0.125, 0.25], [0.5, 0.75, 1.0, 0.25, 0.625], [7, 8, 9]
FLAGS = "--learning-rate 0.5 0.125 0.25 --gamma 0.5 0.75 1 0.25 0.625 --num-seeds 3 --seed 7"
LINES = 4
STEPS = 2**30  # in each of four intervals: together more than 32 bits can count

# What is known of the 45 runs, (45,) each: seeds change fastest, then gamma.
rate = np.repeat(RATES, 5 * 3)
gamma = np.tile(np.repeat(GAMMAS, 3), 3)
seed = np.tile(SEEDS, 15)


def value_after(lines):
    """The toy's value: it starts at the seed, and each interval adds the learning rate."""
    return seed + lines * rate


def returns_in(line):
    """The toy's returns. Runs of seed 7 have none in the first line."""
    return np.where((seed == 7) & (line == 1), np.nan, value_after(line) * gamma)


@pytest.fixture(scope="module", autouse=True)
def toy_algorithm():
    """Put the toy into the place of the algorithm."""

    def init_state(run):
        return run.seed + 0.0, 0  # and no line so far

    def train_interval(run, state):
        value, line = state[0] + run.learning_rate, state[1] + 1
        returns = jnp.where((run.seed == 7) & (line == 1), jnp.nan, value * run.gamma)
        metrics = {"timesteps": jnp.array(STEPS), "returns": returns, "unknown": jnp.nan}
        return (value, line), metrics

    def evaluate(run, state):
        value, _ = state
        greedy = value + jnp.array([-9.0, 9.0])  # two episodes
        return {"greedy_return": greedy, "params": {"layer": {"kernel": value}}}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "init_state", init_state)
        patch.setattr(script, "train_interval", train_interval)
        patch.setattr(script, "evaluate", evaluate)
        yield


def run_toy(more=""):
    return script.main(f"{FLAGS} --num-intervals {LINES} {more}".split())


def kernel(results):
    return results["learned"]["params"]["layer"]["kernel"]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """One command with the toy: what main returned, what it printed, what is in the file."""
    path, output = tmp_path_factory.mktemp("toy") / "new" / "x.npz", io.StringIO()
    with contextlib.redirect_stdout(output):
        results = run_toy(f"--save {path}")  # in a folder that does not exist yet
    with np.load(path, allow_pickle=False) as file:
        saved = dict(file)
    return SimpleNamespace(results=results, lines=output.getvalue().splitlines(), file=saved)


def numbers_in(text):
    """All numbers of a text, without their commas."""
    found = re.findall(r"-?\d[\d,]*\.?\d*(?:e[+-]?\d+)?", text)
    return [float(number.replace(",", "")) for number in found]


def test_all_combinations_of_swept_values_run_with_all_seeds(toy):
    runs = toy.results["runs"]
    equal(runs["learning_rate"], rate)
    equal(runs["gamma"], gamma)
    equal(runs["seed"], seed)


def test_each_run_learns_with_its_own_flags(toy):
    returns = toy.results["curves"]["returns"]
    assert returns.shape == (LINES, 45)
    for i in range(LINES):
        equal(returns[i], returns_in(line=i + 1))
    equal(kernel(toy.results), value_after(LINES))


def test_steps_are_counted_beyond_32_bits(toy):
    timesteps = toy.results["curves"]["timesteps"]
    for i in range(LINES):
        equal(timesteps[i], [STEPS * (i + 1)] * 45)


def test_the_file_holds_what_main_returns_with_joined_names(toy):
    equal(toy.file["runs.gamma"], gamma)
    equal(toy.file["curves.returns"], toy.results["curves"]["returns"])
    equal(toy.file["learned.params.layer.kernel"], value_after(LINES))
    assert not toy.file["interrupted"]
    flags = json.loads(toy.file["args"].item())
    assert flags["gamma"] == GAMMAS and flags["num_seeds"] == 3


def test_the_first_line_shows_runs_and_devices(toy):
    runs, devices, *_ = numbers_in(toy.lines[0])
    assert (runs, devices) == (45, 4)


def shows(text, number):
    """Whether a text has a number, to four digits."""
    return np.isclose(numbers_in(text), number, rtol=1e-3).any()


def test_a_line_shows_the_steps_of_a_run_and_the_mean_return(toy):
    for line in (1, 2, 3, 4):
        assert shows(toy.lines[line], STEPS * line)
        assert shows(toy.lines[line], np.nanmean(returns_in(line)))


def test_a_mean_over_some_of_the_runs_says_so(toy):
    """In the first line, the 15 runs of seed 7 have no return. No run has the metric `unknown`."""
    assert shows(toy.lines[1], 30) and not shows(toy.lines[2], 30)
    assert "nan" in toy.lines[1] and "nan" in toy.lines[2]


def test_a_line_shows_steps_per_second_over_all_runs(toy):
    assert shows(toy.lines[4], 45 * 4 * STEPS / toy.results["curves"]["seconds"][-1])


def test_each_setting_is_reported_with_its_values(toy):
    settings = [(own_rate, own_gamma) for own_rate in RATES for own_gamma in GAMMAS]
    for text, setting in zip(toy.lines[1 + LINES :], settings, strict=True):
        learned = 8 + LINES * setting[0]  # the mean over seeds 7 to 9
        expected = [*setting, learned, learned - 1]  # and that of the worst run
        close(numbers_in(text), expected, atol=0.05)


@pytest.mark.parametrize("lines", [1, 3])
def test_ctrl_c_keeps_what_the_lines_so_far_show(lines, monkeypatch, tmp_path):
    printed = []

    def print_and_interrupt(*words, **_):
        printed.append(words)
        if len(printed) == 1 + lines:  # the line with the devices comes before
            raise KeyboardInterrupt

    monkeypatch.setattr(script, "print", print_and_interrupt, raising=False)
    results = run_toy(f"--save {tmp_path / 'x.npz'}")
    assert len(results["curves"]["timesteps"]) == lines
    equal(kernel(results), value_after(lines))
    assert results["interrupted"] and np.load(tmp_path / "x.npz")["interrupted"]


def test_after_ctrl_c_a_command_has_saved_and_ends_a_loop_of_the_shell(tmp_path):
    flags = ["--total-timesteps", "2e9", "--num-intervals", "1000", "--save", tmp_path / "x.npz"]
    command = [sys.executable, ROOT / GRID, *flags]
    # In the background, tests ignore SIGINT. A program that they start would do so, too.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, handler)
    process.stdout.readline()  # the devices
    process.stdout.readline()  # the first progress line
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == -signal.SIGINT
    assert np.load(tmp_path / "x.npz")["interrupted"]


@pytest.mark.parametrize(
    ("num_runs", "num_devices", "at_once", "padded"),
    [
        (22, 4, 3, 24),  # six on each: two batches of three
        (18, 4, 3, 24),  # five on each: batches of three and two would be compiled apart
    ],
)
def test_runs_are_divided_into_equal_batches(num_runs, num_devices, at_once, padded, monkeypatch):
    monkeypatch.setattr(script, "MAX_AT_ONCE", 4)
    devices, size, runs = script.divide({"seed": np.arange(num_runs)})
    assert (len(devices), size) == (num_devices, at_once)
    assert runs["seed"].tolist() == [*range(num_runs), *range(padded - num_runs)]


def test_a_figure_shows_the_median_of_each_setting(monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
    run_toy(f"--plot {tmp_path / 'x.png'}")
    drawn = [line.get_xydata() for axes in figures[0].axes for line in axes.get_lines()]
    returns = np.stack([returns_in(line) for line in (1, 2, 3, 4)])  # (4, 45)
    for median in np.nanmedian(returns.reshape(4, 15, 3), axis=2).T:
        curve = np.stack([STEPS * np.arange(1, 5), median], axis=1)
        assert any(np.allclose(curve, other) for other in drawn if len(other) == 4)
