"""Recipes that are patches: which scripts one is made for, and scripts that are changed by them."""

import importlib.util
import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest
from conftest import RECIPES, path_of

FOLDER = tempfile.TemporaryDirectory()  # of the changed scripts


def patch_of(recipe):
    """The path of a recipe."""
    return RECIPES / f"{recipe}.patch"


def scripts_of(patch):
    """The scripts that the head of a patch names. The first one is that of its diff."""
    sentence = re.search(r"^Made for [^:]*?\.$", patch.read_text(), re.MULTILINE)
    return re.findall(r"\w+\.py", sentence[0])


def apply(patch, script, text):
    """The text of a script with a recipe, and what git complains about if it does not fit."""
    diff = patch.read_text().replace(scripts_of(patch)[0], script)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / script
        copy.write_text(text)
        command = ["git", "apply", "-"]
        process = subprocess.run(command, cwd=folder, input=diff, capture_output=True, text=True)
        return copy.read_text(), process.stderr


@cache
def changed(*recipes, script=None):
    """Import a copy of a script that recipes have changed. The copy is alone in a folder."""
    script = script or scripts_of(patch_of(recipes[0]))[0]
    text = path_of(script).read_text()
    for recipe in recipes:
        text, complaint = apply(patch_of(recipe), script, text)
        if complaint:
            pytest.skip(f"{recipe} does not apply to {script}: a test of its own says why")
    copy = Path(tempfile.mkdtemp(dir=FOLDER.name)) / script
    copy.write_text(text)
    spec = importlib.util.spec_from_file_location("_".join([*recipes, copy.stem]), copy)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.COMPILER_OPTIONS = {}  # compiles faster
    return module
