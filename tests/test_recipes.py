"""Each recipe still applies to its scripts, runs, and does what it promises.

What it promises is worked out here by hand, in NumPy, by linear algebra or by Gymnasium.
"""

import importlib.util
import itertools
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_probes
from conftest import REINFORCE, ROOT, load, one_run, watch

RECIPES = ROOT / "tests" / "recipes"
PATCHES = sorted(path.stem for path in RECIPES.glob("*.patch"))
FOLDER = tempfile.TemporaryDirectory()  # of the changed scripts
FEW = "--num-intervals 2 --eval-episodes 2 --total-timesteps 640"  # steps
TD = f"{FEW} --num-centers 7"
# Recipes that change the same lines. All others can be combined, in any order.
CONFLICTS = [
    {"baseline_and_entropy", "ppo"},
    {"clipping_and_adamw", "ppo"},
    {"double_q_learning", "dqn"},
    {"expected_sarsa", "sarsa"},
    {"expected_sarsa", "slippery_moves"},
    {"sarsa", "slippery_moves"},
]


def scripts_of(recipe):
    """The scripts that a recipe says it applies to. The first one is the one in its diff."""
    sentence = re.search(r"^Made for [^:]*?\.$", (RECIPES / f"{recipe}.patch").read_text(), re.M)
    return re.findall(r"\w+\.py", sentence[0])


def apply(script, *recipes):
    """Copy a script into an empty folder, and change it there as a user would.

    Return its path, or what was said if a recipe does not apply.
    """
    copy = Path(tempfile.mkdtemp(dir=FOLDER.name)) / script
    shutil.copy(ROOT / script, copy)
    for recipe in recipes:
        patch = RECIPES / f"{recipe}.patch"
        first = script == scripts_of(recipe)[0]
        command = ["git", "apply", "--verbose", patch] if first else ["patch", "-F0", script, patch]
        process = subprocess.run(command, cwd=copy.parent, capture_output=True, text=True)
        if process.returncode:
            return f"{recipe} no longer applies to {script}:\n{process.stderr}{process.stdout}"
    return copy


@cache
def changed(*recipes):
    """Import a copy of a script that was changed by recipes."""
    path = apply(scripts_of(recipes[0])[0], *recipes)
    if isinstance(path, str):
        pytest.skip("does not apply, as another test reports")
    spec = importlib.util.spec_from_file_location("_".join([*recipes, path.stem]), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.COMPILER_OPTIONS = {}  # compiles faster
    return module


def test_recipes_apply_to_the_scripts_that_they_name():
    failures = []
    for recipe, script in [(x, script) for x in PATCHES for script in scripts_of(x)]:
        path = apply(script, recipe)
        if isinstance(path, str):
            failures.append(path)
        else:
            compile(path.read_text(), script, "exec")
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)


def test_recipes_for_one_script_can_be_combined_in_any_order():
    for first, second in itertools.permutations(PATCHES, 2):
        shared = sorted(set(scripts_of(first)) & set(scripts_of(second)))
        if shared and {first, second} not in CONFLICTS:
            path = apply(shared[0], first, second)
            if isinstance(path, str):
                pytest.fail(f"after {first}, {path}", pytrace=False)


@pytest.mark.parametrize("probe", [test_probes.Memory, test_probes.Endless])
def test_targets_of_three_steps_find_the_values_of(probe):
    test_probes.learn(changed("n_step_returns"), probe, "--n-step 3 --num-steps 5")


def test_a_return_of_three_steps_ends_with_its_episode():
    one_step, rewards = jnp.array([10, 20, 30, 40.0]), jnp.ones(4)
    run = SimpleNamespace(n_step=3, gamma=0.5)
    targets = partial(changed("n_step_returns").n_step_targets, run, one_step, rewards)
    never, second = jnp.zeros(4, bool), jnp.array([0, 1, 0, 0], bool)
    assert targets(never).tolist() == [9, 11.5, 21, 40]  # 9 = 1 + (1 + 30 / 2) / 2
    assert targets(second).tolist() == [11, 20, 21, 40]


def test_double_q_learning_takes_the_averaged_value_of_the_newest_best_action(monkeypatch):
    """The only center is at 0. Action 0 is the newest best one, and action 1 the averaged one."""
    script = changed("double_q_learning")
    run = one_run(script, "--num-centers 1")
    state = jax.jit(partial(script.init_state, run))()
    newest, averaged = jnp.array([[1.0], [0.0]]), jnp.array([[2.0], [5.0]])
    state = state._replace(centers=jnp.zeros((4, 1)), weights=newest, target_weights=averaged)
    losses = watch(monkeypatch, script, "td_loss")
    jax.jit(partial(script.train_step, run))(state, None)
    jax.effects_barrier()
    next_obs = losses[0].batch.next_obs / [2.4, 3.0, 0.2, 3.0]  # no pole falls in the first step
    phi = np.exp(-np.sum(next_obs**2, axis=1) / (2 * 0.5**2))
    np.testing.assert_allclose(losses[0].targets, 1 + 0.99 * 2 * phi, rtol=1e-5)


def grid_state(script, **values):
    state = script.init_state(one_run(script))
    return state._replace(cell=jnp.array([4, 5]), **values)


def test_expected_sarsa_learns_the_mean_value_of_the_next_action():
    script = changed("expected_sarsa")
    table = np.random.default_rng(0).normal(size=(8, 12, 4))
    table[4, 5] = [2.0, 3.0, 5.0, 1.0]  # the best action, 2, leads to cell (4, 4)
    table[4, 4] = [1.0, 2.0, 6.0, 3.0]  # 0.8 * 6 + 0.2 * 3 = 5.4
    state = grid_state(script, q_table=jnp.array(table))
    run = one_run(script, epsilon=0.2, learning_rate=0.5, gamma=0.9)
    state, _ = script.train_step(run, state, (jnp.array(False), 0.5))
    assert state.q_table[4, 5, 2] == pytest.approx(5.0 + 0.5 * (0.9 * 5.4 - 5.0))


def test_sarsa_learns_the_value_of_the_action_that_it_takes_next():
    script = changed("sarsa")
    table = np.random.default_rng(0).normal(size=(8, 12, 4))
    table[4, 5], table[4, 4] = [2.0, 3.0, 5.0, 1.0], [1.0, 2.0, 6.0, 3.0]
    state = grid_state(script, q_table=jnp.array(table), action=jnp.array(2))  # to cell (4, 4)
    run = one_run(script, learning_rate=0.5, gamma=0.9)
    state, _ = script.train_step(run, state, (jnp.array(True), 0.3))  # explores: action 1
    assert (state.cell.tolist(), state.action) == ([4, 4], 1)
    assert state.q_table[4, 5, 2] == pytest.approx(5.0 + 0.5 * (0.9 * 2.0 - 5.0))


def exact_return(run, table):
    """Expected return of the epsilon-greedy policy on the cliff, by linear algebra."""
    best = table > table.max(axis=-1, keepdims=True) - 0.01  # equal values, but for roundings
    policy = run.epsilon / 4 + (1 - run.epsilon) * best / best.sum(axis=-1, keepdims=True)
    transitions, rewards = np.zeros((48, 48)), np.zeros(48)
    for (row, column, action), probability in np.ndenumerate(policy):
        next_row = np.clip(row + [0, 1, 0, -1][action], 0, 3)
        next_column = np.clip(column + [1, 0, -1, 0][action], 0, 11)
        falls = next_row == 3 and 0 < next_column < 11
        cell, next_cell = 12 * row + column, 36 if falls else 12 * next_row + next_column
        rewards[cell] += probability * (-100 if falls else -1)
        if next_cell != 47:  # the goal
            transitions[cell, next_cell] += probability
    return np.linalg.solve(np.eye(48) - transitions, rewards)[36]


@pytest.mark.parametrize("recipes, path", [(["cliff"], [13]), (["cliff", "sarsa"], [15, 16, 17])])
def test_the_return_on_the_cliff_is_that_of_the_greedy_path_with_random_actions(recipes, path):
    """Q-learning walks along the cliff, and SARSA keeps away from it."""
    script = changed(*recipes)
    results = script.main("--total-timesteps 4e5 --num-intervals 2 --num-seeds 4".split())
    steps, tables = (results["learned"][name] for name in ("greedy_steps", "q_table"))
    assert set(steps) <= set(path)
    run = one_run(script)
    exact = np.mean([exact_return(run, table) for table in tables])
    curves = results["curves"]
    online = curves["returns"][-1].sum() / curves["episodes"][-1].sum()
    assert online == pytest.approx(exact, abs=2.5)  # about -51, and between -23 and -20


def test_a_deep_q_network_learns_from_the_values_of_the_averaged_one(monkeypatch):
    script = changed("dqn")
    run = one_run(script, "--hidden-size 5")
    state = jax.jit(partial(script.init_state, run))()
    averaged = {name: 2 * array + i for i, (name, array) in enumerate(state.weights.items())}
    losses = watch(monkeypatch, script, "td_loss")
    jax.jit(partial(script.train_step, run))(state._replace(target_weights=averaged), None)
    jax.effects_barrier()
    w0, b0, w1, b1, w2, b2 = (np.array(averaged[x]) for x in ("w0", "b0", "w1", "b1", "w2", "b2"))
    next_obs = losses[0].batch.next_obs / [2.4, 3.0, 0.2, 3.0]  # no pole falls in the first step
    hidden = next_obs @ w0 + b0  # (B, 5)
    hidden = hidden / (1 + np.exp(-hidden)) @ w1 + b1
    best = (hidden / (1 + np.exp(-hidden)) @ w2 + b2).max(axis=1)
    np.testing.assert_allclose(losses[0].targets, 1 + 0.99 * best, rtol=1e-4)


def test_the_last_greedy_returns_are_those_of_the_evaluation():
    results = changed("greedy_returns").main(f"{TD} --num-seeds 3".split())
    last = results["curves"]["greedy_return"][-1]
    np.testing.assert_array_equal(last, results["learned"]["greedy_return"].mean(axis=1))


def test_gravity_reaches_training_and_evaluation():
    """Nothing is learned: actions of training are random, and greedy ones push left."""
    flags = "--num-intervals 1 --num-centers 7 --eval-episodes 300 --num-envs 64"
    flags += " --total-timesteps 12800 --learning-rate 0 --epsilon 1 --gravity 9.8 200"
    results = changed("sweep_gravity").main(flags.split())
    weak, strong = results["curves"]["returns"][-1]  # means of 300 episodes or more
    assert weak > strong + 5
    weak, strong = results["learned"]["greedy_return"]  # of the same seed, so of the same starts
    assert not np.array_equal(weak, strong)


def test_the_logger_gets_means_of_each_setting(monkeypatch):
    logged = []
    wandb = SimpleNamespace(init=lambda **_: None, log=lambda means, step: logged.append(means))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    flags = f"{TD} --num-intervals 1 --epsilon 0.1 1 --num-seeds 3"
    returns = changed("logger").main(flags.split())["curves"]["returns"]
    assert {"returns epsilon 0.1": pytest.approx(returns[0, :3].mean())} in logged
    assert {"returns epsilon 1": pytest.approx(returns[0, 3:].mean())} in logged


def test_saved_weights_are_those_of_run_0_and_with_learning_rate_0_stay_so(tmp_path):
    weights = np.arange(28.0).reshape(2, 2, 7)  # of two runs
    saved = {"learned.centers": np.ones((2, 4, 7)), "learned.weights": weights}
    np.savez(tmp_path / "x.npz", **saved)
    flags = f"{FEW} --load {tmp_path / 'x.npz'} --learning-rate 0 --num-seeds 2"
    learned = changed("saved_weights").main(flags.split())["learned"]
    np.testing.assert_array_equal(learned["weights"], [weights[0], weights[0]])
    assert np.all(learned["centers"] == 1)


def test_a_run_that_was_stopped_and_resumed_equals_one_that_was_not(tmp_path, monkeypatch):
    script = changed("resume")
    flags = f"{TD} --num-intervals 4 --num-seeds 5 --resume {tmp_path}/"
    whole = script.main(f"{flags}whole.npz".split())

    def stop(*words, **_):
        if words[0].startswith("step 320"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(script, "print", stop, raising=False)
        script.main(f"{flags}stopped.npz".split())
    resumed = script.main(f"{flags}stopped.npz".split())
    again = script.main(f"{flags}stopped.npz".split())  # nothing is left to do
    for results in resumed, again:
        results["curves"]["seconds"] = whole["curves"]["seconds"]
        for part in "learned", "curves":
            jax.tree.map(np.testing.assert_array_equal, results[part], whole[part])


def test_adamw_learns_from_clipped_gradients():
    """Two steps. The second gradient is clipped, so moments and norms matter."""
    script = changed("clipping_and_adamw")
    run = one_run(script, TD, learning_rate=0.1, max_grad_norm=10.0, weight_decay=0.01)
    weights, first, second = jnp.ones(5), jnp.array([1, 2, -1, 0.5, 1]), jnp.arange(5) * 20.0
    opt = script.optimizer(run)
    _, opt_state = opt.update(first, opt.init(weights), weights)
    updates, _ = opt.update(second, opt_state, weights)
    clipped = second * 10 / np.linalg.norm(second)
    mean = (0.9 * 0.1 * first + 0.1 * clipped) / (1 - 0.9**2)
    square = (0.999 * 0.001 * first**2 + 0.001 * clipped**2) / (1 - 0.999**2)
    rate = 0.1 * (1 - 1 / run.num_updates)
    expected = -rate * (mean / (np.sqrt(square) + 1e-8) + 0.01 * weights)
    np.testing.assert_allclose(updates, expected, rtol=1e-4)


def test_ppo_with_one_epoch_is_reinforce():
    flags = "--num-intervals 1 --num-envs 4 --num-iterations 3"
    original, ppo = load(REINFORCE), changed("ppo")
    run, ppo_run = one_run(original, flags), one_run(ppo, f"{flags} --update-epochs 1")
    expected, _ = jax.jit(lambda: original.train_interval(run, original.init_state(run)))()
    state, _ = jax.jit(lambda: ppo.train_interval(ppo_run, ppo.init_state(ppo_run)))()
    for name, array in expected.params.items():
        np.testing.assert_allclose(state.params[name], array, rtol=1e-3, atol=1e-6)


def test_ppo_has_no_gradient_where_the_ratio_has_left_its_bounds_to_the_good_side():
    """Two actions of equal probability, 1 / 2. Their old probabilities make the ratios."""
    script = changed("ppo")
    run = one_run(script, clip_coef=0.2)
    params = {"w0": jnp.zeros((1, 1)), "b0": jnp.zeros(1), "w1": jnp.zeros((1, 2))}
    params["b1"] = jnp.zeros(2)

    def gradient(ratio, advantage, mask=True):
        zeros = jnp.zeros((1, 1, 1))
        steps = script.Step(zeros, jnp.array([[0]]), zeros[0], jnp.array([[mask]]), None)
        old = jnp.array([[jnp.log(0.5 / ratio)]])
        loss = partial(script.policy_loss, run)
        return jax.grad(loss)(params, steps, jnp.array([[advantage]]), old)["b1"].tolist()

    # The logarithm of the first probability has the derivatives 1 / 2 and -1 / 2.
    assert gradient(1.1, 3.0) == pytest.approx([-1.65, 1.65])  # -ratio * advantage / 2
    assert gradient(1.3, 3.0) == [0, 0]
    assert gradient(1.3, -3.0) == pytest.approx([1.95, -1.95])
    assert gradient(0.7, -3.0) == [0, 0]
    assert gradient(0.7, 3.0) == pytest.approx([-1.05, 1.05])
    assert gradient(1.1, 3.0, mask=False) == [0, 0]


def test_reinforce_with_a_baseline_and_entropy_finds_a_softmax_and_its_value():
    """The best policy for rewards of -1, 0 and 1, plus its entropy, is a softmax of the rewards.

    The probe ends after one of ten steps, so nine are padding.
    """
    script, env = changed("baseline_and_entropy"), test_probes.Choice()
    flags = "--num-intervals 1 --num-envs 100 --num-iterations 100 --learning-rate 0.1"
    run = one_run(script, flags, env=env, env_params=env.default_params, ent_coef=1.0)
    state, _ = jax.jit(lambda: script.train_interval(run, script.init_state(run)))()
    policy = jax.nn.softmax(script.policy(state.params, jnp.zeros(1)).logits)
    rewards = np.array([-1, 0, 1])
    expected = np.exp(rewards) / np.exp(rewards).sum()
    np.testing.assert_allclose(policy, expected, atol=0.05)
    value = script.value(state.params, jnp.zeros(1))
    np.testing.assert_allclose(value, expected @ rewards, atol=0.1)


def test_moves_slip_with_the_probability_that_is_asked_for():
    script = changed("slippery_moves")
    run = one_run(script, "--num-rows 1 --num-columns 3 --eval-episodes 2000", slip=0.4)
    left = jnp.zeros((1, 3, 4)).at[:, :, 2].set(1.0)  # left, always
    state = script.init_state(run)._replace(q_table=left)
    # Left: 0.6 + 0.1; right: 0.1; up or down, into a wall: 0.2. So the mean steps to the goal are
    # s1 = 1 + 0.1 s2 + 0.2 s1 from cell 1, and s2 = 1 + 0.7 s1 + 0.3 s2 from cell 2.
    _, s2 = np.linalg.solve([[0.8, -0.1], [-0.7, 0.7]], [1, 1])
    steps_from_2 = jax.jit(partial(script.evaluate, run))(state)["greedy_steps"]
    assert float(steps_from_2) == pytest.approx(s2, abs=0.15)  # 3.06; five deviations
    state = state._replace(cell=jnp.array([0, 1]))
    state, _ = script.train_step(run, state, (jnp.array(False), 0.5, (jnp.array(True), 0)))
    assert state.cell.tolist() == [0, 2]  # it slipped to the right
    assert np.argwhere(state.q_table != left).tolist() == [[0, 1, 2]]  # and learned about the left


def test_random_pairs_are_a_run_each_with_each_seed():
    script = changed("random_pairs")
    flags = "--paired --learning-rate 0.1 0.2 0.3 --sigma 0.4 0.5 0.6 --num-seeds 2"
    runs, settings = script.make_runs(script.parse_args(flags.split()))
    np.testing.assert_array_equal(runs["learning_rate"], [0.1, 0.1, 0.2, 0.2, 0.3, 0.3])
    np.testing.assert_array_equal(runs["sigma"], [0.4, 0.4, 0.5, 0.5, 0.6, 0.6])
    np.testing.assert_array_equal(runs["gamma"], [0.99] * 6)
    np.testing.assert_array_equal(runs["seed"], [0, 1] * 3)
    assert [rows for _, rows in settings] == [slice(0, 2), slice(2, 4), slice(4, 6)]


def test_the_pendulum_steps_as_that_of_gymnasium():
    script = changed("pendulum")
    env = gymnasium.make("Pendulum-v1").unwrapped
    draws = np.random.default_rng(0)
    step = jax.jit(script.ENV.step_env)
    for angle, velocity, torque in draws.uniform([-9, -8, -3], [9, 8, 3], (50, 3)):
        env.state = np.array([angle, velocity])
        expected_obs, expected_reward, _, _, _ = env.step([torque])
        state = script.EnvState(angle=angle, velocity=velocity, time=0)
        obs, _, reward, terminated, _ = step(jax.random.key(0), state, torque, script.PARAMS)
        assert not terminated
        np.testing.assert_allclose(obs, expected_obs, atol=1e-5)
        assert reward == pytest.approx(expected_reward, rel=1e-4, abs=1e-4)


def test_a_learner_learns_an_environment_of_ones_own(monkeypatch):
    monkeypatch.syspath_prepend(RECIPES)
    module = importlib.import_module("own_environment")
    monkeypatch.setattr(module.replay_td, "COMPILER_OPTIONS", {})  # compiles faster
    env = module.OwnCar()
    state = module.EnvState(position=jnp.array(0.5), velocity=jnp.array(0.0), time=jnp.array(99))
    _, _, _, terminated, truncated, _ = env.step(jax.random.key(0), state, 1, env.default_params)
    assert (terminated, truncated) == (False, True)
    results = module.replay_td.main([*module.FLAGS.split(), "--num-intervals", "2"])
    # Random actions have a return of about -75. The best possible is -8.6.
    assert results["learned"]["greedy_return"].mean() > -35
