"""Train CleanRL's pqn.py on CartPole-v1, for the section `race` of benchmark.py.

    python tests/cleanrl_peer.py PQN.PY SEED BEGAN FILE.npz

It runs in an environment of its own (benchmark.py makes it), since CleanRL needs PyTorch. The
script runs as it is, with its default flags. Only its TensorBoard writer is another one: it
evaluates the network, and writes steps, mean returns of 100 greedy episodes and seconds to the
file. Seconds count from the time BEGAN, without those of the evaluations.
"""

import runpy
import sys
import time

import numpy as np
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from torch.utils import tensorboard

UPDATES = 61  # from one evaluation to the next; pqn.py makes 976
BATCH = 512  # steps of an update
path, seed, began, file = sys.argv[1:]
curve = []  # of steps, returns and seconds


class Writer:
    """Evaluate where the script logs its speed: once in each update."""

    def __init__(self, folder):
        self.spent = 0.0  # seconds, in evaluations

    def add_text(self, name, text):
        pass

    def add_scalar(self, name, value, step):
        if name == "charts/SPS" and (step == BATCH or step % (UPDATES * BATCH) == 0):
            now = time.time()
            network = sys._getframe(1).f_globals["q_network"]
            curve.append((step, greedy_return(network), now - float(began) - self.spent))
            self.spent += time.time() - now

    def close(self):
        steps, returns, seconds = np.transpose(curve)
        np.savez(file, steps=steps, returns=returns, seconds=seconds)


def greedy_return(network):
    """Mean return of 100 greedy episodes. The reward is 1 in each step."""
    env = CartPoleVectorEnv(num_envs=100, max_episode_steps=500)
    obs, _ = env.reset(seed=0)
    length, running = np.zeros(100), np.ones(100, bool)
    while running.any():
        with torch.no_grad():
            action = network(torch.Tensor(obs)).argmax(dim=1).numpy()
        obs, _, terminated, truncated, _ = env.step(action)
        length += running
        running &= ~(terminated | truncated)
    return length.mean()


tensorboard.SummaryWriter = Writer
sys.argv = [path, "--seed", seed]
runpy.run_path(path, run_name="__main__")
