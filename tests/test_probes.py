"""Probe environments: a few lines each, with values known by hand, learned in a second.

They are the first thing to try on a changed learner (Jones, "Debugging RL, without the agonizing
pain", 2021). Each adds one difficulty to the one before, so the first that fails says where to
look: at the loss, features, discount, maximum over next actions, actions, or the time limit.

    python -m pytest -q tests/test_probes.py                          # two scripts, hard probes
    python -m pytest -q tests/test_probes.py --script my_copy.py      # a changed copy of one
    python -m pytest -q tests/test_probes.py --script my_copy.py --flags "--my-flag 3"

The path is relative to the folder in which the command is called. `make_env` of the copy gets the
probe from gymnax.make. Then `init_state`, `train_interval` and `evaluate` are called. A copy that
has `q_values` is compared with values of actions. Any other one is taken for a REINFORCE, whose
greedy actions must be best. If it has `state_value(params, obs)`, these values are compared, too.
"""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
from conftest import DECAY, REINFORCE, jit, load
from environments import run_in
from flax import struct
from gymnax.environments import environment, spaces

GAMMA = 0.5
FLAGS = "--num-intervals 1 --gamma 0.5 --num-envs 8"
REINFORCE_FLAGS = (
    f"{FLAGS} --num-iterations 60 --learning-rate 0.1 --hidden-size 8 --eval-episodes 20"
)
TD_FLAGS = f"{FLAGS} --total-timesteps 8000 --learning-rate 0.02"


@struct.dataclass
class State(environment.EnvState):
    """The base class adds `time`, the steps so far."""

    light: jax.Array  # -1 or 1 at random from the start on
    choice: jax.Array  # the first action: 0 before it, then -1 or 1


class Constant(environment.Environment):
    """One step, one observation, a reward of 1. Does the learner find the mean of its targets?"""

    num_actions = 2
    num_steps = 1
    default_params = environment.EnvParams(max_steps_in_episode=10)  # never reached

    def reset_env(self, key, params):
        light = jnp.where(jax.random.bernoulli(key), 1.0, -1.0)
        state = State(time=jnp.array(0), light=light, choice=jnp.array(0.0))
        return self.see(state), state

    def step_env(self, key, state, action, params):
        reward = self.reward(state, action)
        choice = jnp.where(state.time == 0, 2.0 * action - 1, state.choice)
        state = State(time=state.time + 1, light=state.light, choice=choice)
        terminated = state.time >= self.num_steps
        return self.see(state), state, reward, terminated, {}

    def see(self, state):
        return jnp.zeros(1)

    def reward(self, state, action):
        return jnp.array(1.0)

    def action_space(self, params):
        return spaces.Discrete(self.num_actions)

    def observation_space(self, params):
        return spaces.Box(-1.0, 1.0, (1,))


class Light(Constant):
    """The reward is what is seen, 1 or -1. Do values depend on the observation?"""

    def see(self, state):
        return state.light[None]

    def reward(self, state, action):
        return state.light


class Later(Constant):
    """The reward comes in the second step. Is it discounted exactly once?"""

    num_steps = 2

    def see(self, state):
        return jnp.array([state.time], float)

    def reward(self, state, action):
        return jnp.where(state.time == 1, 1.0, 0.0)


class Best(Later):
    """The last of three actions pays most. Does the value count on the best action that follows?"""

    num_actions = 3

    def reward(self, state, action):
        return jnp.where(state.time == 1, action / 2, 0.0)


class Choice(Constant):
    """Three actions have rewards of -1, 0 and 1. Do values depend on the action?"""

    num_actions = 3

    def reward(self, state, action):
        return action - 1.0


class Match(Light):
    """The reward is 1 if the action fits what is seen, else -1. Does the policy depend on it?"""

    def reward(self, state, action):
        return (2.0 * action - 1) * state.light


class Memory(Later):
    """The second step pays for the first action. Is a reward credited to the action before?"""

    def see(self, state):
        return state.choice[None]

    def reward(self, state, action):
        return state.choice


class Endless(Constant):
    """A reward of 1 in all steps but the first, cut off by a time limit. Does what follows count?

    Not the next episode, whose first observation is another one.
    """

    num_steps = 1000
    default_params = environment.EnvParams(max_steps_in_episode=3)

    def see(self, state):
        return jnp.array([state.time > 0], float)

    def reward(self, state, action):
        return jnp.where(state.time > 0, 1.0, 0.0)


class Aim(Light):
    """Actions are real: the reward is 1 at the bound that is seen. Is the whole range reached?"""

    def step_env(self, key, state, action, params):
        return super().step_env(key, state, action[0], params)

    def reward(self, state, action):
        return 1 - jnp.abs(action - jnp.where(state.light > 0, 3.0, -1.0))

    def action_space(self, params):
        return spaces.Box(-1.0, 3.0, (1,))


# The values of all actions in some observations.
VALUES = {
    Constant: {0: (1, 1)},
    Light: {-1: (-1, -1), 1: (1, 1)},
    Later: {0: (GAMMA, GAMMA), 1: (1, 1)},
    Best: {0: (GAMMA, GAMMA, GAMMA), 1: (0, 0.5, 1)},
    Choice: {0: (-1, 0, 1)},
    Match: {-1: (1, -1), 1: (-1, 1)},
    Memory: {0: (-GAMMA, GAMMA), -1: (-1, -1), 1: (1, 1)},
    Endless: {0: (1, 1), 1: (2, 2)},  # 2 = 1 / (1 - GAMMA)
}


def learn(script, probe, flags=""):
    """Train a linear learner on a probe, and compare what it learned with the values above."""
    script.OBS_SCALE["probe"] = [1.0]
    env, flags = probe(), f"{TD_FLAGS} {flags}"
    run = run_in(env, env.default_params, script, flags, env_id="probe")
    state, _ = jit(script.train_interval, run)(script.init_state(run))
    learned = [state.centers, state.weights] if hasattr(state, "centers") else [state.weights]
    values = [script.q_values(run, *learned, jnp.array([x], float)) for x in VALUES[probe]]
    # Their values differ by 0.5 and more; features overlap, so learned ones are near, not equal.
    np.testing.assert_allclose(values, [*VALUES[probe].values()], atol=0.05)


def play(script, probe, flags=""):
    """Train REINFORCE on a probe, and see whether its greedy actions are the best ones."""
    run = run_in(probe(), probe.default_params, script, f"{REINFORCE_FLAGS} {flags}")
    state, _ = jit(script.train_interval, run)(script.init_state(run))
    assert jit(script.evaluate, run)(state)["greedy_return"].tolist() == [1.0] * 20


def criticize(script, probe, flags=""):
    """Train an actor-critic on a probe whose actions change nothing, and compare its values."""
    flags = f"{REINFORCE_FLAGS} --num-iterations 2000 --learning-rate 0.01 {flags}"
    run = run_in(probe(), probe.default_params, script, flags)
    state, _ = jit(script.train_interval, run)(script.init_state(run))
    values = [script.state_value(state.params, jnp.array([x], float)) for x in VALUES[probe]]
    expected = [of_actions[0] for of_actions in VALUES[probe].values()]
    np.testing.assert_allclose(values, expected, atol=0.1)


def pytest_generate_tests(metafunc):
    """REINFORCE learns no values, so it is only tried where actions matter."""
    own = metafunc.config.getoption("script")
    scripts = {name: load(name) for name in [DECAY, REINFORCE]}
    if own:
        path = metafunc.config.invocation_params.dir / own
        spec = importlib.util.spec_from_file_location(path.stem, path)
        scripts = {own: importlib.util.module_from_spec(spec)}
        spec.loader.exec_module(scripts[own])
    cases, names = [], []
    for name, script in scripts.items():
        if hasattr(script, "q_values"):
            probes = VALUES if own else (Best, Match, Memory, Endless)  # the hard ones
            attempts = [(learn, probe) for probe in probes]
        else:
            attempts = [(play, probe) for probe in (Choice, Match, Memory, Aim)]
        if hasattr(script, "state_value"):
            attempts += [(criticize, probe) for probe in (Constant, Light, Later, Endless)]
        for attempt, probe in attempts:
            cases.append((attempt, script, probe))
            names.append(f"{name}-{probe.__name__}")
    metafunc.parametrize(("attempt", "script", "probe"), cases, ids=names)


def test_a_learner_solves_the_probe(attempt, script, probe, request):
    attempt(script, probe, request.config.getoption("flags"))
