"""The command `fulmen`: claims, explain, run, bench, targets, executors. Each takes --json.

Exit codes: 0 done; 1 the thing asked for can't be done (a refusal where --require asked for a claim, a failed run);
2 usage: unknown options, names or specs that can't be read.
"""

import argparse
import builtins
import importlib.util
import inspect
import json
import logging
import math
import os
import sys
import traceback

from fulmen import _core


class UsageError(Exception):
    """What the user wrote can't be understood; exit code 2."""


def main(arguments=None):
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        return options.command(options) or 0
    except UsageError as error:
        return _fail(options, "usage", error, 2)
    except _core.Error as error:
        return _fail(options, type(error).__name__, error, 1)
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        what = ": ".join(str(part) for part in (error.filename, error.strerror) if part) or str(error)
        return _fail(options, "OSError", what, 1)
    except KeyboardInterrupt:
        return _fail(options, "interrupted", "interrupted", 1)
    except Exception as error:  # of the user's model, or of PyTorch while it runs it
        # Dynamo's errors go on with hints for its own developers.
        text = str(error).partition("\n  Hint:")[0] if type(error).__module__.startswith("torch._dynamo") else str(error)
        return _fail(options, type(error).__name__, f"{type(error).__name__}: {text or 'no message'}{_raised_at(error)}", 1)


def _fail(options, kind, error, code):
    text = str(error).removeprefix(f"{options.name}: ")
    if getattr(options, "json", False):
        print(json.dumps({"error": {"kind": kind, "message": text}}))
    shown = "".join(c if c == "\n" or c.isprintable() else ascii(c)[1:-1] for c in text)
    print(f"fulmen {options.name}: {shown}", file=sys.stderr)
    return code


def _raised_at(error):
    """" (file.py, line 3)": the last line of the user's own that an error passed through, else the last line."""
    frames = traceback.extract_tb(error.__traceback__)
    own = os.path.dirname(os.path.realpath(__file__))
    users = [f for f in frames if os.path.exists(f.filename) and "site-packages" not in f.filename and not os.path.realpath(f.filename).startswith(own)]
    last = (users or frames)[-1] if frames else None
    return f" ({last.filename}, line {last.lineno})" if last else ""


def build_parser():
    parser = argparse.ArgumentParser(prog="fulmen", description="A deep-learning compiler that says who runs what, and why.")
    parser.add_argument("--version", action="version", version="fulmen 0.1.0")
    commands = parser.add_subparsers(dest="name", required=True, metavar="command")

    def add(name, function, text):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(command=function)
        command.add_argument("--json", action="store_true", help="print JSON")
        return command

    c = add("claims", run_claims, "which executor would run a call, and why the others would not; nothing is run")
    c.add_argument("op", help="an op of the catalogue, usually sdpa")
    for name in ("q", "k", "v"):
        c.add_argument(f"--{name}", metavar="SPEC", help=f"sdpa: {name}, e.g. 'bf16[2,32,4096,128]'; a '!' at the end wants a gradient")
    c.add_argument("--mask", metavar="SPEC", help="sdpa: the mask, bool or float")
    c.add_argument("--causal", action="store_true", help="sdpa: is_causal")
    c.add_argument("--dropout", type=float, default=0.0, metavar="P")
    c.add_argument("--scale", type=float, metavar="S")
    c.add_argument("--gqa", action="store_true", help="sdpa: enable_gqa")
    c.add_argument("--window", metavar="LEFT,RIGHT", help="sdpa: sliding window; -1 is no limit")
    c.add_argument("--lower-right", action="store_true", help="sdpa: the causal corner is the last key")
    c.add_argument("--softcap", type=float, default=0.0, metavar="S")
    c.add_argument("--input", action="append", default=[], metavar="SPEC", help="other ops: an operand; repeat in order")
    c.add_argument("--attr", action="append", default=[], metavar="NAME=VALUE", help="other ops: an attribute, as JSON")
    c.add_argument("--deterministic", action="store_true", help="only executors with bitwise equal results")
    c.add_argument("--training", action="store_true", help="forward and backward")
    c.add_argument("--target", default=None, metavar="NAME", help="cpu, cuda, h200, ... or a JSON file; see `fulmen targets`")
    c.add_argument("--executors", metavar="LIST", help="names, in the order they are asked, with commas")
    c.add_argument("--require", metavar="EXECUTOR", help="exit with 1 unless this one claims the call")

    c = add("explain", run_explain, "what a model's program becomes, who runs each op and why")
    c.add_argument("what", metavar="FILE.py:FUNCTION", help="a Python path and a function that returns (module, inputs)")
    c.add_argument("--html", metavar="FILE", help="write a self-contained report")
    c.add_argument("--stage", metavar="NAME", help="print the trace after this stage only")
    c.add_argument("--executors", metavar="LIST", help="names, in the order they are asked, with commas")

    c = add("run", run_trace, "replays a trace file on random inputs")
    c.add_argument("file", help="a trace as Fulmen prints it; - is standard input")
    c.add_argument("--seed", type=int, default=0)
    c.add_argument("--repeats", type=int, default=1)
    c.add_argument("--check", action="store_true", help="compare with the reference executor; a difference above 1%% is a failure")
    c.add_argument("--executors", metavar="LIST", help="names, in the order they are asked, with commas")

    c = add("bench", run_bench, "measures Fulmen beside its peers, alternating, in one process")
    c.add_argument("what", choices=("attention", "train", "overhead", "claims"))
    c.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    c.add_argument("--peers", default=None, metavar="LIST", help="torch, inductor; with a comma")
    c.add_argument("--only", metavar="TEXT", help="rows whose name has this in it")
    c.add_argument("--repeats", type=int, default=None, help="measurements of each, the median counts")
    c.add_argument("--dtype", metavar="LIST", help="fp32,bf16")

    c = add("targets", run_targets, "what can be compiled for or asked about")
    c.add_argument("--save", nargs="+", metavar=("[NAME] FILE", ""), help="write a target's description to a JSON file; without a name that of the GPU at hand")

    add("executors", run_executors, "the executors, in the order they are asked, and whether each can be used here")
    return parser


def _names(text):
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _resolved(text):
    from fulmen._executors import resolve

    try:
        return resolve(_names(text))
    except _core.UnsupportedError as error:
        raise UsageError(str(error)) from None


def _spec(text, option):
    if text is None:
        return None
    try:
        return _core.parse_tensor_spec(text)
    except (_core.Error, builtins.TypeError) as error:
        raise UsageError(f"{option}: {error if isinstance(error, _core.Error) else 'the spec is no text in UTF-8'}") from None


def _target(name):
    try:
        return _core.find_target(name or "cpu")
    except (_core.UnsupportedError, _core.TypeError) as error:
        raise UsageError(f"--target: {error}") from None


def run_claims(options):
    from fulmen._claims import claims

    handles = _resolved(options.executors)
    required = options.require
    if required is not None:
        known = [e.name for e in (handles or _core.default_executors())]
        if required not in known:
            raise UsageError(f"--require: there is no executor '{required}' in the list; it has {', '.join(known)}")
    if handles == []:
        raise UsageError("--executors: the list is empty; `fulmen executors` names those there are")
    _refuse_other_options(options)
    common = dict(target=_target(options.target), training=options.training, executors=handles, deterministic=options.deterministic)
    if options.op == "sdpa":
        arguments = {name: _spec(getattr(options, name), f"--{name}") for name in ("q", "k", "v")}
        for name, value in arguments.items():
            if value is None:
                raise UsageError(f"sdpa needs --{name} SPEC")
        window = None
        if options.window is not None:
            try:
                left, right = (int(part) for part in options.window.split(","))
            except ValueError:
                raise UsageError(f"--window: '{options.window}' is not LEFT,RIGHT") from None
            window = (left, right)
        result = claims(
            "sdpa", **arguments, attn_mask=_spec(options.mask, "--mask"), is_causal=options.causal, dropout_p=options.dropout,
            scale=options.scale, enable_gqa=options.gqa, window=window, softcap=options.softcap,
            causal_corner="lower_right" if options.lower_right else "upper_left", **common,
        )
    else:
        if options.op not in {entry["name"] for entry in _core.ops()}:
            raise UsageError(f"op '{options.op}' is not in the catalogue")
        attributes = {}
        for item in options.attr:
            name, found, value = item.partition("=")
            if not found:
                raise UsageError(f"--attr: '{item}' is not NAME=VALUE")
            try:
                attributes[name] = json.loads(value)
            except json.JSONDecodeError:
                attributes[name] = value
        wanted = next(entry["operands"] for entry in _core.ops() if entry["name"] == options.op)
        if len(options.input) > len(wanted) and not any(need == "variadic" for _, need in wanted):
            raise UsageError(f"--input: {options.op} takes {len(wanted)} operands ({', '.join(name for name, _ in wanted)}), {len(options.input)} are given")
        result = claims(options.op, *[_spec(text, "--input") for text in options.input], **attributes, **common)
    print(result.to_json() if options.json else result)
    if required is not None and not result[required].claimed:
        answer = result[required]
        print(f"fulmen claims: {required} refuses: {answer.reason} [{answer.code}]", file=sys.stderr)
        return 1
    return 0


def _refuse_other_options(options):
    """Options of sdpa for another op, and the other way round, would be left out of the question in silence."""
    of_sdpa = {"--q": options.q, "--k": options.k, "--v": options.v, "--mask": options.mask, "--causal": options.causal, "--dropout": options.dropout,
               "--scale": options.scale, "--gqa": options.gqa, "--window": options.window, "--lower-right": options.lower_right, "--softcap": options.softcap}
    of_others = {"--input": options.input, "--attr": options.attr}
    for name, value in (of_others if options.op == "sdpa" else of_sdpa).items():
        if value not in (None, False, 0.0, []):
            raise UsageError(f"{name} is for {'ops other than sdpa' if options.op == 'sdpa' else 'sdpa'}; the op is {options.op}")


def load_function(text):
    """The function that "path/file.py:function" names."""
    path, colon, name = text.rpartition(":")
    if not colon:
        raise UsageError(f"'{text}' is not FILE.py:FUNCTION")
    if not os.path.exists(path):
        raise UsageError(f"there is no file '{path}'")
    spec = importlib.util.spec_from_file_location("fulmen_explained", path)
    if spec is None or not os.path.isfile(path):
        raise UsageError(f"'{path}' is no Python file; one that ends in .py is needed")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling look the module up
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise UsageError(f"'{path}' is no Python: {error.msg} (line {error.lineno})") from None
    except SystemExit as error:
        raise UsageError(f"'{path}' ends the process when it is imported (SystemExit: {error})") from None
    found = getattr(module, name, None)
    if not callable(found):
        raise UsageError(f"'{path}' has no function '{name}'" + ("" if found is None else f"; {name} is of type {type(found).__name__}"))
    return found


def run_explain(options):
    from fulmen._explain import explain

    handles = _resolved(options.executors)
    function = load_function(options.what)
    try:
        inspect.signature(function).bind()
    except builtins.TypeError as error:
        raise UsageError(f"{options.what} is called without arguments: {error}") from None
    except ValueError:  # it has no signature to read
        pass
    made = function()
    if not (isinstance(made, tuple) and len(made) == 2):
        raise UsageError(f"{options.what} returned {type(made).__name__}; (module, inputs) is needed")
    module, inputs = made
    logging.getLogger("torch").setLevel(logging.CRITICAL)  # it logs a traceback of each error that it raises too
    if isinstance(inputs, dict):
        explanation = explain(module, _executors=handles, **inputs)
    else:
        explanation = explain(module, *(inputs if isinstance(inputs, (tuple, list)) else (inputs,)), _executors=handles)
    if options.html:
        explanation.save_html(options.html)
    if options.stage:
        if options.stage not in explanation.traces:
            raise UsageError(f"--stage: there is no stage '{options.stage}'; stages: {', '.join(explanation.traces)}")
        print(explanation.traces[options.stage])
    elif options.json:
        print(explanation.to_json())
    else:
        print(explanation)
    return 0


def run_trace(options):
    try:
        if options.file == "-":
            text = sys.stdin.read()
        else:
            with open(options.file, encoding="utf-8") as file:
                text = file.read()
    except UnicodeDecodeError:
        raise UsageError(f"{options.file} is no text file") from None
    except FileNotFoundError:
        raise UsageError(f"there is no file '{options.file}'") from None
    if options.repeats < 1:
        raise UsageError("--repeats: at least 1 is needed")
    trace = _core.parse_trace(text)
    result = _core.replay(trace, _resolved(options.executors), options.seed, options.repeats, options.check)
    times = sorted(result["ms"])
    median = times[len(times) // 2]
    worst = max(result.get("relative_difference", [0.0]), default=0.0)
    failed = not worst <= 0.01
    if options.json:
        print(json.dumps(_finite({"trace": trace.name, "nodes": trace.node_count, "median_ms": median, **result}), allow_nan=False))
    else:
        print(f"{trace.name}: {trace.node_count} nodes, {len(result['instructions'])} kernels{', forward and backward' if result['training'] else ''}, {median:.3f} ms")
        for executor, text in result["instructions"]:
            print(f"  {executor:<10} {text.splitlines()[0]}")
        for output in result["outputs"]:
            print(f"  {output['name']} {output['type']}: mean {output['mean']:.6g}, largest {output['largest']:.6g}, {output['nan_count']} NaN")
        if options.check:
            print(f"  largest difference from the reference: {worst:.3g} of its largest value")
    if failed:
        print(f"fulmen run: the result differs from the reference's by {worst:.3g} of its largest value", file=sys.stderr)
    return 1 if failed else 0


def _finite(value):
    """The same, with null for infinities and NaN, which JSON doesn't have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def run_bench(options):
    from fulmen._bench import bench, check

    if options.repeats is not None and options.repeats < 1:
        raise UsageError("--repeats: at least 1 is needed")
    try:
        check(options.what, _names(options.peers), _names(options.dtype))
    except ValueError as error:
        raise UsageError(str(error)) from None
    result = bench(options.what, device=options.device, peers=_names(options.peers), only=options.only, repeats=options.repeats, dtypes=_names(options.dtype), progress=not options.json)
    print(json.dumps(result.to_dict()) if options.json else result)
    return 0


def run_targets(options):
    if options.save:
        if len(options.save) > 2:
            raise UsageError(f"--save: a name and a file are needed, {len(options.save)} words are given")
        *names, path = options.save
        name = names[0] if names else "cuda"
        _core.save_target(_target(name), path)
        print(json.dumps({"saved": path}) if options.json else f"wrote {path}")
        return 0
    rows = [
        {
            "name": t.name,
            "kind": t.kind,
            "device": t.device_name,
            "compute_capability": t.compute_capability,
            "described": t.described,
            "derived": t.derived,
        }
        for t in _core.known_targets()
    ]
    if options.json:
        print(json.dumps({"targets": rows}))
        return 0
    for row in rows:
        note = "here" if not row["described"] else ("described, derived from another device: likely, not proven" if row["derived"] else "described")
        print(f"{row['name']:<10} {row['device']:<28} {note}")
    return 0


def run_executors(options):
    rows = [
        {"name": e.name, "available": e.available, "reason": e.unavailable_reason, "version": e.version, "doc": e.doc}
        for e in _core.default_executors()
    ]
    if options.json:
        print(json.dumps({"executors": rows}))
        return 0
    for row in rows:
        state = "available" if row["available"] else f"not available: {row['reason']}"
        print(f"{row['name']:<10} {row['version']:<12} {state}\n{'':<11}{row['doc']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
