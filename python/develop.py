"""Makes a build tree importable in the environment that runs this: a path file, the package's metadata with its entry
points, and the command `fulmen`. Nothing is copied, so a rebuild needs no new install. Run by `make build`.

    .venv/bin/python python/develop.py build
"""

import pathlib
import sys
import sysconfig
import tomllib

root = pathlib.Path(__file__).resolve().parent.parent


def write(path, text):
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def main(build):
    package = (root / build / "python").resolve()
    if not list((package / "fulmen").glob("_core*.so")):
        sys.exit(f"develop: {package}/fulmen has no _core extension; build first")
    with open(root / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    name, version = project["name"], project["version"]
    site = pathlib.Path(sysconfig.get_path("purelib"))
    scripts = pathlib.Path(sysconfig.get_path("scripts"))
    info = site / f"{name}-{version}.dist-info"
    entry_points = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    files = {
        site / f"{name}.pth": f"{package}\n",
        info / "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: {project['description']}\n",
        info / "INSTALLER": "fulmen-develop\n",
        info / "entry_points.txt": "\n".join(
            f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
            for group, entries in entry_points.items()
        ),
    }
    for key, value in project.get("scripts", {}).items():
        module, function = value.split(":")
        files[scripts / key] = (
            f"#!{sys.executable}\nimport sys\n\nfrom {module} import {function}\n\nif __name__ == \"__main__\":\n    sys.exit({function}())\n"
        )
    for path, text in files.items():
        write(path, text)
    for key in project.get("scripts", {}):
        (scripts / key).chmod(0o755)
    record = info / "RECORD"
    lines = [f"{path.relative_to(site, walk_up=True) if sys.version_info >= (3, 12) else path},,\n" for path in [*files, record]]
    write(record, "".join(lines))
    print(f"fulmen {version} runs from {package}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
