"""Drive on a highway by PPO, in HighJax: highway-env, written in JAX.

    pip install --ignore-requires-python --no-deps highjax    # on Python 3.14: pip install highjax
    python tests/recipes/highway.py    # further flags may follow

What changes: the environment. The task is highway-fast-v0, with its rewards and observations: three
lanes, twenty other cars, which do not collide with each other, and 30 steps of a second.

Results: the return is at most 30. Constant actions have 9.4 (LEFT), 11.3 (IDLE), 10.2 (RIGHT), 6.7
(FASTER) and 20.8 (SLOWER), random ones 8.3. SLOWER after two steps of RIGHT has 21.5. One run of
PPO (--seed 271000 --num-intervals 1) has 23.2. Without the entropy bonus, and with half of the
steps, one had 20.3.

Traps:
- HighJax returns one `done`. Here a crash is `terminated`, and gymnax adds the time limit.
- `n_sub_ts_per_t` times `seconds_per_sub_t` must be one second. HighJax does not check it.
- Actions are discrete. HighJax has functions for continuous ones, which no environment of it uses.
"""

import sys

import ppo  # before what imports jax: it tells jax to use all cores

ppo.COMPILER_OPTIONS = {}  # full optimization: twice as fast here

import gymnax
import highjax
import jax.numpy as jnp
from flax import struct
from gymnax.environments import environment, spaces

SCALE = jnp.array([1.0, 10.0, 3.0, 10.0, 10.0])  # presence, x / 20 m, y / lane, vx and vy / 8 m/s


@struct.dataclass
class EnvParams(environment.EnvParams):
    """The time limit, and HighJax's own parameters. Its `duration` is not used."""

    max_steps_in_episode: int = 30
    inner: highjax.EnvParams = highjax.EnvParams(seconds_per_sub_t=1 / 5, ego_spacing=1.5)


class Highway(environment.Environment):
    """HighJax as gymnax has it. Actions are left, idle, right, faster and slower."""

    default_params = EnvParams()

    def __init__(self):
        """Make HighJax's environment."""
        self.inner = highjax.HighJaxEnv(n_lanes=3, n_npcs=20, npc_npc_collisions=False)
        self.inner.n_sub_ts_per_t = 5  # it always starts as 15

    def step_env(self, key, state, action, params):
        """Step once. Return observation, state, reward, terminated and info."""
        obs, state, reward, _, _ = self.inner.step_env(key, state, action, params.inner)
        return SCALE * obs, state, reward, state.crashed, {}

    def reset_env(self, key, params):
        """Start an episode. Return observation and state. The state's `time` is in seconds."""
        obs, state = self.inner.reset(key, params.inner)
        return SCALE * obs, state

    def action_space(self, params):
        """Return the space of actions."""
        return spaces.Discrete(self.inner.num_actions)

    def observation_space(self, params):
        """Return the space of observations: the car, and the four next ones, relative to it."""
        return spaces.Box(-SCALE, SCALE, self.inner.observation_shape)


gymnax.register("Highway-v0", lambda: Highway())
FLAGS = "--env-id Highway-v0 --gamma 0.8 --ent-coef 0.1 --total-timesteps 4e5"

if __name__ == "__main__":
    ppo.main([*FLAGS.split(), *sys.argv[1:]])
