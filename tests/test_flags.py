"""Flags: a wrong value is refused in one line that names it, before anything is compiled."""

import re

import pytest
from conftest import CAR, DECAY, LEARNERS, REINFORCE, REPLAY, SCRIPTS, load


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


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_count_that_is_no_positive_integer_is_refused(script, refusal):
    for text in ("x", "0", "-1", "0.5", "nan", "inf", "1e10"):
        assert "--num-intervals" in refusal(script, f"--num-intervals {text}")


@pytest.mark.parametrize("script", LEARNERS)
def test_a_fraction_outside_of_0_and_1_is_refused(script, refusal):
    for text in ("x", "-0.1", "1.1", "nan", "0.1 x"):
        assert "--gamma" in refusal(script, f"--gamma {text}")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_file_with_another_ending_is_refused(script, refusal):
    assert "x.txt must end in .npz" in refusal(script, "--save x.txt")


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        (REPLAY, "--buffer-size 15 --num-envs 16"),  # one vector step must fit
        (DECAY, "--buffer-size 15 --num-envs 16"),
        (REINFORCE, "--num-envs 1"),  # the baseline is a mean
        (CAR, "--save x.npz --num-envs 1001 --num-episodes 500"),  # too large a file
    ],
)
def test_flags_that_do_not_fit_each_other_are_refused(script, flags, refusal):
    assert flags.split()[0] in refusal(script, flags)


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_flag_has_a_help_text_with_its_default(script, capsys):
    with pytest.raises(SystemExit):
        load(script).parse_args(["--help"])
    text = capsys.readouterr().out
    assert text.count("(default:") == len(re.findall(r"^  --", text, re.MULTILINE))


@pytest.mark.parametrize("script", SCRIPTS)
def test_there_are_no_more_intervals_than_updates(script):
    args = load(script).parse_args(["--num-intervals", "1000000"])
    assert args.num_intervals < 1_000_000
