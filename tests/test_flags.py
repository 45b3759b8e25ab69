"""Flags: a wrong value is refused in one line that names it, before anything is compiled."""

import os
import re
import runpy

import pytest
from conftest import CAR, DECAY, GRID, LEARNERS, REINFORCE, REPLAY, ROOT, SCRIPTS, TRIO, load


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
    assert load(script).parse_args("--gamma 0 1".split()).gamma == [0, 1]


@pytest.mark.parametrize("script", LEARNERS)
def test_each_swept_flag_but_the_width_is_a_fraction(script, refusal):
    for name, value in vars(load(script).parse_args([])).items():
        if isinstance(value, list) and name != "sigma":
            flag = "--" + name.replace("_", "-")
            assert flag in refusal(script, f"{flag} 1.1")


@pytest.mark.parametrize("script", TRIO)
def test_a_width_that_is_no_positive_number_is_refused(script, refusal):
    for text in ("x", "0", "-0.5", "nan", "inf"):
        assert "--sigma" in refusal(script, f"--sigma {text}")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_file_with_another_ending_or_in_no_folder_is_refused(script, refusal, tmp_path):
    assert "x.txt must end in .npz" in refusal(script, "--save x.txt")
    assert "x.npz must end in .npz, and its folder" in refusal(script, "--save /no/such/x.npz")
    few = "--num-envs 2" if script == CAR else ""
    assert load(script).parse_args(f"--save {tmp_path / 'x.npz'} {few}".split())


@pytest.mark.parametrize(
    ("script", "flag"), [*[(script, "--plot") for script in LEARNERS], (REINFORCE, "--gif")]
)
def test_a_picture_with_another_ending_or_in_no_folder_is_refused(script, flag, refusal):
    ending = ".gif" if flag == "--gif" else ".png"
    assert f"x.txt must end in {ending}" in refusal(script, f"{flag} x.txt")
    assert "its folder must exist" in refusal(script, f"{flag} /no/such/x{ending}")


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_seeds_of_all_runs_fit_into_32_bits(script, refusal):
    runs = "--num-envs 10" if script == CAR else "--num-seeds 10"
    for seed in ("-1", "4294967296", "2147483639"):
        assert "--seed" in refusal(script, f"--seed {seed} {runs}")
    for seed in (0, 2147483638):
        assert load(script).parse_args(f"--seed {seed} {runs}".split()).seed == seed


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_flag_is_not_abbreviated(script, refusal):
    """--epsilon would be --epsilon-decay in epsilon_decay_td.py."""
    for flag in ("--num-i", "--epsilon") if script == DECAY else ("--num-i",):
        assert flag in refusal(script, f"{flag} 1")


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


@pytest.mark.parametrize(
    ("script", "five_updates"),
    [
        *[(script, "--num-envs 8 --total-timesteps 40") for script in TRIO],
        (GRID, "--total-timesteps 5000"),  # blocks of 1,000
        (REINFORCE, "--num-iterations 5"),
        (CAR, "--num-episodes 5"),
    ],
)
def test_there_are_no_more_intervals_than_updates(script, five_updates):
    args = load(script).parse_args(f"{five_updates} --num-intervals 1000".split())
    assert args.num_intervals == 5


@pytest.mark.parametrize("script", SCRIPTS)
def test_settings_of_the_user_win(script, monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1000")
    monkeypatch.setenv("XLA_FLAGS", "--mine=1")
    runpy.run_path(str(ROOT / script))  # not as the main program: it only defines
    assert os.environ["JAX_NUM_CPU_DEVICES"] == "1000"
    assert os.environ["XLA_FLAGS"].endswith("--mine=1")
