"""What surrounds the algorithm: runs, devices, lines, files, figures and Ctrl-C.

A toy takes the place of the algorithm in each learner. Its numbers follow from the flags of a run,
so each test knows what must be printed, saved or drawn. The toy has 15 settings of three seeds:
three learning rates, five discount factors, seeds 7 to 9.
"""

import contextlib
import io
import json
import re
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest
from conftest import GRID, LEARNERS, PARALLEL, load, refuse_to_train
from matplotlib.figure import Figure
from matplotlib.text import Text

close = partial(np.testing.assert_allclose, rtol=1e-3)  # lines show four digits
RATES, GAMMAS, SEEDS = [0.5, 0.125, 0.25], [0.5, 0.75, 1.0, 0.25, 0.625], [7, 8, 9]
FLAGS = "--learning-rate 0.5 0.125 0.25 --gamma 0.5 0.75 1 0.25 0.625 --num-seeds 3 --seed 7"
STEPS = 2**30  # in each of four intervals: together more than 32 bits can count

# What is known of the 45 runs, (45,) each: seeds change fastest, then gamma.
rate = np.repeat(RATES, 5 * 3)
gamma = np.tile(np.repeat(GAMMAS, 3), 3)
seed = np.tile(SEEDS, 15)


def state_after(lines):
    """The toy's state: it starts at the seed, and each interval adds the learning rate."""
    return seed + lines * rate


def returns_in(line):
    """The toy's returns. Runs of seed 7 have none in the first line."""
    return np.where((seed == 7) & (line == 1), np.nan, state_after(line) * gamma)


@pytest.fixture(scope="module", params=LEARNERS)
def script(request):
    """A learner with the toy in the place of its algorithm."""
    script, patch = load(request.param), pytest.MonkeyPatch()

    def init_state(run):
        return run.seed + 0.0

    def train_interval(run, state):
        state = state + run.learning_rate  # of seed 7: 7 + rate, then 7 + 2 rate, ...
        in_first_line = state < 7 + 1.5 * run.learning_rate
        returns = jnp.where((run.seed == 7) & in_first_line, jnp.nan, state * run.gamma)
        return state, {"timesteps": jnp.array(STEPS), "returns": returns, "unknown": jnp.nan}

    def evaluate(run, state):
        learned = {"greedy_return": state + jnp.array([-9.0, 9.0])}
        if hasattr(run, "grid_size"):
            table = state + jnp.zeros((*run.grid_size, 4))
            learned = {"q_table": table, "start_value": state, "greedy_steps": run.seed + 0.0}
        return {**learned, "layer": {"kernel": state}}

    patch.setattr(script, "init_state", init_state)
    patch.setattr(script, "train_interval", train_interval)
    patch.setattr(script, "evaluate", evaluate)
    yield script
    patch.undo()


def run_toy(script, more=""):
    return script.main(f"{FLAGS} --num-intervals 4 {more}".split())


@pytest.fixture(scope="module")
def toy(script, tmp_path_factory):
    """One command with the toy: what main returned, what it printed, what is in the file."""
    path, output = tmp_path_factory.mktemp("toy") / "x.npz", io.StringIO()
    began = time.perf_counter()
    with contextlib.redirect_stdout(output):
        results = run_toy(script, f"--save {path}")
    elapsed = time.perf_counter() - began
    with np.load(path, allow_pickle=False) as file:
        saved = dict(file)
    lines = output.getvalue().splitlines()
    return SimpleNamespace(results=results, lines=lines, file=saved, elapsed=elapsed)


def numbers_in(text):
    """All numbers of a text, without their commas."""
    found = re.findall(r"-?\d[\d,]*\.?\d*(?:e[+-]?\d+)?", text)
    return [float(number.replace(",", "")) for number in found]


def test_all_combinations_of_swept_values_run_with_all_seeds(toy):
    np.testing.assert_array_equal(toy.results["learning_rate"], rate)
    np.testing.assert_array_equal(toy.results["gamma"], gamma)
    np.testing.assert_array_equal(toy.results["seed"], seed)


def test_a_swept_flag_takes_numbers_that_jax_can_hold(script):
    args = script.parse_args([])
    args.gamma = [2**31 - 1, 0]
    columns, labels = script.settings_and_seeds(args)
    assert columns["gamma"].tolist() == [2**31 - 1, 0] and len(labels) == 2


@pytest.mark.parametrize("values", [["relu"], [[0.1, 0.2]], 0.5, [2**31], [10**30]])
def test_a_swept_flag_of_other_values_is_refused(script, values):
    args = script.parse_args([])
    args.gamma = values
    with pytest.raises(ValueError, match="gamma is swept"):
        script.settings_and_seeds(args)


def test_each_run_learns_with_its_own_flags(toy):
    assert toy.results["returns"].shape == (4, 45)
    for line in range(4):
        np.testing.assert_array_equal(toy.results["returns"][line], returns_in(line + 1))
    np.testing.assert_array_equal(toy.results["layer.kernel"], state_after(4))


def test_steps_are_counted_beyond_32_bits(toy):
    expected = [[STEPS * line] * 45 for line in (1, 2, 3, 4)]
    np.testing.assert_array_equal(toy.results["timesteps"], expected)


def test_the_file_holds_what_main_returns(toy):
    np.testing.assert_equal(toy.file, toy.results)
    flags = json.loads(str(toy.file["args"]))
    assert flags["gamma"] == GAMMAS and flags["num_seeds"] == 3


def test_flags_of_any_type_are_saved(script, monkeypatch):
    parse_args = script.parse_args

    def with_own_flags(argv):
        args = parse_args(argv)
        args.folder, args.bins = Path("a/b"), np.arange(3)
        return args

    monkeypatch.setattr(script, "parse_args", with_own_flags)
    flags = json.loads(run_toy(script)["args"])
    assert flags["folder"] == "a/b" and flags["bins"] == [0, 1, 2]


def test_seconds_of_compiling_and_training_are_parts_of_those_of_the_command(toy):
    compiling, training = toy.file["compile_seconds"], toy.file["train_seconds"]
    assert compiling > 0 and training > 0 and compiling + training < toy.elapsed


def test_a_whole_run_is_not_interrupted(toy):
    assert not toy.results["interrupted"]


def test_the_first_two_lines_show_runs_devices_and_seconds_of_compiling(toy):
    assert numbers_in(toy.lines[0]) == [45, 4]
    (seconds,) = numbers_in(toy.lines[1])
    assert abs(seconds - toy.results["compile_seconds"]) <= 0.06  # rounded to 0.1


def shown_in_line(toy, line):
    """The numbers of a progress line in order of size, so the last one is steps per second."""
    return sorted(numbers_in(toy.lines[1 + line]))  # two other lines come before


def test_a_line_shows_the_steps_of_a_run_and_the_mean_return_of_all(toy):
    for line in (2, 3, 4):
        *shown, _ = shown_in_line(toy, line)
        close(shown, [np.mean(returns_in(line)), STEPS * line])


def test_a_mean_over_some_of_the_runs_says_so(toy):
    """In the first line, the 15 runs of seed 7 have no return."""
    *shown, _ = shown_in_line(toy, 1)
    close(shown, [np.nanmean(returns_in(1)), 30, 45, STEPS])


def test_a_mean_over_a_single_run_of_several_says_so(script):
    """Of three runs, one has ended an episode since the line before."""
    line = {"timesteps": np.array([8, 8, 8]), "returns": np.array([np.nan, 7.0, np.nan])}
    close(numbers_in(script.describe(line, seconds=2.0)), [8, 7, 1, 3, 12])  # 24 steps in 2 s


def test_a_metric_that_no_run_knows_is_nan(toy):
    assert all("nan" in text for text in toy.lines[2:6])


def test_a_line_shows_steps_per_second_over_all_runs(toy):
    *_, speed = shown_in_line(toy, 4)
    close(speed, 45 * 4 * STEPS / toy.results["train_seconds"])


def test_each_setting_is_reported_with_its_values(script, toy):
    _, *parts = re.split("learning.rate", "\n".join(toy.lines))  # one for each of 15 settings
    settings = [(rate, gamma) for rate in RATES for gamma in GAMMAS]
    for text, (own_rate, own_gamma) in zip(parts, settings, strict=True):
        learned = 8 + 4 * own_rate  # the mean over seeds 7 to 9
        expected = [own_rate, own_gamma, learned, learned - 1]  # and that of the worst run
        if script.__name__.startswith("gridworld"):
            expected = [own_rate, own_gamma, learned, 3, 3, 9]  # 3 of 3 arrive, in at most 9 steps
        shown = numbers_in(text.splitlines()[0])
        np.testing.assert_allclose(sorted(shown), sorted(expected), atol=0.05)


def test_a_label_names_only_flags_of_several_values(script):
    _, labels = script.settings_and_seeds(script.parse_args("--gamma 0.5 0.25".split()))
    assert labels == ["gamma 0.5", "gamma 0.25"]


class OutputThatInterrupts(io.StringIO):
    """Standard output of a user who presses Ctrl-C after some lines: seen when they are flushed."""

    def __init__(self, lines):
        super().__init__()
        self.lines = lines

    def flush(self):
        super().flush()
        if self.getvalue().count("\n") == self.lines:
            raise KeyboardInterrupt


@pytest.mark.parametrize("lines", [1, 3])
def test_ctrl_c_keeps_what_the_lines_so_far_show(script, lines, monkeypatch, tmp_path):
    output = OutputThatInterrupts(lines=2 + lines)  # devices and compiling come before
    monkeypatch.setattr("sys.stdout", output)
    results = run_toy(script, f"--save {tmp_path / 'x.npz'}")
    assert len(results["timesteps"]) == lines
    assert results["interrupted"] and np.load(tmp_path / "x.npz")["interrupted"]
    np.testing.assert_array_equal(results["layer.kernel"], state_after(lines))
    assert f"up to line {lines}" in output.getvalue()


def test_ctrl_c_before_the_first_line_ends_the_run(script, monkeypatch):
    gather, calls = script.gather, []

    def interrupt_once(tree, length):  # while main waits for the first interval
        calls.append(tree)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return gather(tree, length)

    monkeypatch.setattr(script, "gather", interrupt_once)
    with pytest.raises(KeyboardInterrupt):
        run_toy(script)


def test_curves_hold_a_result_that_only_some_lines_have(script):
    """As that of a user who evaluates at every other line."""
    lines = [{"returns": np.array([1.0, 2.0])}, {"returns": np.array([3.0, 4.0]), "own": 5.0}]
    curves = script.stack(lines, taken={})
    assert curves["returns"].tolist() == [[1, 2], [3, 4]] and curves["own"].tolist() == [5]


def test_curves_hold_arrays_whose_shape_differs_between_lines(script):
    lines = [{"solved": np.array([7, 8])}, {"solved": np.array([9])}]
    curves = script.stack(lines, taken={})
    assert curves["solved.0"].tolist() == [7, 8] and curves["solved.1"].tolist() == [9]


def test_curves_hold_whatever_was_added_to_a_line_as_text_if_need_be(script, tmp_path):
    line = {"file": np.arange(2), "key": jax.random.key(0), "ragged": [[1, 2], [3]], 7: None}
    script.save(tmp_path / "x.npz", script.stack([line], taken=[]))
    saved = np.load(tmp_path / "x.npz", allow_pickle=False)
    assert saved["lines.file"].tolist() == [[0, 1]]
    assert saved["ragged"].tolist() == ["[[1, 2], [3]]"] and saved["7"].tolist() == ["None"]
    assert "key" in saved


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_evaluation_that_fails_or_is_interrupted_leaves_the_curves_and_the_state(
    script, error, monkeypatch, tmp_path
):
    gather, calls = script.gather, []

    def fail_after_training(tree, length):
        calls.append(tree)
        if len(calls) == 5:  # four lines, then the evaluation
            raise error
        return gather(tree, length)

    monkeypatch.setattr(script, "gather", fail_after_training)
    with pytest.raises(error):
        run_toy(script, f"--save {tmp_path / 'x.npz'}")
    saved = np.load(tmp_path / "x.npz")
    assert saved["returns"].shape == (4, 45)
    np.testing.assert_array_equal(saved["state."], state_after(4))  # the toy's state has no names


@pytest.mark.parametrize("more", [{"type": bool}, {"action": "store_true"}])
def test_a_swept_flag_of_true_and_false_is_refused(script, more):
    """bool("False") is True."""
    *_, sweep = script.make_parser()
    with pytest.raises(TypeError, match="--own: to sweep it, use type=int"):
        sweep("--own", default=[False], **more)


def test_what_is_added_to_a_line_takes_the_place_of_no_result(script, monkeypatch):
    def describe(line, seconds):  # a user may add to lines[-1] in the loop of main
        line["gamma"] = 2 * gamma
        return "a line"

    monkeypatch.setattr(script, "describe", describe)
    results = run_toy(script)
    np.testing.assert_array_equal(results["gamma"], gamma)
    np.testing.assert_array_equal(results["lines.gamma"], [2 * gamma] * 4)


@pytest.mark.parametrize("error", [ConnectionError, SystemExit])
def test_an_error_in_the_loop_is_raised_after_what_was_learned_is_saved(
    script, error, monkeypatch, tmp_path
):
    """As that of a logger of one's own, or an exit because a cluster ends the job."""
    described = []

    def fail_in_the_third_line(line, seconds):
        described.append(line)
        if len(described) == 3:
            raise error
        return "a line"

    monkeypatch.setattr(script, "describe", fail_in_the_third_line)
    with pytest.raises(error):
        run_toy(script, f"--save {tmp_path / 'x.npz'}")
    saved = np.load(tmp_path / "x.npz")
    assert saved["interrupted"] and len(saved["returns"]) == 3
    np.testing.assert_array_equal(saved["layer.kernel"], state_after(3))


def test_one_run_takes_one_device(script, capsys):
    script.main([])
    assert numbers_in(capsys.readouterr().out.splitlines()[0]) == [1, 1]  # run, device


def test_copies_of_runs_that_fill_up_devices_are_in_no_result(script, capsys):
    results = script.main("--num-seeds 5".split())  # two on each of three devices: six rows
    assert numbers_in(capsys.readouterr().out.splitlines()[0]) == [5, 3]
    assert {array.shape[0] for array in (results["seed"], results["layer.kernel"])} == {5}


def test_runs_are_divided_into_equal_batches(script, monkeypatch):
    """Four devices. A remainder would be compiled apart, so batches are equal."""
    monkeypatch.setattr(script, "RUNS_AT_ONCE", 4)

    def divided(num_runs):
        columns = {"seed": np.arange(num_runs)}
        devices, at_once, rows = script.divide(SimpleNamespace(distributed=False), columns)
        return len(devices), at_once, rows["seed"].tolist()

    assert divided(1) == (1, 1, [0])
    assert divided(9) == (3, 3, [*range(9)])  # three on each, all at once
    assert divided(22) == (4, 3, [*range(22), 0, 1])  # six on each: two batches of three
    assert divided(18) == (
        4,
        3,
        [*range(18), *range(6)],
    )  # five on each: three and two, with a copy


def test_a_job_uses_all_devices_even_for_one_run(script):
    args = SimpleNamespace(distributed=True)
    devices, at_once, rows = script.divide(args, {"seed": np.array([5])})
    assert devices == jax.devices()
    assert (at_once, rows["seed"].tolist()) == (1, [5, 5, 5, 5])


@pytest.mark.parametrize("at_once", [2, 100])
def test_the_size_of_a_batch_changes_no_result(script, at_once, monkeypatch):
    monkeypatch.setattr(script, "RUNS_AT_ONCE", at_once)
    results = run_toy(script)
    np.testing.assert_array_equal(results["returns"][3], returns_in(4))
    np.testing.assert_array_equal(results["layer.kernel"], state_after(4))


def test_options_of_the_compiler_are_those_of_the_device(script, monkeypatch):
    monkeypatch.setattr(script, "COMPILER_OPTIONS", {"gpu": {"no_such_option": 1}})
    run_toy(script)  # on a CPU
    monkeypatch.setattr(script, "COMPILER_OPTIONS", {"cpu": {"no_such_option": 1}})
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        run_toy(script)


@pytest.fixture(scope="module")
def figure(script, tmp_path_factory):
    """The figure that --plot draws of the toy."""
    figures = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
        run_toy(script, f"--plot {tmp_path_factory.mktemp('figure') / 'x.png'}")
    (figure,) = figures
    return figure


def test_a_figure_of_some_settings_says_so(figure):
    texts = [text.get_text() for text in figure.findobj(Text)]
    assert any(15 in numbers_in(text) and "settings" in text for text in texts)


def test_a_figure_shows_all_curves_and_the_median_of_each_setting(script, figure):
    if script.__name__.startswith("gridworld"):
        images = [axes.images[0].get_array() for axes in figure.axes if axes.images]
        means = state_after(4).reshape(15, 3).mean(axis=1)  # of the agents' tables
        assert [image[0, 0] for image in images] == means[: len(images)].tolist()
        return
    drawn = [line.get_xydata() for axes in figure.axes for line in axes.get_lines()]
    steps = STEPS * np.arange(1, 5)
    returns = np.stack([returns_in(line) for line in (1, 2, 3, 4)])  # (4, 45)
    medians = np.nanmedian(returns.reshape(4, 15, 3), axis=2)  # (4, 15)
    for y in [*returns.T[: 10 * len(SEEDS)], *medians.T[:10]]:  # of ten settings
        curve = np.stack([steps, y], axis=1)
        assert any(np.allclose(curve, other, equal_nan=True) for other in drawn)


def test_a_file_is_written_to_a_folder_that_was_chosen_after_the_flags(
    script, monkeypatch, tmp_path
):
    parse_args = script.parse_args

    def in_a_new_folder(argv):
        args = parse_args(argv)
        args.save = tmp_path / "new" / "x.npz"
        return args

    monkeypatch.setattr(script, "parse_args", in_a_new_folder)
    run_toy(script)
    np.testing.assert_array_equal(np.load(tmp_path / "new/x.npz")["seed"], seed)


def test_the_file_is_written_before_anything_is_drawn(script, monkeypatch, tmp_path):
    def fail(*_):
        raise RuntimeError("a mistake in a picture of one's own")

    monkeypatch.setattr(script, "draw", fail)
    with pytest.raises(RuntimeError):
        run_toy(script, f"--save {tmp_path / 'x.npz'}")
    np.testing.assert_array_equal(np.load(tmp_path / "x.npz")["layer.kernel"], state_after(4))


def returning(script, **more):
    """The toy's evaluate, which returns more."""
    evaluate = script.evaluate
    return lambda run, state: {**evaluate(run, state), **more}


@pytest.fixture
def untrained(script, monkeypatch):
    """The script, but training is an error: so what is refused is refused before."""
    monkeypatch.setattr(script, "describe", refuse_to_train)
    return script


@pytest.mark.parametrize("name", ["gamma", "returns", "timesteps", "file"])
def test_a_result_whose_name_is_taken_is_refused_before_training(untrained, name, monkeypatch):
    monkeypatch.setattr(untrained, "evaluate", returning(untrained, **{name: jnp.array(1.0)}))
    with pytest.raises(ValueError, match=f"the name '{name}'"):
        run_toy(untrained)


@pytest.mark.parametrize("name", ["file", "train_seconds"])
def test_a_swept_flag_whose_name_is_taken_is_refused_before_training(untrained, name, monkeypatch):
    parse_args = untrained.parse_args

    def with_flag(argv):
        args = parse_args(argv)
        vars(args)[name] = [1.0, 2.0]
        args.swept += (name,)
        return args

    monkeypatch.setattr(untrained, "parse_args", with_flag)
    with pytest.raises(ValueError, match=f"the name '{name}'"):
        run_toy(untrained)


def test_two_results_of_the_same_joined_name_are_refused_before_training(untrained, monkeypatch):
    twice = {"a.b": jnp.array(1.0), "a": {"b": jnp.array(2.0)}}
    monkeypatch.setattr(untrained, "evaluate", returning(untrained, **twice))
    with pytest.raises(ValueError, match=r"a\.b"):
        run_toy(untrained)


def test_a_result_that_numpy_cannot_save_is_refused_before_training(untrained, monkeypatch):
    monkeypatch.setattr(untrained, "evaluate", returning(untrained, key=jax.random.key(0)))
    with pytest.raises(TypeError, match="'key'"):
        run_toy(untrained)


def test_a_state_whose_type_changes_is_refused_before_training(untrained, monkeypatch):
    monkeypatch.setattr(untrained, "init_state", lambda run: run.seed)  # then a float
    with pytest.raises(TypeError, match="changes its shapes or types"):
        run_toy(untrained)


def test_a_report_that_fails_is_refused_before_training(untrained, monkeypatch):
    monkeypatch.setattr(untrained, "report", lambda learned: learned["no such result"])
    with pytest.raises(KeyError):
        run_toy(untrained)


def test_a_report_is_tried_on_as_many_runs_as_it_will_get(untrained, monkeypatch):
    """On the three of one setting, not on all 45."""
    monkeypatch.setattr(untrained, "report", lambda learned: learned["layer"]["kernel"][3])
    with pytest.raises(IndexError):
        run_toy(untrained)


def test_a_report_that_changes_an_array_is_refused_before_training(untrained, monkeypatch):
    """What is gathered from devices can only be read."""
    monkeypatch.setattr(untrained, "report", lambda learned: learned["layer"]["kernel"].sort())
    with pytest.raises(ValueError, match="read-only"):
        run_toy(untrained)


def test_nan_among_what_was_learned_is_told(script, toy, monkeypatch, capsys):
    monkeypatch.setattr(script, "evaluate", returning(script, broken=jnp.nan))
    run_toy(script)
    assert capsys.readouterr().out.count("nan") > "".join(toy.lines).count("nan")


def test_main_keeps_nothing_between_two_calls(script, toy, monkeypatch):
    monkeypatch.setattr(script, "init_state", lambda run: run.seed + 100.0)
    after = run_toy(script)["layer.kernel"]
    np.testing.assert_array_equal(after, toy.results["layer.kernel"] + 100)


@pytest.mark.parametrize("script", [PARALLEL, GRID], indirect=True)  # the others plot alike
def test_a_figure_does_not_depend_on_a_matplotlibrc(script, tmp_path):
    pictures = []
    for settings in {}, {"text.usetex": True, "axes.prop_cycle": matplotlib.cycler(color="rgb")}:
        path = tmp_path / "x.png"
        with matplotlib.rc_context(settings):
            script.main(["--plot", str(path)])
        pictures.append(path.read_bytes())
    assert pictures[0] == pictures[1]


def test_flags_that_main_is_given_take_the_place_of_the_command_line(script, monkeypatch):
    """In a notebook, the command line is that of its kernel."""
    monkeypatch.setattr(sys, "argv", ["kernel", "-f", "kernel.json"])
    assert not script.main([])["interrupted"]
