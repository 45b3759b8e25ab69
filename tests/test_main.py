"""What surrounds the algorithm: runs, devices, lines, files and figures.

A toy takes the place of the algorithm in one script for each text of `main` (the three linear
learners have the same). Its numbers follow from the flags of a run, so each test knows what must be
printed, saved or drawn. No two runs have equal numbers, and means differ from medians: the sizes of
the seeds are not in order, and one of three episodes has a higher return than the others.
"""

import contextlib
import re
import time
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GRID, PARALLEL, REINFORCE, SCRIPTS, load
from matplotlib.figure import Figure

# A median of returns of which none exists is nan, as it should be.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice")
close, equal = np.testing.assert_allclose, np.testing.assert_equal
# The last gamma has more digits than `:g` shows.
RATES, GAMMAS, SEEDS = [0.5, 0.125, 0.25], [0.5, 0.75, 1.0, 0.25, 0.9921875], [7, 8, 9]
SIZES = np.array([64.0, 49.0, 85.0])  # of the seeds: the mean is 66, the median 64
LINES = 4
NAP = 0.02  # seconds that each run sleeps in each interval
MAINS = [PARALLEL, GRID, REINFORCE]  # the car, which learns nothing, has tests of its own
SWEEP = "--learning-rate 0.5 0.125 0.25 --gamma 0.5 0.75 1 0.25 0.9921875 --num-seeds 3 --seed 7"
SWEEP += f" --num-intervals {LINES}"
STEPS = " --total-timesteps 1e9"  # 250,000,000 in each of four intervals
COMMANDS = {PARALLEL: SWEEP + STEPS, GRID: SWEEP + STEPS, REINFORCE: SWEEP}

# What is known of the 45 runs, (45,) each: seeds change fastest, then gamma.
RUNS = SimpleNamespace(
    rate=np.repeat(RATES, 5 * 3),
    gamma=np.tile(np.repeat(GAMMAS, 3), 3),
    seed=np.tile(SEEDS, 15),
    size=np.tile(SIZES, 15),
)
SETTINGS = np.arange(45).reshape(15, 3)  # the runs of each
LABELS = [f"learning_rate {rate}, gamma {gamma}" for rate in RATES for gamma in GAMMAS]


def value_after(lines):
    """The toy's value: the size of the seed, and the learning rate for each interval."""
    return RUNS.size + lines * RUNS.rate


def steps_after(name, lines):
    """The steps of each run. Only REINFORCE's differ. Their sum needs more than 32 bits."""
    if name == REINFORCE:
        return lines * (2**27 + 2**20 * RUNS.seed + 2**24 * RUNS.rate + 1)
    return np.full(45, lines * 250_000_000)


def episodes_in(line):
    """The toy's episodes: 1 to 5 of each run; in line 1, none of seed 7, in 2, none of gamma 1."""
    none = (line == 1) & (RUNS.seed == 7) | (line == 2) & (RUNS.gamma == 1)
    return np.where(none, 0, RUNS.seed - 8 + line)


def returns_in(line):
    """The toy's mean returns of a run, from -244 to 1,240; nan if no episode ended."""
    return np.where(episodes_in(line) == 0, np.nan, 20 * value_after(line) * RUNS.gamma - 500)


class State(NamedTuple):
    value: jax.Array
    line: jax.Array
    timesteps: jax.Array


def init_state(run):
    return State(jnp.array(SIZES)[run.seed - 7], 0, 0)


def train_interval(run, state):
    value, line = state.value + run.learning_rate, state.line + 1
    none = (line == 1) & (run.seed == 7) | (line == 2) & (run.gamma == 1)
    more = (2**24 * run.learning_rate).astype(int)
    state = State(value, line, line * (2**27 + 2**20 * run.seed + more + 1))
    return state, {
        "returns": jnp.where(none, jnp.nan, 20 * value * run.gamma - 500),
        "episodes": jnp.where(none, 0, run.seed - 8 + line),
        "episode_steps": value**2,
        "value": value,
        "constant": 2.5,
    }


def evaluate(run, state):
    returns = state.value + jnp.array([0.0, 9.0, 0.0])
    grid = {"greedy_steps": 1.0, "start_value": state.value, "q_table": jnp.zeros((1, 1, 4))}
    return {"greedy_return": returns, "layer": {"kernel": state.value}, **grid}


def with_toy(patch, name, **functions):
    """Put the toy in the place of a script's algorithm. Other functions may replace its own."""
    script = load(name)
    toy = {"init_state": init_state, "train_interval": train_interval, "evaluate": evaluate}
    for function, other in {**toy, **functions}.items():
        patch.setattr(script, function, other)
    return script


@pytest.fixture
def script(monkeypatch):
    """One script with the toy, for what is the same text in all."""
    return with_toy(monkeypatch, PARALLEL)


@pytest.fixture(scope="module", params=MAINS)
def toy(request, tmp_path_factory):
    """One command with the toy: what main returned, what it printed, and when."""
    name, printed = request.param, tmp_path_factory.mktemp("toy") / "printed.txt"
    lines_before_nap = []

    def nap(value):
        lines_before_nap.append(printed.read_text().count("\nstep "))
        time.sleep(NAP)
        return value

    def slow_interval(run, state):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        value = jax.pure_callback(nap, shape, state.value, vmap_method="sequential")
        return train_interval(run, state._replace(value=value))

    def slow_to_trace(function):
        def slow(*args):
            time.sleep(0.5)
            return function(*args)

        return slow

    functions = {"init_state": init_state, "train_interval": slow_interval, "evaluate": evaluate}
    functions = {name: slow_to_trace(function) for name, function in functions.items()}
    with pytest.MonkeyPatch.context() as patch, printed.open("w") as file:
        script, began = with_toy(patch, name, **functions), time.perf_counter()
        patch.setattr(script, "AT_ONCE", 5)  # of 12 runs on a device
        with contextlib.redirect_stdout(file):
            results = script.main(COMMANDS[name].split())
        seconds = time.perf_counter() - began
    text = printed.read_text().splitlines()
    return SimpleNamespace(
        name=name,
        results=results,
        seconds=seconds,
        curves=results["curves"],
        head=text[0],
        what_is_shown=[line for line in text if "of a setting" in line],
        lines=[line for line in text if line.startswith("step ")],
        reports=[line for line in text if line.startswith("learning_rate ")],
        lines_before_nap=lines_before_nap,
    )


def numbers_after(name, text):
    """The number that follows a name in a text, or the two of a range, as in 276.0 to 460.1."""
    found = re.search(rf"(?<!\w){name}:? (\S+)(?: to (\S+))?", text)
    assert found, f"no {name} in: {text}"
    return [float(number.replace(",", "")) for number in found.groups() if number]


def test_all_combinations_of_swept_values_run_with_all_seeds(toy):
    runs = toy.results["runs"]
    equal(runs["learning_rate"], RUNS.rate)
    equal(runs["gamma"], RUNS.gamma)
    equal(runs["seed"], RUNS.seed)
    assert runs["setting"].tolist() == np.repeat(LABELS, 3).tolist()
    assert [text.split(": ")[0] for text in toy.reports] == LABELS


def test_each_run_learns_with_its_own_flags(toy):
    """Three runs are repeated, so that four devices have equally many. They are cut."""
    for i in range(LINES):
        equal(toy.curves["returns"][i], returns_in(line=i + 1))
        equal(toy.curves["episodes"][i], episodes_in(line=i + 1))
        equal(toy.curves["timesteps"][i], steps_after(toy.name, i + 1))
    equal(toy.results["learned"]["layer"]["kernel"], value_after(LINES))
    equal(toy.results["learned"]["greedy_return"][:, 1], value_after(LINES) + 9)


def test_the_first_line_has_the_numbers_of_runs_and_devices(toy):
    assert numbers_after("runs", toy.head) == [45]
    assert numbers_after("devices", toy.head) == [4]
    assert len(toy.lines) == LINES


def assert_range(name, line, means):
    """A line shows the lowest and the highest of the means of all settings, or nan as the last."""
    expected = [np.nanmin(means), np.max(means)]  # np.max is nan if one is
    close(numbers_after(name, line), expected, rtol=1e-3)


def test_a_line_shows_the_lowest_and_the_highest_mean_of_a_setting(toy):
    [sentence] = toy.what_is_shown
    assert "lowest to highest mean" in sentence
    for i, line in enumerate(toy.lines, start=1):
        assert_range("value", line, value_after(i)[SETTINGS].mean(axis=1))
        assert numbers_after("constant", line) == [2.5]  # equal in all settings: one number


@pytest.mark.parametrize("toy", [PARALLEL, REINFORCE], indirect=True)
def test_a_return_is_a_mean_over_all_episodes_of_the_runs_of_a_setting(toy):
    """Runs have different numbers of episodes. One without any does not make the mean nan.

    In the second line, three settings have no episode at all: there, nan is the highest.
    """
    for i, line in enumerate(toy.lines, start=1):
        number = episodes_in(i)[SETTINGS]
        total = np.nansum(returns_in(i)[SETTINGS] * number, axis=1)
        with np.errstate(invalid="ignore"):  # 0 / 0
            assert_range("returns", line, total / number.sum(axis=1))
        assert np.isnan(numbers_after("returns", line)[1]) == (i == 2)


@pytest.mark.parametrize("toy", [GRID], indirect=True)
def test_the_grid_world_shows_the_steps_of_all_episodes_divided_by_their_number(toy):
    for i, line in enumerate(toy.lines, start=1):
        steps, number = value_after(i) ** 2, episodes_in(i)
        with np.errstate(divide="ignore"):
            ratio = steps[SETTINGS].sum(axis=1) / number[SETTINGS].sum(axis=1)
        assert_range("episode_steps", line, np.where(np.isfinite(ratio), ratio, np.nan))


def test_a_line_shows_the_steps_of_a_run_and_those_of_all_runs_per_second(toy):
    for i, line in enumerate(toy.lines, start=1):
        steps = steps_after(toy.name, i)
        if toy.name == REINFORCE:
            assert_range("step", line, steps[SETTINGS].mean(axis=1))
        else:
            assert numbers_after("step", line) == [steps[0]]
        speed = int(line.split("  ")[-1].split()[0].replace(",", ""))
        assert speed == pytest.approx(steps.sum() / toy.curves["seconds"][i - 1], rel=1e-3)


@pytest.mark.parametrize("name", MAINS)
def test_a_line_of_one_setting_has_a_mean_of_each_metric(name, monkeypatch, capsys):
    with_toy(monkeypatch, name).main("--seed 7 --num-seeds 3 --num-intervals 1".split())
    text = capsys.readouterr().out
    assert "means over all runs" in text and " to " not in text
    assert numbers_after("episodes", text) == [1]  # 0, 1 and 2


def test_each_line_is_written_before_the_next_interval_begins(toy):
    """Also into a file, as here."""
    assert sorted(set(toy.lines_before_nap)) == [0, 1, 2, 3]


def test_seconds_include_what_an_interval_takes(toy):
    """Each of four devices has twelve runs, which sleep one after the other."""
    assert np.all(toy.curves["seconds"] >= 12 * NAP * np.arange(1, LINES + 1))


def test_seconds_begin_after_compilation(toy):
    """Each of three functions takes half a second to trace, and nothing is counted twice."""
    [compiled] = numbers_after("compiled in", toy.head)
    assert compiled > 1.4  # shown with one decimal
    assert compiled - 0.05 + toy.curves["seconds"][-1] < toy.seconds


@pytest.mark.parametrize("name", SCRIPTS)
def test_nothing_is_computed_if_a_package_has_no_metadata(name, monkeypatch, capsys):
    """A plain folder on the path has none. A run that has finished would be lost.

    main([]) does not read the command line, which has flags of its own in a notebook.
    """

    def version(package):
        raise ModuleNotFoundError(package)

    script = load(name)
    monkeypatch.setattr(script, "version", version)
    monkeypatch.setattr("sys.argv", ["notebook", "-f", "kernel.json"])
    with pytest.raises(ModuleNotFoundError):
        script.main([])
    assert capsys.readouterr().out == ""


LAST = [(name, "report", "") for name in MAINS]
LAST += [(name, "draw", "--plot x.png") for name in MAINS]
LAST += [(REINFORCE, "animate", "--gif x.gif")]


@pytest.mark.parametrize(("name", "last", "flag"), LAST)
def test_the_file_is_written_before_results_are_reported_or_drawn(
    name, last, flag, monkeypatch, tmp_path
):
    """A report, or a picture, that fails loses nothing."""

    def fails(*args):
        raise OSError

    script = with_toy(monkeypatch, name, **{last: fails})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError):
        script.main(f"--num-intervals 1 --save x.npz {flag}".split())
    assert np.load("x.npz")["runs.seed"].tolist() == [0]


RETURNS = np.array([[1, 1, 1], [9, 9, 30], [2, 4, 3], [20, 30, 13]], float)


def test_a_report_has_the_mean_of_a_setting_with_its_interval_and_the_worst_run():
    """The rows from 1 on have the means 16, 3 and 21. Their variance is 86 + 1/3."""
    text = load(PARALLEL).report({"greedy_return": RETURNS}, slice(1, 4))
    assert numbers_after("greedy return", text) == [13.33]
    assert numbers_after("±", text) == [10.5]  # 1.96 * sqrt((86 + 1/3) / 3) = 10.514
    assert numbers_after("worst run", text) == [3]


def test_a_report_has_four_digits():
    """With one decimal, 0.987 and 0.97 would be printed as 1.0."""
    returns = np.array([[0.98712], [0.97012]])
    text = load(PARALLEL).report({"greedy_return": returns}, slice(0, 2))
    assert numbers_after("greedy return", text) == [0.9786]
    assert numbers_after("worst run", text) == [0.9701]


def test_a_report_of_one_run_is_its_return():
    text = load(PARALLEL).report({"greedy_return": RETURNS}, slice(1, 2))
    assert re.fullmatch(r"greedy return 16\.0+", text)


def test_a_report_of_a_run_that_diverged_is_nan():
    """The worst run is nan, too, whatever the others reach."""
    returns = np.array([[9.0], [np.nan]])
    text = load(PARALLEL).report({"greedy_return": returns}, slice(0, 2))
    assert np.isnan(numbers_after("greedy return", text))
    assert np.isnan(numbers_after("worst run", text))


def test_a_value_that_is_swept_twice_is_reported_twice(script, capsys):
    script.main("--gamma 0.5 0.5 --num-intervals 1".split())
    assert capsys.readouterr().out.count("gamma 0.5: greedy return") == 2


@pytest.mark.parametrize(("num_runs", "num_devices"), [(1, 1), (3, 3), (18, 4)])
def test_runs_are_divided_among_as_few_devices_as_they_need(num_runs, num_devices, script, capsys):
    """Of four. Two of 18 runs are repeated, and cut."""
    results = script.main(f"--num-seeds {num_runs} --num-intervals 1".split())
    assert numbers_after("devices", capsys.readouterr().out) == [num_devices]
    assert len(results["learned"]["greedy_return"]) == num_runs


@pytest.mark.parametrize("name", MAINS)
def test_the_state_before_an_interval_leaves_its_memory_to_the_one_after_it(name, monkeypatch):
    """Otherwise, there would be two copies of each buffer."""
    script, states = with_toy(monkeypatch, name), []
    compile_over_runs = script.compile_over_runs

    def compile_and_watch(*args, **kwargs):
        compiled = compile_over_runs(*args, **kwargs)

        def call(*arrays):
            states.extend(array for array in arrays if isinstance(array, State))
            return compiled(*arrays)

        return call

    monkeypatch.setattr(script, "compile_over_runs", compile_and_watch)
    script.main("--num-intervals 2".split())
    *before, last = [state.value.is_deleted() for state in states]  # the last is evaluated
    assert before == [True, True] and not last


class Accelerators(list):
    """CPU devices that say of themselves that they are GPUs."""

    def __getitem__(self, index):
        return SimpleNamespace(platform="gpu")


def test_on_a_gpu_all_runs_are_vmapped_at_once(script, monkeypatch):
    """On a CPU, a loop makes AT_ONCE of them at a time."""
    monkeypatch.setattr(script, "AT_ONCE", 2)
    runs, fixed = {"seed": np.array([8, 7, 9, 8, 7, 9])}, {"env": None}
    for devices, loops in (jax.devices()[:1], True), (Accelerators(jax.devices()[:1]), False):
        first = script.compile_over_runs(init_state, runs, fixed=fixed, devices=devices)
        equal(first(runs).value, SIZES[[1, 0, 2, 1, 0, 2]])
        assert ("while" in first.as_text()) == loops


def draw_toy(monkeypatch, flags):
    """Run REINFORCE with the toy. Return the figure that it would have saved."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    with_toy(monkeypatch, REINFORCE).main(f"{flags} --plot x.png".split())
    figures[0].draw_without_rendering()  # places everything
    return figures[0]


@pytest.fixture(scope="module")
def figure():
    """For each setting three thin lines, of its runs, and then a bold one, the median."""
    with pytest.MonkeyPatch.context() as patch:
        return draw_toy(patch, SWEEP)


def test_a_picture_shows_each_run_and_the_median_of_each_setting(figure):
    """Where a run has no return, its line has a gap, and the median is that of the others."""
    x = np.array([steps_after(REINFORCE, k) for k in range(1, LINES + 1)])  # (lines, 45)
    y = np.array([returns_in(k) for k in range(1, LINES + 1)])
    lines = iter(figure.axes[0].lines)
    for runs in SETTINGS:
        expected = [(x[:, run], y[:, run]) for run in runs]
        expected.append((np.median(x[:, runs], axis=1), np.nanmedian(y[:, runs], axis=1)))
        for own_x, own_y in expected:
            line = next(lines)
            equal(line.get_xdata(), own_x)
            close(line.get_ydata(), own_y)
    assert not list(lines)


def test_a_picture_shows_runs_thin_and_in_the_color_of_their_bold_median(figure):
    lines = figure.axes[0].lines
    for i in range(0, 60, 4):
        *thin, bold = lines[i : i + 4]
        assert {line.get_color() for line in thin} == {bold.get_color()}
        assert all(line.get_linewidth() < bold.get_linewidth() for line in thin)


def test_a_legend_names_the_settings_beside_their_colors(figure):
    [legend], bold = figure.legends, figure.axes[0].lines[3::4]
    assert [text.get_text() for text in legend.texts] == [f"median, {x}" for x in LABELS]
    assert [line.get_color() for line in legend.get_lines()] == [x.get_color() for x in bold]


def test_the_axes_are_labeled(figure):
    assert "steps" in figure.axes[0].get_xlabel()
    assert "return" in figure.axes[0].get_ylabel()


def test_the_legend_is_not_in_front_of_the_curves_and_leaves_room_for_them(figure):
    axes, legend = figure.axes[0].get_window_extent(), figure.legends[0].get_window_extent()
    assert not axes.overlaps(legend)
    assert axes.height > 3 * figure.dpi  # inches


def test_all_points_are_inside_of_the_axes(figure):
    inside = figure.axes[0].viewLim
    for line in figure.axes[0].lines:
        points = line.get_xydata()
        assert all(inside.contains(*point) for point in points if np.isfinite(point[1]))


def test_a_picture_of_one_progress_line_shows_its_points(monkeypatch):
    figure = draw_toy(monkeypatch, "--seed 8 --num-intervals 1")
    assert [line.get_marker() for line in figure.axes[0].lines] == [".", "."]
    assert [text.get_text() for text in figure.legends[0].texts] == ["median, all runs"]
