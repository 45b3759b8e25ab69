"""Flags: a wrong value is refused in one line that names it, before anything is compiled."""

import os
import re
import runpy
from types import SimpleNamespace
from unittest.mock import Mock

import gymnax
import matplotlib.pyplot as plt
import pytest
from conftest import (
    CAR,
    COUNTS,
    DQN,
    FRACTIONS,
    LEARNERS,
    NETWORKS,
    PARALLEL,
    POSITIVE,
    PPO,
    PQN,
    REINFORCE,
    SCRIPTS,
    TRIO,
    load,
    path_of,
)
from gymnax.visualize import visualizer

ENVIRONMENTS = list(gymnax.registered_envs)  # before a test of a recipe adds its own


@pytest.fixture
def refusal(capsys):
    """A function that gives flags to a script, and returns the one line of its error."""

    def refuse(script, flags):
        with pytest.raises(SystemExit) as end:
            load(script).parse_args(flags.split())
        usage, _, error = capsys.readouterr().err.partition(": error: ")
        assert end.value.code == 2 and usage.startswith("usage:") and error.count("\n") == 1
        return error

    return refuse


# Scripts, the beginning of a command, what may follow, and what must be refused with a message that
# names the flag.
LIMITS = [
    (LEARNERS, "--num-intervals", "1 2e6 1073741824", "x 0 -1 0.5 nan inf 1073741825"),  # count
    (LEARNERS, "--gamma", "0 1", "x -0.1 1.1 nan"),  # fraction
    (TRIO, "--sigma", "1e-9 7", "x 0 -0.5 nan inf"),  # positive
    ([*TRIO, REINFORCE, *NETWORKS], "--learning-rate", "1e-9 7", "0 -0.5"),
    (LEARNERS, "--num-inter", "", "1"),  # an abbreviation
    ([CAR], "--num-episodes", "1 1e9", "0 0.5"),
    ([CAR], "--num-epi", "", "1"),
    ([*TRIO[1:], DQN], "--num-envs 16 --buffer-size", "16", "15"),  # a vector step must fit
    ([PPO, PQN], "--num-envs 3 --num-steps 4 --num-minibatches", "1 6", "5 24"),  # of equal size
    ([PPO], "--num-envs 3 --num-steps 4 --num-minibatches", "6", "12"),  # of two, at least
    ([PQN, DQN], "--hidden-size", "2", "1"),  # one unit is normalized to 0
    ([PQN, DQN], "--env-id", "Catch-bsuite", "Pendulum-v1 CartPole"),  # it is continuous
    ([PPO], "--env-id", "Catch-bsuite Pendulum-v1", "CartPole"),
    ([REINFORCE], "--num-envs", "2", "1"),  # the baseline is a mean
    ([REINFORCE], "--sync truncation --num-envs", "2", "1"),
    ([REINFORCE], "--num-envs 2 --num-iterations", "1073741", "1073742"),  # 2**30 steps
    ([CAR], "--save x.npz --num-episodes", "500000", "500001"),  # too large a file
]


@pytest.mark.parametrize(("scripts", "flag", "right", "wrong"), LIMITS)
def test_values_up_to_a_limit_are_accepted_and_others_are_refused(
    scripts, flag, right, wrong, refusal
):
    for script in scripts:
        for value in right.split():
            load(script).parse_args([*flag.split(), value])
        for value in wrong.split():
            error = refusal(script, f"{flag} {value}")
            assert any(word in error for word in flag.split() if word.startswith("--"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_number_of_something_is_an_integer_of_at_least_1(script, refusal):
    for flag in COUNTS[script]:
        assert flag in refusal(script, f"{flag} 0")
        load(script).parse_args([flag, "1.6e1"])


@pytest.mark.parametrize("script", LEARNERS)
def test_the_tables_have_all_flags_that_take_several_values(script):
    flags = vars(load(script).parse_args([]))
    several = {f"--{name.replace('_', '-')}" for name in flags if isinstance(flags[name], list)}
    expected = {*FRACTIONS[script], *POSITIVE[script]}
    assert several == expected, "put a new flag into FRACTIONS or POSITIVE of conftest.py"


@pytest.mark.parametrize("script", LEARNERS)
def test_each_real_valued_flag_takes_several_values_in_its_range(script, refusal):
    for flag in FRACTIONS[script] + POSITIVE[script]:
        wrong, right = ("1.1", [0, 1]) if flag in FRACTIONS[script] else ("0", [1e-6, 7])
        assert flag in refusal(script, f"{flag} {wrong}")
        args = load(script).parse_args([flag, *map(str, right)])
        assert vars(args)[flag[2:].replace("-", "_")] == right


@pytest.mark.parametrize("more", ["", "--num-envs 1073741823"])
def test_the_largest_number_of_steps_does_not_overflow(more):
    """Steps are rounded up to equal intervals, and counted in 32 bits."""
    for script in TRIO:
        flags = f"--total-timesteps 1073741824 --num-intervals 3 {more}".split()
        if script != PARALLEL:
            flags += ["--buffer-size", "1073741824"]
        args = load(script).parse_args(flags)
        steps = args.num_intervals * args.interval_updates * args.num_envs
        assert 2**30 <= steps < 2**31


FILES = [(script, "--save", ".npz") for script in SCRIPTS]
FILES += [(script, "--plot", ".png .pdf .svg") for script in LEARNERS]
FILES += [(REINFORCE, "--gif", ".gif")]


@pytest.mark.parametrize(("script", "flag", "endings"), FILES)
def test_a_file_with_another_ending_or_in_no_folder_is_refused(
    script, flag, endings, refusal, tmp_path
):
    few = " --num-episodes 2" if script == CAR else ""  # more would not fit into a file
    for ending in endings.split():
        load(script).parse_args(f"{flag} {tmp_path}/x{ending}{few}".split())
        load(script).parse_args(f"{flag} x{ending}{few}".split())
        for wrong in "x.txt", f"x{ending.upper()}":  # NumPy would write x.NPZ.npz
            error = refusal(script, f"{flag} {wrong}{few}")
            assert wrong in error and all(ending in error for ending in endings.split())
        wrong = f"{tmp_path}/no/such/x{ending}"
        assert f"{wrong} must" in refusal(script, f"{flag} {wrong}{few}")


@pytest.fixture
def not_root():
    """For root, who may write everywhere, be somebody else. `os.access` asks for the real user."""
    if os.getuid() != 0:
        yield
    else:
        os.setreuid(65534, 0)
        yield
        os.setreuid(0, 0)


def test_a_folder_that_cannot_be_written_is_refused(refusal, tmp_path, not_root):
    (tmp_path / "read_only").mkdir(mode=0o500)
    for script in SCRIPTS:
        few = " --num-episodes 2" if script == CAR else ""
        assert "can be written" in refusal(script, f"--save {tmp_path}/read_only/x.npz{few}")


def test_a_film_is_accepted_of_exactly_those_environments_that_gymnax_draws(refusal, monkeypatch):
    """Its own class says which, by the name. What draws a frame is replaced."""
    for name in "gym", "catch", "minatar", "circle", "maze":
        monkeypatch.setattr(visualizer, f"vis_{name}", Mock())
    script = load(REINFORCE)
    for name in ENVIRONMENTS:
        film = visualizer.Visualizer(SimpleNamespace(name=name), None, [None])
        film.init()
        plt.close(film.fig)
        flags = f"--gif x.gif --env-id {name}"
        if hasattr(film, "im"):
            script.parse_args(flags.split())
        else:
            assert name in refusal(REINFORCE, flags)


def test_the_time_limit_is_that_of_the_environment_that_the_script_makes(monkeypatch, refusal):
    """People change make_env, and their limit decides how many steps are too many."""
    script = load(REINFORCE)
    env, params = gymnax.make("CartPole-v1")
    monkeypatch.setattr(
        script, "make_env", lambda args: (env, params.replace(max_steps_in_episode=2**29))
    )
    script.parse_args("--num-envs 2 --num-iterations 1".split())
    assert "536870912" in refusal(REINFORCE, "--num-envs 2 --num-iterations 2")


def test_the_seeds_of_all_runs_fit_into_32_bits(refusal):
    for script in SCRIPTS:
        runs, last = ("", 2147483647) if script == CAR else ("--num-seeds 10", 2147483638)
        for seed in (-1, 4294967296, last + 1):
            assert "--seed" in refusal(script, f"--seed {seed} {runs}")
        for seed in (0, last):
            load(script).parse_args(f"--seed {seed} {runs}".split())


def test_help_says_what_the_script_is_and_the_default_of_each_flag(capsys):
    for script in SCRIPTS:
        with pytest.raises(SystemExit):
            load(script).parse_args(["--help"])
        text = capsys.readouterr().out
        assert text.count("(default:") == len(re.findall(r"^  --", text, re.MULTILINE))
        assert load(script).__doc__.splitlines()[0] in " ".join(text.split())


def test_each_core_is_a_device_unless_the_user_sets_another_number(monkeypatch):
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = len(os.sched_getaffinity(0))
    for script in LEARNERS:
        monkeypatch.setenv("XLA_FLAGS", "--mine=1")
        monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1000")
        runpy.run_path(str(path_of(script)))  # not as the main program: it only defines
        assert os.environ["JAX_NUM_CPU_DEVICES"] == "1000"
        assert os.environ["XLA_FLAGS"].endswith("--mine=1")
        monkeypatch.delenv("JAX_NUM_CPU_DEVICES")
        runpy.run_path(str(path_of(script)))
        assert os.environ["JAX_NUM_CPU_DEVICES"] == str(cores)


def test_who_imports_the_car_keeps_his_settings(monkeypatch):
    before = dict(os.environ)
    runpy.run_path(str(path_of(CAR)))
    assert dict(os.environ) == before
