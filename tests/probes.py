"""Probes: tiny tasks whose values are known, learned in seconds, and how to try a learner on them.

They are the first thing to try on a changed learner (Jones, "Debugging RL, without the agonizing
pain", 2021). Each adds one difficulty to the one before, so the first that fails says where to
look. The grids are for the grid world, and the environments for all other learners.

`learn`, `play`, `criticize` and `tabulate` try one learner on one probe. They call the script's
`init_state`, `train_interval` and `evaluate`.
"""

import importlib.util
import inspect
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import jit, one_run
from environments import run_in
from flax import struct
from gymnax.environments import environment, spaces

GAMMA = 0.5
PLACES = [-1.0, -1 / 3, 1 / 3, 1.0]
EASY = "--num-intervals 1 --gamma 0.5 --num-envs 8"


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
    """The reward is what is seen, 1 or -1. Do values depend on the observation?

    Both are outside of the scale of the features, as observations of real tasks can be.
    """

    def see(self, state):
        return state.light[None]

    def reward(self, state, action):
        return state.light


class Plane(Constant):
    """Two numbers are seen, and the reward is x y + x / 2. Do no two observations share a weight?

    No value of the 16 observations is that of another one whose numbers are exchanged.
    """

    def reset_env(self, key, params):
        x, y = jax.random.choice(key, jnp.array(PLACES), (2,))
        state = State(time=jnp.array(0), light=x, choice=y)
        return self.see(state), state

    def see(self, state):
        return jnp.array([state.light, state.choice])

    def reward(self, state, action):
        return state.light * state.choice + state.light / 2

    def observation_space(self, params):
        return spaces.Box(-1.0, 1.0, (2,))


class Wave(Light):
    """The reward is cos(pi x) of what is seen. Are observations told apart that are near?"""

    def reset_env(self, key, params):
        x = jax.random.choice(key, jnp.linspace(-1, 1, 7))
        state = State(time=jnp.array(0), light=x, choice=jnp.array(0.0))
        return self.see(state), state

    def reward(self, state, action):
        return jnp.cos(jnp.pi * state.light)


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


class Lengths(Constant):
    """It ends after one, two or three steps, at random. Does each environment have its own end?

    What is seen says how many steps are left.
    """

    def reset_env(self, key, params):
        left = jax.random.randint(key, (), 1, 4).astype(float)
        state = State(time=jnp.array(0), light=left, choice=jnp.array(0.0))
        return self.see(state), state

    def step_env(self, key, state, action, params):
        state = State(time=state.time + 1, light=state.light - 1, choice=state.choice)
        return self.see(state), state, jnp.array(1.0), state.light == 0, {}

    def see(self, state):
        return state.light[None] - 2


class Coin(Constant):
    """The reward is 1 with a probability of 7 / 16, else 0. Does each step have its own key?

    If not, each of 8 environments has the same reward for ever, and their mean is k / 8.
    """

    num_actions = 1

    def step_env(self, key, state, action, params):
        obs, state, _, terminated, info = super().step_env(key, state, action, params)
        return obs, state, 1.0 * jax.random.bernoulli(key, 7 / 16), terminated, info


class Apart(Light):
    """What is seen never changes. Does the learner see all environments and try all actions?

    Not if the environments start with the same key, or if actions or batches are always drawn with
    the same one. Where the light is 1, the last of five actions pays most, else the first.
    """

    num_actions = 5
    num_steps = 10**6
    default_params = environment.EnvParams(max_steps_in_episode=10**6)  # never reached

    def reward(self, state, action):
        return jnp.where(state.light > 0, action + 1, 5 - action) / 5


class Aim(Light):
    """Actions are real: the reward is 1 at the bound that is seen. Is the whole range reached?"""

    def step_env(self, key, state, action, params):
        return super().step_env(key, state, action[0], params)

    def reward(self, state, action):
        return 1 - jnp.abs(action - jnp.where(state.light > 0, 3.0, -1.0))

    def action_space(self, params):
        return spaces.Box(-1.0, 3.0, (1,))


# The values of all actions in some observations, of the best policy.
VALUES = {
    Constant: {0: (1, 1)},
    Light: {-1: (-1, -1), 1: (1, 1)},
    Plane: {(x, y): (x * y + x / 2,) * 2 for x in PLACES for y in PLACES},
    Wave: {x: (np.cos(np.pi * x),) * 2 for x in np.linspace(-1, 1, 7).tolist()},
    Later: {0: (GAMMA, GAMMA), 1: (1, 1)},
    Best: {0: (GAMMA, GAMMA, GAMMA), 1: (0, 0.5, 1)},
    Choice: {0: (-1, 0, 1)},
    Match: {-1: (1, -1), 1: (-1, 1)},
    Memory: {0: (-GAMMA, GAMMA), -1: (-1, -1), 1: (1, 1)},
    Endless: {0: (1, 1), 1: (2, 2)},  # 2 = 1 / (1 - GAMMA)
    Lengths: {-1: (1, 1), 0: (1.5, 1.5), 1: (1.75, 1.75)},
    Coin: {0: (7 / 16,)},
    Apart: {-1: (2, 1.8, 1.6, 1.4, 1.2), 1: (1.2, 1.4, 1.6, 1.8, 2)},  # a reward, and GAMMA * 2
}


def import_file(path):
    """Import a script that is anywhere."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def attempts_of(script):
    """The probes of a script, each with the function that tries it.

    A policy without values is only tried where actions matter, and a critic where they do not.
    """
    if "q_table" in script.TrainState._fields:
        return [(tabulate, probe) for probe in (Bandit, Corridor, Fork, Cliff)]
    if hasattr(script, "q_values"):
        return [(learn, probe) for probe in VALUES]
    attempts = [(play, probe) for probe in (Choice, Match, Memory, Aim)]
    if hasattr(script, "state_value"):
        attempts += [(criticize, probe) for probe in (Constant, Light, Later, Endless, Lengths)]
    return attempts


def learn(script, probe, flags="", on_policy=False):
    """Train a learner on a probe, and compare its values of actions with those above.

    They are those of the best policy. Where a policy that explores has others, an on-policy method
    is not tried.
    """
    if on_policy and probe in (Best, Apart):
        pytest.skip("a policy that explores has other values")
    own = f"{EASY} --learning-rate 0.02 --total-timesteps 8000"
    if probe in (Plane, Wave):  # many observations
        own = f"{EASY} --learning-rate 0.02 --total-timesteps 32000"
    if probe is Coin:  # average over many rewards
        own = f"{EASY} --learning-rate 0.0005 --total-timesteps 32000"
    arguments = vars(script.parse_args([]))
    if probe is Apart and "batch_size" in arguments:
        # Learn from one of the 8 newest transitions. With a key that is used again, it is always
        # that of the same environment.
        own = f"{EASY} --learning-rate 0.02 --total-timesteps 64000 --buffer-size 8 --batch-size 1"
    if "hidden_size" in arguments:
        own = own.replace("0.02", "0.005") + " --hidden-size 32"
    if "q_lambda" in arguments:
        own += " --num-steps 4"
        if probe in (Best, Memory, Apart):  # whose returns have the rewards of random actions
            own += " --q-lambda 0"
    env = probe()
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(script, "OBS_SCALE"):
            size = env.observation_space(None).shape[0]
            scale = 0.5 if probe is Light else 1.0
            patch.setitem(script.OBS_SCALE, "probe", [scale] * size)
        run = run_in(env, env.default_params, script, f"{own} {flags}", env_id="probe")
        state, _ = jit(script.train_interval, run)(script.init_state(run))
        # The arguments of q_values are the run, parts of the state (perhaps of other names than
        # ours, in a changed copy), and last the observation.
        *names, _ = inspect.signature(script.q_values).parameters
        known = [run if name == "run" else getattr(state, name) for name in names]
        values = [script.q_values(*known, jnp.array(obs, float, ndmin=1)) for obs in VALUES[probe]]
    # Their values differ by 0.2 and more; features overlap, so learned ones are near, not equal.
    text = f"{probe.__name__}: {probe.__doc__} Rows are for observations {[*VALUES[probe]]}"
    np.testing.assert_allclose(values, [*VALUES[probe].values()], atol=0.05, err_msg=text)


def play(script, probe, flags=""):
    """Train a policy on a probe, and see whether its greedy actions are the best ones."""
    state, run = train_policy(script, probe, flags)
    returns = jit(script.evaluate, run)(state)["greedy_return"]
    assert returns.tolist() == [1.0] * 20, f"{probe.__name__}: {probe.__doc__}"


def criticize(script, probe, flags=""):
    """Train a policy on a probe whose actions change nothing, and compare its critic's values."""
    state, _ = train_policy(script, probe, flags)
    params = state.params["critic"]
    values = [script.state_value(params, jnp.array([x], float)) for x in VALUES[probe]]
    expected = [of_actions[0] for of_actions in VALUES[probe].values()]
    text = f"{probe.__name__}: {probe.__doc__} Rows are for observations {[*VALUES[probe]]}"
    np.testing.assert_allclose(values, expected, atol=0.1, err_msg=text)


def train_policy(script, probe, flags):
    """Train REINFORCE or PPO on a probe. Return the state, and the run."""
    own = f"{EASY} --hidden-size 8 --eval-episodes 20"
    if "num_iterations" in vars(script.parse_args([])):
        own += " --num-iterations 60 --learning-rate 0.1"
    else:
        own += " --num-steps 16 --total-timesteps 32000 --learning-rate 0.01"
    run = run_in(probe(), probe.default_params, script, f"{own} {flags}")
    return jit(script.train_interval, run)(script.init_state(run))[0], run


class Grid:
    """A tiny grid world in tables, whose values are computed by value iteration."""

    def __init__(self, rows, columns, start, goal):
        """All moves cost nothing and stay within the walls. Only the goal ends an episode."""
        self.shape, self.first, self.goal = (rows, columns), start, goal
        self.next_cells = np.zeros((rows, columns, 4, 2), int)
        self.rewards = np.zeros((rows, columns, 4))
        self.visited = np.ones((rows, columns))  # 0 where no action is taken
        self.visited[goal] = 0
        moves = [[0, 1], [1, 0], [0, -1], [-1, 0]]  # right, down, left, up
        for row, column, action in np.ndindex(rows, columns, 4):
            cell = np.add([row, column], moves[action])
            self.next_cells[row, column, action] = np.clip(cell, 0, [rows - 1, columns - 1])

    def start(self, run):
        return jnp.array(self.first)

    def env_step(self, run, cell, action):
        next_cell = jnp.array(self.next_cells)[*cell, action]
        at_goal = jnp.all(next_cell == jnp.array(self.goal))
        return next_cell, jnp.array(self.rewards)[*cell, action], at_goal

    def values(self, gamma, epsilon, slip):
        """Values (H, W, A) of the policy that is greedy, but for random actions: epsilon."""
        q_table = np.zeros(self.rewards.shape)
        ends = np.all(self.next_cells == self.goal, axis=-1)
        for _ in range(1000):
            of_cells = (1 - epsilon) * q_table.max(axis=-1) + epsilon * q_table.mean(axis=-1)
            next_values = of_cells[self.next_cells[..., 0], self.next_cells[..., 1]]
            moved = self.rewards + gamma * np.where(ends, 0, next_values)
            q_table = (1 - slip) * moved + slip * moved.mean(axis=-1, keepdims=True)
            q_table *= self.visited[..., None]
        return q_table

    def path(self, q_table):
        """Steps of the greedy policy from the start to the goal, or a large number."""
        cell, steps = self.first, 0
        while cell != self.goal and steps < 1000:
            cell = tuple(self.next_cells[*cell, q_table[cell].argmax()])
            steps += 1
        return steps


class Bandit(Grid):
    """One step, four actions with rewards of 1 to 4. Is the value of the last step its reward?"""

    def __init__(self):
        super().__init__(1, 2, start=(0, 1), goal=(0, 0))
        self.next_cells[0, 1] = 0
        self.rewards[0, 1] = [1, 2, 3, 4]


class Corridor(Grid):
    """Four cells to the goal, where the reward is 1. Does it count, discounted, one cell before?"""

    def __init__(self):
        super().__init__(1, 5, start=(0, 4), goal=(0, 0))
        self.rewards[0, 1, 2] = 1


class Fork(Grid):
    """Two moves lead to the goal. Do the probabilities of equally good actions sum to 1?"""

    def __init__(self):
        super().__init__(1, 3, start=(0, 2), goal=(0, 0))
        self.next_cells[0, 1, 3] = self.goal  # up, like left
        self.rewards[0, 1, 2:] = 1


class Cliff(Grid):
    """A step costs 1, and a fall 10. Does the policy walk along the cliff, or keep away from it?"""

    def __init__(self):
        super().__init__(3, 5, start=(2, 0), goal=(2, 4))
        falls = (self.next_cells[..., 0] == 2) & np.isin(self.next_cells[..., 1], [1, 2, 3])
        self.rewards[:] = np.where(falls, -10, -1)
        self.next_cells[falls] = self.first
        self.visited[2, 1:4] = 0


def tabulate(script, probe, flags="", on_policy=False):
    """Train 20 tabular agents on a probe, and compare their mean table with the exact one.

    It is that of the best policy, or, for an on-policy method, of the policy that explores. Moves
    slip with the probability of a flag --slip, if the script has one. After --total-timesteps,
    no table may change.
    """
    grid = probe()
    rows, columns = grid.shape
    own = f"--num-intervals 1 --num-rows {rows} --num-columns {columns} --total-timesteps 100000"
    own += " --gamma 0.8 --epsilon 0.5 --learning-rate 0.05"
    run = one_run(script, f"{own} {flags}")

    def agent(seed):
        own = SimpleNamespace(**{**vars(run), "seed": seed})
        state, _ = script.train_interval(own, script.init_state(own))
        short = SimpleNamespace(**{**vars(own), "total_timesteps": 100, "interval_blocks": 1})
        early, _ = script.train_interval(short, script.init_state(short))
        later, _ = script.train_interval(short, early)
        changed = jnp.any(early.q_table != later.q_table)
        return state.q_table, changed, script.evaluate(own, state)["greedy_steps"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "start", grid.start)
        patch.setattr(script, "env_step", grid.env_step)
        tables, changed, steps = jax.jit(jax.vmap(agent))(jnp.arange(20))
    assert not np.any(changed), f"{probe.__name__}: learning goes on after --total-timesteps"
    slip = getattr(run, "slip", 0.0)
    best, exploring = (grid.values(run.gamma, epsilon, slip) for epsilon in (0.0, run.epsilon))
    expected, other = (exploring, best) if on_policy else (best, exploring)
    table, tolerance = np.mean(tables, axis=0), 0.05 * np.max(np.abs(expected))
    text = f"{probe.__name__}: {probe.__doc__} The values are wrong"
    if np.allclose(table, other, atol=tolerance) and not np.allclose(best, exploring):
        text += ": as if random actions " + ("did not count" if on_policy else "counted")
    np.testing.assert_allclose(table, expected, atol=tolerance, err_msg=text)
    if not slip:
        text = f"{probe.__name__}: {probe.__doc__} The greedy path has a wrong length"
        assert np.median(steps) == grid.path(expected), text
