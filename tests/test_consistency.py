"""The collection as a whole: twins are the same, and what is imported is declared.

Scripts share no code, so shared code is duplicated. What has the same name in several scripts (a
function, a class, a constant; in the trio also a flag) is the same to the letter, except for those
in the table of twins.py, which copies a change from one script to the others.
"""

import ast
import difflib
import re
import sys
import tomllib

import pytest
from conftest import GRID, LEARNERS, ROOT, SCRIPTS, load, path_of
from twins import DIFFERENT, NAMES, SOURCES, groups_of


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
        "of tests/twins.py which scripts agree, and why the others differ."
    )
    if different:
        lines = [line for name in different for line in differences(name)]
        pytest.fail("\n".join([*lines, what_to_do]), pytrace=False)


def test_what_the_table_calls_different_is_different():
    for name in DIFFERENT:
        texts = [SOURCES[group[0]][name] for group in groups_of(name)]
        assert len(set(texts)) == len(texts) > 1, f"two groups of {name} agree: join them"


def test_gpus_have_the_same_options_in_all_learners_with_networks_or_features():
    """Those for CPUs differ, since each was measured."""
    options = [load(script).COMPILER_OPTIONS["gpu"] for script in LEARNERS if script != GRID]
    assert all(other == options[0] for other in options[1:])


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
