"""The command line: a wrong value is refused by name, in one line, before anything is compiled."""

import os
import re

import pytest
from conftest import LEARNERS, ROOT, SCRIPTS, TRIO, load

# README.md's figures were measured with these defaults.
POLE = "--env-id CartPole-v1 --num-envs 16 --gamma 0.99 --eval-episodes 100 --num-intervals 20"
TD = f"{POLE} --total-timesteps 200000 --num-centers 500 --sigma 0.5"
REPLAY = f"{TD} --buffer-size 100000 --batch-size 32 --tau 0.01 --learning-rate 0.03"
DEFAULTS = {
    "parallel_td.py": f"{TD} --batch-size 16 --learning-rate 0.06 --epsilon 0.25",
    "replay_td.py": f"{REPLAY} --epsilon 0.25",
    "epsilon_decay_td.py": f"{REPLAY} --start-e 1 --end-e 0.05 --epsilon-decay 0.9997",
    "gridworld_qlearning.py": "--total-timesteps 1000000 --num-intervals 10 --grid-size 8 12"
    " --learning-rate 0.1 --gamma 0.9 --epsilon 0.1",
    "reinforce_parallel.py": f"{POLE} --num-iterations 100 --learning-rate 0.01 --hidden-size 64"
    " --sync padding",
    "mountaincar_env.py": "--num-episodes 500 --num-intervals 5 --num-envs 4096 --policy random",
}

COUNTS = ["x", "", "0", "-1", "0.5", "nan", "inf", "1e400", "0x10"]
FRACTIONS = ["x", "", "-0.1", "1.1", "nan", "inf", "0.1 x", "0.1 nan 0.2"]
# Flag, and values that are refused by each script that has it.
REFUSED = [
    ("seed", ["x", "", "-1", "0.5", "1e10"]),
    ("num-seeds", COUNTS),
    ("total-timesteps", [*COUNTS, "1e13"]),
    ("num-iterations", COUNTS),
    ("num-episodes", COUNTS),
    ("num-intervals", COUNTS),
    ("num-envs", COUNTS),
    ("batch-size", COUNTS),
    ("buffer-size", [*COUNTS, "15"]),  # below --num-envs
    ("num-centers", COUNTS),
    ("hidden-size", COUNTS),
    ("eval-episodes", COUNTS),
    ("grid-size", ["8", "8 1", "8 2.5", "1 8", "x 8"]),
    ("learning-rate", FRACTIONS),
    ("gamma", FRACTIONS),
    ("epsilon", FRACTIONS),
    ("start-e", FRACTIONS),
    ("end-e", FRACTIONS),
    ("tau", FRACTIONS),
    ("epsilon-decay", ["x", "0", "0.999999", "1", "nan"]),
    ("sigma", ["x", "0", "-1", "1e39", "nan"]),
    ("env-id", ["cartpole-v1", "MNISTBandit-bsuite", ""]),
    ("policy", ["x", ""]),
    ("sync", ["x", ""]),
    (
        "save",
        [
            "x",
            "x.txt",
            "missing/x.npz",
            ".",
            "missing.npz/",
            "folder.npz",
            "file/x.npz",
            "link.npz",
        ],
    ),
    ("plot", ["x", "x.npz", "missing/x.png", "folder.png"]),
    ("gif", ["x", "x.png", "missing/x.gif"]),
]


WITHOUT_A_VALUE = {"distributed"}

CASES = [
    pytest.param(script, flag, values, id=f"{script}-{flag}")
    for script in SCRIPTS
    for flag, values in REFUSED
    if re.search(rf"""["']--{flag}["']""", (ROOT / script).read_text())
]


@pytest.fixture
def refusal(capsys):
    """A function that gives flags to a script, and returns the one line of its error."""

    def refuse(script, *flags):
        with pytest.raises(SystemExit) as end:
            load(script).parse_args(flags)
        usage, _, error = capsys.readouterr().err.partition(": error: ")
        assert end.value.code == 2 and usage.startswith("usage:") and error.count("\n") == 1
        return error

    return refuse


def flags_of(script, capsys):
    """All flags, as --help lists them."""
    with pytest.raises(SystemExit):
        load(script).parse_args(["--help"])
    return re.findall(r"^  --([\w-]+)", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(("script", "flag", "values"), CASES)
def test_a_wrong_value_is_refused_by_name(script, flag, values, refusal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "link.npz").symlink_to("missing/x.npz")
    (tmp_path / "folder.png").mkdir()
    for value in values:
        error = refusal(script, f"--{flag}", *(value.split() or [""]))
        assert f"--{flag}" in error, (value, error)


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_flag_is_in_the_table_or_takes_no_value(script, capsys):
    missing = set(flags_of(script, capsys)) - {flag for flag, _ in REFUSED} - WITHOUT_A_VALUE
    assert not missing, (
        f"add {missing} with wrong values to REFUSED, and a default to DEFAULTS;"
        " or to WITHOUT_A_VALUE, if it takes none"
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_flag_has_a_help_text_with_its_default(script, capsys):
    with pytest.raises(SystemExit):
        load(script).parse_args(["--help"])
    text = capsys.readouterr().out
    assert text.count("(default:") == len(re.findall(r"^  --", text, re.MULTILINE))


@pytest.mark.parametrize("script", SCRIPTS)
def test_defaults_match_the_readme(script):
    parse_args = load(script).parse_args

    def plain(args):  # each call makes an environment of its own
        return {name: value for name, value in vars(args).items() if name != "env"}

    seeds = [] if script == "mountaincar_env.py" else ["--num-seeds", "1"]
    same = parse_args([*DEFAULTS[script].split(), "--seed", "0", *seeds])
    assert plain(same) == plain(parse_args([]))


@pytest.mark.parametrize("script", SCRIPTS)
def test_there_are_no_more_intervals_than_updates(script):
    args = load(script).parse_args(["--num-intervals", "1000000"])
    assert args.num_intervals < 1_000_000


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_flag_cannot_be_abbreviated(script, refusal):
    assert "unrecognized" in refusal(script, "--see", "3")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_job_must_be_joined_before_gymnax_is_imported(script, refusal):
    assert "jax.distributed.initialize" in refusal(script, "--distributed")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_file_that_cannot_be_written_is_refused(script, refusal, tmp_path, monkeypatch):
    (tmp_path / "x.npz").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    assert "x.npz" in refusal(script, "--save", str(tmp_path / "x.npz"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_refusal_creates_no_file(script, refusal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refusal(script, "--save", "x.npz", "--seed", "x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", LEARNERS)
def test_a_swept_flag_takes_several_values(script):
    args = load(script).parse_args("--gamma 0.5 0.75".split())
    assert args.gamma == [0.5, 0.75] and "gamma" in args.swept


@pytest.mark.parametrize("script", TRIO)
def test_a_count_may_be_written_as_a_power_of_ten(script):
    assert load(script).parse_args(["--total-timesteps", "2e3"]).total_timesteps == 2000


def test_an_animation_is_refused_where_gymnax_has_no_picture(refusal):
    error = refusal("reinforce_parallel.py", "--gif", "x.gif", "--env-id", "Reacher-misc")
    assert "Reacher-misc" in error


def test_reinforce_needs_two_episodes_for_its_baseline(refusal):
    assert "int in [2, " in refusal("reinforce_parallel.py", "--num-envs", "1")
