"""Each recipe changes every script that its head names, and does what it promises.

What those for the grid world promise is in test_grid_recipes.py.
"""

import importlib
import itertools
import re
import shutil
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import probes
import pytest
from conftest import (
    DECAY,
    DQN,
    GRID,
    LEARNERS,
    PARALLEL,
    PPO,
    PQN,
    RECIPES,
    REINFORCE,
    REPLAY,
    ROOT,
    jit,
    load,
    one_run,
    path_of,
    watch,
)
from environments import Noise, noise_run
from oracles import radial_features
from patches import apply, changed, patch_of, scripts_of

WIDTH = 0.5  # of the features
sys.path.append(str(RECIPES))
LOGGED = []  # what the recipe `logger` gives to Weights & Biases
WANDB = SimpleNamespace(init=dict, log=lambda means, step: LOGGED.append((step, means)))
SHORT = "--num-intervals 2 --total-timesteps 640 --eval-episodes 2"
NETWORK = f"{SHORT} --num-envs 4 --hidden-size 8"
SHORT_RUNS = {
    PPO: NETWORK,
    PQN: NETWORK,
    DQN: NETWORK,
    GRID: "--num-intervals 2 --total-timesteps 4000 --plot x.png",
    REINFORCE: "--num-intervals 2 --num-iterations 4 --num-envs 2 --eval-episodes 2",
}


PAGE = (RECIPES / "README.md").read_text()
USE = (RECIPES / "USE.md").read_text()
PATCHES = sorted(path.stem for path in RECIPES.glob("*.patch"))
SINGLE = [(script, recipe) for recipe in PATCHES for script in scripts_of(patch_of(recipe))]
OF_NETWORKS = [PARALLEL, REPLAY, DECAY, PPO, PQN, DQN]
OF_FEATURES = ["tile_coding", "semi_gradient_sarsa", "n_step_returns", "full_gradient"]
ON_POLICY = ["sarsa", "expected_sarsa", "monte_carlo", "eligibility_traces"]
# Of these scripts, one recipe of the second list and one of the third apply together.
TOGETHER = [
    ([GRID], ["cliff"], ON_POLICY),
    ([GRID], ["resume"], ["cliff", "slippery_moves", *ON_POLICY, "dyna_q"]),
    ([PARALLEL], ["tile_coding"], ["semi_gradient_sarsa", "n_step_returns", "full_gradient"]),
    ([PARALLEL], ["semi_gradient_sarsa"], ["n_step_returns"]),
    ([PARALLEL], ["greedy_returns", "logger", "resume"], OF_FEATURES),
    ([REPLAY, DECAY], ["greedy_returns", "logger", "resume"], ["double_q_learning"]),
    (OF_NETWORKS, ["greedy_returns", "logger"], ["resume"]),
    (OF_NETWORKS, ["greedy_returns"], ["logger"]),
]
PAIRS = set()  # (script, recipe, recipe), in both orders
for lists in TOGETHER:
    for script, first, second in itertools.product(*lists):
        PAIRS |= {(script, first, second), (script, second, first)}

# Together, they start each recipe in each script, and one pair of each kind.
STARTED = [
    (GRID, "slippery_moves", "resume"),
    (GRID, "sarsa", "cliff"),
    (GRID, "expected_sarsa"),
    (GRID, "monte_carlo"),
    (GRID, "eligibility_traces"),
    (GRID, "dyna_q"),
    (PARALLEL, "tile_coding", "semi_gradient_sarsa", "n_step_returns", "greedy_returns"),
    (PARALLEL, "full_gradient", "logger", "resume"),
    (REPLAY, "double_q_learning", "greedy_returns", "logger", "resume"),
    (DECAY, "double_q_learning", "greedy_returns", "logger", "resume"),
    (REINFORCE, "resume"),
    (PPO, "greedy_returns", "logger", "resume"),
    (PQN, "greedy_returns", "logger", "resume"),
    (DQN, "greedy_returns", "logger", "resume"),
]


@pytest.fixture(autouse=True)
def wandb(monkeypatch):
    """Weights & Biases need not be installed."""
    monkeypatch.setitem(sys.modules, "wandb", WANDB)


TOOLS = ["greedy_returns", "logger", "resume"]  # all others are exercises


@pytest.mark.parametrize("recipe", [recipe for recipe in PATCHES if recipe not in TOOLS])
def test_the_commands_of_the_page_print_the_parts_of_an_exercise(recipe):
    head = patch_of(recipe).read_text().partition("\n--- a/")[0]
    task, rest = head.split("\n\nCheck\n\n")
    checks, rest = rest.split("\n\nResult\n\n")
    result, rest = rest.split("\n\nHints\n\n")
    hints, _ = rest.split("\n\nSolution\n\n")
    printed = [
        subprocess.check_output(command.replace("sarsa", recipe), shell=True, cwd=ROOT, text=True)
        for command in re.findall(r"^sed '.*Check\$.*|^sed '1,.*", PAGE, re.M)
    ]
    assert [text.strip() for text in printed] == [task, checks, hints, result]


def test_each_recipe_applies_to_each_script_that_its_head_names():
    """If not, its other tests are skipped. `twins.py --mend` makes a new diff."""
    complaints = []
    for script, recipe in SINGLE:
        _, complaint = apply(patch_of(recipe), script, path_of(script).read_text())
        if complaint:
            complaints.append(f"{recipe}, {script}:\n{complaint}")
    if complaints:
        pytest.fail("\n".join(complaints), pytrace=False)


def test_the_page_has_the_table_of_what_applies_together():
    section = PAGE.partition("## Apply two recipes")[2].partition("\n## ")[0]
    rows = []
    for lists in TOGETHER:
        cells = [", ".join(f"`{name}`" for name in names) for names in lists]
        rows.append(f"| {' | '.join(cells)} |")
    assert re.findall(r"^\| `.*", section, re.M) == rows


@pytest.mark.parametrize("script", LEARNERS)
def test_two_recipes_apply_together_if_and_only_if_the_table_says_so(script):
    together = set()
    recipes = [recipe for name, recipe in SINGLE if name == script]
    for first, second in itertools.permutations(recipes, 2):
        text, complaint = apply(patch_of(first), script, path_of(script).read_text())
        if complaint:
            pytest.skip(f"{first} does not apply alone")
        _, complaint = apply(patch_of(second), script, text)
        if not complaint:
            together.add((script, first, second))
    assert together == {pair for pair in PAIRS if pair[0] == script}


@pytest.mark.skipif(not shutil.which("ruff"), reason="ruff is in .ci/run, not in requirements")
@pytest.mark.parametrize("names", [*SINGLE, *sorted(PAIRS)], ids=" ".join)
def test_a_changed_script_has_all_names_that_it_reads(names):
    script, *recipes = names
    path = changed(*recipes, script=script).__file__
    command = ["ruff", "check", "--isolated", "--quiet", "--select", "F821", path]
    assert subprocess.run(command).returncode == 0


def test_each_recipe_is_started_in_each_script():
    started = {(script, recipe) for script, *recipes in STARTED for recipe in recipes}
    assert started == set(SINGLE)


@pytest.mark.parametrize("names", STARTED, ids=" ".join)
def test_a_changed_script_runs(names, monkeypatch, tmp_path):
    script, *recipes = names
    module = changed(*recipes, script=script)
    with pytest.raises(SystemExit, match="0"):
        module.main(["--help"])
    monkeypatch.setattr(gymnax, "make", lambda _: (Noise(), Noise.default_params))
    monkeypatch.chdir(tmp_path)
    flags = f"{SHORT_RUNS.get(script, SHORT)} --save x.npz"
    if "resume" in recipes:
        flags += " --resume state.npz"
    module.main(flags.split())
    assert len(np.load("x.npz")["curves.timesteps"]) == 2


@pytest.mark.parametrize("probe", [probes.Memory, probes.Endless])
def test_targets_of_three_steps_find_the_values_of(probe):
    probes.learn(changed("n_step_returns"), probe, "--n-step 3 --num-steps 5")


def test_a_return_of_three_steps_ends_with_its_episode():
    one_step, rewards = jnp.array([10, 20, 30, 40.0]), jnp.ones(4)
    run = SimpleNamespace(n_step=3, gamma=0.5)
    targets = partial(changed("n_step_returns").n_step_targets, run, one_step, rewards)
    never, second = jnp.zeros(4, bool), jnp.array([0, 1, 0, 0], bool)
    assert targets(never).tolist() == [9, 11.5, 21, 40]  # 9 = 1 + (1 + 30 / 2) / 2
    assert targets(second).tolist() == [11, 20, 21, 40]


def update(script, flags, monkeypatch, watched, **fields):
    """Make the first update, in which no pole falls, from a state with these fields.

    Return the only call of the function that is watched, and the states before and after.
    """
    run = one_run(script, f"{flags} --gamma 0.8")
    before = script.init_state(run)._replace(**fields)
    calls = watch(monkeypatch, script, watched)
    after, _ = jit(script.train_step, run)(before, None)
    jax.effects_barrier()
    return calls[0], before, after


def test_double_q_learning_takes_the_averaged_value_of_the_newest_best_action(monkeypatch):
    """The only center is at 0. Action 0 is the newest best one, and action 1 the averaged one."""
    script, flags = changed("double_q_learning"), "--num-centers 1 --sigma 0.5"
    fields = {"weights": jnp.array([[1.0], [0]]), "target_weights": jnp.array([[2.0], [5]])}
    loss, _, _ = update(script, flags, monkeypatch, "td_loss", centers=jnp.zeros((4, 1)), **fields)
    phi = radial_features(WIDTH, np.zeros((4, 1)), loss.batch.next_obs)[:, 0]
    np.testing.assert_allclose(loss.targets, 1 + 0.8 * 2 * phi, rtol=1e-5)


WEIGHTS = np.array([[1.0, 3.0, 2.0], [2.0, 1.0, 3.0]])  # of two actions and three centers


def test_the_full_gradient_is_that_of_the_squared_td_error(monkeypatch):
    script, flags = changed("full_gradient"), "--num-centers 3 --num-envs 5 --sigma 0.5"
    monkeypatch.setattr(script, "optimizer", lambda run: optax.sgd(1.0))
    weights = jnp.array(WEIGHTS)
    step, before, after = update(script, flags, monkeypatch, "vector_step", weights=weights)
    _, (batch, _) = step.out
    gradient = np.zeros((2, 3))
    phi, next_phi = (radial_features(WIDTH, before.centers, x) for x in (batch.obs, batch.next_obs))
    for i, action in enumerate(batch.action):
        best = np.argmax(WEIGHTS @ next_phi[i])
        error = 1 + 0.8 * WEIGHTS[best] @ next_phi[i] - WEIGHTS[action] @ phi[i]
        gradient[best] += 0.8 * error * next_phi[i] / 5
        gradient[action] -= error * phi[i] / 5
    np.testing.assert_allclose(after.weights, WEIGHTS - gradient, rtol=1e-4)


def test_a_state_activates_the_tile_of_each_tiling_that_it_is_in():
    """Two tilings of the car's states. Each has 5 * 5 tiles, since offsets move 4 by up to one."""
    script = changed("tile_coding")
    run = one_run(script, "--env-id MountainCar-v0 --num-tilings 2 --num-tiles 4")
    offsets = jnp.array([[0.0, 0.75], [0.0, 0.5]])  # of positions, of speeds
    q_values = partial(jit(script.q_values, run), offsets, jnp.arange(150.0).reshape(3, 2, 25))
    obs = jnp.array([-0.49 * 1.2, 0.6 * 0.07])  # tiles 1.02 and 3.2; 1.77 and 3.7
    assert q_values(obs).tolist() == [8 + 33, 58 + 83, 108 + 133]
    obs = jnp.array([0.51 * 1.2, -2 * 0.07])  # 3.02 and -2; 3.77 and -1.5
    assert q_values(obs).tolist() == [15 + 40, 65 + 90, 115 + 140]


def test_semi_gradient_sarsa_learns_the_value_of_the_action_that_is_taken_next(monkeypatch):
    script, weights = changed("semi_gradient_sarsa"), jnp.array(WEIGHTS)
    flags = "--num-centers 3 --num-envs 50 --num-steps 2 --epsilon 0.5 --sigma 0.5"
    loss, state, after = update(script, flags, monkeypatch, "td_loss", weights=weights)
    taken_next = np.append(loss.batch.action[50:], after.action)  # 50 first steps, 50 second ones
    next_q = radial_features(WIDTH, state.centers, loss.batch.next_obs) @ WEIGHTS.T  # (B, A)
    assert 10 < np.sum(taken_next != next_q.argmax(axis=1)) < 45  # a quarter
    expected = 1 + 0.8 * next_q[np.arange(100), taken_next]
    np.testing.assert_allclose(loss.targets, expected, rtol=1e-5)


def test_the_last_greedy_returns_are_those_of_the_evaluation():
    results = changed("greedy_returns").main(f"{SHORT} --num-seeds 3".split())
    last = results["curves"]["greedy_return"][-1]
    np.testing.assert_array_equal(last, results["learned"]["greedy_return"].mean(axis=1))


def test_the_logger_gets_means_of_each_setting_with_the_steps_of_a_run():
    LOGGED.clear()
    flags = f"{SHORT} --num-intervals 1 --epsilon 0.1 1 --num-seeds 3"
    q_values = changed("logger").main(flags.split())["curves"]["q_value"]
    (first_steps, few), (last_steps, many) = LOGGED
    assert first_steps == last_steps == 640
    assert few["q_value, epsilon 0.1"] == pytest.approx(q_values[0, :3].mean())
    assert many["q_value, epsilon 1.0"] == pytest.approx(q_values[0, 3:].mean())


def test_a_run_that_was_stopped_and_resumed_equals_one_that_was_not(tmp_path, monkeypatch):
    monkeypatch.setattr(gymnax, "make", lambda _: (Noise(), Noise.default_params))
    script = changed("resume")
    flags = f"{SHORT} --num-envs 16 --num-seeds 5 --resume {tmp_path}/"
    whole = script.main(f"{flags}whole.npz --num-intervals 4".split())

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop = Mock(side_effect=[None, None, None, KeyboardInterrupt])  # by the line of step 320
        patch.setattr(script, "print", stop, raising=False)
        script.main(f"{flags}stopped.npz --num-intervals 4".split())
    stopped = dict(np.load(tmp_path / "stopped.npz"))
    stopped["curves.seconds"] += 1000
    np.savez(tmp_path / "stopped.npz", **stopped)
    resumed = script.main(f"{flags}stopped.npz --num-intervals 4".split())
    assert np.all(np.diff([1000, *resumed["curves"].pop("seconds")]) > 0)  # they are added up
    del whole["curves"]["seconds"]
    for part in "learned", "curves":
        jax.tree.map(np.testing.assert_array_equal, resumed[part], whole[part])


def test_resume_refuses_the_state_of_a_command_with_other_flags(tmp_path, monkeypatch):
    monkeypatch.setattr(gymnax, "make", lambda _: (Noise(), Noise.default_params))
    monkeypatch.chdir(tmp_path)
    script, flags = changed("resume"), f"{SHORT} --resume state.npz"
    script.main(flags.split())
    with pytest.raises(SystemExit, match="other flags"):
        script.main(f"{flags} --total-timesteps 1280".split())


@pytest.mark.parametrize("flags", ["--resume x.npz --save x.npz", "--resume x.txt"])
def test_resume_refuses_the_file_of_the_results_and_another_ending(flags):
    with pytest.raises(SystemExit, match="2"):
        changed("resume").parse_args(flags.split())


def test_a_learner_learns_an_environment_of_ones_own(tmp_path):
    """As a program, whose name may be followed by flags of the script."""
    for path in ROOT / "replay_td.py", RECIPES / "own_environment.py":
        shutil.copy(path, tmp_path)
    program = [sys.executable, "own_environment.py"]
    flags = "--num-intervals 2 --save x.npz".split()
    subprocess.run([*program, *flags], cwd=tmp_path, check=True)
    # Random actions have a return of about -75. The best possible is -8.6.
    assert np.load(tmp_path / "x.npz")["learned.greedy_return"].mean() > -35


def test_clipped_gradients_and_weight_decay_of_the_page_take_the_place_of_the_optimizer(tmp_path):
    [line] = re.findall(r"^(return optax\..*)$", USE, re.M)
    copy, text = tmp_path / "copy.py", path_of(DQN).read_text()
    copy.write_text(text.replace("return optax.adam(rate, eps=1e-3)", line))
    assert copy.read_text() != text
    script = probes.import_file(copy)
    run = noise_run(script, "--num-envs 4 --buffer-size 40 --hidden-size 8")
    state, (metrics, _) = jit(script.train_step, run)(script.init_state(run), None)
    assert np.isfinite(metrics["td_error"])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


def test_the_program_of_the_page_trains_and_evaluates_each_run(capsys):
    """With fewer steps than on the page."""
    programs = re.findall(r"```python\n(.*?)```", USE, re.DOTALL)
    [program] = [program for program in programs if "import ppo" in program]
    few = '"--total-timesteps", "6000", "--hidden-size", "8", "--eval-episodes", "2"'
    shorter = program.replace('"--num-intervals", "1"', f'"--num-intervals", "1", {few}')
    assert shorter != program
    exec(shorter, {})
    returns = [float(word) for word in re.findall(r"[\d.]+", capsys.readouterr().out)]
    assert len(returns) == 4 and all(8 <= x <= 500 for x in returns)


@pytest.fixture
def highway(monkeypatch):
    """It needs a package that is in no requirements: see the first lines of highway.py."""
    pytest.importorskip("highjax", reason="pip install --ignore-requires-python --no-deps highjax")
    ppo = load(PPO)  # highway.py changes its options: here, and for no other test
    monkeypatch.setattr(ppo, "COMPILER_OPTIONS", ppo.COMPILER_OPTIONS)
    return importlib.import_module("highway")


def test_the_flags_of_the_highway_are_accepted(highway):
    load(PPO).parse_args(highway.FLAGS.split())


def test_a_crash_terminates_and_the_time_limit_truncates(highway):
    """All else is what HighJax returns. The last observation of an episode is in `info`."""
    env, key = highway.Highway(), jax.random.key(0)
    # With both limits at 30 s, an adapter that passes on `done` would terminate at the limit.
    params = env.default_params.replace(inner=env.default_params.inner.replace(duration=30.0))
    assert env.inner.n_sub_ts_per_t * params.inner.seconds_per_sub_t == 1  # a step is a second
    reset, step = jax.jit(env.reset), jax.jit(env.step)
    inner_reset, inner_step = jax.jit(env.inner.reset), jax.jit(env.inner.step_env)
    for action, crashes in (3, True), (4, False):  # faster, slower
        obs, state = reset(key, params)
        inner_obs, inner_state = inner_reset(key, params.inner)
        np.testing.assert_allclose(obs, highway.SCALE * inner_obs, rtol=1e-5)
        ended, length = False, 0
        while not ended:
            _, state, reward, terminated, truncated, info = step(key, state, action, params)
            inner = inner_step(key, inner_state, action, params.inner)
            inner_obs, inner_state, inner_reward, *_ = inner
            last_obs = highway.SCALE * inner_obs
            np.testing.assert_allclose(info["final_observation"], last_obs, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(reward, inner_reward, rtol=1e-5)
            length, ended = length + 1, terminated | truncated
        assert (terminated, truncated, inner_state.crashed) == (crashes, not crashes, crashes)
        assert (length < 30) == crashes
        assert state.time == 0  # the next episode has begun
