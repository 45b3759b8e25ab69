"""Flags: a wrong value is refused in one line that names it, before anything is compiled."""

import os
import re
import runpy

import pytest
from conftest import (
    CAR,
    LEARNERS,
    PARALLEL,
    REINFORCE,
    ROOT,
    SCRIPTS,
    TRIO,
    is_fraction,
    load,
)


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
    ([*TRIO, REINFORCE], "--learning-rate", "1e-9 7", "0 -0.5"),
    (LEARNERS, "--num-inter", "", "1"),  # an abbreviation
    ([CAR], "--num-episodes", "1 1e9", "0 0.5"),
    (TRIO[1:], "--num-envs 16 --buffer-size", "16", "15"),  # a vector step must fit
    ([REINFORCE], "--num-envs", "2", "1"),  # the baseline is a mean
    ([REINFORCE], "--sync truncation --num-envs", "2", "1"),
    ([REINFORCE], "--num-envs 2 --num-iterations", "1073741", "1073742"),  # 2**30 steps
    ([REINFORCE], "--gif x.gif --env-id", "Pong-misc", "FrozenLake-misc"),  # gymnax draws no lake
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


def test_each_swept_flag_is_a_fraction_from_0_to_1_or_positive(refusal):
    for script in LEARNERS:
        for name, value in vars(load(script).parse_args([])).items():
            if isinstance(value, list) and is_fraction(script, name):
                flag = "--" + name.replace("_", "-")
                assert flag in refusal(script, f"{flag} 1.1")
                assert vars(load(script).parse_args([flag, "0", "1"]))[name] == [0, 1]


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


def test_a_file_with_another_ending_or_in_no_folder_is_refused(refusal, tmp_path):
    pictures = [(script, "--plot", ".png") for script in LEARNERS]
    files = [(script, "--save", ".npz") for script in SCRIPTS]
    for script, flag, ending in [*files, *pictures, (REINFORCE, "--gif", ".gif")]:
        few = " --num-episodes 2" if script == CAR else ""  # more would not fit into a file
        for wrong in "x.txt", f"x{ending.upper()}":  # NumPy would write x.NPZ.npz
            assert f"{wrong} must end in {ending}" in refusal(script, f"{flag} {wrong}")
        assert "its folder must exist" in refusal(script, f"{flag} /no/such/x{ending}")
        load(script).parse_args(f"{flag} {tmp_path}/x{ending}{few}".split())


def test_the_seeds_of_all_runs_fit_into_32_bits(refusal):
    for script in SCRIPTS:
        runs, last = ("", 2147483647) if script == CAR else ("--num-seeds 10", 2147483638)
        for seed in (-1, 4294967296, last + 1):
            assert "--seed" in refusal(script, f"--seed {seed} {runs}")
        for seed in (0, last):
            load(script).parse_args(f"--seed {seed} {runs}".split())


def test_each_flag_has_a_help_text_with_its_default(capsys):
    for script in SCRIPTS:
        with pytest.raises(SystemExit):
            load(script).parse_args(["--help"])
        text = capsys.readouterr().out
        assert text.count("(default:") == len(re.findall(r"^  --", text, re.MULTILINE))


def test_each_core_is_a_device_unless_the_user_sets_another_number(monkeypatch):
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = len(os.sched_getaffinity(0))
    for script in LEARNERS:
        monkeypatch.setenv("XLA_FLAGS", "--mine=1")
        monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1000")
        runpy.run_path(str(ROOT / script))  # not as the main program: it only defines
        assert os.environ["JAX_NUM_CPU_DEVICES"] == "1000"
        assert os.environ["XLA_FLAGS"].endswith("--mine=1")
        monkeypatch.delenv("JAX_NUM_CPU_DEVICES")
        runpy.run_path(str(ROOT / script))
        assert os.environ["JAX_NUM_CPU_DEVICES"] == str(cores)


def test_who_imports_the_car_keeps_his_settings(monkeypatch):
    before = dict(os.environ)
    runpy.run_path(str(ROOT / CAR))
    assert dict(os.environ) == before
