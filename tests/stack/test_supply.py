"""What comes from others: every file with its hash, every package with its licence, and nothing is unpickled."""

import ast
import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from services.tools.licences import FILE, NOT_HERE, UNSTATED, licence, table
from services.tools.lock import BUILD, EXTRAS, LOCKS, OF_TORCH, is_of, needed, pins

ROOT = Path(__file__).parents[2]
ENTRY = re.compile(r"(?P<pin>[a-z0-9-]+==\S+)(?: \\\n    --hash=sha256:[0-9a-f]{64})+\n")
BANNED_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.hub.load", "torch.jit.load"}
UNBOXED = {"Environment", "jinja2.Environment", "jinja2.Template"}  # templates that reach Python


def locked(text: str) -> dict[str, str]:
    """Version by name. Whatever is not a pin with hashes fails."""
    _, _, body = text.partition("\n")
    found = [match["pin"] for match in ENTRY.finditer(body)]
    assert ENTRY.sub("", body) == "", "a line that pip would not take with --require-hashes"
    return dict(pin.split("==") for pin in found)


@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_is_all_that_its_extra_brings_along(name: str) -> None:
    versions = pins()
    wanted = {package: versions[package] for package in needed(EXTRAS[name], versions)}
    assert locked((LOCKS / f"{name}.txt").read_text()) == wanted, "run `make locks`"


def test_what_builds_the_package_is_locked_too() -> None:
    [build] = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert locked((LOCKS / f"{BUILD}.txt").read_text()) == dict([build.split("==")])


def test_the_lock_check_can_fail() -> None:
    good = f"# \na==1 \\\n    --hash=sha256:{'0' * 64}\n"
    assert locked(good) == {"a": "1"}
    for bad in (good.replace("sha256", "md5"), good.replace("0000", "000"), "# \na==1\n", good.replace("==", ">=")):
        with pytest.raises(AssertionError, match="require-hashes"):
            locked(bad)


def test_files_for_other_systems_are_left_out() -> None:
    assert is_of("uvloop-0.23.0-cp311-cp311-manylinux_2_28_x86_64.whl", "0.23.0")
    assert is_of("xxhash-4.1.0-cp39-abi3-manylinux2014_aarch64.whl", "4.1.0")
    assert is_of("jinja2-3.1.6-py3-none-any.whl", "3.1.6")
    for other in ("cp311-cp311-win_amd64", "cp313-cp313-manylinux_2_28_x86_64", "cp311-cp311-musllinux_1_2_x86_64"):
        assert not is_of(f"uvloop-0.23.0-{other}.whl", "0.23.0")
    assert not is_of("jinja2-3.1.5-py3-none-any.whl", "3.1.6")
    assert not is_of("jinja2-3.1.6.tar.gz", "3.1.6")


@pytest.mark.parametrize("name", ["api", "engine"])
def test_the_images_are_made_of_what_is_locked(name: str) -> None:
    recipe = (ROOT / f"Dockerfile.{name}").read_text()
    assert f"--require-hashes --requirement {name}.txt" in recipe
    assert "--require-hashes --requirement build.txt" in recipe


def test_every_package_has_a_licence() -> None:
    rows = [line.split("\t") for line in FILE.read_text().splitlines()[1:]]
    stated = {name: (version, text) for name, version, text in rows}
    assert {name: version for name, (version, _) in stated.items()} == pins(), "run `make locks`"
    for name, (_, text) in stated.items():
        try:
            metadata.metadata(name)
        except metadata.PackageNotFoundError:
            continue
        assert text in (licence(name), NOT_HERE), "run `make locks`"
    assert all(
        text != NOT_HERE or name.startswith(OF_TORCH) or name == "async-timeout" for name, (_, text) in stated.items()
    )
    assert [name for name, (_, text) in stated.items() if text == UNSTATED] == ["promql-parser"], "of the tests only"
    assert licence("jinja2") != licence("numpy")
    assert len(table().splitlines()) == 1 + len(pins())


def test_nothing_that_is_installed_asks_for_the_source_of_ours() -> None:
    """The licences of the GNU family, but for the lesser one, would."""
    strict = re.compile(r"\bA?GPL|GNU (Affero )?General", re.IGNORECASE)
    assert [line for line in FILE.read_text().splitlines() if strict.search(line)] == []
    assert strict.search("GNU General Public License v3")
    assert strict.search("AGPL-3.0-only")
    assert not strict.search("LGPL-2.1")


def dangers(source: str) -> Iterator[str]:
    """Every place that could run what it reads."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"{node.lineno}: import {name}" for name in names if name.split(".")[0] in BANNED_MODULES)
        elif isinstance(node, ast.Call):
            called, options = ast.unparse(node.func), {one.arg: ast.unparse(one.value) for one in node.keywords}
            banned = called in BANNED_CALLS | UNBOXED
            banned |= called == "torch.load" and options.get("weights_only") != "True"
            banned |= called == "yaml.load" or called.endswith(".extractall")
            banned |= options.get("allow_pickle", "False") != "False" or options.get("shell", "False") != "False"
            banned |= options.get("trust_remote_code", "False") != "False"
            if banned:
                yield f"{node.lineno}: {ast.unparse(node)[:80]}"


def test_nothing_is_run_that_was_read() -> None:
    files = [path for top in ("services", "kernels", "tests", "demo") for path in (ROOT / top).rglob("*.py")]
    assert len(files) > 300
    found = {str(path.relative_to(ROOT)): list(dangers(path.read_text())) for path in files}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import a, marshal as b",
        "from shelve import open",
        "from joblib.x import y",
        "eval(text)",
        "exec(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "yaml.load(text, Loader=x)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(text, shell=True)",
        "os.system(text)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
        "archive.extractall(folder)",
        "jinja2.Environment().from_string(text)",
    ],
)
def test_the_look_for_dangers_can_fail(source: str) -> None:
    assert list(dangers(source))
    assert not list(
        dangers("import re\nre.compile(x)\nmodel.eval()\ntorch.load(p, weights_only=True)\nyaml.safe_load(x)")
    )


def test_what_security_promises_is_there() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    paths = re.findall(r"`((?:tests|services)/[\w./]+)`", text)
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []
    settings = set(re.findall(r"THIMBLE_[A-Z_]+", text))
    example = (ROOT / ".env.example").read_text()
    assert {name for name in settings if f"{name}=" not in example} == set()
