"""Run one command within limits and, if configured, namespaces: `python -I -S jail.py <settings fd> <status fd>`.

rewards/sandbox/run.py starts it and makes the settings. It uses the standard library only, because it starts with every
program.

With namespaces, the command sees a file system made of the settings' `binds`, read-only, and an empty /tmp in memory.
It sees no process but its own, no network and none of our environment variables. It runs as an unprivileged user that
cannot become another one. When its first process ends, its children, mounts and /tmp go too. This needs Linux 5.14
(which counts processes per user namespace), and a kernel and container that let this user make user namespaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import struct
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NoReturn

# These constants are from linux/sched.h, sys/mount.h, linux/mount.h and linux/prctl.h.
NEW_NS, NEW_UTS, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
MNT_DETACH, AT_FDCWD, AT_RECURSIVE, SYS_MOUNT_SETATTR = 0x2, -100, 0x8000, 442
ATTR_READ_ONLY, ATTR_NOSUID = 0x1, 0x2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
OLDEST_KERNEL = (5, 14)

INSIDE_ID = 1000  # user and group of the command, as it sees itself
NOBODY_ID = 65534  # the same, as the machine sees it when we are root; root's processes would not be counted
NEW_ROOT = "/sys"  # any existing folder without anything the command needs; only this process sees it covered
MOST_FILES = 4096  # an empty file takes memory of the kernel, which neither `size` nor a limit counts
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")

# A judged program has no use for these system calls. They give memory that is not counted, other processes' memory,
# keys, mounts, and parts of the kernel that had security holes. The numbers are for the machines of MACHINES, in its
# order.
DENIED = {
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "mount_setattr": (442, 442), "unshare": (272, 97),
    "setns": (308, 268),
    "open_by_handle_at": (304, 265), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "init_module": (175, 105), "finit_module": (313, 273), "kexec_load": (246, 104),
}  # fmt: skip
SOCKET = (41, 198)
FAMILIES = (
    1,
    2,
    10,
)  # allowed socket families: unix and internet. Others, as to a virtual machine's host, pass namespaces
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # by uname: number in seccomp, column in DENIED
PR_SET_SECCOMP, SECCOMP_MODE_FILTER, SECCOMP_ALLOW, SECCOMP_REFUSE = 22, 2, 0x7FFF0000, 0x00050000 | 1  # EPERM
BPF_LOAD, BPF_IF_EQUAL, BPF_IF_AT_LEAST, BPF_RETURN = 0x20, 0x15, 0x35, 0x06

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    with os.fdopen(int(sys.argv[1])) as file:
        settings = json.load(file)
    status = int(sys.argv[2])
    os.set_inheritable(status, False)
    os.umask(0o022)
    try:
        code = (_isolated if settings["isolation"] == "namespaces" else _limited)(settings, status)
    except OSError as error:
        _report(status, error=f"{error.strerror or error}")
        sys.exit(1)
    _report(status, exit=code)


def _report(status: int, **event: Any) -> None:
    """Tell run.py that the command has started, how it ended, or what failed. The first line of a kind counts."""
    os.write(status, (json.dumps(event) + "\n").encode())


def _isolated(settings: dict[str, Any], status: int) -> int:
    _check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL), "die with the scoring process")
    if os.getppid() != settings["parent"]:
        sys.exit(1)
    kernel = tuple(int(n) for n in os.uname().release.split("-")[0].split(".")[:2])
    if kernel < OLDEST_KERNEL:
        raise OSError(f"Linux {os.uname().release} is too old; {'.'.join(map(str, OLDEST_KERNEL))} is needed")
    is_root = _enter_namespaces()

    def init() -> int:
        _check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL), "die with the jail")
        os.setsid()  # so that a signal to its process group does not reach ours
        _check(libc.prctl(PR_SET_DUMPABLE, 0), "hide memory")
        _write("/proc/sys/user/max_user_namespaces", "0")
        _make_root(settings)
        child = _forked(status, lambda: _execute(settings, status, as_other=is_root))
        while True:
            pid, wait_status = os.wait()  # process 1 also inherits what the command leaves behind
            if pid == child:
                return os.waitstatus_to_exitcode(wait_status)

    def init_and_report() -> NoReturn:
        _report(status, exit=init())
        os._exit(0)

    pid = _forked(status, init_and_report)
    # When process 1 is killed, the kernel ends all others of its namespace before it lets process 1 go.
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGKILL))
    return _waited(pid)


def _enter_namespaces() -> bool:
    """Make the namespaces and map users; return whether we are root, who is then mapped beside the command's user."""
    with open("/proc/self/uid_map") as file:
        is_root = os.geteuid() == 0 and file.read().split() == ["0", "0", "4294967295"]
    uid, gid, pid = os.geteuid(), os.getegid(), os.getpid()
    flags = NEW_USER | NEW_NS | NEW_PID | NEW_NET | NEW_IPC | NEW_UTS
    if not is_root:
        _check(libc.unshare(flags), "make namespaces (unshare)")
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{INSIDE_ID} {uid} 1")
        _write("/proc/self/gid_map", f"{INSIDE_ID} {gid} 1")
        return False
    # Two users can be mapped only from outside the namespace, so a child that stays outside does it.
    read_end, write_end = os.pipe()
    mapper = os.fork()
    if mapper == 0:
        try:
            os.close(write_end)
            if os.read(read_end, 1):
                for name in ("uid_map", "gid_map"):
                    _write(f"/proc/{pid}/{name}", f"0 0 1\n{INSIDE_ID} {NOBODY_ID} 1\n")
            os._exit(0)
        finally:
            os._exit(1)
    _check(libc.unshare(flags), "make namespaces (unshare)")
    os.write(write_end, b"x")
    if _waited(mapper) != 0:
        raise OSError("mapping users into the namespace is not permitted")
    return True


def _make_root(settings: dict[str, Any]) -> None:
    """Replace the root folder by `binds`, devices and an empty /tmp; then write the settings' files there."""
    _mount("none", "/", "", MS_REC | MS_PRIVATE)
    _mount("tmpfs", NEW_ROOT, "tmpfs", MS_NOSUID | MS_NODEV, f"size=1m,nr_inodes={MOST_FILES},mode=755")
    os.mkdir(f"{NEW_ROOT}/tmp")  # before the binds, because Python may be installed below the machine's /tmp
    options = f"size={settings['scratch_bytes']},nr_inodes={MOST_FILES},mode=1777"
    _mount("tmpfs", f"{NEW_ROOT}/tmp", "tmpfs", MS_NOSUID | MS_NODEV, options)
    for path in (*settings["binds"], *DEVICES):
        target = NEW_ROOT + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), target)
            continue
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            open(target, "w").close()
        _mount(path, target, "", MS_BIND | MS_REC)
    _set_mounts(NEW_ROOT, AT_RECURSIVE, add=ATTR_READ_ONLY | ATTR_NOSUID)
    _set_mounts(f"{NEW_ROOT}/tmp", 0, remove=ATTR_READ_ONLY)
    os.chdir(NEW_ROOT)
    _check(libc.pivot_root(b".", b"."), "change the root folder")
    _check(libc.umount2(b".", MNT_DETACH), "leave the old root folder")
    os.chdir("/tmp")
    _write_files(settings["files"])


def _limited(settings: dict[str, Any], status: int) -> int:
    """Run the command with limits and a temporary folder only, and kill those of its processes that can be found."""
    ending = []

    def end(*_: Any) -> None:
        ending.append(True)
        raise OSError("ended")

    signal.signal(signal.SIGTERM, end)
    os.setsid()  # so that we survive the scoring process's group and can clean up
    _check(libc.prctl(PR_SET_CHILD_SUBREAPER, 1), "inherit what the command leaves behind")
    _check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM), "die with the scoring process")
    if os.getppid() != settings["parent"]:
        sys.exit(1)
    with tempfile.TemporaryDirectory(prefix="feynrl-code-", ignore_cleanup_errors=True) as folder:
        os.chdir(folder)
        _write_files(settings["files"])
        try:
            return _waited(_forked(status, lambda: _execute(settings, status, as_other=False)))
        except OSError:
            if not ending:
                raise
            return -signal.SIGKILL
        finally:
            _kill_children()
            os.chdir("/")
            shutil.rmtree(folder, ignore_errors=True)


def _kill_children() -> None:
    children = f"/proc/self/task/{os.getpid()}/children"
    while True:
        with open(children) as file:
            pids = [int(pid) for pid in file.read().split()]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def _execute(settings: dict[str, Any], status: int, as_other: bool) -> NoReturn:
    """Replace this process by the command, within the limits."""
    os.setsid()
    if as_other:
        os.setgroups([])
        os.setresgid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
        os.setresuid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "give up privileges")
    if settings["isolation"] == "namespaces":
        _refuse_calls()
    for name, limit in settings["limits"].items():
        # A lower limit that is already in force stays.
        hard = resource.getrlimit(getattr(resource, name))[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(getattr(resource, name), (limit, limit))
    _report(status, started=True)
    os.execve(settings["command"][0], settings["command"], settings["environment"])


def _refuse_calls() -> None:
    """Let the kernel refuse DENIED calls, and sockets of other families than FAMILIES, from now on."""
    machine = os.uname().machine
    if machine not in MACHINES:
        raise OSError(f"no list of system calls for a {machine}; there are: {', '.join(MACHINES)}")
    architecture, column = MACHINES[machine]
    # A step is (operation, steps to skip when true, when false, operand). The data hold the call's number at 0, the
    # architecture at 4 and the low half of the first argument at 16.
    steps = [(BPF_LOAD, 0, 0, 4), (BPF_IF_EQUAL, 1, 0, architecture), (BPF_RETURN, 0, 0, SECCOMP_REFUSE)]
    steps += [(BPF_LOAD, 0, 0, 0)]
    steps += [(BPF_IF_AT_LEAST, 0, 1, 0x40000000), (BPF_RETURN, 0, 0, SECCOMP_REFUSE)]  # a second set of numbers (x32)
    for numbers in DENIED.values():
        steps += [(BPF_IF_EQUAL, 0, 1, numbers[column]), (BPF_RETURN, 0, 0, SECCOMP_REFUSE)]
    steps += [(BPF_IF_EQUAL, 0, 2 + len(FAMILIES), SOCKET[column]), (BPF_LOAD, 0, 0, 16)]
    steps += [(BPF_IF_EQUAL, len(FAMILIES) - i, 0, family) for i, family in enumerate(FAMILIES)]
    steps += [(BPF_RETURN, 0, 0, SECCOMP_REFUSE), (BPF_RETURN, 0, 0, SECCOMP_ALLOW)]
    code = b"".join(struct.pack("=HBBI", *step) for step in steps)
    text = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(steps), ctypes.addressof(text))
    _check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0), "filter system calls")


def _forked(status: int, run: Callable[[], NoReturn]) -> int:
    """Run a function that does not return in a child process, and report an error in it; return the child's id."""
    pid = os.fork()
    if pid == 0:
        try:
            run()
        except BaseException as error:  # noqa: BLE001 the child must never return into its parent's code
            _report(status, error=str(getattr(error, "strerror", None) or error))
        finally:
            os._exit(125)
    return pid


def _waited(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _write_files(files: dict[str, str]) -> None:
    for name, text in files.items():
        with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    done = libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _check(done, f"mount {source} on {target.removeprefix(NEW_ROOT) or '/'}")


def _set_mounts(path: str, flags: int, add: int = 0, remove: int = 0) -> None:
    attributes = (ctypes.c_uint64 * 4)(add, remove, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    _check(libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, attributes, size), "mount read-only")


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w") as file:
            file.write(text)
    except OSError as error:
        raise OSError(f"writing {path}: {error.strerror}") from error


def _check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(f"it may not {what}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()
