"""The rules of the house, read off the source: who may import whom, how long files are, what they are called.

Each rule is a function from files to complaints; it is first shown something bad, then the repository.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# The rooms, from the ground up, and what each may import besides itself; a room below another in the table is never imported
# by it. A room is a folder; of a folder that is several rooms, the files named here are one of their own.
# data_prep and benchmarks are scripts that stand on everything; nothing stands on them.
ALGS = {"algs.method", "algs.parts", "algs.introspection", "algs"}
PLUGINS = {"plugins"}
CONFIGS = {"configs.blocks", "configs.rules", "configs.reading", "configs"}
DATA = {"data_feeds.reading", "data_feeds.chat", "data_feeds.prompts", "data_feeds.examples", "data_feeds"}
REWARDS = {"rewards.scoring", "rewards.sandbox", "rewards.judge", "rewards"}
ROLLOUTS = {"rollouts.vllm", "rollouts"}
FLOOR_1 = {"orchestration.cluster", "orchestration.metrics"}
FLOOR_2 = FLOOR_1 | {"orchestration.model", "orchestration.weight_transfer", "orchestration.run"}
FLOOR_3 = FLOOR_2 | {"orchestration.trainer", "orchestration.engines"}
FLOOR_4 = FLOOR_3 | {"orchestration.rl", "orchestration.start", "orchestration.step_debugger"}
BELOW = {"records", *ALGS, *PLUGINS, *CONFIGS, *DATA, *REWARDS, *ROLLOUTS}
ROOMS: dict[str, set[str]] = {
    "records": set(),
    "algs.method": set(),
    "algs.parts": {"algs.method"},
    "algs": {"algs.method", "algs.parts"},
    "algs.introspection": {"algs.method", "algs.parts", "algs"},
    "plugins": ALGS,
    "configs.blocks": {"plugins"},
    "configs.rules": {*ALGS, "plugins", "configs.blocks"},
    "configs.reading": {*ALGS, "plugins", "configs.blocks", "configs.rules"},
    "configs": {*ALGS, "plugins", "configs.blocks", "configs.rules", "configs.reading"},
    "rewards.sandbox": set(),
    "rewards.judge": set(),
    "rewards.scoring": {"configs.blocks", "plugins", "records"},
    "rewards": {"plugins", "records", "rewards.sandbox", "rewards.judge", "rewards.scoring"},
    "data_feeds.reading": {"configs.blocks", "plugins", "records"},
    "data_feeds.chat": {"records"},
    "data_feeds.prompts": {"configs.blocks", "records", "data_feeds.reading", "data_feeds.chat"},
    "data_feeds.examples": {"configs.blocks", "plugins", "records", *DATA - {"data_feeds", "data_feeds.examples"}},
    "data_feeds": {*CONFIGS, "plugins", "records", *DATA},
    "rollouts.vllm": {"configs.blocks", "plugins", "records"},
    "rollouts": {"configs.blocks", "plugins", "records", *REWARDS, *DATA, "rollouts.vllm"},
    "rollouts.environments": {"records", "rollouts"},
    "rollouts.filters": {"plugins", "records", "rollouts"},
    **dict.fromkeys(sorted(FLOOR_1), BELOW),
    **dict.fromkeys(sorted(FLOOR_2 - FLOOR_1), BELOW | FLOOR_1),
    **dict.fromkeys(sorted(FLOOR_3 - FLOOR_2), BELOW | FLOOR_2),
    **dict.fromkeys(sorted(FLOOR_4 - FLOOR_3), BELOW | FLOOR_3),
    "orchestration.supervised": BELOW | FLOOR_4,
    "eval": BELOW | FLOOR_4,
    "main": BELOW | FLOOR_4 | {"orchestration.supervised", "eval"},
}
FILES_OF_ROOMS = {"algs.records": "algs.method"}  # the public vocabulary of methods
SCRIPTS = {"data_prep", "benchmarks"}
ALGS_MAY_IMPORT = {"torch", "algs", *sys.stdlib_module_names}
VLLM_ROOM, VLLM_INTERNALS = "rollouts/vllm/", "rollouts/vllm/internals.py"
PUBLIC_OF_VLLM = {  # what vLLM documents
    "vllm", "vllm.outputs", "vllm.sampling_params", "vllm.logger", "vllm.lora.request", "vllm.engine.arg_utils",
    "vllm.distributed.weight_transfer.base", "vllm.distributed.weight_transfer.factory",
}  # fmt: skip
ATTIC_NAMES = {"common", "helper", "helpers", "misc", "util", "utils"}
MAX_LINES = 400
MAX_METHOD_LINES = 80
CODE_SUFFIXES = {".py", ".sh", ".js", ".css", ".html", ".yaml", ".toml"}


def tracked_files() -> dict[str, str]:
    """Text of every file in the repository (tracked, or new and not ignored), by its path from the root."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode != 0:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    texts = {}
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            raw = (ROOT / name).read_bytes()
            if b"\0" not in raw:
                texts[name] = raw.decode()
    return texts


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    return tracked_files()


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def room_of(module: str) -> str:
    """Return the room that a module (or a name in it) belongs to: the longest prefix that is a room."""
    parts = module.split(".")
    if parts[0].startswith("main_"):
        return "main"
    for end in range(len(parts), 0, -1):
        prefix = ".".join(parts[:end])
        if prefix in FILES_OF_ROOMS or prefix in ROOMS:
            return FILES_OF_ROOMS.get(prefix, prefix)
    return parts[0]


def imports(path: str, source: str) -> list[tuple[ast.stmt, str]]:
    """Every import statement, wherever it stands, and what it names: `from a import b` names a.b."""
    found: list[tuple[ast.stmt, str]] = []
    for node in ast.walk(ast.parse(source, path)):
        if isinstance(node, ast.Import):
            found += [(node, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write the import in full; relative ones hide the room"
            found += [(node, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def code_of_ours(files: dict[str, str]) -> dict[str, str]:
    return {p: s for p, s in files.items() if p.endswith(".py") and not p.startswith("unit_tests/")}


def floor_complaints(files: dict[str, str]) -> list[str]:
    """Imports of a higher floor; those inside functions and for types only count as well."""
    return [
        f"{path}:{node.lineno}: {room} may not import {name}"
        for path, source in code_of_ours(files).items()
        if (room := room_of(module_of(path))) in ROOMS
        for node, name in imports(path, source)
        if room_of(name) in (ROOMS.keys() | SCRIPTS) - {room} - ROOMS[room]
    ]


def algs_complaints(files: dict[str, str]) -> list[str]:
    return [
        f"{path}:{node.lineno}: algs imports torch and the standard library only, not {name}"
        for path, source in code_of_ours(files).items()
        if path.startswith("algs/")
        for node, name in imports(path, source)
        if name.split(".")[0] not in ALGS_MAY_IMPORT
    ]


def vllm_complaints(files: dict[str, str]) -> list[str]:
    """Imports of vLLM outside its room, and of what vLLM does not document outside the one file for that."""
    complaints = []
    for path, source in code_of_ours(files).items():
        if path.startswith("benchmarks/") or path == VLLM_INTERNALS:
            continue
        for node, name in imports(path, source):
            if name.split(".")[0] != "vllm":
                continue
            if not path.startswith(VLLM_ROOM):
                complaints.append(f"{path}:{node.lineno}: only {VLLM_ROOM} imports vLLM, not {name} here")
            elif not {name, name.rpartition(".")[0]} & PUBLIC_OF_VLLM or "._" in name:
                complaints.append(f"{path}:{node.lineno}: {name} is not documented by vLLM; use it in {VLLM_INTERNALS}")
    return complaints


def import_cycles(files: dict[str, str]) -> list[str]:
    """Cycles between modules; imports for types and imports inside functions count as well."""
    modules = {module_of(path): (path, source) for path, source in code_of_ours(files).items()}
    graph = {}
    for module, (path, source) in modules.items():
        named = {name for _, name in imports(path, source)}
        graph[module] = {m for m in modules if m != module and any(n == m or n.rpartition(".")[0] == m for n in named)}
    cycles, done = [], set()

    def visit(module: str, trail: list[str]) -> None:
        if module in trail:
            cycles.append(" -> ".join([*trail[trail.index(module) :], module]))
        elif module not in done:
            for target in sorted(graph[module]):
                visit(target, [*trail, module])
            done.add(module)

    for module in sorted(graph):
        visit(module, [])
    return cycles


def size_complaints(files: dict[str, str]) -> list[str]:
    complaints = []
    for path, source in files.items():
        lines = source.count("\n")
        if Path(path).suffix in CODE_SUFFIXES and lines > MAX_LINES:
            complaints.append(f"{path}: {lines} lines, over {MAX_LINES}; split it along what it does")
        if path.startswith("algs/") and is_method_file(path, source) and lines > MAX_METHOD_LINES:
            complaints.append(f"{path}: {lines} lines; a method is at most {MAX_METHOD_LINES}")
    return complaints


def is_method_file(path: str, source: str) -> bool:
    classes = [node for node in ast.walk(ast.parse(source, path)) if isinstance(node, ast.ClassDef)]
    return any(isinstance(base, ast.Name) and base.id == "PolicyMethod" for node in classes for base in node.bases)


def name_complaints(files: dict[str, str]) -> list[str]:
    return [
        f"{path}: '{part}' says nothing about what is inside"
        for path in files
        for part in Path(path).parts
        if Path(part).stem in ATTIC_NAMES
    ]


# A path that exists on somebody's machine only. /dev, /proc, /usr and /etc are the same everywhere.
MACHINE_PATH = re.compile(r"(?<![\w.$}~:/-])/(?:work|root|home|tmp|mnt|opt|farm|Users|scratch)/[\w.-]+")


def path_complaints(files: dict[str, str]) -> list[str]:
    return [
        f"{path}:{number}: {found.group()} exists on one machine"
        for path, source in files.items()
        for number, line in enumerate(source.splitlines(), start=1)
        if (found := MACHINE_PATH.search(line))
    ]


LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)[^)]*\)")
HTML_LINK = re.compile(r'<(?:a|img)\b[^>]*?(?:href|src)="([^"]+)"')
FENCE = re.compile(r"^```.*?^```|<!--.*?-->", re.MULTILINE | re.DOTALL)  # code and comments
NAMED_FILE = re.compile(
    r"`((?:algs|benchmarks|configs|data_feeds|data_prep|docs|eval|orchestration|requirements|rewards|rollouts|unit_tests)"
    r"/[\w./-]+\.(?:py|yaml|md|in|lock|sh|svg))`"
)


def anchors_of(markdown: str) -> set[str]:
    """Anchors of a page's headings, the way GitHub makes them."""
    headings = re.findall(r"^#+ +(.*)$", FENCE.sub("", markdown), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def link_complaints(files: dict[str, str]) -> list[str]:
    """Links inside the repository that lead nowhere, and files that a page names but that are not there."""
    complaints = []
    for path, source in files.items():
        if not path.endswith(".md"):
            continue
        prose = FENCE.sub("", source)
        for target in LINK.findall(prose) + HTML_LINK.findall(prose):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            resolved = (ROOT / path).parent.joinpath(name).resolve() if name else ROOT / path
            here = str(resolved.relative_to(ROOT)) if resolved.is_relative_to(ROOT) else str(resolved)
            if here not in files and not resolved.exists():
                complaints.append(f"{path}: the link {target} leads nowhere")
            elif anchor and here in files and anchor not in anchors_of(files[here]):
                complaints.append(f"{path}: {here} has no heading #{anchor}")
        for name in NAMED_FILE.findall(prose):
            if name not in files and "my_" not in name:
                complaints.append(f"{path}: names {name}, which does not exist")
    return complaints


def mirror_complaints(files: dict[str, str]) -> list[str]:
    """Tests that do not lie where what they test lies: unit_tests/ROOM/test_X.py is of ROOM/X.py, or of the room itself, where X
    may go on with an aspect (_LIKE_THIS). At the top lie tests of pages and of the house; in e2e/ they go by subject."""
    names: dict[str, set[str]] = {"": {"house_rules", "docs"}}
    for path in files:
        parent = str(Path(path).parent)
        if path.endswith(".py") and not path.startswith("unit_tests/"):
            names.setdefault(parent, {Path(parent).name}).add(Path(path).stem.strip("_"))
        elif path.endswith(".md"):
            names[""].add(Path(path).stem.lower())
    complaints = []
    for path in files:
        room, _, name = path.removeprefix("unit_tests/").rpartition("/")
        if not path.startswith("unit_tests/") or not re.match(r"test_\w+\.py", name) or room.startswith("e2e"):
            continue
        words = name.removeprefix("test_").removesuffix(".py")
        if not any(f"{words}_".startswith(f"{one}_") for one in names.get(room, ())):
            complaints.append(f"{path}: {room or 'the repository'} has no file whose test this is, by its name")
    return complaints


BAD_HOUSE = [
    (
        floor_complaints,
        {"rewards/a.py": "import orchestration.rl.loop"},
        "rewards may not import orchestration.rl.loop",
    ),
    (floor_complaints, {"configs/a.py": "from rollouts.worker import X"}, "configs may not import rollouts"),
    (
        floor_complaints,
        {"data_feeds/a.py": "from rollouts import worker"},
        "data_feeds may not import rollouts.worker",
    ),
    (floor_complaints, {"orchestration/rl/a.py": "def f():\n    import eval.report"}, "may not import eval.report"),
    (floor_complaints, {"eval/a.py": "from data_prep import smollm2"}, "may not import data_prep"),
    (floor_complaints, {"records/rollout.py": "from rewards import gsm8k"}, "records may not import rewards"),
    (algs_complaints, {"algs/a.py": "import numpy as np"}, "not numpy"),
    (algs_complaints, {"algs/a.py": "from records.rollout import Prompt"}, "not records.rollout"),
    (
        vllm_complaints,
        {"eval/a.py": "def f():\n    from vllm import LLM"},
        "eval/a.py:2: only rollouts/vllm/ imports vLLM",
    ),
    (vllm_complaints, {"rollouts/vllm/a.py": "from vllm.v1.engine import x"}, "vllm.v1.engine.x is not documented"),
    (import_cycles, {"eval/a.py": "import eval.b", "eval/b.py": "from eval import a"}, "eval.a -> eval.b -> eval.a"),
    (
        import_cycles,
        {"eval/a.py": "import eval.b", "eval/b.py": "import eval.c", "eval/c.py": "import eval.a"},
        "eval.c",
    ),
    (
        import_cycles,
        {"eval/a.py": "if TYPE_CHECKING:\n    import eval.b", "eval/b.py": "def f():\n    from eval import a"},
        "eval.a -> eval.b -> eval.a",
    ),
    (size_complaints, {"eval/a.py": "x = 1\n" * 401}, "401 lines"),
    (size_complaints, {"algs/a.py": "class A(PolicyMethod):\n    x = 1\n" + "#\n" * 79}, "81 lines"),
    (name_complaints, {"eval/utils.py": ""}, "utils.py"),
    (name_complaints, {"misc/a.py": ""}, "misc"),
    (path_complaints, {"a.yaml": "path: " + "/" + "home/ann/model"}, "a.yaml:1"),
    (link_complaints, {"docs/A.md": "[x](B.md)"}, "B.md leads nowhere"),
    (link_complaints, {"docs/A.md": "# One\n[x](#two)"}, "no heading #two"),
    (link_complaints, {"docs/A.md": "see `algs/nothing.py`"}, "names algs/nothing.py"),
    (mirror_complaints, {"eval/a.py": "", "unit_tests/eval/test_ab.py": ""}, "eval has no file"),
    (mirror_complaints, {"eval/a.py": "", "unit_tests/test_a.py": ""}, "the repository has no file"),
]


@pytest.mark.parametrize(("rule", "house", "complaint"), BAD_HOUSE)
def test_rule_sees_what_it_is_for(rule, house, complaint) -> None:
    found = rule(house)
    assert len(found) >= 1
    assert complaint in found[0]


GOOD_HOUSE = {
    "algs/a.py": "import math\nimport torch\nfrom algs.method import PolicyMethod",
    "rewards/a.py": "from records.rollout import Prompt\nfrom plugins import kinds\nimport re",
    "rollouts/b.py": "from rollouts import records\nfrom data_feeds import chat",
    "main_x.py": "from orchestration import loop",
    "benchmarks/a.py": "import orchestration.rl.loop\nfrom vllm import LLM",
    "rollouts/vllm/a.py": "from vllm import SamplingParams\nfrom vllm.outputs import CompletionOutput",
    "rollouts/vllm/internals.py": "from vllm.v1.engine import x",
    "unit_tests/algs/test_a_in_bfloat16.py": "",
    "unit_tests/rollouts/vllm/test_vllm.py": "",
    "unit_tests/test_a.py": "",
    "unit_tests/e2e/test_anything.py": "",
    "docs/A.md": "# One two\n[x](#one-two) [web](https://example.org) `rewards/a.py`\n```\n[no](link.md)\n```",
    "a.txt": "https://example.org/tmp/x and runs/tmp/x and /dev/shm and $HOME/tmp/x",
}
RULES = [
    floor_complaints,
    algs_complaints,
    vllm_complaints,
    import_cycles,
    size_complaints,
    name_complaints,
    path_complaints,
    link_complaints,
    mirror_complaints,
]


@pytest.mark.parametrize("rule", RULES)
def test_rule_lets_good_houses_be(rule) -> None:
    assert rule(GOOD_HOUSE) == []


@pytest.mark.parametrize("rule", RULES)
def test_repository_keeps_the_rule(rule, files) -> None:
    complaints = rule(files)
    assert not complaints, "\n" + "\n".join(complaints)


def test_rooms_stand_on_those_before_them() -> None:
    """Rooms are in a strict order, so that there is no circle between them either."""
    order = list(ROOMS)
    upward = [
        (room, other) for room, below in ROOMS.items() for other in below if order.index(other) > order.index(room)
    ]
    assert upward == []


def test_lock_files_name_no_registry(files) -> None:
    locks = {path: text for path, text in files.items() if path.endswith(".lock")}
    assert len(locks) >= 3
    named = [path for path, text in locks.items() if re.search(r"://|index-url|find-links", text)]
    assert named == []
