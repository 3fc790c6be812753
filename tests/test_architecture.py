"""The shape of the project: imports point one way, files and functions stay short, every setting explains itself."""

import ast
import dataclasses
from pathlib import Path

import pytest

import sao
from sao.config import RunConfig, describe
from sao.config_tree import field_docstrings

ROOT = Path(sao.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
STAGES = (
    "types", "clock", "store", "algorithm", "observe", "envs", "models", "engines", "rollout", "pipeline", "training",
    "evaluate", "cluster", "loop", "intake", "orchestrator", "interruptions", "config_tree", "recipes", "config",
    "resume", "build", "evaluator", "stages", "single", "preflight_engines", "preflight", "progress", "study",
    "simulate", "cli", "entry",
)  # fmt: skip
MAX_FILE, MAX_FUNCTION = 400, 60


def module_of(path: Path) -> str:
    return ".".join(("sao", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {module_of(path) for path in FILES}


def own_imports(tree: ast.AST) -> list[tuple[str, int]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "sao":
            # `from sao.package import file` imports the file.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [(name if name in MODULES else node.module, node.col_offset) for name in names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, node.col_offset) for alias in node.names if alias.name.split(".")[0] == "sao"]
    return found


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_point_one_way(path: Path) -> None:
    """Catches a stage that reaches for a later one, and an import hidden in a function."""
    module = module_of(path)
    if module == "sao":
        return
    stage = module.split(".")[1]
    assert stage in STAGES, f"{module}: add the stage {stage} to the order, with a reason in docs/log.md"
    for imported, indent in own_imports(ast.parse(path.read_text())):
        assert indent == 0, f"{module} imports {imported} inside a function"
        if imported == "sao":
            continue
        other = imported.split(".")[1]
        assert STAGES.index(other) <= STAGES.index(stage), f"{module} (stage {stage}) imports {imported}"


def test_no_cycles_within_a_stage() -> None:
    """Catches two files of one stage that import each other."""
    edges = {module_of(path): {name for name, _ in own_imports(ast.parse(path.read_text()))} for path in FILES}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"cycle: {' -> '.join((*trail, module))}"
        if module in done:
            return
        for other in edges.get(module, ()):
            visit(other, (*trail, module))
        done.add(module)

    for module in edges:
        visit(module, ())


def test_the_method_imports_torch_only() -> None:
    """Catches a dependency that would keep others from lifting the method out."""
    allowed = {"torch", "dataclasses", "typing", "functools", "math", "collections", "sao"}
    for path in (ROOT / "algorithm").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert name.split(".")[0] in allowed, f"{path.name} imports {name}"
                assert not name.startswith("sao.") or name.startswith("sao.algorithm"), f"{path.name} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_budgets(path: Path) -> None:
    """Catches the file, or the function, that does everything."""
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE, f"{path.name} has {len(text.splitlines())} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= MAX_FUNCTION, f"{path.name}: {node.name} has {length} lines"


def test_the_one_page_is_one_page() -> None:
    """Catches the method growing beyond what one reads in one go."""
    assert len((ROOT / "algorithm" / "sao.py").read_text().splitlines()) <= 150


def test_every_setting_explains_itself() -> None:
    """Catches a knob whose meaning, unit or reason nobody wrote down."""
    silent = [key for key, _, meaning in describe() if len(meaning) < 15]
    assert not silent
    assert all(len(meaning) >= 10 for meaning in field_docstrings(RunConfig).values())


def silent_fields(node: ast.ClassDef) -> list[str]:
    """Public fields of a class that no line of text follows."""
    return [
        field.target.id
        for field, following in zip(node.body, [*node.body[1:], None], strict=True)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and not field.target.id.startswith("_")
        and not (
            isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        )
    ]


def test_every_record_explains_itself_and_its_fields() -> None:
    """Catches a class without a docstring, and a field of a record whose meaning, shape or unit nobody wrote down."""
    for path in FILES:
        tree = ast.parse(path.read_text())
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{module_of(path)}.{node.name} has no docstring"
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                record = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
                silent = silent_fields(node) if record else []
                assert not silent, f"{module_of(path)}.{node.name}: no line under {', '.join(silent)}"


def test_configuration_is_frozen() -> None:
    """Catches settings that a part could change under the others."""
    assert dataclasses.fields(RunConfig)
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().seed = 1  # type: ignore[misc]
