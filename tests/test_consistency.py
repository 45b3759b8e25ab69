"""The collection as a whole: twins are the same, and what is imported is declared.

Scripts share no code, so shared code is duplicated. Functions, classes, constants and flags of the
same name are the same in all scripts that have them, except for those in the table below.
"""

import ast
import difflib
import re
import sys
import tomllib

import pytest
from conftest import CAR, DECAY, GRID, LEARNERS, PARALLEL, REINFORCE, REPLAY, ROOT, SCRIPTS, TRIO

TEXT = {script: (ROOT / script).read_text() for script in SCRIPTS}

# Name: the groups of scripts that agree, and why the groups differ. A script that is in no group
# agrees with no other.
DIFFERENT = {
    "RUNS_AT_ONCE": ([[REPLAY, DECAY]], "what fits into a cache was measured for each"),
    "COMPILER_OPTIONS": ([TRIO], "what is fast was measured for each"),
    "LOOPS": ([], "the limit suits the size of the loop"),
    "parse_args": ([], "each script has flags of its own"),
    "main": ([LEARNERS, [CAR]], "the car learns nothing"),
    "TrainState": ([[REPLAY, DECAY]], "replay needs a buffer; the others learn something else"),
    "Step": ([], "REINFORCE keeps what its loss needs, the car what --save writes"),
    "optimizer": ([TRIO, [REINFORCE]], "only the linear learners have constants, the centers"),
    "init_state": ([[REPLAY, DECAY]], "replay needs a buffer; the others learn something else"),
    "select_action": (
        [TRIO, [GRID]],
        "the grid world breaks ties at random: its table starts at 0",
    ),
    "vector_step": ([[PARALLEL, REPLAY]], "epsilon decays"),
    "train_step": ([[REPLAY, DECAY]], "replay learns from a buffer; the others are other methods"),
    "train_interval": ([[REPLAY, DECAY]], "parallel_td.py takes several steps for an update"),
    "evaluate": ([TRIO], "each method learns something else"),
    "play": ([], "REINFORCE plays to learn, the car to roll out"),
    "report": ([[*TRIO, REINFORCE]], "the grid world has no greedy returns"),
    "draw": ([TRIO], "REINFORCE has --gif, the grid world draws a table"),
    "plot": ([[*TRIO, REINFORCE]], "the grid world draws a table"),
}
# The same for flags, among the trio.
DIFFERENT_FLAGS = {
    "--batch-size": ([[REPLAY, DECAY]], "only parallel_td.py rounds it up to whole steps"),
    "--learning-rate": ([[REPLAY, DECAY]], "replay is stable with smaller steps only"),
}


def definitions(script):
    """The source of each function, class and constant of a script, with its comments."""
    found = {}
    for node in ast.parse(TEXT[script]).body:
        source = ast.get_source_segment(TEXT[script], node)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = source
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = source
    return found


def flags(script):
    """The source of each flag of a script."""
    calls = [node for node in ast.walk(ast.parse(TEXT[script])) if isinstance(node, ast.Call)]
    sources = [ast.unparse(call) for call in calls]
    found = [re.match(r"\w+\('(--[\w-]+)'", source) for source in sources]
    return {match[1]: match.string for match in found if match}


FUNCTIONS = {script: definitions(script) for script in SCRIPTS}
FLAGS = {script: flags(script) for script in TRIO}


def names_of_twins(sources):
    names = [name for of_script in sources.values() for name in of_script]
    return sorted(name for name in set(names) if names.count(name) > 1)


WHAT_TO_DO = """
Copy the change to the other scripts that have it. Or write into DIFFERENT (for flags: into
DIFFERENT_FLAGS) of tests/test_consistency.py which scripts agree, and why the others differ:
    "td_loss": ([[REPLAY, DECAY]], "parallel_td.py has no Huber loss"),"""


def fail_if_different(name, one, two, first, second):
    """Say which scripts differ, where, and what to do."""
    lines = one.splitlines(), two.splitlines()
    difference = "\n".join(difflib.unified_diff(*lines, first, second, lineterm="", n=1))
    if one != two:
        message = f"{name} differs between {first} and {second}:\n{difference}\n{WHAT_TO_DO}"
        pytest.fail(message, pytrace=False)


def check_group(sources, name, scripts):
    first, *others = scripts
    for other in others:
        fail_if_different(name, sources[first][name], sources[other][name], first, other)


def groups_of(sources, table, name):
    """The scripts that have a name, in groups that must agree."""
    having = [script for script in sources if name in sources[script]]
    if name not in table:
        return [having]
    groups = [list(group) for group in table[name][0]]
    alone = [[script] for script in having if not any(script in group for group in groups)]
    return groups + alone


@pytest.mark.parametrize("name", names_of_twins(FUNCTIONS))
def test_functions_of_the_same_name_are_the_same(name):
    for group in groups_of(FUNCTIONS, DIFFERENT, name):
        check_group(FUNCTIONS, name, group)


@pytest.mark.parametrize("name", names_of_twins(FLAGS))
def test_flags_of_the_trio_are_the_same(name):
    for group in groups_of(FLAGS, DIFFERENT_FLAGS, name):
        check_group(FLAGS, name, group)


def stale(sources, table, name):
    """Groups of the table that agree with another one: they should be one group."""
    groups = groups_of(sources, table, name)
    texts = [sources[group[0]][name] for group in groups]
    return [groups[i] for i, text in enumerate(texts) if texts.index(text) != i]


def test_the_table_says_that_scripts_differ_only_where_they_do():
    for name in DIFFERENT:
        assert not stale(FUNCTIONS, DIFFERENT, name), f"{name}: join these groups in the table"
    for name in DIFFERENT_FLAGS:
        assert not stale(FLAGS, DIFFERENT_FLAGS, name), f"{name}: join these groups in the table"


@pytest.mark.parametrize("script", LEARNERS[1:])
def test_what_follows_the_marked_line_is_the_same_to_the_letter(script):
    def helpers(script):
        return TEXT[script].partition("\n# From here on, nothing is about learning")[2]

    assert helpers(script), f"{script} has no marked line"
    one, two = helpers(LEARNERS[0]), helpers(script)
    fail_if_different("What follows the marked line", one, two, LEARNERS[0], script)


@pytest.mark.parametrize("script", SCRIPTS[1:])
def test_conditions_at_the_top_level_are_the_same(script):
    """What a script does when it is a command: a backend, a job, the call of main."""

    def conditions(script):
        nodes = [node for node in ast.parse(TEXT[script]).body if isinstance(node, ast.If)]
        return "\n".join(ast.unparse(node) for node in nodes)

    one, two = conditions(SCRIPTS[0]), conditions(script)
    fail_if_different("What a command does", one, two, SCRIPTS[0], script)


def pins():
    """The lines of requirements.txt, without comments."""
    text = (ROOT / "requirements.txt").read_text()
    return set(re.findall(r"^[^#\s]+", text, re.MULTILINE))


def declared_by(script):
    """The PEP 723 block of a script."""
    block = re.match(r"# /// script\n(.*?)# ///\n", TEXT[script], re.DOTALL).group(1)
    return tomllib.loads(re.sub(r"^# ?", "", block, flags=re.MULTILINE))


@pytest.mark.parametrize("script", SCRIPTS)
def test_pins_are_those_of_requirements(script):
    assert set(declared_by(script)["dependencies"]) <= pins()


@pytest.mark.parametrize("script", SCRIPTS)
def test_python_is_bounded_by_what_was_tried(script):
    assert declared_by(script)["requires-python"] == ">=3.11,<3.14"


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_is_imported_is_declared(script):
    imported = set(re.findall(r"^ *(?:import|from) (\w+)", TEXT[script], re.MULTILINE))
    declared = {re.match("[a-z]+", pin)[0] for pin in declared_by(script)["dependencies"]}
    bundled = {"numpy", "flax"}  # NumPy comes with jax, Flax and Matplotlib with gymnax[visualize]
    if "gymnax" in declared:
        bundled.add("matplotlib")
    assert imported - sys.stdlib_module_names - bundled <= declared


def test_no_script_imports_another():
    own = {script.removesuffix(".py") for script in SCRIPTS}
    for text in TEXT.values():
        assert not own & set(re.findall(r"^ *(?:import|from) (\w+)", text, re.MULTILINE))
