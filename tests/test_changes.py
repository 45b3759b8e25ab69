"""What users change works, or is refused before training.

Each test changes a copy of a script as a user would, by a diff, runs it for a few steps, and says
what must come out.
"""

import contextlib
import io
import json
import os
import re
import sys
from functools import cache, partial
from types import SimpleNamespace

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    GRID,
    PARALLEL,
    REINFORCE,
    REPLAY,
    ROOT,
    SCRIPTS,
    TRIO,
    changed,
    jit,
    one_run,
    refuse_to_train,
)
from gymnax.environments import spaces
from gymnax.wrappers.purerl import FlattenObservationWrapper, StickyActionWrapper
from scipy.stats import norm

TD_FLAGS = "--num-intervals 2 --eval-episodes 2 --total-timesteps 640 --num-centers 7"
FLAGS = {
    "parallel_td.py": TD_FLAGS,
    "replay_td.py": f"{TD_FLAGS} --buffer-size 1000",
    "epsilon_decay_td.py": f"{TD_FLAGS} --buffer-size 1000",
    "gridworld_qlearning.py": "--num-intervals 2 --total-timesteps 4000",
    "reinforce_parallel.py": "--num-intervals 2 --eval-episodes 2 --num-iterations 4 --num-envs 4",
}


def run(script, diff="", more="", **names):
    """Run a changed copy for a few steps. Return what main returns."""
    return changed(script, diff, **names).main(f"{FLAGS[script]} {more}".split())


@cache
def unchanged(script):
    return run(script)


# Networks and optimizers

README = (ROOT / "README.md").read_text()
NETWORK = re.search(r"\*\*A neural network\*\*.*?```diff\n(.*?)```", README, re.DOTALL)[1]
ADAMW = """
-    return optax.adam(optax.linear_schedule(run.learning_rate, 0.0, run.num_updates))
+    adamw = optax.adamw(optax.linear_schedule(run.learning_rate, 0.0, run.num_updates))
+    return optax.chain(optax.clip_by_global_norm(1.0), adamw)
"""


def test_nested_parameters_are_learned_and_saved_under_joined_names(tmp_path):
    """The network of README.md, with another optimizer."""
    run(REPLAY, NETWORK + "\n\n" + ADAMW, f"--save {tmp_path / 'x.npz'}")
    saved = np.load(tmp_path / "x.npz", allow_pickle=False)  # so no array is pickled
    assert saved["params.Dense_0.kernel"].shape == (1, 4, 64)  # of one run
    assert saved["params.Dense_1.bias"].shape == (1, 2)
    assert np.all(saved["params.Dense_1.bias"] != 0)  # it was 0 before training
    assert not any("centers" in name for name in saved)


NOISY_ADAMW = """
-    adam = optax.adam(optax.linear_schedule(run.learning_rate, 0.0, run.num_updates))
+    adamw = optax.adamw(run.learning_rate, weight_decay=0.1)
+    adam = optax.chain(adamw, optax.add_noise(1.0, 0.5, 0))
"""


def test_no_optimizer_moves_the_centers():
    """Neither by weight decay nor by noise, which do not depend on the gradient."""
    module = changed(PARALLEL, NOISY_ADAMW)
    run_of = one_run(module, TD_FLAGS)
    before = jit(module.init_state, run_of)()
    after, _ = jit(module.train_interval, run_of)(before)
    np.testing.assert_array_equal(after.params["centers"], before.params["centers"])
    assert np.any(after.params["weights"] != before.params["weights"])


# Losses of REINFORCE

BASELINE = """
     if not run.discrete:
         params["log_std"] = jnp.zeros(outputs)
+    params["v"] = jnp.ones(inputs)

-def advantages(run, episodes):
+def advantages(run, params, episodes):

     returns = jax.vmap(partial(returns_to_go, run))(episodes.reward)
+    returns = returns - episodes.obs @ params["v"]

-    advantage = advantages(run, episodes)  # (N, T)
+    advantage = advantages(run, state.params, episodes)  # (N, T)
"""


def test_the_loss_of_the_policy_has_no_gradient_by_a_learned_baseline():
    """Advantages are computed outside of the loss. So without a loss of its own, v stays."""
    results = run(REINFORCE, BASELINE)
    assert np.all(results["v"] == 1)
    assert np.any(results["b1"] != 0)  # the policy has learned


ENTROPY = """
-        return jnp.where(step.mask, -advantage * log_prob(run, params, obs, action), 0.0)
+        log_pi = jax.nn.log_softmax(network(params, obs))
+        entropy = -jnp.sum(jnp.exp(log_pi) * log_pi)
+        loss = -advantage * log_prob(run, params, obs, action) - 0.1 * entropy
+        return jnp.where(step.mask, loss, 0.0)
"""


def test_an_entropy_bonus_does_not_count_the_padding():
    module = changed(REINFORCE, ENTROPY)
    params = {"w0": np.ones((1, 2)), "b0": np.zeros(2), "w1": np.eye(2), "b1": np.array([0.5, 0])}
    padded = module.Step(  # one episode of two steps, and one step of padding
        obs=np.array([[[0.3], [0.7], [np.nan]]]),
        action=np.array([[0, 1, 0]]),
        reward=np.array([[1.0, 1.0, 0.0]]),
        mask=np.array([[True, True, False]]),
    )
    real = jax.tree.map(lambda array: array[:, :2], padded)
    advantage = np.array([[1.0, -2.0, 5.0]])
    slope = jax.jit(jax.grad(partial(module.policy_loss, SimpleNamespace(discrete=True))))
    of_padded, of_real = slope(params, padded, advantage), slope(params, real, advantage[:, :2])
    for name in params:
        np.testing.assert_allclose(of_padded[name], of_real[name], rtol=1e-6)
    assert np.all(of_real["b1"] != 0)


BETA = """
-    std = jnp.exp(params["log_std"])
-    return jnp.sum(jax.scipy.stats.norm.logpdf(action, logits_or_mean, std))
+    return jnp.sum(jax.scipy.stats.beta.logpdf(action, jnp.exp(logits_or_mean), 2.0))
"""


def test_the_padding_may_lie_where_a_policy_has_no_density():
    """Beta distributions have none at 0, so 0 must not stand in for the padding."""
    module = changed(REINFORCE, BETA)
    params = {"w0": np.ones((1, 2)), "b0": np.zeros(2), "w1": np.ones((2, 1)), "b1": np.zeros(1)}
    episodes = module.Step(
        obs=np.array([[[0.3], [np.nan]]]),
        action=np.array([[[0.5], [np.nan]]]),
        reward=np.array([[1.0, 0.0]]),
        mask=np.array([[True, False]]),
    )
    slope = jax.grad(partial(module.policy_loss, SimpleNamespace(discrete=False)))
    for gradient in slope(params, episodes, np.array([[1.0, 1.0]])).values():
        assert np.isfinite(gradient).all()


NESTED = """
     \"\"\"Logits (A,) in an observation (D,), or means if actions are continuous.\"\"\"
+    params = params["policy"]

-    std = jnp.exp(params["log_std"])
+    std = jnp.exp(params["policy"]["log_std"])
"""


def test_a_policy_is_continuous_because_of_its_environment_not_because_of_a_name():
    module = changed(REINFORCE, NESTED)
    run_of = one_run(module, "--env-id Pendulum-v1")
    params = {"w0": np.zeros((3, 2)), "b0": np.zeros(2), "w1": np.zeros((2, 1)), "b1": np.zeros(1)}
    nested = {"policy": {**params, "log_std": np.zeros(1)}}
    density = module.log_prob(run_of, nested, np.zeros(3), np.array([1.5]))
    np.testing.assert_allclose(density, norm.logpdf(1.5), rtol=1e-6)


# Metrics


TD_METRICS = '     metrics = {"td_error": jnp.mean(jnp.abs(errors)), "q_value": jnp.mean(values)}'
GRID_METRICS = '     metrics = {"rewards": reward, "episodes": terminated}'
REINFORCE_METRICS = '     metrics = {"returns": jnp.mean(returns)}'

# Where a script makes its metrics, an array that is known there, and its length.
METRICS = {
    PARALLEL: (TD_METRICS, "values", 16),  # of the transitions of a batch
    REPLAY: (TD_METRICS, "values", 32),
    GRID: (GRID_METRICS, "values", 4),  # of the actions
    REINFORCE: (REINFORCE_METRICS, "returns", 4),  # of the episodes
}


def with_metric(script, name):
    """A diff that adds a metric."""
    line, array, _ = METRICS[script]
    return f"""
{line}
+    metrics["{name}"] = jnp.max({array})
"""


@pytest.fixture(scope="module", params=METRICS)
def own_metrics(request):
    """What a script prints and returns with metrics of one number, of many, and nested ones."""
    line, array, length = METRICS[request.param]
    diff = f"""
{line}
+    metrics["largest"] = jnp.max({array})
+    metrics["of_each"] = {array}
+    metrics["nested"] = {{"smallest": jnp.min({array})}}
"""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        results = run(request.param, diff)
    return SimpleNamespace(results=results, text=output.getvalue(), length=length)


def test_a_metric_is_saved_for_each_line_and_run(own_metrics):
    assert own_metrics.results["largest"].shape == (2, 1)


def test_a_metric_of_many_numbers_is_saved_in_full(own_metrics):
    many = own_metrics.results["of_each"]
    assert many.shape == (2, 1, own_metrics.length)
    # Means of largest numbers are not below the largest of means.
    assert np.all(own_metrics.results["largest"] >= many.max(axis=2) - 1e-6)


def test_nested_metrics_are_saved_under_joined_names(own_metrics):
    smallest = own_metrics.results["nested.smallest"]
    assert smallest.shape == (2, 1) and np.all(smallest <= own_metrics.results["largest"])


@pytest.mark.parametrize("name", ["largest", "nested.smallest"])
def test_a_metric_is_printed_at_every_line(own_metrics, name):
    printed = re.findall(rf"{re.escape(name)}[^\w-]*(-?[\d.]+(?:e-?\d+)?)", own_metrics.text)
    np.testing.assert_allclose(np.array(printed, float), own_metrics.results[name][:, 0], rtol=1e-3)


def test_a_metric_of_many_numbers_is_not_printed(own_metrics):
    assert "of_each" not in own_metrics.text


@pytest.mark.parametrize("name", ["learning_rate", "timesteps"])
@pytest.mark.parametrize("script", [PARALLEL, GRID, REINFORCE])
def test_a_metric_whose_name_is_taken_is_refused_before_training(script, name):
    module = changed(script, with_metric(script, name))
    module.describe = refuse_to_train
    with pytest.raises((TypeError, ValueError), match=name):
        module.main(FLAGS[script].split())


@pytest.mark.parametrize("name", ["episodes", "weights"])
def test_a_metric_with_the_name_of_another_result_is_refused_before_training(name):
    module = changed(PARALLEL, with_metric(PARALLEL, name))
    module.describe = refuse_to_train
    with pytest.raises((TypeError, ValueError), match=name):
        module.main(TD_FLAGS.split())


def test_greedy_returns_at_every_line_change_nothing_that_is_learned():
    recipe = re.search(r"\*\*Greedy returns at every line.*?```diff\n(.*?)```", README, re.DOTALL)
    results = run(PARALLEL, recipe[1])
    assert results["greedy"].shape == (2, 1)
    assert results["greedy"][-1, 0] == results["greedy_return"].mean()
    np.testing.assert_allclose(results["returns"], unchanged(PARALLEL)["returns"])


def test_a_loop_that_is_left_early_is_not_interrupted():
    early = """
             show(describe(lines[-1], train_seconds))
+            break
"""
    results = run(PARALLEL, early)
    assert results["returns"].shape == (1, 1)  # one line of two
    assert not results["interrupted"]


# Flags

OWN_FLAGS = """
+from pathlib import Path
 import argparse

     args = parser.parse_args(argv)
+    args.bins = np.arange(3)

+    flag("--folder", type=Path, default=Path("a/b"), help="a folder")
+    flag("--sizes", type=int, nargs="+", default=[64, 32], help="of layers")
     flag("--eval-episodes", type=count, default=100, help="greedy episodes after training")
"""


def test_flags_that_json_does_not_know_are_saved(tmp_path):
    run(PARALLEL, OWN_FLAGS, f"--save {tmp_path / 'x.npz'}")
    args = json.loads(str(np.load(tmp_path / "x.npz")["args"]))
    assert args["folder"] == "a/b" and args["bins"] == [0, 1, 2] and args["sizes"] == [64, 32]


def test_a_list_among_the_flags_is_not_swept():
    module = changed(PARALLEL, OWN_FLAGS)
    assert one_run(module).sizes == [64, 32]
    columns, labels = module.settings_and_seeds(module.parse_args([]))
    assert columns["seed"].tolist() == [0] and "sizes" not in columns and labels == [""]


def test_pairs_of_values_may_be_swept_instead_of_all_combinations():
    pairs = """
-    product = itertools.product(*swept.values())
+    product = zip(*swept.values(), strict=True)
"""
    module = changed(PARALLEL, pairs)
    flags = "--gamma 0.5 0.9 --epsilon 0.1 0.2 --learning-rate 0.1 0.2 --sigma 0.4 0.5"
    columns, labels = module.settings_and_seeds(module.parse_args(flags.split()))
    assert columns["gamma"].tolist() == [0.5, 0.9] and columns["sigma"].tolist() == [0.4, 0.5]
    assert len(labels) == 2


# Environments


class Square(gymnax.environments.CartPole):
    """CartPole-v1, observed as a square of numbers."""

    def step_env(self, key, state, action, params):
        obs, *rest = super().step_env(key, state, action, params)
        return obs.reshape(2, 2), *rest

    def reset_env(self, key, params):
        obs, state = super().reset_env(key, params)
        return obs.reshape(2, 2), state

    def observation_space(self, params):
        return spaces.Box(-1.0, 1.0, (2, 2))


SQUARE = """
     args.env, args.env_params = copy.deepcopy(gymnax.make(args.env_id))
+    args.env = Square()
"""
WRAPPED = """
     args.env, args.env_params = copy.deepcopy(gymnax.make(args.env_id))
+    args.env = Wrapper(Square())
"""


@pytest.mark.parametrize("script", [PARALLEL, REINFORCE])
def test_observations_of_two_dimensions_are_learned_like_those_of_one(script):
    square = run(script, SQUARE, Square=Square)
    np.testing.assert_allclose(square["returns"], unchanged(script)["returns"], rtol=1e-4)


def test_an_environment_may_be_wrapped():
    wrapped = run(PARALLEL, WRAPPED, Square=Square, Wrapper=FlattenObservationWrapper)
    np.testing.assert_allclose(wrapped["returns"], unchanged(PARALLEL)["returns"], rtol=1e-4)


def test_an_animation_of_a_wrapped_environment_is_refused(capsys):
    """A wrapper may hide the state that gymnax draws."""
    with pytest.raises(SystemExit):
        run(REINFORCE, WRAPPED, "--gif x.gif", Square=Square, Wrapper=StickyActionWrapper)
    assert "wrapper" in capsys.readouterr().err


@pytest.mark.parametrize("script", TRIO)
def test_an_environment_that_the_scales_do_not_fit_is_refused(script, capsys):
    other = """
     args.env, args.env_params = copy.deepcopy(gymnax.make(args.env_id))
+    args.env, args.env_params = gymnax.make("MountainCar-v0")
"""
    with pytest.raises(SystemExit):
        run(script, other)
    assert "OBS_SCALE" in capsys.readouterr().err


class Paid(gymnax.environments.CartPole):
    """CartPole-v1 with a reward that is a setting of the object."""

    reward = 1.0

    def step_env(self, key, state, action, params):
        obs, state, _, *rest = super().step_env(key, state, action, params)
        return obs, state, jnp.array(self.reward), *rest


def test_a_changed_setting_of_an_environment_is_used_by_the_next_call(monkeypatch):
    """gymnax compiles the steps of an object only once, so each call must use a copy of it."""
    env, module = Paid(), changed(PARALLEL)
    monkeypatch.setattr(gymnax, "make", lambda env_id: (env, env.default_params))
    before = module.main(TD_FLAGS.split())["returns"]
    env.reward = 2.0  # twice as much
    after = module.main(TD_FLAGS.split())["returns"]
    assert after[0] > 1.5 * before[0]  # about twice: the agent acts differently


def test_parameters_of_an_environment_may_be_arrays():
    arrays = """
     args.env, args.env_params = copy.deepcopy(gymnax.make(args.env_id))
+    args.env_params = jax.tree.map(jnp.array, args.env_params)
"""
    results = run(REINFORCE, arrays)
    np.testing.assert_allclose(results["returns"], unchanged(REINFORCE)["returns"])


def test_a_move_of_the_grid_world_without_a_sign_is_refused(capsys):
    still = """
-MOVES = np.array([[0, 1], [1, 0], [0, -1], [-1, 0]])  # (A, 2) change of row, of column
+MOVES = np.array([[0, 1], [1, 0], [0, -1], [-1, 0], [0, 0]])
"""
    with pytest.raises(SystemExit):
        run(GRID, still)
    assert "SIGNS" in capsys.readouterr().err


def test_a_table_of_integers_is_refused():
    """Updates would be rounded."""
    optimistic = """
-        q_table=jnp.zeros((*run.grid_size, len(MOVES))),
+        q_table=jnp.full((*run.grid_size, len(MOVES)), 10),
"""
    with pytest.raises(TypeError, match="q_table='int32"):
        run(GRID, optimistic)


def test_the_grid_world_may_have_two_goals():
    """A policy that always goes up arrives at a second goal, three steps from the start."""
    second = """
-    return jnp.all(cell == jnp.array([0, 0]))
+    return jnp.any(jnp.all(cell == jnp.array([[0, 0], [4, 11]]), axis=1))
"""
    module = changed(GRID, second)
    q_table = jnp.tile(jnp.array([0.0, 0.0, 0.0, 1.0]), (8, 12, 1))
    learned = module.evaluate(one_run(module), SimpleNamespace(q_table=q_table))
    assert learned["greedy_steps"] == 3


# The docstring of the grid world says what slippery ground takes: another draw, many episodes.
SLIPPERY = """
-def env_step(run, cell, action):
+def env_step(run, cell, action, slip):

+    action = jnp.where(slip < 0.2, (action + 1) % len(MOVES), action)
     next_cell = jnp.clip(cell + jnp.array(MOVES)[action], 0, jnp.array(run.grid_size) - 1)

-    explore, uniform = draws
+    explore, uniform, slip = draws

-    next_cell, reward, terminated = env_step(run, state.cell, action)
+    next_cell, reward, terminated = env_step(run, state.cell, action, slip)

-    key, key_explore, key_uniform = jax.random.split(state.key, 3)
+    key, key_explore, key_uniform, key_slip = jax.random.split(state.key, 4)

-    draws = explore, jax.random.uniform(key_uniform, BLOCK)
+    uniform = jax.random.uniform(key_uniform, BLOCK)
+    draws = explore, uniform, jax.random.uniform(key_slip, BLOCK)

-    def step(cell, _):
-        next_cell, _, terminated = env_step(run, cell, greedy[*cell])
+    def step(cell, slip):
+        next_cell, _, terminated = env_step(run, cell, greedy[*cell], slip)

-    _, (ends, at_goal) = jax.lax.scan(step, start(run), length=greedy.size)  # (S,)
+    slips = jax.random.uniform(state.key, 20 * greedy.size)
+    _, (ends, at_goal) = jax.lax.scan(step, start(run), slips)
"""


def test_moves_of_the_grid_world_may_be_random():
    results = run(GRID, SLIPPERY, "--total-timesteps 2e5 --num-seeds 3")
    assert np.all(np.isfinite(results["greedy_steps"]))
    assert results["greedy_steps"].mean() > 18  # the shortest path, without slipping


# Importers


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_program_that_imports_a_script_may_have_a_flag_distributed_of_its_own(
    script, monkeypatch
):
    monkeypatch.setattr(sys, "argv", ["program.py", "--distributed"])
    assert callable(changed(script).main)  # it was imported anew, and joined no job


@pytest.mark.parametrize("script", SCRIPTS)
def test_importing_a_script_keeps_the_backend_of_matplotlib(script, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "svg")
    changed(script)
    assert os.environ["MPLBACKEND"] == "svg"


@pytest.mark.parametrize("script", [GRID, "mountaincar_env.py"])
def test_settings_of_the_compiler_join_those_of_the_user(script, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    changed(script)
    assert "--xla_cpu_enable_fast_math=false" in os.environ["XLA_FLAGS"].split()
    assert "small_while_loop" in os.environ["XLA_FLAGS"]
