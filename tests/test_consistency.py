"""The collection as a whole: twins, flags, imports, pins."""
import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(path.name for path in ROOT.glob("*.py"))
TEXT = {name: (ROOT / name).read_text() for name in SCRIPTS}
TREE = {name: ast.parse(text) for name, text in TEXT.items()}
CEILING = {"parallel_td.py": 300, "replay_td.py": 335, "epsilon_decay_td.py": 350, "gridworld_qlearning.py": 280,
           "mountaincar_env.py": 260, "reinforce_parallel.py": 340}

# Same-named functions and classes that differ between scripts, each with its reason.
DIFFERS = {
    "TrainState": "replay adds the ring and its counter; the grid world has a table; REINFORCE a network, and no episode under way",
    "evaluate": "the schedule needs a number of steps, whatever it is: 1 is never below epsilon; REINFORCE has lengths, too",
    "init_state": "replay adds the ring; a grid world's agent has a table, REINFORCE's a network",
    "load": "the grid world saves a table, and has its size to take over; REINFORCE checks the environment",
    "main": "replay says how much memory the rings take; the grid world shows the grid; each environment and network has its own",
    "over_runs": "REINFORCE's runs follow each other: vmapped, all would wait for the longest episode of any, and round differently",
    "parse_args": "each script has its own flags",
    "plot": "the schedule has a second axis; the grid world draws the grid; REINFORCE has no line where CartPole-v1 is solved",
    "reset": "the grid world's is told by random bits, the mountain car's has gymnax's interface",
    "select_action": "epsilon-greedy in a table, or sampled from a policy",
    "step": "the grid world's is told by random bits, the mountain car's has gymnax's interface",
    "train": "replay fills the ring first; the schedule shows epsilon; the grid world counts steps per episode; REINFORCE iterates",
    "train_chunk": "replay draws the batches' random bits too, and can leave the updates out; the grid world draws in blocks",
    "train_update": "what is learned from: the batch just collected, or the ring",
    "vector_step": "epsilon: constant, or the schedule",
}

# What the next script may change of the last one: lines that diff marks with < or >.
DIFF_BUDGET = {("parallel_td.py", "replay_td.py"): 90, ("replay_td.py", "epsilon_decay_td.py"): 35}


def definitions(name):
    """The top-level functions and classes of a script, as text without line numbers."""
    return {node.name: ast.dump(node) for node in TREE[name].body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def flags(name):
    """The flags of a script: {flag: its add_argument call as text, help and default included}."""
    calls = [node for node in ast.walk(TREE[name]) if isinstance(node, ast.Call) and node.args
             and getattr(node.func, "id", getattr(node.func, "attr", "")) in ("add", "add_argument")]
    return {call.args[0].value: ast.dump(call) for call in calls if isinstance(call.args[0], ast.Constant)}


@pytest.mark.parametrize("name", SCRIPTS)
def test_imports_only_what_the_design_allows(name):
    modules = set()
    for node in ast.walk(TREE[name]):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module.split(".")[0])
    standard = {"argparse", "contextlib", "functools", "json", "math", "os", "resource", "shutil", "signal", "sys", "threading", "time", "typing"}
    assert modules - standard <= {"jax", "numpy", "optax", "gymnax", "matplotlib"}
    top_level = {alias.name for node in TREE[name].body if isinstance(node, ast.Import) for alias in node.names}
    assert "matplotlib" not in {module.split(".")[0] for module in top_level}


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_flag_is_read(name):
    assert flags(name)
    for flag in flags(name):
        attribute = "args." + flag[2:].replace("-", "_")
        assert re.search(rf"\b{re.escape(attribute)}\b", TEXT[name]), f"{name} never reads {attribute}"


@pytest.mark.parametrize("name", SCRIPTS)
def test_pep_723_block_equals_requirements(name):
    block = re.match(r"# /// script\n(.*?)# ///\n", TEXT[name], re.DOTALL).group(1)
    block = tomllib.loads(re.sub(r"^# ?", "", block, flags=re.MULTILINE))
    lines = (line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines())
    pins = {line for line in lines if line}
    assert all(re.fullmatch(r"[\w-]+(\[\w+\])?==[\d.]+", pin) for pin in pins)
    assert set(block["dependencies"]) == {pin for pin in pins if not pin.startswith("pytest")}


@pytest.mark.parametrize("name", SCRIPTS)
def test_length_and_nesting(name):
    def depth(node, level=0):
        inner = isinstance(node, (ast.FunctionDef, ast.Lambda))
        return max([level] + [depth(child, level + inner) for child in ast.iter_child_nodes(node)])
    assert len(TEXT[name].splitlines()) <= CEILING[name]
    assert depth(TREE[name]) <= 2
    assert max(map(len, TEXT[name].splitlines())) <= 140


@pytest.mark.parametrize("name", SCRIPTS)
def test_functions_have_docstrings(name):
    for node in TREE[name].body:
        if isinstance(node, ast.FunctionDef):
            assert ast.get_docstring(node), f"{name}: {node.name}"


def test_twins_are_identical_and_the_list_of_exceptions_is_not_stale():
    bodies = {}
    for name in SCRIPTS:
        for function, body in definitions(name).items():
            bodies.setdefault(function, {}).setdefault(body, []).append(name)
    different = {function for function, variants in bodies.items() if len(variants) > 1}
    assert different == set(DIFFERS), {function: list(bodies[function].values()) for function in different ^ set(DIFFERS)}


@pytest.mark.parametrize("pair", DIFF_BUDGET, ids=" -> ".join)
def test_the_next_script_differs_by_its_idea(pair):
    diff = subprocess.run(["diff", *pair], cwd=ROOT, capture_output=True, text=True).stdout
    assert 0 < sum(line[0] in "<>" for line in diff.splitlines()) <= DIFF_BUDGET[pair]


def test_shared_flags_agree():
    """A flag of several scripts has one type and one help text; a default may differ, where the script's subject asks for it."""
    own = {"--learning-rate", "--batch-size", "--gamma", "--total-timesteps", "--log-interval", "--num-envs"}  # by a sweep, or a scale
    grid_world = {"--epsilon", "--num-seeds", "--save", "--plot", "--evaluate"}  # it speaks of agents and tables
    mountain_car = {"--seed", "--num-devices", "--save", "--plot", "--gif"}  # it has no runs, and nothing is learned
    iterations = {"--solved-at", "--no-early-stop"}  # another threshold for each environment; iterations instead of steps
    exceptions = {"gridworld_qlearning.py": grid_world, "mountaincar_env.py": mountain_car, "reinforce_parallel.py": iterations}
    seen = {}
    for name in SCRIPTS:
        for flag, call in flags(name).items():
            if flag not in own | exceptions.get(name, set()):
                assert seen.setdefault(flag, (name, call))[1] == call, f"{flag} in {name} and in {seen[flag][0]}"


def test_processes_are_joined_by_the_same_lines():
    """mountaincar_env.py has a timeout as well, and so lines of its own."""
    blocks = {re.search(r"    if args.num_processes > 1:.*?\n\n", TEXT[name], re.DOTALL).group(0) for name in SCRIPTS if name[0] != "m"}
    assert len(blocks) == 1 and "jax.distributed.initialize" in blocks.pop()


def test_readme_has_one_place_for_what_is_measured():
    markers = re.search(r'MARKERS = "(.*?)", "(.*?)"', (ROOT / "tests" / "benchmark.py").read_text()).groups()
    assert [(ROOT / "README.md").read_text().count(marker) for marker in markers] == [1, 1]


def test_top_level_holds_what_the_design_card_names():
    card = {"parallel_td.py", "replay_td.py", "epsilon_decay_td.py", "gridworld_qlearning.py", "mountaincar_env.py",
            "reinforce_parallel.py", "tests", "requirements.txt", "README.md"}
    assert {path.name for path in ROOT.iterdir() if not path.name.startswith((".", "__"))} <= card
