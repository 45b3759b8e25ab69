"""The collection as a whole: twins, imports, pins."""

import ast
import re
import sys
import tomllib

from conftest import LEARNERS, ROOT, SCRIPTS

TEXT = {name: (ROOT / name).read_text() for name in SCRIPTS}
# What differs: scripts (in conftest.py's order) with one number agree. The names may change.
DIFFERS = """parse_args 012345, main 000001, init_state 011234, TrainState 01123-,
td_target 011---, vector_step 001---, train_interval 00012-, evaluate 00012-, select_action 0001--,
draw 00012-, plot 00010-, report 00010-, Step ----01, play ----01, train_step 01123-,
--batch-size 011---, --learning-rate 011---"""


def tree_of(node):  # comments, line breaks and docstrings do not show
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(inner):
            del inner.body[0]
    return ast.dump(node)


def test_twins_are_identical_but_for_the_list_and_the_launcher_is_to_the_letter():
    found, same, differs = {}, [], {}
    for i, text in enumerate(TEXT.values()):
        trees = {tree_of(node): getattr(node, "name", None) for node in ast.parse(text).body}
        same.append([tree for tree in trees if "CORES" in tree or tree.startswith("If")])
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        flags = [re.match(r"[\w.]+\('(--[\w-]+)'", ast.unparse(call)) for call in calls if i < 3]
        trees |= {flag.string: flag[1] for flag in flags if flag}  # of the trio
        for tree, name in trees.items():
            found.setdefault(name, {})[i] = tree
    del found[None]  # statements that are no functions
    for name, trees in found.items():
        kinds = list(dict.fromkeys(trees.values()))
        numbers = [str(kinds.index(trees[i])) if i in trees else "-" for i in range(6)]
        differs |= {name: "".join(numbers)} if len(kinds) > 1 else {}
    assert sorted(differs.values()) == sorted(re.findall(r" ([\d-]{6})", DIFFERS)), differs
    assert same == [same[0]] * 6 and len(same[0]) == 5
    assert len({TEXT[name].partition("\n# From here on, all")[2] for name in LEARNERS}) == 1


def test_imports_are_declared_and_pins_are_those_of_requirements():
    pins = re.findall(r"^[^#\s]+", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    for text in TEXT.values():
        block = re.match(r"# /// script\n(.*?)# ///\n", text, re.DOTALL).group(1)
        block = tomllib.loads(re.sub(r"^# ?", "", block, flags=re.MULTILINE))["dependencies"]
        assert {*block} - {"matplotlib"} <= {*pins}
        wanted = {*re.findall(r"^ *(?:import|from) (\w+)", text, re.MULTILINE)}
        extra = {"numpy", "flax", "matplotlib", "jaxlib", "six"}  # they come with the others
        declared = {re.match("[a-z]+", pin)[0] for pin in block} - extra
        assert declared == wanted - extra - sys.stdlib_module_names
