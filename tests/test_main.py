"""What surrounds the algorithm: runs, devices, lines, files and figures.

A toy takes the place of the algorithm in parallel_td.py, whose text here is that of all linear
learners, and in reinforce_parallel.py. Its numbers follow from the flags of a run, so each test
knows what must be printed, saved or drawn. No two runs have equal numbers, and means differ from
medians: seeds are squared, and one of three episodes has a higher return than the others.
"""

import contextlib
import io
import re
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CAR, GRID, PARALLEL, REINFORCE, load
from matplotlib.figure import Figure

close, equal = np.testing.assert_allclose, np.testing.assert_equal
RATES, GAMMAS, SEEDS = [0.5, 0.125, 0.25], [0.5, 0.75, 1.0, 0.25, 0.625], [7, 8, 9]
FLAGS = "--learning-rate 0.5 0.125 0.25 --gamma 0.5 0.75 1 0.25 0.625 --num-seeds 3 --seed 7"
LINES = 4
NAP = 0.05  # seconds that each run sleeps in each interval

# What is known of the 45 runs, (45,) each: seeds change fastest, then gamma.
rate = np.repeat(RATES, 5 * 3)
gamma = np.tile(np.repeat(GAMMAS, 3), 3)
seed = np.tile(SEEDS, 15)


def value_after(lines):
    """The toy's value: the square of the seed, and the learning rate for each interval."""
    return seed**2 + lines * rate


def steps_after(lines):
    """The toy's steps. They differ between runs; their sum needs more than 32 bits."""
    return lines * (2**27 + 2**20 * seed + 1)


def returns_in(line):
    """The toy's returns, from -255 to 1,110. Runs of seed 7 have none in the first line."""
    return np.where((seed == 7) & (line == 1), np.nan, 20 * value_after(line) * gamma - 500)


def init_state(run):
    return run.seed**2 + 0.0, 0  # and no line so far


def sleep(value):
    time.sleep(NAP)
    return np.float32(0.0)


def train_interval(run, state):
    value, line = state[0] + run.learning_rate, state[1] + 1
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    value = value + jax.pure_callback(sleep, shape, value, vmap_method="sequential")
    returns = jnp.where((run.seed == 7) & (line == 1), jnp.nan, 20 * value * run.gamma - 500)
    timesteps = line * (2**27 + 2**20 * run.seed + 1)
    return (value, line), {"timesteps": timesteps, "returns": returns}


def evaluate(run, state):
    value, _ = state
    return {"greedy_return": value + jnp.array([0.0, 0.0, 9.0]), "layer": {"kernel": value}}


@pytest.fixture(scope="module", params=[PARALLEL, REINFORCE])
def script(request):
    """A script with the toy in the place of its algorithm."""
    script = load(request.param)
    with pytest.MonkeyPatch.context() as patch:
        for function in init_state, train_interval, evaluate:
            patch.setattr(script, function.__name__, function)
        yield script


def run_toy(script, more=""):
    return script.main(f"{FLAGS} --num-intervals {LINES} {more}".split())


@pytest.fixture(scope="module")
def toy(script, tmp_path_factory):
    """One command with the toy: what main returned, what it printed, what is in the file."""
    path, output = tmp_path_factory.mktemp("toy") / "x.npz", io.StringIO()
    with contextlib.redirect_stdout(output):
        results = run_toy(script, f"--save {path}")
    with np.load(path) as file:
        saved = dict(file)
    text = output.getvalue().splitlines()
    return SimpleNamespace(
        results=results,
        head=text[0],
        lines=[line for line in text if line.startswith("step ")],
        reports=[line for line in text if "greedy return" in line],
        file=saved,
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


def test_each_run_learns_with_its_own_flags(toy):
    for i in range(LINES):
        equal(toy.results["curves"]["returns"][i], returns_in(line=i + 1))
        equal(toy.results["curves"]["timesteps"][i], steps_after(i + 1))
    equal(toy.results["learned"]["layer"]["kernel"], value_after(LINES))


def test_the_file_has_joined_names(toy):
    equal(toy.file["learned.layer.kernel"], value_after(LINES))


def test_the_first_line_shows_the_number_of_runs(toy):
    assert number_after("runs", toy.head) == 45


def test_a_line_shows_the_mean_steps_and_the_mean_return_of_all_runs(toy):
    """In the first line, some runs have no return, so there is no mean."""
    for i, line in enumerate(toy.lines, start=1):
        assert number_after("step", line) == pytest.approx(steps_after(i).mean(), abs=1)
        shown = number_after("returns", line)
        assert shown == pytest.approx(returns_in(i).mean(), rel=1e-3, nan_ok=True)
        speed = int(line.split("  ")[-1].split()[0].replace(",", ""))
        seconds = toy.results["curves"]["seconds"][i - 1]
        assert speed == pytest.approx(steps_after(i).sum() / seconds, rel=1e-3)


def test_lines_are_written_at_once(script, monkeypatch):
    """Also into a file or a pipe."""
    flushed = {}

    def show(text, *words, flush=False, sep=" "):
        flushed[text.split()[0]] = flush

    monkeypatch.setattr(script, "print", show, raising=False)
    script.main("--num-intervals 2".split())
    assert flushed["means"] and flushed["step"]


def test_seconds_include_what_an_interval_takes(toy):
    """Each of four devices has twelve runs, which sleep one after the other."""
    for i in range(LINES):
        assert toy.results["curves"]["seconds"][i] >= (i + 1) * 12 * NAP


@pytest.mark.parametrize(
    ("name", "function", "flags"),
    [
        (GRID, "train_interval", "--total-timesteps 3000 --num-seeds 4"),
        (CAR, "rollout", "--num-envs 2 --num-episodes 3"),
    ],
)
def test_seconds_of_the_others_include_what_an_interval_takes(name, function, flags, monkeypatch):
    script, shape = load(name), jax.ShapeDtypeStruct((), jnp.float32)
    original = getattr(script, function)

    def slowly(*args):
        state, metrics, *steps = original(*args)
        nap = jax.pure_callback(sleep, shape, metrics["timesteps"], vmap_method="sequential")
        return state, metrics | {"timesteps": metrics["timesteps"] + nap}, *steps

    monkeypatch.setattr(script, function, slowly)
    curves = script.main(f"{flags} --num-intervals 3".split())["curves"]
    assert np.all(curves["seconds"] >= NAP * np.arange(1, 4))


def test_each_setting_is_reported_with_its_values_its_mean_and_its_worst_run(toy):
    means = (value_after(LINES) + 3).reshape(15, 3)  # one of three episodes is 9 higher
    settings = [(own_rate, own_gamma) for own_rate in RATES for own_gamma in GAMMAS]
    for text, (own_rate, own_gamma), runs in zip(toy.reports, settings, means, strict=True):
        assert number_after("learning_rate", text) == own_rate
        assert number_after("gamma", text) == own_gamma
        assert number_after("greedy return", text) == pytest.approx(runs.mean(), abs=0.05)
        assert number_after("worst run", text) == pytest.approx(runs.min(), abs=0.05)


def test_seconds_begin_after_compilation(script, monkeypatch, capsys):
    for function in init_state, train_interval, evaluate:

        def slowly(*args, function=function):
            time.sleep(1)  # when it is traced
            return function(*args)

        monkeypatch.setattr(script, function.__name__, slowly)
    assert script.main(["--num-intervals", "1"])["curves"]["seconds"][0] < 1
    assert number_after("compiled in", capsys.readouterr().out) >= 3  # three functions


def test_a_label_tells_near_values_apart(script):
    args = script.parse_args("--gamma 0.999998 0.999997 --num-seeds 2".split())
    assert [label for label, _ in script.make_runs(args)[1]] == ["gamma 0.999998", "gamma 0.999997"]


def test_a_value_that_is_swept_twice_is_reported_twice(script, capsys):
    script.main("--gamma 0.5 0.5 --num-intervals 1".split())
    output = capsys.readouterr().out
    assert output.count("gamma 0.5  greedy return") == 2
    assert "devices: 2 x" in output  # two runs need no more of the four


def test_runs_are_divided_into_equal_batches(script, monkeypatch):
    """Five or six on each of four devices: batches of three and two would be compiled apart."""
    monkeypatch.setattr(script, "MAX_AT_ONCE", 4)
    for num_runs in (18, 22):
        devices, size, runs = script.divide({"seed": np.arange(num_runs)})
        assert (len(devices), size) == (4, 3)
        assert runs["seed"].tolist() == [*range(num_runs), *range(24 - num_runs)]


def test_few_runs_need_few_devices(script):
    assert [len(script.divide({"seed": np.arange(n)})[0]) for n in (1, 3, 5)] == [1, 3, 3]


@pytest.fixture(scope="module")
def axes(script, tmp_path_factory):
    """What is drawn: for each setting three thin lines, of its runs, and then a bold one."""
    figures = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
        run_toy(script, f"--plot {tmp_path_factory.mktemp('plot') / 'x.png'}")
    return figures[0].axes[0]


def test_a_thin_line_shows_each_run_in_the_color_of_its_setting(axes):
    lines = axes.get_lines()
    for i in range(15):
        *thin, bold = lines[4 * i : 4 * i + 4]
        for run, line in enumerate(thin, start=3 * i):
            equal(line.get_xdata(), [steps_after(k)[run] for k in range(1, LINES + 1)])
            equal(line.get_ydata(), [returns_in(k)[run] for k in range(1, LINES + 1)])
            assert line.get_color() == bold.get_color()
            assert line.get_linewidth() < bold.get_linewidth()


def test_a_legend_names_the_settings_and_their_colors(axes):
    [legend] = axes.figure.legends
    handles = zip(legend.texts, legend.legend_handles, strict=True)
    shown = [(text.get_text(), line.get_color()) for text, line in handles]
    assert shown == [(line.get_label(), line.get_color()) for line in axes.get_lines()[3::4]]
    assert len({color for _, color in shown}) == 10  # then colors repeat


def test_a_figure_names_its_axes_and_leaves_room_for_the_curves(axes):
    names = axes.get_xlabel(), axes.get_ylabel()
    assert names == ("environment steps", "return of training episodes")
    axes.figure.draw_without_rendering()  # this places the axes beside the legend
    [legend] = axes.figure.legends
    assert legend.get_window_extent().y0 > axes.get_window_extent().y1
    assert axes.get_window_extent().height / axes.figure.dpi > 3  # inches


def test_all_points_are_inside_of_the_axes(axes):
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    for line in axes.get_lines():
        x, y = line.get_xdata(), line.get_ydata()
        assert left < np.min(x) and np.max(x) < right
        assert bottom < np.nanmin(y) and np.nanmax(y) < top


def test_a_figure_shows_the_median_of_each_setting_under_its_label(axes):
    curves = {line.get_label(): line.get_xydata() for line in axes.get_lines()}
    for own_rate in RATES:
        for own_gamma in GAMMAS:
            label = f"median  learning_rate {own_rate:g}, gamma {own_gamma:g}"
            rows = (rate == own_rate) & (gamma == own_gamma)
            for i, (x, y) in enumerate(curves[label], start=1):
                equal(x, np.median(steps_after(i)[rows]))
                equal(y, np.median(returns_in(i)[rows]))
