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
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import pytest
from conftest import GRID, PARALLEL, REINFORCE, SCRIPTS, load

close, equal = np.testing.assert_allclose, np.testing.assert_equal
# The last gamma has more digits than `:g` shows.
RATES, GAMMAS, SEEDS = [0.5, 0.125, 0.25], [0.5, 0.75, 1.0, 0.25, 0.9921875], [7, 8, 9]
SIZES = np.array([64.0, 49.0, 85.0])  # of the seeds: the mean is 66, the median 64
FLAGS = "--learning-rate 0.5 0.125 0.25 --gamma 0.5 0.75 1 0.25 0.9921875 --num-seeds 3 --seed 7"
LINES = 4
NAP = 0.02  # seconds that each run sleeps in each interval
MAINS = [PARALLEL, GRID, REINFORCE]  # the car, which learns nothing, has tests of its own

# What is known of the 45 runs, (45,) each: seeds change fastest, then gamma.
rate = np.repeat(RATES, 5 * 3)
gamma = np.tile(np.repeat(GAMMAS, 3), 3)
seed = np.tile(SEEDS, 15)
size = np.tile(SIZES, 15)
labels = np.repeat([f"learning_rate {x}, gamma {y}" for x in RATES for y in GAMMAS], 3).tolist()


def value_after(lines):
    """The toy's value: the size of the seed, and the learning rate for each interval."""
    return size + lines * rate


def steps_after(lines):
    """The toy's steps. Those of seeds and settings differ; their sum needs more than 32 bits."""
    return lines * (2**27 + 2**20 * seed + 2**24 * rate + 1)


def returns_in(line):
    """The toy's returns, from -244 to 1,240. Runs of seed 7 have none in the first line."""
    return np.where((seed == 7) & (line == 1), np.nan, 20 * value_after(line) * gamma - 500)


class State(NamedTuple):
    value: jax.Array
    line: jax.Array
    timesteps: jax.Array


def init_state(run):
    return State(jnp.array(SIZES)[run.seed - 7], 0, 0)


def train_interval(run, state):
    value, line = state.value + run.learning_rate, state.line + 1
    returns = jnp.where((run.seed == 7) & (line == 1), jnp.nan, 20 * value * run.gamma - 500)
    more = (2**24 * run.learning_rate).astype(int)
    state = State(value, line, line * (2**27 + 2**20 * run.seed + more + 1))
    return state, {"returns": returns, "episode_steps": value**2, "episodes": value}


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
    printed = tmp_path_factory.mktemp("toy") / "printed.txt"
    lines_before_nap = []

    def nap(value):
        lines_before_nap.append(len(printed.read_text().splitlines()))
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
        script, began = with_toy(patch, request.param, **functions), time.perf_counter()
        patch.setattr(script, "AT_ONCE", 5)  # of 12 runs on a device
        with contextlib.redirect_stdout(file):
            results = script.main(f"{FLAGS} --num-intervals {LINES}".split())
        seconds = time.perf_counter() - began
    text = printed.read_text().splitlines()
    return SimpleNamespace(
        results=results,
        seconds=seconds,
        curves=results["curves"],
        head=text[0],
        lines=[line for line in text if line.startswith("step ")],
        reports=[line for line in text if line.startswith("learning_rate ")],
        lines_before_nap=lines_before_nap,
    )


def number_after(name, text):
    """The number that follows a name in a text."""
    number = re.search(rf"{name}:? (nan|[-+\d.,e]+)", text)[1]
    return float(number.replace(",", ""))


def test_all_combinations_of_swept_values_run_with_all_seeds(toy):
    runs = toy.results["runs"]
    equal(runs["learning_rate"], rate)
    equal(runs["gamma"], gamma)
    equal(runs["seed"], seed)
    assert runs["setting"].tolist() == labels
    assert [text.split(": ")[0] for text in toy.reports] == labels[::3]


def test_each_run_learns_with_its_own_flags(toy):
    """Three runs are repeated, so that four devices have equally many. They are cut."""
    for i in range(LINES):
        equal(toy.curves["returns"][i], returns_in(line=i + 1))
        equal(toy.curves["timesteps"][i], steps_after(i + 1))
    equal(toy.results["learned"]["layer"]["kernel"], value_after(LINES))
    equal(toy.results["learned"]["greedy_return"][:, 1], value_after(LINES) + 9)


def test_a_line_shows_means_over_all_runs_and_their_steps_per_second(toy):
    """In the first line, some runs have no return, so there is no mean."""
    assert number_after("runs", toy.head) == 45
    assert len(toy.lines) == LINES
    for i, line in enumerate(toy.lines, start=1):
        assert number_after("step", line) == pytest.approx(steps_after(i).mean(), abs=1)
        shown = number_after("returns", line)
        assert shown == pytest.approx(returns_in(i).mean(), rel=1e-3, nan_ok=True)
        assert number_after("episodes", line) == pytest.approx(value_after(i).mean(), rel=1e-3)
        speed = int(line.split("  ")[-1].split()[0].replace(",", ""))
        seconds = toy.curves["seconds"][i - 1]
        assert speed == pytest.approx(steps_after(i).sum() / seconds, rel=1e-3)


@pytest.mark.parametrize("toy", [GRID], indirect=True)
def test_the_grid_world_shows_the_steps_of_all_episodes_divided_by_their_number(toy):
    for i, line in enumerate(toy.lines, start=1):
        ratio = np.sum(value_after(i) ** 2) / np.sum(value_after(i))
        assert number_after("steps/episode", line) == pytest.approx(ratio, abs=0.06)


def test_each_line_is_written_before_the_next_interval_begins(toy):
    """Also into a file, as here. The first two lines are heads."""
    assert sorted(set(toy.lines_before_nap)) == [2, 3, 4, 5]


def test_seconds_include_what_an_interval_takes(toy):
    """Each of four devices has twelve runs, which sleep one after the other."""
    assert np.all(toy.curves["seconds"] >= 12 * NAP * np.arange(1, LINES + 1))


def test_seconds_begin_after_compilation(toy):
    """Each of three functions takes half a second to trace, and nothing is counted twice."""
    compiled = number_after("compiled in", toy.head)
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


def test_a_report_has_the_mean_and_the_worst_mean_of_the_runs_of_its_setting():
    returns = np.array([[1, 1, 1], [9, 9, 30], [2, 4, 3], [20, 30, 13]], float)
    for script in (PARALLEL, REINFORCE):  # the rows from 1 on have the means 16, 3 and 21
        text = load(script).report({"greedy_return": returns}, slice(1, 4))
        assert number_after("greedy return", text) == pytest.approx(40 / 3, abs=0.05)
        assert number_after("worst run", text) == 3


def test_a_value_that_is_swept_twice_is_reported_twice(script, capsys):
    script.main("--gamma 0.5 0.5 --num-intervals 1".split())
    assert capsys.readouterr().out.count("gamma 0.5: greedy return") == 2


def test_runs_are_divided_equally_among_as_few_devices_as_they_need(script):
    """Of four. The first runs are repeated."""
    for num_runs, num_devices, padded in (1, 1, 1), (3, 3, 3), (5, 4, 8), (18, 4, 20):
        devices, runs = script.divide({"seed": np.arange(num_runs)})
        assert len(devices) == num_devices
        assert runs["seed"].tolist() == [*range(num_runs), *range(padded - num_runs)]


SVG = "{http://www.w3.org/2000/svg}"


def style_of(element):
    """The style of an element of a picture, by name."""
    return dict(part.split(": ") for part in element.get("style").split("; "))


def read_picture(path):
    """Read what an .svg file shows. A point is (x to the right, y upwards), in 1/72 inch."""
    root = ElementTree.parse(path).getroot()
    group = {element.get("id"): element for element in root.iter(f"{SVG}g")}

    def lines(parent):
        for child in parent.findall(f"{SVG}g"):
            if child.get("id").startswith("line2d"):
                points = [(float(p.get("x")), -float(p.get("y"))) for p in child.iter(f"{SVG}use")]
                style = style_of(child.find(f"{SVG}path"))
                width = float(style["stroke-width"])
                yield SimpleNamespace(points=points, color=style["stroke"], width=width)

    box = group["patch_2"].find(f"{SVG}path").get("d")  # of the axes
    corners = np.array(re.findall(r"([\d.]+) ([\d.]+)", box), float) * [1, -1]
    return SimpleNamespace(
        lines=list(lines(group["axes_1"])),
        legend=list(lines(group["legend_1"])),
        texts=[text.text for text in group["legend_1"].iter(f"{SVG}text")],
        heights_of_texts=[-float(text.get("y")) for text in group["legend_1"].iter(f"{SVG}text")],
        lower=corners.min(axis=0),
        upper=corners.max(axis=0),
    )


def draw_toy(script, folder, flags):
    with mpl.rc_context({"svg.fonttype": "none"}):  # letters, not shapes
        script.main(f"{flags} --plot {folder / 'curves.svg'}".split())
    return read_picture(folder / "curves.svg")


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    """For each setting three thin lines, of its runs, and then a bold one, the median."""
    with pytest.MonkeyPatch.context() as patch:
        script = with_toy(patch, PARALLEL)
        flags = f"{FLAGS} --num-intervals {LINES}"
        return draw_toy(script, tmp_path_factory.mktemp("picture"), flags)


def test_a_picture_shows_each_run_and_the_median_of_each_setting(picture):
    """Where a run has no return, its line has a gap, and the median is that of the others."""
    expected, shown = [], []
    x = np.array([steps_after(k) for k in range(1, LINES + 1)])  # (lines, 45)
    y = np.array([returns_in(k) for k in range(1, LINES + 1)])
    for i in range(0, 45, 3):
        own_x, own_y = x[:, i : i + 3], y[:, i : i + 3]
        for run in range(3):
            expected.append(np.stack([own_x[:, run], own_y[:, run]]))
        expected.append(np.stack([np.median(own_x, axis=1), np.nanmedian(own_y, axis=1)]))
    for line, points in zip(picture.lines, expected, strict=True):
        assert len(line.points) == np.isfinite(points[1]).sum()
        shown += line.points
    expected = np.concatenate(expected, axis=1)
    expected = expected[:, np.isfinite(expected[1])]
    for drawn, values in zip(np.transpose(shown), expected, strict=True):
        scale, offset = np.polyfit(values, drawn, 1)
        assert scale > 0
        close(drawn, scale * values + offset, atol=0.01)


def test_a_picture_shows_runs_thin_and_in_the_color_of_their_bold_median(picture):
    for i in range(0, 60, 4):
        *thin, bold = picture.lines[i : i + 4]
        assert {line.color for line in thin} == {bold.color}
        assert all(line.width < bold.width for line in thin)


def test_a_legend_names_the_settings_beside_their_colors(picture):
    assert picture.texts == [f"median, {label}" for label in labels[::3]]
    assert [line.color for line in picture.legend] == [line.color for line in picture.lines[3::4]]


def test_the_legend_is_not_in_front_of_the_curves_and_leaves_room_for_them(picture):
    heights = np.array(picture.heights_of_texts)
    assert np.all((heights < picture.lower[1]) | (heights > picture.upper[1]))
    assert picture.upper[1] - picture.lower[1] > 3 * 72  # inches


def test_all_points_are_inside_of_the_axes(picture):
    points = np.concatenate([line.points for line in picture.lines])
    assert np.all((picture.lower < points) & (points < picture.upper))


def test_a_picture_of_one_progress_line_shows_its_points(script, tmp_path):
    picture = draw_toy(script, tmp_path, "--seed 8 --num-intervals 1")
    assert [len(line.points) for line in picture.lines] == [1, 1]
    assert picture.texts == ["median, all runs"]
