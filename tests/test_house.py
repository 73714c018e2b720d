"""What the house's rules say about its code, for as far as nothing else checks it."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

import everstep

PLUGIN = Path(everstep.__file__).parent


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined_in(tree):
    """The names that a file gives to functions, classes, variables and attributes of its own objects."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name


def inherited(tree):
    """The names that a file uses of its own objects and of their bases, and those that it looks up."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super")), attr=name):
                yield name
            case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(value=name), *_]):
                yield str(name)


def test_private_names_of_other_packages_stand_in_a_rooms_private_file_alone():
    """Those of bases, and as words; ruff sees the others (SLF001, PLC2701)."""
    trees = {path: ast.parse(path.read_text()) for path in PLUGIN.rglob("*.py") if path.name != "private.py"}
    ours = {name for tree in trees.values() for name in defined_in(tree)}
    found = {str(path.relative_to(PLUGIN)): {*filter(is_private, inherited(tree))} for path, tree in trees.items()}
    assert {path: names - ours for path, names in found.items() if names - ours} == {}


def test_torchtitans_data_and_checkpoints_are_named_in_one_file():
    """A release that renames them is met there."""
    named = re.compile(r"torchtitan\.(components\.(dataloader|tokenizer|checkpoint)|hf_datasets)")
    found = {str(path.relative_to(PLUGIN)) for path in PLUGIN.rglob("*.py") if named.search(path.read_text())}
    assert found == {"titan/names.py"}


def test_no_files_import_each_other_in_a_circle():
    graph = grimp.build_graph("everstep", cache_dir=None)
    imports = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    TopologicalSorter(imports).prepare()


CUDA = {"titan/cpu.py", "launch/machine.py", "quorum/communicator.py"}
"""Files that name CUDA: attention kernels, the environment, NCCL. torchtitan's `disable_cuda_graphs` is not meant."""


def test_devices_are_asked_for_by_pytorchs_general_names():
    naming = {
        str(path.relative_to(PLUGIN))
        for path in PLUGIN.rglob("*.py")
        if "cuda" in path.read_text().lower().replace("disable_cuda_graphs", "")
    }
    assert naming == CUDA
