"""The collection as a whole: twins are the same, and what is imported is declared.

Scripts share no code, so shared code is duplicated. What has the same name in several scripts (a
function, a class, a constant; in the trio also a flag) is the same to the letter, except for those
in the table below. tests/twins.py copies a change from one script to the others.
"""

import ast
import difflib
import re
import sys
import tomllib

import pytest
from conftest import (
    DECAY,
    DQN,
    NETWORKS,
    PARALLEL,
    PQN,
    REINFORCE,
    REPLAY,
    ROOT,
    SCRIPTS,
    TRIO,
    path_of,
)

RETURNS = [*TRIO, REINFORCE, *NETWORKS]  # what these show are returns
STEPPING = [*TRIO, *NETWORKS]  # all environments are stepped in lockstep
VALUES = [PQN, DQN]  # a network has values of actions

# Name: the groups of scripts that agree, and why the groups differ. A script that is in no group
# agrees with no other. No flag is here: two scripts of the trio never differ in a default.
DIFFERENT = {
    "AT_ONCE": ([RETURNS], "agents of the grid world are fastest one by one"),
    "COMPILER_OPTIONS": ([STEPPING], "what is fast was measured for each"),
    "parse_args": ([], "each script has flags of its own"),
    "make_env": ([[*TRIO, *VALUES]], "REINFORCE's and PPO's actions may need bounds"),
    "setting_mean": ([RETURNS], "the grid world has steps of episodes, not returns"),
    "main": ([STEPPING], "REINFORCE has --gif and counts its steps, the grid world makes no env"),
    "Transition": ([TRIO], "PPO keeps what its loss needs, PQN where time ran out, DQN pictures"),
    "TrainState": ([[REPLAY, DECAY]], "replay needs a buffer; the others learn something else"),
    "Step": ([], "REINFORCE keeps what its loss needs, the car what --save writes"),
    "init_state": ([[REPLAY, DECAY]], "replay needs a buffer; the others learn something else"),
    "select_action": (
        [[*TRIO, *VALUES]],
        "the grid world breaks ties at random: its table starts at 0",
    ),
    "optimizer": ([[*TRIO, REINFORCE]], "PPO and PQN have several steps in an update, DQN an eps"),
    "q_values": ([TRIO, VALUES], "linear features or a network"),
    "vector_step": ([[PARALLEL, REPLAY]], "epsilon decays; networks need other arrays of a step"),
    "advantages": ([], "REINFORCE's have no critic"),
    "td_target": ([TRIO], "DQN's is double Q-learning"),
    "td_loss": ([TRIO], "a network has parameters; the targets of PQN are no TD targets"),
    "greedy_return": ([TRIO, VALUES], "weights, a network of values, or an actor choose"),
    "train_step": ([], "each method learns in another way"),
    "train_interval": ([STEPPING], "the grid world adds up, REINFORCE knows whole episodes"),
    "evaluate": ([TRIO, VALUES], "each method learns something else"),
    "play": ([], "REINFORCE plays to learn, the car to roll out"),
    "report": ([RETURNS], "the grid world has no greedy returns"),
    "draw": ([RETURNS], "the grid world draws a table"),
}


def definitions(script):
    """The lines of what a script defines, by name, with the comments directly above."""
    text = path_of(script).read_text()
    lines, found = text.splitlines(), {}
    body = ast.parse(text).body
    for node in body:
        first = min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", []))])
        while first > 1 and lines[first - 2].startswith("#"):
            first -= 1
        name = getattr(node, "name", lines[node.lineno - 1].partition(" = ")[0])
        found[name] = "\n".join(lines[first - 1 : node.end_lineno])
    if script in TRIO:
        [parse_args] = [node for node in body if getattr(node, "name", "") == "parse_args"]
        for node in parse_args.body:  # a statement for each flag
            source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            if match := re.match(r"\s+(?:flag|sweep)\(\s*\"(--[\w-]+)\"", source):
                found[match[1]] = source
    return found


SOURCES = {script: definitions(script) for script in SCRIPTS}
NAMES = sorted({name for sources in SOURCES.values() for name in sources})


def groups_of(name):
    """The scripts that have a name, in groups that must agree."""
    having = [script for script in SCRIPTS if name in SOURCES[script]]
    if name not in DIFFERENT:
        return [having]
    groups = [list(group) for group in DIFFERENT[name][0]]
    alone = [[script] for script in having if not any(script in group for group in groups)]
    return groups + alone


def differences(name):
    """What differs between the scripts of each group that must agree."""
    for first, *others in groups_of(name):
        for other in others:
            texts = SOURCES[first][name].splitlines(), SOURCES[other][name].splitlines()
            yield from difflib.unified_diff(*texts, first, other, lineterm="", n=1)


def test_what_has_the_same_name_is_the_same():
    different = [name for name in NAMES if any(differences(name))]
    what_to_do = (
        "Copy your change to the other scripts by `python tests/twins.py SCRIPT NAME`: "
        f"NAME is {' or '.join(different)}, SCRIPT the one that you changed. Or say in DIFFERENT "
        "of tests/test_consistency.py which scripts agree, and why the others differ."
    )
    if different:
        lines = [line for name in different for line in differences(name)]
        pytest.fail("\n".join([*lines, what_to_do]), pytrace=False)


def test_what_the_table_calls_different_is_different():
    for name in DIFFERENT:
        texts = [SOURCES[group[0]][name] for group in groups_of(name)]
        assert len(set(texts)) == len(texts) > 1, f"two groups of {name} agree: join them"


def header(script):
    """The first lines of a script, which `uv run` reads (PEP 723)."""
    lines = path_of(script).read_text().partition("\n# ///\n")[0].splitlines()[1:]
    return tomllib.loads("\n".join(line.removeprefix("# ") for line in lines))


def pins(lines):
    """The versions that lines pin, by package, without extras such as [visualize]."""
    matches = [re.match(r"(\w+)(?:\[\w+\])?==([\d.]+)", line) for line in lines]
    return {match[1]: match[2] for match in matches if match}


def test_what_is_imported_is_declared():
    """Not what a declared package needs itself, as NumPy (jax), flax and matplotlib (gymnax)."""
    for script in SCRIPTS:
        text = path_of(script).read_text()
        imported = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                imported.add(node.module)
        packages = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
        packages -= {"numpy"}
        if "gymnax" in packages:
            packages = packages - {"flax", "matplotlib"} | {"six"}  # gymnax does not declare six
        dependencies = header(script)["dependencies"]
        assert pins(dependencies).keys() == packages
        draws = any("gymnax[visualize]" in dependency for dependency in dependencies)
        assert draws == ("gymnax.visualize" in imported)


def test_pins_are_those_of_requirements():
    required = pins((ROOT / "requirements.txt").read_text().splitlines())
    for script in SCRIPTS:
        dependencies = header(script)["dependencies"]
        assert len(pins(dependencies)) == len(dependencies)
        assert pins(dependencies).items() <= required.items()


def test_the_versions_of_python_are_those_that_are_tested():
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    tested = re.search(r"python: \[(.*)\]", workflow)[1]
    first, *_, last = [int(minor) for minor in re.findall(r'"3\.(\d+)"', tested)]
    for script in SCRIPTS:
        assert header(script)["requires-python"] == f">=3.{first},<3.{last + 1}"
