"""The structure of the package: what imports what, where tests lie, what may never be called."""

import ast
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from pydantic import BaseModel

from tests.matrix import each
from tests.sources import FILES, NAMES, PACKAGE, nodes, trees
from vitctl.recipe.schema import JOBS
from vitctl.recipe.sections import Model

PUBLIC = "__init__.py"  # loads its names lazily, from packages above it; see test_public.py

# A package imports itself and packages on lower levels. Packages on one level do not import each other.
LEVELS = {
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
# The only reader of pickles: its unpickler knows four names; see below.
ARRAYS = "data/datasets/readers/arrays.py"


def package(name: str) -> str:
    """Return the longest key of `LEVELS` that a file or a module lies in."""
    parts = name.removesuffix(".py").split("/")
    return next(path for n in range(len(parts), 0, -1) if (path := "/".join(parts[:n])) in LEVELS)


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield the modules and names of vitctl that a tree imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "vitctl")


def test_imports__of_files_make_no_circle() -> None:
    """Imports within functions and for types count too: who reads one file need not read the other first."""
    graph = {}
    for name, tree in trees().items():
        ends = {imported.replace(".", "/").removeprefix("vitctl/") for imported in imports(tree)}
        ends |= {end.rpartition("/")[0] for end in ends}  # the module of a name
        graph[name] = {f"{end}.py" for end in ends} & set(NAMES) if name != PUBLIC else set()
    assert sum(map(len, graph.values())) > 1000
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def test_imports__point_down() -> None:
    assert {package(name) for name in NAMES} == set(LEVELS)
    seen, wrong = 0, []
    for name, tree in trees().items():
        for imported in imports(tree) if name != PUBLIC else ():
            seen += 1
            target = imported.replace(".", "/").removeprefix("vitctl/").replace("vitctl", "__init__")
            above, below = package(name), package(target) if target.split("/")[0] in LEVELS else "__init__"
            if LEVELS[below] >= LEVELS[above] and above != below:
                wrong.append(f"{name} imports {imported}")
    assert wrong == []
    assert seen > 1000


def test_imports__models_and_data_are_separate() -> None:
    for name, tree in trees().items():
        top = name.split("/")[0]
        if top in ("models", "data"):
            assert {imported.split(".")[1] for imported in imports(tree)} <= {top, "errors", "system"}, name


def test_imports__have_no_cycle() -> None:
    """Only imports at module level count; those inside functions make the start faster."""
    modules = {
        ("vitctl." + name.removesuffix(".py").replace("/", ".")).removesuffix(".__init__"): name
        for name in NAMES
    }
    edges: dict[str, set[str]] = {}
    for module, name in modules.items():
        top = ast.Module([n for n in trees()[name].body if isinstance(n, ast.Import | ast.ImportFrom)], [])
        named = {part for imported in imports(top) for part in (imported, imported.rpartition(".")[0])}
        edges[module] = named & set(modules) - {module}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for other in edges[module]:
                visit(other, (*path, module))
            done.add(module)

    for module in modules:
        visit(module, ())


def test_imports__fsdp_only_inside_functions() -> None:
    """FSDP takes longer to import than all of vitctl, and a training on one device does not need it."""
    top = [
        node
        for tree in trees().values()
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert not [line for line in map(ast.unparse, top) if "torch.distributed.fsdp" in line]
    assert any("torch.distributed.fsdp" in path.read_text() for path in FILES)


def test_imports__help_needs_nothing_but_typer() -> None:
    """Nor slow modules of Python, which would add a quarter to the tenth of a second that it takes."""
    slow = "multiprocessing.reduction statistics asyncio http.client unittest sqlite3 email"
    code = (
        "import sys; before = {*sys.modules}; from vitctl.__main__ import main; sys.argv[1:] = ['--help']\n"
        "try: main()\n"
        "finally: new = {*sys.modules} - before; parts = {name.partition('.')[0] for name in new}; "
        f"print(sorted(parts - sys.stdlib_module_names), sorted(new & {{*{slow.split()}}}), file=sys.stderr)"
    )
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, capture_output=True, text=True, check=True, env=os.environ | {"TERM": "dumb"})
    assert "All commands" in done.stdout
    assert done.stderr == "['annotated_doc', 'shellingham', 'typer', 'vitctl'] []\n"


@pytest.mark.slow
def test_imports__a_training_leaves_out_the_parts_of_torch_that_it_does_not_use(tmp_path: Path) -> None:
    """Torch's optimizers import its compiler, `to_empty` sympy, and accelerate sharded tensors."""
    line = f"pretrain --recipe smoke --synthetic --steps 1 --set schedule.warmup_steps=0 --out {tmp_path}/run"
    slow = ("torch._dynamo", "torch._inductor", "sympy", "torch.distributed.tensor", "vitctl.export.export")
    code = (
        f"import sys; from vitctl.cli.app import main; sys.argv[1:] = {line.split()}\n"
        f"try: main()\nfinally: print([name for name in {slow} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_files__have_unique_names() -> None:
    """A trace or an editor's tab then says where one is."""
    counts = Counter(path.name for path in FILES if path.name != "__init__.py")
    assert [name for name, count in counts.items() if count > 1] == []


def test_files__tests_lie_beside_their_module() -> None:
    tests = PACKAGE.parent / "tests"
    folders: dict[str, set[str]] = {}
    for path in FILES:
        folders.setdefault(path.stem, set()).add(str(path.parent.relative_to(PACKAGE)))
    seen, wrong = 0, []
    for path in tests.rglob("test_*.py"):
        folder, name = str(path.parent.relative_to(tests)), path.stem.removeprefix("test_")
        if folder != "." and (PACKAGE / folder).is_dir() and name in folders:
            seen += 1
            wrong += [f"{folder}/{path.name}"] if folder not in folders[name] else []
    assert wrong == []
    assert seen > 70


@cache
def calls(path: Path) -> str:
    """Return the source without comments and texts, and without the method eval of networks."""

    class Texts(ast.NodeTransformer):
        def visit_Constant(self, node: ast.Constant) -> ast.Constant:
            return ast.Constant("") if isinstance(node.value, str) else node

    return ast.unparse(Texts().visit(ast.parse(path.read_text()))).replace(".eval()", "")


@each(
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
    # The only place that loads pickled weights: tensors or nothing. It imports pickle for the name of an
    # error.
    door, opened = "models/weights/containers.py", "torch.load(path, map_location='', weights_only=True"
    for name, path in zip(NAMES, FILES, strict=True):
        source = calls(path) if forbidden in path.read_text() or name == door else ""
        if name == door:
            assert source.count("pickle.") == source.count("pickle.UnpicklingError") == 1
            source = source.replace(opened, "").replace("import pickle", "")
        assert forbidden not in source or (forbidden, name) == ("import pickle", ARRAYS), name


def test_safety__only_the_writer_makes_a_path_of_a_split() -> None:
    """It checks the name of the split, which comes from a reader."""
    named = [name for name in NAMES if "write_split" in (PACKAGE / name).read_text()]
    users = [name for name in named if "write_split" in calls(PACKAGE / name)]
    assert users == ["data/writer/shard_writer.py"]


def test_safety__the_unpickler_of_cifar_looks_nothing_up() -> None:
    """It subclasses `Unpickler` and answers every name from a table of stand-ins."""
    tree = trees()[ARRAYS]
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
    """accelerate unpickles what it loads, and its loaders and schedulers drop data and skip steps."""
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
        for name, found in nodes().items()
        for node in found
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert ("engine/runtime.py", "prepare_model") in calls
    assert {(name, attribute) for name, attribute in calls if attribute in never} == set()
    schedulers = [
        name for name, path in zip(NAMES, FILES, strict=True) if "optim.lr_scheduler" in path.read_text()
    ]
    assert schedulers == []


def test_recipe__every_key_is_read_by_a_job() -> None:
    """A key without an effect would misreport an experiment."""
    read = {
        node.attr
        for name, found in nodes().items()
        if name.split("/")[0] in ("jobs", "engine", "verify", "export", "bench", "launch")
        or name in ("cli/show/dry_run.py", "recipe/known.py")
        for node in found
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    by_network = {*Model.model_fields, "target"}  # see Pretrain.network
    source = (PACKAGE / "recipe/schema.py").read_text()
    assert "self.model.model_dump(" in source
    assert "self.masked_patch.target" in source
    fields = {field for schema in JOBS.values() for field in _fields(schema)}
    assert len(fields) > 50
    assert fields - read - by_network - {"note"} == set()


def _fields(schema: type[BaseModel]) -> Iterator[str]:
    for name, field in schema.model_fields.items():
        yield name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _fields(field.annotation)
