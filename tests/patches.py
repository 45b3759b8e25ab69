"""Recipes that are patches: which scripts one is made for, and scripts that are changed by them."""

import importlib.util
import re
import shutil
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


def apply(recipe, script, folder):
    """Change a script in a folder, as the page says. Return what git complains about."""
    patch = patch_of(recipe)
    diff = patch.read_text().replace(scripts_of(patch)[0], script)
    command = ["git", "apply", "-"]
    return subprocess.run(command, cwd=folder, input=diff, capture_output=True, text=True).stderr


@cache
def changed(*recipes, script=None):
    """Copy a script into an empty folder, change it there as a user would, and import it."""
    script = script or scripts_of(patch_of(recipes[0]))[0]
    copy = Path(tempfile.mkdtemp(dir=FOLDER.name)) / script
    shutil.copy(path_of(script), copy)
    for recipe in recipes:
        if complaint := apply(recipe, script, copy.parent):
            pytest.fail(f"{recipe}, {script}:\n{complaint}", pytrace=False)
    spec = importlib.util.spec_from_file_location("_".join([*recipes, copy.stem]), copy)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.COMPILER_OPTIONS = {}  # compiles faster
    return module
