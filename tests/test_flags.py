"""Flags: a wrong value is refused in one line that names it, before anything is compiled."""

import re

import pytest
from conftest import CAR, DECAY, LEARNERS, PARALLEL, REINFORCE, REPLAY, SCRIPTS, TRIO, load


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


@pytest.mark.parametrize("script", [REPLAY, DECAY])
def test_a_buffer_smaller_than_one_vector_step_is_refused(script, refusal):
    assert "--buffer-size" in refusal(script, "--buffer-size 15 --num-envs 16")


def test_reinforce_needs_two_episodes_for_its_baseline(refusal):
    assert "--num-envs" in refusal(REINFORCE, "--num-envs 1")


def test_a_file_of_too_many_cars_is_refused(refusal):
    assert "--save" in refusal(CAR, "--save x.npz --num-envs 1001 --num-episodes 500")


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_flag_has_a_help_text_with_its_default(script, capsys):
    with pytest.raises(SystemExit):
        load(script).parse_args(["--help"])
    text = capsys.readouterr().out
    assert text.count("(default:") == len(re.findall(r"^  --", text, re.MULTILINE))


@pytest.mark.parametrize("script", LEARNERS)
def test_a_swept_flag_takes_several_values(script):
    assert load(script).parse_args("--gamma 0.5 0.75".split()).gamma == [0.5, 0.75]


@pytest.mark.parametrize("script", TRIO)
def test_a_count_may_be_written_as_a_power_of_ten(script):
    assert load(script).parse_args(["--batch-size", "2e3"]).batch_size == 2000


def test_updates_are_rounded_up_to_equal_intervals():
    """21 updates make 11 intervals of two, not 20 of two."""
    args = load(PARALLEL).parse_args("--total-timesteps 336 --num-intervals 20".split())
    assert (args.interval_updates, args.num_intervals, args.num_updates) == (2, 11, 22)


@pytest.mark.parametrize("script", SCRIPTS)
def test_there_are_no_more_intervals_than_updates(script):
    args = load(script).parse_args(["--num-intervals", "1000000"])
    assert args.num_intervals < 1_000_000
