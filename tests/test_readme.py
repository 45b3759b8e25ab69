"""README.md: its commands are accepted, its recipes apply and run, its lines of Python work."""

import os
import re
import subprocess
import sys
import tempfile

import gymnasium
import numpy as np
import pytest
from conftest import GRID, PARALLEL, REPLAY, ROOT, SCRIPTS, changed, in_background, load
from test_changes import FLAGS, unchanged

README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^python (\w+\.py)(.*)$", README, re.MULTILINE)


def block(title, language):
    """The first block of code after a text of README.md."""
    pattern = re.escape(title) + rf".*?```{language}\n(.*?)```"
    return re.search(pattern, README, re.DOTALL)[1]


@pytest.mark.parametrize(("script", "flags"), COMMANDS)
def test_commands_are_accepted(script, flags, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert load(script).parse_args(flags.split())


def test_every_script_is_in_the_table():
    assert all(f"| `{script}` |" in README for script in SCRIPTS)


# The network is in test_changes.py, with another optimizer.
RECIPES = [("**Double Q-learning**", REPLAY), ("**Expected SARSA**", GRID)]


@pytest.mark.parametrize(("title", "script"), RECIPES)
def test_recipes_run(title, script):
    results = changed(script, block(title, "diff")).main(FLAGS[script].split())
    assert np.isfinite(results["returns"]).all()


def test_the_recipe_of_double_q_takes_the_action_of_one_and_the_value_of_the_other():
    module = changed(REPLAY, block("**Double Q-learning**", "diff"))
    module.q_values = lambda run, values, obs: np.array(values) + 0 * obs
    online, target = [0, 3, 1], [8, 4, 6]  # the first would take action 1, worth 4 by the other
    run = type("Run", (), {"gamma": 0.5})
    for terminated, obs, expected in (False, 7.0, 1 + 0.5 * 4), (True, np.nan, 1):
        step = module.Transition(obs=7.0, action=0, reward=1.0, next_obs=obs, terminated=terminated)
        assert module.td_target(run, target, online, step) == expected


def test_the_recipe_for_a_metric_applies():
    assert changed(PARALLEL, block("**A metric**", "diff"))


def test_a_parameter_of_the_environment_may_be_swept():
    """A cart without gravity does not let the pole fall, so its episodes are longer."""
    module = changed(PARALLEL, block("**Sweep a parameter of the environment**", "diff"))
    results = module.main([*FLAGS[PARALLEL].split(), "--gravity", "9.8", "0.001", "60"])
    assert results["gravity"].tolist() == [9.8, 0.001, 60]
    earth, none, star = results["returns"].mean(axis=0)
    assert none > earth > star


def test_the_recipe_for_a_logger_gives_it_every_line():
    logged = []
    logger = type("wandb", (), {"log": logged.append})
    module = changed(GRID, block("**Weights & Biases", "diff"), wandb=logger)
    results = module.main(FLAGS[GRID].split())
    assert [line["returns"] for line in logged] == results["returns"][:, 0].tolist()


def test_training_starts_from_saved_weights(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    before = unchanged(PARALLEL)
    np.savez("learned.npz", **before)  # as --save does
    module = changed(PARALLEL, block("**Start from saved weights**", "diff"))
    after = module.main([*FLAGS[PARALLEL].split(), "--learning-rate", "0"])
    np.testing.assert_array_equal(after["weights"], before["weights"])
    np.testing.assert_array_equal(after["centers"], before["centers"])


def run_python(code):
    """Run lines of Python in the folder of the scripts. Return what they printed."""
    env = {name: text for name, text in os.environ.items() if not name.startswith(("JAX", "XLA"))}
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout


@in_background
def own_environment():
    code = block("**An environment of your own.**", "python")
    shorter = code.replace("5e5", "640").replace("1000", "7 --eval-episodes 2")
    assert shorter != code
    return run_python(shorter)


@pytest.mark.starts(program=own_environment)
def test_an_environment_of_ones_own_runs_by_name():
    assert -200 <= float(own_environment().splitlines()[-1]) < 0  # a return of MountainCar


@in_background
def debugging():
    code = block("**Debug.**", "python")
    shorter = code.replace("parse_args([])", "parse_args('--num-envs 1 --batch-size 1'.split())")
    assert shorter != code
    return run_python(f"{shorter}\nprint(metrics['td_error'].item())")


@pytest.mark.starts(program=debugging)
def test_one_run_can_be_debugged_without_jit():
    error = float(debugging().splitlines()[-1])  # of the first update
    np.testing.assert_allclose(error, 1)  # all values are 0, and the first reward is 1


@in_background
def trained():
    """What `--save` writes of a run that has learned to balance the pole."""
    folder = tempfile.TemporaryDirectory()
    flags = f"--seed 100 --num-intervals 1 --save {folder.name}/learned.npz"
    run_python(f"import parallel_td\nparallel_td.main({flags.split()})")
    with np.load(f"{folder.name}/learned.npz") as file:
        return dict(file)


@pytest.mark.starts(program=trained)
def test_what_a_run_learns_balances_the_pole_of_gymnasium(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("learned.npz", **trained())
    assert trained()["greedy_return"].mean() >= 475  # solved
    code = block("## Use what was learned", "python")
    env, steps, over = gymnasium.make("CartPole-v1"), 0, False
    obs, _ = env.reset(seed=0)
    while not over:
        scope = {"np": np, "obs": obs}
        exec(code, scope)
        obs, _, terminated, truncated, _ = env.step(scope["action"])
        over, steps = terminated or truncated, steps + 1
    assert steps > 400  # one episode of many, so a little less than their mean will do
