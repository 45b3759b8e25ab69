"""The collection as a whole: twins are the same, and what is imported is declared.

Scripts share no code, so shared code is duplicated. What has the same name in several scripts (a
function, a class, a constant; in the trio also a flag) is the same to the letter, except for those
in the table below.
"""

import ast
import difflib
import re

import pytest
from conftest import DECAY, PARALLEL, REINFORCE, REPLAY, ROOT, SCRIPTS, TRIO

TEXT = {script: (ROOT / script).read_text() for script in SCRIPTS}

# Name: the groups of scripts that agree, and why the groups differ. A script that is in no group
# agrees with no other.
DIFFERENT = {
    "PACKAGES": ([[*TRIO, REINFORCE]], "the grid world and the car import fewer"),
    "MAX_AT_ONCE": ([[REPLAY, DECAY]], "what fits into a cache was measured for each"),
    "COMPILER_OPTIONS": ([TRIO], "what is fast was measured for each"),
    "LOOPS": ([], "the limit suits the size of the loop"),
    "parse_args": ([], "each script has flags of its own"),
    "make_env": ([TRIO], "returns are counted by LogWrapper, or REINFORCE's actions are bounded"),
    "main": ([TRIO], "REINFORCE has --gif, the grid world pools episodes, the car learns nothing"),
    "TrainState": ([[REPLAY, DECAY]], "replay needs a buffer; the others learn something else"),
    "Step": ([], "REINFORCE keeps what its loss needs, the car what --save writes"),
    "init_state": ([[REPLAY, DECAY]], "replay needs a buffer; the others learn something else"),
    "select_action": ([TRIO], "the grid world breaks ties at random: its table starts at 0"),
    "vector_step": ([[PARALLEL, REPLAY]], "epsilon decays"),
    "train_step": ([], "each method learns in another way"),
    "train_interval": ([TRIO], "the grid world adds up, REINFORCE knows whole episodes"),
    "evaluate": ([TRIO], "each method learns something else"),
    "play": ([], "REINFORCE plays to learn, the car to roll out"),
    "report": ([[*TRIO, REINFORCE]], "the grid world has no greedy returns"),
    "draw": ([[*TRIO, REINFORCE]], "the grid world draws a table"),
    "--total-timesteps": ([[REPLAY, DECAY]], "replay needs more steps until its values settle"),
    "--buffer-size": (
        [],
        "if epsilon decays, early transitions show states that later ones do not",
    ),
    "--tau": ([], "with little exploration, fast averages overestimate"),
    "--learning-rate": ([[REPLAY, DECAY]], "replay is stable with smaller steps only"),
}


def flags(script):
    """The source of each flag of a script."""
    calls = [node for node in ast.walk(ast.parse(TEXT[script])) if isinstance(node, ast.Call)]
    found = [re.match(r"\w+\('(--[\w-]+)'", ast.unparse(call)) for call in calls]
    return {match[1]: match.string for match in found if match}


def definitions(script):
    """The source of what a script defines, by name, with its comments."""
    found = flags(script) if script in TRIO else {}
    for node in ast.parse(TEXT[script]).body:
        source = ast.get_source_segment(TEXT[script], node)
        first_line = source.partition("\n")[0]
        name = getattr(node, "name", first_line.partition(" = ")[0])
        found[name] = source
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
    different = [line for name in NAMES for line in differences(name)]
    what_to_do = (
        "Copy the change to the other scripts, or say in DIFFERENT of tests/test_consistency.py "
        "which scripts agree, and why the others differ."
    )
    if different:
        pytest.fail("\n".join([*different, what_to_do]), pytrace=False)


def test_what_the_table_calls_different_is_different():
    for name in DIFFERENT:
        texts = {sources[name] for sources in SOURCES.values() if name in sources}
        assert len(texts) > 1, f"{name} is the same in all scripts: take it out of DIFFERENT"


def pins(text):
    """What a text pins, as name==version, without extras such as [visualize]."""
    return set(re.findall(r"\w+==[\d.]+", re.sub(r"\[\w+\]", "", text)))


def test_pins_are_those_of_requirements():
    """A script names its packages in its first lines, for `uv run` (PEP 723)."""
    for text in TEXT.values():
        block = text.partition("\n# ///\n")[0]
        packages = eval(re.search(r"dependencies = (.*\])", block)[1])
        assert len(pins(block)) == len(packages) > 0
        assert pins(block) <= pins((ROOT / "requirements.txt").read_text())
