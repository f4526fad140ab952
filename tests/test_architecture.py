"""The rules of the house, held by reading the source."""

import ast
import resource
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel

from vitctl.cli.app import app
from vitctl.cli.flags import MACHINE, WEIGHTS
from vitctl.recipe.load import every_key
from vitctl.recipe.schema import JOBS
from vitctl.recipe.sections import Model

PACKAGE = Path(__file__).resolve().parents[1] / "vitctl"
FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = [str(path.relative_to(PACKAGE)) for path in FILES]
TREES: dict[str, ast.Module] = {
    name: ast.parse(path.read_text()) for name, path in zip(NAMES, FILES, strict=True)
}

# A room imports itself and what lies on lower floors. Rooms on one floor do not see each other.
FLOORS = {
    "__main__": 16,
    "cli": 15,
    "launch": 14,
    "report": 13,
    "verify": 12,
    "export": 12,
    "bench": 12,
    "jobs": 11,
    "recipe": 8,
    "engine": 9,
    "analysis": 9,
    "data": 8,
    "data/inspect": 7,
    "data/datasets": 6,
    "data/loader": 5,
    "data/writer": 5,
    "data/source": 4,
    "data/shards": 3,
    "data/images": 2,
    "models": 2,
    "system": 1,
    "errors": 0,
    "__init__": 0,
}
FRONT_DOOR = "__init__.py"  # names what lies in the rooms above it; see test_init_files__are_empty
# Read by an unpickler of its own that knows four names; see the test below.
PLAIN_PICKLES = ("import pickle", "data/datasets/readers/arrays.py")

MAX_OPTIONS = 15


def part(name: str) -> str:
    """models, data, launch ...: what of the house a file belongs to."""
    return Path(name).parts[0].removesuffix(".py")


def room(name: str) -> str:
    """The longest key of `FLOORS` that a file or a module lies in."""
    parts = name.removesuffix(".py").split("/")
    return next(path for n in range(len(parts), 0, -1) if (path := "/".join(parts[:n])) in FLOORS)


def own_imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "vitctl")


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_house__was_found() -> None:
    assert len(FILES) >= 200
    assert {room(name) for name in NAMES} == set(FLOORS)


def test_imports__point_down() -> None:
    seen = 0
    for name, tree in TREES.items():
        for imported in own_imports(tree) if name != FRONT_DOOR else ():
            seen += 1
            target = imported.replace(".", "/").removeprefix("vitctl/").replace("vitctl", "__init__")
            above, below = room(name), room(target) if target.split("/")[0] in FLOORS else "__init__"
            assert FLOORS[below] < FLOORS[above] or above == below, f"{name} imports {imported}"
    assert seen > 1000


def test_imports__models_and_data_do_not_see_each_other() -> None:
    for name, tree in TREES.items():
        if part(name) in ("models", "data"):
            allowed = {part(name), "errors", "system"}
            assert {imported.split(".")[1] for imported in own_imports(tree)} <= allowed, name


def test_tests__mirror_the_house() -> None:
    """A file of tests lies in the folder of the module that it is named after."""
    tests = PACKAGE.parent / "tests"
    own: dict[str, set[str]] = {}
    for name in NAMES:
        own.setdefault(Path(name).stem, set()).add(str(Path(name).parent))
    wrong, seen = [], 0
    for path in tests.rglob("test_*.py"):
        folder, name = str(path.parent.relative_to(tests)), path.stem.removeprefix("test_")
        if (PACKAGE / folder).is_dir() and folder != "." and name in own:
            seen += 1
            if folder not in own[name]:
                wrong.append(f"{folder}/{path.name}")
    assert seen > 100
    assert wrong == []


def test_imports__have_no_cycle() -> None:
    """Among the imports of module level; those inside functions are for speed."""
    modules = {
        ("vitctl." + name.removesuffix(".py").replace("/", ".")).removesuffix(".__init__"): name
        for name in NAMES
    }
    edges: dict[str, set[str]] = {}
    for module, name in modules.items():
        top = ast.Module([n for n in TREES[name].body if isinstance(n, ast.Import | ast.ImportFrom)], [])
        found = set()
        for imported in own_imports(top):
            found |= {m for m in (imported, imported.rpartition(".")[0]) if m in modules and m != module}
        edges[module] = found
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for other in edges[module]:
                visit(other, (*path, module))
            done.add(module)

    for module in modules:
        visit(module, ())
    assert done == set(modules)


LAZY = [ast.Expr, ast.ImportFrom, ast.If]


def test_init_files__are_empty() -> None:
    inits = [path for path in FILES if path.name == "__init__.py"]
    assert len(inits) >= 9
    # The version, and what other programs import, which is loaded when it is asked for.
    own = {
        "__init__.py": [ast.Expr, ast.ImportFrom, ast.Assign, ast.Assign, ast.If],
        "data/__init__.py": LAZY,
    }
    assert [
        name for name in NAMES if name.endswith("__init__.py") and name not in own and TREES[name].body
    ] == []
    for name, shape in own.items():
        assert [type(node) for node in TREES[name].body] == shape
        (lazy,) = (node for node in TREES[name].body if isinstance(node, ast.If))
        assert ast.unparse(lazy.test) == "TYPE_CHECKING"
        assert {type(node) for node in lazy.body} == {ast.ImportFrom}


def test_front_door__is_for_others() -> None:
    """Our own modules import from where a name is defined: of `vitctl` itself they take the version alone."""
    taken = {
        alias.name
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "vitctl"
        for alias in node.names
    }
    modules = {path.name.removesuffix(".py") for path in PACKAGE.iterdir()}
    assert "__version__" in taken
    assert taken - modules == {"__version__"}


def test_names__no_utils() -> None:
    assert [name for name in NAMES if "util" in name or "helper" in name or "misc" in name] == []


def test_docstrings__every_public_function_and_class() -> None:
    missing, seen = [], 0
    for name, tree in TREES.items():
        if not name.endswith("__init__.py") and ast.get_docstring(tree) is None:
            missing.append(name)
        outer = [*tree.body]
        inner = [
            node
            for owner in outer
            if isinstance(owner, ast.ClassDef) and is_public(owner)
            for node in owner.body
        ]
        for node in (*outer, *inner):
            if (
                isinstance(node, ast.FunctionDef | ast.ClassDef)
                and is_public(node)
                and not _is_overload(node)
            ):
                seen += 1
                if ast.get_docstring(node) is None and not _is_protocol_or_forward(node):
                    missing.append(f"{name}:{node.name}")
    assert seen > 250
    assert missing == []


def _is_overload(node: ast.ClassDef | ast.FunctionDef) -> bool:
    return [ast.unparse(decorator) for decorator in node.decorator_list] == ["overload"]


def is_public(node: ast.ClassDef | ast.FunctionDef) -> bool:
    return not node.name.startswith("_")


def _is_protocol_or_forward(node: ast.stmt) -> bool:
    """What repeats a documented method of a base class of ours, or torch's `forward`."""
    return isinstance(node, ast.FunctionDef) and node.name in {"forward", *_OF_PROTOCOLS}


_OF_PROTOCOLS = {
    method.name
    for tree in TREES.values()
    for owner in ast.walk(tree)
    if isinstance(owner, ast.ClassDef) and "Protocol" in map(ast.unparse, owner.bases)
    for method in owner.body
    if isinstance(method, ast.FunctionDef) and ast.get_docstring(method)
}


def test_types__everything_is_annotated() -> None:
    bare = [
        f"{name}:{node.name}"
        for name, tree in TREES.items()
        for node in functions(tree)
        if node.returns is None
        or any(a.annotation is None and a.arg not in ("self", "cls") for a in node.args.args)
    ]
    assert bare == []


@cache
def calls(path: Path) -> str:
    """The source without comments, docstrings and messages, and without methods that happen to be called
    eval.
    """

    class Calls(ast.NodeVisitor):
        def visit_Constant(self, node: ast.Constant) -> None:
            if isinstance(node.value, str):
                node.value = ""

    tree = ast.parse(path.read_text())
    Calls().visit(tree)
    return ast.unparse(tree).replace(".eval()", "")


@pytest.mark.parametrize(
    "forbidden",
    [
        "import pickle",
        "torch.load(",
        "shell=True",
        "eval(",
        "exec(",
        "weights_only=False",
        "allow_pickle=True",
        "os.system",
    ],
)
def test_safety__nothing_unpickles_evaluates_or_runs_a_shell(forbidden: str) -> None:
    # The one door for pickles of others: tensors or nothing; the import is for the name of the refusal.
    door, opened = "models/weights/containers.py", "torch.load(path, map_location='', weights_only=True"
    for name, path in zip(NAMES, FILES, strict=True):
        source = calls(path)
        if name == door:
            assert source.count("pickle.") == source.count("pickle.UnpicklingError") == 1
            source = source.replace(opened, "").replace("import pickle", "")
        assert forbidden not in source or (forbidden, name) == PLAIN_PICKLES, name


def test_safety__the_name_of_a_split_becomes_a_path_in_the_writer_alone() -> None:
    """Every reader's splits go through `write_originals`, which checks their names."""
    users = [name for name, path in zip(NAMES, FILES, strict=True) if "write_split" in calls(path)]
    assert users == ["data/writer/write.py"]


def test_safety__the_one_unpickler_looks_nothing_up() -> None:
    """CIFAR is published as pickles. Its reader subclasses `Unpickler`, answers every name from a table of
    stand-ins, and leaves the module's own loaders alone."""
    tree = TREES[PLAIN_PICKLES[1]]
    attributes = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pickle"
    }
    assert attributes == {"Unpickler", "UnpicklingError"}
    (unpickler,) = (
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and "pickle.Unpickler" in map(ast.unparse, node.bases)
    )
    assert [node.name for node in unpickler.body if isinstance(node, ast.FunctionDef)] == ["find_class"]
    assert "super()" not in ast.unparse(unpickler)


def test_state__never_goes_through_accelerate() -> None:
    """Its loading unpickles, and its prepared loaders and schedulers drop data and skip steps."""
    never = {
        "save_state",
        "load_state",
        "register_for_checkpointing",
        "prepare",
        "prepare_data_loader",
        "prepare_scheduler",
    }
    calls = {
        (name, node.func.attr)
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert ("engine/runtime.py", "prepare_model") in calls
    assert {(name, attribute) for name, attribute in calls if attribute in never} == set()
    schedulers = [name for name, path in zip(NAMES, FILES, strict=True) if "lr_scheduler" in path.read_text()]
    assert schedulers == []


def test_recipe__every_key_is_read_by_a_job() -> None:
    """A knob that nobody turns is a lie about an experiment."""
    read = {
        node.attr
        for name, tree in TREES.items()
        if part(name) in ("jobs", "engine", "verify", "export", "bench", "launch")
        or name == "cli/show/dry_run.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    by_network = {*Model.model_fields, "target"}  # see Pretrain.network
    source = (PACKAGE / "recipe/schema.py").read_text()
    assert "self.model.model_dump(" in source
    assert "self.masked_patch.target" in source
    fields = {field for schema in JOBS.values() for field in _fields(schema)}
    assert len(fields) > 50
    assert fields - read - by_network - {"note"} == set()


def test_recipe__jobs_that_do_not_train_have_no_knobs_of_training() -> None:
    for job in ("fewshot", "evaluate", "export"):
        keys = every_key(JOBS[job])
        assert len(keys) > 8
        assert not {"evaluation.every_steps", "machine.micro_batch", "log.every_steps", "data.crop"} & set(
            keys
        )


def _fields(schema: type[BaseModel]) -> Iterator[str]:
    for name, field in schema.model_fields.items():
        yield name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _fields(field.annotation)


HEAVY = ("torch", "numpy", "pydantic", "accelerate", "PIL", "sklearn")


def test_cli__imports_nothing_heavy() -> None:
    code = f"import vitctl.cli.app, sys; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_jobs__a_training_on_one_device_imports_no_sharding() -> None:
    """FSDP takes longer to import than all of vitctl."""
    code = "import vitctl.jobs.pretrain, sys; print([name for name in sys.modules if name.startswith('torch.distributed.fsdp')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_cli__help_is_quick() -> None:
    """`accelerate --help` imports torch; ours must be far below torch alone."""

    def seconds(*command: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *command], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    ours = min(seconds("-m", "vitctl", "--help") for _ in range(2))
    assert ours < 0.5 * seconds("-c", "import torch")


def test_cli__at_most_fifteen_options() -> None:
    """Of its own; where a job runs and which weights it takes is said by eight more, the same for all, in
    panels of their own.
    """

    def options(command: Any, path: str) -> Iterator[tuple[str, int, set[str]]]:
        inner = getattr(command, "commands", {})
        for name, sub in inner.items():
            yield from options(sub, f"{path} {name}")
        if not inner:
            shared = {
                p.name for p in command.params if getattr(p, "rich_help_panel", "") in (MACHINE, WEIGHTS)
            }
            yield path, len(command.params) - len(shared), shared

    found = list(options(typer.main.get_command(app), "vitctl"))
    counts = {name: count for name, count, _ in found}
    shared_by_all = {"processes", "precision", "slurm", "nodes", "restarts"} | {"from_", "model", "weights"}
    assert set.union(*(shared for _, _, shared in found)) == shared_by_all
    assert {
        "vitctl pretrain",
        "vitctl finetune",
        "vitctl vtab",
        "vitctl data shards",
        "vitctl recipes diff",
    } <= set(counts)
    assert len(counts) >= 17
    assert {name: count for name, count in counts.items() if count > MAX_OPTIONS} == {}


def test_cli__help_names_every_command_and_an_example() -> None:
    """The first lines of a command's help show a line to type."""
    command: Any = typer.main.get_command(app)
    for name in ("pretrain", "finetune", "fewshot", "vtab", "evaluate", "predict", "inspect", "export"):
        assert f"For example: vitctl {name}" in (command.commands[name].help or "")
