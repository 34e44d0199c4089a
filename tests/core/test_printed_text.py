"""Test that no module of the package parses text that it, or a program of ours, prints for people.

The check follows the output of started commands through the variables, functions, fields and
threads of each module. It reports comparisons, `match` statements, `int()`, `float()` and text
methods that use the output. Our code loads JSON instead.

It does not see everything. For example, it misses output in a dictionary, in a file that is opened
again by its path (unless the path is called stdout or stderr), in the arguments of a lambda or
`pool.submit`, and in the result of a library function that `KEEPING` does not list.
"""

import ast
from collections.abc import Iterator

import pytest

from tests.core.test_imports import sources, tree_of

GLOBAL = "in every module"  # the scope of fields, because any module can read them
# Names of what a started command prints
OUTPUTS = {"stdout", "stderr", "check_output", "getoutput", "communicate"}
MATCHING = {"match", "search", "fullmatch", "findall", "finditer", "sub", "split", "rsplit"}
MATCHING |= {"startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition"}
MATCHING |= {"find", "rfind", "index", "rindex", "count"}
# Functions that return (parts of) their arguments. The results of other functions are not text.
KEEPING = {"list", "tuple", "set", "sorted", "reversed", "enumerate", "zip", "iter", "next", "str"}
KEEPING |= {"filter", "map", "bytes", "repr", "open"}
ALLOWED = {  # {module: matches}, each with the reason why the text is not ours, or not for people
    "accel_demo.anatomy.devices": {  # CHILD prints only this number, and only for devices.py
        "int(child.communicate()[0])"
    },
    "accel_demo.lab.doctor.launches": {
        "line.startswith('PROBE ')",  # the rest of the line is JSON
        "line.removeprefix('PROBE ')",
        r"re.sub('^\\[rank\\d+\\]:\\s?', '', line)",  # the traceback of a launcher or a library
        r"re.search('\\w', line)",
        r"re.match('[\\w.]*(Error|Exception): ', line)",
        "re.search('CalledProcessError|ChildFailedError', line)",
    },
    "accel_demo.lab.cables": {
        r"keeper.stdout.readline() != 'ready\n'",  # from `echo`
        "keeper.stderr.read().split()",  # joins the lines of the message of unshare or mount
    },
    "accel_demo.lab.nodes.node": {
        r"'\r' in text",  # a progress bar
        r"text.split('\r')",
        "'address already in use' in text.lower()",  # the C library's text for EADDRINUSE
        "expected in text",  # the user names the text, with --cut-after or --kill-after
    },
}


def scopes(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield each function with its name, and the statements outside of functions with ""."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
    definitions = (ast.FunctionDef, ast.ClassDef)
    yield "", ast.Module([line for line in tree.body if not isinstance(line, definitions)], [])


def texts_in(node: ast.AST) -> Iterator[str]:
    """Yield the names whose text is in the value. The names of attributes begin with a dot."""
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "sys":
        return
    if isinstance(node, ast.Name | ast.Attribute):
        yield node.id if isinstance(node, ast.Name) else f".{node.attr}"
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        keeps = name in KEEPING or name.startswith("re.") or name.endswith((".join", "match"))
        children = [node.func, *(node.args if keeps else [])]
    for child in children:
        yield from texts_in(child)


def parameters_of(tree: ast.Module) -> dict[str, tuple[str, list[str]]]:
    """Map each function to the scope and names of its parameters, and each class to its fields."""
    parameters = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            names = [each.arg for each in node.args.args if each.arg != "self"]
            parameters[node.name] = (node.name, names)
        if isinstance(node, ast.ClassDef):
            fields = [line.target for line in node.body if isinstance(line, ast.AnnAssign)]
            parameters[node.name] = (GLOBAL, [ast.unparse(field) for field in fields])
    return parameters


def assignments(tree: ast.Module) -> Iterator[tuple[str, ast.AST, str, ast.AST]]:
    """Yield (scope of the target, target, scope of the value, value)."""
    parameters = parameters_of(tree)
    for scope, function in scopes(tree):
        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                yield from ((scope, target, scope, node.value) for target in node.targets)
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr | ast.AugAssign) and node.value:
                yield scope, node.target, scope, node.value
            elif isinstance(node, ast.For | ast.comprehension):
                yield scope, node.target, scope, node.iter
            elif isinstance(node, ast.withitem) and node.optional_vars:
                yield scope, node.optional_vars, scope, node.context_expr
            elif isinstance(node, ast.Return | ast.Yield) and node.value:
                for name in (scope, f".{scope}"):
                    yield "", ast.Name(name), scope, node.value
            elif isinstance(node, ast.Call):
                called, arguments = node.func, list(node.args)
                keywords = {keyword.arg: keyword.value for keyword in node.keywords}
                if isinstance(called, ast.Attribute) and called.attr in ("append", "extend"):
                    yield scope, called.value, scope, node.args[0]
                if "target" in keywords and isinstance(keywords.get("args"), ast.List | ast.Tuple):
                    called, arguments = keywords["target"], keywords["args"].elts  # of a thread
                name = getattr(called, "id", getattr(called, "attr", ""))
                place, names = parameters.get(name, ("", []))
                dot = "." if place == GLOBAL else ""
                for parameter, value in [*zip(names, arguments, strict=False), *keywords.items()]:
                    if name in parameters:
                        yield place, ast.Name(f"{dot}{parameter}"), scope, value
                    if parameter in OUTPUTS:  # a command writes to this file
                        yield scope, value, scope, ast.Name(parameter)


def matches(modules: dict[str, str]) -> dict[str, set[str]]:
    """Return each expression that matches the output of a command, by module."""
    trees = {module: tree_of(source) for module, source in modules.items()}
    # (module, scope, name) of what contains output. Fields of classes are known in every module.
    known = {("", GLOBAL, dot + name) for name in OUTPUTS for dot in ("", ".")}

    def is_output(module: str, scope: str, *values: ast.AST) -> bool:
        names = {name for value in values for name in texts_in(value)}
        places = [("", GLOBAL), (module, ""), (module, scope)]
        return any((*place, name) in known for place in places for name in names)

    flows = [(name, *flow) for name, tree in trees.items() for flow in assignments(tree)]
    size = 0
    while size < len(known):
        size = len(known)
        for module, scope, target, value_scope, value in flows:
            if is_output(module, value_scope, value):
                for part in [target, *getattr(target, "elts", [])]:
                    if isinstance(part, ast.Name):
                        known.add(("" if scope == GLOBAL else module, scope, part.id))
                    if isinstance(part, ast.Attribute):
                        known.add((module, "", f".{part.attr}"))
    found = {}
    for module, tree in trees.items():
        for scope, function in scopes(tree):
            for node in ast.walk(function):
                values = []
                if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in MATCHING:
                    values = [node.func, *node.args]
                if isinstance(node, ast.Call) and ast.unparse(node.func) in ("int", "float"):
                    values = node.args
                if isinstance(node, ast.Compare):
                    values = [node.left, *node.comparators]
                if isinstance(node, ast.Match):
                    values = [node.subject]
                if is_output(module, scope, *values):
                    found.setdefault(module, set()).add(ast.unparse(node).splitlines()[0])
    return found


def test_the_package_matches_only_the_output_of_other_programs():
    assert matches(sources()) == ALLOWED


PLANTED = {
    "a regular expression on a file that a command writes to": r"""
def result(launch):
    return re.search(r"^resumed from (.+), after step (\d+)$", launch.stdout.read_text(), re.M)
""",
    "a regular expression on the file object of a command": """
def run(command):
    with tempfile.TemporaryFile("w+") as stderr:
        process = start(command, stderr)
        errors = stderr.read()
    if message := re.search(r"^error: (.*)$", errors, re.MULTILINE):
        raise UserError(message[1])
""",
    "a comprehension over a field that another module fills": """
def read(timed):
    return [EVALUATION.match(line) for line in timed.printed_lines]
""",
    "words in a variable": """
def first_step(timed, first_line):
    line, *_ = timed.printed_lines
    if not line.startswith(first_line):
        raise RuntimeError(line)
""",
    "the last word of a line, outside of functions": """
threads = run_to_end(command).stdout.splitlines()[0].split()[-1]
""",
    "the second operator of a comparison": """
def is_last(launch, step):
    return 0 < step == launch.stdout
""",
    "a match statement": """
def has_ended(process):
    match process.stdout.readline():
        case "done":
            return True
""",
    "a number": """
loss = float(run_to_end(command).stdout.splitlines()[-1])
""",
    "a log file with any name": """
def loss_of(command):
    with open("train.log", "w+") as log:
        subprocess.run(command, stdout=log)
        return LOSS.search(log.read())
""",
    "a function that returns lines, and a function that takes them": """
def output_of(command):
    return subprocess.check_output(command).decode().splitlines()

def is_alone(lines):
    first, *_ = lines
    return first == "1 process on cpu"

def check(command):
    is_alone(output_of(command))
""",
    "a thread that collects lines in a list": """
class Watch:
    def start(self, process):
        threading.Thread(target=self.read, args=[process.stdout]).start()

    def read(self, stream):
        for line in stream:
            self.seen.append(line)

    def has_ended(self):
        return "done: " in self.seen[-1]
""",
}


# A module whose field contains printed lines
FILLING = """
class Timed:
    printed_lines: list[str]

def run_timed(command):
    lines = []
    for line in start(command).stdout:
        lines.append(line.rstrip())
    return Timed(lines)
"""


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_match_is_found(planted):
    found = matches(
        {**{name: sources()[name] for name in ALLOWED}, "filling": FILLING, "planted": planted}
    )
    assert len(found.pop("planted")) == 1
    assert found == ALLOWED


def test_json_and_text_from_elsewhere_are_not_reported():
    source = """
def read(process, path):
    result = json.loads(process.stdout.readline())
    name, _, value = path.read_text().partition(":")
    return result["name"] == name and value.startswith("x") and int(result["step"]) == 1
"""
    assert matches({"module": source}) == {}
