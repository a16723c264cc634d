"""Runs in the sandbox: executes a program, then evaluates tests on what it defines. See rewards/code_execution.py.

On standard input: {"word", "program", "setup", "cases": [{"code", "is_expression"}]}. On the result pipe a line per case
that raised nothing: [word, index, the expression's value as Python writes it]. What a value should be is not told here.
"""

import json
import os
import sys
import traceback
import types


def main() -> None:
    task = json.load(sys.stdin)
    result = os.fdopen(int(os.environ.pop("RESULT_FD")), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    module = sys.modules["program"] = types.ModuleType("program")  # where classes look for their home
    try:
        exec(compile(task["setup"], "setup.py", "exec"), module.__dict__)
        exec(compile(task["program"], "program.py", "exec"), module.__dict__)
    except BaseException:  # noqa: BLE001 the program may raise anything
        traceback.print_exc()
        return
    for index, case in enumerate(task["cases"]):
        try:
            code = compile(case["code"], f"test {index}", "eval" if case["is_expression"] else "exec")
            value = eval(code, module.__dict__)
            if hasattr(value, "tolist"):  # of numpy
                value = value.tolist()
            text = repr(value)
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            continue
        result.write(json.dumps([task["word"], index, text]) + "\n")
        result.flush()


if __name__ == "__main__":
    try:
        main()
    finally:
        sys.stderr.flush()
        os._exit(0)
