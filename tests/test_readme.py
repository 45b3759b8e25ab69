"""README.md: its commands are accepted, default flags solve the task, saved weights can act.

A default run is one whose flags but the seeds are the defaults.
"""

import ast
import re

import gymnasium
import jax
import numpy as np
import pytest
from conftest import DECAY, NETWORKS, PARALLEL, PPO, REINFORCE, REPLAY, ROOT, SCRIPTS, load, path_of

README = (ROOT / "README.md").read_text()
LESSON = (ROOT / "tests" / "benchmark" / "README.md").read_text()
USE = (ROOT / "tests" / "recipes" / "USE.md").read_text()
ACTIONS = re.findall(r"```python\n(import numpy.*?)```", USE, re.DOTALL)  # parallel_td.py, ppo.py
COMMANDS = re.findall(r"^python (\w+\.py)((?:\\\n|[^$\n])*)$", README, re.MULTILINE)  # no variables


def test_commands_are_accepted(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    commands = list(COMMANDS)
    assert commands
    for script in SCRIPTS:
        found = re.findall(r"^    python (\w+\.py)((?:\\\n|[^#\n])*)", load(script).__doc__, re.M)
        assert found
        commands += found
    for script, flags in commands:
        load(script).parse_args(flags.replace("\\\n", " ").split())


def test_the_rows_of_the_lesson_are_accepted():
    """All but the one with tiles, whose flags come with a recipe."""
    [task] = re.findall(r'^TASK="(.*)"$', LESSON, re.M)
    [radial] = re.findall(r'^RADIAL="(.*)"$', LESSON, re.M)
    rows = re.findall(r"^python (\w+\.py) \$RADIAL (.*)$", LESSON, re.M)
    assert len(rows) == 5  # the first one again, with --save
    for script, flags in rows:
        args = load(script).parse_args(f"{radial.replace('$TASK', task)} {flags}".split())
        assert (args.env_id, args.num_centers, args.seed) == ("MountainCar-v0", 1000, 271_000)
    copies = dict(re.findall(r"^sed 's/optax.adam\(/optax.sgd\(/' (\S+) > (\S+)$", LESSON, re.M))
    assert list(copies) == [PARALLEL, REPLAY]
    for script, copy in copies.items():
        assert (ROOT / script).read_text().count("optax.adam(") == 1  # what `sed` replaces
        commands = re.findall(rf"^python {copy} \$TASK (.*)$", LESSON, re.M)
        assert commands
        for flags in commands:
            load(script).parse_args(f"{task} {flags}".split())


def without_docstrings(node):
    """The text of a syntax tree, without the docstrings and comments."""
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef) and ast.get_docstring(part):
            del part.body[0]
    return ast.unparse(node)


def test_functions_on_the_page_are_those_of_the_files():
    shown = [ast.parse(code) for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL)]
    assert [tree.body[0].name for tree in shown] == ["td_target", "advantages"]
    for tree, script in zip(shown, [PARALLEL, PPO], strict=True):
        functions = ast.parse(path_of(script).read_text()).body
        [function] = [node for node in functions if getattr(node, "name", "") == tree.body[0].name]
        assert ast.unparse(tree) == without_docstrings(function)


def test_the_table_has_the_steps_of_a_default_run():
    """All but REINFORCE, whose steps depend on the lengths of episodes."""
    rows = re.findall(r"^\| \[`(\w+\.py)`\].* ([\d,]+) \|$", README, re.M)
    rows = [row for row in rows if row[0] != REINFORCE]
    assert len(rows) == 7
    for script, steps in rows:
        assert load(script).parse_args([]).total_timesteps == int(steps.replace(",", ""))


def assert_solved(results):
    """By most runs in 100 greedy episodes, and nearly so in training, where actions are random."""
    greedy_return = results["learned"]["greedy_return"]  # (R, E)
    assert greedy_return.shape[1] == 100
    assert np.mean(greedy_return.mean(axis=1) >= 475) > 0.6
    assert results["curves"]["returns"][-5:].mean() >= 420


@pytest.mark.parametrize("script", [REPLAY, DECAY, REINFORCE, *NETWORKS])
def test_default_runs_solve_the_task(script):
    """At least four of six, since 2 or 3 of 100 runs of pqn.py and dqn.py fail."""
    assert_solved(load(script).main("--seed 100 --num-seeds 6".split()))


def test_saved_weights_balance_the_pole_of_gymnasium(monkeypatch, tmp_path):
    """One run with default flags. It acts by the lines of NumPy in tests/recipes/USE.md."""
    monkeypatch.chdir(tmp_path)
    assert_solved(load(PARALLEL).main("--seed 100 --save learned.npz".split()))
    code, _ = ACTIONS
    env, steps, over = gymnasium.make("CartPole-v1"), 0, False
    obs, _ = env.reset(seed=0)
    while not over:
        scope = {"obs": obs}
        exec(code, scope)
        obs, _, terminated, truncated, _ = env.step(scope["action"])
        over, steps = terminated or truncated, steps + 1
    assert steps > 400  # one episode of many, so a little less than their mean will do


def test_saved_weights_of_ppo_choose_its_best_action(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    ppo, (_, code) = load(PPO), ACTIONS
    few = "--total-timesteps 8000 --num-envs 4 --hidden-size 8 --eval-episodes 2"
    results = ppo.main(f"{few} --save learned.npz".split())
    actor = jax.tree.map(lambda array: array[0], results["learned"]["params"]["actor"])
    chosen = []
    for obs in np.linspace(-1, 1, 80).reshape(20, 4)[:, ::-1]:
        scope = {"obs": obs}
        exec(code, scope)
        assert scope["action"] == ppo.best_action(actor, obs)
        chosen.append(scope["action"])
    assert set(chosen) == {0, 1}
