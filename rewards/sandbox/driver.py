"""In the sandbox, execute a program and then evaluate tests on what it defines. See rewards/code_execution.py.

Standard input holds {"word", "program", "setup", "cases": [{"code", "is_expression"}]}. For each case that raises
nothing, the result pipe gets a line [word, index, the expression's value as Python writes it]. The expected values stay
outside.
"""

import json
import os
import sys
import traceback
import types


def main() -> None:
    task = json.load(sys.stdin)
    result = os.fdopen(int(os.environ.pop("RESULT_FD")), "w")
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 0)
    os.dup2(devnull, 1)
    module = sys.modules["program"] = types.ModuleType("program")  # classes look their module up there
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
            if hasattr(value, "tolist"):  # a numpy array or number
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
